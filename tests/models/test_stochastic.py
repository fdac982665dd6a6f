"""A stochastic configuration in a model: what runs how, taking it out, saving, and what does not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fewbits
from fewbits.errors import BadCheckpoint, BadInput, FewbitsError, SpecMismatch, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.models.stochastic.attention import stochastic_attention_of
from fewbits.models.stochastic.in_model import (
    FILE,
    adopt_saved,
    attention_products_of,
    facts_of,
    saved_config,
    stochastic_config_of,
)
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.nn.stochastic.qat import StochasticQATLinear
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig, write_config
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=32, stoc_len=48)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SCALES = tuple(0.5 + i / 64 for i in range(64))
SETTING = LinearSetting(lengths=((96, 64), (32, 16)), thresholds=(6.0,), smooth_scales=SCALES, protected=(3,))
CONFIG = StochasticConfig(
    options=OPTIONS,
    linears=(
        (
            Q,
            LinearSetting(
                lengths=((96, 64), (32, 16)), thresholds=(6.0,), smooth_scales=SCALES, protected=(3,)
            ),
        ),
        ("model.layers.1.self_attn.*", LinearSetting(runs="int8")),
        ("*.o_proj", LinearSetting(runs="exact")),
    ),
    attention=(("model.layers.0.*", AttentionSetting(scores=64, values=32)),),
    model={"model_type": "llama", "hidden_size": 64},
)


def test_each_layer_runs_as_its_setting_says():
    model = tiny("llama")
    original = model.get_submodule(Q).weight.detach().clone()
    receipt = apply_stochastic(model, CONFIG)
    layer = model.get_submodule(Q)
    assert isinstance(layer, StochasticLinear) and layer.levels == (16, 32, 64, 96)
    x = torch.randn(20, 64) * 2
    left = x.index_fill(1, torch.tensor([3]), 0.0)
    group = ((left / torch.tensor(SCALES)).abs().amax(-1) < 6.0).long()
    expected = fewbits.sc_matmul(
        left,
        original.index_fill(1, torch.tensor([3]), 0.0),
        stoc_len=torch.tensor([[96, 64], [32, 16]])[group],
        smooth_scales=torch.tensor(SCALES),
        chunk_d=32,
        n_masks=64,
        halve_bipolar_stoc_len=True,
    )
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected + x[:, 3:4] @ original[:, 3:4].T)
        model(tokens())
    assert 0 < group.sum() < 20
    assert model.get_submodule("model.layers.1.self_attn.q_proj").int8
    assert type(model.get_submodule("model.layers.0.self_attn.o_proj")) is torch.nn.Linear
    assert model.get_submodule(DOWN).levels == (48,)
    assert stochastic_attention_of(model).wanted == {"model.layers.0.self_attn"}
    assert (
        "attention x1: QK^T stochastic, 64 cycles, PV stochastic, 32 cycles, softmax as it was"
        in receipt.notes
    )
    assert str(fewbits.explain(model)) == str(receipt)


def test_taking_it_out_gives_the_model_back():
    model = tiny("llama")
    with torch.no_grad():
        before = model(tokens()).logits
        apply_stochastic(model, CONFIG, keep_original=True)
        during = model(tokens()).logits
        receipt = fewbits.restore(model)
        after = model(tokens()).logits
    assert not torch.equal(before, during)
    assert torch.equal(before, after)
    assert stochastic_config_of(model) is None and "save_pretrained" not in vars(model)
    assert any("again" in note for note in receipt.notes)


def test_training_keeps_the_weights_and_their_gradients():
    model = tiny("llama")
    config = StochasticConfig(
        options=OPTIONS, linears=((Q, LinearSetting(lengths=((16,),), smooth_scales=SCALES)),)
    )
    apply_stochastic(model, config, train=True)
    layer = model.get_submodule(Q)
    assert isinstance(layer, StochasticQATLinear) and layer.weight_format.streams.length == 16
    assert layer.smooth_scales is not None
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    assert layer.weight.grad.any()
    with pytest.raises(Unsupported, match="training has one stream length"):
        apply_stochastic(tiny("llama"), CONFIG, train=True)


def test_saved_with_the_model_and_found_again(tmp_path):
    model = tiny("llama")
    apply_stochastic(model, CONFIG)
    with torch.no_grad():
        expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "sc")
    loaded, _ = _load(tmp_path / "sc")
    assert stochastic_config_of(loaded) == CONFIG
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, expected)


def _load(folder):
    from transformers import AutoModelForCausalLM

    from fewbits.models.loading.hf_quantizer import register

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval(), folder


def _change(**settings):
    return dataclasses.replace(CONFIG, **settings)


BAD = {
    "another family": (
        _change(model={"model_type": "qwen2"}),
        SpecMismatch,
        "model_type 'qwen2' and this one",
    ),
    "another width": (_change(model={"hidden_size": 32}), SpecMismatch, "hidden_size 32 and this one has 64"),
    "no such linear": (
        _change(linears=(("model.layers.7.*", LinearSetting()),)),
        SpecMismatch,
        r"'model.layers.7.\*' matches nothing in this model; its first is model",
    ),
    "no such attention": (
        _change(attention=(("*.attn", AttentionSetting(scores=4)),)),
        SpecMismatch,
        r"attention: '\*.attn' matches nothing",
    ),
    "chunks": (
        _change(linears=(("*", LinearSetting(lengths=((16, 16, 16),))),)),
        SpecMismatch,
        "lengths for 3 chunks, and 64 inputs in chunks of 32 make 2",
    ),
    "too long": (
        _change(linears=(("*", LinearSetting(lengths=((300,),))),)),
        BadInput,
        "a stream length of 300 is out of range; choose from 0 to 256",
    ),
    "attention too long": (
        _change(attention=(("*", AttentionSetting(values=300)),)),
        BadInput,
        "self_attn: a stream length of 300",
    ),
    "smoothing": (
        _change(linears=((Q, LinearSetting(smooth_scales=(1.0, 2.0))),)),
        SpecMismatch,
        "2 smooth_scales for 64 inputs",
    ),
    "smoothing by zero": (
        _change(linears=((Q, LinearSetting(smooth_scales=(0.0,) * 64)),)),
        BadInput,
        "above zero",
    ),
    "protected": (
        _change(linears=((Q, LinearSetting(protected=(64,))),)),
        SpecMismatch,
        "protected names channel 64 of 64",
    ),
    "protected twice": (
        _change(linears=((Q, LinearSetting(protected=(1, 1))),)),
        SpecMismatch,
        "protected names a channel twice",
    ),
    "groups of inputs": (
        _change(options=dataclasses.replace(OPTIONS, or_group=24)),
        BadInput,
        "q_proj: or_group=24 does not divide the 32 inputs of a chunk; choose a divisor",
    ),
    "longer than planned": (
        _change(options=dataclasses.replace(OPTIONS, planned_len=48)),
        BadInput,
        "a stream length of 96 is out of range; choose from 0 to 48",
    ),
    "weights that are not seen": (
        _change(options=dataclasses.replace(OPTIONS, signs="twos_complement"), linears=()),
        Unsupported,
        'attention values with signs "twos_complement": the weight of a token that is not seen',
    ),
    "protected zeros that count": (
        _change(options=dataclasses.replace(OPTIONS, signs="twos_complement"), attention=()),
        Unsupported,
        'q_proj: protected channels are zeros, which count with signs="twos_complement"',
    ),
    "groups of channels of a head": (
        _change(
            options=dataclasses.replace(OPTIONS, or_group=32), attention=(("*", AttentionSetting(scores=32)),)
        ),
        BadInput,
        r"layers\.0\.self_attn: or_group=32 does not divide the 16 inputs of a chunk",
    ),
    "groups of tokens": (
        _change(options=dataclasses.replace(OPTIONS, or_group=4)),
        Unsupported,
        "attention values with or_group=4: their inner dimensions are the tokens",
    ),
    "no prepared form": (_change(options=Stochastic(mode="unipolar"), linears=()), FewbitsError, "prepared"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_anything_changes(case):
    config, kind, sentence = BAD[case]
    model = tiny("llama")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(kind, match=sentence):
        apply_stochastic(model, config)
    assert [type(m) for m in model.modules()] == classes


def test_a_converted_model_is_refused():
    model = tiny("llama")
    apply_stochastic(model, CONFIG)
    with pytest.raises(Unsupported, match="converted already"):
        apply_stochastic(model, CONFIG)


@pytest.mark.parametrize("fields", [{"gate": "and"}, {"sequence": "weyl"}, {"n_masks": 2}], ids=str)
def test_a_saved_configuration_with_another_arithmetic_is_refused(fields, tmp_path):
    """The linears would have counted in one arithmetic, and attention in the other."""
    model = tiny("llama")
    apply_stochastic(model, CONFIG)
    model.save_pretrained(tmp_path)
    options = dataclasses.replace(CONFIG.options, **fields)
    write_config(dataclasses.replace(CONFIG, options=options), tmp_path / FILE)
    with pytest.raises(BadCheckpoint, match="were made with other settings"):
        _load(tmp_path)


def test_a_configuration_of_other_weights_is_refused(tmp_path):
    model = tiny("llama")
    apply_stochastic(model, dataclasses.replace(CONFIG, attention=()))
    other = (Q, dataclasses.replace(CONFIG.linear(Q), smooth_scales=SCALES[::-1]))
    write_config(dataclasses.replace(CONFIG, linears=(other, *CONFIG.linears[1:])), tmp_path / FILE)
    with pytest.raises(BadCheckpoint, match=f"prepared weight of {Q} were made with other settings"):
        adopt_saved(model, tmp_path)
    assert adopt_saved(model, tmp_path / "nowhere") == [] and saved_config(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"gate": "and", "flip_rate": 0.01},
        {"or_group": 4, "gate": "and"},
        {"sequence": "unary", "planned_len": 64},
    ],
)
def test_a_model_runs_in_every_arithmetic_and_is_saved_with_it(fields, tmp_path):
    options = dataclasses.replace(STOCHASTIC, chunk_d=32, stoc_len=32, **fields)
    config = StochasticConfig(options=options, attention=(("*", AttentionSetting(scores=32)),))
    model, ids = tiny("llama"), tokens()
    plain = model(ids).logits
    apply_stochastic(model, config)
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(model(ids).logits, logits) and not torch.equal(logits, plain)
    model.save_pretrained(tmp_path)
    again, _ = _load(tmp_path)
    assert stochastic_config_of(again).options == options
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)


def test_facts_and_products():
    model = tiny("llama")
    assert facts_of(model)["num_hidden_layers"] == 2
    products = attention_products_of(model, CONFIG)
    assert products["model.layers.0.self_attn"].values.streams.length == 32


def test_whole_numbers_of_few_bits_and_lengths_by_call(tmp_path):
    """In the linears and in attention, after a checkpoint too."""
    config = StochasticConfig(
        options=OPTIONS,
        linears=(
            ("*.0.mlp.up_proj", LinearSetting(runs="int8", bits=4)),
            (Q, LinearSetting(lengths=((96,), (32,)), thresholds=(0.5,), classify="call")),
        ),
        attention=(
            ("*.layers.0.*", AttentionSetting(scores=(64, 16), scores_thresholds=(0.3,), values_bits=6)),
            ("*.layers.1.*", AttentionSetting(scores=64)),
        ),
    )
    model, ids = tiny("llama"), tokens(2, 9)
    receipt = apply_stochastic(model, config)
    assert (
        "attention x1: QK^T stochastic, 64/16 cycles, PV whole numbers of 6 bits, softmax as it was"
        in receipt.notes
    )
    up = model.get_submodule("model.layers.0.mlp.up_proj")
    assert up.int8 and up.packed.codes.abs().max() == 7 and model.get_submodule(Q).by_call
    with torch.no_grad():
        before = model(ids).logits
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert stochastic_config_of(again) == config
        assert torch.equal(again(ids).logits, before)
