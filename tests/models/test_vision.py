"""`FastVisionModel`: images through the model's own forward over a packed language side; nothing is lost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import fewbits
from fewbits import FastVisionModel
from fewbits.errors import Unsupported
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import get_recipe
from tests.models.loading import packed_state, perturb, same, tokenizer
from tests.models.test_multimodal import gemma3
from tests.models.tiny import VOCAB, tokens

_TEXT: dict[str, Any] = {
    "model_type": "qwen2_5_vl_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
IMAGE = 90


def qwen() -> Any:
    torch.manual_seed(0)
    ends = {
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }
    config = AutoConfig.for_model("qwen2_5_vl", text_config=_TEXT, vision_config=_VISION, **ends)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def picture(kind: str) -> dict[str, torch.Tensor]:
    """A row with an image: 16 patches of Qwen's, four tokens; or one of Gemma's, four tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[5, 8, *[IMAGE] * 4, 13, 7, 8, 9]])
    if kind == "qwen":
        ids[0, 1], ids[0, 6] = 92, 93
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    pixels = torch.randn(1, 3, 28, 28, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


MODELS = {"qwen": qwen, "gemma3": gemma3}


def loss_of(model: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**row, labels=row["input_ids"].masked_fill(row["input_ids"] == IMAGE, -100)).loss


def written(kind: str) -> dict[str, torch.Tensor]:
    ids = tokens().clamp(max=80)
    return {"input_ids": ids} | ({"token_type_ids": torch.zeros_like(ids)} if kind == "gemma3" else {})


@pytest.fixture(params=MODELS)
def opened(request: Any, tmp_path: Path) -> tuple[str, Any, Any, Path]:
    MODELS[request.param]().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model, words = FastVisionModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    return request.param, model.eval(), words, tmp_path


def test_pictures_and_text_as_over_the_decoded_weights(opened: Any) -> None:
    kind, model, _, _ = opened
    assert any("no processor of images" in note for note in model.fewbits_notes)
    packed = [n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    assert packed and all("language_model" in name for name in packed)
    assert "it reads other things than text: left as it is" in str(fewbits.explain(model))
    plain = copy.deepcopy(model).dequantize()
    adapted = perturb(FastVisionModel.get_peft_model(model, r=4), scale=0.05).eval()
    assert not any("vis" in n for n, p in adapted.named_parameters() if p.requires_grad)
    for row in (picture(kind), written(kind)):
        with adapted.disable_adapter():
            torch.testing.assert_close(loss_of(adapted, row), loss_of(plain, row), rtol=1e-5, atol=1e-5)
        loss_of(adapted, row).backward()
        trained = [p for p in adapted.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
        adapted.zero_grad()
    blind = loss_of(adapted, {**picture(kind), "pixel_values": picture(kind)["pixel_values"].flip(-1)})
    assert not torch.equal(blind, loss_of(adapted, picture(kind)))


def test_merged_saved_and_opened_again_with_every_tensor(opened: Any) -> None:
    kind, model, words, folder = opened
    adapted = perturb(FastVisionModel.get_peft_model(model, r=4), scale=0.05).eval()
    adapted.save_pretrained(folder / "adapter")
    adapted.save_pretrained_merged(folder / "merged", words, dtype=torch.float32)
    merged, original = (
        AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("merged", "base")
    )
    assert merged.state_dict().keys() == original.state_dict().keys()
    changed = {n for n, t in original.state_dict().items() if not torch.equal(t, merged.state_dict()[n])}
    assert changed and all("language_model.layers" in name for name in changed)
    again, _ = FastVisionModel.from_pretrained(folder / "adapter", dtype=torch.float32)
    assert torch.equal(loss_of(again.eval(), picture(kind)), loss_of(adapted, picture(kind)))
    fresh, _ = FastVisionModel.from_pretrained(folder / "base", dtype=torch.float32)
    fresh.save_pretrained(folder / "packed")
    words.save_pretrained(folder / "packed")
    reopened, _ = FastVisionModel.from_pretrained(folder / "packed", dtype=torch.float32)
    assert same(packed_state(reopened), packed_state(fresh))
    predicted = predict_memory(original.config.to_dict(), get_recipe("qlora_nf4"), dtype_bytes=4)
    assert predicted.weights == sum(t.nbytes for t in (*reopened.parameters(), *reopened.buffers()))


def test_adapters_where_the_finetune_options_say(opened: Any) -> None:
    kind, model, _, _ = opened
    with pytest.raises(Unsupported, match="leave nothing to train"):
        FastVisionModel.get_peft_model(model, finetune_language_layers=False)
    with pytest.raises(Unsupported, match=r"target_modules says which linears.*give one"):
        FastVisionModel.get_peft_model(model, target_modules=["q_proj"], finetune_vision_layers=True)
    if kind == "qwen":
        with pytest.raises(Unsupported, match="which of its linears are attention's is not known"):
            FastVisionModel.get_peft_model(model, finetune_mlp_modules=False)
        adapted = FastVisionModel.get_peft_model(model, r=4, finetune_vision_layers=True)
        wanted = {"visual", "language_model"}
    else:
        adapted = FastVisionModel.get_peft_model(model, r=4, finetune_mlp_modules=False)
        wanted = {"language_model"}
        assert not any("mlp" in n for n, p in adapted.named_parameters() if p.requires_grad)
    perturb(adapted).train()
    loss_of(adapted, picture(kind)).backward()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert {part for part in wanted for n in trained if f".{part}." in n} == wanted
    assert all(p.grad is not None for p in trained.values())
