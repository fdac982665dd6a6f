"""The arguments and the launch of _gated_lora.cu: gated_lora_backward.py's kernel for Hopper at rank 16.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same arguments.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels import _nvrtc
from fewbits.kernels._gated_triton import LowRank, Quantized8
from fewbits.kernels._launch import cdiv, multiprocessors, on_device_of

SOURCE = "_gated_lora.cu"
RANK, STEP = 16, 16  # as in the source
WARPS = 8  # of a block
_TIMED = False  # nobody has yet
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_POINTERS = (
    "dh e u xd xe xu wd we wu de du q inverse qmax t_shares dw_shares t dw".split()  # noqa: SIM905
)
_PITCHES = "dh e u xd xe xu de du q t".split()  # noqa: SIM905
_STRIDES = "wdi wdr wei wer wui wur".split()  # noqa: SIM905


class Arguments(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_float) for name in ("scale_e", "scale_u")),
        *((name, ctypes.c_int) for name in ("M", "I", "blocks")),
        *((f"pitch_{name}", ctypes.c_int) for name in _PITCHES),
        *((f"stride_{name}", ctypes.c_int) for name in _STRIDES),
    ]


def is_faster(device: torch.device) -> bool:
    """Whether the kernel is the one to take on this GPU: a Hopper, whose shared memory has room for it."""
    return _TIMED and torch.cuda.get_device_capability(device)[0] == 9 and _nvrtc.missing() is None


def shared_bytes(warps: int) -> int:
    """Of a block: two steps of dh, e and u, two shares of t, w and three steps of x."""
    return warps * (2 * 3072 + 2 * 2048 + 3 * 1024) + 3 * 1792


class Call(NamedTuple):
    """What is launched: the argument, the macros, blocks, and tensors that must live until then."""

    argument: Arguments
    defines: _nvrtc.Defines
    blocks: int
    sum_blocks: int
    dw: Tensor
    shares: tuple[Tensor, Tensor]


def fits(
    dh: Tensor,
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank: tuple[LowRank, LowRank, LowRank],
    outputs: tuple[Tensor | None, Tensor | None],
    t: Tensor,
    quantized: Quantized8 | None,
) -> bool:
    """Whether the kernel reads and writes these: whole slabs of columns, 16 bytes at a time."""
    M, I = e.shape
    thin = [branch.x for branch in low_rank]
    wide = [dh, e, u, *thin, *(d for d in outputs if d is not None)]
    wide += [] if quantized is None else [quantized.q]
    return (
        activation in _ACTIVATIONS
        and e.dtype == torch.bfloat16
        and all(branch.x.shape[1] == RANK for branch in low_rank)
        and all(w.dtype == e.dtype for branch in low_rank for w in branch)
        and I % (32 * WARPS) == 0
        and M > STEP
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in wide)
        and all(x.stride(1) == 1 for x in (*wide, t))
        and t.data_ptr() % 8 == 0
        and t.stride(0) % 4 == 0
    )


def call_of(
    dh: Tensor,
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank: tuple[LowRank, LowRank, LowRank],
    outputs: tuple[Tensor | None, Tensor | None],
    t: Tensor,
    quantized: Quantized8 | None,
    scalings: tuple[float, float],
    blocks: int,
    warps: int = WARPS,
) -> Call:
    """The call for operands that `fits` has passed; ``blocks`` share the steps."""
    (M, I), (de, du) = e.shape, outputs
    (xe, we), (xu, wu), (xd, wd) = low_rank
    slabs, threads, float32 = I // (32 * warps), 32 * warps, torch.float32
    steps = cdiv(M, STEP) * slabs
    blocks = cdiv(steps, cdiv(steps, blocks))
    t_shares = torch.empty(slabs, M, 2 * RANK, dtype=float32, device=e.device)
    dw_shares = torch.empty(blocks + slabs, 3, 32 * warps, RANK, dtype=float32, device=e.device)
    dw = torch.empty(3, I, RANK, dtype=float32, device=e.device)
    q, inverse, qmax = (None, None, None) if quantized is None else quantized
    tensors = (dh, e, u, xd, xe, xu, wd, we, wu, de, du, q, inverse, qmax, t_shares, dw_shares, t, dw)
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    rows = (dh, e, u, xd, xe, xu, de, du, q, t)
    pitches = [0 if x is None else x.stride(0) * x.element_size() for x in rows]
    strides = [*wd.stride(), *we.stride(), *wu.stride()]
    argument = Arguments(*pointers, *scalings, M, I, blocks, *pitches, *strides)
    defines = (
        ("ACTIVATION", _ACTIVATIONS[activation]),
        ("WRITE_D", int(de is not None)),
        ("FLOAT8", int(q is not None)),
        ("WARPS", warps),
    )
    sum_blocks = cdiv(M * 2 * RANK // 4, threads) + cdiv(3 * I * RANK // 4, threads)
    return Call(argument, defines, blocks, sum_blocks, dw, (t_shares, dw_shares))


def launch(
    dh: Tensor,
    e: Tensor,
    u: Tensor,
    activation: str,
    low_rank: tuple[LowRank, LowRank, LowRank],
    outputs: tuple[Tensor | None, Tensor | None],
    t: Tensor,
    quantized: Quantized8 | None,
    scalings: tuple[float, float],
    warps: int = WARPS,
) -> Tensor:
    """As `_gated_lora_triton.launch`, for operands that `fits` has passed."""
    blocks = 16 // warps * multiprocessors(e.device)
    call = call_of(dh, e, u, activation, low_rank, outputs, t, quantized, scalings, blocks, warps)
    with on_device_of(e):
        shared = shared_bytes(warps)
        main = _nvrtc.kernel(SOURCE, "gated_lora_backward", call.defines, e.device.index, shared)
        _nvrtc.launch(main, (call.blocks, 1, 1), 32 * warps, shared, call.argument)
        add = _nvrtc.kernel(SOURCE, "gated_lora_sum", call.defines, e.device.index, 0)
        _nvrtc.launch(add, (call.sum_blocks, 1, 1), 32 * warps, 0, call.argument)
    return call.dw
