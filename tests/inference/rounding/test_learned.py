"""Codes that are trained, rounding that aims at the plain model's outputs, and the names of methods."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats import FORMATS
from fewbits.formats.base import Format
from fewbits.host.spec import spec_for
from fewbits.inference.rounding.activations import LayerMoments, first_inputs, moments_of, output_of
from fewbits.inference.rounding.awq import fold_scales, folds_of
from fewbits.inference.rounding.gptq import aimed_at_plain, choose_by_gptq, choose_nearest
from fewbits.inference.rounding.grids import Grids
from fewbits.inference.rounding.layer_rounding import Flow, round_layer
from fewbits.inference.rounding.learned import SoftWeight
from fewbits.inference.rounding.methods import read_method
from tests.models.tiny import tiny

NAMES = ("int4_g32", "int3_g32_zp", "int8", "mxfp4", "nvfp4", "nf4")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_weight_is_packed_as_it_was_trained(name: str) -> None:
    """What the loss saw and what the packed weight decodes to are the same values."""
    weight = random(24, 64)
    grids = Grids(FORMATS[name], weight)
    soft = SoftWeight(grids, choose_nearest(weight, grids, None))
    with torch.no_grad():
        soft.offset.copy_(0.6 * random(24, 64, seed=1))
        if soft.factor.requires_grad:
            soft.factor.copy_(0.1 * random(*soft.factor.shape, seed=2))
        if soft.shift.requires_grad:
            soft.shift.copy_(2.0 * random(*soft.shift.shape, seed=3))
    packed = grids.finish(soft.finished(), torch.float32)
    decoded = soft.decoded().detach()
    torch.testing.assert_close(packed.dequantize(torch.float32), decoded, rtol=1e-5, atol=1e-6)
    before = grids.finish(soft.choice, torch.float32).dequantize(torch.float32)
    assert (decoded != before).float().mean() > 0.05


def test_offsets_and_factors_have_the_gradients_of_their_definition() -> None:
    """Straight through the rounding up to half a step beyond the ends, the ends themselves farther out."""
    weight = torch.tensor([[0.9, -0.2, 3.4, -9.0] * 8], dtype=torch.float32)
    grids = Grids(FORMATS["int4_g32"], weight)
    choice = choose_nearest(weight, grids, None, search=False)
    soft = SoftWeight(grids, choice)
    scale = float(soft.scale[0, 0])
    with torch.no_grad():
        soft.offset[0, 2] = 20.0  # far beyond the largest code, 7
    by_offset, by_factor = torch.autograd.grad(soft.decoded().sum(), [soft.offset, soft.factor])
    outside = torch.zeros(32, dtype=torch.bool)
    outside[2] = True
    torch.testing.assert_close(by_offset[0], torch.where(outside, 0.0, scale))
    exact = (weight[0] + soft.offset[0] * scale).detach() / scale
    code = exact.clamp(-8, 7).round()
    want = torch.where(outside, code, code - exact).sum() * scale
    torch.testing.assert_close(by_factor[0, 0], want, rtol=1e-4, atol=1e-4)


def test_zero_points_have_the_gradient_of_the_values_that_are_cut() -> None:
    """Values inside do not move with it: it stands on both sides of the rounding. Those at an end do."""
    weight = random(1, 32)
    grids = Grids(FORMATS["int3_g32_zp"], weight)
    soft = SoftWeight(grids, choose_nearest(weight, grids, None, search=False))
    scale = float(soft.scale[0, 0])
    with torch.no_grad():
        soft.offset[0, :5] = 30.0  # far beyond the largest code
    (by_shift,) = torch.autograd.grad(soft.decoded().sum(), [soft.shift])
    torch.testing.assert_close(by_shift[0, 0], torch.tensor(-5 * scale, dtype=torch.float32))


def layer_of_a_model() -> tuple[torch.nn.Module, dict[str, Format], Flow]:
    model = tiny("llama", hidden_size=64, intermediate_size=128)
    ids = torch.randint(3, 90, (6, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, words = first_inputs(model, ["model.layers.0"], ids, torch.device("cpu"))
    layer = model.model.layers[0]
    names = [n for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)]
    disturbed = [h + 0.1 * h.std() * random(*h.shape, seed=n) for n, h in enumerate(hidden)]
    flow = Flow(hidden=disturbed, plain=hidden, words=words["model.layers.0"])
    return layer, dict.fromkeys(names, FORMATS["int3_g32_zp"]), flow


@torch.no_grad()
def loss(layer: torch.nn.Module, flow: Flow, weights: dict[str, Tensor]) -> float:
    rounded = copy.deepcopy(layer)
    for name, weight in weights.items():
        rounded.get_submodule(name).weight.copy_(weight)
    outputs = [output_of(rounded, x, flow.words) for x in flow.hidden]
    targets = [output_of(layer, x, flow.words) for x in flow.plain]
    return sum(float((a - b).square().sum()) for a, b in zip(outputs, targets, strict=True))


def test_training_and_aiming_bring_a_layer_nearer_to_the_plain_one() -> None:
    layer, formats, flow = layer_of_a_model()
    losses = {}
    for method in ("gptq", "gptaq", "gptq+learned:30"):
        rounded = round_layer(layer, formats, flow, read_method(method), ())
        losses[method] = loss(layer, flow, {n: p.dequantize() for n, p in rounded.packed.items()})
    assert losses["gptaq"] < losses["gptq"]
    assert losses["gptq+learned:30"] < 0.9 * losses["gptq"]


def test_training_that_helps_nothing_is_not_taken() -> None:
    """One step of a whole spacing for every value is harm; the codes from before come back."""
    layer, formats, flow = layer_of_a_model()
    one, plain = (round_layer(layer, formats, flow, read_method(m), ()) for m in ("gptq+learned:1", "gptq"))
    assert all(torch.equal(one.packed[n].codes, plain.packed[n].codes) for n in formats)


def test_the_aim_is_the_best_weight_for_the_rounded_models_inputs() -> None:
    weight, y = random(8, 32), random(400, 32, seed=1)
    x = y + 0.3 * random(400, 32, seed=2)
    aim = aimed_at_plain(weight, x.t() @ x, y.t() @ x, damping=0.0, part=1.0)
    exact = torch.linalg.lstsq(x.double(), y.double() @ weight.double().t()).solution.t().float()
    torch.testing.assert_close(aim, exact, rtol=1e-4, atol=1e-5)
    same = aimed_at_plain(weight, x.t() @ x, x.t() @ x)
    torch.testing.assert_close(same, weight)
    grids = Grids(FORMATS["int4_g32"], weight)
    codes = [choose_by_gptq(w, grids, x.t() @ x) for w in (weight, aim)]
    decoded = [grids.finish(c, torch.float32).dequantize() for c in codes]
    errors = [float((x @ d.t() - y @ weight.t()).norm()) for d in decoded]
    assert errors[1] < errors[0]


@torch.no_grad()
def test_moments_are_those_of_each_linears_own_inputs() -> None:
    """Also where several read one tensor, which is multiplied by itself once."""
    layer, formats, flow = layer_of_a_model()
    moments = moments_of(layer, list(formats), flow.hidden, flow.words, flow.plain)
    seen: dict[str, list[Tensor]] = {name: [] for name in formats}
    for name in formats:
        keep = lambda module, args, name=name: seen[name].append(args[0][0].clone())  # noqa: E731
        layer.get_submodule(name).register_forward_pre_hook(keep)
    for x in (*flow.hidden, *flow.plain):
        output_of(layer, x, flow.words)
    for name, inputs in seen.items():
        x, y = (torch.cat(part) for part in (inputs[:6], inputs[6:]))
        torch.testing.assert_close(moments.second[name], x.t() @ x / len(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moments.cross[name], y.t() @ x / len(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moments.magnitude[name], x.abs().mean(0))
        assert torch.equal(moments.largest[name], x.abs().amax(0))


@torch.no_grad()
def test_smoothing_gives_inputs_and_columns_one_range_and_changes_no_output() -> None:
    layer, formats, flow = layer_of_a_model()
    layer.input_layernorm.weight[5] *= 40  # type: ignore[index, operator]
    words, before = flow.words, output_of(layer, flow.plain[0], flow.words)
    model_of_folds = folds_of(spec_for(tiny("llama")))
    moments = moments_of(layer, list(formats), flow.plain, words)
    output = lambda: output_of(layer, flow.plain[0], words)  # noqa: E731
    _, folded = fold_scales(layer, moments, formats, output, model_of_folds, smooth=True)
    assert folded == ("input_layernorm", "post_attention_layernorm", "mlp.up_proj")
    torch.testing.assert_close(output(), before, rtol=1e-4, atol=1e-4)
    after: LayerMoments = moments_of(layer, list(formats), flow.plain, words)
    name = "self_attn.q_proj"
    readers = [f"self_attn.{of}_proj" for of in "qkv"]
    columns = torch.stack([layer.get_submodule(n).weight.abs().amax(0) for n in readers]).amax(0)  # type: ignore[operator]
    ratio = after.largest[name] / columns
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    spread = [m.largest[name].max() / m.largest[name].mean() for m in (moments, after)]
    assert spread[0] > 10 and spread[1] < 5


def test_names_of_methods() -> None:
    method = read_method("rotate+awq+learned")
    assert (method.rotate, method.awq, method.rounding, method.steps) == (True, True, "gptq", 200)
    assert read_method("awq").rounding == "nearest" and read_method("gptq+learned:7").steps == 7
    for name, message in (
        ("best", "no method 'best' of rounding; a method is one or more of rotate"),
        ("gptq+gptq", "names a step twice"),
        ("gptq+nearest", "names both gptq and nearest"),
        ("smooth+awq", "names both smooth and awq"),
        ("learned:no", "trains for 'no' steps"),
        ("learned:0", "trains for '0' steps"),
        ("learned:5+gptq", "no method 'learned:5'"),
    ):
        with pytest.raises(BadInput, match=message):
            read_method(name)
