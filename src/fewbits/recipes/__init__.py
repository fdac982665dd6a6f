"""Recipes: which format goes where. Pure data over formats.

`recipe.py` has the classes (`Rule` for one linear, `Recipe` for a model), `catalog.py` the recipes by name,
`plain.py` reads and writes them as mappings, `memory.py` predicts what one takes. `stochastic_config.py` and
`energy_prices.py` are the files of stochastic computing. Imports formats and families. Begin with
`catalog.py`.
"""

from __future__ import annotations

from fewbits.recipes.catalog import (
    CATALOG,
    float8_full,
    float8_full_head,
    int4_qat,
    int8,
    lora_bf16,
    nf4_qat,
    qlora_nf4,
    qlora_nf4_fp8,
    qlora_nf4_fp8_head,
    sc_qat,
    stochastic,
)
from fewbits.recipes.plain import get_recipe, recipe_from_config, recipe_to_config
from fewbits.recipes.recipe import QAT, LoRA, Recipe, Rule
from fewbits.recipes.standing_memory import Memory

__all__ = [
    "CATALOG",
    "QAT",
    "LoRA",
    "Memory",
    "Recipe",
    "Rule",
    "float8_full",
    "float8_full_head",
    "get_recipe",
    "int4_qat",
    "int8",
    "lora_bf16",
    "nf4_qat",
    "qlora_nf4",
    "qlora_nf4_fp8",
    "qlora_nf4_fp8_head",
    "recipe_from_config",
    "recipe_to_config",
    "sc_qat",
    "stochastic",
]
