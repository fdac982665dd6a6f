"""What training a model takes on a GPU that need not be there: bytes, largest batch, recipe.

Everything comes from config.json and `fewbits.models.plan.memory_plan`; no weight is read. Bytes were
compared with the measured rows of benchmarks/results.csv (tests/training/test_gpu_plan.py). Seconds are those
of the same plan's rates, and only order the recipes; no speed is promised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fewbits.decoder.keep import KEEP_NONE, KEEP_ON_HOST
from fewbits.device import lowest_capability
from fewbits.errors import BadInput
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.models.packing.model_shapes import numbers_of
from fewbits.models.packing.recipe_patterns import check_patterns
from fewbits.models.plan.memory_budget import OPTIMIZER_BYTES, auto_budget
from fewbits.models.plan.memory_plan import GIB, MemoryPlan, Planner, planner
from fewbits.recipes import CATALOG, Recipe, get_recipe

# FP8 products against bfloat16's, whole steps of one H200: 17,737 and 26,730 tokens/s
# (docs/guide/fine-tuning.md).
_FLOAT8_STEP = 0.66
_MOST = 1 << 20  # sequences, or tokens, beyond which nobody asks


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU on paper.

    Attributes:
        name: as people write it.
        memory_bytes: all of its memory, as its driver reports it.
        capability: its CUDA compute capability.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def budget_bytes(self) -> int:
        """What a run may use of it when memory_budget is auto."""
        return auto_budget(self.memory_bytes)


_MIB = {  # as nvidia-smi reports it, and the compute capability
    "t4": (15_360, (7, 5)),
    "rtx3090": (24_576, (8, 6)),
    "a10g": (23_028, (8, 6)),
    "a100-40": (40_960, (8, 0)),
    "a100-80": (81_920, (8, 0)),
    "rtx4060ti-16": (16_380, (8, 9)),
    "rtx4080": (16_376, (8, 9)),
    "rtx4090": (24_564, (8, 9)),
    "l4": (23_034, (8, 9)),
    "l40s": (46_068, (8, 9)),
    "h100": (81_559, (9, 0)),
    "h200": (143_771, (9, 0)),
    "b200": (183_359, (10, 0)),
    "rtx5090": (32_607, (12, 0)),
}
GPUS = {
    name: Gpu(name=name, memory_bytes=mib << 20, capability=capability)
    for name, (mib, capability) in _MIB.items()
}


def gpu_named(text: str, capability: tuple[int, int] | None = None) -> Gpu:
    """A GPU of `GPUS`, or one of so much memory, as in "24GiB" (of compute capability 8.9 unless said).

    Raises:
        BadInput: it is neither.
    """
    name = text.lower().replace(" ", "").replace("_", "")
    if name in GPUS:
        gpu = GPUS[name]
        return gpu if capability is None else replace(gpu, capability=capability)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(gib|gb|g)?", name)
    if match is None or float(match[1]) == 0:
        raise BadInput(
            f"there is no GPU {text!r}; write one of {', '.join(GPUS)}, or its memory, as in 24GiB."
        )
    unit = 10**9 if match[2] == "gb" else GIB
    return Gpu(name=text, memory_bytes=int(float(match[1]) * unit), capability=capability or (8, 9))


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """What one recipe takes for one model and batch.

    Attributes:
        recipe: its name.
        plan: what layers keep, and the bytes by purpose.
        step_seconds: predicted of a step, to order recipes by.
        largest_batch: most sequences of the asked length in one pass; 0 if not even one fits.
        longest: most tokens of a single sequence, at most what the model allows.
        why_not: why this GPU cannot run it; empty if it can.
    """

    recipe: str
    plan: MemoryPlan
    step_seconds: float
    largest_batch: int
    longest: int
    why_not: str = ""

    @property
    def fits(self) -> bool:
        """Whether the asked batch fits, on a GPU that runs the recipe."""
        return self.plan.fits and not self.why_not

    @property
    def trains_all(self) -> bool:
        """Whether all weights train."""
        return get_recipe(self.recipe).lora is None


def trainable_recipes() -> list[str]:
    """The recipes that are planned: they train adapters or all weights, without fake quantisation."""
    return [name for name, make in CATALOG.items() if is_planned(make())]


def is_planned(recipe: Recipe) -> bool:
    """Whether a recipe trains adapters or all weights, without fake quantisation."""
    return recipe.qat is None and (recipe.lora is not None or recipe.linear.weight is None)


def planner_for(
    config: Mapping[str, Any],
    recipe: Recipe,
    gpu: Gpu,
    *,
    batch: tuple[int, int],
    optimizer: str = "adamw",
    dtype_bytes: int | None = None,
) -> Planner:
    """The planner of one recipe for a batch of (sequences, tokens of each).

    Args:
        config: the mapping in config.json.
        recipe: formats and adapters.
        gpu: for its rates.
        batch: sequences and tokens of each in the largest batch.
        optimizer: by fewbits' name; "adamw" keeps two float32 moments.
        dtype_bytes: of weights that are not packed; None: as ``fewbits train`` loads them (float32 where all
            weights train, else bfloat16).
    """
    weights = dtype_bytes or (4 if recipe.lora is None else 2)
    static = predict_memory(config, recipe, dtype_bytes=weights)
    trained = static.optimizer // OPTIMIZER_BYTES["adamw"]
    return planner(
        config,
        recipe,
        num_tokens=batch[0] * batch[1],
        sequence_length=batch[1],
        capability=gpu.capability,
        static=replace(static, optimizer=trained * OPTIMIZER_BYTES[optimizer]),
    )


def plan_recipe(
    config: Mapping[str, Any],
    name: str,
    gpu: Gpu,
    *,
    batch: tuple[int, int],
    optimizer: str = "adamw",
) -> RecipePlan:
    """One recipe, by any text that `get_recipe` takes, on one GPU; see `RecipePlan`.

    Raises:
        BadInput: as `planner_for`; or a pattern of the recipe names no linear, as where it is loaded.
    """
    recipe, budget = get_recipe(name), gpu.budget_bytes
    check_patterns(config, recipe)

    def smallest(sequences: int, tokens: int) -> bool:
        """Whether the plan that keeps least fits."""
        plans = planner_for(config, recipe, gpu, batch=(sequences, tokens), optimizer=optimizer)
        ways = (KEEP_NONE, KEEP_ON_HOST) if plans.is_fused else (KEEP_NONE,)
        return min(plans.same_for_all(keep, 0).predicted.total for keep in ways) <= budget

    positions = numbers_of(config).get("max_position_embeddings") or _MOST
    chosen = planner_for(config, recipe, gpu, batch=batch, optimizer=optimizer)
    plan = chosen.plan(budget)
    in_float8 = recipe.linear.weight_operand is not None
    seconds = chosen.step_seconds * (_FLOAT8_STEP if in_float8 else 1.0) + plan.seconds
    return RecipePlan(
        recipe=name,
        plan=plan,
        step_seconds=seconds,
        largest_batch=_largest(lambda n: smallest(n, batch[1]), _MOST // batch[1]),
        longest=_largest(lambda n: smallest(1, n), min(int(positions), _MOST)),
        why_not=_why_not(recipe, gpu),
    )


def fastest(plans: list[RecipePlan]) -> RecipePlan | None:
    """Of those that fit, the adapters' recipe with the fewest seconds; one that trains all if none fits."""
    fitting = [p for p in plans if p.fits]
    return min(fitting, key=lambda p: (p.trains_all, p.step_seconds), default=None)


def _why_not(recipe: Recipe, gpu: Gpu) -> str:
    operand = recipe.linear.weight_operand or recipe.head.weight_operand
    need = lowest_capability("float8" if operand is not None else "bfloat16")
    if gpu.capability >= need:
        return ""
    return f"needs compute capability {need[0]}.{need[1]}, this has {gpu.capability[0]}.{gpu.capability[1]}"


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits; 0 if none does."""
    if most < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
