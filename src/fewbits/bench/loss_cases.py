"""Cases of the head and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Run, randn
from fewbits.kernels.loss.linear_cross_entropy import linear_cross_entropy
from fewbits.kernels.loss.linear_cross_entropy_float8 import head_operands, linear_cross_entropy_float8
from fewbits.kernels.loss.linear_log_probs import linear_log_probs
from fewbits.kernels.loss.scaled import scaled

_Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear_cross_entropy_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's head on 8192 tokens, forward and backward at once: frozen, and trained."""
    M, V, K = min(8192, max_size), min(128256, max_size), min(4096, max_size)
    frozen = Case(
        op="linear_cross_entropy",
        part="backward",
        format="bfloat16",
        M=M,
        N=V,
        K=K,
        flops=4 * M * V * K,
        bytes_moved=2 * (V * K + 2 * M * K) + 8 * M,
        tolerance=2e-2,
        build=_problem,
    )
    moved = frozen.bytes_moved + 2 * V * K
    return [frozen, replace(frozen, part="backward_all", flops=6 * M * V * K, bytes_moved=moved)]


def linear_cross_entropy_float8_cases(max_size: int) -> list[Case]:
    """The same with 8-bit products for logits and dh; a head that trains is rounded in each pass.

    The tolerance is that of two operands rounded to E4M3, 0.0375 of a product's norm (matmul_float8.py), for
    the loss, too, whose logits are off by as much; a quarter on top for what else is rounded.
    """
    M, V, K = (
        max(size, 16) // 16 * 16 for size in (min(8192, max_size), min(128256, max_size), min(4096, max_size))
    )
    frozen = Case(
        op="linear_cross_entropy_float8",
        part="backward",
        format="float8_e4m3_row",
        M=M,
        N=V,
        K=K,
        flops=4 * M * V * K,
        bytes_moved=2 * V * K + 4 * M * K + 8 * M,
        tolerance=5e-2,
        build=_problem,
    )
    moved = frozen.bytes_moved + 2 * V * K
    return [frozen, replace(frozen, part="backward_all", flops=6 * M * V * K, bytes_moved=moved)]


def linear_log_probs_cases(max_size: int) -> list[Case]:
    """The frozen head once more, with the entropy and top 1 of each token; beside it TRL's own."""
    (frozen, _) = linear_cross_entropy_cases(max_size)
    return [replace(frozen, op="linear_log_probs", bytes_moved=frozen.bytes_moved + 5 * frozen.M)]


def scaled_cases(max_size: int) -> list[Case]:
    """The gradient of Qwen3-1.7B's head times that of the loss."""
    M, N = min(151936, max_size), min(2048, max_size)
    return [
        Case(
            op="scaled",
            part="",
            format="bfloat16",
            M=M,
            N=N,
            bytes_moved=4 * M * N,
            tolerance=4e-3,
            build=_scaled_problem,
        )
    ]


def _scaled_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.N)
    factor = torch.tensor(1 / 8188, device=device, dtype=torch.float32)

    def ours() -> Sequence[Tensor]:
        return (scaled(x, factor),)

    def eager() -> Sequence[Tensor]:
        return (x * factor,)

    def exact() -> Sequence[Tensor]:
        return (x.double() * factor.double(),)

    return Problem({"fewbits": lambda: ours, "torch_eager": lambda: eager}, exact)


def _problem(case: Case, device: torch.device) -> Problem:
    hidden = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K) * 0.02
    labels = torch.randint(case.N, (case.M,), device=device)
    labels[::4] = -100
    trained = 2 if case.part == "backward_all" else 1

    functions = _functions_of(case, weight if trained == 1 else None, device.type)

    def variant(f: _Loss) -> Callable[[], Run]:
        leaves = [t.detach().requires_grad_(i < trained) for i, t in enumerate((hidden, weight))]

        def run() -> Sequence[Tensor]:  # the two passes together: ours makes its gradients in the first
            loss = f(leaves[0], leaves[1], labels)
            return loss.detach(), *torch.autograd.grad(loss, leaves[:trained])

        return lambda: run

    def exact() -> Sequence[Tensor]:
        """In float64, a block of rows at a time: all logits at once would be 8 GiB."""
        w, count = weight.double(), (labels != -100).sum()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        gradients = [torch.zeros_like(t, dtype=torch.float64) for t in (hidden, weight)][:trained]
        for at in range(0, case.M, 512):
            rows = slice(at, at + 512)
            h = hidden[rows].double()
            leaves = [h.requires_grad_(), w.requires_grad_()][:trained]
            part = F.cross_entropy(F.linear(h, w), labels[rows], reduction="sum") / count
            of_part = torch.autograd.grad(part, leaves)
            loss += part.detach()
            gradients[0][rows] = of_part[0]
            if trained > 1:
                gradients[1] += of_part[1]
        return loss, *gradients

    return Problem({name: variant(f) for name, f in functions.items()}, exact)


def _functions_of(case: Case, frozen: Tensor | None, device_type: str) -> dict[str, _Loss]:
    """What is measured; ``frozen`` is the weight whose 8-bit operands are made once."""
    functions: dict[str, _Loss] = {"fewbits": linear_cross_entropy, "torch_eager": _eager_loss}
    if case.op == "linear_cross_entropy_float8":
        operands = None if frozen is None else head_operands(frozen)

        def float8(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return linear_cross_entropy_float8(h, w, y, operands or head_operands(w))

        functions = {"fewbits": float8, "fewbits_bfloat16": linear_cross_entropy}
    if case.op == "linear_log_probs":
        functions["fewbits"] = _log_probs_loss
        if device_type == "cuda" and find_spec("trl"):
            functions["trl"] = _trl_loss
    elif device_type == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        functions["liger"] = lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y)
    return functions


def _eager_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """What transformers' ForCausalLMLoss does."""
    return F.cross_entropy(F.linear(h, w).float(), y)


def _log_probs_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return -linear_log_probs(h, w, y).log_probs.sum() / (y != -100).sum()


def _trl_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    counts = y != -100
    outputs = ("log_probs", "entropy", "is_top1")
    results = ChunkedLogProbFunction.apply(h, w, None, y.where(counts, 0), 1.0, 32768, None, 1.0, outputs)
    log_probs: Tensor = results[0]
    return -log_probs.where(counts, 0).sum() / counts.sum()


MAKERS = (linear_cross_entropy_cases, linear_cross_entropy_float8_cases, linear_log_probs_cases, scaled_cases)
