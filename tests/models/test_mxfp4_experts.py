"""gpt-oss as OpenAI publishes it: experts in MXFP4, read as they come, trained over, merged, saved again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import fewbits
from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint
from fewbits.formats import MXFP4
from fewbits.nn.experts import QuantizedExperts
from tests.models.loading import logits, packed_state, perturb, same
from tests.models.mixtures import mixture, save_mixture
from tests.models.tiny import tokens

TARGETS = ["q_proj", "v_proj", "gate_up_proj", "down_proj"]


def save_in_mxfp4(folder: Path) -> None:
    """The tiny mixture in the layout of openai/gpt-oss-20b: blocks and scales of each 3-D weight."""
    save_mixture(folder, "gpt_oss")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 3:
            tensors[name] = tensor
            continue
        packed = MXFP4.quantize(tensor.transpose(1, 2).contiguous())
        experts, outputs, half = packed.codes.shape
        tensors[f"{name}_blocks"] = packed.codes.view(experts, outputs, half // 16, 16)
        tensors[f"{name}_scales"] = packed.parts["scales"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def opened(tmp_path: Path) -> tuple[Any, Any, Path]:
    save_in_mxfp4(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    return model, words, tmp_path


def decoded(folder: Path) -> Any:
    """The same folder as transformers decodes it."""
    settings = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)
    return model.float().eval()  # it decodes to bfloat16, in which MXFP4 is exact


def test_codes_are_taken_as_they_come(opened: Any) -> None:
    model, _, folder = opened
    stored = load_file(folder / "base" / "model.safetensors")
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            for name in module.shapes:
                blocks = stored[f"{path}.{name}_blocks"]
                assert torch.equal(getattr(module, name), blocks.flatten(-2))
                assert torch.equal(getattr(module, f"{name}_scales"), stored[f"{path}.{name}_scales"])
    receipt = str(fewbits.explain(model))
    assert "QuantizedExperts mxfp4" in receipt and "experts.gate_up_proj" in receipt
    assert any("is in mxfp4 form already" in note for note in model.fewbits_notes)
    torch.testing.assert_close(
        logits(model, tokens()), logits(decoded(folder / "base"), tokens()), rtol=0, atol=2e-5
    )
    ask = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    theirs = decoded(folder / "base").generate(tokens(1, 6), **ask)
    assert torch.equal(model.generate(input_ids=tokens(1, 6), **ask), theirs)


def test_adapters_train_merge_and_reopen(opened: Any) -> None:
    model, _, folder = opened
    adapted = perturb(FastLanguageModel.get_peft_model(model, r=4, target_modules=TARGETS), scale=0.05).eval()
    adapted.save_pretrained(folder / "adapter")
    theirs = peft.PeftModel.from_pretrained(decoded(folder / "base"), folder / "adapter", is_trainable=True)
    losses = [m(input_ids=tokens(), labels=tokens()).loss for m in (adapted, theirs.eval())]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    others = dict(theirs.named_parameters())
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert sum("experts" in name for name in trained) == 8
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-3, atol=1e-5)
    adapted.save_pretrained_merged(folder / "merged", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged, tokens()), logits(adapted, tokens()), rtol=0, atol=2e-5)


def test_it_is_saved_as_ours_and_opens_again(opened: Any) -> None:
    model, words, folder = opened
    model.save_pretrained(folder / "packed")
    words.save_pretrained(folder / "packed")
    again, _ = FastLanguageModel.from_pretrained(folder / "packed", dtype=torch.float32)
    assert same(packed_state(again), packed_state(model))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_half_a_weight_is_refused_in_one_sentence(tmp_path: Path) -> None:
    save_in_mxfp4(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    stored[name] = stored[name][:, :, :1].contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"down_proj has blocks \(4, 64, 1, 16\).*different models"):
        FastLanguageModel.from_pretrained(tmp_path, dtype=torch.float32)


def test_the_decoded_model_is_the_one_that_was_rounded(opened: Any) -> None:
    model, _, _ = opened
    plain = model.dequantize()
    expected = mixture("gpt_oss").model.layers[0].mlp.experts.gate_up_proj
    rounded = MXFP4.fake_quantize(expected.detach().transpose(1, 2).contiguous()).transpose(1, 2)
    assert torch.equal(plain.model.layers[0].mlp.experts.gate_up_proj, rounded)
