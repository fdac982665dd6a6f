"""An output head in few bits: packed while loading, saved, trained beside, merged, and taken out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fuse, fusion_of, unfuse
from fewbits.errors import BadInput
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop as decode_generate
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import get_recipe, recipe_from_config
from tests.models.emulated import on_a_cpu
from tests.models.loading import logits, packed_state, same, save_tiny, tokenizer
from tests.models.tiny import tiny, tokens

HEAD = recipe_from_config({"name": "qlora_nf4", "head": "int8"})
TIED, OWN = "qwen2", "llama"
load = AutoModelForCausalLM.from_pretrained


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings


@pytest.mark.parametrize("family", [OWN, TIED])
def test_packed_while_loading_saved_and_taken_out(family: str, tmp_path: Path) -> None:
    plain = save_tiny(tmp_path / "plain", family)
    table = plain.model.embed_tokens.weight.detach().clone()
    model = load(tmp_path / "plain", quantization_config=FewbitsConfig(HEAD))
    fewbits.convert(plain, HEAD)
    assert "lm_head.codes" in packed_state(model) and same(packed_state(model), packed_state(plain))
    assert torch.equal(model.model.embed_tokens.weight, table) and not model.config.tie_word_embeddings
    changed = [change.name for change in fewbits.explain(model).changes]
    assert changed.count("lm_head") == 1 and "lm_head" not in {
        left.name for left in fewbits.explain(model).left
    }

    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert same(packed_state(again), packed_state(model))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    fewbits.restore(model)
    assert type(model.lm_head) is torch.nn.Linear and is_tied(model) == (family == TIED)
    model.tie_weights()
    assert is_tied(model) == (family == TIED)


@pytest.mark.parametrize("family", [OWN, TIED, "gemma2"])
def test_a_step_without_logits_is_the_same(family: str) -> None:
    """Loss and gradients through the decoded head, fused and not; with logits that one reads, too."""
    model = tiny(family)
    fewbits.convert(model, HEAD)
    model = FastLanguageModel.get_peft_model(model, r=2, use_gradient_checkpointing=False).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)

    def step() -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        return float(loss), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, gradients = step()
    fuse(model)
    assert "without holding the logits" in str(fusion_of(model).receipt)
    read = model(input_ids=tokens(), labels=tokens()).logits.detach().clone()
    loss, fused = step()
    unfuse(model)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert all((a - b).norm() <= 1e-4 * b.norm() for a, b in zip(fused, gradients, strict=True))
    plain = model(input_ids=tokens()).logits
    assert torch.allclose(read, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("family", [OWN, TIED])
def test_predicted_bytes(family: str) -> None:
    model = tiny(family)
    predicted = predict_memory(model.config.to_dict(), HEAD, dtype_bytes=4)
    fewbits.convert(model, HEAD)
    assert predicted.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("family", [OWN, TIED])
def test_merged_into_the_original(family: str, tmp_path: Path) -> None:
    """The merged model is the original's: its head in 16 bits, tied where it was."""
    original = save_tiny(tmp_path / "plain", family)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "plain", recipe=HEAD, dtype=torch.float32)
    adapted = FastLanguageModel.get_peft_model(model, r=2)
    adapted.save_pretrained_merged(tmp_path / "merged", tokenizer(), save_method="merged_16bit")
    merged = load(tmp_path / "merged")
    assert torch.equal(merged.lm_head.weight.float(), original.lm_head.weight.to(merged.dtype).float())
    assert is_tied(merged) == (family == TIED)


def test_decoding_reads_the_packed_head(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)
    model = tiny(OWN, dtype=torch.bfloat16)
    fewbits.convert(model, HEAD)
    with_methods(model)
    ids = tokens(1, 8)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    state = decode_generate.decoding_of(model)  # its logits were compared with the model's own
    assert state.step is not None and state.proved and not state.refused


def test_what_a_recipe_may_say(tmp_path: Path) -> None:
    assert recipe_from_config({"name": "qlora_nf4", "head": {"weight": "int8"}}) == HEAD
    with pytest.raises(BadInput, match="int9"):
        recipe_from_config({"name": "qlora_nf4", "head": "int9"})
    for recipe in (
        {"name": "qlora_nf4", "head": "int8", "skip": ["lm_head"]},
        {"name": "qlora_nf4"},
    ):
        model = tiny(OWN)
        fewbits.convert(model, recipe)
        assert not isinstance(model.lm_head, QuantizedLinear)
    trained = tiny(TIED)  # what trains through rounding stays one weight
    fewbits.convert(trained, {**fewbits.recipes.recipe_to_config(get_recipe("int4_qat")), "head": "int8"})
    assert is_tied(trained)
