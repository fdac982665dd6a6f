"""`Memory`: bytes that stand from step to step, by purpose; without activations, which a memory plan weighs.

`fewbits.models.adapting.predicted_memory` says how many a model takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that stand from step to step, by purpose."""

    weights: int
    lora: int
    gradients: int
    optimizer: int
    kv_cache: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.lora + self.gradients + self.optimizer + self.kv_cache


def head_copies(recipe: Recipe) -> int:
    """How many 8-bit copies of the head's weight its products in training take: one for each direction."""
    return sum(format is not None for format in (recipe.head.weight_operand, recipe.head.gradient))
