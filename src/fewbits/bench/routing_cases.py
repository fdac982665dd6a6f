"""Cases of what stands around the products of experts: sorting pairs, their activation, their adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.problem import Case, Problem, randn
from fewbits.kernels.decoder.gated_pairs import GatedForward, gated_pairs, gated_pairs_ref
from fewbits.kernels.product.expert_matrices import expert_matrices
from fewbits.kernels.product.expert_order import Choices, expert_order, expert_order_ref
from fewbits.kernels.product.pair_low_rank import LowRankPairs, pair_low_rank, pair_low_rank_ref

Build = Callable[[Case, torch.device], Problem]
_PAIRS, _EXPERTS, _RANK = 8, 128, 16  # of a token, and of Qwen3-30B-A3B; of an adapter


def expert_order_cases(max_size: int) -> list[Case]:
    """8 of 128 experts for each of 8192 tokens; whole numbers, read twice and written four times."""
    M = min(8192, max_size)
    return [_case("expert_order", M, _PAIRS, (2 + 4) * 8 * _PAIRS * M, 0.0, _order_problem)]


def expert_matrices_cases(max_size: int) -> list[Case]:
    """PEFT's second matrix of an adapter on the second product, float32, to bfloat16 expert by expert."""
    M, N = min(2048, max_size), _RANK * _EXPERTS
    return [_case("expert_matrices", M, N, 6 * M * N, 0.0, _matrices_problem)]


def pair_low_rank_cases(max_size: int) -> list[Case]:
    """What A gives back to the pairs of 8192 tokens, in place."""
    M, N = _PAIRS * min(8192, max_size), min(2048, max_size)
    moved = 2 * M * (2 * N + _RANK) + 4 * _EXPERTS * _RANK * N
    return [_case("pair_low_rank", M, N, moved, 8e-3, _low_rank_problem)]


def gated_pairs_cases(max_size: int) -> list[Case]:
    """The activation of the same pairs."""
    M, N = _PAIRS * min(8192, max_size), min(768, max_size)
    return [_case("gated_pairs", M, N, 2 * 3 * M * N, 8e-3, _gated_problem)]


def _case(op: str, M: int, N: int, moved: int, tolerance: float, build: Build) -> Case:
    """One case in bfloat16."""
    return Case(
        op=op, part="", format="bfloat16", M=M, N=N, bytes_moved=moved, tolerance=tolerance, build=build
    )


def _order_problem(case: Case, device: torch.device) -> Problem:
    chosen = torch.rand(case.M, _EXPERTS, device=device, dtype=torch.float32).topk(_PAIRS).indices
    choices = Choices(chosen, _EXPERTS)

    def ours() -> Sequence[Tensor]:
        return tuple(part.double() for part in expert_order(*choices))

    def eager() -> Sequence[Tensor]:
        return tuple(part.double() for part in expert_order_ref(choices))

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, eager)


def _matrices_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.float32, case.M, case.N).view(case.M, _RANK, _EXPERTS).permute(2, 0, 1)

    def ours() -> Sequence[Tensor]:
        return (expert_matrices(x, dtype=torch.bfloat16),)

    def eager() -> Sequence[Tensor]:
        return (x.to(torch.bfloat16, memory_format=torch.contiguous_format),)

    def exact() -> Sequence[Tensor]:
        return (x.bfloat16().double(),)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _low_rank_problem(case: Case, device: torch.device) -> Problem:
    y, t = randn(device, torch.bfloat16, case.M, case.N), randn(device, torch.bfloat16, case.M, _RANK)
    a = randn(device, torch.bfloat16, _EXPERTS, _RANK, case.N)
    ends = torch.full((_EXPERTS,), case.M // _EXPERTS, device=device).cumsum(0).int()
    ends[-1] = case.M
    into = torch.empty_like(y)

    def ours() -> Sequence[Tensor]:
        return (pair_low_rank(into.copy_(y), t, a, ends),)

    def eager() -> Sequence[Tensor]:
        return (y + F.grouped_mm(t, a, offs=ends),)

    def exact() -> Sequence[Tensor]:
        total = y.double()
        pair_low_rank_ref(LowRankPairs(total, t.double(), a.double(), ends))
        return (total,)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _gated_problem(case: Case, device: torch.device) -> Problem:
    gate_up = randn(device, torch.bfloat16, case.M, 2 * case.N)

    def ours() -> Sequence[Tensor]:
        return (gated_pairs(gate_up).z,)

    def eager() -> Sequence[Tensor]:
        gate, up = gate_up.chunk(2, 1)
        return (F.silu(gate) * up,)

    def exact() -> Sequence[Tensor]:
        z = torch.empty(case.M, case.N, dtype=torch.float64, device=device)
        gated_pairs_ref(GatedForward(gate_up.double(), "silu", z, None, None))
        return (z,)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


MAKERS = (expert_order_cases, expert_matrices_cases, pair_low_rank_cases, gated_pairs_cases)
