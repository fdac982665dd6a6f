"""One record on a model: everything that fewbits has put into it, each part under its class.

A part is what one call left: `Conversion`, `UsedAttention`, `Fusion`, a `StochasticConfig`, its attention's
state, `TensorParallel`, and so on. Each floor defines the class of its part and asks for it with `part_of`,
so that this file needs to know none of them. The record is an attribute of the innermost model and travels
with it through ``copy.deepcopy``, pickle and other processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fewbits.host.receipt import Receipt
from fewbits.host.unwrap import unwrap

if TYPE_CHECKING:
    from torch import nn

RECORD = "fewbits_record"
NOTES = "fewbits_notes"  # the list of notes itself, under the name that users read
Part = TypeVar("Part")


@dataclass
class Record:
    """What fewbits has put into one model.

    Attributes:
        parts: one of each class, in the order in which they came.
        notes: what loading and adapting had to say, such as options that choose nothing.
    """

    parts: dict[type, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def record_of(model: nn.Module) -> Record | None:
    """The record of this model, through every wrapper; None if fewbits has put nothing into it."""
    record = getattr(unwrap(model), "__dict__", {}).get(RECORD)
    return record if isinstance(record, Record) else None


def part_of(model: nn.Module, kind: type[Part]) -> Part | None:
    """What a call left on this model, by the part's class; None without it."""
    record = record_of(model)
    return None if record is None else record.parts.get(kind)


def put_part(model: nn.Module, part: object) -> None:
    """Leave a part on this model; one of its class that is there is replaced."""
    _made_record(model).parts[type(part)] = part


def take_part(model: nn.Module, kind: type[Part]) -> Part | None:
    """Take a part off this model and give it; None if there is none."""
    record = record_of(model)
    return None if record is None else record.parts.pop(kind, None)


def receipts_of(model: nn.Module) -> dict[type, Receipt]:
    """The receipts of the calls whose parts are on this model, by the part's class, in their order."""
    record = record_of(model)
    receipts = {} if record is None else {k: getattr(p, "receipt", None) for k, p in record.parts.items()}
    return {kind: receipt for kind, receipt in receipts.items() if isinstance(receipt, Receipt)}


def notes_of(model: nn.Module) -> list[str]:
    """The notes of this model, in the order in which they came; empty without any."""
    record = record_of(model)
    return [] if record is None else record.notes


def add_notes(model: nn.Module, notes: Iterable[str]) -> None:
    """Add sentences to this model's notes; users read them as ``model.fewbits_notes``."""
    record = _made_record(model)
    record.notes.extend(notes)
    object.__setattr__(unwrap(model), NOTES, record.notes)


def _made_record(model: nn.Module) -> Record:
    record = record_of(model)
    if record is None:
        record = Record()
        # Past nn.Module's own, which would look for tensors and modules in it.
        object.__setattr__(unwrap(model), RECORD, record)
    return record
