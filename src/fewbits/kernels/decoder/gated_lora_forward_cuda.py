"""The arguments and the launch of gated_lora_forward.cu: for Hopper at rank 16; see gated_lora_forward.py.

Nothing here needs a GPU but `launch`: the tests run the same source on a CPU with the same arguments.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.decoder.gated_activation_triton import LowRank, Quantized8
from fewbits.kernels.decoder.gated_lora_backward_cuda import ACTIVATIONS, RANK, STEP, GatedTiling, plan
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import capability_of, cdiv, multiprocessors, on_device_of

SOURCE = "decoder/gated_lora_forward.cu"
_POINTERS = "e u xe xu we wu wd h q inverse qmax shares xa".split()  # noqa: SIM905
_PITCHES = "e u xe xu h q xa".split()  # noqa: SIM905
_STRIDES = "wei wer wui wur wdi wdr".split()  # noqa: SIM905


class Arguments(ctypes.Structure):
    """The kernels' argument, field by field as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("M", "I", "splits")),
        *((f"pitch_{name}", ctypes.c_int) for name in _PITCHES),
        *((f"stride_{name}", ctypes.c_int) for name in _STRIDES),
    ]


def is_faster(device: torch.device) -> bool:
    """Whether the kernel is the one to take on this GPU: a Hopper, whose shared memory has room for it.

    At M = 8192, I = 14336 on an H200 204 us, where the activation and cuBLAS take 234; to E4M3 212 and 272.
    """
    return capability_of(device)[0] == 9 and nvrtc.missing() is None


def shared_bytes(warps: int) -> int:
    """Of a block: three steps of e and u, two shares of xa, w and four steps of x."""
    return warps * (3 * 2048 + 2 * 1024 + 3 * 1024) + 4 * 1280


class Call(NamedTuple):
    """What is launched: the argument, the macros, blocks, and the tensor that must live until then."""

    argument: Arguments
    defines: nvrtc.Defines
    blocks: int
    sum_blocks: int
    shares: Tensor


class ForwardOperands(NamedTuple):
    """What the kernel reads and writes.

    Attributes:
        e: (M, I), of gate.
        u: (M, I), of up.
        activation: as in `gated_activation`.
        low_rank: the branches of e and of u, x (M, r) and w (I, r).
        down: (I, r).
        h: (M, I), written, or None.
        quantized: where h goes in E4M3, (M, I), or None.
    """

    e: Tensor
    u: Tensor
    activation: str
    low_rank: tuple[LowRank, LowRank]
    down: Tensor
    h: Tensor | None
    quantized: Quantized8 | None


def fits(operands: ForwardOperands) -> bool:
    """Whether the kernel reads and writes these: whole slabs of columns, 16 bytes at a time."""
    e, u, activation, low_rank, down, h, quantized = operands
    M, I = e.shape
    wide = [e, u, *(branch.x for branch in low_rank)] + ([] if h is None else [h])
    wide += [] if quantized is None else [quantized.q]
    thin = [down, *(x for branch in low_rank for x in branch)]
    return (
        activation in ACTIVATIONS
        and all(x.dtype == torch.bfloat16 for x in (e, u, *thin))
        and all(branch.x.shape[1] == RANK for branch in low_rank)
        and down.shape == (I, RANK)
        and M > 0
        and plan(M, I, 1) is not None
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in wide)
        and all(x.stride(1) == 1 for x in wide)
    )


def call_of(operands: ForwardOperands, scaling: float, xa: Tensor, how: GatedTiling) -> Call:
    """The call for operands that `fits` has passed; xa (M, 16) is written."""
    e, u, activation, low_rank, down, h, quantized = operands
    M, I = e.shape
    (xe, we), (xu, wu) = low_rank
    slabs, threads = I // (32 * how.warps), 32 * how.warps
    splits = cdiv(cdiv(M, STEP), cdiv(cdiv(M, STEP), how.splits))  # none without rows
    shares = torch.empty(slabs, M, RANK, dtype=torch.float32, device=e.device)
    q, inverse, qmax = (None, None, None) if quantized is None else quantized
    tensors = (e, u, xe, xu, we, wu, down, h, q, inverse, qmax, shares, xa)
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    pitches = [0 if x is None else x.stride(0) * x.element_size() for x in (e, u, xe, xu, h, q, xa)]
    strides = [*we.stride(), *wu.stride(), *down.stride()]
    argument = Arguments(*pointers, scaling, M, I, splits, *pitches, *strides)
    defines = (
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("WRITE_H", int(h is not None)),
        ("FLOAT8", int(q is not None)),
        ("WARPS", how.warps),
    )
    return Call(argument, defines, slabs * splits, cdiv(M * RANK // 4, threads), shares)


def launch(operands: ForwardOperands, scaling: float, how: GatedTiling | None = None) -> Tensor:
    """xa (M, 16), for operands that `fits` has passed; h and q are written where they are given."""
    e = operands.e
    how, xa = how or plan(*e.shape, multiprocessors(e.device)), e.new_empty(e.shape[0], RANK)
    assert how is not None
    call = call_of(operands, scaling, xa, how)
    threads, shared = 32 * how.warps, shared_bytes(how.warps)
    with on_device_of(e):
        main = nvrtc.kernel(SOURCE, "gated_lora_forward", call.defines, e.device.index, shared)
        nvrtc.launch(main, (call.blocks, 1, 1), threads, shared, call.argument)
        add = nvrtc.kernel(SOURCE, "gated_lora_forward_sum", call.defines, e.device.index, 0)
        nvrtc.launch(add, (call.sum_blocks, 1, 1), threads, 0, call.argument)
    return xa
