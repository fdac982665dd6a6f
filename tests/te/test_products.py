"""The three products of a linear, forward and backward, from operands quantised by the second definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fewbits.te as te
from fewbits.errors import BadInput
from fewbits.formats.base import Packed
from fewbits.formats.bits import unpack_bits
from fewbits.kernels.codec.float8_operands import through_ref
from fewbits.kernels.codec.float8_operands_cuda import SmoothActivation
from fewbits.kernels.codec.small_blocks import e2m1_values
from fewbits.te.layers import layernorm_mlp
from fewbits.te.layers.activations import SMOOTH
from fewbits.te.products.product import ProductSettings, activated_pair, linear, product
from fewbits.te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.te import reference

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(fp8_format=Format.HYBRID),
}


def decode(codes: np.ndarray, kind: str) -> np.ndarray:
    return np.array(reference.magnitudes(kind))[codes & 127] * np.where(codes & 128, -1.0, 1.0)


def rounded(x: torch.Tensor, recipe: str, role: str) -> np.ndarray:
    """What a matrix becomes as an operand whose last axis is summed over."""
    kind = "e5m2" if role == "gradient" and recipe != "blocks" else "e4m3"
    real = x.detach().float().numpy()
    if recipe == "delayed":  # in the first step all scales are 1
        return decode(reference.float8(np.clip(real, -reference.LARGEST[kind], None), kind), kind)
    if recipe == "current":
        codes, scale = reference.per_tensor(real, kind)
        return decode(codes, kind) * float(scale)
    if recipe == "blocks":
        rows = 128 if role == "weight" else 1
        codes, scales = reference.by_block(real, kind, rows, 128, True)
        spread = np.repeat(np.repeat(scales, 128, 1), rows, 0)[: real.shape[0], : real.shape[1]]
        return decode(codes, kind) * spread
    codes, exponents = reference.microscaled(real, kind)
    return decode(codes, kind) * np.exp2(np.repeat(exponents, 32, 1)[:, : real.shape[1]] - 127.0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [(1, 3, 2), (33, 70, 141)])
def test_linear_and_its_gradients(recipe: str, sizes: tuple[int, int, int]) -> None:
    M, K, N = sizes
    layer = te.Linear(K, N, device="cpu")
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(M, K, requires_grad=True)
    dy = torch.randn(M, N) * 3e-3
    with te.autocast(recipe=RECIPES[recipe]):
        y = layer(x)
    y.backward(dy)
    a, w = rounded(x, recipe, "input"), rounded(layer.weight, recipe, "weight")
    expected = a @ w.T + layer.bias.detach().double().numpy()
    a_t, w_t = rounded(x.t(), recipe, "input").T, rounded(layer.weight.t(), recipe, "weight").T
    g, g_t = rounded(dy, recipe, "gradient"), rounded(dy.t(), recipe, "gradient").T
    for ours, theirs in ((y, expected), (x.grad, g @ w_t), (layer.weight.grad, g_t.T @ a_t)):
        # float32 sums of at most 141 exact products
        np.testing.assert_allclose(
            ours.detach().double().numpy(), theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max()
        )
    torch.testing.assert_close(layer.bias.grad, dy.sum(0))


def test_without_autocast_a_linear_is_torchs() -> None:
    layer = te.Linear(20, 12, device="cpu")
    x = torch.randn(3, 5, 20)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with te.autocast(recipe=Float8CurrentScaling()), te.autocast(enabled=False):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]
)
def test_backward_override(recipe: type, override: str) -> None:
    layer = te.Linear(64, 48, device="cpu", bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    chosen = recipe(backward_override=override)
    with te.autocast(recipe=chosen):
        y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    a, w = x.detach(), layer.weight.detach()
    if override == "dequantized":
        forward, _ = layer.prepare(te.active.numerics.Numerics(enabled=True, recipe=chosen), x.device)
        a, w = (
            q.operand(t, rows=True, columns=False).rows.dequantize()
            for q, t in zip(forward, (a, w), strict=False)
        )
    torch.testing.assert_close(x.grad, dy @ w)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ a)


def test_dequantized_keeps_codes() -> None:
    """A byte a value where it kept the 16 bits that codes stand for."""
    layer, x = te.Linear(64, 48, device="cpu", bias=False), torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling(backward_override="dequantized")):
        y = layer(x)
    kept = {tuple(t.shape): t.dtype for t in y.grad_fn.saved_tensors if t.numel() > 1}
    assert kept == {(32, 64): torch.float8_e4m3fn, (48, 64): torch.float8_e4m3fn}


def test_nvfp4_rotates_both_operands_of_the_weights_gradient() -> None:
    torch.manual_seed(3)
    x, dy = torch.randn(64, 32), torch.randn(64, 48)
    recipes = NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True)
    exact = dy.t() @ x
    for recipe in recipes:
        layer = te.Linear(32, 48, device="cpu", bias=False)
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
        # four bits each: a relative error of about 0.1 a factor, which a missing rotation would make 1.4
        assert (layer.weight.grad - exact).norm() < 0.25 * exact.norm()


def test_custom_recipe_chooses_by_role() -> None:
    seen = []

    def choose(role: te.QuantizerRole | None) -> te.Quantizer | None:
        if role is None:  # who takes the output is not known
            return None
        seen.append((role.module_type, role.tensor_type, role.name))
        if role.tensor_type == "weight":
            return te.HybridQuantizer(
                rowwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3),
                columnwise_quantizer=te.IdentityQuantizer(),
            )
        return None if role.tensor_type == "grad_output" else te.IdentityQuantizer()

    layer = te.Linear(32, 16, device="cpu", name="proj")
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=CustomRecipe(qfactory=choose)):
        y = layer(x)
    y.sum().backward()
    w = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(layer.weight).dequantize()
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, layer.bias))
    torch.testing.assert_close(x.grad, torch.ones(8, 16) @ layer.weight)
    assert ("linear", "weight", "proj") in seen and ("linear", "grad_output", "proj") in seen
    with (
        pytest.raises(BadInput, match="returned int"),
        te.autocast(recipe=CustomRecipe(qfactory=lambda role: 3)),
    ):
        layer(x)


def test_weights_are_quantised_once_for_several_microbatches() -> None:
    layer = te.Linear(16, 16, device="cpu", bias=False)
    x = torch.randn(4, 16)
    with te.autocast(recipe=Float8CurrentScaling()):
        first = layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.zero_()
        assert torch.equal(layer(x, is_first_microbatch=False), first)
        assert layer(x).abs().max() == 0


def test_main_grad_and_delayed_weight_gradients() -> None:
    x = torch.randn(6, 8)
    plain = te.Linear(8, 4, device="cpu")
    plain(x).square().sum().backward()
    fused = te.Linear(8, 4, device="cpu", fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    fused.weight.main_grad = torch.ones(4, 8)
    fused(x).square().sum().backward()
    assert fused.weight.grad is None
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad + 1)
    late = te.Linear(8, 4, device="cpu", delay_wgrad_compute=True)
    late.load_state_dict(plain.state_dict())
    late(x).square().sum().backward()
    assert late.weight.grad is None and late.bias.grad is None
    late.backward_dw()
    torch.testing.assert_close(late.weight.grad, plain.weight.grad)
    torch.testing.assert_close(late.bias.grad, plain.bias.grad)
    with pytest.raises(BadInput, match="nothing to compute"):
        late.backward_dw()


def test_types_must_agree_outside_of_torch_autocast() -> None:
    layer = te.Linear(8, 4, device="cpu")
    with pytest.raises(BadInput, match="params_dtype"):
        layer(torch.randn(2, 8).bfloat16())
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=Float8CurrentScaling()):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16


def test_empty_inputs() -> None:
    layer = te.Linear(8, 4, device="cpu")
    for recipe in (*RECIPES.values(), NVFP4BlockScaling()):
        with te.autocast(recipe=recipe):
            y = layer(torch.zeros(0, 8, requires_grad=True))
        y.sum().backward()
        assert y.shape == (0, 4) and float(layer.weight.grad.abs().sum()) == 0


@pytest.mark.parametrize("by_row", [False, True])
def test_the_float32_scale_of_nvfp4_is_multiplied_once(by_row: bool) -> None:
    def exact(packed: Packed) -> torch.Tensor:
        values = e2m1_values(unpack_bits(packed.codes, 4, 256)).double()
        scales = packed.scales.double().repeat_interleave(16, 1)
        return values * scales * packed.parts["amax"].double().view(-1, 1) / (448 * 6)

    torch.manual_seed(5)
    x, w = torch.randn(16, 256), torch.randn(8, 256)
    a = te.NVFP4Quantizer(row_scaled_nvfp4=by_row).operand(x, rows=True, columns=False).rows
    b = te.NVFP4Quantizer().operand(w, rows=True, columns=False).rows
    y = product(a, b, torch.float32).double()
    # sums of code times scale are exact: what is left are a few roundings of the result itself
    torch.testing.assert_close(y, exact(a) @ exact(b).t(), rtol=2**-21, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_high_precision_backward_pass_is_torchs_own(dtype: torch.dtype) -> None:
    """Bit for bit the gradients of the same layer without quantisation, over any leading axes."""
    layer = te.Linear(48, 33, params_dtype=dtype, device="cpu")
    x, dy = torch.randn(2, 7, 48).to(dtype), torch.randn(2, 7, 33).to(dtype)
    override = te.recipe.Float8CurrentScaling(backward_override="high_precision")
    results = []
    for recipe in (None, override):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
    (y, *plain), (rounded_y, *overridden) = results
    assert not torch.equal(y, rounded_y) and rounded_y.shape == (2, 7, 33)
    assert all(torch.equal(a, b) for a, b in zip(plain, overridden, strict=True))


class _Activation(torch.autograd.Function):
    """An activation by the definition of its kernels."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, numbers: tuple[float, float]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.numbers = numbers
        return through_ref(h, SmoothActivation(*numbers, h[:0]))

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return through_ref(h, SmoothActivation(*ctx.numbers, da)), None


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("frozen", ["", "x", "w1", "w2", "first"])
def test_an_activated_pair_is_two_linears(name: str, frozen: str) -> None:
    """Bit for bit: outputs, gradients, and delayed scaling's amaxes."""
    numbers = SMOOTH["gelu"]
    x, w1, w2 = torch.randn(3, 40, 64), torch.randn(96, 64) / 8, torch.randn(32, 96) / 8
    b1, b2, dy = torch.randn(96), torch.randn(32), torch.randn(3, 40, 32)

    def quantizer(gradient: bool) -> Any:
        kind = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
        if name == "delayed":
            return te.Float8Quantizer(torch.tensor([3.0]), torch.zeros(1), kind)
        current = te.Float8CurrentScalingQuantizer(kind)
        return current if name == "current" else te.Float8BlockQuantizer(kind, block_scaling_dim=1)

    results = []
    for together in (True, False):
        plans = tuple(ProductSettings(quantizer(False), quantizer(False), quantizer(True)) for _ in range(2))
        leaves = [t.clone().requires_grad_() for t in (x, w1, b1, w2, b2)]
        hidden = {"x": [0], "w1": [1], "w2": [3], "first": [0, 1, 2]}.get(frozen, [])
        for i in hidden:
            leaves[i].requires_grad_(False)
        if together:
            y = activated_pair(leaves[0], numbers, leaves[1:], plans)
        else:
            h = linear(leaves[0], leaves[1], leaves[2], plans[0])
            y = linear(_Activation.apply(h, numbers), leaves[3], leaves[4], plans[1])
        y.backward(dy)
        amaxes = [
            getattr(q, "amax", None) for plan in plans for q in (plan.input, plan.weight, plan.gradient)
        ]
        results.append([y, *(leaf.grad for leaf in leaves), *amaxes])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "silu", "qgelu"])
@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_a_fused_mlp_is_that_of_single_steps(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, in bfloat16: other exponentials decide few roundings, and sums run in another order."""
    layer = te.LayerNormMLP(256, 512, activation=activation, params_dtype=torch.bfloat16)
    layer.fc1_bias.data.normal_()
    x = (torch.randn(32, 8, 256) * 2).bfloat16().cuda()
    dy = torch.randn_like(x)
    chosen, results = getattr(te.recipe, name)(), []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(layernorm_mlp, "fuses", lambda x, plans: False)
        layer.reset_fp8_meta_tensors()
        for _ in range(2):  # delayed scaling has its first scales in the second
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            with te.autocast(recipe=chosen):
                y = layer(leaf)
            y.backward(dy)
        results.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        far = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert far < 0.01
