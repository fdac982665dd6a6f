"""Triton kernels of stochastic_emulated.py: codes to values, and to features in 8 bits.

A code becomes R values of E4M3: its row of a table (in bfloat16) times its sign and its chunk's share of
the row's largest scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.kernels._launch import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl, triton

_ROWS, _DIMENSIONS = 16, 16  # of a program


def takes(device: torch.device) -> bool:
    """Whether the kernels run there: they need units that convert E4M3."""
    return triton is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@jit
def _features_kernel(
    codes_ptr, shares_ptr, table_ptr, masks_ptr, out_ptr, rows, D, num_chunks, chunk, first_chunk, num_codes,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some rows' codes of a few dimensions, from chunk ``first_chunk`` on.

    Neighbouring programs have the same dimensions, so that few rows of the table are in use at a time.
    """
    at = tl.arange(0, BLOCK_M * BLOCK_D)
    row = (tl.program_id(0) * BLOCK_M + at // BLOCK_D).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_D + at % BLOCK_D
    offs_r = tl.arange(0, BLOCK_R)
    mask = (offs < num_codes) & (row < rows)
    d = first_chunk * chunk + offs
    code = tl.load(codes_ptr + row * D + d, mask=mask, other=0).to(tl.int32)
    share = tl.load(shares_ptr + row * num_chunks + d // chunk, mask=mask, other=0.0)
    share = tl.where(code < 0, -share, share)
    which = tl.load(masks_ptr + d % chunk, mask=mask, other=0).to(tl.int32)
    entry = (which * 128 + tl.abs(code)) * RANK
    both = mask[:, None] & (offs_r < RANK)[None, :]
    values = tl.load(table_ptr + entry[:, None] + offs_r[None, :], mask=both, other=0.0).to(tl.float32)
    made = (values * share[:, None]).to(tl.float8e4nv)
    to = (row * num_codes + offs) * RANK
    tl.store(out_ptr + to[:, None] + offs_r[None, :], made, mask=both)


def features(codes: Tensor, shares: Tensor, table: Tensor, masks: Tensor, chunk: int, part: range) -> Tensor:
    """Features (rows, codes of the chunks in ``part`` * R) in E4M3 of codes (rows, D) int8.

    Args:
        codes: contiguous.
        shares: (rows, chunks) float32: each chunk's scale over the row's largest.
        table: (masks, 128, R) bfloat16.
        masks: (chunk,) int64: which mask.
        chunk: inner dimensions of a chunk.
        part: which chunks.
    """
    (rows, D), rank = codes.shape, table.shape[2]
    num_codes = min(D, part.stop * chunk) - part.start * chunk
    out = torch.empty(rows, num_codes * rank, dtype=torch.float8_e4m3fn, device=codes.device)
    with on_device_of(codes):
        _features_kernel[cdiv(rows, _ROWS), cdiv(num_codes, _DIMENSIONS)](
            codes, shares, table, masks, out, rows, D, shares.shape[1], chunk, part.start, num_codes,
            RANK=rank, BLOCK_R=next_power_of_2(rank), BLOCK_M=_ROWS, BLOCK_D=_DIMENSIONS, num_warps=4,
        )  # fmt: skip
    return out


@jit
def _values_kernel(codes_ptr, scales_ptr, out_ptr, D, num_chunks, chunk, BLOCK: tl.constexpr):
    """Codes of a row times their chunks' scales."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < D
    code = tl.load(codes_ptr + row * D + offs, mask=mask, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + row * num_chunks + offs // chunk, mask=mask, other=0.0)
    tl.store(out_ptr + row * D + offs, (code * scale).to(tl.bfloat16), mask=mask)


def values(codes: Tensor, scales: Tensor, chunk: int) -> Tensor:
    """(rows, D) bfloat16 that contiguous codes (rows, D) stand for; scales (rows, chunks)."""
    rows, D = codes.shape
    out = torch.empty(rows, D, dtype=torch.bfloat16, device=codes.device)
    block = min(4096, next_power_of_2(D))
    with on_device_of(codes):
        _values_kernel[rows, cdiv(D, block)](
            codes, scales, out, D, scales.shape[1], chunk, BLOCK=block, num_warps=4
        )
    return out


def _cases() -> tuple[CompileCase, ...]:
    pointers = {
        "codes_ptr": "*i8", "shares_ptr": "*fp32", "table_ptr": "*bf16", "masks_ptr": "*i64",
        "out_ptr": "*fp8e4nv",
    }  # fmt: skip
    sizes = dict.fromkeys(("rows", "D", "num_chunks", "chunk", "first_chunk", "num_codes"), "i32")
    constants = {"RANK": 16, "BLOCK_R": 16, "BLOCK_M": _ROWS, "BLOCK_D": _DIMENSIONS}
    signature = pointers | sizes | dict.fromkeys(constants, "constexpr")
    aligned = ("codes_ptr", "table_ptr", "out_ptr", "D", "chunk", "num_codes")
    made = [CompileCase(_features_kernel, signature, constants, aligned, 4, 89)]
    pointers = {"codes_ptr": "*i8", "scales_ptr": "*fp32", "out_ptr": "*bf16"}
    sizes = dict.fromkeys(("D", "num_chunks", "chunk"), "i32")
    signature = pointers | sizes | {"BLOCK": "constexpr"}
    made.append(
        CompileCase(_values_kernel, signature, {"BLOCK": 4096}, ("codes_ptr", "out_ptr", "D", "chunk"))
    )
    return tuple(made)


COMPILE_CASES = _cases()
