"""Prompts of lengths that come again, through a recorded forward; here it runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import forget_weights, free_prompt_weights, fuse
from fewbits.host.attention import plain_mask
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop, prompt_graph
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.model_state import state_of_model
from fewbits.models.generation.model_step import why_no_model_step
from fewbits.models.generation.prompt import WHOLE, read_prompt
from fewbits.models.generation.prompt_graph import PromptGraphs, recorded_length
from fewbits.recipes.recipe import Recipe
from tests.models.test_fused import FLOAT8, adapted
from tests.models.tiny import tiny, tokens

GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Everything but the question whether there is a GPU; the shapes that graphs were asked for."""
    monkeypatch.setattr(prompt_graph, "_records", lambda model: True)
    real = prompt_graph._PromptGraph.read
    read: list[tuple[int, ...]] = []

    def noted(self: Any, input_ids: Tensor) -> Any:
        read.append(tuple(input_ids.shape))
        return real(self, input_ids)

    monkeypatch.setattr(prompt_graph._PromptGraph, "read", noted)
    return read


@torch.no_grad()
def read_by(graphs: PromptGraphs, model: Any, ids: Tensor) -> Any:
    return graphs.read(model, ids, torch.zeros(len(ids), dtype=torch.long), WHOLE)


@torch.no_grad()
def same(graphs: PromptGraphs, model: Any, ids: Tensor, *, rtol: float = 1e-4) -> None:
    """Logits, keys and values beside those of the model's own forward."""
    ours = read_by(graphs, model, ids)
    need = read_prompt(model, ids, None, torch.zeros(len(ids), dtype=torch.long))
    torch.testing.assert_close(ours.logits, need.logits, rtol=rtol, atol=rtol)
    for a, b in zip(ours.cache.layers, need.cache.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length() == ids.shape[1]
        torch.testing.assert_close(a.keys, b.keys, rtol=rtol, atol=rtol)
        torch.testing.assert_close(a.values, b.values, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_length_that_comes_again_is_recorded(family: str, fused: bool, runs: list[Any]) -> None:
    """Shorter prompts share it; each is what the model makes of it, window and all."""
    model, graphs = tiny(family), PromptGraphs()
    if fused:
        fuse(model)
        FastLanguageModel.for_inference(model)
    assert read_by(graphs, model, tokens(2, 20)) is None
    for length in (20, 27, 17, 32, 20):
        same(graphs, model, tokens(2, length, seed=length))
    assert list(graphs.graphs) == [(2, 32)] and runs.count((2, 20)) >= 2
    assert read_by(graphs, model, tokens(2, 9)) is None  # of another length
    same(graphs, model, tokens(2, 12))
    assert sorted(graphs.graphs) == [(2, 16), (2, 32)] and not graphs.refused


def test_so_many_graphs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graph, "_MOST_GRAPHS", 2)
    model, graphs = tiny("llama"), PromptGraphs()
    for rows in (1, 2, 1, 3, 1, 2):
        for _ in range(2):
            read_by(graphs, model, tokens(rows, 20))
        same(graphs, model, tokens(rows, 20))
        assert list(graphs.graphs)[-1] == (rows, 32)
    assert list(graphs.graphs) == [(1, 32), (2, 32)]


def test_a_model_that_trains_records_nothing() -> None:
    model, ids = tiny("llama"), tokens(2, 20)
    fuse(model)
    graphs = decoding_of(model).prompts
    for _ in range(3):
        assert read_by(graphs, model, ids) is None
    FastLanguageModel.for_inference(model)
    assert read_by(graphs, model, ids) is None and read_by(graphs, model, ids) is not None
    FastLanguageModel.for_training(model)
    assert not graphs.graphs


def test_adapters_by_row_are_read_by_the_model() -> None:
    """A graph would give every row the adapter that was active when it was recorded."""
    import peft

    model, ids, graphs = tiny("llama"), tokens(2, 20), PromptGraphs()
    words = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**words)).eval()
    model.add_adapter("b", peft.LoraConfig(**words))
    for _ in range(3):
        read_by(graphs, model, ids)
    assert read_by(graphs, model, ids) is not None
    with model._enable_peft_forward_hooks(ids, adapter_names=["b", "b"]):
        assert read_by(graphs, model, ids) is None
    same(graphs, model, ids)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig"])
def test_other_adapters_of_peft_are_another_model(kind: str) -> None:
    import peft

    words: dict[str, Any] = {"target_modules": ["k_proj", "v_proj"]}
    if kind == "IA3Config":
        words |= {"feedforward_modules": [], "init_ia3_weights": False}
    model = peft.get_peft_model(tiny("llama"), getattr(peft, kind)(**words))
    states = [state_of_model(model)]
    with model.disable_adapter():
        states.append(state_of_model(model))
    assert states[0] == state_of_model(model) != states[1]


def test_prompts_whose_logits_are_not_finite_refuse_nothing() -> None:
    model, ids, graphs = tiny("llama"), tokens(2, 20), PromptGraphs()
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        sound = embedding.clone()
        embedding.fill_(float("nan"))
        for _ in range(3):
            assert read_by(graphs, model, ids) is None
        embedding.copy_(sound)
    assert not graphs.refused
    read_by(graphs, model, ids)
    same(graphs, model, ids)


def test_lengths_are_rounded_up() -> None:
    assert [recorded_length(n) for n in (1, 16, 17, 2048, 2049, 4096, 4097)] == [
        16,
        16,
        32,
        2048,
        2560,
        4096,
        0,
    ]
    graphs, model = PromptGraphs(), tiny("llama", max_position_embeddings=8192)
    for _ in range(3):
        assert read_by(graphs, model, tokens(3, 2000)) is None  # they keep a device busy


def test_generate_reads_so(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, a cache of the caller's and pieces it is read as ever."""
    real = why_no_model_step
    monkeypatch.setattr(
        loop, "why_no_model_step", lambda m: "" if real(m) == "the model is not on one GPU" else real(m)
    )
    model = with_methods(tiny("gemma2"))
    model.generation_config.eos_token_id = None
    for round in range(3):
        ids = tokens(2, 20 + round, seed=round)
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
        assert torch.equal(model.generate(**asked), type(model).generate(model, **asked))
    count = len(runs)
    assert count == 3 and decoding_of(model).prompts.graphs  # once to be compared, twice to be used
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    model.generate(ids, attention_mask=mask, **GREEDY)
    model.generate(ids, prefill_chunk_size=7, **GREEDY)
    assert len(runs) == count


def ready() -> tuple[Any, PromptGraphs, Tensor]:
    model = adapted("llama", Recipe(name="nf4_float8", linear=FLOAT8))
    fuse(model)
    FastLanguageModel.for_inference(model)
    graphs, ids = PromptGraphs(), tokens(2, 20)
    read_by(graphs, model, ids)
    same(graphs, model, ids, rtol=0.05)
    assert graphs.graphs
    return model, graphs, ids


def _in_place(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("weight_codes"):
            with torch.inference_mode():
                parameter.bitwise_xor_(0x11)


def _merge(model: Any) -> None:
    model.merge_adapter()


def _train(model: Any) -> None:
    FastLanguageModel.for_training(model)
    FastLanguageModel.for_inference(model)


def _free(model: Any) -> None:
    assert free_prompt_weights(model, "a test wants it")


@pytest.mark.parametrize("change", [_in_place, _merge, _train, _free, forget_weights])
@pytest.mark.filterwarnings("ignore:merging into weights")
def test_other_weights_and_values_let_go_of_stay_unread(change: Any) -> None:
    model, graphs, ids = ready()
    change(model)
    assert read_by(graphs, model, ids) is None and not graphs.graphs
    same(graphs, model, ids, rtol=0.05)


def test_adapters_newest_values_are_read() -> None:
    model, graphs, ids = ready()
    before = read_by(graphs, model, ids).logits
    graph = next(iter(graphs.graphs.values()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3)
    same(graphs, model, ids, rtol=0.05)
    assert next(iter(graphs.graphs.values())) is graph
    assert not torch.allclose(read_by(graphs, model, ids).logits, before, rtol=0.05)


class _Asks(nn.Module):
    """Looks at what it computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.abs().max() >= 0) else x


def test_what_cannot_be_recorded_is_read_as_ever() -> None:
    model, graphs, ids = tiny("gemma2"), PromptGraphs(), tokens(2, 20)
    inner = model.model.layers[1].mlp
    model.model.layers[1].mlp = _Asks(inner)
    for _ in range(3):
        assert read_by(graphs, model, ids) is None
    assert "_Asks asks the host for values" in graphs.refused
    model.model.layers[1].mlp = inner  # another model
    assert read_by(graphs, model, ids) is None and not graphs.refused
    same(graphs, model, ids)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    for _ in range(3):
        assert read_by(graphs, model, ids) is None
    assert "has hooks" in graphs.refused


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_recording_attends_as_the_model_does_outside(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured transformers makes a mask that it leaves out otherwise; none is asked for."""
    from transformers import masking_utils

    model, ids = tiny(family, dtype=torch.bfloat16), tokens(2, 32)  # of the recorded length
    if family != "gemma2":  # with capped scores a mask is made in any case
        model.set_attn_implementation("sdpa")
    fuse(model)
    FastLanguageModel.for_inference(model)
    assert (plain_mask(model, ids.device) is None) == (family == "gemma2")
    real, asked = masking_utils.create_causal_mask, []

    def as_captured(*_: Any, **__: Any) -> bool:
        asked.append(1)
        return False

    with torch.no_grad():
        need = read_prompt(model, ids, None, torch.zeros(2, dtype=torch.long))
        monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", as_captured)
        graph = prompt_graph._PromptGraph(model, (2, 32), ids.device)
        graph.take(ids)
        logits, cache = graph.run()
        assert not asked and real is masking_utils.create_causal_mask
        read_prompt(model, ids, None, torch.zeros(2, dtype=torch.long))
        assert asked or family == "gemma2"  # the question is asked by that name still
    if family != "mistral":  # windows come with a mask of transformers' own, outside of a recording
        assert torch.equal(logits, need.logits)
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, need.cache.layers, strict=True))
    assert float((logits - need.logits).norm() / need.logits.norm()) < 0.04


CAPPED = pytest.mark.xfail(
    reason="the forward of a fused model with capped scores calls something that waits for an H200, which was"
    " not found (28 November 2026); its prompts are read launch by launch"
)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma2", marks=CAPPED), "phi3"])
@torch.no_grad()
def test_windows_and_caps_are_recorded_too(family: str) -> None:
    """A window that the prompt outgrows comes with a mask outside of a recording: the same up to rounding."""
    model = tiny(family, dtype=torch.bfloat16).cuda()
    fuse(model)
    FastLanguageModel.for_inference(model)
    graphs, padding = PromptGraphs(), torch.zeros(1, dtype=torch.long, device="cuda")
    for length in (40, 50, 64, 33):
        ids = tokens(1, length).cuda()
        ours, need = graphs.read(model, ids, padding, WHOLE), read_prompt(model, ids, None, padding)
        assert (ours is None) == (length == 40), graphs.refused
        if ours is not None:
            assert float((ours.logits - need.logits).norm() / need.logits.norm()) < 0.04


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["qlora_nf4_fp8", "qlora_nf4", None])
@torch.no_grad()
def test_a_graph_of_a_prompt_gives_the_same(recipe: str | None) -> None:
    """To the bit what launches one by one give for as many tokens, however many of them are the prompt's."""
    model = tiny("llama", dtype=torch.bfloat16).cuda()
    model.set_attn_implementation("sdpa")
    if recipe:
        fewbits.convert(model, recipe)
    fuse(model)
    FastLanguageModel.for_inference(model)
    graphs, padding = PromptGraphs(), torch.zeros(1, dtype=torch.long, device="cuda")
    for length in (20, 25, 32, 17):
        ids = tokens(1, length).cuda()
        ours, need = graphs.read(model, ids, padding, WHOLE), read_prompt(model, ids, None, padding)
        assert (ours is None) == (length == 20), graphs.refused
        if ours is None:
            continue
        assert float((ours.logits - need.logits).norm() / need.logits.norm()) < 0.04
        longer = torch.cat([ids, ids[:, -1:].expand(-1, 32 - length)], 1)
        whole = read_prompt(model, longer, None, padding)
        for a, b in zip(ours.cache.layers, whole.cache.layers, strict=True):
            assert torch.equal(a.keys, b.keys[:, :, :length])
            assert torch.equal(a.values, b.values[:, :, :length])
        if length == 32:
            assert torch.equal(ours.logits, need.logits)
