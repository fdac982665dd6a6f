"""What a check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One fact about this machine or installation.

    Attributes:
        name: what was looked at, in a word or two.
        status: "problem" does not work, "warning" may not, "note" is worth knowing, "ok" needs no reading.
        what: what was found.
        why: why it matters; empty where nothing follows.
        fix: what to do; empty where there is nothing to do.
    """

    name: str
    status: Status
    what: str
    why: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """The fields, for JSON."""
        return asdict(self)
