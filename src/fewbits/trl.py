"""TRL, for scripts that were written for a patched one; see `fewbits.front.trl_words`.

Importing this loads neither torch nor TRL.
"""

from __future__ import annotations

from typing import Any

from fewbits.front import trl_words


def __getattr__(name: str) -> Any:
    return getattr(trl_words, name)
