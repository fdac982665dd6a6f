"""Number formats: what a number is. Pure torch, and the definition of everything else in the library.

`base.py` has `Format`, how a tensor is rounded and stored, and `Packed`, the stored tensor; `codebook.py` has
NF4 and FP4, `integer.py` INT2 to INT8, `float8.py`, `microscaling.py` and `nvfp4.py` the floating-point ones;
`block_format.py` has what formats with a scale for each block share;
`contract.py` is what a format tells kernels, layers and exports of itself. Imports nothing of fewbits.
Begin with `base.py`, then `codebook.py`.

To add a format: write its file, whose ``__all__`` names its values (or a `Family` of them), and import it
with one more line below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbits.errors import BadInput
from fewbits.formats import base
from fewbits.formats.base import Family as Family
from fewbits.formats.base import Format as Format
from fewbits.formats.base import Packed as Packed
from fewbits.formats.base import PartSpec as PartSpec
from fewbits.formats.codebook import *  # noqa: F403
from fewbits.formats.contract import Coding as Coding
from fewbits.formats.contract import Contract as Contract
from fewbits.formats.float8 import *  # noqa: F403
from fewbits.formats.gguf_blocks import *  # noqa: F403
from fewbits.formats.integer import *  # noqa: F403
from fewbits.formats.integer_indexed import *  # noqa: F403
from fewbits.formats.integer_offsets import *  # noqa: F403
from fewbits.formats.integer_widths import *  # noqa: F403
from fewbits.formats.microscaling import *  # noqa: F403
from fewbits.formats.nvfp4 import *  # noqa: F403
from fewbits.formats.stochastic import *  # noqa: F403
from fewbits.formats.ternary import *  # noqa: F403
from fewbits.formats.trellis import *  # noqa: F403

FORMATS: dict[str, Format] = {}
ALIKE: set[str] = set()
for _found in list(vars().values()):
    if isinstance(_found, Format):
        FORMATS[_found.name] = _found
    elif isinstance(_found, Family):
        FORMATS.update(_found)
        ALIKE |= _found.keys() - _found.typical
"""Every format by name, and the names of those for which a `Family` has a typical one."""


def get_format(format: Format | str | Mapping[str, Any]) -> Format:
    """A format from its name ("nf4"), from plain data ({"name": "nf4", "block": 128}), or as it is.

    Raises:
        BadInput: unknown name or field; the message lists the known ones.
    """
    if isinstance(format, Format):
        return format
    try:
        return base.format_from_config(format, FORMATS)
    except (ValueError, TypeError) as error:
        raise BadInput(str(error)) from error


def format_to_config(format: Format) -> str | dict[str, Any]:
    """A format as plain data for `get_format`: its name, or a mapping with the changed fields."""
    return base.format_to_config(format, FORMATS)


def format_in_words(format: Format) -> str:
    """A format's name with the fields that differ from the named value, such as ``nf4 with block 32``."""
    return base.format_in_words(format, FORMATS)
