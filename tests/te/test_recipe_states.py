"""Quantisers made without a module, ready-made functions for a `CustomRecipe`, shapes of codes and scales."""

from __future__ import annotations

import pytest
import torch

import fewbits.te as te
from fewbits.errors import BadInput
from fewbits.te import quantizer_factories
from fewbits.te.recipe_state import NVFP4BlockScalingRecipeState, RecipeState, get_fp8_te_dtype

RECIPES = {
    "delayed_scaling_factory": te.recipe.DelayedScaling(),
    "current_scaling_factory": te.recipe.Float8CurrentScaling(),
    "float8_block_scaling_factory": te.recipe.Float8BlockScaling(),
    "mxfp8_factory": te.recipe.MXFP8BlockScaling(),
    "nvfp4_factory": te.recipe.NVFP4BlockScaling(),
}


def one_step(recipe: te.recipe.Recipe) -> list[torch.Tensor]:
    """Output and gradients of a layer that every recipe begins with alike."""
    torch.manual_seed(3)
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(4)  # of stochastic rounding
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.float().pow(2).sum().backward()
    return [y, x.grad, layer.weight.grad]


@pytest.mark.parametrize("name", RECIPES)
def test_a_ready_made_function_is_its_recipe(name: str) -> None:
    custom = te.recipe.CustomRecipe(qfactory=getattr(quantizer_factories, name))
    for ours, theirs in zip(one_step(custom), one_step(RECIPES[name]), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "name", [name for name in dir(quantizer_factories) if "_bwd_" in name or "1d" in name]
)
def test_mixed_functions_quantise_forward_and_backward_apart(name: str) -> None:
    y, dx, dw = one_step(te.recipe.CustomRecipe(qfactory=getattr(quantizer_factories, name)))
    exact = one_step(te.recipe.CustomRecipe(qfactory=quantizer_factories.high_precision_factory))
    assert (
        torch.equal(y, exact[0]) is name.startswith("high_precision_fwd")
        and torch.nn.functional.cosine_similarity(y, exact[0]).min() > 0.9
    )
    assert torch.isfinite(dx).all() and torch.isfinite(dw).all()


def test_four_bits_forward_alone_is_the_recipe_with_an_override() -> None:
    words = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
    recipe = te.recipe.NVFP4BlockScaling(row_scaled_activation=True, backward_override="dequantized", **words)
    name = "nvfp4_row_scaled_fwd_high_precision_bwd_factory"
    custom = te.recipe.CustomRecipe(qfactory=getattr(quantizer_factories, name))
    for ours, theirs in zip(one_step(custom), one_step(recipe), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-3)


def test_experts_alone_go_forward_in_four_bits() -> None:
    choose = quantizer_factories.nvfp4_row_scaled_fwd_mxfp8_bwd_factory
    for kind, is_four in (("grouped_linear", True), ("linear", False)):
        one = choose(te.QuantizerRole(kind, "input", ""))
        rows = one.operand(torch.randn(32, 64), rows=True, columns=True).rows
        assert (rows.format.contract.tensor_scale) is is_four


def test_an_unknown_taker_has_no_role() -> None:
    seen = []

    def choose(role: te.QuantizerRole | None) -> te.Quantizer:
        seen.append(role)
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)

    layer = te.LayerNormMLP(32, 64, name="mlp", params_dtype=torch.bfloat16)
    recipe = te.recipe.CustomRecipe(qfactory=choose)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe):
        layer(x)
    assert seen.count(None) == 2 and {role.name for role in seen if role} == {"mlp.fc1", "mlp.fc2"}
    taker = te.QuantizerRole("linear", "input", "next")
    layer.output_quantizer_role = taker
    with te.autocast(recipe=recipe):
        layer(x)
    assert seen.count(taker) == 1


def test_states_follow_roles_and_places() -> None:
    recipe = te.recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="weights")
    roles = [te.QuantizerRole("linear", "weight"), te.QuantizerRole("linear", "input"), None]
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles)
    assert type(state) is NVFP4BlockScalingRecipeState and state.scale is None
    assert [q.nvfp4_use_4over6 for q in state.make_quantizers()] == [True, False, False]
    backward = RecipeState.create(recipe, mode="backward", num_quantizers=2).make_quantizers()
    assert [q.stochastic_rounding for q in backward] == [True, True]
    delayed = RecipeState.create(
        te.recipe.DelayedScaling(amax_history_len=7), mode="forward", num_quantizers=3
    )
    assert delayed.amax_history.shape == (7, 3)
    assert delayed.make_quantizers()[1].scale.data_ptr() == delayed.scale[1].data_ptr()
    with pytest.raises(BadInput, match="2 roles"):
        RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles[:2])


def test_four_over_six_is_refused_with_the_hadamard_transform() -> None:
    recipe = te.recipe.NVFP4BlockScaling(nvfp4_4over6="all")
    with pytest.raises(BadInput, match="disable_rht"):
        RecipeState.create(recipe, mode="forward", num_quantizers=3)


@pytest.mark.parametrize(
    ("quantizer", "rows", "columns", "scales", "column_scales"),
    [
        (te.Float8BlockQuantizer(7, block_scaling_dim=1), (130, 300), (300, 130), (3, 132), (2, 300)),
        (te.Float8BlockQuantizer(7, block_scaling_dim=2), (130, 300), (300, 130), (2, 4), (3, 4)),
        (te.MXFP8Quantizer(7), (130, 300), (130, 300), (256, 12), (8, 384)),
        (te.NVFP4Quantizer(), (130, 150), (300, 65), (256, 20), (384, 12)),
        (te.NVFP4Quantizer(with_2d_quantization=True), (130, 150), (300, 65), (256, 20), (384, 12)),
    ],
)
def test_codes_and_scales_have_the_shapes_of_cublas(
    quantizer: te.Quantizer, rows: tuple, columns: tuple, scales: tuple, column_scales: tuple
) -> None:
    x = torch.randn(130, 300, dtype=torch.bfloat16)
    tensor = quantizer.update_quantized(x, quantizer.make_empty((130, 300), dtype=torch.bfloat16))
    assert torch.equal(tensor.dequantize(), quantizer(x).dequantize())
    assert tensor._rowwise_data.shape == rows and tensor._columnwise_data.shape == columns
    assert tensor._rowwise_scale_inv.shape == scales
    assert tensor._columnwise_scale_inv.shape == column_scales
    assert {tensor._rowwise_data.dtype, tensor._columnwise_data.dtype} == {torch.uint8}


def test_mxfp8_columns_lie_as_the_matrix_does() -> None:
    x = torch.randn(64, 96)
    tensor = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    values = tensor._columnwise_data.view(torch.float8_e4m3fn).float()
    scales = torch.exp2(tensor._columnwise_scale_inv[:2, :96].float() - 127)
    back = values * scales.repeat_interleave(32, 0)
    assert torch.equal(back, tensor.operand().columns.dequantize(torch.float32).t())


def test_types_of_codes() -> None:
    hybrid = te.recipe.DelayedScaling()
    assert get_fp8_te_dtype(hybrid) is te.DType.kFloat8E4M3
    assert get_fp8_te_dtype(hybrid, fprop_tensor=False) is te.DType.kFloat8E5M2
    assert get_fp8_te_dtype(te.recipe.Float8BlockScaling(), fprop_tensor=False) is te.DType.kFloat8E4M3


def test_a_slots_role_and_what_stands_in_it() -> None:
    named = te.QuantizerRole(module_type="dpa", tensor_type="qkv", name="a")
    state = RecipeState.create(
        te.recipe.Float8BlockScaling(),
        mode="forward",
        num_quantizers=4,
        device="cpu",
        roles=[named, *[None] * 3],
    )
    assert state._slot_role(0) is named and state._slot_role(2) == te.QuantizerRole()
    assert [state._slot_tensor_type(i) for i in range(4)] == ["input", "weight", "output", "input"]
    backward = RecipeState.create(
        te.recipe.Float8BlockScaling(), mode="backward", num_quantizers=2, device="cpu"
    )
    assert [backward._slot_tensor_type(i) for i in range(2)] == ["grad_output", "grad_input"]


def test_delayed_scaling_inside_a_custom_recipe() -> None:
    def some(role: object) -> object:
        kind = getattr(role, "tensor_type", "")
        return te.DelayedScalingRequest(amax_history_len=7) if kind == "weight" else None

    roles = [te.QuantizerRole(tensor_type=kind) for kind in ("input", "weight", "output")]
    words = {"mode": "forward", "num_quantizers": 3, "device": "cpu", "roles": roles}
    state = RecipeState.create(te.recipe.CustomRecipe(qfactory=some), **words)
    assert state._has_delayed_scaling and state.amax_history.shape == (7, 1)
    inner = state._inner_delayed_scaling_recipe
    assert isinstance(inner, te.recipe.DelayedScaling) and inner.amax_history_len == 7
    none = RecipeState.create(te.recipe.CustomRecipe(qfactory=lambda role: None), **words)
    assert not none._has_delayed_scaling and none._inner_delayed_scaling_recipe is None
