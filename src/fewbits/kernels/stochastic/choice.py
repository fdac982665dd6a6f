"""Which CUDA kernels a product of prepared stochastic operands takes: those of the least estimated time.

The rates were measured on an H200 (docs/notebook/stochastic-kernels.md); on other GPUs their
ratios are a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fewbits.device import Device, describe
from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.launch.jit import cdiv
from fewbits.kernels.stochastic import bits, lookup, many, nibbles, wide_bits, wide_lengths
from fewbits.kernels.stochastic.parts import Launch

_FEW_ROWS = 16  # for which nothing else than lookups comes into question
_LOOKUP_CLOCKS = 0.024  # of a multiprocessor, for a product of two codes
_TABLE_CLOCKS = 2500  # for the tables of 4 rows and 128 dimensions
_BITS_CLOCKS = 137  # of a block of 128 rows and outputs, for a word of 32 steps
_BITS_BLOCK_CLOCKS = 9_000  # of such a block beside that
_BITS_LAUNCH_CLOCKS = 80_000
_WITHOUT_BITS = (10, 0)  # from here on products of bits are made of other instructions
_EXPANSION_CLOCKS = 0.45  # of a multiprocessor, for a word of an operand
_TURNING_CLOCKS = 0.5  # of a multiprocessor, for a value of y
_WIDE_ROW_CLOCKS = (48, 1.9)  # of a multiprocessor, for a row's visit and each of its steps
_WIDE_LAUNCH_CLOCKS = 45_000  # of its launches, beside those of many rows


class Sizes(NamedTuple):
    """Of a product."""

    batch: int
    rows: int
    outputs: int
    inner: int
    chunk: int


class Way(NamedTuple):
    """One kind of kernels."""

    name: str
    tables_of: Callable[..., Any]  # None where they cannot hold the counts
    launch: Launch
    one_length: bool = False  # of all rows: tables are of b's codes
    limits: str = "counts lie too far from straight lines, or chunks are too long, for tables of 4 bits"


FEW_ROWS = Way("few rows", lookup.tables_of, lookup.launch)
ROWS_16 = Way("16 rows", lookup.tables_of, many.launch)
ROWS_32 = Way("32 rows", nibbles.tables_of, nibbles.launch)
ROWS_32_OF_B = Way("32 rows of b", nibbles.tables_of_b, nibbles.launch_swapped, True)
BITS = Way("bits", bits.tables_of, bits.launch)
_NO_BITS = "streams, chunks or counts of this kind have no bits for warpgroups"
WIDE = Way("wide bits", wide_lengths.tables_of, wide_lengths.launch, limits=_NO_BITS)
# For rows of several lengths its tables equal the definition by emulation, and were timed on an H200, but not
# compared there: `pytest -m gpu tests/kernels/test_stochastic_wide_bits.py` does. Where it passes, the last
# argument (``one_length``) can go.
WIDE_OF_B = Way("wide bits of b", wide_bits.tables_of_b, wide_bits.launch_swapped, True, limits=_NO_BITS)


class Choice(NamedTuple):
    """Kernels, their tables, and why they are not those of the least time ("" if they are)."""

    way: Way
    tables: Any
    reason: str


def choose(
    sizes: Sizes, options: Stochastic, levels: tuple[int, ...], device: torch.device, *, mixed: bool
) -> Choice:
    """The quickest kernels whose tables hold the counts; ``mixed``: rows or chunks differ in stream length.

    Some must hold them: those of few rows, which are always among the ways.
    """
    reason = ""
    for way in ways(sizes, max(levels), describe(device)):
        if (way.one_length and mixed) or (way is BITS and not options.streams.by_prefix):
            continue  # BITS shows b's bits to a run of a's, whatever the gate
        tables = way.tables_of(options, levels, sizes.chunk, device)
        if tables is not None:
            return Choice(way, tables, reason)
        reason = way.limits
    raise AssertionError(reason)  # the path "lookup" has tables for few rows


@lru_cache(maxsize=1024)
def ways(sizes: Sizes, longest: int, gpu: Device) -> tuple[Way, ...]:
    """By time, the least first, for streams of at most ``longest`` steps."""
    if sizes.rows <= _FEW_ROWS:
        return (FEW_ROWS,)
    clocks = estimated_clocks(sizes, longest, gpu)
    return tuple(sorted(clocks, key=lambda way: clocks[way]))


def estimated_clocks(sizes: Sizes, longest: int, gpu: Device) -> dict[Way, float]:
    """Clocks of each way that the GPU's shared memory allows."""
    batch, rows, outputs, inner, chunk = sizes
    products, slices = batch * rows * outputs * inner, cdiv(inner, chunk) * cdiv(chunk, 128)
    tables = batch * cdiv(rows, 4) * slices * _TABLE_CLOCKS
    clocks: dict[Way, float] = {FEW_ROWS: (products * _LOOKUP_CLOCKS + tables) / gpu.multiprocessors}
    shared, multiprocessors = gpu.shared_memory_bytes, gpu.multiprocessors
    if shared >= many.SHARED_BYTES:
        plan = many.plan(batch, rows, outputs, cdiv(inner, chunk), chunk, multiprocessors=multiprocessors)
        clocks[ROWS_16] = many.clocks(plan, multiprocessors)
    if shared >= nibbles.SHARED_BYTES:
        turning = turning_of(sizes) / multiprocessors
        for way, n, m, more in ((ROWS_32, rows, outputs, 0.0), (ROWS_32_OF_B, outputs, rows, turning)):
            small = nibbles.plan(
                batch, n, m, cdiv(inner, chunk), chunk, multiprocessors=multiprocessors, shared=shared
            )
            clocks[way] = small.clocks + more
    has_bits = gpu.capability is not None and gpu.capability < _WITHOUT_BITS
    if longest and has_bits and shared >= bits.SHARED_BYTES:
        words = bits.words_of(longest)
        waves = cdiv(batch * cdiv(rows, 128) * cdiv(outputs, 128), multiprocessors)
        expansion = batch * (rows + outputs) * inner * words * _EXPANSION_CLOCKS / multiprocessors
        padded = cdiv(inner, chunk) * 32 * bits.stages_of_chunk(chunk, words, bits.share_of(longest))
        clocks[BITS] = waves * (padded * _BITS_CLOCKS + _BITS_BLOCK_CLOCKS) + expansion + _BITS_LAUNCH_CLOCKS
    if shared >= wide_bits.SHARED_BYTES and wide_bits.fits(gpu.capability, inner, longest):
        for way, n, m, more in ((WIDE, rows, outputs, 0.0), (WIDE_OF_B, outputs, rows, turning_of(sizes))):
            clocks[way] = (
                _wide_clocks(sizes._replace(rows=n, outputs=m), longest, gpu) + more / multiprocessors
            )
    return clocks


def turning_of(sizes: Sizes) -> float:
    """Clocks of one multiprocessor to turn y round."""
    return sizes.batch * sizes.rows * sizes.outputs * _TURNING_CLOCKS


def _wide_clocks(sizes: Sizes, longest: int, gpu: Device) -> float:
    """Of `wide_bits`, whose ``rows`` are those whose bits are written."""
    batch, rows, outputs, inner, chunk = sizes
    plan = wide_bits.plan(wide_bits.WideSizes(batch, rows, outputs, cdiv(inner, chunk), chunk, longest), gpu)
    of_visit, of_step = _WIDE_ROW_CLOCKS
    preparing = batch * rows * plan.visits * (of_visit + of_step * plan.steps)
    preparing += batch * outputs * inner * wide_bits.CODE_CLOCKS
    return plan.clocks + _WIDE_LAUNCH_CLOCKS + preparing / gpu.multiprocessors
