"""One linear product and its gradients with quantised operands.

``y = x @ w.T + b`` with x (M, K), w (N, K). Each of the three products sums over the last axis of two
operands, as `fewbits.te.tensors.quantizers` makes them: ``y`` over K (rows of x, rows of w), ``dx = dy @ w``
over N (rows of dy, columns of w), ``dw = dy.T @ x`` over M (columns of dy, columns of x). Sums are in
float32, and results are rounded once to the type of x. The bias is added and its gradient summed unquantised.
On a GPU the 8-bit units multiply what they can, see `fewbits.te.products.units`, and those of bfloat16 what
these lack, see `fewbits.te.products.emulated`: their sums run in another order.

With the backward override "high_precision" the backward pass multiplies dy, x and w as they are, with
"dequantized" dy as it is by the rounded rows of x and w, which are kept as codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.codec.float8_operands import column_sums_ref
from fewbits.kernels.codec.float8_operands_cuda import SmoothActivation
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.arithmetic.float4 import is_float4, tensor_scale_apart
from fewbits.te.products.emulated import product_in_bfloat16
from fewbits.te.products.small_block_units import on_small_block_units, product_on_small_block_units
from fewbits.te.products.units import on_units, product_on_units
from fewbits.te.tensors.operand import Operand, plain
from fewbits.te.tensors.quantizers import IdentityQuantizer, Quantizer

_IDENTITY = IdentityQuantizer()


@dataclass(frozen=True, eq=False)
class ProductSettings:
    """How one call of a module computes its product.

    Attributes:
        input: quantiser of x; None leaves it plain, as for the other two.
        weight: quantiser of w.
        gradient: quantiser of dy.
        weight_operand: w already quantised, which spares the quantiser.
        override: None, "high_precision" or "dequantized".
        keep_weight_gradient: takes dw where it belongs instead of autograd, or None.
        later: takes a function that computes dw and db when it is called, or None.
        later_bias: whether db waits with dw.
        after_backward: called at the end of the backward pass, or None.
        short: whether a GPU's units may add up in their shorter accumulator, in each of the three products.
    """

    input: Quantizer | None = None
    weight: Quantizer | None = None
    gradient: Quantizer | None = None
    weight_operand: Operand | None = None
    override: str | None = None
    keep_weight_gradient: Callable[[Tensor], None] | None = None
    later: Callable[[Callable[[], tuple[Tensor, Tensor | None]]], None] | None = None
    later_bias: bool = True
    after_backward: Callable[[], None] | None = None
    short: tuple[bool, bool, bool] = (True, False, False)

    @property
    def is_plain(self) -> bool:
        """Whether torch's own linear computes the same."""
        quantized = (self.input, self.weight, self.gradient, self.weight_operand)
        hooks = (self.keep_weight_gradient, self.later, self.after_backward)
        return all(part is None for part in (*quantized, *hooks))


def product(
    a: Packed | Tensor,
    b: Packed | Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    short: bool = False,
) -> Tensor:
    """``a @ b.T + bias``, added in float32.

    Args:
        a: (M, K).
        b: (N, K).
        dtype: of the result (M, N).
        bias: (N,) or None.
        short: see `ProductSettings`.
    """
    y = None
    if isinstance(a, Packed) and isinstance(b, Packed) and a.codes.device.type == "cuda":
        if on_units(a, b):
            return product_on_units(a, b, dtype, bias=bias, short=short)
        if on_small_block_units(a, b):
            return product_on_small_block_units(a, b, dtype, bias=bias)
        y = product_in_bfloat16(a, b, dtype)
    y = _by_definition(a, b, dtype) if y is None else y
    return y if bias is None else y + bias.to(dtype)


def _by_definition(a: Packed | Tensor, b: Packed | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.to(dtype) @ b.to(dtype).t()
    if isinstance(a, Packed) and isinstance(b, Packed) and _has_one_scale(a) and _has_one_scale(b):
        return ((a.codes.float() @ b.codes.float().t()) * (a.scales * b.scales)).to(dtype)
    if isinstance(a, Packed) and isinstance(b, Packed) and is_float4(a) and is_float4(b):
        (a_MK, of_a), (b_NK, of_b) = tensor_scale_apart(a), tensor_scale_apart(b)
        return ((a_MK @ b_NK.t()) * (of_a * of_b.t())).to(dtype)
    return (plain(a, torch.float32) @ plain(b, torch.float32).t()).to(dtype)


def _has_one_scale(packed: Packed) -> bool:
    coding = packed.format.contract.coding
    return coding is not None and coding.is_float8 and coding.block == (0, 0)


def _flatten(operands: Sequence[Packed | Tensor | None]) -> tuple[list[Tensor], list[Any]]:
    """The tensors of operands, and how to build the operands from them again."""
    tensors: list[Tensor] = []
    plans: list[Any] = []
    for operand in operands:
        if isinstance(operand, Packed):
            tensors += operand.parts.values()
            plans.append((operand.format, operand.shape, operand.dtype, tuple(operand.parts)))
        else:
            tensors += [] if operand is None else [operand]
            plans.append(None if operand is None else "plain")
    return tensors, plans


def _rebuild(tensors: Sequence[Tensor], plans: Sequence[Any]) -> list[Any]:
    queue: list[Tensor] = list(tensors)
    operands: list[Any] = []
    for plan in plans:
        if plan is None or plan == "plain":
            operands.append(queue.pop(0) if plan else None)
        else:
            format, shape, dtype, names = plan
            operands.append(Packed(format, shape, dtype, {name: queue.pop(0) for name in names}))
    return operands


def _kept(plan: ProductSettings, x: Operand, w: Operand, x_MK: Tensor, weight: Tensor) -> list[Any]:
    """What the backward pass keeps of x (M, K) and w (N, K): columns, or as the override says."""
    if plan.override == "high_precision":
        return [x_MK, weight]
    if plan.override == "dequantized":
        return [x.rows, w.rows]
    return [x.columns, w.columns]


def _multiplied(plan: ProductSettings, operand: Any, dtype: torch.dtype) -> Any:
    """What a gradient is multiplied by, of what `_kept` kept: x as (K, M), or w as (K, N)."""
    if plan.override == "high_precision":
        return operand.t()
    return plain(operand, dtype).t() if plan.override == "dequantized" else operand


def _as_matrix(x: Tensor) -> Tensor:
    """x (..., K) as (M, K)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Product(torch.autograd.Function):
    """One product, or one for each of several pieces of x's rows: a weight and a bias each."""

    @staticmethod
    def forward(
        ctx: Any,
        whole_x: Tensor,
        plans: Sequence[ProductSettings],
        sizes: Sequence[int] | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        wants_dx, _, _, *wants = ctx.needs_input_grad
        lead, x_MK = whole_x.shape[:-1], _as_matrix(whole_x)
        results, operands = [], []
        for i, (piece, plan) in enumerate(zip(_pieces(x_MK, sizes), plans, strict=True)):
            weight, bias = parameters[2 * i : 2 * i + 2]
            assert weight is not None
            y, (of_x, of_w) = _forward(piece, weight, bias, plan, (wants_dx, wants[2 * i]))
            results.append(y)
            operands += [of_x if wants[2 * i] else None, of_w if wants_dx else None]
        tensors, ctx.plans = _flatten(operands)
        ctx.save_for_backward(*tensors)
        ctx.settings, ctx.sizes = plans, sizes
        ctx.dtypes = [None if part is None else part.dtype for part in parameters]
        whole = results[0] if sizes is None else torch.cat(results)
        return whole.view(*lead, whole.shape[-1])

    @staticmethod
    @once_differentiable("a product with quantised operands", lambda ctx: True)
    def backward(ctx: Any, whole_dy: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        lead, dy_MN = whole_dy.shape[:-1], _as_matrix(whole_dy)
        operands = _rebuild(tensors, ctx.plans)
        wants_dx, _, _, *wants = ctx.needs_input_grad
        inputs: list[Tensor | None] = []
        gradients: list[Tensor | None] = []
        for i, (dy, plan) in enumerate(zip(_pieces(dy_MN, ctx.sizes), ctx.settings, strict=True)):
            part = slice(2 * i, 2 * i + 2)
            dx, dw, db = _backward(dy, operands[part], plan, (wants_dx, *wants[part]), ctx.dtypes[part])
            inputs.append(dx)
            gradients += [dw, db]
        whole = None
        if wants_dx:
            whole = inputs[0] if ctx.sizes is None else torch.cat([dx for dx in inputs if dx is not None])
        return None if whole is None else whole.view(*lead, whole.shape[-1]), None, None, *gradients


class _ActivatedPair(torch.autograd.Function):
    """Two products with an activation between them, which exists in codes alone, as does its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plans: tuple[ProductSettings, ProductSettings],
        numbers: tuple[float, float],
        *parameters: Tensor | None,
    ) -> Tensor:
        wants_dx, _, _, *wants = ctx.needs_input_grad
        lead, x_MK = x.shape[:-1], _as_matrix(x)
        w1, b1, w2, b2 = parameters
        assert w1 is not None and w2 is not None
        h, (of_x, of_w1) = _forward(x_MK, w1, b1, plans[0], (wants_dx, wants[0]))
        wants_dh = wants_dx or wants[0] or wants[1]
        through = SmoothActivation(numbers[0], numbers[1], h[:0])
        y, (of_a, of_w2) = _forward(h, w2, b2, plans[1], (wants_dh, wants[2]), through)
        operands = [of_x if wants[0] else None, of_w1 if wants_dx else None]
        operands += [of_a if wants[2] else None, of_w2 if wants_dh else None]
        tensors, ctx.plans = _flatten([h if wants_dh else None, *operands])
        ctx.save_for_backward(*tensors)
        ctx.settings, ctx.numbers, ctx.wants_dh = plans, numbers, wants_dh
        ctx.dtypes = [None if part is None else part.dtype for part in parameters]
        return y.view(*lead, y.shape[-1])

    @staticmethod
    @once_differentiable("products with quantised operands", lambda ctx: True)
    def backward(ctx: Any, whole_dy: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        h, of_x, of_w1, of_a, of_w2 = _rebuild(tensors, ctx.plans)
        wants_dx, _, _, *wants = ctx.needs_input_grad
        first, second = ctx.settings
        lead, dy = whole_dy.shape[:-1], _as_matrix(whole_dy)
        da, *of_second = _backward(dy, (of_a, of_w2), second, (ctx.wants_dh, *wants[2:]), ctx.dtypes[2:])
        if not ctx.wants_dh:
            return None, None, None, None, None, *of_second
        assert da is not None
        through = SmoothActivation(ctx.numbers[0], ctx.numbers[1], da)
        dx, *of_first = _backward(h, (of_x, of_w1), first, (wants_dx, *wants[:2]), ctx.dtypes[:2], through)
        return None if dx is None else dx.view(*lead, dx.shape[-1]), None, None, *of_first, *of_second


def _pieces(x: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    return [x] if sizes is None else x.split(sizes)  # type: ignore[no-any-return, no-untyped-call]


def _forward(
    x_MK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: ProductSettings,
    wants: tuple[bool, bool],
    through: SmoothActivation | None = None,
) -> tuple[Tensor, list[Any]]:
    """y (M, N), and what the backward pass keeps; ``wants``: dx, dw; ``through``: an activation of x."""
    wants_dx, wants_dw = wants
    own = plan.override is None
    x, _ = (plan.input or _IDENTITY).operand_with(x_MK, rows=True, columns=wants_dw and own, through=through)
    w = plan.weight_operand
    if w is None:
        w = (plan.weight or _IDENTITY).operand(weight.to(x_MK.dtype), rows=True, columns=wants_dx and own)
    assert x.rows is not None and w.rows is not None
    y = product(x.rows, w.rows, x_MK.dtype, bias=bias, short=plan.short[0])
    original = weight.to(x_MK.dtype) if plan.override == "high_precision" else weight
    return y, _kept(plan, x, w, x_MK, original)


def _backward(
    dy: Tensor,
    operands: Sequence[Any],
    plan: ProductSettings,
    wants: tuple[bool, bool, bool],
    dtypes: Sequence[torch.dtype | None],
    through: SmoothActivation | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx (M, K), dw (N, K) and db (N,) of dy (M, N), what was kept, and the types of weight and bias.

    With ``through`` ``dy`` is what an activation was taken of, and ``through`` has the activation's gradient.
    """
    wants_dx, wants_dw, wants_db = wants
    of_x, of_w = operands
    quantizer = (None if plan.override else plan.gradient) or _IDENTITY
    g, sums = quantizer.operand_with(dy, rows=wants_dx, columns=wants_dw, sums=wants_db, through=through)
    dx = None
    if wants_dx and g.rows is not None:
        dx = product(g.rows, _multiplied(plan, of_w, dy.dtype), dy.dtype, short=plan.short[1])
    x_KM = _multiplied(plan, of_x, dy.dtype) if wants_dw else None
    dw, db = _weight_gradients(plan, g, x_KM, dy if sums is None else sums, wants[1:], dtypes)
    if plan.after_backward is not None:
        plan.after_backward()
    return dx, dw, db


def _weight_gradients(
    plan: ProductSettings,
    g: Operand,
    x_KM: Any,
    dy: Tensor,
    wants: tuple[bool, bool],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None]:
    """dw (N, K) and db (N,) of dy (M, N), or of its sums (N,), or None for what is kept or put off."""
    (wants_dw, wants_db), (weight_dtype, bias_dtype) = wants, dtypes

    def of_bias() -> Tensor | None:
        if not wants_db:
            return None
        return (column_sums_ref(dy) if dy.dim() == 2 else dy).to(bias_dtype)

    def compute() -> tuple[Tensor, Tensor | None]:
        assert g.columns is not None and weight_dtype is not None
        # a gradient that is added to a float32 buffer is not rounded on the way
        kind = torch.float32 if plan.keep_weight_gradient else weight_dtype
        if isinstance(g.columns, Tensor) and isinstance(x_KM, Tensor):
            dw = product(x_KM, g.columns, kind).t()  # as torch's own linear: the same sums, bit for bit
        else:
            dw = product(g.columns, x_KM, kind, short=plan.short[2])
        return dw, of_bias() if plan.later is None or plan.later_bias else None

    if not wants_dw:
        return None, of_bias()
    if plan.later is not None:
        plan.later(compute)
        return None, None if plan.later_bias else of_bias()
    dw, db = compute()
    if plan.keep_weight_gradient is not None:
        plan.keep_weight_gradient(dw)
        return None, db
    return dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ProductSettings) -> Tensor:
    """``x @ weight.T + bias`` by a plan.

    Args:
        x: (..., K) floating point.
        weight: (N, K).
        bias: (N,) or None.
        plan: see `ProductSettings`.

    Returns:
        (..., N) in x's dtype.
    """
    if plan.is_plain:
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    y: Tensor = _Product.apply(x, [plan], None, weight, bias)
    return y


def fuses(x: Tensor, plans: Sequence[ProductSettings]) -> bool:
    """Whether `activated_pair` is the faster way: on a GPU in 16 bits, by quantisers that have kernels.

    x is (..., K).
    """
    quantizers = [q for plan in plans for q in (plan.input, plan.gradient)]
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.float16, torch.bfloat16)
        and all(q is not None and q.rounds_through for q in quantizers)
        and all(plan.override is None for plan in plans)
    )


def activated_pair(
    x: Tensor,
    numbers: tuple[float, float],
    parameters: Sequence[Tensor | None],
    plans: tuple[ProductSettings, ProductSettings],
) -> Tensor:
    """``a(x @ w1.T + b1) @ w2.T + b2`` with ``a(h) = h * sigmoid(linear * h + cubic * h**3)``.

    The activation and the gradient before it are rounded to x's type, and then to the plans' codes, in one
    pass, and are never stored otherwise.

    Args:
        x: (..., K) floating point.
        numbers: linear and cubic.
        parameters: w1 (F, K), b1 (F,) or None, w2 (N, F), b2 (N,) or None.
        plans: of the two products, each with quantisers and without an override.

    Returns:
        (..., N) in x's dtype.
    """
    return _ActivatedPair.apply(x, plans, numbers, *parameters)  # type: ignore[no-any-return]


def linear_of_pieces(
    x: Tensor,
    sizes: Sequence[int],
    parameters: Sequence[tuple[Tensor, Tensor | None]],
    plans: Sequence[ProductSettings],
) -> Tensor:
    """`linear` of each piece of x's rows by its own weight and bias, as one node of autograd.

    Args:
        x: (..., K) floating point.
        sizes: rows of each piece, of all its axes but the last.
        parameters: weight (N, K) and bias (N,) or None of each.
        plans: of each.

    Returns:
        (..., N) in x's dtype.
    """
    if all(plan.is_plain for plan in plans):
        parts = zip(_pieces(_as_matrix(x), sizes), parameters, plans, strict=True)
        y = torch.cat([linear(piece, *own, plan) for piece, own, plan in parts])
        return y.view(*x.shape[:-1], y.shape[-1])
    return _Product.apply(x, plans, sizes, *(part for own in parameters for part in own))  # type: ignore[no-any-return]
