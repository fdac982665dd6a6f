"""The Triton kernels of gated_activation.py, which has the formulas, and their launches.

Several tiles may be taken one below the other (``steps``): the low-rank weights are then loaded once, and
``stages`` of loads are in flight. Programs run along I first, so that neighbours read the same rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.codec.quantize_float8_triton import to_float8
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.prepared import start_kernel
from fewbits.kernels.launch.tuning import tile_for

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 128  # x and w tiles of this rank still fit beside the others


class LowRank(NamedTuple):
    """A low-rank branch: ``x @ w^T`` with x (M, r) and w (I, r) of any strides; scaling is folded into w."""

    x: Tensor
    w: Tensor


class Quantized8(NamedTuple):
    """An output in E4M3 under one scale that is known beforehand (delayed scaling); see gated_activation.py.

    q (M, I), or (M, 2 I) for two outputs side by side, float8_e4m3fn; inverse_scale and amax (1,) float32.
    """

    q: Tensor
    inverse_scale: Tensor
    amax: Tensor


# 1. The kernels.


@jit
def weight(w_ptr, stride_wi, stride_wr, offs_i, I, R, BLOCK_R: tl.constexpr, EVEN_R: tl.constexpr):
    """A low-rank branch's columns, (BLOCK_R, BLOCK_I); nothing if BLOCK_R is 0: there is no branch."""
    w = None
    if BLOCK_R:
        offs_r = tl.arange(0, BLOCK_R)
        mask = (offs_i < I)[None, :]
        if not EVEN_R:
            mask = mask & (offs_r < R)[:, None]
        at = offs_i[None, :].to(tl.int64) * stride_wi + offs_r[:, None] * stride_wr
        w = tl.load(w_ptr + at, mask=mask, other=0.0)
    return w


@jit
def operand(
    ptr, stride, x_ptr, stride_x, w, offs_m, offs_i, mask, M, R, BLOCK_R: tl.constexpr, EVEN_R: tl.constexpr
):
    """A tile of an operand as float32, with its low-rank product added."""
    at = offs_m[:, None] * stride + offs_i[None, :]
    tile = tl.load(ptr + at) if mask is None else tl.load(ptr + at, mask=mask, other=0.0)
    tile = tile.to(tl.float32)
    if BLOCK_R:
        offs_r = tl.arange(0, BLOCK_R)
        mask_x = (offs_m < M)[:, None]
        if not EVEN_R:
            mask_x = mask_x & (offs_r < R)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * stride_x + offs_r[None, :], mask=mask_x, other=0.0)
        tile = tl.dot(x, w, tile, input_precision="ieee")
    return tile


@jit
def _logistic(z, FAST: tl.constexpr):
    """``1 / (1 + exp(-z))`` in float32, to about 2 ulp; FAST in 4 instructions, where tl.sigmoid takes 12.

    FAST flushes what is below 2**-126 to zero. The interpreter has no assembly: FAST is for GPUs only.
    """
    if FAST:
        s = tl.inline_asm_elementwise(
            """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        s = tl.sigmoid(z)
    return s


@jit
def activation_and_slope(e, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """s and s' of ``f(e) = e * s(e)``, in float32."""
    if ACTIVATION == "gelu":
        s = 0.5 + 0.5 * tl.erf(e * 0.7071067811865476)
        ds = tl.exp(-0.5 * e * e) * 0.3989422804014327
    else:
        if ACTIVATION == "gelu_tanh":
            s = _logistic(1.5957691216057308 * e * (1.0 + 0.044715 * e * e), FAST)
            ds = s * (1.0 - s) * (1.5957691216057308 + 0.2140644488143471 * e * e)
        else:
            s = _logistic(e, FAST)
            ds = s * (1.0 - s)
    return s, ds


@jit
def _magnitudes(x):
    """Bits of the largest magnitude of each row, int32: in the order of the magnitudes, NaN above all."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1)


@jit
def largest_bits(bits, x):
    """``bits`` or those of the largest magnitude of a tile, whichever are more."""
    return tl.maximum(bits, tl.max(_magnitudes(x), 0))


@jit
def _columns(I, BLOCK_I: tl.constexpr):
    """Programs run along I first."""
    return (tl.program_id(0) % tl.cdiv(I, BLOCK_I)) * BLOCK_I + tl.arange(0, BLOCK_I)


@jit
def _rows(I, step, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, STEPS: tl.constexpr):
    """Each program takes STEPS blocks of rows of its columns."""
    first = (tl.program_id(0) // tl.cdiv(I, BLOCK_I)) * STEPS + step
    return (first * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)


@jit(do_not_specialize=("M",), do_not_specialize_on_alignment=("inverse_ptr", "qmax_ptr"))
def _gated_fwd_kernel(
    e_ptr, u_ptr, xe_ptr, we_ptr, xu_ptr, wu_ptr, h_ptr, amax_ptr, q_ptr, inverse_ptr, qmax_ptr,
    M, I, RE, RU, stride_e, stride_u, stride_xe, stride_wei, stride_wer, stride_xu, stride_wui, stride_wur,
    stride_h, stride_q,
    ACTIVATION: tl.constexpr, BLOCK_RE: tl.constexpr, EVEN_RE: tl.constexpr, BLOCK_RU: tl.constexpr,
    EVEN_RU: tl.constexpr, WRITE_H: tl.constexpr, AMAX: tl.constexpr, FLOAT8: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h, and with AMAX the running maximum of each row's magnitudes as float32 bits.

    FLOAT8 writes h to q too under an inverse scale, and the largest magnitude of all to qmax.
    """
    if FLOAT8:
        inverse, qmax = tl.load(inverse_ptr), 0
    offs_i = _columns(I, BLOCK_I)
    we = weight(we_ptr, stride_wei, stride_wer, offs_i, I, RE, BLOCK_RE, EVEN_RE)
    wu = weight(wu_ptr, stride_wui, stride_wur, offs_i, I, RU, BLOCK_RU, EVEN_RU)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        offs_m = _rows(I, step, BLOCK_M, BLOCK_I, STEPS)
        mask = None if EVEN else (offs_m < M)[:, None] & (offs_i < I)[None, :]
        e = operand(e_ptr, stride_e, xe_ptr, stride_xe, we, offs_m, offs_i, mask, M, RE, BLOCK_RE, EVEN_RE)
        u = operand(u_ptr, stride_u, xu_ptr, stride_xu, wu, offs_m, offs_i, mask, M, RU, BLOCK_RU, EVEN_RU)
        s, _ = activation_and_slope(e, ACTIVATION, FAST)
        h = (e * s * u).to(h_ptr.dtype.element_ty)
        if WRITE_H:
            tl.store(h_ptr + offs_m[:, None] * stride_h + offs_i[None, :], h, mask=mask)
        if AMAX:
            tl.atomic_max(amax_ptr + offs_m, _magnitudes(h), mask=offs_m < M, sem="relaxed")
        if FLOAT8:
            q = to_float8(h, inverse, q_ptr.dtype.element_ty, 448, True, not FAST)
            tl.store(q_ptr + offs_m[:, None] * stride_q + offs_i[None, :], q, mask=mask)
            qmax = largest_bits(qmax, h)
    if FLOAT8:
        tl.atomic_max(qmax_ptr, qmax, sem="relaxed")


@jit(do_not_specialize=("M",), do_not_specialize_on_alignment=("inverse_ptr", "qmax_ptr"))
def _gated_bwd_kernel(
    dh_ptr, e_ptr, u_ptr, xd_ptr, wd_ptr, xe_ptr, we_ptr, xu_ptr, wu_ptr, de_ptr, du_ptr, h_ptr, amax_ptr,
    q_ptr, inverse_ptr, qmax_ptr, M, I, RD, RE, RU, stride_dh, stride_e, stride_u, stride_xd, stride_wdi,
    stride_wdr, stride_xe, stride_wei, stride_wer, stride_xu, stride_wui, stride_wur, stride_de,
    stride_du, stride_h, stride_q, ACTIVATION: tl.constexpr, BLOCK_RD: tl.constexpr, EVEN_RD:
    tl.constexpr, BLOCK_RE: tl.constexpr, EVEN_RE: tl.constexpr, BLOCK_RU: tl.constexpr, EVEN_RU:
    tl.constexpr, WRITE_D: tl.constexpr, WRITE_H: tl.constexpr, AMAX: tl.constexpr, FLOAT8: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, STEPS: tl.constexpr, STAGES:
    tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """de and du, which may lie over e and u; amax is that of both. q has both side by side."""
    if FLOAT8:
        inverse, qmax = tl.load(inverse_ptr), 0
    offs_i = _columns(I, BLOCK_I)
    wd = weight(wd_ptr, stride_wdi, stride_wdr, offs_i, I, RD, BLOCK_RD, EVEN_RD)
    we = weight(we_ptr, stride_wei, stride_wer, offs_i, I, RE, BLOCK_RE, EVEN_RE)
    wu = weight(wu_ptr, stride_wui, stride_wur, offs_i, I, RU, BLOCK_RU, EVEN_RU)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        offs_m = _rows(I, step, BLOCK_M, BLOCK_I, STEPS)
        mask = None if EVEN else (offs_m < M)[:, None] & (offs_i < I)[None, :]
        dh = operand(dh_ptr, stride_dh, xd_ptr, stride_xd, wd, offs_m, offs_i, mask, M, RD, BLOCK_RD, EVEN_RD)
        e = operand(e_ptr, stride_e, xe_ptr, stride_xe, we, offs_m, offs_i, mask, M, RE, BLOCK_RE, EVEN_RE)
        u = operand(u_ptr, stride_u, xu_ptr, stride_xu, wu, offs_m, offs_i, mask, M, RU, BLOCK_RU, EVEN_RU)
        s, ds = activation_and_slope(e, ACTIVATION, FAST)
        f = e * s
        if WRITE_H:
            h = (f * u).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + offs_m[:, None] * stride_h + offs_i[None, :], h, mask=mask)
        du = (dh * f).to(du_ptr.dtype.element_ty)
        de = (dh * u * (s + e * ds)).to(de_ptr.dtype.element_ty)
        if WRITE_D:
            tl.store(de_ptr + offs_m[:, None] * stride_de + offs_i[None, :], de, mask=mask)
            tl.store(du_ptr + offs_m[:, None] * stride_du + offs_i[None, :], du, mask=mask)
        if AMAX:
            bits = tl.maximum(_magnitudes(de), _magnitudes(du))
            tl.atomic_max(amax_ptr + offs_m, bits, mask=offs_m < M, sem="relaxed")
        if FLOAT8:
            q = q_ptr + offs_m[:, None] * stride_q + offs_i[None, :]
            tl.store(q, to_float8(de, inverse, q_ptr.dtype.element_ty, 448, True, not FAST), mask=mask)
            tl.store(q + I, to_float8(du, inverse, q_ptr.dtype.element_ty, 448, True, not FAST), mask=mask)
            qmax = largest_bits(largest_bits(qmax, de), du)
    if FLOAT8:
        tl.atomic_max(qmax_ptr, qmax, sem="relaxed")


# 2. The launches.


class GatedTile(NamedTuple):
    """A program's tile, how many it takes one below the other, its warps, and loads in flight over tiles."""

    block_m: int
    block_i: int
    num_warps: int
    steps: int = 1
    stages: int = 1


def gated_tile(backward: bool, ranks: tuple[_Ranks, ...], itemsize: int, float8: bool = False) -> GatedTile:
    """The best of a sweep (`fewbits bench tune`) on an H200 at M = 8192, I = 14336, bfloat16.

    With branches of rank 16: 97 % of a copy's bandwidth forward, 92 % backward, also with rows' maxima;
    without: all of it. Wider branches take narrower tiles, so that 3 branches' weights fit into 48 KB of
    shared memory. To float8 alone 88 % forward, 82 % backward; with the 16-bit outputs 93 % and 87 %.
    """
    widest = max(rank.block for rank in ranks)
    if not widest:
        # In float8 every program ends at one counter for all: fewer programs, of the backward tile.
        return GatedTile(1, 2048, 8) if backward or float8 else GatedTile(2, 512, 2)
    block_i = min(max(8192 // (widest * itemsize), 32), 128)
    if itemsize > 2:  # two stages of float32 tiles would not fit everywhere
        return GatedTile(32, block_i, 4)
    if not backward:
        return GatedTile(16, block_i, 4, 8, 3)
    return GatedTile(16 if float8 else 32, block_i, 4, 16, 3)


def _tile_of(backward: bool, ranks: tuple[_Ranks, ...], like: Tensor, float8: bool) -> GatedTile:
    rule = gated_tile(backward, ranks, like.element_size(), float8)
    facts = (max(rank.block for rank in ranks), like.element_size(), float8)
    return tile_for("gated_backward" if backward else "gated_forward", facts, like, rule)


def launch_fwd(
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank: tuple[LowRank | None, LowRank | None],
    h: Tensor | None,
    amax: Tensor | None,
    tile: GatedTile | None = None,
    quantized: Quantized8 | None = None,
) -> None:
    """`gated_activation_ref` into ``h`` and ``quantized`` by the Triton kernel; not for float64.

    ``low_rank`` is that of e and of u; e, u and h are (M, I) with contiguous rows. amax (M,) float32 takes
    the maximum with what it holds.
    """
    M, I = e.shape
    if e.numel() == 0:
        return
    (xe, we, *strides_e), ranks_e = low_rank_arguments(low_rank[0], e)
    (xu, wu, *strides_u), ranks_u = low_rank_arguments(low_rank[1], e)
    tile = tile or _tile_of(False, (ranks_e, ranks_u), e, quantized is not None)
    with on_device_of(e):
        start_kernel(
            _gated_fwd_kernel, _grid(M, I, tile),
            (e, u, xe, we, xu, wu, e if h is None else h, _bits(amax, e), *_float8_arguments(quantized, e)),
            M, I, ranks_e.rank, ranks_u.rank, e.stride(0), u.stride(0), *strides_e, *strides_u,
            0 if h is None else h.stride(0), 0 if quantized is None else quantized.q.stride(0),
            ACTIVATION=activation, WRITE_H=h is not None, FLOAT8=quantized is not None,
            BLOCK_RE=ranks_e.block, EVEN_RE=ranks_e.even, BLOCK_RU=ranks_u.block, EVEN_RU=ranks_u.even,
            AMAX=amax is not None, FAST=e.is_cuda, **_tile_constants(M, I, tile),
        )  # fmt: skip


class GatedOutputs(NamedTuple):
    """Where the backward pass writes.

    Attributes:
        de: (M, I), or None, and so du; they may lie over e and u.
        du: (M, I).
        h: (M, I), the forward pass's result again, or None.
        amax: (M,) float32, takes the largest magnitude of de's and du's row, or None.
        quantized: where de and du go in E4M3, (M, 2 I), or None.
    """

    de: Tensor | None
    du: Tensor | None
    h: Tensor | None = None
    amax: Tensor | None = None
    quantized: Quantized8 | None = None


def launch_bwd(
    dh: Tensor,
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank: tuple[LowRank | None, LowRank | None, LowRank | None],
    into: GatedOutputs,
    tile: GatedTile | None = None,
) -> None:
    """`gated_activation_backward_ref` of dh, e and u (M, I) ``into`` its places by the Triton kernel.

    ``low_rank`` is that of e, of u and of dh.
    """
    *outputs, amax, quantized = into
    de, _, h = outputs
    M, I = e.shape
    if e.numel() == 0:
        return
    (xe, we, *strides_e), ranks_e = low_rank_arguments(low_rank[0], e)
    (xu, wu, *strides_u), ranks_u = low_rank_arguments(low_rank[1], e)
    (xd, wd, *strides_d), ranks_d = low_rank_arguments(low_rank[2], e)
    tile = tile or _tile_of(True, (ranks_e, ranks_u, ranks_d), e, quantized is not None)
    with on_device_of(e):
        start_kernel(
            _gated_bwd_kernel, _grid(M, I, tile),
            (dh, e, u, xd, wd, xe, we, xu, wu, *(e if t is None else t for t in outputs), _bits(amax, e),
             *_float8_arguments(quantized, e)),
            M, I, ranks_d.rank, ranks_e.rank, ranks_u.rank, dh.stride(0), e.stride(0), u.stride(0),
            *strides_d, *strides_e, *strides_u, *(0 if t is None else t.stride(0) for t in outputs),
            0 if quantized is None else quantized.q.stride(0), WRITE_D=de is not None,
            FLOAT8=quantized is not None, ACTIVATION=activation,
            BLOCK_RD=ranks_d.block, EVEN_RD=ranks_d.even, BLOCK_RE=ranks_e.block,
            EVEN_RE=ranks_e.even, BLOCK_RU=ranks_u.block, EVEN_RU=ranks_u.even, WRITE_H=h is not None,
            AMAX=amax is not None, FAST=e.is_cuda, **_tile_constants(M, I, tile),
        )  # fmt: skip


class _Ranks(NamedTuple):
    """Rank, its padded block (0: no branch) and whether the two agree."""

    rank: int
    block: int
    even: bool


def low_rank_arguments(branch: LowRank | None, like: Tensor) -> tuple[tuple[Any, ...], _Ranks]:
    """A low-rank branch as a kernel takes it: x (M, R), w (I, R), strides, and how R is cut."""
    if branch is None:
        return (like, like, 0, 0, 0), _Ranks(0, 0, True)
    x, w = branch.x.to(like.dtype), branch.w.to(like.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    rank = x.shape[1]
    block = max(16, next_power_of_2(rank))
    return (x, w, x.stride(0), w.stride(0), w.stride(1)), _Ranks(rank, block, block == rank)


def _grid(M: int, I: int, tile: GatedTile) -> tuple[int]:
    return (cdiv(I, tile.block_i) * cdiv(M, tile.block_m * tile.steps),)


def _tile_constants(M: int, I: int, tile: GatedTile) -> dict[str, Any]:
    even = M % (tile.block_m * tile.steps) == 0 and I % tile.block_i == 0
    return {
        "EVEN": even,
        "BLOCK_M": tile.block_m,
        "BLOCK_I": tile.block_i,
        "STEPS": tile.steps,
        "STAGES": tile.stages,
        "num_warps": tile.num_warps,
    }


def _float8_arguments(quantized: Quantized8 | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if quantized is None:
        return like, like, like
    return quantized.q, quantized.inverse_scale, _bits(quantized.amax, like)


def _bits(amax: Tensor | None, like: Tensor) -> Tensor:
    return like if amax is None else amax.view(torch.int32)


_FWD = dict.fromkeys(("e_ptr", "u_ptr", "xe_ptr", "we_ptr", "xu_ptr", "wu_ptr", "h_ptr"), "*bf16")
_FLOAT8 = {"amax_ptr": "*i32", "q_ptr": "*fp8e4nv", "inverse_ptr": "*fp32", "qmax_ptr": "*i32"}
_FWD |= _FLOAT8
_FWD |= dict.fromkeys(("M", "I", "RE", "RU", "stride_e", "stride_u", "stride_xe", "stride_wei"), "i32")
_FWD |= dict.fromkeys(("stride_wer", "stride_xu", "stride_wui", "stride_wur", "stride_h"), "i32")
_FWD |= {"stride_q": "i32"}
_FWD_CONSTANTS = {
    "ACTIVATION": "silu", "BLOCK_RE": 16, "EVEN_RE": True, "BLOCK_RU": 16, "EVEN_RU": True, "WRITE_H": True,
    "AMAX": False, "FLOAT8": False, "stride_wer": 1, "stride_wur": 1, "EVEN": True,
    "BLOCK_M": 32, "BLOCK_I": 128, "STEPS": 1, "STAGES": 1,
    "FAST": True,
}  # fmt: skip
_BWD = dict.fromkeys(("dh_ptr", "e_ptr", "u_ptr", "xd_ptr", "wd_ptr", "xe_ptr", "we_ptr", "xu_ptr"), "*bf16")
_BWD |= dict.fromkeys(("wu_ptr", "de_ptr", "du_ptr", "h_ptr"), "*bf16") | _FLOAT8
_BWD |= dict.fromkeys(("M", "I", "RD", "RE", "RU", "stride_dh", "stride_e", "stride_u", "stride_xd"), "i32")
_BWD |= dict.fromkeys(("stride_wdi", "stride_wdr", "stride_xe", "stride_wei", "stride_wer"), "i32")
_BWD |= dict.fromkeys(
    ("stride_xu", "stride_wui", "stride_wur", "stride_de", "stride_du", "stride_h", "stride_q"), "i32"
)
_BWD_CONSTANTS = {
    "ACTIVATION": "silu", "BLOCK_RD": 16, "EVEN_RD": True, "BLOCK_RE": 16, "EVEN_RE": True, "BLOCK_RU": 16,
    "EVEN_RU": True, "stride_wer": 1, "stride_wur": 1, "stride_wdi": 1, "WRITE_D": True, "WRITE_H": True,
    "AMAX": False, "FLOAT8": False, "EVEN": True, "BLOCK_M": 32, "BLOCK_I": 128, "STEPS": 1, "STAGES": 1,
    "FAST": True,
}  # fmt: skip
_NO_BRANCH = {"BLOCK_RE": 0, "BLOCK_RU": 0, "BLOCK_I": 1024, "EVEN": False}


def _case(kernel: Any, signature: dict[str, str], constants: dict[str, Any], **changed: Any) -> CompileCase:
    """A case with some of its constants changed; a stride of 1 is a constant too."""
    float8 = changed.get("FLOAT8", False)
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    types |= {} if float8 else {"q_ptr": "*bf16"}
    aligned = tuple(n for n in types if n == "I" or n.endswith("_ptr"))
    strides = tuple(n for n in types if n.startswith("stride") and n not in constants)
    return CompileCase(
        kernel, types, {**constants, **changed}, aligned + strides, capability=89 if float8 else 80
    )


COMPILE_CASES = (
    _case(_gated_fwd_kernel, _FWD, _FWD_CONSTANTS),
    _case(_gated_fwd_kernel, _FWD, _FWD_CONSTANTS, BLOCK_M=16, STEPS=8, STAGES=2),
    _case(_gated_fwd_kernel, _FWD, _FWD_CONSTANTS, STEPS=8, STAGES=2, AMAX=True, BLOCK_RE=64, EVEN_RE=False),
    _case(_gated_fwd_kernel, _FWD, _FWD_CONSTANTS, ACTIVATION="gelu", BLOCK_M=4, **_NO_BRANCH),
    _case(_gated_fwd_kernel, _FWD, _FWD_CONSTANTS, BLOCK_M=16, STEPS=8, STAGES=3, FLOAT8=True, WRITE_H=False),
    _case(_gated_fwd_kernel, _FWD, _FWD_CONSTANTS, FLOAT8=True, BLOCK_M=1, **_NO_BRANCH | {"BLOCK_I": 2048}),
    _case(_gated_bwd_kernel, _BWD, _BWD_CONSTANTS),
    _case(
        _gated_bwd_kernel, _BWD, _BWD_CONSTANTS, BLOCK_M=16, STEPS=16, STAGES=3, FLOAT8=True, WRITE_D=False
    ),
    _case(_gated_bwd_kernel, _BWD, _BWD_CONSTANTS, STEPS=16, STAGES=3),
    _case(_gated_bwd_kernel, _BWD, _BWD_CONSTANTS, STEPS=8, STAGES=2, AMAX=True, BLOCK_RD=128, EVEN_RD=False),
    _case(
        _gated_bwd_kernel, _BWD, _BWD_CONSTANTS, ACTIVATION="gelu_tanh", BLOCK_RD=0, BLOCK_M=2, **_NO_BRANCH
    ),
)
