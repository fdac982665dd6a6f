"""``a b^T`` of prepared stochastic operands as whole numbers: their codes' exact product, chunk by chunk.

    y[n, m] = sum of dot(qa[n, part], qb[m, part]) * (sa[n, c] * sb[m, c])   over chunks c, and c's parts

A part has as many dimensions as keep every sum below 2**24, so that float32 holds it: 1,040 for codes of 8
bits. Each multiplication and addition after the dot is one float32 rounding in this order. This is what
"int8" layers and INT blocks of attention compute. There is no gradient.

Floor: 8-bit products run at twice bfloat16's rate, so a product takes half of bfloat16's time; every chunk of
128 dimensions adds 4 operations for each value of y, which take about as long again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.launch.grid import MAX_PROGRAMS, check_grid, programs, split_program
from fewbits.kernels.launch.jit import (
    CompileCase,
    capability_of,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
    triton,
)
from fewbits.kernels.launch.ops import one_by_one, run

_EXACT = 2**24  # whole numbers up to here are float32's
_CAPABILITY = (8, 0)  # whose matrix units multiply bytes
_BLOCK_M, _BLOCK_K = 128, 128
_WARPS = {128: 8, 64: 4}  # by rows of a program

# 1. The definition.


def integer_product_ref(qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, chunk: int, part: int) -> Tensor:
    """(..., N, M) float32; see `integer_product`."""
    y = torch.zeros(*qa.shape[:-1], qb.shape[-2], device=qa.device, dtype=torch.float32)
    D = qa.shape[-1]
    with torch.autocast(qa.device.type, enabled=False):
        for i in range(cdiv(D, chunk)):
            end = min((i + 1) * chunk, D)
            for first in range(i * chunk, end, part):
                own = slice(first, min(first + part, end))
                acc = qa[..., own].float() @ qb[..., own].float().mT
                y += acc.mul_(sa[..., i, None] * sb[..., None, :, i])
    return y


# 2. The kernel.


@jit
def _tile(ptr, rows, num_rows, D, first, end, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes of some rows, from dimension ``first`` to before ``end``; 0 elsewhere."""
    offs_k = first + tl.arange(0, BLOCK_K)
    at = ptr + rows[:, None] * D + offs_k[None, :]
    if EVEN:
        return tl.load(at, mask=(rows < num_rows)[:, None], other=0)
    return tl.load(at, mask=(rows < num_rows)[:, None] & (offs_k < end)[None, :], other=0)


@jit
def _integer_kernel(
    qa_ptr, sa_ptr, qb_ptr, sb_ptr, y_ptr, N, M, D, C, chunk, part, stride_b,
    ONE_BLOCK: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y. ONE_BLOCK: a chunk is one part of at most BLOCK_K dimensions; EVEN: of just so many."""
    row_tile, column_tile = split_program(tl.cdiv(N, BLOCK_N))
    batch = tl.program_id(1).to(tl.int64)
    offs_n = row_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = column_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    qa_ptr += batch * N * D
    sa_ptr += batch * N * C
    qb_ptr += batch * stride_b * D
    sb_ptr += batch * stride_b * C
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for c in range(0, C):
        begin = c * chunk
        end = tl.minimum(begin + chunk, D)
        scale_a = tl.load(sa_ptr + offs_n * C + c, mask=offs_n < N, other=0.0)
        scale_b = tl.load(sb_ptr + offs_m * C + c, mask=offs_m < M, other=0.0)
        scale = scale_a[:, None] * scale_b[None, :]
        if ONE_BLOCK:
            a = _tile(qa_ptr, offs_n, N, D, begin, end, EVEN, BLOCK_K)
            b = _tile(qb_ptr, offs_m, M, D, begin, end, EVEN, BLOCK_K)
            y += tl.dot(a, tl.trans(b), out_dtype=tl.int32).to(tl.float32) * scale
        else:
            for first in range(begin, end, part):
                last = tl.minimum(first + part, end)
                acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
                for k in range(first, last, BLOCK_K):
                    a = _tile(qa_ptr, offs_n, N, D, k, last, False, BLOCK_K)
                    b = _tile(qb_ptr, offs_m, M, D, k, last, False, BLOCK_K)
                    acc += tl.dot(a, tl.trans(b), out_dtype=tl.int32)
                y += acc.to(tl.float32) * scale
    at = y_ptr + batch * N * M + offs_n[:, None] * M + offs_m[None, :]
    tl.store(at, y, mask=(offs_n < N)[:, None] & (offs_m < M)[None, :])


def launch(qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, chunk: int, part: int, y: Tensor) -> None:
    """Write y (B, N, M) of qa (B, N, D), sa (B, N, C), qb (B or 1, M, D), sb (B or 1, M, C).

    All are contiguous.
    """
    (B, N, M), D = y.shape, qa.shape[2]
    block_n = 64 if N <= 64 else 128
    block_k = min(_BLOCK_K, max(32, next_power_of_2(min(chunk, D))))
    one = min(chunk, D) <= min(block_k, part)
    grid = (*programs(N, M, block_n, _BLOCK_M), B)
    check_grid(grid, "a product of whole numbers")
    with on_device_of(y):
        _integer_kernel[grid](
            *(qa, sa, qb, sb, y, N, M, D, sa.shape[2], chunk, part, 0 if len(qb) == 1 else M),
            ONE_BLOCK=one,
            EVEN=one and chunk == block_k and D % chunk == 0,
            BLOCK_N=block_n,
            BLOCK_M=_BLOCK_M,
            BLOCK_K=block_k,
            num_warps=_WARPS[block_n],
            enable_fp_fusion=False,
        )


def _case(block_n: int, one_block: bool) -> CompileCase:
    signature = {"qa_ptr": "*i8", "sa_ptr": "*fp32", "qb_ptr": "*i8", "sb_ptr": "*fp32", "y_ptr": "*fp32"}
    signature |= dict.fromkeys(("N", "M", "D", "C", "chunk", "part", "stride_b"), "i32")
    constants = {"ONE_BLOCK": one_block, "EVEN": one_block, "BLOCK_N": block_n, "BLOCK_M": _BLOCK_M}
    constants |= {"BLOCK_K": _BLOCK_K}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = (*(name for name in signature if name.endswith("_ptr")), "N", "M", "D", "chunk", "part")
    return CompileCase(_integer_kernel, signature, constants, aligned, _WARPS[block_n])


COMPILE_CASES = (_case(128, True), _case(128, False), _case(64, True))

# 3. The op: on a CPU the definition.


class IntegerOperands(NamedTuple):
    """The arguments of the op."""

    qa: Tensor  # (B, N, D) int8
    sa: Tensor  # (B, N, C) float32
    qb: Tensor  # (B or 1, M, D) int8
    sb: Tensor  # (B or 1, M, C) float32
    chunk: int
    part: int


@torch.library.custom_op("fewbits::integer_product", mutates_args=())
@one_by_one
def _integer_product(o: IntegerOperands) -> Tensor:
    return integer_product_ref(*o)


def _cuda_product(o: IntegerOperands) -> Tensor:
    if triton is None or capability_of(o.qa.device) < _CAPABILITY or 0 in (*o.qa.shape, *o.qb.shape):
        return integer_product_ref(*o)
    y = o.sa.new_empty(*o.qa.shape[:2], o.qb.shape[1])
    qa, sa, qb, sb = (x.contiguous() for x in o[:4])
    for at in range(0, len(qa), MAX_PROGRAMS[1]):
        part = slice(at, at + MAX_PROGRAMS[1])
        of_b = part if len(qb) > 1 else slice(None)
        launch(qa[part], sa[part], qb[of_b], sb[of_b], o.chunk, o.part, y[part])
    return y


_integer_product.register_kernel("cuda")(one_by_one(_cuda_product))


@_integer_product.register_fake
@one_by_one
def _(o: IntegerOperands) -> Tensor:
    return o.sa.new_empty(*o.qa.shape[:2], o.qb.shape[1])


# 4. The one public function.


def integer_product(qa: Tensor, sa: Tensor, qb: Tensor, sb: Tensor, options: Stochastic) -> Tensor:
    """The exact product of codes, chunk by chunk, as the module's text says.

    Args:
        qa: (..., N, D) int8 codes of a; with a batch axis or without.
        sa: (..., N, C) float32 scales of a.
        qb: (..., M, D) int8 codes of b, with a batch axis (of 1 for one that serves all) where a has one.
        sb: (..., M, C) float32 scales of b.
        options: that made them.

    Returns:
        (..., N, M) float32.
    """
    if qa.dim() == 2:
        return integer_product(qa[None], sa[None], qb[None], sb[None], options)[0]
    chunk = max(options.chunk_size(qa.shape[-1]), 1)
    part = min(_EXACT // options.max_code**2, chunk)
    return run(_integer_product, _cuda_product, qa, IntegerOperands(qa, sa, qb, sb, chunk, part))
