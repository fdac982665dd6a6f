"""The gated activation between the two products of experts, pair by pair, with what stands beside it.

Pairs of a token and an expert stand sorted by expert (`fewbits.nn.grouped.Table`); e_p and u_p are the two
halves, gate and up, of what the first product gives the pair p, and f an activation (gated_activation.py has
the formulas):

    z_p = f(e_p) * u_p

Backward, with v_p what comes back through the second product from the token's gradient, which routing has not
weighted yet, and c the weight of the pair in routing, where p stood at place[p]:

    dz_p = c_p v_p       de_p = dz_p * u_p * f'(e_p)       du_p = dz_p * f(e_p)       dc_p = <z_p, v_p>

e, u, z, v (P, I), e and u side by side as (P, 2 I); c and dc (T, k); place (P,). z is rounded to its dtype
and made again in the backward pass, so that it need not be kept; all else is float32 (float64 for float64),
and each result is rounded once. Where the next product takes rows in E4M3, the same pass writes them too:
quantize_rows of z, and of de and du side by side, bit for bit.

Floor: forward 3 values of 2 bytes and one of 1 a place of (P, I), 65,536 pairs of 768: 352 MB, 82 us at the
4.28 TB/s that a copy reaches on an H200, and the kernel takes 91; backward 5 values, 6 with z, and two of 1:
705 MB, 165 us, and the kernel takes 186.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.codec.quantize_float8 import quantize_rows_ref
from fewbits.kernels.codec.quantize_float8_triton import (
    has_kernel,
    inverse_of,
    row_largest,
    scale_of_largest,
    to_float8,
)
from fewbits.kernels.decoder.gated_activation import ACTIVATIONS, activation_ref
from fewbits.kernels.decoder.gated_activation_triton import activation_and_slope
from fewbits.kernels.launch.jit import CompileCase, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.matrix import dense_rows
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.launch.prepared import start_kernel

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_INNER = 8192  # inner values of a pair that one program holds
_LARGEST = 448.0  # of E4M3
_OF_A_WARP = 256  # values of each operand


class GatedForward(NamedTuple):
    """From what to what; q and scale None where no product takes them."""

    gate_up: Tensor  # (P, 2 I)
    activation: str
    z: Tensor  # (P, I)
    q: Tensor | None  # (P, I)
    scale: Tensor | None  # (P, 1)


class GatedBackward(NamedTuple):
    """Likewise; z None where nobody reads it."""

    v: Tensor  # (P, I)
    gate_up: Tensor  # (P, 2 I)
    routing: Tensor  # (T, k)
    place: Tensor  # (P,)
    activation: str
    dgate_up: Tensor  # (P, 2 I)
    drouting: Tensor  # (T, k)
    z: Tensor | None  # (P, I)
    q: Tensor | None  # (P, 2 I)
    scale: Tensor | None  # (P, 1)


# 1. The definition.


def gated_pairs_ref(o: GatedForward) -> None:
    """The formulas above; see `gated_pairs`."""
    wide = torch.promote_types(o.gate_up.dtype, torch.float32)
    e, u = o.gate_up.to(wide).chunk(2, 1)
    o.z.copy_(activation_ref(e, o.activation)[0] * u)
    _quantized(o.z, o.q, o.scale)


def gated_pairs_backward_ref(o: GatedBackward) -> None:
    """The formulas above; see `gated_pairs_backward`."""
    wide = torch.promote_types(o.gate_up.dtype, torch.float32)
    e, u = o.gate_up.to(wide).chunk(2, 1)
    f, df = activation_ref(e, o.activation)
    z, v = (f * u).to(o.gate_up.dtype), o.v.to(wide)
    dz = v * o.routing.reshape(-1)[o.place].to(wide)[:, None]
    o.dgate_up.copy_(torch.cat([dz * u * df, dz * f], 1))
    o.drouting.view(-1)[o.place] = (z.to(wide) * v).sum(1).to(o.drouting.dtype)
    if o.z is not None:
        o.z.copy_(z)
    _quantized(o.dgate_up, o.q, o.scale)


def _quantized(x: Tensor, q: Tensor | None, scale: Tensor | None) -> None:
    if q is not None and scale is not None:
        codes, scales = quantize_rows_ref(x)
        q.copy_(codes)
        scale.copy_(scales)


# 2. The kernels: a program has one pair.


@jit
def _gated_pairs_kernel(
    gate_up_ptr, z_ptr, q_ptr, scale_ptr, I, stride,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, FLOAT8: tl.constexpr, CUT: tl.constexpr,
    LARGEST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z, and its codes with FLOAT8."""
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = None if EVEN else columns < I
    other = None if EVEN else 0.0
    at = gate_up_ptr + pair * stride + columns
    e, u = tl.load(at, mask=mask, other=other).to(tl.float32), tl.load(at + I, mask=mask, other=other)
    s, _slope = activation_and_slope(e, ACTIVATION, FAST)
    z = (e * s * u.to(tl.float32)).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + pair * I + columns, z, mask=mask)
    if FLOAT8:
        scale = scale_of_largest(row_largest(z[None, :]), LARGEST)
        codes = to_float8(z[None, :], inverse_of(scale)[:, None], q_ptr.dtype.element_ty, LARGEST, False, CUT)
        at_q = q_ptr + pair * I + columns[None, :]
        tl.store(at_q, codes, mask=None if EVEN else (columns < I)[None, :])
        tl.store(scale_ptr + pair + tl.arange(0, 1), scale)


@jit
def _gated_pairs_bwd_kernel(
    v_ptr, gate_up_ptr, routing_ptr, place_ptr, dgate_up_ptr, drouting_ptr, z_ptr, q_ptr, scale_ptr,
    I, stride_v, stride,
    ACTIVATION: tl.constexpr, FAST: tl.constexpr, WITH_Z: tl.constexpr, FLOAT8: tl.constexpr,
    CUT: tl.constexpr, LARGEST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate, up and the weight; z again with WITH_Z, codes of the first two with FLOAT8."""
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = None if EVEN else columns < I
    other = None if EVEN else 0.0
    place = tl.load(place_ptr + pair)
    weight = tl.load(routing_ptr + place).to(tl.float32)
    at = gate_up_ptr + pair * stride + columns
    e = tl.load(at, mask=mask, other=other).to(tl.float32)
    u = tl.load(at + I, mask=mask, other=other).to(tl.float32)
    v = tl.load(v_ptr + pair * stride_v + columns, mask=mask, other=other).to(tl.float32)
    s, slope = activation_and_slope(e, ACTIVATION, FAST)
    z = (e * s * u).to(gate_up_ptr.dtype.element_ty)
    if WITH_Z:
        tl.store(z_ptr + pair * I + columns, z, mask=mask)
    dweight = tl.sum(z.to(tl.float32) * v, 0)
    tl.store(drouting_ptr + place, dweight.to(drouting_ptr.dtype.element_ty))
    dz = v * weight
    de = (dz * u * (s + e * slope)).to(dgate_up_ptr.dtype.element_ty)
    du = (dz * (e * s)).to(dgate_up_ptr.dtype.element_ty)
    to = dgate_up_ptr + pair * 2 * I + columns
    tl.store(to, de, mask=mask)
    tl.store(to + I, du, mask=mask)
    if FLOAT8:
        of_e, of_u = row_largest(de[None, :]), row_largest(du[None, :])
        largest = tl.maximum(of_e, of_u, propagate_nan=tl.PropagateNan.ALL)
        scale = scale_of_largest(largest, LARGEST)
        inverse = inverse_of(scale)[:, None]
        to_q = q_ptr + pair * 2 * I + columns[None, :]
        mask_q = None if EVEN else (columns < I)[None, :]
        kind = q_ptr.dtype.element_ty
        tl.store(to_q, to_float8(de[None, :], inverse, kind, LARGEST, False, CUT), mask=mask_q)
        tl.store(to_q + I, to_float8(du[None, :], inverse, kind, LARGEST, False, CUT), mask=mask_q)
        tl.store(scale_ptr + pair + tl.arange(0, 1), scale)


def _warps(block: int) -> int:
    return min(16, max(1, block // _OF_A_WARP))


def launch_fwd(o: GatedForward) -> None:
    """`gated_pairs_ref` of rows with contiguous columns into contiguous results; not for float64."""
    P, I = o.z.shape
    block, is_gpu = max(16, next_power_of_2(I)), o.z.is_cuda
    q, scale = (o.z, o.z) if o.q is None or o.scale is None else (o.q, o.scale)
    with on_device_of(o.z):
        start_kernel(
            _gated_pairs_kernel, (P,), (o.gate_up, o.z, q, scale), I, o.gate_up.stride(0),
            ACTIVATION=o.activation, FAST=is_gpu, FLOAT8=o.q is not None, CUT=not is_gpu, LARGEST=_LARGEST,
            EVEN=block == I, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip


def launch_bwd(o: GatedBackward) -> None:
    """`gated_pairs_backward_ref` of rows with contiguous columns into contiguous results; not for float64."""
    P, I = o.v.shape
    block, is_gpu = max(16, next_power_of_2(I)), o.v.is_cuda
    z, (q, scale) = o.z, (o.q, o.scale)
    with on_device_of(o.v):
        start_kernel(
            _gated_pairs_bwd_kernel, (P,),
            (o.v, o.gate_up, o.routing, o.place, o.dgate_up, o.drouting, o.v if z is None else z,
             o.v if q is None else q, o.v if scale is None else scale),
            I, o.v.stride(0), o.gate_up.stride(0),
            ACTIVATION=o.activation, FAST=is_gpu, WITH_Z=z is not None, FLOAT8=q is not None, CUT=not is_gpu,
            LARGEST=_LARGEST, EVEN=block == I, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip


_TENSORS = {"gate_up_ptr": "*bf16", "z_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
_FLAGS = dict.fromkeys(("ACTIVATION", "FAST", "FLOAT8", "CUT", "LARGEST", "EVEN", "BLOCK"), "constexpr")
_FORWARD = {**_TENSORS, "I": "i32", "stride": "i32", **_FLAGS}
_BACKWARD = {"v_ptr": "*bf16", "gate_up_ptr": "*bf16", "routing_ptr": "*bf16", "place_ptr": "*i64"}
_BACKWARD |= {"dgate_up_ptr": "*bf16", "drouting_ptr": "*bf16"}
_BACKWARD |= {name: kind for name, kind in _TENSORS.items() if name != "gate_up_ptr"}
_BACKWARD |= {"I": "i32", "stride_v": "i32", "stride": "i32"}
_BACKWARD |= dict.fromkeys(("ACTIVATION", "FAST", "WITH_Z"), "constexpr") | _FLAGS
_SET = {"ACTIVATION": "silu", "FAST": True, "FLOAT8": True, "CUT": False, "LARGEST": _LARGEST}
_SET |= {"EVEN": False, "BLOCK": 1024}


def _aligned(types: dict[str, str]) -> tuple[str, ...]:
    return (*(name for name in types if name.endswith("_ptr")), "I", "stride")


_PLAIN = {**_SET, "FLOAT8": False, "EVEN": True, "BLOCK": MAX_INNER}
_WITHOUT = {"q_ptr": "*bf16", "scale_ptr": "*bf16"}
COMPILE_CASES = (
    CompileCase(_gated_pairs_kernel, _FORWARD, _SET, _aligned(_FORWARD), 4, 89),
    CompileCase(_gated_pairs_kernel, {**_FORWARD, **_WITHOUT}, _PLAIN, _aligned(_FORWARD), 16),
    CompileCase(
        _gated_pairs_bwd_kernel,
        _BACKWARD,
        {**_SET, "WITH_Z": True},
        (*_aligned(_BACKWARD), "stride_v"),
        4,
        89,
    ),
    CompileCase(
        _gated_pairs_bwd_kernel,
        {**_BACKWARD, **_WITHOUT, "routing_ptr": "*fp32", "drouting_ptr": "*fp32"},
        {**_PLAIN, "WITH_Z": False},
        _aligned(_BACKWARD),
        16,
    ),
)


# 3. The ops: on a CPU they run the definition, on CUDA the kernels.


def _has_kernels(x: Tensor, inner: int) -> bool:
    return x.dtype in KERNEL_DTYPES and 0 < inner <= MAX_INNER


def _cuda_forward(o: GatedForward) -> None:
    if not o.z.numel():
        return
    if not _has_kernels(o.z, o.z.shape[1]):
        gated_pairs_ref(o)
        return
    one = o._replace(gate_up=dense_rows(o.gate_up))
    if o.q is None or has_kernel(o.z):
        launch_fwd(one)
    else:
        launch_fwd(one._replace(q=None, scale=None))
        _quantized(o.z, o.q, o.scale)


def _cuda_backward(o: GatedBackward) -> None:
    if not o.v.numel():
        o.drouting.zero_()
        return
    if not _has_kernels(o.v, o.v.shape[1]):
        gated_pairs_backward_ref(o)
        return
    one = o._replace(v=dense_rows(o.v), gate_up=dense_rows(o.gate_up), routing=o.routing.contiguous())
    if o.q is None or has_kernel(o.v):
        launch_bwd(one)
    else:
        launch_bwd(one._replace(q=None, scale=None))
        _quantized(o.dgate_up, o.q, o.scale)


_gated_pairs = torch.library.custom_op(
    "fewbits::gated_pairs", one_by_one(gated_pairs_ref), mutates_args=("z", "q", "scale")
)
_gated_pairs.register_kernel("cuda")(one_by_one(_cuda_forward))
_gated_pairs_backward = torch.library.custom_op(
    "fewbits::gated_pairs_backward",
    one_by_one(gated_pairs_backward_ref),
    mutates_args=("dgate_up", "drouting", "z", "q", "scale"),
)
_gated_pairs_backward.register_kernel("cuda")(one_by_one(_cuda_backward))


# 4. The public functions, for hand-written autograd nodes.


class GatedValues(NamedTuple):
    """z (P, I), and its rows in E4M3 with their scales (P, 1), or None."""

    z: Tensor
    float8: tuple[Tensor, Tensor] | None


class GatedGradients(NamedTuple):
    """Of gate and up (P, 2 I), with rows in E4M3 or None, and of routing (T, k); and z (P, I) or None."""

    dgate_up: Tensor
    float8: tuple[Tensor, Tensor] | None
    drouting: Tensor
    z: Tensor | None


def gated_pairs(gate_up: Tensor, *, activation: str = "silu", quantize: bool = False) -> GatedValues:
    """The activated values of pairs.

    Args:
        gate_up: (P, 2 I), gate and up side by side; rows perhaps apart.
        activation: "silu", "gelu" (exact) or "gelu_tanh".
        quantize: give rows in E4M3 too.

    Returns:
        `GatedValues`; no gradient.

    Raises:
        BadInput: shapes do not fit, or there is no such activation.
    """
    _check(gate_up, activation)
    z = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    float8 = _float8_rows(z) if quantize else None
    run(_gated_pairs, _cuda_forward, gate_up, GatedForward(gate_up, activation, z, *(float8 or (None, None))))
    return GatedValues(z, float8)


def gated_pairs_backward(
    v: Tensor,
    gate_up: Tensor,
    routing: Tensor,
    place: Tensor,
    *,
    activation: str = "silu",
    quantize: bool = False,
    needs_z: bool = False,
) -> GatedGradients:
    """Back through routing's weights and the activation.

    Args:
        v: (P, I) in gate_up's dtype: what comes back through the second product, not weighted.
        gate_up: (P, 2 I), as in `gated_pairs`.
        routing: (T, k), the weights of pairs where they stood before they were sorted.
        place: (P,) int64, where in routing each pair's weight is (`Table.order`).
        activation: as in `gated_pairs`.
        quantize: give the gradient of gate and up in E4M3 too.
        needs_z: give the activated values again.

    Returns:
        `GatedGradients`; no gradient of their own.

    Raises:
        BadInput: shapes do not fit, or there is no such activation.
    """
    _check(gate_up, activation)
    P, I = v.shape
    fits = gate_up.shape == (P, 2 * I) and gate_up.dtype == v.dtype and place.shape == (P,)
    if not fits or routing.numel() != P:
        have = [(tuple(one.shape), one.dtype) for one in (v, gate_up, routing, place)]
        raise BadInput(
            "gated_pairs_backward takes v (P, I), gate_up (P, 2 I) like v, routing of P values, place (P,); "
            f"these are {have}."
        )
    dgate_up, z = torch.empty_like(gate_up, memory_format=torch.contiguous_format), None
    drouting = torch.empty_like(routing, memory_format=torch.contiguous_format)
    if needs_z:
        z = v.new_empty(P, I)
    float8 = _float8_rows(dgate_up) if quantize else None
    values = GatedBackward(
        v, gate_up, routing, place, activation, dgate_up, drouting, z, *(float8 or (None, None))
    )
    run(_gated_pairs_backward, _cuda_backward, v, values)
    return GatedGradients(dgate_up, float8, drouting, z)


def _float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def _check(gate_up: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise BadInput(f"no gated activation {activation!r}; known: {', '.join(ACTIVATIONS)}.")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise BadInput(f"gate and up side by side are (P, 2 I), not {tuple(gate_up.shape)}.")


__all__ = ["GatedGradients", "GatedValues", "gated_pairs", "gated_pairs_backward"]
