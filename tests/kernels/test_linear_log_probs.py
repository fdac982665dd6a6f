"""Log-probabilities, entropies and top 1 of labels, without the logits: against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.loss.cross_entropy_triton import Statistics, launch, launch_with_statistics
from fewbits.kernels.loss.linear_cross_entropy_float8 import (
    head_operands,
    linear_cross_entropy_float8,
    logits_float8,
)
from fewbits.kernels.loss.linear_log_probs import linear_log_probs, linear_log_probs_ref, statistics_ref

M, K, V = 37, 24, 300


def operands(dtype: torch.dtype = torch.float64, *, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden = (torch.randn(M, K, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    labels = torch.randint(V, (M,))
    labels[::5] = -100
    return hidden, torch.randn(V, K, dtype=torch.float64).to(dtype), labels


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("chunk_rows", [None, 16])
@pytest.mark.parametrize("entropy_trains", [False, True])
def test_values_and_gradients(soft_cap: float, chunk_rows: int | None, entropy_trains: bool) -> None:
    """Each row with its own factor, as losses of preference and reinforcement weight them."""
    hidden, weight, labels = operands()
    g, q = torch.randn(M), torch.randn(M) * entropy_trains
    outputs = []
    for function, more in ((linear_log_probs, {"chunk_rows": chunk_rows}), (linear_log_probs_ref, {})):
        found = function(hidden, weight, labels, soft_cap=soft_cap, **more)
        loss = (found.log_probs * g).sum() + (found.entropy * q).sum() * (1.0 if entropy_trains else 0.0)
        if not entropy_trains:
            loss = (found.log_probs * g).sum()
        outputs.append((*found, *torch.autograd.grad(loss, hidden)))
    for ours, need in zip(*outputs, strict=True):
        # the definition is in float32 as the logits of a 16-bit model are widened
        torch.testing.assert_close(ours.double(), need.double(), rtol=2e-5, atol=2e-5)
    assert outputs[0][2].dtype == torch.bool and not outputs[0][0][::5].any() and not outputs[0][1][::5].any()


def test_products_of_8_bits() -> None:
    """The loss of `linear_cross_entropy_float8`, its gradient, and the entropies of those logits."""
    hidden, weight = torch.randn(M, 32, requires_grad=True), torch.randn(304, 32)
    labels, g, q = torch.randint(304, (M,)), torch.rand(M), torch.rand(M)
    labels[::5] = -100
    made = head_operands(weight)
    found = linear_log_probs(hidden, weight, labels, operands=made, chunk_rows=16)
    need = linear_cross_entropy_float8(hidden, weight, labels, made, reduction="none", chunk_rows=16)
    assert torch.equal(-found.log_probs, need)
    z = logits_float8(hidden.detach(), made)
    s = z.requires_grad_().log_softmax(1)
    entropy = -(s.exp() * s).sum(1).where(labels >= 0, 0.0)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-5)
    assert found.is_top.any() == (z.argmax(1) == labels).any()
    ours = torch.autograd.grad((found.log_probs * g).sum(), hidden, retain_graph=True)[0]
    theirs = torch.autograd.grad((-need * g).sum(), hidden)[0]
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()  # g goes into a row's scale there
    (dz,) = torch.autograd.grad((entropy * q).sum(), z)
    (dh,) = torch.autograd.grad((found.entropy * q).sum(), hidden)
    torch.testing.assert_close(dh, dz @ weight, rtol=1e-4, atol=1e-4)


def test_the_first_of_equal_logits_is_the_top() -> None:
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [2.0], [0.0]])
    found = linear_log_probs(hidden, weight, torch.tensor([1, 2, 0]))
    assert found.is_top.tolist() == [True, False, False]


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "soft_cap"), [(300, 0.0), (300, 5.0), (9000, 0.0)])  # 1 and 3 blocks
def test_the_kernel_is_the_definition(
    dtype: torch.dtype, columns: int, soft_cap: float, kernel_device: str
) -> None:
    z = (torch.randn(6, columns) * 8).to(dtype)
    z[1, 7:] = -torch.inf
    z[2] = 300.0  # all equal: the first is the top
    z[3] -= 5000.0
    labels = torch.tensor([z[0].argmax(), 3, 0, z[3].argmax(), -100, 11])
    found, need = torch.full((2, 6), 7.0, device=kernel_device), torch.full((2, 6), 9.0)
    places, options = labels.to(kernel_device), (0.0, 0.0, soft_cap)
    logits, alone = (z.to(kernel_device, copy=True) for _ in range(2))
    losses, losses_alone = torch.empty((2, 6), device=kernel_device)
    launch_with_statistics(Statistics(*found), logits, places, None, losses, -100, options, True)
    statistics_ref(z, labels, *need, -100, soft_cap)
    torch.testing.assert_close(found.cpu(), need, rtol=1e-4, atol=1e-4)
    launch(alone, places, None, losses_alone, -100, options, True)
    assert torch.equal(losses, losses_alone) and torch.equal(logits, alone)


def test_a_head_that_trains_is_refused() -> None:
    hidden, weight, labels = operands(torch.float32)
    with pytest.raises(BadInput, match="a head that trains"):
        linear_log_probs(hidden, weight.requires_grad_(), labels)


def test_labels_outside_the_vocabulary_and_no_rows() -> None:
    hidden, weight, labels = operands(torch.float32)
    with pytest.raises(BadInput, match="labels must be"):
        linear_log_probs(hidden, weight, labels + V)
    empty = linear_log_probs(hidden[:0], weight, labels[:0])
    assert all(part.shape == (0,) for part in empty)
    empty.log_probs.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()
