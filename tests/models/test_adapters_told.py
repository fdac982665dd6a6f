"""`explain` tells the adapters: rank, targets, what is trained, and whether they take part."""

from __future__ import annotations

from typing import Any

import peft
import torch

import fewbits
from fewbits import explain
from tests.models.mixtures import mixture
from tests.models.test_experts import targets_of
from tests.models.tiny import tiny

OF_TWO = (
    "LoRA of rank 2, alpha 16, on 14 weights (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)"
)


def told(model: Any) -> list[str]:
    return explain(model).further[-1].notes


def test_rank_targets_and_trained_parameters() -> None:
    model = tiny("llama")
    converted = fewbits.convert(model, "qlora_nf4")
    adapted = fewbits.get_peft_model(model, r=2)
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert (
        told(adapted)
        == told(model)
        == [
            f"adapter 'default': {OF_TWO}, {count:,} parameters, all trained",
            f"{count:,} parameters of the model trained in all",
        ]
    )
    assert str(explain(adapted)).startswith(str(converted))
    with adapted.disable_adapter():
        assert told(adapted)[0].endswith("none trained, switched off")


def test_several_adapters_and_whole_copies() -> None:
    model = fewbits.get_peft_model(tiny("llama"), r=2, bias="all", use_dora=True)
    fewbits.get_peft_model(
        model,
        r=4,
        adapter_name="two",
        target_modules=["q_proj"],
        rank_pattern={"layers.0.self_attn.q_proj": 3},
        modules_to_save=["lm_head"],
    )
    first, second, _ = told(torch.compile(model))
    magnitudes = sum(p.numel() for name, p in model.named_parameters() if ".default" in name)
    assert f"{OF_TWO}, {magnitudes:,} parameters" in first
    assert "'two': LoRA of ranks 3 to 4, alpha 16, on 2 weights (q_proj), whole copies of lm_head" in second
    assert second.endswith("none trained, not active")
    model.set_adapter("two")
    assert told(model)[0].endswith("not active") and told(model)[1].endswith("all trained")
    model.set_adapter("default")
    model.merge_adapter()
    assert told(model)[0].endswith("merged into the weights")


def test_weights_of_experts_are_named() -> None:
    model = mixture("mixtral")
    fewbits.convert(model, "qlora_nf4")
    adapted = fewbits.get_peft_model(model, r=4, lora_dropout=0.0, target_modules=targets_of("mixtral"))
    places = "8 weights (q_proj, v_proj, experts.down_proj, experts.gate_up_proj)"
    assert f"LoRA of ranks 4 to 8, on {places}" in told(adapted)[0]


def test_adapters_of_another_kind() -> None:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(tiny("llama"), config)
    assert told(model)[0] == "adapter 'default': IA3, on 2 weights (k_proj), 64 parameters, all trained"
    assert not explain(tiny("llama")).further
