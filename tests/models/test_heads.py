"""Classifiers, and bases without a head, over packed layers: trained, saved with PEFT, merged, reopened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import fewbits
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.merging.merge import save_pretrained_merged
from fewbits.nn.linear import QuantizedLinear
from tests.models.loading import perturb, tokenizer
from tests.models.tiny import VOCAB, tiny, tokens

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "num_labels": 3,
}  # fmt: skip
ROWS = tokens(4, 8).clamp(max=90)
LABELS = torch.tensor([0, 1, 2, 0])


def save(folder: Path, kind: str, *, seed: int = 0) -> None:
    """A causal decoder, or a classifier over an encoder."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        model: Any = tiny("qwen3")
    else:
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **_ENCODER))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def packed(auto: Any, folder: Path, **options: Any) -> Any:
    """Loaded with its linears in NF4, evaluation mode; a new head begins the same each time."""
    torch.manual_seed(1)
    settings = FewbitsConfig("qlora_nf4")
    model = auto.from_pretrained(folder, quantization_config=settings, dtype=torch.float32, **options)
    model.config.pad_token_id = 0
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) >= 8
    return model.eval()


@pytest.mark.parametrize("kind", ["qwen3", "bert", "modernbert"])
def test_a_classifier_trains_its_head_and_adapters(kind: str, tmp_path: Path) -> None:
    save(tmp_path / "base", kind)
    model = packed(AutoModelForSequenceClassification, tmp_path / "base", num_labels=3)
    adapted = fewbits.get_peft_model(model, r=4, task_type="SEQ_CLS").eval()
    heads = [n for n, p in adapted.named_parameters() if p.requires_grad and "lora" not in n]
    assert heads and all("modules_to_save" in name for name in heads)
    assert not any(isinstance(adapted.get_submodule(n.rpartition(".")[0]), QuantizedLinear) for n in heads)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=ROWS, labels=LABELS).loss
        loss.backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = packed(AutoModelForSequenceClassification, tmp_path / "base", num_labels=3)
    again = fewbits.load_adapter(fresh, tmp_path / "adapter").eval()
    expected = adapted(input_ids=ROWS).logits
    assert torch.equal(again(input_ids=ROWS).logits, expected)
    beside = peft.PeftModel.from_pretrained(
        packed(AutoModelForSequenceClassification, tmp_path / "base", num_labels=3), tmp_path / "adapter"
    )
    assert torch.equal(beside.eval()(input_ids=ROWS).logits, expected)


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_a_classifier_is_merged_with_its_trained_head(kind: str, tmp_path: Path) -> None:
    save(tmp_path / "base", kind)
    model = packed(AutoModelForSequenceClassification, tmp_path / "base", num_labels=3)
    adapted = perturb(fewbits.get_peft_model(model, r=4, task_type="SEQ_CLS"), scale=0.05).eval()
    save_pretrained_merged(adapted, tmp_path / "merged", dtype=torch.float32)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    name = "score" if kind == "qwen3" else "classifier"
    trained = adapted.base_model.model.get_submodule(name).modules_to_save["default"].weight
    assert torch.equal(merged.get_submodule(name).weight, trained)


def test_tokens_are_classified(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    model = packed(AutoModelForTokenClassification, tmp_path, num_labels=3)
    adapted = fewbits.get_peft_model(model, r=4, task_type="TOKEN_CLS")
    found = adapted(input_ids=ROWS, labels=ROWS % 3)
    found.loss.backward()
    assert found.logits.shape == (4, 8, 3)
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_an_embedding_model_trains_saves_and_reopens(tmp_path: Path) -> None:
    """A base without a head, its last token's state as the embedding: Qwen3-Embedding's way."""
    save(tmp_path / "base", "qwen3")
    model = packed(AutoModel, tmp_path / "base")
    adapted = perturb(fewbits.get_peft_model(model, r=4, task_type="FEATURE_EXTRACTION"), scale=0.05).eval()
    embedded = torch.nn.functional.normalize(adapted(input_ids=ROWS).last_hidden_state[:, -1], dim=-1)
    scores = embedded @ embedded.T / 0.05
    torch.nn.functional.cross_entropy(scores, torch.arange(4)).backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    adapted.save_pretrained(tmp_path / "adapter")
    again = fewbits.load_adapter(packed(AutoModel, tmp_path / "base"), tmp_path / "adapter").eval()
    expected = adapted(input_ids=ROWS).last_hidden_state
    assert torch.equal(again(input_ids=ROWS).last_hidden_state, expected)
    fresh = packed(AutoModel, tmp_path / "base")
    fresh.save_pretrained(tmp_path / "packed")
    reopened = AutoModel.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    assert torch.equal(reopened(input_ids=ROWS).last_hidden_state, fresh(input_ids=ROWS).last_hidden_state)
