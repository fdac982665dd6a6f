"""The Triton kernels of adamw.py, which has the formulas, and their launch: one for any number of tensors.

Each tensor is a row of a table of addresses on the device, each program's piece of work a row of another.
All divisions and roots are IEEE's and no multiply-add is fused: results equal the definition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, on_device_of, tl

BLOCK = 256
SEED_STEP = (
    -0x40A7B892E31B1A47
)  # what a step adds to a seed, modulo 2**64: an odd number, so that none repeats
_BLOCKS = 16  # of 256 values: one program's work
_COLUMNS = 8  # param, grad, m, m's scales, v, v's scales, number of values, seed


@jit
def _gathered(values, index):
    """Entries of a table by a tile of indices."""
    flat = tl.reshape(index, (index.shape[0] * index.shape[1],))
    return tl.reshape(tl.gather(values, flat, 0), index.shape)


@jit
def _stored_value(codes_ptr, scales_ptr, values_ptr, offs, block, mask, block_mask):
    """A tile (blocks, 256) of a moment in float32."""
    code = tl.load(codes_ptr + offs, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + block, mask=block_mask, other=0.0)
    return _gathered(tl.load(values_ptr + tl.arange(0, 256)), code) * scale[:, None]


@jit
def _store_moment(
    x, codes_ptr, scales_ptr, guess_ptr, thresholds_ptr, offs, block, mask, block_mask, SIGNED: tl.constexpr
):
    """Write a tile of a moment in 8 bits: a block's scale is its largest magnitude.

    A float32's exponent and first bits (`guess_index`) leave at most two codes to choose from: a table says
    which is the lower, one threshold which of the two it is.
    """
    bits = tl.max(tl.where(mask, x, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    bad = bits >= 0x7F800000
    absmax = tl.where(bad, float("nan"), bits.to(tl.float32, bitcast=True))
    scaled = x * tl.div_rn(1.0, tl.where(absmax < 2.0**-126, 2.0**-126, absmax))[:, None]
    bits = scaled.to(tl.int32, bitcast=True)
    if SIGNED:
        index = tl.minimum(tl.maximum(((bits & 0x7FFFFFFF) >> 17) - 104 * 64, 0), 23 * 64 - 1)
        index += tl.where(bits < 0, 2048, 0)
    else:
        index = tl.minimum(tl.maximum(((bits & 0x7FFFFFFF) >> 16) - 104 * 128, 0), 23 * 128 - 1)
    code = _gathered(tl.load(guess_ptr + tl.arange(0, 4096)), index).to(tl.int32)
    threshold = _gathered(tl.load(thresholds_ptr + tl.arange(0, 256)), code)
    code += tl.where(threshold >= scaled, 0, 1)
    code = tl.where(bad[:, None], 255, code)
    tl.store(codes_ptr + offs, code.to(tl.uint8), mask=mask)
    tl.store(scales_ptr + block, absmax, mask=block_mask)


@jit
def _stochastic_bfloat16(x, seed, counter):
    """x (blocks, 256) in bfloat16, rounded up with the probability of the part that is cut off."""
    r0, r1, r2, r3 = tl.randint4x(seed, counter)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    noise = tl.reshape(tl.join(words & 0xFFFF, words >> 16), x.shape).to(tl.int32)
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    bits = tl.where(finite, (bits + noise) & -65536, bits)
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@jit
def _adamw_kernel(
    table_ptr, work_ptr, param_like_ptr, grad_like_ptr, found_inf_ptr, grad_scale_ptr,
    m_values_ptr, v_values_ptr, m_guess_ptr, v_guess_ptr, m_thresholds_ptr, v_thresholds_ptr, scalars_ptr,
    PACKED: tl.constexpr, STOCHASTIC: tl.constexpr, GUARDED: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, SEED_STEP: tl.constexpr,
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
    m = m * tl.load(scalars_ptr) + grad * tl.load(scalars_ptr + 1)
    v = v * tl.load(scalars_ptr + 2) + (grad * grad) * tl.load(scalars_ptr + 3)
    correction2 = tl.broadcast_to(tl.load(scalars_ptr + 6), v.shape)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction2) + tl.load(scalars_ptr + 7)
    param = param * tl.load(scalars_ptr + 4) - tl.div_rn(m, denominator) * tl.load(scalars_ptr + 5)
    if STOCHASTIC:
        counter = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        seed = tl.load(row + 7) + tl.load(scalars_ptr + 8).to(tl.int64) * SEED_STEP
        tl.store(param_ptr + offs, _stochastic_bfloat16(param, seed, counter), mask=mask)
    else:
        tl.store(param_ptr + offs, param.to(param_like_ptr.dtype.element_ty), mask=mask)
    if PACKED:
        _store_moment(
            m, m_ptr, m_scales_ptr, m_guess_ptr, m_thresholds_ptr, offs, block, mask, block_mask, True
        )
        _store_moment(
            v, v_ptr, v_scales_ptr, v_guess_ptr, v_thresholds_ptr, offs, block, mask, block_mask, False
        )
    else:
        tl.store(m_ptr + offs, m, mask=mask)
        tl.store(v_ptr + offs, v, mask=mask)


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers (n,) on the device, without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def work_list(sizes: list[int]) -> Tensor:
    """(programs, 2) int32: the tensor, and its first block, of each program."""
    counts = torch.tensor([cdiv(n, BLOCK * _BLOCKS) for n in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[tensor]
    return torch.stack([tensor, first * _BLOCKS], 1).to(torch.int32).contiguous()


class Tensors(NamedTuple):
    """Tensors of one type of parameter, gradient and moments, as the kernel finds them.

    ``table`` (tensors, 8) int64 and ``work`` (programs, 2) int32 are on the device; ``even``: all sizes are
    multiples of 16. Addresses but those of scales are multiples of 16.
    """

    table: Tensor
    work: Tensor
    param_like: Tensor
    grad_like: Tensor
    packed: bool
    stochastic: bool
    even: bool


def launch_adamw(
    tensors: Tensors, tables: dict[str, Tensor], scalars: Tensor, guard: tuple[Tensor, Tensor] | None
) -> None:
    """Update all ``tensors`` in one launch.

    Args:
        tensors: what to update.
        tables: the 8-bit codes' tables by the kernel's names, less "_ptr".
        scalars: (9,) float32 on the device, `AdamWOptions.scalars`.
        guard: float32 of one value each on the device: whether to do nothing, and the gradients' factor.
    """
    found_inf, grad_scale = guard or (tables["m_values"], tables["m_values"])
    with on_device_of(tensors.param_like):
        _adamw_kernel[(tensors.work.shape[0],)](
            tensors.table, tensors.work, tensors.param_like, tensors.grad_like, found_inf, grad_scale,
            tables["m_values"], tables["v_values"], tables["m_guess"], tables["v_guess"],
            tables["m_thresholds"], tables["v_thresholds"], scalars,
            PACKED=tensors.packed, STOCHASTIC=tensors.stochastic, GUARDED=guard is not None,
            EVEN=tensors.even, BLOCKS=_BLOCKS, COLUMNS=_COLUMNS, SEED_STEP=SEED_STEP, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip


_POINTERS = {"table_ptr": "*i64", "work_ptr": "*i32", "param_like_ptr": "*bf16", "grad_like_ptr": "*bf16"}
_POINTERS |= dict.fromkeys(("found_inf_ptr", "grad_scale_ptr", "m_values_ptr", "v_values_ptr"), "*fp32")
_POINTERS |= {"m_guess_ptr": "*u8", "v_guess_ptr": "*u8", "m_thresholds_ptr": "*fp32"}
_POINTERS |= {"v_thresholds_ptr": "*fp32", "scalars_ptr": "*fp32"}
_CONSTANTS: dict[str, Any] = {"PACKED": True, "STOCHASTIC": True, "GUARDED": False, "EVEN": True}
_CONSTANTS |= {"BLOCKS": _BLOCKS, "COLUMNS": _COLUMNS, "SEED_STEP": SEED_STEP}
_SIGNATURE = {**_POINTERS, **dict.fromkeys(_CONSTANTS, "constexpr")}
_FLOAT32 = {**_SIGNATURE, "param_like_ptr": "*fp32", "grad_like_ptr": "*fp32"}

COMPILE_CASES = (
    CompileCase(_adamw_kernel, _SIGNATURE, _CONSTANTS, tuple(_POINTERS), 8),
    CompileCase(
        _adamw_kernel,
        _FLOAT32,
        {**_CONSTANTS, "PACKED": False, "STOCHASTIC": False, "GUARDED": True},
        tuple(_POINTERS),
        8,
    ),
)
