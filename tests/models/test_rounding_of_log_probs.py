"""How far 16 bits move what preference losses are made of: no further in fused layers than in plain ones.

DPO's loss is a function of sums of log-probabilities over whole answers, policy less reference; each sum adds
up the roundings of all its tokens. Fused layers round elsewhere than transformers' do under autocast, so two
runs in 16 bits differ by about what each differs from exact arithmetic; neither may be the worse one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fuse, fused_layers
from tests.models.tiny import tokens

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 16, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512}


def with_branches(model: Any) -> Any:
    """The same adapters everywhere, none of which is nothing."""
    generator = torch.Generator().manual_seed(3)
    named = {name.split("layers.")[1]: p for name, p in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, parameter in sorted(named.items()):
            spread = 0.01 if "lora_B" in name else parameter.shape[1] ** -0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return model.train()


def plain(base: Any, dtype: torch.dtype) -> Any:
    config = LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS)
    inner = copy.deepcopy(base).to(dtype)
    return with_branches(get_peft_model(inner, config, autocast_adapter_dtype=dtype == torch.bfloat16))


def fused(base: Any) -> Any:
    inner = copy.deepcopy(base)
    fuse(inner)
    model = FastLanguageModel.get_peft_model(
        inner, r=16, lora_alpha=16, target_modules=TARGETS, use_gradient_checkpointing=False
    )
    assert len(fused_layers(model)) == SHAPE["num_hidden_layers"]
    return with_branches(model)


def margins(model: Any, *, autocast: bool) -> Tensor:
    """Of 16 rows of 192 tokens: the sum of log-probabilities with the adapters less that without."""
    found = []
    for seed in range(4):
        ids, sums = tokens(4, 192, seed=seed), []
        for adapters in (True, False):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if adapters:
                    logits = model(input_ids=ids).logits
                else:
                    with model.disable_adapter():
                        logits = model(input_ids=ids).logits
            log_probs = logits[:, :-1].double().log_softmax(-1)
            sums.append(log_probs.gather(-1, ids[:, 1:, None]).sum((1, 2)))
        found.append(sums[0] - sums[1])
    return torch.cat(found)


@pytest.mark.slow
def test_fused_layers_move_no_margin_further_than_autocast_does():
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=True, **SHAPE)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    exact = margins(plain(base, torch.float64), autocast=False)
    theirs = margins(plain(base, torch.bfloat16), autocast=True) - exact
    ours = margins(fused(base), autocast=False) - exact
    of_theirs, of_ours = (error.square().mean().sqrt() for error in (theirs, ours))
    assert exact.std() > 20 * of_theirs, "there is something to round"
    assert 0 < of_ours < 1.5 * of_theirs, (of_ours, of_theirs)  # each a mean of 16 rows: a third is chance
    apart = (ours - theirs).square().mean().sqrt()
    assert apart < 1.5 * (of_ours.square() + of_theirs.square()).sqrt(), "roundings explain the difference"
