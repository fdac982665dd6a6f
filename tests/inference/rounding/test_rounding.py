"""Grids, GPTQ and AWQ by themselves: what they must make smaller, and what their codes must decode to."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits.errors import NotFinite, Unsupported
from fewbits.families.catalog import SPECS
from fewbits.families.spec import MLP
from fewbits.formats import FORMATS
from fewbits.host.spec import spec_for
from fewbits.inference.rounding.activations import LayerMoments, first_inputs, moments_of, output_of
from fewbits.inference.rounding.awq import fold_scales, folds_of
from fewbits.inference.rounding.gptq import choose_by_gptq, choose_nearest, gptq, loss_of, nearest
from fewbits.inference.rounding.grids import Grids
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Rule
from tests.models.tiny import tiny

NAMES = ("int4_g32", "int3_g64_zp", "int2_zp", "int8", "mxfp4", "mxfp6_e2m3", "mxint8", "nvfp4", "nf4", "fp4")
FP8 = ("float8_e4m3", "float8_e4m3_row", "float8_e5m2_1x128", "float8_e4m3_128x128")
TWO_LEVELS = ("nvfp4_16x16", "nvfp4_4o6")
GGUF = tuple(sorted(name for name in FORMATS if name.startswith("gguf_")))


def problem(rows: int = 48, columns: int = 256) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of inputs that depend on one another."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(512, columns, generator=generator) @ (mix + 0.3 * torch.eye(columns))
    return torch.randn(rows, columns, generator=generator), x.t() @ x / 512


@pytest.mark.parametrize("name", (*NAMES, *FP8, *TWO_LEVELS, *GGUF))
def test_gptq_loses_less_than_rounding_to_nearest(name: str) -> None:
    weight, hessian = problem()
    format = FORMATS[name]
    plain = loss_of(weight, format.quantize(weight), hessian)
    searched = loss_of(weight, nearest(weight, format, hessian), hessian)
    chosen = loss_of(weight, gptq(weight, format, hessian), hessian)
    # Where steps grow with the value (and for eight bits) searching scales gains little; GPTQ always does.
    assert chosen < 0.85 * min(plain, searched)
    assert searched < 1.1 * plain


@pytest.mark.parametrize("name", (*NAMES, *FP8, *TWO_LEVELS, *GGUF))
def test_codes_decode_to_the_values_that_were_chosen(name: str) -> None:
    weight, _ = problem()
    grids = Grids(FORMATS[name], weight)
    choice = choose_nearest(weight, grids, None, search=False)
    pairs = zip(choice.grids, weight.split(grids.size, dim=1), strict=True)
    values = torch.cat([grid.round(block)[1] for grid, block in pairs], 1)
    packed = grids.finish(choice, torch.float32)
    torch.testing.assert_close(packed.dequantize(), values, rtol=1e-6, atol=1e-6)
    theirs = FORMATS[name].quantize(weight).dequantize()
    if name != "nvfp4_4o6":  # which chooses between two scales: the plain grid is one of them
        assert (values - theirs).abs().gt(1e-6).float().mean() < 0.01  # the plain grid is the format's own


@pytest.mark.parametrize("name", GGUF)
def test_blocks_of_zeros_and_of_one_sign_decode_to_what_was_chosen(name: str) -> None:
    """Scales of zero, minima without a scale, and a super-block with a sub-block of zeros in it."""
    weight, hessian = problem(6, 512)
    weight[0] = 0
    weight[1, 256:272] = 0
    weight[2] = weight[2].abs() + 3
    weight[3] = -weight[3].abs() - 3
    weight[4, :256] = 0.25
    grids = Grids(FORMATS[name], weight)
    for choice in (choose_nearest(weight, grids, hessian), choose_by_gptq(weight, grids, hessian)):
        packed = grids.finish(choice, torch.float32)
        blocks = zip(choice.grids, choice.codes.split(grids.size, dim=1), strict=True)
        values = [(g.values[codes.int()] - g.zero) * g.scale for g, codes in blocks]
        torch.testing.assert_close(packed.dequantize(), torch.cat(values, 1), rtol=1e-5, atol=1e-5)
        assert bool((packed.dequantize()[0] == 0).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_symmetric_codes_use_the_lowest_one_too(bits: int) -> None:
    """Scales of either sign; the packed layer multiplies by what was chosen."""
    weight, hessian = problem()
    format = FORMATS[f"int{bits}_g64"]
    packed = nearest(weight, format, hessian)
    codes = packed.format.from_bytes(packed.codes, tuple(weight.shape))  # type: ignore[attr-defined]
    assert int(codes.min()) == -(2 ** (bits - 1)) and bool((packed.scales < 0).any())
    plain = loss_of(weight, format.quantize(weight), hessian)
    assert loss_of(weight, packed, hessian) < (0.97, 0.85, 0.75)[4 - bits] * plain
    linear = torch.nn.Linear(256, 48, bias=False, device="meta", dtype=torch.float32)
    layer = QuantizedLinear.from_linear(linear, Rule(weight=format))
    layer.load_packed(packed)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    torch.testing.assert_close(layer(x), x @ packed.dequantize().t(), rtol=1e-4, atol=1e-4)


def test_inputs_that_are_always_zero_cost_nothing() -> None:
    weight, hessian = problem()
    hessian[5], hessian[:, 5] = 0, 0
    packed = gptq(weight, FORMATS["int4_g32"], hessian)
    assert bool(packed.dequantize().isfinite().all()) and loss_of(weight, packed, hessian) < 0.01


def test_what_cannot_be_rounded_is_refused() -> None:
    weight, hessian = problem()
    for name in ("int8_tensor", "nf4_dq"):
        with pytest.raises(Unsupported, match="not rounded by calibration"):
            gptq(weight, FORMATS[name], hessian)
    with pytest.raises(
        Unsupported, match=r"rows of 96 do not fill; choose a smaller block.*'block': \[1, 32\]"
    ):
        gptq(weight[:, :96], FORMATS["int4_g64"], hessian[:96, :96])
    with pytest.raises(Unsupported, match="rows of 96 do not fill; choose another format"):
        gptq(weight[:, :96], FORMATS["gguf_q4_k"], hessian[:96, :96])
    weight[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="nothing is rounded"):
        gptq(weight, FORMATS["int4_g32"], hessian)


def test_folding_scales_changes_no_output_and_loses_less() -> None:
    model = tiny("llama", hidden_size=64, intermediate_size=128)
    layer = model.model.layers[0]
    before = copy.deepcopy(layer)
    names = [n for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)]
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 30  # a few inputs are much larger than the others, as in real models
    inputs = {n: x[:, : layer.get_submodule(n).in_features] for n in names}
    hessians = {n: v.t() @ v / 400 for n, v in inputs.items()}
    format = FORMATS["int3_g32"]
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    angles = model.model.rotary_emb(hidden, torch.arange(9)[None])
    words = {"position_embeddings": angles, "attention_mask": None}
    magnitudes = {n: v.abs().mean(0) for n, v in inputs.items()}
    moved, folded = fold_scales(
        layer,
        LayerMoments(second=hessians, cross={}, magnitude=magnitudes, largest=magnitudes),
        dict.fromkeys(names, format),
        lambda: layer(hidden, **words),
        folds_of(spec_for(model)),
    )
    assert folded == ("input_layernorm", "post_attention_layernorm", "mlp.up_proj")
    outputs = [m(hidden, **words) for m in (layer, before)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        weight, plain = layer.get_submodule(name).weight, before.get_submodule(name).weight
        with_scales = loss_of(weight, nearest(weight, format, search=False), moved.second[name])
        without = loss_of(plain, nearest(plain, format, search=False), hessians[name])
        assert with_scales < 0.8 * without


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["arcee", "apertus", "nemotron", "bitnet", "gemma", "granite"])
def test_a_scale_is_folded_only_where_the_layer_stays_what_it_was(family: str, dtype: torch.dtype) -> None:
    """Arcee and Nemotron square, Apertus bends, BitNet normalises what stands between up and down."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    ids, layer = torch.randint(3, 90, (2, 24)), model.model.layers[0]
    names = [n for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        before = model(ids).logits
        hidden, words = first_inputs(model, ["model.layers.0"], ids, torch.device("cpu"))
        of_layer = words["model.layers.0"]
        moments = moments_of(layer, names, hidden, of_layer)
        formats = dict.fromkeys(names, FORMATS["int4_g32"])
        _, folded = fold_scales(
            layer,
            moments,
            formats,
            lambda: output_of(layer, hidden[0], of_layer),
            folds_of(spec_for(model)),
        )
        after = model(ids).logits
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    assert (after - before).float().norm() <= tolerance * before.float().norm()
    assert ("mlp.up_proj" in folded) == (family in ("granite", "gemma"))
    # Gemma's and Nemotron's norms multiply by 1 + weight, Apertus calls its own otherwise.
    assert ("input_layernorm" in folded) == (family in ("arcee", "bitnet", "granite"))


def test_folds_are_those_of_the_families_own_paths() -> None:
    plain = MLP(inputs=("mlp.c_fc",), output="mlp.c_proj", is_gated=False)
    ungated = replace(SPECS["llama"], mlp=plain)
    gemma2, llama, bent = (
        {f.maker: f.readers for f in folds_of(spec)} for spec in (SPECS["gemma2"], SPECS["llama"], ungated)
    )
    assert "pre_feedforward_layernorm" in gemma2 and "post_attention_layernorm" not in gemma2
    assert llama["mlp.up_proj"] == ("mlp.down_proj",)
    assert bent["post_attention_layernorm"] == ("mlp.c_fc",)
    assert not any(maker.startswith("mlp.") for maker in bent)  # an activation stands between
