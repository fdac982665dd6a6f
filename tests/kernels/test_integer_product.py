"""The exact product of codes, chunk by chunk: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.formats.stochastic import Stochastic
from fewbits.kernels.stochastic.integer_product import integer_product, integer_product_ref, launch

# Batch, rows, outputs, inner dimensions; bits, chunk (0: none).
CASES = {
    "chunks of a block": (1, 70, 130, 256, 8, 128),
    "the last chunk is shorter": (1, 3, 5, 300, 7, 128),
    "small chunks": (1, 5, 7, 40, 4, 16),
    "chunks of no block": (2, 5, 20, 250, 8, 100),
    "no chunks, several parts": (2, 17, 9, 2100, 8, 0),
    "one for all of the batch": (3, 4, 6, 96, 8, 32),
    "one dimension": (1, 1, 1, 1, 8, 128),
}


def codes(batch: int, rows: int, inner: int, options: Stochastic, device: str) -> tuple[torch.Tensor, ...]:
    largest = options.max_code
    q = torch.randint(-largest, largest + 1, (batch, rows, inner), dtype=torch.int8, device=device)
    q[torch.rand(q.shape, device=device) < 0.3] = largest  # sums near the largest that there are
    return q, torch.rand(batch, rows, options.num_chunks(inner), device=device)


def operands(name: str, device: str) -> tuple[tuple[torch.Tensor, ...], Stochastic]:
    B, N, M, D, bits, chunk = CASES[name]
    options = Stochastic(sc_prec=bits, chunk_d=chunk)
    of_b = 1 if "one for all" in name else B
    return (*codes(B, N, D, options, device), *codes(of_b, M, D, options, device)), options


def by_hand(qa, sa, qb, sb, options: Stochastic) -> torch.Tensor:
    """In whole numbers of 64 bits; chunks added in float32."""
    y = torch.zeros(*qa.shape[:2], qb.shape[1], device=qa.device)
    for i, chunk in enumerate(options.chunks(qa.shape[2])):
        size = 2**24 // options.max_code**2
        for first in range(chunk.start, chunk.stop, size):
            own = slice(first, min(first + size, chunk.stop))
            acc = torch.einsum(
                "bnd,cmd->bnm" if len(qb) == 1 else "bnd,bmd->bnm",
                qa[..., own].long().cpu(),
                qb[..., own].long().cpu(),
            )
            y += acc.to(y.device).float() * (sa[..., i, None] * sb[..., None, :, i])
    return y


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_the_product_of_whole_numbers(name: str) -> None:
    values, options = operands(name, "cpu")
    assert torch.equal(integer_product(*values, options), by_hand(*values, options))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(name: str, kernel_device: str, poisoned_memory: None) -> None:
    values, options = operands(name, kernel_device)
    chunk = options.chunk_size(values[0].shape[2])
    part = min(2**24 // options.max_code**2, chunk)
    y = torch.empty(*values[0].shape[:2], values[2].shape[1], device=kernel_device)
    launch(*values, chunk, part, y)
    assert torch.equal(y, by_hand(*values, options))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 65, 2048])
def test_on_a_gpu(rows: int) -> None:
    options = Stochastic(chunk_d=128)
    for inner in (1024, 1040):
        values = (*codes(1, rows, inner, options, "cuda"), *codes(1, 600, inner, options, "cuda"))
        y = integer_product(*values, options)
        assert torch.equal(y.cpu(), integer_product(*(x.cpu() for x in values), options))


def test_opcheck_and_a_scale_that_is_not_finite() -> None:
    values, options = operands("small chunks", "cpu")
    torch.library.opcheck(torch.ops.fewbits.integer_product.default, (*values, 16, 16))
    values[1][0, 2, 1] = torch.nan
    y = integer_product(*values, options)
    assert y[0, 2].isnan().all() and torch.isfinite(y[0, [0, 1, 3, 4]]).all()
    empty = integer_product(*(x[:, :0] for x in values[:2]), *values[2:], options)
    assert empty.shape == (1, 0, 7)
    assert torch.equal(
        y[0, 0], integer_product_ref(*(x[0, :1] for x in values[:2]), *(x[0] for x in values[2:]), 16, 16)[0]
    )
