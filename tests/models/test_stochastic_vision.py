"""Vision transformers in streams: linears and attention, as the definition counts them; and out again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from fewbits import convert, restore, sc_matmul
from fewbits.errors import Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.models.stochastic.attention import attentions_of, stochastic_attention_of
from fewbits.models.stochastic.switch import Switched
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from tests.models.tiny import tokens
from tests.models.unwritten import unwritten

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
CONFIG = StochasticConfig(
    options=dataclasses.replace(STOCHASTIC, stoc_len=64, chunk_d=16),
    linears=(("*.1.*", LinearSetting(runs="int8")),),
    attention=(("*.0.*", AttentionSetting(scores=32, values=64)), ("*", AttentionSetting(scores=64))),
)


def vision(kind):
    torch.manual_seed(0)
    if kind == "vit":
        return ViTForImageClassification(ViTConfig(**SIZES, intermediate_size=64)).eval()
    if kind == "siglip":
        return SiglipVisionModel(SiglipVisionConfig(**SIZES, intermediate_size=64)).eval()
    return Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=2)).eval()


@torch.no_grad()
def answers(model):
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(pixel_values=images)[0]


@pytest.mark.parametrize("kind", ["vit", "siglip", "dinov2"])
def test_in_and_out(kind):
    model = vision(kind)
    before = answers(model)
    receipt = convert(model, CONFIG, keep_original=True)
    notes = " ".join(receipt.notes)
    assert "QK^T stochastic, 32 cycles, PV stochastic, 64 cycles" in notes and "PV exact" in notes
    seen = []
    stochastic_attention_of(model).listeners.append(lambda name, *_: seen.append(name))
    ours = answers(model)
    assert len(seen) == 2 and 0 < (ours - before).norm() < before.norm()
    restore(model)
    assert torch.equal(answers(model), before)


def test_attention_is_what_the_definition_counts():
    model = vision("vit")
    attention = AttentionSetting(scores=32, values=64)
    config = dataclasses.replace(
        CONFIG, linears=(("*", LinearSetting(runs="exact")),), attention=(("*", attention),)
    )
    convert(model, config)
    module = next(iter(attentions_of(model).values()))
    inside = {}
    module.register_forward_hook(lambda _, args, out: inside.update(x=args[0], y=out[0]))
    answers(model)
    q, k, v = (getattr(module, p)(inside["x"]).view(2, 17, 4, 8).transpose(1, 2).reshape(8, 17, 8)
               for p in ("q_proj", "k_proj", "v_proj"))  # fmt: skip
    words = {"halve_bipolar_stoc_len": True, "n_masks": 64}
    scores = torch.stack([sc_matmul(a, b, stoc_len=32, **words) for a, b in zip(q, k, strict=True)])
    weights = (scores * 8**-0.5).softmax(-1)
    # 17 tokens in chunks of 16: counted chunk by chunk.
    out = torch.stack(
        [sc_matmul(a, b.mT, stoc_len=64, chunk_d=16, **words) for a, b in zip(weights, v, strict=True)]
    )
    y = module.o_proj(out.view(2, 4, 17, 8).transpose(1, 2).reshape(2, 17, 32))
    torch.testing.assert_close(y, inside["y"], rtol=1e-5, atol=1e-6)


def test_one_configuration_after_another():
    model = vision("vit")
    before = answers(model)
    other = dataclasses.replace(CONFIG, attention=(("*", AttentionSetting(values=16)),))
    with Switched(model, CONFIG) as switched:
        switched.to(other)
        ours = answers(model)
    assert torch.equal(answers(model), before)
    convert(model, other, fuse_norms=False)
    assert torch.equal(answers(model), ours)


@torch.no_grad()
def test_a_decoder_without_a_spec_keeps_its_attention():
    model = unwritten("gpt2")  # its linears are transformers' Conv1D
    before = model(input_ids=tokens()).logits
    with pytest.raises(Unsupported, match="leave attention out"):
        convert(model, CONFIG)
    receipt = convert(model, dataclasses.replace(CONFIG, attention=()))
    assert "attention: both products exact" in receipt.notes
    ours = model(input_ids=tokens()).logits
    assert 0 < (ours - before).norm() < before.norm()
    restore(model)
    with Switched(model, dataclasses.replace(CONFIG, attention=(), linears=())) as switched:
        assert switched.to(dataclasses.replace(CONFIG, attention=()))
        assert 0 < (model(input_ids=tokens()).logits - before).norm() < before.norm()
