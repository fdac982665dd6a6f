"""Rounding for training: ``Q(x)``, the adapted weight ``Q(W + s B A)``, and the linear layer that uses it.

    fake_quantize(x)       = dequantize(quantize(x))                          in one pass over x
    lora_weight(W, B, A)   = round to W's dtype(W + s * (B @ A))              the sum in float32
    fake_quantize_lora     = fake_quantize(lora_weight(W, B, A))              in one pass over W
    y                      = Q_x(x) @ fake_quantize_lora(W, B, A)^T + b

Shapes: x (..., K), W (N, K), A (r, K), B (N, r), b (N,), y (..., N). ``Q_x`` rounds the input, where there is
a format for it. Bit for bit what packing the merged weight and decoding it gives on the same device.

Backward: a rounding passes its gradient straight through (`fewbits.nn.fake_quantize` says why nothing is
cut), so with ``dW = dy^T @ Q_x(x)``, the gradient of the effective weight,

    dx = dy @ fake_quantize_lora(W, B, A),    dA = s B^T dW = (s dy B)^T Q_x(x),
    dB = s dW A^T = s dy^T (Q_x(x) A^T),      db = sum of dy over rows

and dW itself is computed only if W trains. Kept for the backward pass: x, W, A and B as they are; the rounded
weight is made twice and held by nobody.

Floor: beside its products a step reads W and writes the rounded weight, twice: 14336 x 4096 in bfloat16,
234.9 MB, 55 us at the 4.28 TB/s of a copy on an H200, against 2.4 ms for the two products of 8192 rows at 800
TFLOP/s. For Llama-3.1-8B all of it is 13 ms a step; the low-rank branch's two passes over y and dx fall away.
Measured there: 80 us a pass with INT4 in groups of 32, 121 us with NF4, 61 us without rounding; of x alone,
61 us to INT4, 70 us to INT8 by rows, 73 us to NF4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Format
from fewbits.formats.blocks import check_floating
from fewbits.kernels.codec.dequantize import dequantize, format_of_text, text_of_format
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.codec.quantize_triton import KERNEL_DTYPES, launch_round, takes
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.fake_quantize_triton import launch_lora, rounds_in_tile, takes_lora
from fewbits.kernels.product.matmul_packed import product_dtype

# 1. The definitions.


def fake_quantize_ref(x: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """``dequantize(quantize(x))`` in ``dtype``.

    x is floating point of any shape, and the result has the same.
    """
    return format.dequantize(format.quantize(x), dtype)


def lora_weight_ref(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """``W + scaling * B @ A`` in W's dtype, summed in float32 (or a wider type that they have).

    W is (N, K), A (r, K) and B (N, r).
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    with torch.autocast(weight.device.type, enabled=False):
        return (weight.to(wide) + (b.to(wide) @ a.to(wide)) * scaling).to(weight.dtype)


def fake_quantize_lora_ref(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: Format | None, dtype: torch.dtype
) -> Tensor:
    """The two above, one after the other.

    W is (N, K), A (r, K) and B (N, r); the result is (N, K) in ``dtype``.
    """
    effective = lora_weight_ref(weight, a, b, scaling)
    return effective.to(dtype) if format is None else fake_quantize_ref(effective, format, dtype)


# 2. The kernels are in codec/quantize_triton.py and fake_quantize_triton.py. 3. The launches.


def launch(x: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """`fake_quantize_ref`: one pass; with double quantisation packed and unpacked; else the definition.

    x is floating point of any shape, on the GPU; the result has the same.
    """
    is_taken = takes(format, tuple(x.shape), x.dtype) and dtype in KERNEL_DTYPES and x.numel() > 0
    coding = format.contract.coding
    if not is_taken or coding is None:
        return fake_quantize_ref(x, format, dtype)
    if coding.scale_block:
        return dequantize(quantize(x, format), dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch_round(x.contiguous(), format, out)
    return out


def launch_effective(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: Format | None, out: Tensor
) -> None:
    """`fake_quantize_lora_ref` into ``out``: one pass if the format's blocks allow, else two.

    W and ``out`` are (N, K), A (r, K), B (N, r).
    """
    if not takes_lora(weight, a, b):
        effective = lora_weight_ref(weight, a, b, scaling)
    elif format is None and out.dtype == weight.dtype:
        return launch_lora(weight, a, b, scaling, out, None)
    elif format is not None and rounds_in_tile(format, weight.shape[1], out.dtype):
        return launch_lora(weight, a, b, scaling, out, format)
    else:
        effective = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        launch_lora(weight, a, b, scaling, effective, None)
    out.copy_(effective if format is None else launch(effective, format, out.dtype))
    return None


# 4. The ops: on a CPU they run the definitions, on CUDA the kernels.


@torch.library.custom_op("fewbits::fake_quantize", mutates_args=())
def _fake_quantize(x: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return fake_quantize_ref(x, format_of_text(format), dtype).contiguous()


@_fake_quantize.register_kernel("cuda")
def _(x: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return launch(x, format_of_text(format), dtype)


@_fake_quantize.register_fake
def _(x: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("fewbits::fake_quantize_lora", mutates_args=())
def _fake_quantize_lora(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: str | None, dtype: torch.dtype
) -> Tensor:
    rounded = fake_quantize_lora_ref(weight, a, b, scaling, _format(format), dtype)
    return rounded.clone() if rounded.data_ptr() == weight.data_ptr() else rounded.contiguous()


@_fake_quantize_lora.register_kernel("cuda")
def _(weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: str | None, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    launch_effective(weight, a, b, scaling, _format(format), out)
    return out


@torch.library.custom_op("fewbits::fake_quantize_lora_into", mutates_args=("out",))
def _fake_quantize_lora_into(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: str | None, out: Tensor
) -> None:
    out.copy_(fake_quantize_lora_ref(weight, a, b, scaling, _format(format), out.dtype))


@_fake_quantize_lora_into.register_kernel("cuda")
def _(weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: str | None, out: Tensor) -> None:
    launch_effective(weight, a, b, scaling, _format(format), out)


@_fake_quantize_lora.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, scaling: float, format: str | None, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(weight.shape, dtype=dtype)


def _format(text: str | None) -> Format | None:
    return None if text is None else format_of_text(text)


# 5. Autograd and the public functions.


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _fake_quantize(x, format, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.to(ctx.dtype), None, None


def fake_quantize(x: Tensor, format: Format | None, dtype: torch.dtype | None = None) -> Tensor:
    """``dequantize(quantize(x))`` in ``dtype`` (default: x's); ``dx = dy``.

    x is floating point of any shape, and the result has the same.
    """
    if format is None:
        return x if dtype is None else x.to(dtype)
    check_floating(x)
    return _FakeQuantize.apply(x, text_of_format(format), x.dtype if dtype is None else dtype)


class _LoRAWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scaling = scaling
        return _fake_quantize_lora(weight, a, b, scaling, None, weight.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        wide = torch.promote_types(dy.dtype, a.dtype)
        da = (b.to(wide).t() @ dy.to(wide)).mul_(ctx.scaling)
        db = (dy.to(wide) @ a.to(wide).t()).mul_(ctx.scaling)
        return dy, da.to(a.dtype), db.to(b.dtype), None


def lora_weight(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """``W + scaling * B @ A`` in W's dtype, rounded once: what is merged; the rounding is straight-through.

    Args:
        weight: (N, K).
        a: (r, K).
        b: (N, r).
        scaling: factor of the product.
    """
    return _LoRAWeight.apply(weight, a, b, scaling)


def fake_quantize_lora(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    format: Format | None,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The weight with its adapter, rounded as one matrix: what the layer will store. Carries no gradient.

    Args:
        weight: (N, K).
        a: (r, K).
        b: (N, r).
        scaling: factor of the product.
        format: None rounds to W's dtype only.
        dtype: of the result; None: out's, or W's.
        out: (N, K) to write to: its rows may lie apart, as in the upper part of a taller buffer. None
            allocates.

    Raises:
        BadInput: ``out`` does not fit.
    """
    text = None if format is None else text_of_format(format)
    weight, a, b = weight.detach(), a.detach(), b.detach()
    if out is None:
        return _fake_quantize_lora(weight, a, b, scaling, text, dtype or weight.dtype)
    if out.shape != weight.shape or out.stride(1) != 1 or dtype not in (None, out.dtype):
        raise BadInput(
            f"fake_quantize_lora writes {tuple(weight.shape)} with contiguous rows in out's dtype; out has "
            f"{tuple(out.shape)}, strides {out.stride()} and {out.dtype}: pass a matching one, or none."
        )
    _fake_quantize_lora_into(weight, a, b, scaling, text, out)
    return out


class _FakeQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        weight_format: str,
        activation: str | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling, ctx.weight_format, ctx.activation = scaling, weight_format, activation
        ctx.bias_dtype = None if bias is None else bias.dtype
        rounded = _rounded_weight(weight, a, b, scaling, weight_format, x.dtype)
        return F.linear(_rounded_input(x, activation), rounded, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable("fake_quantized_linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, a, b = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, needs_da, needs_db, *_ = ctx.needs_input_grad
        dx = dweight = dbias = da = db = None
        dy_MN = rows_of(dy)
        if needs_dx:
            rounded = _rounded_weight(weight, a, b, ctx.scaling, ctx.weight_format, dy.dtype)
            dx = (dy_MN @ rounded).view(x.shape)
            del rounded
        if needs_dweight or needs_da or needs_db:
            x_MK = rows_of(_rounded_input(x, ctx.activation))
            if needs_dweight:
                dweight = (dy_MN.t() @ x_MK).to(weight.dtype)
            if needs_da:
                da = _gradient_of_a(dy_MN, x_MK, a, b, ctx.scaling)
            if needs_db:
                db = _gradient_of_b(dy_MN, x_MK, a, b, ctx.scaling)
        if needs_dbias:
            dbias = dy_MN.sum(0).to(ctx.bias_dtype)
        return dx, dweight, dbias, da, db, None, None, None


def _rounded_weight(
    weight: Tensor, a: Tensor | None, b: Tensor | None, scaling: float, format: str, dtype: torch.dtype
) -> Tensor:
    if a is None or b is None:
        return _fake_quantize(weight, format, dtype)
    return _fake_quantize_lora(weight, a, b, scaling, format, dtype)


def _rounded_input(x: Tensor, format: str | None) -> Tensor:
    if format is None:
        return x
    return _fake_quantize(rows_of(x), format, x.dtype).view(x.shape)


def _gradient_of_a(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, a.dtype)
    dh = (dy.to(dtype) @ b.to(dtype)).mul_(scaling)
    return (dh.t() @ x.to(dtype)).to(a.dtype)


def _gradient_of_b(dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, a.dtype)
    h = x.to(dtype) @ a.to(dtype).t()
    return (dy.to(dtype).t() @ h).mul_(scaling).to(b.dtype)


def fake_quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_format: Format,
    activation: Format | None = None,
    adapter: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """A linear layer that multiplies as it will once its weight and adapter are packed; one autograd step.

    Args:
        x: (..., K); computed in autocast's dtype where autocast is on.
        weight: (N, K), trained or frozen.
        bias: (N,) or None.
        weight_format: the format in which the weight will be stored.
        activation: the format to which x is rounded, or None.
        adapter: A (r, K), B (N, r) and the factor of their product, or None.
    """
    a, b, scaling = (None, None, 0.0) if adapter is None else adapter
    rows = rows_of(x.to(product_dtype(x)))  # so that what the function returns is no view
    text = None if activation is None else text_of_format(activation)
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _FakeQuantizedLinear.apply(
            rows, weight, bias, a, b, scaling, text_of_format(weight_format), text
        )
    return y.view(*x.shape[:-1], y.shape[-1])
