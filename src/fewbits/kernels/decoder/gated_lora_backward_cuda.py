"""The arguments and the launch of gated_lora_backward.cu: the kernel for Hopper at rank 16.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same arguments.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.decoder.gated_lora_backward_triton import BackwardOperands
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import capability_of, cdiv, multiprocessors, on_device_of

SOURCE = "decoder/gated_lora_backward.cu"
RANK, STEP = 16, 16  # as in the source
WARPS = (14, 16, 8, 12, 7)  # of a block, the best first
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
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
        *((name, ctypes.c_int) for name in ("M", "I", "splits")),
        *((f"pitch_{name}", ctypes.c_int) for name in _PITCHES),
        *((f"stride_{name}", ctypes.c_int) for name in _STRIDES),
    ]


def is_faster(device: torch.device) -> bool:
    """Whether the kernel is the one to take on this GPU: a Hopper, whose shared memory has room for it.

    At M = 8192, I = 14336 on an H200, with the sums of shares: 370 us, where Triton's takes 492; with E4M3 in
    place of 16-bit gradients 359 and 515.
    """
    return capability_of(device)[0] == 9 and nvrtc.missing() is None


def shared_bytes(warps: int) -> int:
    """Of a block: two steps of dh, e and u, two shares of t, w and three steps of x."""
    return warps * (2 * 3072 + 2 * 2048 + 3 * 1024) + 3 * 1792


class GatedTiling(NamedTuple):
    """Warps of a block, each with 32 columns, and into how many parts the rows go."""

    warps: int
    splits: int


@lru_cache(maxsize=64)
def plan(M: int, I: int, processors: int) -> GatedTiling | None:
    """The plan that leaves fewest multiprocessors idle; None: no plan fits I.

    The warps follow from I alone: other numbers of rows ask for no other binary.
    """
    chosen, best = None, -1.0
    for warps in WARPS:
        slabs, slots = I // (32 * warps), processors * (16 // warps)
        for splits in range(1, 17) if I % (32 * warps) == 0 else ():
            busy = slabs * splits / (cdiv(slabs * splits, slots) * slots) - 0.005 * splits  # shares of dw
            if busy > best:
                chosen, best = GatedTiling(warps, splits), busy
    return None if chosen is None else chosen._replace(splits=min(chosen.splits, max(1, cdiv(M, STEP))))


class Call(NamedTuple):
    """What is launched: the argument, the macros, blocks, and tensors that must live until then."""

    argument: Arguments
    defines: nvrtc.Defines
    blocks: int
    sum_blocks: int
    dw: Tensor
    shares: tuple[Tensor, Tensor]


def fits(operands: BackwardOperands) -> bool:
    """Whether the kernel reads and writes these: whole slabs of columns, 16 bytes at a time."""
    dh, e, u, activation, low_rank, outputs, t, quantized = operands
    M, I = e.shape
    thin = [branch.x for branch in low_rank]
    wide = [dh, e, u, *thin, *(d for d in outputs if d is not None)]
    wide += [] if quantized is None else [quantized.q]
    return (
        activation in ACTIVATIONS
        and e.dtype == torch.bfloat16
        and all(branch.x.shape[1] == RANK for branch in low_rank)
        and all(w.dtype == e.dtype for branch in low_rank for w in branch)
        and M > 0
        and plan(M, I, 1) is not None
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in wide)
        and all(x.stride(1) == 1 for x in (*wide, t))
        and t.data_ptr() % 8 == 0
        and t.stride(0) % 4 == 0
    )


def call_of(operands: BackwardOperands, scalings: tuple[float, float], how: GatedTiling) -> Call:
    """The call for operands that `fits` has passed."""
    dh, e, u, activation, low_rank, outputs, t, quantized = operands
    (M, I), (de, du) = e.shape, outputs
    (xe, we), (xu, wu), (xd, wd) = low_rank
    threads, splits, float32 = 32 * how.warps, how.splits, torch.float32
    splits = cdiv(cdiv(M, STEP), cdiv(cdiv(M, STEP), splits))  # none without rows
    slabs = I // threads
    t_shares = torch.empty(slabs, M, 2 * RANK, dtype=float32, device=e.device)
    dw_shares = torch.empty(splits, slabs, 3, threads, RANK, dtype=float32, device=e.device)
    dw = torch.empty(3, I, RANK, dtype=float32, device=e.device)
    q, inverse, qmax = (None, None, None) if quantized is None else quantized
    tensors = (dh, e, u, xd, xe, xu, wd, we, wu, de, du, q, inverse, qmax, t_shares, dw_shares, t, dw)
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    rows = (dh, e, u, xd, xe, xu, de, du, q, t)
    pitches = [0 if x is None else x.stride(0) * x.element_size() for x in rows]
    strides = [*wd.stride(), *we.stride(), *wu.stride()]
    argument = Arguments(*pointers, *scalings, M, I, splits, *pitches, *strides)
    defines = (
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("WRITE_D", int(de is not None)),
        ("FLOAT8", int(q is not None)),
        ("WARPS", how.warps),
    )
    sum_blocks = cdiv(M * 2 * RANK // 4, threads) + cdiv(3 * I * RANK // 4, threads)
    return Call(argument, defines, slabs * splits, sum_blocks, dw, (t_shares, dw_shares))


def launch(
    operands: BackwardOperands, scalings: tuple[float, float], how: GatedTiling | None = None
) -> Tensor:
    """As `gated_lora_backward_triton.launch`, for operands that `fits` has passed: dw (3, I, 16) float32."""
    e = operands.e
    how = how or plan(*e.shape, multiprocessors(e.device))
    assert how is not None
    call = call_of(operands, scalings, how)
    threads, shared = 32 * how.warps, shared_bytes(how.warps)
    with on_device_of(e):
        main = nvrtc.kernel(SOURCE, "gated_lora_backward", call.defines, e.device.index, shared)
        nvrtc.launch(main, (call.blocks, 1, 1), threads, shared, call.argument)
        add = nvrtc.kernel(SOURCE, "gated_lora_sum", call.defines, e.device.index, 0)
        nvrtc.launch(add, (call.sum_blocks, 1, 1), threads, 0, call.argument)
    return call.dw
