"""Cases of what a layer of experts does with pairs of a token and an expert, beside its products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.problem import Case, Problem, randn
from fewbits.formats import get_format
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.codec.quantize_float8 import codes_of, quantize_rows, scale_of_amax
from fewbits.kernels.product.grouped_float8 import GroupedRows, grouped_float8, grouped_float8_ref
from fewbits.kernels.product.packed_pairs import packed_pairs, packed_pairs_ref
from fewbits.kernels.product.pair_gradients import pair_gradients, pair_gradients_ref
from fewbits.kernels.product.pair_inputs import pair_inputs, pair_inputs_ref
from fewbits.kernels.product.pair_outer import pair_outer, pair_outer_ref
from fewbits.kernels.product.pair_sums import pair_sums, pair_sums_ref

Build = Callable[[Case, torch.device], Problem]
_PAIRS = 8  # of a token, in Qwen3-30B-A3B
_EXPERTS, _RANK = 128, 32  # there; of an adapter of rank 16 on gate and up


def pair_sums_cases(max_size: int) -> list[Case]:
    """The 8 experts of each of 8192 tokens, weighted, of Qwen3-30B-A3B's width."""
    M, N = min(8192, max_size), min(2048, max_size)
    return [_case("pair_sums", "", M, N, 2 * (_PAIRS + 1) * M * N, _sums_problem)]


def pair_gradients_cases(max_size: int) -> list[Case]:
    """The same tokens' pairs on the way back, of the experts' inner width."""
    M, N = _PAIRS * min(8192, max_size), min(768, max_size)
    return [_case("pair_gradients", "backward", M, N, 2 * 4 * M * N, _gradients_problem)]


def pair_outer_cases(max_size: int) -> list[Case]:
    """The gradient of A beside gate and up: each expert's pairs of the same tokens, rows repeated."""
    M, N = min(8192, max_size), min(2048, max_size)
    moved = 2 * _PAIRS * M * (N + _RANK) + 4 * _EXPERTS * _RANK * N
    return [_case("pair_outer", "backward", M, N, moved, _outer_problem)]


def pair_inputs_cases(max_size: int) -> list[Case]:
    """The same tokens' rows on the way into gate and up, beside what A makes of them."""
    M, N = min(8192, max_size), min(2048, max_size)
    moved = 2 * _PAIRS * M * (2 * N + 2 * _RANK) + 4 * _EXPERTS * _RANK * N
    return [_case("pair_inputs", "", M, N, moved, _inputs_problem)]


def grouped_float8_cases(max_size: int) -> list[Case]:
    """The same tokens into gate and up of 768 values each, both operands in E4M3, without an adapter."""
    M, N, K = min(8192, max_size), min(1536, max_size), min(2048, max_size)
    pairs = _PAIRS * M
    return [
        Case(
            op="grouped_float8",
            part="forward",
            format="float8_e4m3",
            M=M,
            N=N,
            K=K,
            bytes_moved=M * K + _EXPERTS * N * K + 2 * pairs * N,
            flops=2 * pairs * N * K,
            tolerance=8e-3,
            build=_grouped_problem,
        )
    ]


def packed_pairs_cases(max_size: int) -> list[Case]:
    """One token, and sixteen, into gate and up of 768 values each, of eight experts for each token."""
    N, K = min(1536, max_size), min(2048, max_size)
    return [
        Case(
            op="packed_pairs",
            part="forward",
            format="nf4_dq",
            M=tokens,
            N=N,
            K=K,
            bytes_moved=_PAIRS * min(tokens, _EXPERTS // _PAIRS) * N * K // 2,
            tolerance=8e-3,
            build=_packed_problem,
        )
        for tokens in (1, 16)
    ]


def _case(op: str, part: str, M: int, N: int, moved: int, build: Build) -> Case:
    """One case in bfloat16; two roundings of a result are tolerated."""
    return Case(
        op=op,
        part=part,
        format="bfloat16",
        M=M,
        N=N,
        bytes_moved=moved,
        tolerance=8e-3,
        build=build,
    )


def _sums_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M * _PAIRS, case.N)
    index = torch.randperm(case.M * _PAIRS, device=device).view(case.M, _PAIRS)
    weights = torch.rand(case.M, _PAIRS, device=device, dtype=torch.bfloat16)

    def ours() -> Sequence[Tensor]:
        return (pair_sums(x, index, weights),)

    def eager() -> Sequence[Tensor]:
        return (F.embedding_bag(index, x, mode="sum", per_sample_weights=weights),)

    def exact() -> Sequence[Tensor]:
        return (pair_sums_ref(x.double(), index, weights),)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _gradients_problem(case: Case, device: torch.device) -> Problem:
    z, u, extra = (randn(device, torch.bfloat16, case.M, case.N) for _ in range(3))
    weights = torch.rand(case.M, device=device, dtype=torch.bfloat16)

    def ours() -> Sequence[Tensor]:
        return pair_gradients(z, u, weights, extra=extra)

    def eager() -> Sequence[Tensor]:
        both = u + extra
        return both * weights[:, None], (z * both).sum(1, dtype=torch.float32)

    def exact() -> Sequence[Tensor]:
        return pair_gradients_ref(z.double(), u.double(), weights, extra.double())

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _routed(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """A row for each pair, and where the pairs of each expert end, all alike."""
    rows = torch.randint(0, case.M, (case.M * _PAIRS,), device=device)
    sizes = torch.full((_EXPERTS,), case.M * _PAIRS // _EXPERTS, device=device)
    return rows, sizes.cumsum(0).int()


def _inputs_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.N)
    a = randn(device, torch.bfloat16, _EXPERTS, _RANK, case.N)
    rows, ends = _routed(case, device)

    def ours() -> Sequence[Tensor]:
        return pair_inputs(x, a, ends, rows=rows, room=_RANK)

    def eager() -> Sequence[Tensor]:
        wide = F.pad(x, (0, _RANK))[rows]
        inner = F.grouped_mm(wide[:, : case.N], a.transpose(1, 2), offs=ends)
        wide[:, case.N :] = inner
        return wide, inner

    def exact() -> Sequence[Tensor]:
        return pair_inputs_ref(x.double(), a.double(), ends, rows, 1.0, _RANK)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _outer_problem(case: Case, device: torch.device) -> Problem:
    x, t = (
        randn(device, torch.bfloat16, case.M, case.N),
        randn(device, torch.bfloat16, case.M * _PAIRS, _RANK),
    )
    rows, ends = _routed(case, device)

    def ours() -> Sequence[Tensor]:
        return (pair_outer(t, x, ends, rows=rows),)

    def eager() -> Sequence[Tensor]:
        return (F.grouped_mm(t.t(), x[rows], offs=ends),)

    def exact() -> Sequence[Tensor]:
        return (pair_outer_ref(t.double(), x.double(), ends, rows),)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _grouped_problem(case: Case, device: torch.device) -> Problem:
    q, scale = quantize_rows(randn(device, torch.bfloat16, case.M, case.K))
    w = randn(device, torch.bfloat16, _EXPERTS, case.N, case.K)
    w_scale = scale_of_amax(w.abs().amax().float()).view(1, 1)
    w8 = codes_of(w, w_scale)
    w = (w8.float() * w_scale).bfloat16()
    rows, ends = _routed(case, device)

    def ours() -> Sequence[Tensor]:
        return (grouped_float8(q, scale, w8, w_scale, ends, rows=rows),)

    def eager() -> Sequence[Tensor]:
        x = (q.float() * scale).bfloat16()[rows]
        return (F.grouped_mm(x, w.transpose(1, 2), offs=ends),)

    def exact() -> Sequence[Tensor]:
        o = GroupedRows(q, scale, w8, w_scale, ends, rows, None, None, torch.float32)
        return (grouped_float8_ref(o),)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _packed_problem(case: Case, device: torch.device) -> Problem:
    weight = randn(device, torch.bfloat16, _EXPERTS, case.N, case.K) / case.K**0.5
    packed = quantize(weight, get_format(case.format))
    x = randn(device, torch.bfloat16, case.M, case.K)
    chosen = torch.stack([torch.randperm(_EXPERTS, device=device)[:_PAIRS] for _ in range(case.M)])
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=_EXPERTS).cumsum(0).int()
    rows = order // _PAIRS

    def ours() -> Sequence[Tensor]:
        return (packed_pairs(x, rows, packed, ends),)

    def eager() -> Sequence[Tensor]:
        return (F.grouped_mm(x[rows], dequantize(packed).transpose(1, 2), offs=ends),)

    def exact() -> Sequence[Tensor]:
        return (packed_pairs_ref(x.double(), rows, packed, ends, None),)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


MAKERS = (
    packed_pairs_cases,
    pair_sums_cases,
    pair_gradients_cases,
    pair_outer_cases,
    pair_inputs_cases,
    grouped_float8_cases,
)
