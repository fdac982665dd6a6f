"""Pairs sorted by expert: the definition, the kernels, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.product.expert_order import (
    Choices,
    ExpertOrder,
    expert_order,
    expert_order_ref,
    launch,
)


def choices(T: int, k: int, E: int, *, skewed: bool = False, device: str = "cpu") -> Choices:
    generator = torch.Generator().manual_seed(T + E)
    chosen = torch.randint(0, E, (T, k), generator=generator)
    return Choices((chosen // 3 if skewed else chosen).to(device), E)


def empty_order(o: Choices) -> ExpertOrder:
    """Filled with what no result has."""
    pairs = [torch.full((o.chosen.numel(),), -7, dtype=torch.int64, device=o.chosen.device) for _ in range(4)]
    ends = torch.full((o.num_experts,), -7, dtype=torch.int32, device=o.chosen.device)
    return ExpertOrder(*pairs[:3], pairs[3].view(o.chosen.shape), ends)


def test_the_definition_is_the_formula() -> None:
    o = choices(13, 3, 5)
    flat, order = o.chosen.reshape(-1).tolist(), expert_order_ref(o)
    places = [sum(c < d or (c == d and i < q) for i, c in enumerate(flat)) for q, d in enumerate(flat)]
    assert order.inverse.reshape(-1).tolist() == places
    assert [flat[q] for q in order.order.tolist()] == order.experts.tolist() == sorted(flat)
    assert order.rows.tolist() == [q // 3 for q in order.order.tolist()]
    assert order.ends.tolist() == [sum(c <= e for c in flat) for e in range(5)]


@pytest.mark.parametrize(
    ("T", "k", "E", "skewed"),
    [
        (1, 1, 1, False),
        (70, 8, 128, False),
        (90, 6, 200, True),
        (300, 2, 3, True),
        (129, 4, 64, False),
        (4500, 1, 2, True),
    ],
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(
    T: int, k: int, E: int, skewed: bool, kernel_device: str, poisoned_memory: None
) -> None:
    """Several blocks, one that is not full, experts without tokens, more experts than one look takes."""
    o = choices(T, k, E, skewed=skewed, device=kernel_device)
    for dtype in (torch.int64, torch.int32):
        one, into = o._replace(chosen=o.chosen.to(dtype)), empty_order(o)
        launch(one, into)
        for name, part, need in zip(ExpertOrder._fields, into, expert_order_ref(one), strict=True):
            assert torch.equal(part, need), name


def test_no_tokens_and_what_is_no_choice() -> None:
    order = expert_order(torch.empty(0, 2, dtype=torch.int64), 3)
    assert order.ends.tolist() == [0, 0, 0] and order.inverse.shape == (0, 2)
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)):
        with pytest.raises(BadInput, match="whole numbers"):
            expert_order(wrong, 3)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.fewbits.expert_order.default, tuple(choices(9, 2, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("skewed", [False, True])
def test_on_a_gpu(skewed: bool) -> None:
    o = choices(8192, 8, 128, skewed=skewed, device="cuda")
    for part, need in zip(expert_order(*o), expert_order_ref(o), strict=True):
        assert torch.equal(part, need)
