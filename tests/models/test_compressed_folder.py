"""compressed-tensors folders: opened by transformers with that library, and here, with the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint
from fewbits.export import compressed
from fewbits.models import compressed_folder
from tests.models.loading import save_tiny, tokenizer

IDS = torch.tensor([[1, 5, 9, 20, 31]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize(
    ("method", "limit", "rows"), [("w4a16", 0.5, 128), ("w8a16", 0.05, 128), ("w8a16", 0.05, 172)]
)
def test_both_sides_compute_the_same(tmp_path: Path, method: str, limit: float, rows: int) -> None:
    save_tiny(tmp_path / "base", intermediate_size=rows)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    receipt = model.save_pretrained_merged(
        tmp_path / "out", words, save_method=f"compressed_tensors_{method}"
    )
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(here), logits(there))
    assert 0 < (logits(here) - logits(model)).norm() / logits(model).norm() < limit
    assert receipt.num_tensors[f"INT{method[1]}"] == 14 and 0 < receipt.worst[1] < 0.15
    assert any("compressed-tensors" in note for note in here.fewbits_notes)


def test_an_adapter_over_a_packed_base_is_merged(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base")
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    adapted: Any = model.base_model.model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        adapted.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained_merged(tmp_path / "out", words, save_method="compressed_tensors_w8a16")
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    delta = 2.0 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    wanted = (plain.model.layers[1].mlp.down_proj.weight + delta).detach()
    assert (here.model.layers[1].mlp.down_proj.weight - wanted).norm() < 0.02 * wanted.norm()


def test_searched_scales_lose_less_than_plain_ones() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    back = compressed.decompress(compressed.compress(weight, 4, 128, torch.float32), 4, 128)
    blocks = weight.reshape(32, 2, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 7
    plain = ((blocks / scale).round() * scale).reshape(weight.shape)
    assert (back - weight).norm() < 0.97 * (plain - weight).norm()


def test_a_wrong_folder_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    monkeypatch.setattr(
        compressed_folder, "compress", lambda weight, *rest: compressed.compress(weight.flip(0), *rest)
    )
    with pytest.raises(BadCheckpoint, match="nothing was written"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer(), save_method="compressed_tensors_w8a16")
    assert not (tmp_path / "out").exists()
