"""From a recipe to the quantisers of a module's operands.

A product has slots, numbered as Transformer Engine numbers them so that checkpoints agree: forward input,
weight, output (three a product), backward gradient of the output and of the input (two a product).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fewbits.errors import BadInput
from fewbits.te.active.delayed import DelayedState, codes_dtype
from fewbits.te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from fewbits.te.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fewbits.te.tensors.roles import DelayedScalingRequest, QuantizerRole


@dataclass
class Slots:
    """The quantisers of one pass of a module.

    Attributes:
        quantizers: one a slot; None for an operand that stays as it is.
        state: delayed scaling's, or None.
    """

    quantizers: list[Quantizer | None]
    state: DelayedState | None = field(default=None)


_FORWARD, _BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")


def kinds_of(roles: Sequence[QuantizerRole | None], *, forward: bool) -> list[str]:
    """The kind of tensor in each slot: what its role says, or what stands at this place of a product."""
    usual = _FORWARD if forward else _BACKWARD
    return [
        role.tensor_type
        if role is not None and role.tensor_type in (*_FORWARD, *_BACKWARD)
        else usual[i % len(usual)]
        for i, role in enumerate(roles)
    ]


def slots_for(
    recipe: Recipe,
    roles: Sequence[QuantizerRole | None],
    *,
    forward: bool,
    device: Any,
    previous: DelayedState | None = None,
) -> Slots:
    """The quantisers of a pass.

    Args:
        recipe: any.
        roles: one a slot; None where nobody knows who takes the tensor.
        forward: inputs and weights, not gradients.
        device: where the state lies.
        previous: delayed scaling's state that the new one goes on with.
    """
    if isinstance(recipe, DelayedScaling):
        state = DelayedState(recipe, len(roles), forward=forward, device=device)
        if previous is not None:
            state.take_over(previous)
        return Slots([state.quantizer(i) for i in range(len(roles))], state)
    if isinstance(recipe, CustomRecipe):
        return _custom(recipe, roles, forward=forward, device=device, previous=previous)
    return Slots([_stateless(recipe, kind, forward=forward) for kind in kinds_of(roles, forward=forward)])


def _stateless(recipe: Recipe, kind: str, *, forward: bool) -> Quantizer:
    dtype = codes_dtype(recipe.fp8_format, forward=forward)
    is_weight, is_gradient = kind == "weight", kind in _BACKWARD
    if isinstance(recipe, Float8CurrentScaling):
        params = _params(recipe, is_weight, forward)
        return Float8CurrentScalingQuantizer(
            dtype, force_pow_2_scales=params.power_2_scale, amax_epsilon=params.amax_epsilon
        )
    if isinstance(recipe, Float8BlockScaling):
        params = _params(recipe, is_weight, not is_gradient)
        dims = recipe.w_block_scaling_dim if is_weight else recipe.x_block_scaling_dim
        return Float8BlockQuantizer(
            dtype,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=recipe.grad_block_scaling_dim if is_gradient else dims,
        )
    if isinstance(recipe, NVFP4BlockScaling):
        return _nvfp4(recipe, is_weight, is_gradient, forward)
    if recipe.mxfp8():
        tile = forward and is_weight and bool(getattr(recipe, "enable_2d_quantization", False))
        return MXFP8Quantizer(dtype, with_2d_quantization=tile)
    raise BadInput(f"{type(recipe).__name__} is no recipe of fewbits.te.recipe.")


def _params(recipe: Float8CurrentScaling | Float8BlockScaling, is_weight: bool, forward: bool) -> QParams:
    if not forward:
        return recipe.fp8_quant_bwd_grad or QParams()
    return (recipe.fp8_quant_fwd_weight if is_weight else recipe.fp8_quant_fwd_inp) or QParams()


def _nvfp4(recipe: NVFP4BlockScaling, is_weight: bool, is_gradient: bool, forward: bool) -> NVFP4Quantizer:
    scope = "weights" if is_weight else "activations"
    params = recipe.fp4_quant_bwd_grad
    if not is_gradient:
        params = recipe.fp4_quant_fwd_weight if is_weight else recipe.fp4_quant_fwd_inp
    of_two = not is_gradient and recipe.nvfp4_4over6 in (scope, "all")
    if of_two and (params.random_hadamard_transform or params.stochastic_rounding):
        raise BadInput(
            "four over six (nvfp4_4over6) is defined neither with the Hadamard transform nor with stochastic "
            "rounding: give NVFP4BlockScaling disable_rht=True, or leave nvfp4_4over6 at 'none'."
        )
    bound = 256 if recipe.nvfp4_4over6_e4m3_use_256 in (scope, "all") else 448
    return NVFP4Quantizer(
        with_rht=params.random_hadamard_transform,
        with_post_rht_amax=params.random_hadamard_transform,
        with_2d_quantization=params.fp4_2d_quantization,
        stochastic_rounding=params.stochastic_rounding,
        row_scaled_nvfp4=forward and not is_weight and recipe.row_scaled_activation,
        nvfp4_use_4over6=of_two,
        nvfp4_e4m3_max=bound,
        nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
    )


def _custom(
    recipe: CustomRecipe,
    roles: Sequence[QuantizerRole | None],
    *,
    forward: bool,
    device: Any,
    previous: DelayedState | None,
) -> Slots:
    answers = [recipe.qfactory(role) for role in roles]
    requests = [i for i, answer in enumerate(answers) if isinstance(answer, DelayedScalingRequest)]
    state = None
    if requests:
        first = answers[requests[0]]
        if any(answers[i] != first for i in requests):
            raise BadInput(
                "the DelayedScalingRequests of one module must be equal, as their histories are one."
            )
        state = DelayedState(first, len(requests), forward=forward, device=device)
        if previous is not None:
            state.take_over(previous)
    quantizers: list[Quantizer | None] = []
    for i, answer in enumerate(answers):
        if i in requests and state is not None:
            quantizers.append(state.quantizer(requests.index(i)))
        elif answer is None or isinstance(answer, Quantizer):
            quantizers.append(None if type(answer) is IdentityQuantizer and answer.dtype is None else answer)
        else:
            raise BadInput(
                f"qfactory returned {type(answer).__name__} for {roles[i]}: it returns a quantiser, "
                "a DelayedScalingRequest or None."
            )
    return Slots(quantizers, state)
