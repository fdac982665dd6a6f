"""Pairs of a token and an expert, sorted by expert: where each pair stands, and where each expert's end.

T tokens choose k of E experts each; the pair q = t k + j is the token t with its choice c[q]. In ascending
order of experts, and within an expert as they came, the pair q stands at

    p(q) = (pairs of experts below c[q]) + (pairs before q of the same expert)

    order[p(q)] = q      inverse[q] = p(q)      rows[p] = order[p] // k      experts[p] = c[order[p]]
    ends[e] = pairs of experts up to and with e

c (T, k) whole numbers below E; order, rows, experts (P,) int64 with P = T k; inverse (T, k) int64; ends (E,)
int32. Whole numbers throughout: the same on every run.

Three kernels: blocks of pairs count their experts, each expert adds up its counts block by block, and each
block places its pairs. torch's sort, scatter and search are some twelve launches.

Floor: c is read twice and 32 bytes a pair are written; 65,536 pairs are 3.1 MB, below a microsecond of a
copy's 4.28 TB/s on an H200: three launches is what it costs, of which the last takes
24 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.launch.jit import CompileCase, cdiv, jit, next_power_of_2, on_device_of, tl
from fewbits.kernels.launch.ops import one_by_one, run
from fewbits.kernels.launch.prepared import start_kernel

_BLOCK_P = 256  # pairs of a program
_BLOCK_E, _BLOCK_B, _BLOCK_Q = 64, 256, 32  # experts, blocks and earlier pairs that it looks at together


class Choices(NamedTuple):
    """What tokens chose."""

    chosen: Tensor  # (T, k)
    num_experts: int


class ExpertOrder(NamedTuple):
    """Where pairs stand when they are sorted; see the file's docstring."""

    rows: Tensor  # (P,)
    experts: Tensor  # (P,)
    order: Tensor  # (P,)
    inverse: Tensor  # (T, k)
    ends: Tensor  # (E,)


# 1. The definition.


def expert_order_ref(o: Choices) -> ExpertOrder:
    """The formulas above, by torch's sort; see `expert_order`."""
    short = torch.int16 if o.num_experts < 2**15 else torch.int64  # a GPU sorts bit by bit
    experts, order = o.chosen.reshape(-1).to(short).sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, numbers)
    below = torch.arange(o.num_experts, device=order.device, dtype=short)
    ends = torch.searchsorted(experts, below, right=True, out_int32=True)
    rows = order // max(1, o.chosen.shape[-1])
    return ExpertOrder(rows, experts.long(), order, inverse.view(o.chosen.shape), ends)


# 2. The kernels.


@jit(do_not_specialize=("P", "num_blocks"))
def _count_kernel(
    chosen_ptr, counts_ptr, P, E, num_blocks,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program counts the experts of BLOCK_P pairs."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    chosen = tl.load(chosen_ptr + pair, mask=pair < P, other=-1).to(tl.int32)
    for first in range(0, E, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)
        counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + experts * num_blocks + tl.program_id(0), counts, mask=experts < E)


@jit(do_not_specialize=("num_blocks",))
def _add_up_kernel(counts_ptr, totals_ptr, num_blocks, BLOCK_B: tl.constexpr):
    """A program makes of an expert's counts those of the blocks before each, and of all."""
    expert, before = tl.program_id(0), 0
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)
        at = counts_ptr + expert * num_blocks + blocks
        counts = tl.load(at, mask=blocks < num_blocks, other=0)
        tl.store(at, before + tl.cumsum(counts, 0) - counts, mask=blocks < num_blocks)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, before)


@jit(do_not_specialize=("P", "num_blocks"))
def _place_kernel(
    chosen_ptr, before_ptr, totals_ptr, rows_ptr, experts_ptr, order_ptr, inverse_ptr, ends_ptr,
    P, E, k, num_blocks,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """A program places BLOCK_P pairs; the first one writes where experts end."""
    block = tl.program_id(0)
    pair = block * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = pair < P
    chosen = tl.load(chosen_ptr + pair, mask=mask, other=-1).to(tl.int32)
    place = tl.load(before_ptr + chosen * num_blocks + block, mask=mask, other=0)
    for start in range(0, BLOCK_P, BLOCK_Q):  # pairs before it in this block
        other = block * BLOCK_P + start + tl.arange(0, BLOCK_Q)
        choice = tl.load(chosen_ptr + other, mask=other < P, other=-2).to(tl.int32)
        same = (chosen[:, None] == choice[None, :]) & (other[None, :] < pair[:, None])
        place += tl.sum(same.to(tl.int32), 1)
    below = 0  # pairs of all experts before those that are looked at
    for first in range(0, E, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)
        totals = tl.load(totals_ptr + experts, mask=experts < E, other=0)
        ends = below + tl.cumsum(totals, 0)
        tl.store(ends_ptr + experts, ends, mask=(experts < E) & (block == 0))
        place += tl.sum(tl.where(chosen[:, None] == experts[None, :], (ends - totals)[None, :], 0), 1)
        below += tl.sum(totals, 0)
    tl.store(inverse_ptr + pair, place.to(tl.int64), mask=mask)
    tl.store(order_ptr + place, pair.to(tl.int64), mask=mask)
    tl.store(rows_ptr + place, (pair // k).to(tl.int64), mask=mask)
    tl.store(experts_ptr + place, chosen.to(tl.int64), mask=mask)


def launch(o: Choices, into: ExpertOrder) -> None:
    """`expert_order_ref` of contiguous choices into contiguous tensors; at least one pair."""
    P, E = into.order.numel(), o.num_experts
    num_blocks, block_e = cdiv(P, _BLOCK_P), min(_BLOCK_E, max(16, next_power_of_2(E)))
    room = 4 * cdiv(E, 4)  # a launch is quicker with aligned tensors
    numbers = torch.empty(room + E * num_blocks, dtype=torch.int32, device=o.chosen.device)
    counts, totals = numbers[room:], numbers[:E]
    with on_device_of(o.chosen):
        start_kernel(
            _count_kernel, (num_blocks,), (o.chosen, counts), P, E, num_blocks,
            BLOCK_P=_BLOCK_P, BLOCK_E=block_e, num_warps=8,
        )  # fmt: skip
        block_b = min(_BLOCK_B, max(16, next_power_of_2(num_blocks)))
        start_kernel(_add_up_kernel, (E,), (counts, totals), num_blocks, BLOCK_B=block_b, num_warps=1)
        start_kernel(
            _place_kernel, (num_blocks,),
            (o.chosen, counts, totals, into.rows, into.experts, into.order, into.inverse, into.ends),
            P, E, o.chosen.shape[-1], num_blocks,
            BLOCK_P=_BLOCK_P, BLOCK_E=block_e, BLOCK_Q=_BLOCK_Q, num_warps=8,
        )  # fmt: skip


_NUMBERS = dict.fromkeys(("P", "E", "k", "num_blocks"), "i32")
_COUNTED = {"chosen_ptr": "*i64", "counts_ptr": "*i32", "P": "i32", "E": "i32", "num_blocks": "i32"}
_COUNTED |= {"BLOCK_P": "constexpr", "BLOCK_E": "constexpr"}
_ADDED = {"counts_ptr": "*i32", "totals_ptr": "*i32", "num_blocks": "i32", "BLOCK_B": "constexpr"}
_PLACED = {"chosen_ptr": "*i64", "before_ptr": "*i32", "totals_ptr": "*i32"}
_PLACED |= dict.fromkeys(("rows_ptr", "experts_ptr", "order_ptr", "inverse_ptr"), "*i64")
_PLACED |= {"ends_ptr": "*i32", **_NUMBERS, **dict.fromkeys(("BLOCK_P", "BLOCK_E", "BLOCK_Q"), "constexpr")}
_BLOCKS = {"BLOCK_P": _BLOCK_P, "BLOCK_E": _BLOCK_E}
COMPILE_CASES = (
    CompileCase(_count_kernel, _COUNTED, _BLOCKS, ("chosen_ptr", "counts_ptr", "E"), 8),
    CompileCase(_add_up_kernel, _ADDED, {"BLOCK_B": _BLOCK_B}, ("counts_ptr", "totals_ptr"), 1),
    CompileCase(
        _place_kernel,
        _PLACED,
        {**_BLOCKS, "BLOCK_Q": _BLOCK_Q},
        (*(name for name in _PLACED if name.endswith("_ptr")), "E"),
        8,
    ),
)


# 3. The op: on a CPU it runs the definition, on CUDA the kernels.


@torch.library.custom_op("fewbits::expert_order", mutates_args=())
@one_by_one
def _expert_order(o: Choices) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(expert_order_ref(o))  # type: ignore[return-value]


def _empty(o: Choices) -> ExpertOrder:
    (T, k), device = o.chosen.shape, o.chosen.device
    rows, experts, order, inverse = torch.empty(4, T * k, dtype=torch.int64, device=device).unbind(0)
    ends = torch.empty(o.num_experts, dtype=torch.int32, device=device)
    return ExpertOrder(rows, experts, order, inverse.view(T, k), ends)


def _cuda(o: Choices) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not o.chosen.numel():
        return tuple(expert_order_ref(o))  # type: ignore[return-value]
    into = _empty(o)
    launch(o._replace(chosen=o.chosen.contiguous()), into)
    return tuple(into)  # type: ignore[return-value]


_expert_order.register_kernel("cuda")(one_by_one(_cuda))


@_expert_order.register_fake
@one_by_one
def _(o: Choices) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (T, k), new = o.chosen.shape, o.chosen.new_empty
    pairs = [new(T * k, dtype=torch.int64) for _ in range(3)]
    return *pairs, new((T, k), dtype=torch.int64), new(o.num_experts, dtype=torch.int32)  # type: ignore[return-value]


# 4. The public function; whole numbers have no gradient.


def expert_order(chosen: Tensor, num_experts: int) -> ExpertOrder:
    """Where the pairs of a token and an expert stand when they are sorted by expert.

    Args:
        chosen: (T, k) of whole numbers below ``num_experts``.
        num_experts: E.

    Returns:
        `ExpertOrder`.

    Raises:
        BadInput: ``chosen`` is no matrix of whole numbers.
    """
    if chosen.dim() != 2 or chosen.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise BadInput(
            "expert_order takes the experts chosen for each row, (T, k) of whole numbers; these are "
            f"{tuple(chosen.shape)} {chosen.dtype}."
        )
    return ExpertOrder(*run(_expert_order, _cuda, chosen, Choices(chosen, num_experts)))
