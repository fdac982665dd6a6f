"""Batches that live over keys and values in few bits: each text is what it is alone over such a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.kv_cache import KVCache, get_kv_cache
from fewbits.models.generation.live import answers as live
from fewbits.models.generation.live import step_slots
from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.plan import SlotSize
from fewbits.models.generation.live.prompts import Prompt, Prompts
from fewbits.models.generation.live.rows import Row, Text
from fewbits.models.generation.live.slot_layers import Now, PackedSlotLayer, size_of_slot
from fewbits.models.generation.live.slots import ModelSlots
from fewbits.models.generation.live.step_slots import StepSlots
from fewbits.models.generation.packed_cache import PackedCache, PackedLayer
from fewbits.models.generation.packed_keys import fill_step, rows_of
from fewbits.models.generation.step import DecodeStep
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.test_live_batch import made, model_of, rows
from tests.models.tiny import tiny

SMALL = {"keys": "int4", "values": "int4", "group": 32, "newest": 5, "first": 2}
KINDS = [
    SMALL,
    {**SMALL, "keys": "int8", "newest": 1, "first": 0},
    {**SMALL, "keys": "fp8", "values": "fp8", "newest": 9, "first": 12},
    {**SMALL, "keys": "bfloat16", "rotated": False},
    {**SMALL, "keys": "int8", "values": "bfloat16"},
]
GREEDY = {"max_new_tokens": 17, "do_sample": False}


def alone(model: Any, row: Row, kind: KVCache) -> list[int]:
    """transformers' own loop on this prompt alone, over the definition."""
    ids = torch.tensor([row.ids])
    cache = PackedCache(model.config, kind)
    return type(model).generate(model, ids, past_key_values=cache, **GREEDY)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("family", "kind"), [("gemma2", SMALL), *(("llama", kind) for kind in KINDS)])
def test_each_text_is_what_it_is_alone(family: str, kind: dict[str, Any]) -> None:
    """Layers of a sliding window stay in 16 bits; texts join, leave and move between slots."""
    model, report = model_of(family, head_dim=32), Report()
    texts = made(model, {**GREEDY, "kv_cache": kind}, slots=3, report=report)
    assert [text.tokens for text in texts] == [alone(model, text.row, get_kv_cache(kind)) for text in texts]
    assert report.way == "forward" and report.cache == get_kv_cache(kind).name
    if kind is SMALL:  # four bits are seen
        assert [text.tokens for text in texts] != [text.tokens for text in made(model, GREEDY)]


def test_the_models_choice_and_long_prompts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's tokens see each other in 16 bits, however many are read at a time."""
    model = model_of("qwen3", head_dim=32)
    fewbits.choose_cache(model, SMALL)
    want = [text.tokens for text in made(model, GREEDY, slots=4)]
    assert want == [alone(model, row, get_kv_cache(SMALL)) for row in rows()]
    monkeypatch.setitem(live._PIECE_TOKENS, "cpu", 8)
    real = live.Prompts
    monkeypatch.setattr(live, "Prompts", lambda m, **how: real(m, **{**how, "together": True}))
    assert [text.tokens for text in made(model, GREEDY, slots=4)] == want


@pytest.mark.parametrize("kind", [{**SMALL, "newest": 7}, "int8/int4", "fp8"])
def test_the_same_over_decodings_kernels(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their definitions; steps of fewer rows work on the same packed keys and values."""
    on_a_cpu(monkeypatch)
    steps = count_steps(monkeypatch)
    monkeypatch.setattr(live, "_LOOK_EVERY", 3)
    monkeypatch.setattr(live, "_looks_seldom", lambda device: True)
    monkeypatch.setattr(step_slots, "_FEWEST", 1)
    model = model_of("llama", dtype=torch.bfloat16, head_dim=64, hidden_size=128)
    report = Report()
    texts = made(model, {**GREEDY, "kv_cache": kind}, slots=5, report=report)
    assert report.way == "kernels" and steps[0], report.reason
    for text in texts:
        assert near(model, text, get_kv_cache(kind))


@pytest.mark.parametrize("words", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("plain", [False, True])
def test_one_by_one_too(words: dict[str, Any], plain: bool) -> None:
    """Models that have no `generate` of ours get the cache itself."""
    model = tiny("llama", head_dim=32) if plain else model_of("llama", head_dim=32)
    asked, report = {**GREEDY, **words, "pad_token_id": 0, "eos_token_id": 5}, Report()
    for text in made(model, {**asked, "kv_cache": SMALL}, 3, report=report):
        ids, cache = torch.tensor([text.row.ids]), PackedCache(model.config, SMALL)
        want = type(model).generate(model, ids, past_key_values=cache, **asked)[0, ids.shape[1] :]
        assert text.tokens == want.tolist()
    assert report.way == "one by one"


@torch.no_grad()
def near(model: Any, text: Text, kind: KVCache) -> bool:
    """Whether each token is the likeliest of the model over the definition, up to rounding."""
    cache = PackedCache(model.config, kind)
    ids = torch.tensor([text.row.ids])
    behind = []
    for token in text.tokens:
        logits = model(ids, past_key_values=cache).logits[0, -1].float()
        behind.append(float((logits.max() - logits[token]) / logits.std()))
        ids = torch.tensor([[token]])
    return max(behind) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_reads_what_a_cache_of_one_text_reads(kind: dict[str, Any]) -> None:
    """To the bit, at every step, of texts of any length, one of which moves to another slot."""
    formats, lengths = get_kv_cache(kind), [1, 4, 23]
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(2, 2, length, 32, generator=generator) for length in lengths]
    layer = PackedSlotLayer(4, 64, new[0][0], new[0][1], formats)
    own = [PackedLayer(formats) for _ in lengths]
    for slot, (keys, values) in enumerate(new):
        own[slot].update(keys[None], values[None])
        layer.put(slot, keys, values)
    for step in range(30):
        if step == 13:
            layer.move(2, 0, lengths[2])
            own, lengths = [own[2], own[1]], [lengths[2], lengths[1]]
        used = len(lengths)
        places = torch.tensor(lengths)[:, None]
        layer.now = Now(torch.arange(used)[:, None], places, 64, list(lengths))
        states = torch.randn(2, used, 2, 1, 32, generator=generator)
        found = layer.update(*states)
        for slot in range(used):
            want = own[slot].update(*states[:, slot : slot + 1])
            for ours, theirs in zip(found, want, strict=True):
                assert torch.equal(ours[slot, :, : lengths[slot] + 1], theirs[0])
            lengths[slot] += 1


def test_a_kernels_slot_holds_what_a_step_of_one_text_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)
    model = model_of("llama", dtype=torch.bfloat16, head_dim=64, hidden_size=128)
    kind = get_kv_cache({**SMALL, "group": 64})
    slots = StepSlots(model, count=3, room=40, kind=kind)
    for slot, length in enumerate((30, 3, 17)):
        slots.put(slot, prompt(model, length))
    slots.move(2, 0)
    for slot, length in ((0, 17), (1, 3), (2, 17)):
        step = DecodeStep(model, batch=1, room=40, kv_cache=kind)
        fill_step(step, prompt(model, length).cache(model, kind), length)
        packed, ring = max(length - 5, 0), [n % 6 for n in range(max(length - 5, 0), length)]
        for i, alone in step.packed.items():
            for which in ("keys", "values"):
                found = rows_of(slots._whole.packed[i], slice(slot, slot + 1)).stored(which)
                cuts = (slice(packed), slice(packed), ring, slice(min(2, length)))
                for ours, theirs, cut in zip(found, alone.stored(which), cuts, strict=True):
                    assert torch.equal(ours[:, :, cut], theirs[:, :, cut])


def prompt(model: Any, length: int) -> Any:
    prompts, ids = Prompts(model, most_tokens=64, together=False), Prompt(tuple(range(3, 3 + length)))
    prompts.turn([ids])
    return prompts.ready[ids]


@pytest.mark.parametrize("kind", [SMALL, KINDS[3]])
def test_what_a_slot_takes_is_what_was_planned(kind: dict[str, Any]) -> None:
    model = model_of("gemma2", head_dim=32)
    read, kind = prompt(model, 9), get_kv_cache(kind)
    slots = ModelSlots(model, count=3, room=48, like=read, kind=kind)
    size = size_of_slot(read, [isinstance(layer, PackedSlotLayer) for layer in slots._layers], kind)
    tensors: list[Tensor] = []
    for layer in slots._layers:
        tensors += [layer.keys, layer.values]
        if isinstance(layer, PackedSlotLayer):
            tensors += [tensor for stored in layer.stored.values() for tensor in stored.values()]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * size.of(48)
    assert size_of_slot(read, [False] * len(read.keys), None) == SlotSize(read.bytes_per_token)


def test_few_bits_let_more_texts_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", head_dim=64, hidden_size=128, dtype=torch.bfloat16)
    monkeypatch.setattr(live, "why_not", lambda model: "")  # the plan of the kernels
    monkeypatch.setattr(live, "free_share", lambda device: 400_000)
    plans: list[int] = []
    for kind in ("bfloat16", {**SMALL, "group": 64}):
        report = Report()
        next(
            answers(model, rows(60), {"max_length": 100, "do_sample": False, "kv_cache": kind}, report=report)
        )
        assert report.plan is not None
        plans.append(report.plan.slots)
    plain, packed = plans
    assert packed > 2 * plain


def test_caches_that_cannot_be() -> None:
    model = model_of("mistral")
    with pytest.raises(Unsupported, match="no layer of mistral attends to all"):
        made(model, {**GREEDY, "kv_cache": "int4"}, 2)
    with pytest.raises(BadInput, match="no key/value cache in 'int3'"):
        made(model, {**GREEDY, "kv_cache": "int3"}, 2)
