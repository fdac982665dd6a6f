"""A model's plan while it trains: put in place, corrected by the first step, made smaller where memory ends.

The plan itself comes from `fewbits.models.plan.memory_plan`; here it meets a model and a device.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fewbits.decoder.keep import KEEP_ACTIVATIONS, KEEP_NONE, KEEP_ON_HOST, Keep
from fewbits.decoder.offload import HostStash
from fewbits.errors import BadInput, Unsupported
from fewbits.host.conversion import conversion_of
from fewbits.host.record import put_part
from fewbits.models.adapting.checkpointed_layers import checkpoint_layers
from fewbits.models.packing.model_shapes import layer_shapes
from fewbits.models.plan.memory_plan import GIB, MemoryPlan, Planner, gathered_bytes, planner, static_of
from fewbits.recipes import LoRA, Recipe

logger = logging.getLogger("fewbits")

_MARGIN_BYTES, _MARGIN_SHARE = 1 << 29, 0.03  # left free by "auto": the allocator's waste, other processes
_MARGIN_SHARDED = 0.05  # as well: gathered layers of several streams tear memory, and no step is repeated
_WORTH = 0.02  # a corrected plan replaces a sound one if it saves this share of a step
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "adafactor": 1, "sgd": 0}  # for each trained value
ALL_ALIKE = {"keep": KEEP_ACTIVATIONS, "recompute": KEEP_NONE, "offload": KEEP_ON_HOST}


class Meter:
    """Reads the memory of one CUDA device; none of it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        """Bytes in use; from here on the peak counts anew."""
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes in use since `allocated`."""
        return torch.cuda.max_memory_allocated(self.device)

    def available(self) -> int:
        """Bytes that this process has or could have."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def empty(self) -> None:
        """Give what is cached back to the device."""
        torch.cuda.empty_cache()


def auto_budget(available: int) -> int:
    """What "auto" may use of the bytes that are there."""
    return available - max(_MARGIN_BYTES, int(_MARGIN_SHARE * available))


@dataclass
class Target:
    """Where a plan goes: the layers of one model.

    Attributes:
        model: the model.
        layers: what has a ``keep`` for each of its decoder layers; none if the model is not fused.
        stash: where inputs wait that are kept on the host.
        on_change: called when layers compute in another way from now on, or a step has died.
        fallbacks: how often a fused layer took its own forward, by reason; its ``keep`` does nothing then.
    """

    model: nn.Module
    layers: Sequence[Any]
    stash: HostStash | None = None
    on_change: list[Callable[[], None]] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, model: nn.Module) -> Target:
        """The fused layers of a model."""
        from fewbits.decoder.fuse import fused_layers, fusion_of  # after fast.py, which may fuse itself

        fusion = fusion_of(model)
        if fusion is None:
            return cls(model, [])
        return cls(model, fused_layers(model), fusion.stash, fallbacks=fusion.fallbacks)

    def drop_unfused(self) -> str | None:
        """Where fused layers turn out to run unfused, plan for that; the reason, once."""
        if not self.layers or not self.fallbacks:
            return None
        self.layers = []
        return self.fallbacks.most_common(1)[0][0]

    def apply(self, plan: MemoryPlan) -> None:
        """Put a plan in place."""
        if not plan.keeps:
            self.checkpoint(plan.checkpointing)
        for layer, keep in zip(self.layers, plan.keeps, strict=bool(plan.keeps)):
            layer.keep = keep
        self._tell()

    def checkpoint(self, on: bool) -> None:
        """Layers that are not fused, or do not run so, are recomputed as a whole, or not."""
        checkpoint_layers(self.model, on)
        if on:
            self.model.config.use_cache = False  # type: ignore[union-attr]

    def release(self) -> None:
        """Let go of everything that a step which died has left."""
        for p in self.model.parameters():
            p.grad = None
        if self.stash is not None:
            self.stash.clear()
        self._tell()

    def _tell(self) -> None:
        for call in self.on_change:
            call()


@dataclass
class MemoryBudget:
    """The plan of one model in training, and what became of it.

    Attributes:
        target: the model's layers.
        planner_for: a planner for batches of so many tokens.
        num_tokens: of the largest batch to come.
        budget_bytes: what a step may use, weights included.
        meter: reads the device's memory; None: predictions are not corrected.
        start: a plan to begin with, which no measurement changes; None: the best that fits.
        agree: gives the same number of all processes of the run, so that all make the same plan.
        gathered: bytes of a sharded model that come and go within a step, and count as weights.
        plan: the plan in place.
        notes: sentences for the log and the receipt, in the order in which they came about.
    """

    target: Target
    planner_for: Callable[[int], Planner]
    num_tokens: int
    budget_bytes: int
    meter: Any = None
    start: MemoryPlan | None = None
    agree: Callable[[float], list[float]] = lambda number: [number]
    gathered: int = 0
    plan: MemoryPlan = field(init=False)
    notes: list[str] = field(default_factory=list)
    _factor: float = 1.0
    _limit: int | None = None  # what the plan after memory ran out is expected to take
    _before: int | None = None
    _largest: int = 0
    _measured: bool = False
    _ended: bool = False

    def __post_init__(self) -> None:
        self._measured = self.start is not None
        self._use(self.start or self._planner().plan(self.budget_bytes))
        self._say(f"memory: {self.plan}")
        if not self.plan.fits:
            self._say(
                f"memory: no plan is expected to fit {self.budget_bytes / GIB:.2f} GiB; this is the smallest."
            )

    def begin(self, num_tokens: int) -> None:
        """A batch of the first step is about to run."""
        if self.meter is None or self._measured:
            return
        self._largest = max(self._largest, num_tokens)
        if self._before is None:
            self._before = self.meter.allocated()

    def end_step(self) -> None:
        """Forward and backward passes of a step are done; the first one's peak corrects the plan."""
        if self.meter is None or self._ended:
            return
        self._ended = True
        tells = not self._measured and self._before is not None and not self._replan_unfused()
        self._measured = True
        expected = self.planner_for(max(1, self._largest)).price_of(self.plan)
        measured = 0
        if tells and self._before is not None:
            measured = max(0, self.meter.peak() - self._before - self.gathered)
        factors = self.agree(measured / max(1, expected.predicted.dynamic))
        if not all(factors):  # here, or on another rank, the first step was not a whole one under this plan
            return
        self._factor = max(factors)
        finder = self._planner()
        current = finder.price_of(self.plan)
        better = finder.plan(self.budget_bytes)
        text = f"memory: the first step took {measured / GIB:.2f} GiB beside the model, predicted"
        text += f" {expected.predicted.dynamic / GIB:.2f}"
        if not current.fits or current.seconds - better.seconds > _WORTH * finder.step_seconds:
            self._use(better)
            self._say(f"{text}; new plan: {better}")
        else:
            self._say(f"{text}; the plan stays")

    def step_down(self, why: str, step: int) -> bool:
        """Memory ran out: take the next smaller plan; False if there is none."""
        if self._replan_unfused() and self.plan.checkpointing:
            return True
        smaller = self._planner().smaller(self._planner().price_of(self.plan))
        if smaller is None:
            return False
        self._use(smaller)
        self._limit = smaller.predicted.total
        self._measured = True  # the step that is repeated says nothing about a whole one
        self._say(
            f"memory: step {step} ran out of memory ({why}) and is repeated under a smaller plan: {smaller}"
        )
        return True

    def grow(self, num_tokens: int) -> None:
        """A batch is about to run; if none had as many tokens, the plan is made for it."""
        if num_tokens <= self.num_tokens:
            return
        self.num_tokens = num_tokens
        limit = self.budget_bytes if self._limit is None else min(self._limit, self.budget_bytes)
        plan = replace(self._planner().plan(limit), budget_bytes=self.budget_bytes)
        if (plan.keeps, plan.checkpointing) == (self.plan.keeps, self.plan.checkpointing):
            self.plan = plan
            return
        self._use(plan)
        self._say(f"memory: a batch has {num_tokens} tokens; new plan: {plan}")

    def release(self) -> None:
        """Free everything of a step that died."""
        self.target.release()
        gc.collect()
        if self.meter is not None:
            self.meter.empty()

    def _replan_unfused(self) -> bool:
        reason = self.target.drop_unfused()
        if reason is None:
            return False
        self._use(self._planner().plan(self.budget_bytes))
        self._say(f"memory: layers run unfused ({reason}), so the plan is another: {self.plan}")
        return True

    def _planner(self) -> Planner:
        return replace(self.planner_for(self.num_tokens), factor=self._factor)

    def _use(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.target.apply(plan)

    def _say(self, sentence: str) -> None:
        logger.info(sentence)
        self.notes.append(sentence)


@dataclass(frozen=True)
class PlanGiven:
    """What `budget_for` leaves on a model's record: its plan is there, and no batch need find one."""


def budget_for(model: nn.Module, budget: str | float, **options: Any) -> MemoryBudget | None:
    """The budget of a model that is ready to train, its first plan put in place: see `made_budget`.

    Args:
        model: fused or not, with its adapters.
        budget: "auto", a number of GiB, or the same for all layers: "keep", "recompute", "offload".
        options: the other arguments of `made_budget`.

    Raises:
        BadInput: a number of GiB was given for a model whose configuration does not tell its shapes.
    """
    put_part(model, PlanGiven())
    return made_budget(model, budget, **options)


def made_budget(
    model: nn.Module,
    budget: str | float,
    *,
    recipe: Recipe | None,
    lora: LoRA | None,
    batch: tuple[int, int],
    optimizer_bytes: int = 8,
    agree: Callable[[float], list[float]] = lambda number: [number],
) -> MemoryBudget | None:
    """A budget with a plan in place.

    Args:
        model: fused or not, with its adapters.
        budget: "auto", a number of GiB, or the same for all layers: "keep", "recompute", "offload".
        recipe: its formats.
        lora: its adapters.
        batch: sequences and tokens of each in the largest batch.
        optimizer_bytes: of the optimizer's states for each trained value.
        agree: see `MemoryBudget`; the smallest device's budget is everyone's.

    Returns:
        None where there is nothing to plan with: on a CPU, unless the budget is a number; for a model whose
        configuration does not tell its shapes.

    Raises:
        BadInput: a number of GiB was given for a model whose configuration does not tell its shapes.
    """
    device = next(p.device for p in model.parameters())
    meter = Meter(device) if device.type == "cuda" else None
    same = ALL_ALIKE.get(str(budget))
    if meter is None and budget == "auto":
        return None
    target = Target.of(model)
    if same is not None:
        _set_all(target, same)
    if not isinstance(budget, str):
        limit = int(budget * GIB)
    elif meter is not None:
        limit = auto_budget(meter.available())
        if any(hasattr(p, "to_local") for p in model.parameters()):
            limit -= int(_MARGIN_SHARDED * limit)
    else:
        return None
    limit = int(min(agree(limit)))
    num_tokens = batch[0] * batch[1]
    try:
        planners = _planners(model, target, replace(recipe or Recipe(name="plain"), lora=lora), batch[1])
        planner_for = partial(planners, static=static_of(model, optimizer_bytes=optimizer_bytes))
        start = None if same is None else planner_for(num_tokens).same_for_all(same, limit)
        gathered = gathered_bytes(model)
        memory_budget = MemoryBudget(target, planner_for, num_tokens, limit, meter, start, agree, gathered)
    except (BadInput, Unsupported) as error:
        if not isinstance(budget, str):
            raise
        logger.warning(f"memory: no plan can be made for this model: {error}")
        return None
    conversion = conversion_of(model)
    if conversion is not None:
        conversion.receipt.notes.extend(memory_budget.notes)
    return memory_budget


def _planners(model: Any, target: Target, recipe: Recipe, length: int) -> Callable[..., Planner]:
    """The planner for batches of so many tokens."""
    config = model.config.get_text_config().to_dict()
    device = next(model.parameters()).device
    dtype = getattr(model, "dtype", torch.float32)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    sharded = any(hasattr(p, "to_local") for p in model.parameters())
    shapes = layer_shapes(model)

    def planner_for(num_tokens: int, **options: Any) -> Planner:
        fused = {"num_layers": len(target.layers)} if target.layers else {"is_fused": False}
        return planner(
            config,
            recipe,
            num_tokens=num_tokens,
            sequence_length=min(length, num_tokens),
            capability=capability,
            dtype_bytes=dtype.itemsize,
            can_keep_weights=not sharded,
            shapes=shapes,
            **fused,
            **options,
        )

    return planner_for


def _set_all(target: Target, keep: Keep) -> None:
    """The same choice for every layer; for layers that are not fused, transformers' own checkpointing."""
    for layer in target.layers:
        layer.keep = keep
    if not target.layers:
        target.checkpoint(keep != KEEP_ACTIVATIONS)
