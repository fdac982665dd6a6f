"""The Triton kernels of adamw.py, which has the formulas, and their launch: one for any number of tensors.

Each tensor is a row of a table of addresses on the device, each program's piece of work a row of another.
All divisions and roots are IEEE's and no multiply-add is fused: results equal the definition.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fewbits.kernels._launch import CompileCase, jit, on_device_of, tl

BLOCK = 256
_BLOCKS = 8  # of 256 values, one program's work: about 2 k values, as the other elementwise kernels
_COLUMNS = 8  # param, grad, m, m's scales, v, v's scales, number of values, seed


@jit
def _stored_value(codes_ptr, scales_ptr, values_ptr, offs, block, mask, block_mask):
    """A tile (blocks, 256) of a moment in float32."""
    code = tl.load(codes_ptr + offs, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + block, mask=block_mask, other=0.0)
    return tl.load(values_ptr + code) * scale[:, None]


@jit
def _store_moment(
    x, codes_ptr, scales_ptr, guess_ptr, thresholds_ptr, offs, block, mask, block_mask
):  # fmt: skip
    """Write a tile of a moment in 8 bits: a block's scale is its largest magnitude.

    The first 16 bits of a float32 leave at most two codes to choose from: a table says which is the lower,
    one threshold which of the two it is.
    """
    bits = tl.max(tl.where(mask, x, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    absmax = tl.where(bits >= 0x7F800000, float("nan"), bits.to(tl.float32, bitcast=True))
    scaled = x * tl.div_rn(1.0, tl.where(absmax < 2.0**-126, 2.0**-126, absmax))[:, None]
    first = (scaled.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    code = tl.load(guess_ptr + first).to(tl.int32)
    above = tl.load(thresholds_ptr + code) >= scaled
    code += tl.where(above, 0, 1)
    tl.store(codes_ptr + offs, code.to(tl.uint8), mask=mask)
    tl.store(scales_ptr + block, absmax, mask=block_mask)


@jit
def _stochastic_bfloat16(x, seed, counter):
    """x (blocks, 256) in bfloat16, rounded up with the probability of the part that is cut off."""
    r0, r1, r2, r3 = tl.randint4x(seed, counter)
    random = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), x.shape)
    bits = x.to(tl.int32, bitcast=True)
    noise = (random >> 16).to(tl.int32)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    bits = tl.where(finite, (bits + noise) & -65536, bits)
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@jit
def _adamw_kernel(
    table_ptr, work_ptr, param_like_ptr, grad_like_ptr, found_inf_ptr, grad_scale_ptr,
    m_values_ptr, v_values_ptr, m_guess_ptr, v_guess_ptr, m_thresholds_ptr, v_thresholds_ptr,
    beta1, rest1, beta2, rest2, decay, step_size, correction2, eps,
    PACKED: tl.constexpr, STOCHASTIC: tl.constexpr, GUARDED: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program takes BLOCKS blocks of 256 values of one tensor.

    GUARDED: there are a gradient scaler's two numbers. EVEN: sizes are multiples of 16, so that 16 bytes are
    moved at a time.
    """
    program = tl.program_id(0)
    tensor = tl.load(work_ptr + 2 * program).to(tl.int64)
    block = tl.load(work_ptr + 2 * program + 1).to(tl.int64) + tl.arange(0, BLOCKS)
    row = table_ptr + tensor * COLUMNS
    param_ptr = tl.multiple_of(tl.load(row).to(param_like_ptr.dtype), 16)
    grad_ptr = tl.multiple_of(tl.load(row + 1).to(grad_like_ptr.dtype), 16)
    n = tl.load(row + 6)
    if GUARDED:
        n = tl.where(tl.load(found_inf_ptr) == 0.0, n, 0)
    if EVEN:
        n = tl.multiple_of(n, 16)
    offs = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    mask = offs < n
    block_mask = block * 256 < n
    param = tl.load(param_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if GUARDED:
        grad = tl.div_rn(grad, tl.broadcast_to(tl.load(grad_scale_ptr), grad.shape))
    if PACKED:
        m_ptr = tl.multiple_of(tl.load(row + 2).to(m_guess_ptr.dtype), 16)
        v_ptr = tl.multiple_of(tl.load(row + 4).to(m_guess_ptr.dtype), 16)
        m_scales_ptr = tl.load(row + 3).to(m_values_ptr.dtype)
        v_scales_ptr = tl.load(row + 5).to(m_values_ptr.dtype)
        m = _stored_value(m_ptr, m_scales_ptr, m_values_ptr, offs, block, mask, block_mask)
        v = _stored_value(v_ptr, v_scales_ptr, v_values_ptr, offs, block, mask, block_mask)
    else:
        m_ptr = tl.multiple_of(tl.load(row + 2).to(m_values_ptr.dtype), 16)
        v_ptr = tl.multiple_of(tl.load(row + 4).to(m_values_ptr.dtype), 16)
        m = tl.load(m_ptr + offs, mask=mask, other=0.0)
        v = tl.load(v_ptr + offs, mask=mask, other=0.0)
    m = m * beta1 + grad * rest1
    v = v * beta2 + (grad * grad) * rest2
    denominator = tl.div_rn(tl.sqrt_rn(v), correction2) + eps
    param = param * decay - tl.div_rn(m, denominator) * step_size
    if STOCHASTIC:
        counter = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(param_ptr + offs, _stochastic_bfloat16(param, tl.load(row + 7), counter), mask=mask)
    else:
        tl.store(param_ptr + offs, param.to(param_like_ptr.dtype.element_ty), mask=mask)
    if PACKED:
        _store_moment(m, m_ptr, m_scales_ptr, m_guess_ptr, m_thresholds_ptr, offs, block, mask, block_mask)
        _store_moment(v, v_ptr, v_scales_ptr, v_guess_ptr, v_thresholds_ptr, offs, block, mask, block_mask)
    else:
        tl.store(m_ptr + offs, m, mask=mask)
        tl.store(v_ptr + offs, v, mask=mask)


@lru_cache(maxsize=64)
def _work(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs, 2) int32: the tensor, and its first block, of each program."""
    pieces = [(n + BLOCK * _BLOCKS - 1) // (BLOCK * _BLOCKS) for n in sizes]
    counts = torch.tensor(pieces)
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[tensor]
    return torch.stack([tensor, first * _BLOCKS], 1).to(torch.int32).contiguous().to(device)


def _to_device(rows: list[list[int]], device: torch.device) -> Tensor:
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def launch_adamw(
    rows: list[list[int]],
    like: tuple[Tensor, Tensor],
    tables: dict[str, Tensor],
    scalars: tuple[float, ...],
    *,
    packed: bool,
    stochastic: bool,
    guard: tuple[Tensor, Tensor] | None,
) -> None:
    """Update tensors of one type of parameter and one of gradient, in one launch.

    Args:
        rows: a list of the table's columns for each tensor; addresses but those of scales are multiples
            of 16.
        like: a parameter and a gradient, for their types and device.
        tables: the 8-bit codes' tables by the kernel's names, less "_ptr".
        scalars: beta1 to eps, as the kernel has them.
        packed: moments are 8-bit codes, else float32.
        stochastic: bfloat16 parameters are rounded stochastically.
        guard: float32 of one value each on the device: whether to do nothing, and the gradients' factor.
    """
    param, grad = like
    device = param.device
    work = _work(tuple(row[6] for row in rows), device)
    if not work.shape[0]:
        return
    found_inf, grad_scale = guard or (tables["m_values"], tables["m_values"])
    with on_device_of(param):
        _adamw_kernel[(work.shape[0],)](
            _to_device(rows, device), work, param, grad, found_inf, grad_scale,
            tables["m_values"], tables["v_values"], tables["m_guess"], tables["v_guess"],
            tables["m_thresholds"], tables["v_thresholds"], *scalars,
            PACKED=packed, STOCHASTIC=stochastic, GUARDED=guard is not None,
            EVEN=all(row[6] % 16 == 0 for row in rows), BLOCKS=_BLOCKS, COLUMNS=_COLUMNS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


_POINTERS = {"table_ptr": "*i64", "work_ptr": "*i32", "param_like_ptr": "*bf16", "grad_like_ptr": "*bf16"}
_POINTERS |= dict.fromkeys(("found_inf_ptr", "grad_scale_ptr", "m_values_ptr", "v_values_ptr"), "*fp32")
_POINTERS |= {"m_guess_ptr": "*u8", "v_guess_ptr": "*u8", "m_thresholds_ptr": "*fp32"}
_POINTERS |= {"v_thresholds_ptr": "*fp32"}
_SCALARS = ("beta1", "rest1", "beta2", "rest2", "decay", "step_size", "correction2", "eps")
_CONSTANTS: dict[str, Any] = {"PACKED": True, "STOCHASTIC": True, "GUARDED": False, "EVEN": True}
_CONSTANTS |= {"BLOCKS": _BLOCKS, "COLUMNS": _COLUMNS}
_SIGNATURE = {**_POINTERS, **dict.fromkeys(_SCALARS, "fp32"), **dict.fromkeys(_CONSTANTS, "constexpr")}
_FLOAT32 = {**_SIGNATURE, "param_like_ptr": "*fp32", "grad_like_ptr": "*fp32"}

COMPILE_CASES = (
    CompileCase(_adamw_kernel, _SIGNATURE, _CONSTANTS, tuple(_POINTERS)),
    CompileCase(
        _adamw_kernel,
        _FLOAT32,
        {**_CONSTANTS, "PACKED": False, "STOCHASTIC": False, "GUARDED": True},
        tuple(_POINTERS),
    ),
)
