"""What every number format has in common: `Format`, the value, and `Packed`, a tensor written in it.

A format is a frozen value: equal fields mean equal numbers, on any machine. It turns a real tensor into a
`Packed` (`quantize`) and back (`dequantize`), and says beforehand which tensors that takes (`layout`), so
that a module can be built empty and filled from a checkpoint.

Terms used throughout the library:

* code: the small integer that is stored; value: the real number it stands for.
* scale: the number one multiplies by to come back, ``x ~ value(code) * scale``.
* block: values that share a scale.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.contract import Contract
from fewbits.formats.scale_search import ScaleSearch


class PartSpec(NamedTuple):
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """A number format: a frozen value.

    Attributes:
        name: the registry's name; with no field changed it resolves to this very value.
        text: the value as JSON for `format_from_config`, which is how an op takes a format. It is made with
            the value: torch 2.11's compiler reads attributes but calls no function with a frozen value.
        contract: what the value promises and how kernels read it, made with the value too.
    """

    name: str
    text: ClassVar[str] = ""
    contract: ClassVar[Contract]

    def __post_init__(self) -> None:
        wrong = self.problem()
        if wrong is not None:
            raise BadInput(f"the format {self.name!r} cannot be: {wrong}.")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        object.__setattr__(self, "text", json.dumps(fields))
        object.__setattr__(self, "contract", self.promise())

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled value has its fields from the file, and its contract from this version."""
        self.__dict__.update(state)
        self.__post_init__()

    def problem(self) -> str | None:
        """What is wrong with the fields, in words that follow a colon; None if nothing is."""
        block = getattr(self, "block", None)
        return None if block is None else block_problem(block)

    @abstractmethod
    def promise(self) -> Contract:
        """The value's `contract`; everything that is not in this format's own file goes by it."""

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The tensors that hold a tensor of ``shape``, in order; ``"codes"`` is always among them."""

    @abstractmethod
    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        """Write ``x`` (any shape, floating point) in this format.

        Args:
            x: the tensor; it may be non-contiguous and empty. A NaN or infinity is never turned into a
                plausible
                number: its whole block decodes to NaN.
            seed: None rounds to nearest (ties as the format says); an integer rounds stochastically, with
                random bits that depend only on (seed, position), so that every device gives the same codes.
        """

    @abstractmethod
    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, of any shape, that ``packed`` stands for, in ``dtype`` (default: as before)."""

    def fake_quantize(self, x: Tensor, *, seed: int | None = None) -> Tensor:
        """``dequantize(quantize(x))``, in x's dtype; carries no gradient of its own.

        x may have any shape that `quantize` takes; the result has x's shape.
        """
        return self.dequantize(self.quantize(x, seed=seed), x.dtype)

    def quantize_under(self, x: Tensor, absmax: float | None, *, seed: int | None = None) -> Packed:
        """`quantize` as part of a larger tensor whose largest magnitude is ``absmax``; None: of x itself.

        It differs from `quantize` for formats with a scale of the whole tensor alone.
        """
        return self.quantize(x, seed=seed)

    def quantize_for(self, x: Tensor, importance: Tensor | None, *, seed: int | None = None) -> Packed:
        """`quantize`, in which the squared error of some columns counts more.

        Args:
            x: (..., K).
            importance: (K,), not negative, such as the mean square of what each column is multiplied by.
                None: all count the same. Formats that search for no scale take no notice of it.
            seed: as for `quantize`.
        """
        return self.quantize(x, seed=seed)

    def with_plain_scales(self, packed: Packed) -> Packed | None:
        """The same numbers with scales that are not rounded themselves; None where they are not."""
        return None

    def scale_search(self, weight: Tensor) -> ScaleSearch | None:
        """What a method needs that chooses codes itself, such as GPTQ; None: it cannot use this format.

        Args:
            weight: (N, K) float32.
        """
        return None

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a tensor of ``shape`` takes in this format, scales included."""
        return sum(_numel(part.shape) * part.dtype.itemsize for part in self.layout(shape).values())

    def bits_per_value(self, shape: tuple[int, ...]) -> float:
        """Stored bits per value of a tensor of ``shape``, scales included; 0 for an empty one."""
        n = _numel(shape)
        return 8.0 * self.nbytes(shape) / n if n else 0.0


class Family(dict[str, Format]):
    """Formats of one file by name, where a name for each in the file would be a long list.

    Args:
        formats: the values.
        typical: names of those that stand for the others, which differ little: every test run takes them,
            and the slow one takes all. None: all.
    """

    def __init__(self, formats: Iterable[Format], *, typical: Iterable[str] | None = None) -> None:
        super().__init__((format.name, format) for format in formats)
        self.typical = frozenset(self if typical is None else typical)


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor written in a format: plain tensors and what is needed to read them.

    Attributes:
        format: the format.
        shape: shape of the tensor that was quantised.
        dtype: its dtype, and the default one of `dequantize`.
        parts: the stored tensors by name, as ``format.layout(shape)`` lists them.
    """

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Tensor]

    @property
    def codes(self) -> Tensor:
        """The stored codes, packed along the last axis: (..., bytes)."""
        return self.parts["codes"]

    @property
    def scales(self) -> Tensor:
        """The stored scales, (..., blocks) or flat; for double-quantised formats, their codes."""
        return self.parts["scales"]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself, of any shape, in ``dtype`` (default: `self.dtype`)."""
        return self.format.dequantize(self, dtype)

    def to(self, device: torch.device | str) -> Packed:
        """The same value on another device."""
        parts = {name: t.to(device) for name, t in self.parts.items()}
        return dataclasses.replace(self, parts=parts)


def format_to_config(format: Format, registry: Mapping[str, Format]) -> str | dict[str, Any]:
    """A format as plain data: its name, or its name with the fields that differ from the registry's value."""
    registered = registry[format.name]
    changed = {
        f.name: getattr(format, f.name)
        for f in dataclasses.fields(format)
        if getattr(format, f.name) != getattr(registered, f.name)
    }
    return {"name": format.name, **changed} if changed else format.name


def format_in_words(format: Format, registry: Mapping[str, Format]) -> str:
    """A format's name, and where it is not the registry's value what it changes: ``nf4 with block 32``."""
    config = format_to_config(format, registry) if format.name in registry else format.name
    if isinstance(config, str):
        return format.name
    told = (f"{k} {v}" if isinstance(v, int | float | str) else k for k, v in config.items() if k != "name")
    return f"{format.name} with {', '.join(told)}"


def format_from_config(config: str | Mapping[str, Any], registry: Mapping[str, Format]) -> Format:
    """The inverse of `format_to_config`.

    Raises:
        ValueError: unknown name or field; the message lists the known ones.
    """
    if not isinstance(config, (str, Mapping)):
        raise ValueError(f"a number format cannot be {config!r}; give its name, or a mapping with a name.")
    fields: dict[str, Any] = {"name": config} if isinstance(config, str) else dict(config)
    name = str(fields.pop("name", None))
    if name not in registry:
        by_lower_case = {entry.lower(): entry for entry in registry}
        begun = [entry for entry in by_lower_case if entry.startswith(name.lower())] if name else []
        near = begun[:1] or get_close_matches(name.lower(), by_lower_case, n=1)
        meant = f"did you mean {by_lower_case[near[0]]!r}? The names: " if near else "known: "
        raise ValueError(f"no number format named {name!r}; {meant}{', '.join(sorted(registry))}.")
    base = registry[name]
    unknown = set(fields) - {f.name for f in dataclasses.fields(base)}
    if unknown:
        names = ", ".join(f.name for f in dataclasses.fields(base))
        raise ValueError(f"format {name!r} has no field {', '.join(sorted(unknown))}; known: {names}.")
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    return dataclasses.replace(base, **fields) if fields else base


def block_problem(block: object) -> str | None:
    """What is wrong with (rows, columns) that are to share a scale; None if nothing is."""
    pair = isinstance(block, tuple) and len(block) == 2 and all(is_whole(size, 0) for size in block)
    if isinstance(block, tuple) and pair and (block == (0, 0) or block[0] > 0):
        return None
    return f"block is {block!r}, and it is rows and columns, such as [1, 64], or [0, 0] for the tensor"


def is_whole(value: object, least: int, most: int | None = None) -> bool:
    """Whether a value is a whole number in these bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= least and (most is None or value <= most)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
