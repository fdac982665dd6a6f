"""FSDP2 over two processes gives what one process gives; FSDP1 around packed weights too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fewbits.errors import Unsupported
from fewbits.training.optimizer import AdamW8bit
from fewbits.training.ranks.fsdp import shard
from tests.models.tiny import tokens
from tests.training.fsdp_workers import (
    ROWS,
    build,
    in_bfloat16,
    in_flat_parameters,
    in_float8,
    sharded_curves,
    train,
)
from tests.training.processes import run_ranks

CASES = [
    ("full", "llama", True),
    ("lora", "llama", True),
    ("lora_bf16", "llama", True),
    ("nf4", "qwen3", True),
    ("nf4_dq", "llama", True),
    ("nf4_dq", "gemma2", False),
    ("int4", "phi3", True),
    ("nf4_float8", "qwen3", True),
    ("nf4", "starcoder2", False),  # nobody wrote a spec for it: its own layers
    ("nf4_dq", "qwen3_moe", False),  # packed experts, adapters on them too
    ("int4", "gpt_oss", False),  # turned round, with biases and sinks
]
STEPS = 3


@pytest.fixture(scope="module")
def curves():
    return run_ranks(sharded_curves, 2, CASES, STEPS)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_learn_what_one_process_learns(curves, case) -> None:
    """Each value is the same sum in another order: 1e-6 in float32.

    In bfloat16 each rank rounds its own gradients before they are averaged: 2**-9 of each, and what AdamW
    makes of that. In E4M3 a last bit of a weight or a state moves a few values to the next code.
    """
    kind, family, fused = case
    found, rel = curves[case], {"lora_bf16": 2e-3, "nf4_float8": 2e-4}.get(kind, 1e-6)
    model = build(kind, family, fused=fused)
    losses, _ = train(model, STEPS)
    assert found["losses"] == pytest.approx(losses, rel=rel)
    assert losses[0] - losses[-1] != 0 and not found["fallbacks"]
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == found["weights"].keys()
    if rel == 1e-6:
        for name, weight in trained.items():
            assert (found["weights"][name] - weight).norm() <= 1e-6 * weight.norm(), name
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=tokens(2, 8)).logits
        # A logit near zero is the difference of terms as large as the others.
        atol = 1e-5 * float(logits.abs().max())
        torch.testing.assert_close(found["logits"], logits, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_holds_its_half(curves, case) -> None:
    """And what has an odd number of rows: the one offset of a double-quantised weight."""
    found = curves[case]
    assert 0.5 <= found["share"] <= 0.502
    assert "sharded over 2 ranks" in found["receipt"] and "(root)" in found["receipt"]


@pytest.fixture(scope="module")
def float8_curves():
    return run_ranks(in_float8, 2, STEPS)[0]


def test_weights_that_travel_in_float8_are_rounded_to_the_scale_of_their_product(float8_curves) -> None:
    """Against one process whose linears are rounded to E4M3 before each pass, the masters kept."""
    model, masters = build("full"), {}
    weights = [p for n, p in model.named_parameters() if n.endswith("_proj.weight")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    products = [[0, 1, 2], [3], [4, 5], [6], [7, 8, 9], [10], [11, 12], [13]]

    def rounded(*_) -> None:
        for members in products:
            largest = torch.stack([weights[i].detach().abs().amax() for i in members]).amax()
            for i in members:
                masters[i] = weights[i].detach().clone()
                codes = (weights[i].detach() / (largest / 448)).to(torch.float8_e4m3fn)
                weights[i].data.copy_(codes.float() * (largest / 448))

    def back(*_) -> None:
        for i, master in masters.items():
            weights[i].data.copy_(master)

    model.register_forward_pre_hook(rounded)
    optimizer.register_step_pre_hook(back)
    losses, _ = train(model, STEPS, optimizer=optimizer)
    found = float8_curves["full"]
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    for name, weight in model.named_parameters():
        assert (found["weights"][name] - weight.detach()).norm() <= 1e-3 * weight.detach().norm(), name
    assert "14 weights travel in float8" in found["receipt"]


def test_rounding_twice_to_the_same_scale_changes_nothing(float8_curves) -> None:
    """Products in E4M3 see the codes that they would make of the masters.

    After a step masters differ in their last bits, and a code that lay between two by one step of E4M3: the
    loss by up to 2e-3 in so small a model.
    """
    model = build("float8")
    losses, _ = train(model, STEPS, optimizer=AdamW8bit(model.parameters(), lr=1e-2))
    found = float8_curves["float8"]["losses"]
    assert found[0] == pytest.approx(losses[0], rel=1e-6) and found == pytest.approx(losses, rel=3e-3)


@pytest.mark.parametrize("kind", ["full", "float8"])
def test_the_scale_follows_the_weight(float8_curves, kind) -> None:
    """Whether torch's optimizer has stepped it, or ours the slices."""
    found = float8_curves[kind]
    weight = found["weights"]["model.layers.1.mlp.down_proj.weight"]
    before = dict(build(kind).named_parameters())["model.layers.1.mlp.down_proj.weight"]
    assert weight.abs().amax() != before.abs().amax()
    torch.testing.assert_close(found["scale"], weight.abs().amax().view(1) / 448, rtol=1e-6, atol=0)


def test_masters_in_float32_products_in_bfloat16() -> None:
    """Beside a whole model in bfloat16 products, under autocast: two roundings of 2**-9 or so."""
    found = run_ranks(in_bfloat16, 2, STEPS)
    assert found[0]["dtypes"] == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, _ = train(build("full"), STEPS)
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-2)
    assert torch.equal(found[0]["made"], found[1]["made"]) and found[0]["made"].shape == (2, 12)


def test_flat_parameters_around_packed_weights() -> None:
    """FSDP1, as docs/guide/several-gpus.md has it: stored weights ignored, adapters in flat parameters."""
    found = run_ranks(in_flat_parameters, 2)
    model = build("nf4_dq", fused=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, ids = torch.optim.SGD(trained, lr=0.05), tokens(ROWS, 16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    for rank in found:
        assert rank["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        assert rank["weights"].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)
    assert not any(torch.equal(before[n], w) for n, w in found[0]["weights"].items())


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="no process group"):
        shard(build("full"))
    mesh = SimpleNamespace(size=lambda: 2)
    with pytest.raises(Unsupported, match="would cast the scales of packed weights"):
        shard(build("nf4"), mesh, compute_dtype=torch.bfloat16)
    model = build("full")
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(Unsupported, match="the model trains parameters of bfloat16, float32"):
        shard(model, mesh)
