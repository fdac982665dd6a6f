"""`Receipt`: what a conversion replaced by what, what it left alone, and why; ``str(receipt)`` is a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fewbits.words import counted, size


@dataclass(frozen=True)
class Change:
    """One module that was replaced.

    Attributes:
        name: its full name.
        before: class of the module that was there.
        after: class of the module that is there now, with its formats.
        bytes_before: bytes of its parameters before.
        bytes_after: bytes of its parameters after.
    """

    name: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Left:
    """One module that was left alone.

    Attributes:
        name: its full name.
        reason: why.
        intended: False if spec and model disagree about it; ``strict=True`` refuses those.
    """

    name: str
    reason: str
    intended: bool = True


@dataclass
class Receipt:
    """What one call did to one model.

    Attributes:
        title: what was done, such as "llama, recipe qlora_nf4"; empty where no module can be replaced and
            the notes say it all.
        changes: the modules that were replaced.
        left: the modules that were not.
        notes: sentences worth knowing.
        further: what other calls did to the same model since, printed below.
    """

    title: str
    changes: list[Change] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    further: list[Receipt] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced modules' parameters, before."""
        return sum(change.bytes_before for change in self.changes)

    @property
    def bytes_after(self) -> int:
        """Bytes of the replacing modules' parameters."""
        return sum(change.bytes_after for change in self.changes)

    @property
    def mismatches(self) -> list[Left]:
        """What spec and model disagree about."""
        return [left for left in self.left if not left.intended]

    def __str__(self) -> str:
        head = [self._headline()] if self.title or self.changes else []
        own = [*head, *self._change_lines(), *self._left_lines(), *self.notes]
        return "\n".join([*own, *map(str, self.further)])

    def _headline(self) -> str:
        verb = "changed" if self.changes and all(map(_stays, self.changes)) else "replaced"
        sizes = _sizes(self.changes)
        return f"{self.title}: {counted(len(self.changes), 'module')} {verb}{sizes and ', ' + sizes}"

    def _change_lines(self) -> list[str]:
        groups: dict[tuple[str, str, str], list[Change]] = {}
        for change in self.changes:
            groups.setdefault((_pattern(change.name), change.before, change.after), []).append(change)
        rows = [
            (
                pattern,
                f"x{len(group)}",
                after if _stays(group[0]) else f"{before} -> {after}",
                _sizes(group),
            )
            for (pattern, before, after), group in groups.items()
        ]
        return _align(rows)

    def _left_lines(self) -> list[str]:
        groups: dict[tuple[str, str], int] = {}
        for left in self.left:
            key = (_pattern(left.name), left.reason)
            groups[key] = groups.get(key, 0) + 1
        rows = [(pattern, f"x{n}", reason) for (pattern, reason), n in groups.items()]
        return ["left alone:", *_align(rows)] if rows else []


def _stays(change: Change) -> bool:
    """Whether it is the same module, which computes otherwise now."""
    return change.after.startswith(f"{change.before}, ")


def _sizes(changes: Sequence[Change]) -> str:
    """Bytes before and after, or nothing where no parameter was touched."""
    before, after = sum(c.bytes_before for c in changes), sum(c.bytes_after for c in changes)
    return f"{size(before)} -> {size(after)}" if before or after else ""


def _pattern(name: str) -> str:
    """``name`` with a star for each number, so that all layers are one line."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
