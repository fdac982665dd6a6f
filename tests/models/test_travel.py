"""Models go through pickle, torch.save, deepcopy and other processes; ``dequantize()`` makes a plain one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import fewbits
from fewbits import FastLanguageModel, explain
from fewbits.errors import Unsupported
from fewbits.formats import FORMATS
from fewbits.host.conversion import Conversion
from fewbits.host.record import take_part
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.models.packing.convert import CONVERTED
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.stochastic_config import StochasticConfig
from tests.models.loading import logits, perturb, save_tiny
from tests.models.tiny import tokens


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("travel") / "plain"
    save_tiny(folder)
    return folder


def loaded(recipe: str | None) -> Callable[[Path], Any]:
    return lambda plain: FastLanguageModel.from_pretrained(plain, load_in_4bit=False, recipe=recipe)[0]


def adapted(plain: Path) -> Any:
    return perturb(FastLanguageModel.get_peft_model(loaded("qlora_nf4")(plain), r=4))


def fused(plain: Path) -> Any:
    model = adapted(plain)
    fewbits.fuse(model)
    return model


def under_stochastic_attention(plain: Path) -> Any:
    model = loaded(None)(plain)
    apply_stochastic(model, StochasticConfig(options=FORMATS["stochastic"]))
    return model


MADE = {
    "plain": loaded(None),
    "nf4": loaded("qlora_nf4"),
    "int8": loaded("int8"),
    "float8": loaded("float8_full"),
    "qat": loaded("int4_qat"),
    "stochastic": loaded("stochastic"),
    "stochastic qat": loaded("sc_qat"),
    "stochastic attention": under_stochastic_attention,
    "adapted": adapted,
    "fused": fused,
}


def saved_and_read(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_read,
}


@pytest.mark.parametrize("kind", MADE)
def test_a_copy_computes_the_same_and_is_its_own(kind, plain, tmp_path):
    model = MADE[kind](plain).eval()
    expected = logits(model, tokens())
    generated = model.generate(tokens(1, 4), max_new_tokens=3, do_sample=False)
    for way, travel in WAYS.items():
        other = travel(model)
        assert torch.equal(logits(other, tokens()), expected), way
        assert torch.equal(other.generate(tokens(1, 4), max_new_tokens=3, do_sample=False), generated), way
        mine = {p.data_ptr() for p in model.parameters() if p.numel()}
        assert mine.isdisjoint(p.data_ptr() for p in other.parameters() if p.numel()), way
    with torch.no_grad():  # the methods on the copy are the copy's: it saves its own weights
        other.get_input_embeddings().weight.zero_()
    other.save_pretrained(tmp_path / "copy")
    assert torch.equal(logits(model, tokens()), expected)
    if kind not in ("adapted", "fused"):
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
        assert not read.get_input_embeddings().weight.any()


def _in_a_worker(place: Path, ids: torch.Tensor) -> None:
    model = torch.load(place / "model.pt", weights_only=False)
    torch.save(logits(model, ids), place / "logits.pt")


@pytest.mark.slow
def test_a_spawned_worker_computes_the_same(plain, tmp_path):
    model = adapted(plain).eval()
    torch.save(model, tmp_path / "model.pt")
    worker = torch.multiprocessing.get_context("spawn").Process(
        target=_in_a_worker, args=(tmp_path, tokens())
    )
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, tokens()))


@pytest.mark.parametrize("kind", ["nf4", "int8", "stochastic", "float8", "stochastic attention"])
def test_dequantize_gives_a_plain_model_of_the_decoded_weights(kind, plain, tmp_path):
    model = MADE[kind](plain).eval()
    packed = {n: m.dequantize() for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    expected = logits(model, tokens())
    assert model.dequantize() is model
    assert not any(isinstance(module, CONVERTED) for module in model.modules())
    assert {type(m).__module__.partition(".")[0] for m in model.modules()} <= {"torch", "transformers"}
    for name, weight in packed.items():
        assert torch.equal(model.get_submodule(name).weight, weight)
    if kind in ("nf4", "int8"):
        assert torch.allclose(logits(model, tokens()), expected, atol=1e-4)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    assert not model.is_quantized and not hasattr(model.config, "quantization_config")
    assert "without a recipe" in str(explain(model))


def test_dequantize_keeps_adapters_and_takes_a_fused_decoder_apart(plain):
    model = fused(plain).eval()
    expected = logits(model, tokens())
    model.dequantize()
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert any("lora_A" in name for name, _ in model.named_parameters())
    assert torch.allclose(logits(model, tokens()), expected, atol=1e-4)


def test_dequantize_casts_and_gives_decoded_weights_where_originals_are_kept(plain):
    model = AutoModelForCausalLM.from_pretrained(plain)
    fewbits.convert(model, "int8", keep_original=True)
    name = "model.layers.0.mlp.up_proj"
    decoded = model.get_submodule(name).dequantize()
    model.dequantize(dtype=torch.bfloat16)
    assert torch.equal(model.get_submodule(name).weight, decoded.bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_dequantize_of_merged_adapters_is_refused(plain):
    model = adapted(plain)
    model.merge_adapter()
    with pytest.raises(Unsupported, match="unmerge_adapter"):
        model.dequantize()
    model.unmerge_adapter()
    model.dequantize()


@pytest.mark.parametrize("kind", MADE)
def test_explain_answers_for_whatever_was_loaded(kind, plain):
    model = MADE[kind](plain)
    text = str(explain(model))
    packed = sum(isinstance(module, CONVERTED) for module in model.modules())
    assert text.count("\n") >= 1 and (f"x{packed // 7}" in text) == bool(packed)


def test_explain_counts_packed_layers_of_a_model_without_a_receipt(plain):
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=FewbitsConfig("int8"))
    take_part(model, Conversion)  # as of a family without a spec, in bitsandbytes' form
    assert sum(change.after == "QuantizedLinear int8" for change in explain(model).changes) == 14
    assert isinstance(model.dequantize().model.layers[0].mlp.up_proj, nn.Linear)
