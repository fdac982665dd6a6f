"""Layers shared by two ranks give what whole ones give; packed weights are cut to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from fewbits import convert
from fewbits.errors import Unsupported
from fewbits.formats import E4M3, INT4_G32, INT8, NF4, NF4_DQ
from fewbits.models.adapting.adapters import load_adapter
from fewbits.recipes.recipe import Recipe, Rule
from fewbits.training.checkpoints.folders import MODEL_FILE
from fewbits.training.checkpoints.sharded import load_sharded
from fewbits.training.ranks.packed_slices import cut
from fewbits.training.ranks.tensor_parallel import tensor_parallel
from tests.models.tiny import tiny, tokens
from tests.training.processes import run_ranks
from tests.training.tensor_workers import (
    SIZES,
    both,
    build,
    curves,
    dropped,
    filled,
    gradients,
    loaded,
    norm_of,
    optimizer_of,
    read,
    shared_gradients,
    train_without_clipping,
    with_dropout,
    with_two_adapters,
    write,
)

CASES = [
    ("full", "qwen3", True),
    ("full", "qwen3", False),
    ("nf4", "llama", True),
    ("nf4_dq", "gemma2", True),
    ("int4", "qwen2", False),
    ("full", "phi3", True),
    ("full", "phi3", False),
    ("nf4", "phi3", True),
    ("nf4_dq", "phi3", False),
]
STEPS = 3


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT4_G32, INT8, E4M3], ids=lambda f: f.name)
def test_a_cut_weight_is_the_same_numbers(format, axis) -> None:
    weight = torch.randn(256, 512)
    packed = format.quantize(weight)
    for begin, end in ((0, 128), (128, 256), (64, 256)):
        made = cut(packed, axis, (begin, end))
        expected = packed.dequantize(torch.float32).narrow(axis, begin, end - begin)
        assert torch.equal(made.dequantize(torch.float32), expected)
        layout = made.format.layout(tuple(expected.shape))
        assert {n: (tuple(t.shape), t.dtype) for n, t in made.parts.items()} == dict(layout)
        assert all(t.is_contiguous() for t in made.parts.values())
    aligned = axis == 0 and format is NF4_DQ  # 8 scales a row: 32 rows share a second-level scale
    assert cut(packed, axis, (64, 256)).format is format or (format is NF4_DQ and not aligned)


@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT4_G32, INT8, E4M3], ids=lambda f: f.name)
def test_pieces_of_rows_are_the_same_numbers(format) -> None:
    """As of q, k and v in one linear."""
    packed = format.quantize(torch.randn(256, 512))
    pieces = ((64, 128), (160, 192), (224, 256))
    made = cut(packed, 0, *pieces)
    whole = packed.dequantize(torch.float32)
    assert torch.equal(made.dequantize(torch.float32), torch.cat([whole[a:b] for a, b in pieces]))
    assert all(t.is_contiguous() for t in made.parts.values())


def test_a_block_is_not_cut() -> None:
    packed = NF4.quantize(torch.randn(64, 128))
    with pytest.raises(Unsupported, match="columns 0 to 32, because values that share a scale"):
        cut(packed, 1, (0, 32))


@pytest.fixture(scope="module")
def shared():
    return run_ranks(curves, 2, CASES, STEPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_learn_what_one_process_learns(shared, case) -> None:
    kind, family, fused = case
    check(build(kind, family, fused=fused), [rank[case] for rank in shared])


@pytest.mark.parametrize("kind", ["full", "int4"])
def test_four_ranks_share_linears_that_hold_several(kind) -> None:
    """Phi's qkv_proj and gate_up_proj, without groups of queries."""
    heads = {"num_key_value_heads": 4}
    found = run_ranks(curves, 4, [(kind, "phi3", True)], STEPS, heads)
    check(build(kind, "phi3", fused=True, **heads), [rank[kind, "phi3", True] for rank in found])


def check(model, found) -> None:
    """What ranks learned is what one process with the whole model learns."""
    losses, _ = train_without_clipping(model, STEPS)
    assert losses[0] - losses[-1] != 0
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=2e-6)
        assert not rank["fallbacks"]
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name, weight in trained.items():
        axis, parts = found[0]["cuts"].get(name), [rank["weights"][name] for rank in found]
        if axis is None:
            assert all(torch.equal(part, parts[0]) for part in parts), name
        else:
            assert parts[0].shape[axis] * len(found) == weight.shape[axis]
        for rank in found:
            assert (rank["whole"][name] - weight).norm() <= 1e-5 * weight.norm(), name
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(2, 8)).logits
        made = model.generate(input_ids=tokens(2, 8), max_new_tokens=5, do_sample=False)
    for rank in found:
        torch.testing.assert_close(rank["logits"], logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(rank["made"], made)
        assert f"shared by {len(found)} ranks" in rank["receipt"]


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


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.nightly), pytest.param("phi3", marks=pytest.mark.slow)]
)
def test_checkpoints_of_shared_layers(family, tmp_path) -> None:
    """Written by two pairs of ranks; read by them, by one pair, by one process; exported."""
    run_ranks(write, 4, str(tmp_path), family)
    four = run_ranks(read, 4, str(tmp_path), family, 2)
    two = run_ranks(read, 2, str(tmp_path), family, 1)
    for number, kind in enumerate(("nf4", "full")):
        model = build(kind, family, fused=False)
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
            exported = load_adapter(tiny(family, **SIZES), tmp_path / kind / "hf", is_trainable=True)
            assert all(torch.equal(p, own[n]) for n, p in exported.named_parameters() if ".lora_" in n)


def test_a_whole_checkpoint_into_linears_in_pieces(tmp_path) -> None:
    model = build("full", "phi3", fused=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    whole = {name: p.detach() for name, p in model.named_parameters()}
    save_file(whole, tmp_path / MODEL_FILE)
    for found in run_ranks(filled, 2, str(tmp_path)):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_ranks_drop_what_one_process_drops() -> None:
    """Columns of adapters' inputs and heads of attention: drawn whole, and each rank keeps its part."""
    cases = [("lora", "llama"), ("nf4", "qwen3"), ("lora", "gemma2"), ("full", "phi3")]
    found = run_ranks(dropped, 2, cases, STEPS)
    for kind, family in cases:
        model = with_dropout(kind, family)
        torch.manual_seed(3)
        norm = norm_of(model)[0]
        model.zero_grad()
        losses, _ = train_without_clipping(model, STEPS)
        for rank in found:
            others, other_norm, weights = rank[kind, family]
            assert others == pytest.approx(losses, rel=5e-6), (kind, family)
            assert other_norm == pytest.approx(norm, rel=1e-5), (kind, family)
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    assert (weights[name] - weight).norm() <= 1e-4 * weight.norm(), name


def test_gradients_of_adapters_that_are_called_are_those_of_one_process() -> None:
    """The side of an adapter that each rank holds whole has the gradient of all ranks' parts."""
    cases = [("lora", "llama", False), ("nf4", "qwen3", True), ("hooked", "llama", False)]
    found = run_ranks(shared_gradients, 2, cases)
    for kind, family, fused in cases:
        expected = gradients(with_two_adapters(kind, family, fused=fused))
        for rank, (grads, cuts) in enumerate(ranks[kind, family, fused] for ranks in found):
            assert grads.keys() == expected.keys()
            for name, whole in expected.items():
                mine = whole.chunk(2, cuts[name])[rank] if name in cuts else whole
                assert (grads[name] - mine).norm() <= 1e-5 * whole.norm(), (kind, name)


def test_attention_that_drops_is_not_shared_by_its_own_function() -> None:
    mesh = SimpleNamespace(get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2)
    with pytest.raises(Unsupported, match=r"attention has dropout 0\.3, .*use_attention first"):
        tensor_parallel(tiny("llama", attention_dropout=0.3), mesh)


def test_what_cannot_be_shared_is_refused() -> None:
    mesh = SimpleNamespace(get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2)
    model = tiny("llama")
    model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    with pytest.raises(Unsupported, match=r"self_attn\.q_proj is 'colwise_gather_output'"):
        tensor_parallel(model, mesh)
    mesh.size = lambda: 3
    with pytest.raises(Unsupported, match="num_attention_heads is 4, which 3 ranks cannot share"):
        tensor_parallel(tiny("llama"), mesh)


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_linears_are_cut_as_soon_as_they_are_read(family, tmp_path) -> None:
    """Against the same folder read by FSDP2's slices: the same values, on no rank more than its part."""
    model = tiny(family, **SIZES)
    model.save_pretrained(tmp_path / "plain")
    convert(model, Recipe(name="nf4", linear=Rule(weight=NF4)))
    model.save_pretrained(tmp_path / "packed")
    for kind, found in run_ranks(loaded, 2, str(tmp_path), 2)[0].items():
        # double-quantised scales that could not be cut are float32 now, and mean the same
        assert found["odd"] == [] or kind == "nf4_dq", found["odd"]
        assert all(".weight_scale" in name for name in found["odd"]), found["odd"]
        assert found["losses"] == pytest.approx(found["alone"], rel=2e-6)
        assert "layers shared by 2 ranks" in found["receipt"]
