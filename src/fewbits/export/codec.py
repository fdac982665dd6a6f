"""What every way of writing packed linears into a folder of safetensors has to answer.

A codec is one number format in one library's layout, over one model. It turns a linear's weight into that
library's tensors, reads them back, and says what config.json has to tell. Where the model already computes in
that format, the codes go over as they are; nothing is rounded a second time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint
from fewbits.formats.base import Format, Packed

# Linears that an engine runs as one, which want one scale for the whole of them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Linear:
    """One linear that is to be written.

    Attributes:
        name: its full name.
        weight: (N, K) float32, merged.
        packed: the weight as the model computes with it, if it is packed or will be; else None.
        absmax: the largest magnitude among the linears that run as one with it, itself among them.
        alike: the packed weights of the others among those; None if one of them is not packed.
        input_absmax: the largest magnitude of its inputs on calibration text; None without such.
        importance: (K,), the mean square of each column of those inputs; None without such.
    """

    name: str
    weight: Tensor
    packed: Packed | None = None
    absmax: float = 0.0
    alike: tuple[Packed, ...] | None = ()
    input_absmax: float | None = None
    importance: Tensor | None = None


@dataclass(frozen=True)
class Model:
    """What a codec asks about the model that it is for.

    Attributes:
        shapes: (N, K) of every linear that is written, by name.
        dtype: of what is not packed.
        formats: those that its linears have already or will have, each once.
        packed: the linears that are packed, by name.
    """

    shapes: Mapping[str, tuple[int, int]]
    dtype: torch.dtype
    formats: Collection[Format] = ()
    packed: Mapping[str, Packed] = field(default_factory=dict)


class Codec(ABC):
    """One number format in one library's layout.

    Attributes:
        label: both, for a person.
        kind: the format alone, for counts.
        reader: who reads back, with the version.
        parts: the tensors that a linear may have, by their names after the linear's.
        wants_inputs: it needs `Linear.input_absmax`.
        takes_inputs: it rounds better with `Linear.importance`.
        shares_scale: linears that run as one need one scale, so `Linear.absmax` and `Linear.alike` are read.
    """

    label: str
    kind: str
    reader: str
    parts: tuple[str, ...]
    wants_inputs: bool = False
    takes_inputs: bool = False
    shares_scale: bool = False

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""

    @abstractmethod
    def keeps(self, linear: Linear) -> bool:
        """True if the codes that the linear has already can be written as they are."""

    @abstractmethod
    def write(self, linear: Linear) -> dict[str, Tensor]:
        """The linear's tensors, in the codec's shapes (any shape), by their names after the linear's.

        Raises:
            BadCheckpoint: the weight is not finite.
            Unsupported: it has no such form.
        """

    @abstractmethod
    def read(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight (N, K) float32 that the library decodes from the linear's tensors."""

    def metadata(self, names: Collection[str]) -> dict[str, str]:
        """What a file with these tensors has in its header, which the format of safetensors allows."""
        return {"format": "pt"}


def run_as_one(name: str) -> tuple[str, ...]:
    """The linears that engines run as one with this one, itself among them."""
    stem, _, leaf = name.rpartition(".")
    together = next((group for group in _TOGETHER if leaf in group), (leaf,))
    return tuple(f"{stem}.{one}" for one in together)


def check_weight(linear: Linear) -> None:
    """Refuse a weight that is not finite.

    Raises:
        BadCheckpoint: it holds a NaN or an infinity.
    """
    if not bool(linear.weight.isfinite().all()):
        raise BadCheckpoint(
            f"{linear.name}.weight holds a NaN or an infinity; nothing was written. Go back to an earlier "
            "checkpoint of the run, or lower its learning rate."
        )
