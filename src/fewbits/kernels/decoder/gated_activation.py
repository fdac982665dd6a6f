"""Gated activations of a feed-forward layer, SwiGLU and GeGLU (Shazeer 2020), forward and backward.

    h = f(e) * u              e, u, h (M, I)     f: silu, gelu (exact, by erf) or gelu_tanh

    du = dh * f(e)            de = dh * u * f'(e)

with f(e) = e * s and f' = s + e * s'. For silu, s is the logistic function of e; for gelu_tanh that of
2 sqrt(2/pi) (e + 0.044715 e^3), which is the usual form with tanh; for gelu the normal distribution's.

Where the products that made the operands have low-rank branches (LoRA), these are added in the kernel:

    e += x_e @ w_e^T          u += x_u @ w_u^T          dh += x_d @ w_d^T           x (M, r)   w (I, r)

so that no further pass over (M, I) is needed: x_e = x @ A^T of the gate projection and w_e = scaling * B, for
example, and x_d = dy @ B, w_d = scaling * A^T of the down projection.

Rounding: everything in float32 (float64 for float64): operands are widened, low-rank products are summed in
float32 and added to them unrounded, and each output is rounded once. The largest magnitudes of rows, which a
quantiser to 8 bits needs, are taken of the rounded outputs.

For a product of 8-bit operands (matmul_float8.py) the outputs can be written in E4M3 by the same kernel,
under one scale for all that is known beforehand, as Transformer Engine's delayed scaling has it:

    q = float8(cut(h * inverse_scale))      amax = max |h|, from which the caller makes the next step's scale

A row's own scale is not known before the row is complete, and a row is spread over many programs; so row
scales take a second pass, quantize_rows(h, amax=amax) with the rows' maxima of this one.

Floor: the forward pass reads e and u and writes h, 3 * M * I * itemsize bytes; the backward pass reads dh,
e and u and writes de and du, 5 * M * I * itemsize, and 6 with h again. M = 8192, I = 14336 in bfloat16 are
705 MB, 1174 MB and 1409 MB: 165 us, 274 us and 329 us at the 4.28 TB/s that a copy reaches on an H200. E4M3
outputs add 1 byte a value, and the 16-bit ones can be left out: forward 5 bytes a value are 587 MB, 137 us,
and 7 with h 192 us; by rows it is 6 and then 3 more, 247 us. Backward without de and du in 16 bits, 10
bytes with h, 1174 MB, 274 us; with them 14 bytes, 384 us, where the second pass of row scales would make it
493 us.

The kernels are in gated_activation_triton.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.codec.quantize_float8 import codes_under
from fewbits.kernels.codec.quantize_float8_triton import has_kernel as converts_float8
from fewbits.kernels.decoder.gated_activation_triton import (
    KERNEL_DTYPES,
    MAX_RANK,
    GatedOutputs,
    LowRank,
    Quantized8,
    launch_bwd,
    launch_fwd,
)
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.launch.ops import one_by_one, passes_dispatcher, run

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


# 1. The definition.


def activation_ref(e: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """f(e) and f'(e).

    e is floating point of any shape, and both results are of e's shape and dtype.
    """
    if activation == "gelu":
        s = 0.5 * (1 + torch.erf(e * 0.5**0.5))
        return e * s, s + e * torch.exp(-0.5 * e * e) * (0.5 / torch.pi) ** 0.5
    z, dz = e, torch.ones_like(e)
    if activation == "gelu_tanh":
        c = 2 * (2 / torch.pi) ** 0.5
        z, dz = c * (e + 0.044715 * e**3), c * (1 + 3 * 0.044715 * e * e)
    s = torch.sigmoid(z)
    return e * s, s + e * s * (1 - s) * dz


def gated_activation_ref(
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank_e: LowRank | None = None,
    low_rank_u: LowRank | None = None,
) -> Tensor:
    """h in e's dtype.

    e and u are (M, I), and so is h; a branch adds ``x @ w^T`` of x (M, r) and w (I, r).
    """
    ef, uf = _widened(e, low_rank_e), _widened(u, low_rank_u)
    return (activation_ref(ef, activation)[0] * uf).to(e.dtype)


def gated_activation_backward_ref(
    dh: Tensor,
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank_e: LowRank | None = None,
    low_rank_u: LowRank | None = None,
    low_rank_dh: LowRank | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """de, du and h in e's dtype.

    All of dh, e, u and the results are (M, I); a branch adds ``x @ w^T`` of x (M, r) and w (I, r).
    """
    dhf, ef, uf = _widened(dh, low_rank_dh), _widened(e, low_rank_e), _widened(u, low_rank_u)
    f, df = activation_ref(ef, activation)
    return (dhf * uf * df).to(e.dtype), (dhf * f).to(e.dtype), (f * uf).to(e.dtype)


def _widened(x: Tensor, low_rank: LowRank | None) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    return x.to(acc) if low_rank is None else x.to(acc) + low_rank.x.to(acc) @ low_rank.w.to(acc).t()


# 2. The ops: on a CPU they run the definition, on CUDA the kernels.


@torch.library.custom_op("fewbits::gated_activation", mutates_args=())
def _gated_activation(e: Tensor, u: Tensor | None, activation: str) -> Tensor:
    gate, up = _halves(e, u)
    return gated_activation_ref(gate, up, activation).contiguous()


@torch.library.custom_op("fewbits::gated_activation_backward", mutates_args=())
def _gated_activation_backward(
    dh: Tensor, e: Tensor, u: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    return _backward_default(dh, e, u, activation)


def _backward_default(dh: Tensor, e: Tensor, u: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    de, du, _ = gated_activation_backward_ref(dh, *_halves(e, u), activation)
    return (torch.cat([de, du], -1), e.new_empty(0)) if u is None else (de.contiguous(), du.contiguous())


class GatedInputs(NamedTuple):
    """Gate and up with the low-rank branches that are added to them, as torch.library takes them."""

    e: Tensor
    u: Tensor
    activation: str
    xe: Tensor | None
    we: Tensor | None
    xu: Tensor | None
    wu: Tensor | None

    def branches(self) -> tuple[LowRank | None, LowRank | None]:
        """What is added to gate, and to up."""
        return _branch(self.xe, self.we), _branch(self.xu, self.wu)


class Float8Parts(NamedTuple):
    """`Quantized8` as torch.library takes it; all None where it is not wanted."""

    q: Tensor | None = None
    inverse_scale: Tensor | None = None
    q_amax: Tensor | None = None

    def quantized(self) -> Quantized8 | None:
        """What the definition and the kernels take."""
        q, inverse_scale, amax = self
        return (
            None if q is None or inverse_scale is None or amax is None else Quantized8(q, inverse_scale, amax)
        )


class GatedInto(NamedTuple):
    """The arguments of the op of `gated_activation_into`."""

    inputs: GatedInputs
    h: Tensor | None
    amax: Tensor | None
    float8: Float8Parts


class GatedBackwardInto(NamedTuple):
    """The arguments of the op of `gated_activation_backward_into`."""

    dh: Tensor
    inputs: GatedInputs
    xd: Tensor | None
    wd: Tensor | None
    de: Tensor | None
    du: Tensor | None
    h: Tensor | None
    amax: Tensor | None
    float8: Float8Parts

    def branches(self) -> tuple[LowRank | None, LowRank | None, LowRank | None]:
        """What is added to gate, to up and to dh."""
        return (*self.inputs.branches(), _branch(self.xd, self.wd))


def _into_default(o: GatedInto) -> None:
    e, u, activation, *_ = o.inputs
    result = gated_activation_ref(e, u, activation, *o.inputs.branches())
    _into((o.h,), (result,), o.amax, (result,), o.float8.quantized())


def _backward_into_default(o: GatedBackwardInto) -> None:
    e, u, activation, *_ = o.inputs
    results = gated_activation_backward_ref(o.dh, e, u, activation, *o.branches())
    _into((o.de, o.du, o.h), results, o.amax, results[:2], o.float8.quantized())


def _into(
    outputs: tuple[Tensor | None, ...],
    results: tuple[Tensor, ...],
    amax: Tensor | None,
    of: tuple[Tensor, ...],
    quantized: Quantized8 | None,
) -> None:
    """Copy results to their outputs, then what is made of ``of``: running maxima, and codes side by side."""
    for output, result in zip(outputs, results, strict=True):
        if output is not None:
            output.copy_(result)
    if quantized is not None and of[0].numel():
        quantized.q.copy_(codes_under(torch.cat(of, 1), quantized.inverse_scale))
        largest = torch.stack([x.abs().amax().float() for x in of]).amax()
        quantized.amax.copy_(torch.maximum(quantized.amax, largest))
    if amax is not None and amax.numel() and of[0].shape[1]:
        largest = torch.stack([x.abs().amax(1).float() for x in of]).amax(0)
        amax.copy_(torch.maximum(amax, largest))


def _halves(e: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up; without u, e is both side by side."""
    if u is not None:
        return e, u
    I = e.shape[-1] // 2
    return e[..., :I], e[..., I:]


def _branch(x: Tensor | None, w: Tensor | None) -> LowRank | None:
    return None if x is None or w is None else LowRank(x, w)


def _as_rows(x: Tensor) -> Tensor:
    """``x`` as (M, I) with contiguous rows: a view where its strides allow one."""
    rows = rows_of(x)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@_gated_activation.register_kernel("cuda")
def _cuda_forward(e: Tensor, u: Tensor | None, activation: str) -> Tensor:
    gate, up = _halves(e, u)
    if e.dtype not in KERNEL_DTYPES:
        return gated_activation_ref(gate, up, activation).contiguous()
    h = torch.empty(gate.shape, dtype=e.dtype, device=e.device)
    launch_fwd(_as_rows(gate), _as_rows(up), activation, (None, None), rows_of(h), None)
    return h


@_gated_activation_backward.register_kernel("cuda")
def _cuda_backward(dh: Tensor, e: Tensor, u: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    if e.dtype not in KERNEL_DTYPES:
        return _backward_default(dh, e, u, activation)
    gate, up = _halves(e, u)
    de = torch.empty(e.shape, dtype=e.dtype, device=e.device)
    du = e.new_empty(0) if u is None else torch.empty(u.shape, dtype=e.dtype, device=e.device)
    out = _halves(rows_of(de), None if u is None else rows_of(du))
    none = (None, None, None)
    launch_bwd(_as_rows(dh), _as_rows(gate), _as_rows(up), activation, none, GatedOutputs(*out))
    return de, du


def _has_kernel(e: Tensor, quantized: Quantized8 | None) -> bool:
    """Whether the kernels read a gate e (M, I), and write the float8 output that is wanted."""
    return e.dtype in KERNEL_DTYPES and (quantized is None or converts_float8(e))


def _cuda_into(o: GatedInto) -> None:
    (e, u, activation, *_), quantized = o.inputs, o.float8.quantized()
    if _has_kernel(e, quantized):
        launch_fwd(e, u, activation, o.inputs.branches(), o.h, o.amax, quantized=quantized)
    else:
        _into_default(o)


def _cuda_backward_into(o: GatedBackwardInto) -> None:
    (e, u, activation, *_), quantized = o.inputs, o.float8.quantized()
    if _has_kernel(e, quantized):
        outputs = GatedOutputs(o.de, o.du, o.h, o.amax, quantized)
        launch_bwd(o.dh, e, u, activation, o.branches(), outputs)
    else:
        _backward_into_default(o)


_gated_activation_into = torch.library.custom_op(
    "fewbits::gated_activation_into",
    one_by_one(_into_default),
    mutates_args=("h", "amax", "q", "q_amax"),
)
_gated_activation_into.register_kernel("cuda")(one_by_one(_cuda_into))

_gated_activation_backward_into = torch.library.custom_op(
    "fewbits::gated_activation_backward_into",
    one_by_one(_backward_into_default),
    mutates_args=("de", "du", "h", "amax", "q", "q_amax"),
)
_gated_activation_backward_into.register_kernel("cuda")(one_by_one(_cuda_backward_into))


@_gated_activation.register_fake
def _(e: Tensor, u: Tensor | None, activation: str) -> Tensor:
    return e.new_empty(_halves(e, u)[0].shape)


@_gated_activation_backward.register_fake
def _(dh: Tensor, e: Tensor, u: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return e.new_empty(e.shape), e.new_empty(0 if u is None else u.shape)


# 3. The gradient, and the public functions.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    e, u, ctx.activation = inputs
    ctx.save_for_backward(e, u)


@once_differentiable("gated_activation")
def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None, None]:
    e, u = ctx.saved_tensors
    de, du = _gated_activation_backward(dh, e, u, ctx.activation)
    return de, None if u is None else du, None


_gated_activation.register_autograd(_backward, setup_context=_setup_context)


class _Straight(torch.autograd.Function):
    """The same on CUDA without the dispatcher, which costs the host more than the kernels take."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, u: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(e, u)
        ctx.activation = activation
        return _cuda_forward(e, u, activation)

    @staticmethod
    @once_differentiable("gated_activation")
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None, None]:
        e, u = ctx.saved_tensors
        de, du = _cuda_backward(dh, e, u, ctx.activation)
        return de, None if u is None else du, None


def gated_activation(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    """``f(gate) * up``, differentiable.

    Args:
        gate: (..., I), any strides; or without ``up`` (..., 2 I), gate and up side by side.
        up: (..., I) in gate's dtype.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (..., I), contiguous.
    """
    _check_activation(activation)
    if up is None and gate.shape[-1] % 2:
        raise BadInput(f"gate and up side by side have an even width, not {gate.shape[-1]}: pass them apart.")
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise BadInput(
            f"gate and up must agree: {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}."
        )
    h: Tensor = (_Straight.apply if passes_dispatcher(gate) else _gated_activation)(gate, up, activation)
    return h


def gated_activation_into(
    gate: Tensor,
    up: Tensor,
    h: Tensor | None,
    *,
    activation: str = "silu",
    low_rank_gate: LowRank | None = None,
    low_rank_up: LowRank | None = None,
    amax: Tensor | None = None,
    quantized: Quantized8 | None = None,
) -> Tensor | None:
    """The forward pass alone, with low-rank branches, into a buffer: for autograd nodes of a whole MLP.

    Args:
        gate: (M, I); rows contiguous but perhaps apart, as in half of a fused buffer.
        up: likewise.
        h: (M, I), where to write; likewise. None, if only ``quantized`` is wanted.
        activation: as in `gated_activation`.
        low_rank_gate: what is added to gate, of rank 128 at most.
        low_rank_up: what is added to up.
        amax: (M,) float32, contiguous: takes the largest magnitude of each row of h where that exceeds
            what it holds (so fill it with zeros); the same whatever the order of the programs.
        quantized: where to write h, as it is rounded to gate's dtype, in E4M3 too: q (M, I) is
            ``float8(h * inverse_scale)``, what lies beyond 448 cut, NaN for what is not finite; its amax (1,)
            takes the largest magnitude of h where that exceeds what it holds.

    Returns:
        ``h``.
    """
    _check_into(activation, (gate, up, h), (low_rank_gate, low_rank_up), amax)
    _check_quantized(quantized, tuple(gate.shape), is_needed=h is None)
    branches = (*(low_rank_gate or (None, None)), *(low_rank_up or (None, None)))
    inputs = GatedInputs(gate, up, activation, *branches)
    arguments = GatedInto(inputs, h, amax, Float8Parts(*(quantized or ())))
    run(_gated_activation_into, _cuda_into, gate, arguments)
    return h


def gated_activation_backward_into(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    into: GatedOutputs,
    *,
    activation: str = "silu",
    low_rank: tuple[LowRank | None, LowRank | None, LowRank | None] = (None, None, None),
) -> None:
    """The backward pass alone, with low-rank branches, into buffers.

    Args:
        dh: (M, I); rows contiguous but perhaps apart, as are those of all others.
        gate: (M, I), as before its low-rank branch was added.
        up: likewise.
        into: where to write: de is the gradient of gate, and may be gate itself (None, and so du, if only
            ``quantized`` is wanted); du likewise that of up; h the forward pass's result again; amax and
            quantized as in `gated_activation_into`, of each row of both gradients together, and of both side
            by side under one scale.
        activation: as in `gated_activation`.
        low_rank: what is added to gate, to up and to dh (the down projection's ``(dy @ B) @ A``).
    """
    dgate, dup, h, amax, quantized = into
    _check_into(activation, (dh, gate, up, dgate, dup, h), low_rank, amax)
    if (dgate is None) != (dup is None):
        raise BadInput("dgate and dup are written both or not at all: give two buffers or none.")
    M, I = gate.shape
    _check_quantized(quantized, (M, 2 * I), is_needed=dgate is None)
    *branches, xd, wd = [part for branch in low_rank for part in (branch or (None, None))]
    inputs, float8 = GatedInputs(gate, up, activation, *branches), Float8Parts(*(quantized or ()))
    arguments = GatedBackwardInto(dh, inputs, xd, wd, dgate, dup, h, amax, float8)
    run(_gated_activation_backward_into, _cuda_backward_into, gate, arguments)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise BadInput(f"no gated activation {activation!r}; known: {', '.join(ACTIVATIONS)}.")


def _check_quantized(quantized: Quantized8 | None, shape: tuple[int, ...], is_needed: bool) -> None:
    if quantized is None:
        if is_needed:
            raise BadInput("neither 16-bit nor float8 outputs are asked for: give a buffer, or `quantized`.")
        return
    q, inverse_scale, amax = quantized
    good = q.shape == shape and q.dtype == torch.float8_e4m3fn and not _gaps(q)
    if not good or any(t.shape != (1,) or t.dtype != torch.float32 for t in (inverse_scale, amax)):
        raise BadInput(
            f"quantized has q {shape} of float8_e4m3fn with contiguous rows, inverse_scale and amax (1,) of "
            f"float32; got {tuple(q.shape)} {q.dtype}, {tuple(inverse_scale.shape)}, {tuple(amax.shape)}."
        )


def _check_into(
    activation: str,
    tensors: tuple[Tensor | None, ...],
    low_rank: tuple[LowRank | None, ...],
    amax: Tensor | None,
) -> None:
    _check_activation(activation)
    present = [t for t in tensors if t is not None]
    first = present[0]
    for x in present:
        if x.dim() != 2 or x.shape != first.shape or x.dtype != first.dtype or _gaps(x):
            raise BadInput(
                "gated_activation_into takes tensors of one shape (M, I) and dtype with contiguous rows; got "
                f"{tuple(x.shape)} {x.dtype} {x.stride()} beside {tuple(first.shape)} {first.dtype}."
            )
    M, I = first.shape
    for branch in (b for b in low_rank if b is not None):
        r = branch.x.shape[-1]
        if branch.x.shape != (M, r) or branch.w.shape != (I, r):
            have = tuple(branch.x.shape), tuple(branch.w.shape)
            raise BadInput(f"a low-rank branch has x ({M}, r) and w ({I}, r); got {have[0]} and {have[1]}.")
        if r > MAX_RANK:
            raise Unsupported(
                f"the kernel adds branches of rank {MAX_RANK} at most, not {r}: add it beforehand."
            )
    if amax is not None and (amax.shape != (M,) or amax.dtype != torch.float32 or not amax.is_contiguous()):
        raise BadInput(f"amax must be ({M},) float32, contiguous; it is {tuple(amax.shape)} {amax.dtype}.")


def _gaps(x: Tensor) -> bool:
    return x.stride(1) != 1 and x.shape[1] > 1
