"""Training through stochastic products: sc_qat and adapters over prepared weights, in `fewbits train` too."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits.formats import STOCHASTIC
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.nn.stochastic.qat import StochasticQATLinear
from fewbits.recipes import QAT, LoRA, sc_qat
from fewbits.training.calibration.qat import convert_qat, prepare_qat
from fewbits.training.config import TrainConfig
from fewbits.training.run import train
from tests.models.tiny import tiny, tokens


@pytest.mark.parametrize("lora", [None, LoRA(r=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_trained_is_what_is_prepared(dtype: torch.dtype, lora: LoRA | None) -> None:
    recipe = replace(sc_qat(), lora=lora, qat=QAT(weight=STOCHASTIC.with_length(32)))
    model = prepare_qat(tiny("llama", dtype=dtype), recipe).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    assert sum(isinstance(m, StochasticQATLinear) for m in model.modules()) == 14
    with torch.no_grad():
        before = model(tokens()).logits
        packed, _ = convert_qat(model)
        assert torch.equal(packed(tokens()).logits, before)
    layers = [m for m in packed.modules() if isinstance(m, StochasticLinear)]
    assert len(layers) == 14 and {layer.levels for layer in layers} == {(32,)}


@pytest.mark.parametrize("recipe", ["sc_qat", "stochastic"])
def test_the_command_trains_and_the_adapter_learns(recipe: str, tiny_folder, tiny_data, tmp_path) -> None:
    config = TrainConfig.from_mapping(
        {
            "model": str(tiny_folder),
            "train_data": str(tiny_data),
            "recipe": recipe,
            "lora_r": 4,
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "batch_size": 4,
            "learning_rate": 2e-2,
            "report": False,
            "samples": 0,
            "device": "cpu",
        }
    )
    result = train(config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert len(losses) == 6 and losses[-1] < losses[0]
    if recipe == "stochastic":
        assert (result.final / "adapter_model.safetensors").is_file()
        return
    packed = AutoModelForCausalLM.from_pretrained(result.final)
    assert sum(isinstance(m, StochasticLinear) for m in packed.modules()) == 14


def test_a_packed_checkpoint_of_what_was_trained(tmp_path) -> None:
    model = prepare_qat(tiny("llama"), replace(sc_qat(), lora=LoRA(r=4)))
    packed, _ = convert_qat(model)
    packed.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, packed(tokens()).logits)
