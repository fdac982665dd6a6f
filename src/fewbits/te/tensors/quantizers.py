"""Quantisers: from a real matrix to the operands of products, under Transformer Engine's names.

A product sums over the last axis of both operands, so blocks lie along it. A matrix x (M, K) is an operand in
two ways: its rows for ``x @ w.T``, and its columns, that is x.T (K, M), where the backward pass sums over M.
`Quantizer.operand` gives both as `fewbits.formats.Packed`; `Quantizer.quantize` gives a tensor that holds
them.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.float8 import Float8
from fewbits.kernels.codec.float8_operands import (
    OnTheWay,
    amax_of,
    block_multipliers,
    column_sums_ref,
    multiplier_and_scale,
    one_multiplier,
    record_amax,
    through_ref,
)
from fewbits.kernels.codec.float8_operands_cuda import SmoothActivation
from fewbits.te.arithmetic.float4 import Float4, rotate
from fewbits.te.arithmetic.microscaling import microscaled
from fewbits.te.arithmetic.scaling import KIND
from fewbits.te.ranks.distributed import largest_of_group
from fewbits.te.support import default_device
from fewbits.te.tensors.operand import Operand, plain
from fewbits.te.tensors.quantized_tensor import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
    quantized_tensor,
)
from fewbits.te.tensors.roles import DType, float8_dtype


class Quantizer:
    """Base of all quantisers.

    Attributes:
        rowwise_usage: whether `quantize` makes rows.
        columnwise_usage: whether it makes columns.
        tensor_class: what `quantize` returns.
        rounds_through: whether `operand_with` takes an activation on the way.
    """

    tensor_class: ClassVar[type[QuantizedTensor]] = QuantizedTensor
    rounds_through: ClassVar[bool] = False
    internal: bool = False
    optimize_for_gemm: bool = False

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        """Quantise x (M, K) as the operands asked for; a quantiser of one's own defines this.

        Raises:
            Unsupported: it does not.
        """
        raise Unsupported(
            f"{type(self).__name__} cannot be used in a product: a quantiser of one's own defines "
            "operand(x, rows=..., columns=...), which returns a fewbits.te.tensors.operand.Operand."
        )

    def operand_with(
        self,
        x_MK: Tensor,
        *,
        rows: bool,
        columns: bool,
        sums: bool = False,
        through: SmoothActivation | None = None,
    ) -> tuple[Operand, Tensor | None]:
        """The operands of x (M, K), and the sums (K,) of its columns in float32, a bias's gradient, or None.

        ``through`` is an activation that takes x's place first. Quantisers by kernels do both on the way,
        and sum in another order.
        """
        x_MK = x_MK if through is None else through_ref(x_MK.detach(), through)
        of_columns = column_sums_ref(x_MK) if sums else None
        return self.operand(x_MK, rows=rows, columns=columns), of_columns

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Which operands `quantize` makes; None leaves a choice as it is."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> dict[str, bool]:
        """The choices of `set_usage`."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Quantizer:
        """A quantiser with the same settings, and the same state where it has one."""
        return copy.copy(self)

    def calibrate(self, tensor: Tensor) -> None:
        """Record what a later quantisation needs of ``tensor``; nothing but for delayed scaling.

        ``tensor`` may have any shape.
        """

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """A tensor of ``tensor``'s shape that holds its codes, or ``out`` filled anew.

        Args:
            tensor: (..., K) floating point.
            out: what an earlier call returned.
            dtype: what the result takes itself to be; tensor's by default.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        return quantized_tensor(tensor if dtype is None else tensor.to(dtype), self, self.tensor_class)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A tensor of ``shape`` (..., K) to be filled by `update_quantized`; it begins as zeros.

        ``pin_memory`` is taken and changes nothing.
        """
        with torch.no_grad():
            zeros = torch.zeros(tuple(shape), dtype=dtype, device=default_device(device))
            empty = quantized_tensor(zeros, self, self.tensor_class)
        return empty.requires_grad_(requires_grad)

    def __call__(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """As `quantize`."""
        return self.quantize(tensor, out=out, dtype=dtype)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Quantise ``src`` into ``dst``, unless ``noop_flag`` holds something but 0.

        Both are of the same shape; ``noop_flag`` is None or (1,) float32.
        """
        if noop_flag is None or not bool(noop_flag.item()):
            dst.quantize_(src)
        return dst

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether `quantize` takes a tensor of this shape: short blocks are filled up with zeros."""
        return inp.dim() > 0


def _per_tensor(
    x_MK: Tensor,
    pair: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    wants: tuple[bool, bool],
    largest: Tensor | None,
    beside: OnTheWay,
) -> Operand:
    (multiplier, scales), (rows, columns) = pair, wants
    codes = one_multiplier(
        x_MK, multiplier, dtype, rows=rows, columns=columns, largest=largest, beside=beside
    )
    format = Float8(name=f"float8_{KIND[dtype]}", kind=KIND[dtype])
    shapes = (x_MK.shape[0], x_MK.shape[1]), (x_MK.shape[1], x_MK.shape[0])
    by_row, by_column = (
        None if c is None else Packed(format, shape, x_MK.dtype, {"codes": c, "scales": scales})
        for c, shape in zip(codes, shapes, strict=True)
    )
    return Operand(by_row, by_column)


class _ByKernels(Quantizer):
    """Base of quantisers whose kernels take an activation and sum columns on the way."""

    rounds_through = True

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        """Codes of x (M, K), as the class says."""
        return self._operand(x_MK, (rows, columns), OnTheWay())

    def operand_with(
        self,
        x_MK: Tensor,
        *,
        rows: bool,
        columns: bool,
        sums: bool = False,
        through: SmoothActivation | None = None,
    ) -> tuple[Operand, Tensor | None]:
        """See `Quantizer.operand_with`."""
        room = torch.empty(x_MK.shape[1], dtype=torch.float32, device=x_MK.device) if sums else None
        return self._operand(x_MK, (rows, columns), OnTheWay(room, through)), room

    @abstractmethod
    def _operand(self, x_MK: Tensor, wants: tuple[bool, bool], beside: OnTheWay) -> Operand:
        """Codes of x (M, K), by rows and by columns, and what else is asked for on the way."""


class Float8Quantizer(_ByKernels):
    """One scale a tensor, from a state that the owner updates: delayed scaling. The amax is recorded.

    Attributes:
        scale: () or (1,) float32, what values are multiplied by.
        amax: (1,) float32, where the largest magnitude seen is left.
        dtype: of the codes.
    """

    tensor_class = Float8Tensor

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale, self.amax = scale, amax
        self.dtype = DType(7 if float8_dtype(fp8_dtype) is torch.float8_e4m3fn else 8)

    def calibrate(self, tensor: Tensor) -> None:
        """Record the largest magnitude: a module that runs twice before the update keeps the larger one.

        ``tensor`` may have any shape.
        """
        with torch.no_grad():
            record_amax(tensor, self.amax)

    def _operand(self, x_MK: Tensor, wants: tuple[bool, bool], beside: OnTheWay) -> Operand:
        multiplier = self.scale.detach().reshape(1)
        pair = (multiplier, (1.0 / multiplier).reshape(1))
        return _per_tensor(x_MK, pair, float8_dtype(self.dtype), wants, self.amax.detach(), beside)


class Float8CurrentScalingQuantizer(_ByKernels):
    """One scale a tensor, from its own amax: the one that brings it to the largest code."""

    tensor_class = Float8Tensor

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax:
            raise BadInput("use_existing_amax is not taken: the amax is computed from the tensor itself.")
        self.dtype = DType(7 if float8_dtype(fp8_dtype) is torch.float8_e4m3fn else 8)
        self.device = device
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def _operand(self, x_MK: Tensor, wants: tuple[bool, bool], beside: OnTheWay) -> Operand:
        if beside.through is None:
            amax = amax_of(x_MK)
        else:
            amax = torch.zeros(1, dtype=torch.float32, device=x_MK.device)
            record_amax(x_MK, amax, beside.through)
        if self.with_amax_reduction:
            amax = largest_of_group(amax, self.amax_reduction_group)
        dtype = float8_dtype(self.dtype)
        multiplier, scale = multiplier_and_scale(
            amax, dtype, power_of_two=self.force_pow_2_scales, epsilon=self.amax_epsilon
        )
        return _per_tensor(x_MK, (multiplier, scale), dtype, wants, None, beside)


class Float8BlockQuantizer(_ByKernels):
    """128 values along the summed axis, or a tile of 128 x 128, share a scale; the last ones may be fewer."""

    tensor_class = Float8BlockwiseQTensor

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType(7 if float8_dtype(fp8_dtype) is torch.float8_e4m3fn else 8)
        self.amax_epsilon, self.force_pow_2_scales = amax_epsilon, force_pow_2_scales
        self.block_scaling_dim, self.block_len = block_scaling_dim, 128

    def _operand(self, x_MK: Tensor, wants: tuple[bool, bool], beside: OnTheWay) -> Operand:
        dtype, tile = float8_dtype(self.dtype), self.block_scaling_dim != 1
        sides = block_multipliers(
            x_MK,
            dtype,
            rows=wants[0],
            columns=wants[1],
            tile=tile,
            power_of_two=self.force_pow_2_scales,
            epsilon=self.amax_epsilon,
            beside=beside,
        )
        block = (128, 128) if tile else (1, 128)
        name = f"float8_{KIND[dtype]}_{block[0]}x{block[1]}"
        format = Float8(name=name, kind=KIND[dtype], block=block)
        shapes = (x_MK.shape[0], x_MK.shape[1]), (x_MK.shape[1], x_MK.shape[0])
        by_row, by_column = (
            None if s is None else Packed(format, shape, x_MK.dtype, {"codes": s[0], "scales": s[1]})
            for s, shape in zip(sides, shapes, strict=True)
        )
        return Operand(by_row, by_column)


class MXFP8Quantizer(Quantizer):
    """32 values along the summed axis, or a tile of 32 x 32, share a power of two."""

    tensor_class = MXFP8Tensor

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType(7 if float8_dtype(fp8_dtype) is torch.float8_e4m3fn else 8)
        self.with_2d_quantization = with_2d_quantization

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        """Codes by blocks; the last block of a row or column may be short."""
        format = microscaled(float8_dtype(self.dtype), tile=self.with_2d_quantization)
        return Operand(
            format.quantize(x_MK) if rows else None,
            format.quantize(x_MK.t().contiguous()) if columns else None,
        )


class NVFP4Quantizer(Quantizer):
    """16 values along the summed axis, or a tile of 16 x 16, share an E4M3 scale, the tensor a float32 one.

    Columns are rotated (`with_rht`) where their count, M, is a multiple of 16; else nothing is rotated, which
    must hold for both operands of a product and does, as both have M. Stochastic rounding takes its seed from
    torch's generator of the CPU, so that ``torch.manual_seed`` fixes it.
    """

    tensor_class = NVFP4Tensor

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if with_amax_reduction:
            raise BadInput(
                "NVFP4 with amaxes over several ranks is not written: leave with_amax_reduction False."
            )
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        if self.nvfp4_e4m3_max not in (448, 256) or nvfp4_4over6_err_mode.upper() not in ("MAE", "MSE"):
            raise BadInput("nvfp4_e4m3_max is 448 or 256, and nvfp4_4over6_err_mode 'MAE' or 'MSE'.")
        self.dtype = DType(fp4_dtype)
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode.upper()
        self.with_random_sign_mask = with_random_sign_mask

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether a tensor (M, K) can be sent to other ranks as codes: not with a scale for each row."""
        return not self.row_scaled_nvfp4 and super().is_quantizable(inp)

    @property
    def format(self) -> Float4:
        """The number format of the operands."""
        tile = self.with_2d_quantization
        return Float4(
            name="nvfp4_16x16" if tile else "nvfp4",
            block=(16, 16) if tile else (1, 16),
            by_row=self.row_scaled_nvfp4,
            four_over_six=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else "",
            scale_bound=float(self.nvfp4_e4m3_max),
        )

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        """Codes by blocks; the last block of a row or column may be short."""
        packed_rows = packed_columns = None
        if rows:
            packed_rows = self.format.quantize(x_MK, seed=self._seed())
        if columns:
            x_KM = x_MK.t().contiguous()
            if self.with_rht and x_MK.shape[0] % 16 == 0:
                x_KM = rotate(x_KM, signs=self.with_random_sign_mask)
            packed_columns = self.format.quantize(x_KM, seed=self._seed())
        return Operand(packed_rows, packed_columns)

    def _seed(self) -> int | None:
        return int(torch.randint(2**62, ())) if self.stochastic_rounding else None


class IdentityQuantizer(Quantizer):
    """Leaves an operand as it is, or rounds it to another type of torch."""

    tensor_class = IdentityTensor

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        """x and its transpose, plain."""
        x = x_MK.detach() if self.dtype is None else x_MK.detach().to(self.dtype)
        return Operand(x if rows else None, x.t() if columns else None)


class HybridQuantizer(Quantizer):
    """Rows by one quantiser and columns by another.

    ``columnwise_source="rowwise_dequantized"`` makes the columns from the rounded rows.
    """

    tensor_class = HybridQuantizedTensor

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: Literal["original", "rowwise_dequantized"] = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        """Each direction by its quantiser."""
        again = columns and self.columnwise_source == "rowwise_dequantized"
        by_row = (
            self.rowwise_quantizer.operand(x_MK, rows=True, columns=False).rows if rows or again else None
        )
        source = plain(by_row, x_MK.dtype) if again else x_MK
        by_column = self.columnwise_quantizer.operand(source, rows=False, columns=True) if columns else None
        return Operand(by_row if rows else None, by_column.columns if by_column else None)
