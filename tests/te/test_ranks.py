"""Two ranks compute what one computes: tensor and sequence parallelism, the loss, amaxes."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp

import fewbits.te as te
from fewbits.te.recipe import DelayedScaling


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def cut(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's part of a parameter: rows of column-parallel weights, columns of row-parallel ones."""
    if name.endswith(("query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias")):
        return value.chunk(2)[rank]
    if name.endswith(("fc1_weight", "fc1_bias")):
        return value.chunk(2)[rank]
    if name.endswith(("proj.weight", "fc2_weight")):
        return value.chunk(2, 1)[rank]
    return value


def compare(rank: int, port: int) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.set_num_threads(1)
        for sequence in (False, True):
            compare_layers(rank, sequence)
        compare_losses(rank)
    finally:
        torch.distributed.destroy_process_group()


def compare_layers(rank: int, sequence: bool) -> None:
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    words = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    whole = te.TransformerLayer(16, 32, 4, **words)
    for p in whole.parameters():
        torch.nn.init.normal_(p, std=0.3)
    part = te.TransformerLayer(
        16, 32, 4, tp_group=group, set_parallel_mode=True, sequence_parallel=sequence, **words
    )
    with torch.no_grad():
        for name, p in part.named_parameters():
            p.copy_(cut(name, whole.get_parameter(name), rank))
    x, dy = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    a = x.clone().requires_grad_()
    b = (x.chunk(2)[rank] if sequence else x).clone().requires_grad_()
    y, z = whole(a), part(b)
    y.backward(dy)
    z.backward(dy.chunk(2)[rank] if sequence else dy)
    for ours, theirs in ((z, y), (b.grad, a.grad)):
        torch.testing.assert_close(ours, theirs.chunk(2)[rank] if sequence else theirs, rtol=1e-4, atol=1e-5)
    for name, p in part.named_parameters():
        if "_weight" in name and "layer_norm" not in name:
            expected = cut(name, whole.get_parameter(name).grad, rank)
            torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-4)


def compare_losses(rank: int) -> None:
    group = torch.distributed.group.WORLD
    logits, target = torch.randn(5, 8, requires_grad=True), torch.randint(8, (5,))
    loss = te.parallel_cross_entropy(logits, target, 0.1, True)
    shared = logits.detach().chunk(2, 1)[rank].clone().requires_grad_()
    split = te.parallel_cross_entropy(shared, target, 0.1, True, group)
    loss.backward(), split.backward()
    torch.testing.assert_close(split, loss)
    torch.testing.assert_close(shared.grad, logits.grad.chunk(2, 1)[rank])
    layer = te.Linear(4, 4, device="cpu")
    with te.autocast(recipe=DelayedScaling(amax_history_len=2), amax_reduction_group=group):
        layer(torch.full((1, 4), 1.0 + rank))
    assert layer.fp8_meta["scaling_fwd"].amax_history[1, 0] == 2


@pytest.mark.slow
def test_two_ranks_are_one() -> None:
    """With and without sequences cut between the ranks, in the same two processes."""
    mp.spawn(compare, args=(free_port(),), nprocs=2)
