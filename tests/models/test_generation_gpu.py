"""Decoding on a GPU: batches that live over few bits and with adapters by row, caches by name, mixtures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fewbits
from fewbits import FastLanguageModel
from fewbits.formats.kv_cache import get_kv_cache
from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.rows import Row
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.model_step import ModelStep
from fewbits.models.generation.packed_cache import PackedCache
from fewbits.models.generation.step import DecodeStep
from tests.models.mixtures import mixture
from tests.models.test_live_adapters import NAMES, adapted, named
from tests.models.test_live_batch import model_of, rows
from tests.models.test_model_step import GREEDY, ready
from tests.models.tiny import tiny, tokens

pytestmark = pytest.mark.gpu

KINDS = [None, "int8", {"name": "int4", "newest": 5}]
OF_KERNELS: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64, "hidden_size": 128}
NEAR = 0.15  # standard deviations of a place's logits that rounding to 16 bits explains


@torch.no_grad()
def furthest_behind(model: Any, row: Row, new: list[int], kind: Any) -> float:
    """How far a text's tokens lie below the likeliest of the model over the definition, in deviations."""
    cache = None if kind is None else PackedCache(model.config, get_kv_cache(kind))
    ids, behind = torch.tensor([row.ids], device=model.device), []
    for token in new:
        out = model(ids, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1].float()
        behind.append(float((logits.max() - logits[token]) / logits.std()))
        ids = torch.tensor([[token]], device=model.device)
    return max(behind)


def texts_of(model: Any, given: list[Row], words: dict[str, Any], slots: int) -> tuple[list[Any], Report]:
    report = Report()
    found = sorted(answers(model, given, words, slots=slots, report=report), key=lambda text: text.row.index)
    assert len(found) == len(given)
    return found, report


@pytest.mark.parametrize(("kind", "recipe"), [*((kind, "qlora_nf4") for kind in KINDS), (KINDS[2], None)])
def test_batches_that_live_over_few_bits(kind: Any, recipe: str | None) -> None:
    """By decoding's kernels; texts join, leave and move between slots."""
    model = model_of("llama", **OF_KERNELS).cuda()
    if recipe:
        fewbits.convert(model, recipe)
    words = {"max_new_tokens": 14, "do_sample": False} | ({} if kind is None else {"kv_cache": kind})
    texts, report = texts_of(model, rows(6), words, 3)
    assert report.way == "kernels", report.reason
    for text in texts:
        assert furthest_behind(model, text.row, text.tokens, kind) < NEAR


@pytest.mark.parametrize("kind", [None, "int8"])
def test_batches_that_live_with_adapters_by_row(kind: Any) -> None:
    """Each text is its own adapter's, whatever stands beside it."""
    model = adapted(**OF_KERNELS).cuda()
    base = model.get_base_model()
    words = {"max_new_tokens": 12, "do_sample": False} | ({} if kind is None else {"kv_cache": kind})
    texts, report = texts_of(model, named(), words, 4)
    assert report.way == "kernels", report.reason
    for text, name in zip(texts, NAMES, strict=True):
        with model.disable_adapter() if name == "__base__" else torch.no_grad():
            if name not in (None, "__base__"):
                model.set_adapter(name)
            assert furthest_behind(base, text.row, text.tokens, kind) < NEAR
        model.set_adapter("default")
    assert texts[3].tokens != texts[4].tokens  # one prompt, two adapters


@pytest.mark.parametrize("name", ["static", "dynamic", "hybrid"])
@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral"])
def test_caches_by_name_through_the_models_own_modules(family: str, name: str) -> None:
    """In float32: the tokens of transformers' own loop, with the same word."""
    model = mixture(family) if family == "mixtral" else tiny(family)
    model.config.output_router_logits = False
    model = ready(model.cuda())
    for count, length in ((3, 20), (1, 9), (2, 40)):
        ids = tokens(count, length).cuda()
        ours = model.generate(ids, cache_implementation=name, **GREEDY)
        theirs = type(model).generate(model, ids, cache_implementation=name, disable_compile=True, **GREEDY)
        assert torch.equal(ours, theirs)
    assert isinstance(decoding_of(model).step, ModelStep), decoding_of(model).refused


@pytest.mark.parametrize("name", ["static", "dynamic", "hybrid"])
def test_caches_by_name_through_decodings_kernels(name: str) -> None:
    model = model_of("qwen3", **OF_KERNELS).cuda()
    fewbits.convert(model, "qlora_nf4")
    FastLanguageModel.for_inference(model)
    model.generation_config.eos_token_id = None
    for length in (20, 9):
        ids = tokens(1, length).cuda()
        new = model.generate(ids, cache_implementation=name, **GREEDY)[0, length:].tolist()
        assert furthest_behind(model, Row(0, tuple(ids[0].tolist())), new, None) < NEAR
    assert isinstance(decoding_of(model).step, DecodeStep), decoding_of(model).said


@pytest.mark.parametrize("kind", ["int8", {"name": "int4", "newest": 5}])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_mixtures_over_few_bits(family: str, kind: Any) -> None:
    """In float32: the tokens of transformers' loop over the definition."""
    model = mixture(family)
    model.config.output_router_logits = False
    model = ready(model.cuda())
    for count, length in ((3, 20), (1, 9)):
        ids = tokens(count, length).cuda()
        ours = model.generate(ids, kv_cache=kind, **GREEDY)
        own = PackedCache(model.config, kind)
        assert torch.equal(ours, type(model).generate(model, ids, past_key_values=own, **GREEDY))
    step = decoding_of(model).step
    assert isinstance(step, ModelStep) and step.packed, decoding_of(model).refused
