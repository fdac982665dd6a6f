"""Which CUDA kernels a product of prepared stochastic operands takes: those of the least estimated time.

The rates were measured on an H200 (docs/stochastic-kernels.md); on other GPUs their ratios are a guess.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from fewbits.device import Device
from fewbits.kernels import _stochastic_bits, _stochastic_lookup, _stochastic_many
from fewbits.kernels._launch import cdiv

_FEW_ROWS = 16  # for which nothing else than lookups comes into question
_LOOKUP_CLOCKS = 0.037  # of a multiprocessor, for a product of two codes
_TABLE_CLOCKS = 2500  # for the tables of 4 rows and 128 dimensions
_BITS_CLOCKS = 137  # of a block of 128 rows and outputs, for a word of 32 steps
_WITHOUT_BITS = (10, 0)  # from here on products of bits are made of other instructions
_EXPANSION_CLOCKS = 0.45  # of a multiprocessor, for a word of an operand


class Sizes(NamedTuple):
    """Of a product."""

    batch: int
    rows: int
    outputs: int
    inner: int
    chunk: int


@lru_cache(maxsize=1024)
def kernels_for(sizes: Sizes, longest: int, gpu: Device) -> ModuleType:
    """The module whose `launch` is the quickest for streams of at most ``longest`` steps."""
    if sizes.rows <= _FEW_ROWS:
        return _stochastic_lookup
    return min(estimated_clocks(sizes, longest, gpu).items(), key=lambda item: item[1])[0]


def estimated_clocks(sizes: Sizes, longest: int, gpu: Device) -> dict[ModuleType, float]:
    """Clocks of each way that the GPU's shared memory allows."""
    batch, rows, outputs, inner, chunk = sizes
    products, slices = batch * rows * outputs * inner, cdiv(inner, chunk) * cdiv(chunk, 128)
    tables = batch * cdiv(rows, 4) * slices * _TABLE_CLOCKS
    clocks: dict[ModuleType, float] = {
        _stochastic_lookup: (products * _LOOKUP_CLOCKS + tables) / gpu.multiprocessors
    }
    if gpu.shared_memory_bytes >= _stochastic_many.SHARED_BYTES:
        plan = _stochastic_many.plan(
            batch, rows, outputs, cdiv(inner, chunk), chunk, multiprocessors=gpu.multiprocessors
        )
        clocks[_stochastic_many] = _stochastic_many.clocks(plan, gpu.multiprocessors)
    has_bits = gpu.capability is not None and gpu.capability < _WITHOUT_BITS
    if longest and has_bits and gpu.shared_memory_bytes >= _stochastic_bits.SHARED_BYTES:
        words = _stochastic_bits.words_of(longest)
        waves = cdiv(batch * cdiv(rows, 128) * cdiv(outputs, 128), gpu.multiprocessors)
        expansion = batch * (rows + outputs) * inner * words * _EXPANSION_CLOCKS / gpu.multiprocessors
        padded = cdiv(inner, chunk) * 32 * cdiv(chunk * words, 32)
        clocks[_stochastic_bits] = waves * padded * _BITS_CLOCKS + expansion
    return clocks
