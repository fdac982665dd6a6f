"""A tensor that holds codes and scales and behaves, to torch, like the real tensor they stand for.

The library packs weights in plain tensors; this subclass exists for one reason: a *parameter* that an
optimizer updates in place, that FSDP2 shards and a checkpoint stores, must be one tensor. Reading it gives
its dequantised value; writing to it quantises anew. Every other operation of torch sees the real tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fewbits.errors import BadInput
from fewbits.formats.base import Packed
from fewbits.te.arithmetic.layouts import codes_for_cublas, scales_for_cublas
from fewbits.te.tensors.operand import Operand, plain

aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """A tensor of codes that torch takes for a real one; see the top of this file.

    Made by `Quantizer.quantize`. Its ``dtype`` is that of the tensor it was made from.
    """

    _operand: Operand
    _quantizer: Any

    @staticmethod
    def __new__(cls, like: Tensor | _Like, operand: Operand, quantizer: Any) -> QuantizedTensor:
        """Of the shape, type and device of ``like``."""
        tensor: QuantizedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        tensor._operand, tensor._quantizer = operand, quantizer
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Class, shape and quantiser."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, quantizer={type(self._quantizer).__name__})"

    @property
    def quantizer(self) -> Any:
        """What rounds a new value; one that is put here takes over from the next write on."""
        return self._quantizer

    @quantizer.setter
    def quantizer(self, quantizer: Any) -> None:
        self._quantizer = quantizer

    def operand(self) -> Operand:
        """Rows and columns as products take them."""
        return self._operand

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The real tensor, of the same shape, in ``dtype`` (its own by default)."""
        rows = self._operand.rows
        if rows is not None:
            return plain(rows, dtype or self.dtype).reshape(self.shape)
        return plain(self._operand.columns, dtype or self.dtype).t().reshape(self.shape)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Take on the value of ``tensor``, of this shape, unless ``noop_flag`` holds something but 0.

        ``noop_flag`` is None or (1,) float32; ``tensor`` is of this tensor's shape.
        """
        if tensor.shape != self.shape:
            raise BadInput(
                f"a tensor of shape {tuple(tensor.shape)} cannot be written to one of {tuple(self.shape)}."
            )
        if noop_flag is None or not bool(noop_flag.item()):
            source = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
            with torch.no_grad():
                self._operand = _operand(source.detach().to(self.dtype), self._quantizer, self._operand)
        return self

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the rows or the columns; what is not there cannot be made from rounded values.

        Raises:
            BadInput: something is asked for that is not there.
        """
        rows, columns = self._operand.rows, self._operand.columns
        if (rowwise_usage and rows is None) or (columnwise_usage and columns is None):
            raise BadInput(
                "rows or columns that were not quantised cannot be made from rounded values: "
                "ask for both with set_usage before quantising."
            )
        self._operand = Operand(
            None if rowwise_usage is False else rows, None if columnwise_usage is False else columns
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """A tensor of the same shape with the codes and scales after ``move``, which keeps their types."""

        def packed(part: Any) -> Any:
            if isinstance(part, Packed):
                parts = {name: move(value) for name, value in part.parts.items()}
                return Packed(part.format, part.shape, part.dtype, parts)
            return None if part is None else move(part)

        columns = _by_rows_on_a_gpu(packed(self._operand.columns))
        operand = Operand(packed(self._operand.rows), columns)
        first = operand.rows if operand.rows is not None else operand.columns
        device = first.codes.device if isinstance(first, Packed) else getattr(first, "device", self.device)
        return type(self)(_Like(self.shape, self.dtype, device), operand, self._quantizer)

    def with_rows(self, rows: Packed) -> QuantizedTensor:
        """A tensor of this kind that holds other codes, by rows alone; of their shape (M, K)."""
        like = _Like(rows.shape, self.dtype, rows.codes.device)
        return type(self)(like, Operand(rows, None), self._quantizer)

    def take_codes_of(self, other: QuantizedTensor) -> None:
        """Take on the codes of a tensor of the same layout (and shape), as they are."""
        same = other.moved(lambda part: part.to(self.device, copy=True))
        self._operand = same.operand()

    def layout_of_codes(self) -> tuple[Any, ...]:
        """What two tensors must share for one to take the other's codes."""
        sides = [
            (p.format, tuple(p.shape), p.dtype) if isinstance(p, Packed) else type(p)
            for p in (self._operand.rows, self._operand.columns)
        ]
        return (type(self), self.dtype, tuple(self.shape), *sides)

    # The value before the first rounding, for an optimizer's master weights

    def keep_high_precision_init_val(self, value: Tensor) -> None:
        """Keep the value that this weight had before it was rounded.

        ``value`` is of the weight's shape.
        """
        self._high_precision_init_val: Tensor | None = value

    def get_high_precision_init_val(self) -> Tensor | None:
        """That value, of the same shape, on the CPU; None if it was not kept or has been freed."""
        return getattr(self, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Free it."""
        self._high_precision_init_val = None

    # Codes and scales by Transformer Engine's names, in its shapes; None where there are none

    def _side(self, packed: Any, lay_out: Callable[..., Tensor], columns: bool) -> Any:
        return lay_out(packed, columns=columns) if isinstance(packed, Packed) else None

    @property
    def _rowwise_data(self) -> Any:
        rows = self._operand.rows
        return rows if isinstance(rows, Tensor) else self._side(rows, codes_for_cublas, False)

    @property
    def _columnwise_data(self) -> Any:
        columns = self._operand.columns
        return columns if isinstance(columns, Tensor) else self._side(columns, codes_for_cublas, True)

    @property
    def _rowwise_scale_inv(self) -> Any:
        return self._side(self._operand.rows, scales_for_cublas, False)

    @property
    def _columnwise_scale_inv(self) -> Any:
        return self._side(self._operand.columns, scales_for_cublas, True)

    @property
    def _data(self) -> Any:
        data = self._rowwise_data
        return data.reshape(self.shape) if isinstance(data, Tensor) and data.numel() == self.numel() else data

    @property
    def _scale_inv(self) -> Any:
        return self._rowwise_scale_inv

    # As torch sees it

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation sees the real tensor; what is written to is quantised anew."""
        kwargs = kwargs or {}
        operation = _KEPT.get(func)
        if operation is not None:
            outcome = operation(*args, **kwargs)
            if outcome is not None:
                return outcome
        real = tree_map(lambda a: a.dequantize() if isinstance(a, QuantizedTensor) else a, (args, kwargs))
        result = func(*real[0], **real[1])
        written = {}
        for argument, passed, used in zip(func._schema.arguments, args, real[0], strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                pairs = (
                    zip(passed, used, strict=True) if isinstance(passed, (list, tuple)) else [(passed, used)]
                )
                for target, value in pairs:
                    if isinstance(target, QuantizedTensor):
                        target.quantize_(value)
                        written[id(value)] = target
        return tree_map(lambda r: written.get(id(r), r), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickles: class, codes, scales and the quantiser's settings, which torch.load may read."""
        operand = _as_one_storage(self._operand) if type(self) is Float8Tensor else self._operand
        state = (self.dtype, tuple(self.shape), self.requires_grad, operand, self._quantizer)
        return rebuild, (type(self), state)


def rebuild(kind: type[QuantizedTensor], state: Any) -> QuantizedTensor:
    """A tensor from its pickle; see `QuantizedTensor.__reduce_ex__`."""
    dtype, shape, requires_grad, operand, quantizer = state
    operand = Operand(operand.rows, _by_rows_on_a_gpu(operand.columns))
    packed: Any = operand.rows if operand.rows is not None else operand.columns
    device = packed.codes.device if isinstance(packed, Packed) else packed.device
    tensor = kind(_Like(shape, dtype, device), operand, quantizer)
    tensor.requires_grad_(requires_grad)
    return tensor


class Float8Tensor(QuantizedTensor):
    """With one scale for the tensor."""

    @property
    def _fp8_dtype(self) -> Any:
        return self._quantizer.dtype


class Float8BlockwiseQTensor(Float8Tensor):
    """With scales by blocks of 128 or tiles of 128 x 128."""


class MXFP8Tensor(Float8Tensor):
    """With a power of two for 32 values."""


class NVFP4Tensor(QuantizedTensor):
    """With an E4M3 scale for 16 values and a float32 one for all, or for each row."""

    def _amax(self, packed: Any) -> Tensor | None:
        return packed.parts["amax"].reshape(-1) if isinstance(packed, Packed) else None

    @property
    def _amax_rowwise(self) -> Tensor | None:
        return self._amax(self._operand.rows)

    @property
    def _amax_columnwise(self) -> Tensor | None:
        return self._amax(self._operand.columns)

    @property
    def _row_scaled_nvfp4(self) -> bool:
        return bool(self._quantizer.row_scaled_nvfp4)

    @property
    def _nvfp4_use_4over6(self) -> bool:
        return bool(self._quantizer.nvfp4_use_4over6)


class IdentityTensor(QuantizedTensor):
    """As it was."""


class HybridQuantizedTensor(QuantizedTensor):
    """Rows and columns by different quantisers."""


def _operand(tensor: Tensor, quantizer: Any, old: Operand | None = None) -> Operand:
    rows = quantizer.rowwise_usage if old is None else old.rows is not None
    columns = quantizer.columnwise_usage if old is None else old.columns is not None
    matrix = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.reshape(0, tensor.shape[-1])
    operand: Operand = quantizer.operand(matrix, rows=rows, columns=columns)
    return operand


def quantized_tensor(tensor: Tensor, quantizer: Any, kind: type[QuantizedTensor]) -> QuantizedTensor:
    """``tensor`` (..., K) in a quantiser's codes, as a tensor of class ``kind``."""
    source = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach()
    return kind(source, _operand(source, quantizer), quantizer)


def _as_one_storage(operand: Operand) -> Operand:
    """For a file: under one scale the columns' codes are those of the rows, which then are saved once."""
    rows, columns = operand.rows, operand.columns
    if not (isinstance(rows, Packed) and isinstance(columns, Packed)):
        return operand
    parts = {**columns.parts, "codes": rows.codes.t()}
    return Operand(rows, Packed(columns.format, columns.shape, columns.dtype, parts))


def _by_rows_on_a_gpu(packed: Any) -> Any:
    """A GPU's units read codes by rows: what lies otherwise there is laid out anew, once."""
    if not isinstance(packed, Packed) or packed.codes.device.type != "cuda" or packed.codes.is_contiguous():
        return packed
    parts = {**packed.parts, "codes": packed.codes.contiguous()}
    return Packed(packed.format, packed.shape, packed.dtype, parts)


class _Like:
    """Shape, type and device of a tensor that need not exist."""

    def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


def _detach(tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor.moved(lambda part: part)


def _clone(tensor: QuantizedTensor, memory_format: Any = None) -> QuantizedTensor:
    return tensor.moved(torch.clone)


def _to_copy(tensor: QuantizedTensor, **options: Any) -> QuantizedTensor | None:
    """Another device keeps the codes; another type does not."""
    if options.get("dtype") not in (None, tensor.dtype) or options.get("device") is None:
        return None
    return tensor.moved(lambda part: part.to(options["device"], copy=True))


def _copy(target: Any, source: Tensor, non_blocking: bool = False) -> QuantizedTensor | None:
    if not isinstance(target, QuantizedTensor):
        return None
    if isinstance(source, QuantizedTensor) and source.layout_of_codes() == target.layout_of_codes():
        target.take_codes_of(source)  # codes stay codes: under other scales they would be rounded again
        return target
    return target.quantize_(source)


_KEPT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
