"""Text in a class that sees as well: its language side is packed, fused, adapted, merged; towers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3ForConditionalGeneration

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fused_layers, fusion_of
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe
from tests.models.loading import perturb, tokenizer
from tests.models.tiny import tiny_config, tokens

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3() -> Any:
    torch.manual_seed(0)
    text = tiny_config("gemma3_text", layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(text_config=text.to_dict(), vision_config=VISION, mm_tokens_per_image=4)
    config.image_token_index = config.image_token_id = 90
    model = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def keys_of(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return set(tensors.keys())


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = tokens().clamp(max=80)
    loss = model(input_ids=ids, labels=ids, token_type_ids=torch.zeros_like(ids), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_the_identity_recipe_and_fusion_change_neither_loss_nor_gradients() -> None:
    model = gemma3().train()
    before = loss_and_gradients(model)
    receipt = str(fewbits.convert(model, Recipe(name="identity")))
    assert "model.vision_tower" in receipt and "reads other things than text" in receipt
    assert "model.vision_tower.encoder" not in receipt
    fewbits.fuse(model)
    assert len(fused_layers(model)) == 2
    after = loss_and_gradients(model)
    assert not fusion_of(model).fallbacks
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-6)
    assert after[1].keys() == before[1].keys()
    for name, gradient in before[1].items():
        torch.testing.assert_close(after[1][name], gradient, rtol=1e-3, atol=2e-5)


def test_packed_adapted_merged_and_opened_again(tmp_path) -> None:
    gemma3().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert isinstance(model.model.language_model.layers[0].self_attn.q_proj, QuantizedLinear)
    towers = list(model.model.vision_tower.modules())
    assert not any(isinstance(module, QuantizedLinear) for module in towers)
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4), scale=0.05)
    adapted_names = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert adapted_names and not any("vision" in n for n in adapted_names)
    receipt = adapted.save_pretrained_merged(tmp_path / "merged", words, dtype=torch.float32)
    assert "merged into the original weights" in str(receipt)  # whose names are others than the modules'
    assert keys_of(tmp_path / "merged") == keys_of(tmp_path / "base")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    original = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert merged.state_dict().keys() == original.state_dict().keys()
    same = {n for n, t in original.state_dict().items() if torch.equal(t, merged.state_dict()[n])}
    linears = {n for n in original.state_dict() if "language_model.layers" in n and "norm" not in n}
    assert original.state_dict().keys() - same == linears
