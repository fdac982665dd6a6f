"""Specs name what the models really have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.families.catalog import SPECS
from fewbits.families.shapes import head_dim, window_of
from fewbits.families.spec import Attention
from fewbits.host.attention import attention_facts
from fewbits.host.expert_weights import weights_of
from fewbits.host.spec import find, layer_names, locate, spec_for
from fewbits.models.packing.experts import expert_modules
from tests.models.mixtures import MIXTURES, UNWRITTEN_MIXTURES, mixture
from tests.models.tiny import FAMILIES, tiny, tiny_config
from tests.models.unwritten import UNFUSED, UNWRITTEN, unwritten


def test_every_spec_has_a_tiny_model() -> None:
    assert set(SPECS) == {*FAMILIES, *UNFUSED, "gemma3", *MIXTURES} - {*UNWRITTEN, *UNWRITTEN_MIXTURES}


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_names_exactly_the_linears_and_norms_of_a_layer(family: str) -> None:
    with torch.device("meta"):
        model = tiny(family)
    spec = spec_for(model)
    assert spec is spec_for(model.config) is spec_for({"model_type": family})
    for layer in layer_names(model, spec):
        modules = dict(model.get_submodule(layer).named_modules())
        assert {n for n, m in modules.items() if isinstance(m, nn.Linear)} == set(spec.linears)
        assert {n for n, m in modules.items() if "RMSNorm" in type(m).__name__} == set(spec.norms)
    for path in (spec.final_norm, spec.embed, spec.head):
        assert find(model, path) is not None


@pytest.mark.parametrize("family", [name for name in UNFUSED if name not in UNWRITTEN])
def test_a_spec_names_what_is_special(family: str) -> None:
    """Its paths are there, and the fields of the config that it names are those that the modules took."""
    model = unwritten(family)
    spec, config = spec_for(model), model.config
    layers = (spec.attention.rotary_layers, spec.residual_multiplier, spec.norm.query_key_if)
    ends = (spec.embedding_multiplier, spec.logits_divisor, spec.logits_multiplier, spec.logits_soft_cap)
    assert all(hasattr(config, field) for field in (*layers, *ends) if field is not None)
    for number, layer in enumerate(layer_names(model, spec)):
        modules = dict(model.get_submodule(layer).named_modules())
        assert {n for n, m in modules.items() if isinstance(m, nn.Linear)} == set(spec.linears)
        kind = {"rms": "RMSNorm", "layer": "LayerNorm"}[spec.norm.kind]
        assert {n for n, m in modules.items() if type(m).__name__.endswith(kind)} == set(spec.norms)
        facts = attention_facts(modules[spec.attention.path], spec.attention)
        assert facts.scale == modules[spec.attention.path].scaling
        if spec.attention.rotary_layers is not None:
            turned = getattr(config, spec.attention.rotary_layers)[number]
            assert bool(turned) == bool(modules[spec.attention.path].use_rope)


@pytest.mark.parametrize("family", [name for name in MIXTURES if name not in UNWRITTEN_MIXTURES])
def test_a_spec_names_what_experts_there_are(family: str) -> None:
    model = mixture(family)
    spec, config = spec_for(model), model.config
    found = dict(expert_modules(model, spec))
    assert found and {name.rpartition(".layers.")[2].partition(".")[2] for name in found} == {
        spec.experts.path
    }
    for name, module in found.items():
        assert weights_of(module) == spec.experts.parameters
        experts, rows, hidden = getattr(module, spec.experts.parameters[0]).shape
        assert experts == getattr(config, spec.experts.count) and hidden == config.hidden_size
        assert rows == 2 * getattr(config, spec.experts.width)
        assert find(model, name.removesuffix(spec.experts.path) + spec.experts.router) is not None
    linears = {
        path
        for layer in layer_names(model, spec)
        for path, module in model.get_submodule(layer).named_modules()
        if isinstance(module, nn.Linear) and not path.endswith("expert_gate")
    }
    assert linears <= set(spec.linears) and set(spec.linears) - linears <= set(spec.some_layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_factor_of_scores_is_the_modules_own(family: str) -> None:
    with torch.device("meta"):
        model = tiny(family)
    for layer in model.model.layers:
        assert attention_facts(layer.self_attn, SPECS[family].attention).scale == layer.self_attn.scaling


def test_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Unsupported, match=r"no spec for model_type 'rwkv'; known: cohere, .*gemma2, .*qwen3"):
        spec_for({"model_type": "rwkv"})


def test_paths_of_a_model_without_a_head() -> None:
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(tiny_config("llama"))
    spec = spec_for(model)
    assert list(layer_names(model, spec)) == ["layers.0", "layers.1"]
    assert find(model, locate(model, spec, spec.final_norm)) is model.norm


def test_a_part_of_a_model_is_refused() -> None:
    part = nn.Linear(2, 2)
    with pytest.raises(SpecMismatch, match=r"expects decoder layers at 'model.layers' and Linear has none"):
        list(layer_names(part, SPECS["llama"]))


def test_sizes_of_heads_and_windows_are_read_in_one_place() -> None:
    plain = {"hidden_size": 64, "num_attention_heads": 4}
    assert head_dim(plain) == head_dim(SimpleNamespace(**plain)) == 16
    assert head_dim(plain | {"head_dim": 8}) == head_dim(SimpleNamespace(**plain, head_dim=8)) == 8
    layer, everywhere = SimpleNamespace(layer_idx=1, sliding_window=None), {"sliding_window": 32}
    assert window_of(Attention(), everywhere, layer) == 0  # the layer knows, and sees all
    assert window_of(Attention(window="config"), everywhere, layer) == 32
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    assert window_of(Attention(window="config"), everywhere | kinds, layer) == 0
