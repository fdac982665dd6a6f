"""Products of few rows with INT8 and INT4 weights on a CPU, by torch's own kernels for packed weights.

    y = x @ (scale * code)^T        x (M, K) bfloat16, codes (N, K), y (M, N) bfloat16

Without them a row costs the decoding of the whole weight: 2,048 x 2,048, one row, one thread of a CPU with
AVX-512, 23 November 2026: INT8 34 ms decoded and 0.7 ms so (dense bfloat16 1.4), INT4 in blocks of 64 18 ms
and 0.2 ms. They take scales in bfloat16, whose rounding is that of a decoded weight to the same 16 bits.

torch reads beyond the end of sides that are no multiple of its vectors, and computes other dtypes one value
at a time: such products, and CPUs without vectors, keep the definition. INT4's codes are kept a second time,
in the order in which torch reads them, half a byte a weight. INT8's kernel ends the process where codes or x
do not begin at a multiple of its vectors, as tensors of a file do that is mapped into memory: codes of that
kind are kept a second time too, and such an x is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fewbits.formats.base import Packed
from fewbits.formats.integer import INT4_VALUES
from fewbits.formats.tables import lookup_nibbles

MOST_ROWS = 128  # beyond them decoding once, for the library, is as fast
_GROUPS = (128, 64, 32)
_ALIGNMENT = 64  # bytes: what torch allocates begins at a multiple of them
_SIDE = {8: (1, 32), 4: (16, 32)}  # what N and K are multiples of, by the bits


@dataclass(frozen=True)
class _Copy:
    """What torch reads: INT4's codes in its order, the scales; and of which codes and scales they are."""

    version: tuple[int, ...]
    codes: Tensor
    scales: Tensor


_COPIES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the codes of a weight


def cpu_product(x: Tensor, packed: Packed) -> Tensor | None:
    """``x @ W^T`` (M, N) for x (M, K) and W (N, K); None where torch has no kernel that is faster."""
    if not _takes(x, packed):
        return None
    copy = _copy_of(packed)
    x = x.contiguous()
    if _coding_of(packed).bits == 8:
        y: Tensor = torch._weight_int8pack_mm(_aligned(x), copy.codes, copy.scales)
        return y
    return torch._weight_int4pack_mm_for_cpu(x, copy.codes, packed.shape[1] // len(copy.scales), copy.scales)


def _takes(x: Tensor, packed: Packed) -> bool:
    if type(x) is not Tensor or x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.dim() != 2:
        return False
    coding, shape = _coding_of(packed), packed.shape
    plain = coding is not None and coding.kind == "whole" and not coding.zero_point and coding.bits in _SIDE
    if not plain or set(packed.parts) != {"codes", "scales"} or not 1 <= len(x) <= MOST_ROWS:
        return False
    if type(packed.codes) not in (Tensor, nn.Parameter) or torch.compiler.is_compiling():
        return False
    rows, columns = _SIDE[coding.bits]
    sides = shape[0] % rows == 0 and shape[1] % columns == 0
    return sides and _group(coding, shape[1]) > 0 and "AVX" in torch.backends.cpu.get_cpu_capability()


def _coding_of(packed: Packed) -> Any:
    """What the weight's format says of its codes; None if it says nothing."""
    return packed.format.contract.coding


def _group(coding: Any, inner: int) -> int:
    """Columns of a scale as torch takes them; 0 if it does not take this format's."""
    rows, columns = coding.block
    if rows != 1 or (coding.bits == 8 and columns):
        return 0
    if coding.bits == 8:
        return inner
    if columns:
        return columns if columns in _GROUPS and inner % columns == 0 else 0
    return next((group for group in _GROUPS if inner % group == 0), 0)  # a row's scale, said for each group


def _copy_of(packed: Packed) -> _Copy:
    codes, scales = packed.codes, packed.parts["scales"]
    version = (*_version(codes), *_version(scales))
    copy = _COPIES.get(codes)
    if copy is None or copy.version != version:
        copy = _Copy(version, *_as_torch_reads(codes.detach(), scales.detach().float(), packed))
        _COPIES[codes] = copy
    return copy


def _version(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), -1 if x.is_inference() else x._version


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _as_torch_reads(codes: Tensor, scales: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    coding = _coding_of(packed)
    if coding.bits == 8:
        return _aligned(codes.contiguous()), scales.reshape(-1).bfloat16()
    rows, inner = packed.shape
    group = _group(coding, inner)
    numbers = lookup_nibbles(codes.reshape(-1), INT4_VALUES).view(rows, inner).to(torch.int32) + 8
    scales = scales.expand(rows, inner // group) if scales.shape[1] == 1 else scales
    pairs = torch.stack([scales.t(), torch.zeros_like(scales.t())], dim=-1)  # (groups, N, scale and zero)
    return torch._convert_weight_to_int4pack_for_cpu(numbers, 1), pairs.bfloat16().contiguous()
