"""Layers shared by two ranks give what whole ones give; packed weights are cut to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits import convert
from fewbits.errors import Unsupported
from fewbits.formats import E4M3, INT4_G32, INT8, NF4, NF4_DQ
from fewbits.models.adapters import load_adapter
from fewbits.recipes.recipe import Recipe, Rule
from fewbits.training.packed_slices import cut
from fewbits.training.sharded_checkpoint import load_sharded
from fewbits.training.tensor_parallel import tensor_parallel
from models.tiny import tiny, tokens
from training.processes import run_ranks
from training.tensor_workers import (
    SIZES,
    both,
    build,
    curves,
    loaded,
    norm_of,
    optimizer_of,
    read,
    train_without_clipping,
    write,
)

CASES = [
    ("full", "qwen3", True),
    ("full", "qwen3", False),
    ("nf4", "llama", True),
    ("nf4_dq", "gemma2", True),
    ("int4", "qwen2", False),
]
STEPS = 3


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT4_G32, INT8, E4M3], ids=lambda f: f.name)
def test_a_cut_weight_is_the_same_numbers(format, axis) -> None:
    weight = torch.randn(256, 512)
    packed = format.quantize(weight)
    for begin, end in ((0, 128), (128, 256), (64, 256)):
        made = cut(packed, axis, begin, end)
        expected = packed.dequantize(torch.float32).narrow(axis, begin, end - begin)
        assert torch.equal(made.dequantize(torch.float32), expected)
        layout = made.format.layout(tuple(expected.shape))
        assert {n: (tuple(t.shape), t.dtype) for n, t in made.parts.items()} == dict(layout)
        assert all(t.is_contiguous() for t in made.parts.values())
    aligned = axis == 0 and format is NF4_DQ  # 8 scales a row: 32 rows share a second-level scale
    assert cut(packed, axis, 64, 256).format is format or (format is NF4_DQ and not aligned)


def test_a_block_is_not_cut() -> None:
    packed = NF4.quantize(torch.randn(64, 128))
    with pytest.raises(Unsupported, match="columns 0 to 32, because values that share a scale"):
        cut(packed, 1, 0, 32)


@pytest.fixture(scope="module")
def shared():
    return run_ranks(curves, 2, CASES, STEPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_learn_what_one_process_learns(shared, case) -> None:
    kind, family, fused = case
    found = [rank[case] for rank in shared]
    model = build(kind, family, fused=fused)
    losses, _ = train_without_clipping(model, STEPS)
    assert losses[0] - losses[-1] != 0
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=2e-6)
        assert not rank["fallbacks"]
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name, weight in trained.items():
        parts = [rank["weights"][name] for rank in found]
        axis = found[0]["cuts"].get(name)
        together = parts[0] if axis is None else torch.cat(parts, axis)
        if axis is None:
            assert torch.equal(*parts), name
        assert (together - weight).norm() <= 1e-5 * weight.norm(), name
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(2, 8)).logits
        made = model.generate(input_ids=tokens(2, 8), max_new_tokens=5, do_sample=False)
    for rank in found:
        torch.testing.assert_close(rank["logits"], logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(rank["made"], made)
        assert "shared by 2 ranks" in rank["receipt"]


def test_fsdp_over_shared_layers() -> None:
    """Four ranks: two pairs, each pair with half of the batch."""
    found = run_ranks(both, 4, "nf4", "llama", STEPS)
    model = build("nf4", "llama", fused=True)
    losses, _ = train_without_clipping(model, STEPS)
    assert found[0]["losses"] == pytest.approx(losses, rel=2e-6)
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    pair = [next(f["weights"] for f in found if f["tensor"] == i) for i in (0, 1)]
    for name, weight in weights.items():
        parts = [rank[name] for rank in pair]
        axis = next((i for i in (0, 1) if parts[0].shape[i] < weight.shape[i]), None)
        together = parts[0] if axis is None else torch.cat(parts, axis)
        assert (together - weight).norm() <= 1e-5 * weight.norm(), name
    expected = norm_of(model)
    assert expected[1] == pytest.approx(1e-3, rel=1e-2)
    for rank in found:
        assert rank["norm"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_checkpoints_of_shared_layers(tmp_path) -> None:
    """Written by two pairs of ranks; read by them, by one pair, by one process; exported."""
    run_ranks(write, 4, str(tmp_path))
    four, two = run_ranks(read, 4, str(tmp_path), 2), run_ranks(read, 2, str(tmp_path), 1)
    for number, kind in enumerate(("nf4", "full")):
        model = build(kind, "llama", fused=False)
        optimizer = optimizer_of(kind, model)
        load_sharded(tmp_path / kind / "checkpoint-1", model, optimizer)
        own = {n: p.detach().clone() for n, p in model.named_parameters() if "weight_" not in n}
        losses, _ = train_without_clipping(model, 2, optimizer=optimizer)
        for rank in (*four, *two):
            weights, found = rank[number]
            assert weights.keys() == own.keys()
            assert all(torch.equal(weights[name], own[name]) for name in own)
            assert found == pytest.approx(losses, rel=2e-6 if kind == "full" else 2e-3)
        if kind == "full":
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / kind / "hf")
            assert all(torch.equal(p, own[n]) for n, p in exported.named_parameters())
        else:
            exported = load_adapter(tiny("llama", **SIZES), tmp_path / kind / "hf", is_trainable=True)
            assert all(torch.equal(p, own[n]) for n, p in exported.named_parameters() if ".lora_" in n)


def test_a_plan_that_gathers_is_refused() -> None:
    mesh = SimpleNamespace(get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2)
    with pytest.raises(Unsupported, match="colwise_gather_output"):
        tensor_parallel(tiny("phi3"), mesh)
    mesh.size = lambda: 3
    with pytest.raises(Unsupported, match="num_attention_heads is 4, which 3 ranks cannot share"):
        tensor_parallel(tiny("llama"), mesh)


def test_linears_are_cut_as_soon_as_they_are_read(tmp_path) -> None:
    """Against the same folder read by FSDP2's slices: the same values, on no rank more than its part."""
    model = tiny("qwen3", **SIZES)
    model.save_pretrained(tmp_path / "plain")
    convert(model, Recipe(name="nf4", linear=Rule(weight=NF4)))
    model.save_pretrained(tmp_path / "packed")
    for kind, found in run_ranks(loaded, 2, str(tmp_path), 2)[0].items():
        # double-quantised scales that could not be cut are float32 now, and mean the same
        assert found["odd"] == [] or kind == "nf4_dq", found["odd"]
        assert all(".weight_scale" in name for name in found["odd"]), found["odd"]
        assert found["losses"] == pytest.approx(found["alone"], rel=2e-6)
        assert "layers shared by 2 ranks" in found["receipt"]
