"""Every format as the weights of a model: loaded, run fused, adapted, trained towards, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fuse
from fewbits.formats import FORMATS
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import QuantizedLinear
from tests.models.loading import packed_state, same, save_tiny
from tests.models.tiny import tiny, tokens

# One of each class; the rest run every night.
SHOWN = ("int3_g64_zp", "int4_indexed", "mxfp6_e2m3", "nvfp4_4o6", "ternary_row", "gguf_q4_0")
NAMES = [n for n in FORMATS if not n.startswith("stochastic")]
each = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHOWN else [pytest.mark.nightly]) for n in NAMES]
)


@each
def test_a_recipe_may_name_it(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    recipe = {"name": "mine", "linear": {"weight": name}}
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", recipe=recipe)
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 14 and all(layer.format is FORMATS[name] for layer in layers)
    ids = tokens(rows=1, length=10)
    before = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "packed")
    words.save_pretrained(tmp_path / "packed")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "packed")
    assert same(packed_state(again), packed_state(model))
    assert torch.equal(again(input_ids=ids).logits, before)
    adapted = FastLanguageModel.get_peft_model(again, r=4, use_gradient_checkpointing=False)
    plain = adapted(input_ids=ids, labels=ids).loss
    fuse(adapted)
    fused = adapted(input_ids=ids, labels=ids).loss
    assert fused.item() == pytest.approx(plain.item(), rel=1e-5)
    fused.backward()
    gradients = [p.grad for n, p in adapted.named_parameters() if "lora_B" in n]
    assert len(gradients) == 14 and all(g is not None and bool(g.isfinite().all()) for g in gradients)


@each
def test_training_may_aim_at_it(name: str) -> None:
    """What the fake-quantised layer computes is what the packed one will."""
    model = tiny("llama")
    fewbits.convert(model, {"name": "mine_qat", "qat": {"weight": name}})
    layer = next(m for m in model.modules() if isinstance(m, FakeQuantizedLinear))
    x = torch.randn(3, layer.in_features)
    wanted = torch.nn.functional.linear(x, FORMATS[name].fake_quantize(layer.weight.detach()))
    assert torch.equal(layer(x), wanted)
    ids = tokens(rows=1, length=8)
    model(input_ids=ids, labels=ids).loss.backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.count_nonzero())
