"""``RecipeState``: the quantisers of one pass, made outside of a module, by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.active.delayed import codes_dtype
from fewbits.te.active.operands import kinds_of, slots_for
from fewbits.te.recipe import DelayedScaling, Recipe
from fewbits.te.support import default_device
from fewbits.te.tensors.quantizers import Quantizer
from fewbits.te.tensors.roles import DType, QuantizerRole


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """torch's type of the codes that a recipe has for the forward pass, or else for gradients."""
    return codes_dtype(fp8_recipe.fp8_format, forward=fprop_tensor)


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The same as a `DType`."""
    e4m3 = get_fp8_torch_dtype(fp8_recipe, fprop_tensor) is torch.float8_e4m3fn
    return DType.kFloat8E4M3 if e4m3 else DType.kFloat8E5M2


class RecipeState:
    """Builds the quantisers of a pass; delayed scaling's share its scales and histories.

    Args:
        recipe: any.
        mode: "forward" or "backward".
        num_quantizers: slots.
        device: where scales and histories lie; None is the GPU where there is one.
        roles: one a slot, None in a slot that nobody named; None for all means the slots of a product in
            their usual order.

    Raises:
        BadInput: another mode, or another number of roles than of slots.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Any = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        if mode not in ("forward", "backward"):
            raise BadInput(f"mode is 'forward' or 'backward', not {mode!r}.")
        if roles is not None and len(roles) != num_quantizers:
            raise BadInput(f"{len(roles)} roles do not match num_quantizers={num_quantizers}.")
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self._slots = slots_for(
            recipe,
            [None] * num_quantizers if roles is None else list(roles),
            forward=mode == "forward",
            device=default_device(device),
        )

    @staticmethod
    def create(recipe: Recipe, **arguments: Any) -> RecipeState:
        """The state of the class that a recipe has; ``arguments`` are those of the class."""
        kinds = {kind.__name__: kind for kind in RecipeState.__subclasses__()}
        for base in type(recipe).__mro__:
            kind = kinds.get(f"{base.__name__}RecipeState") or kinds.get(f"{base.__name__}State")
            if kind is not None:
                return kind(recipe, **arguments)
        raise BadInput(f"{type(recipe).__name__} is no recipe of fewbits.te.recipe.")

    def _slot_role(self, index: int) -> QuantizerRole:
        """A slot's role as it was given; one that says nothing where nobody named it."""
        role = None if self.roles is None else self.roles[index]
        return QuantizerRole() if role is None else role

    def _slot_tensor_type(self, index: int) -> str:
        """What a slot's role says its tensor is, or what stands at this place of a product."""
        roles = [None] * self.num_quantizers if self.roles is None else list(self.roles)
        return kinds_of(roles, forward=self.mode == "forward")[index]

    def make_quantizers(self) -> list[Quantizer | None]:
        """One quantiser a slot; None where an operand stays as it is."""
        return list(self._slots.quantizers)

    @property
    def scale(self) -> Tensor | None:
        """Delayed scaling's multipliers, (n,) float32; None under other recipes."""
        return None if self._slots.state is None else self._slots.state.scale

    @property
    def amax_history(self) -> Tensor | None:
        """Delayed scaling's histories, (length, n) float32; None under other recipes."""
        return None if self._slots.state is None else self._slots.state.amax_history


class DelayedScalingRecipeState(RecipeState):
    """Of `fewbits.te.recipe.DelayedScaling`."""


class Float8CurrentScalingRecipeState(RecipeState):
    """Of `fewbits.te.recipe.Float8CurrentScaling`."""


class Float8BlockScalingRecipeState(RecipeState):
    """Of `fewbits.te.recipe.Float8BlockScaling`."""


class MXFP8BlockScalingRecipeState(RecipeState):
    """Of `fewbits.te.recipe.MXFP8BlockScaling`."""


class NVFP4BlockScalingRecipeState(RecipeState):
    """Of `fewbits.te.recipe.NVFP4BlockScaling`."""


class CustomRecipeState(RecipeState):
    """Of `fewbits.te.recipe.CustomRecipe`, whose function may ask for delayed scaling in some slots."""

    @property
    def _has_delayed_scaling(self) -> bool:
        """Whether it did."""
        return self._slots.state is not None

    @property
    def _inner_delayed_scaling_recipe(self) -> DelayedScaling | None:
        """What it asked for, as the recipe of that name."""
        if self._slots.state is None:
            return None
        request = self._slots.state.recipe
        return DelayedScaling(
            **{f.name: getattr(request, f.name) for f in fields(DelayedScaling) if hasattr(request, f.name)}
        )
