"""A memory plan in a trainer that knows nothing of plans: TRL's, transformers', a loop of one's own.

``use_gradient_checkpointing="auto"``, or a number of GiB, leaves what is recomputed to a plan
(`fewbits.models.plan.memory_plan`), and a plan needs the batch. `plan_from_batches` puts a hook before the
model's forward pass. It makes the plan for the first batch that trains, lets the memory that this batch's
step took correct it, and makes another where a later batch has more tokens. A pass of the decoder that runs
out of memory on its way forward is repeated under the next smaller plan, with the same random numbers, where
no other process takes part; memory that ends in the loss or the backward pass is the trainer's, as ever.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.decoder.fuse import fusion_of
from fewbits.host.conversion import conversion_of
from fewbits.host.record import part_of, put_part, take_part
from fewbits.host.unwrap import unwrap
from fewbits.models.plan.memory_budget import MemoryBudget, PlanGiven, made_budget
from fewbits.models.plan.memory_ends import first_sentence, is_out_of_memory, random_state, set_random_state
from fewbits.recipes import LoRA

logger = logging.getLogger("fewbits")


class BatchPlan:
    """What `plan_from_batches` leaves on a model: the hook, and the plan that it has made.

    Attributes:
        choice: "auto" or a number of GiB.
        budget: the plan and what became of it; None before the first batch that trains, or where a device
            has no memory to plan with.
    """

    def __init__(self, choice: str | float) -> None:
        self.choice = choice
        self.budget: MemoryBudget | None = None
        self._asked, self._has_gone_back, self._num_passes = False, False, 0
        self._handle: Any = None
        self._fusion: Any = None  # of the layers that the plan is for

    def __reduce__(self) -> Any:
        """A copy of a model finds a plan of its own."""
        return type(self), (self.choice,)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: a batch is about to run."""
        shape = _shape_of(args, kwargs)
        if shape is None or not model.training or not torch.is_grad_enabled():
            return
        if part_of(model, PlanGiven) is not None:
            return
        self._num_passes += 1
        if self.budget is not None and self._fusion is not fusion_of(model):
            self._forget()  # the plan is of layers that are gone: the model was fused or restored meanwhile
        if self.budget is None:
            self._begin(model, shape)
            return
        if self._has_gone_back:
            self.budget.end_step()
        self.budget.grow(shape[0] * shape[1])

    def _begin(self, model: nn.Module, shape: tuple[int, int]) -> None:
        """Plan for the first batch, of (sequences, tokens)."""
        if self._asked:
            return
        self._asked = True
        self._fusion = fusion_of(model)
        conversion = conversion_of(model)
        self.budget = made_budget(
            model,
            self.choice,
            recipe=None if conversion is None else conversion.recipe,
            lora=_lora_of(model),
            batch=shape,
        )
        if self.budget is None:
            return
        logger.warning(self.budget.notes[0])
        self.budget.begin(shape[0] * shape[1])
        decoder = _decoder_of(model)
        is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        if decoder is not None and "forward" not in vars(decoder) and is_alone:  # ranks may meet in a pass
            decoder.forward = _Repeated(decoder, self)
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if first is not None:  # the last to get its gradient
            self._handle = first.register_post_accumulate_grad_hook(self._gone_back)

    def _forget(self) -> None:
        """Plan anew, for this batch."""
        if self._handle is not None:
            self._handle.remove()
        self.budget, self._asked, self._has_gone_back = None, False, False

    def _gone_back(self, _: Tensor) -> None:
        """A trained tensor's hook, of any shape, for once."""
        self._has_gone_back = True
        self._handle.remove()

    def smaller(self, why: str) -> bool:
        """Memory ended in a forward pass: take the next smaller plan; False if there is none."""
        if self.budget is None or not self.budget.step_down(why, self._num_passes):
            return False
        logger.warning(self.budget.notes[-1])
        return True


class _Repeated:
    """A decoder's forward pass, repeated under a smaller plan where memory ends in it."""

    def __init__(self, decoder: nn.Module, plan: BatchPlan) -> None:
        self.decoder, self.plan = decoder, plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's own, with its arguments."""
        own = type(self.decoder).forward
        if self.plan.budget is None or not torch.is_grad_enabled():
            return own(self.decoder, *args, **kwargs)
        state = random_state()
        while True:
            try:
                return own(self.decoder, *args, **kwargs)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or not self.plan.smaller(first_sentence(error)):
                    raise
            # Here the error and its frames, which hold the pass's tensors, are gone.
            gc.collect()
            torch.cuda.empty_cache()
            set_random_state(state)


def plan_from_batches(model: nn.Module, choice: bool | float | str) -> None:
    """Let batches find a plan in any trainer, for "auto" and a number of GiB; else take such a hook out."""
    base: Any = unwrap(model)
    hooks = base._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
        del hooks[key]
        base._forward_pre_hooks_with_kwargs.pop(key, None)
    decoder = _decoder_of(base)
    if decoder is not None and isinstance(vars(decoder).get("forward"), _Repeated):
        del decoder.forward
    take_part(model, BatchPlan)
    take_part(model, PlanGiven)
    if isinstance(choice, bool) or choice == "unsloth":
        return
    plan = BatchPlan(choice)
    put_part(model, plan)
    base.register_forward_pre_hook(plan.before, with_kwargs=True)


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), BatchPlan)


def _decoder_of(base: Any) -> Any:
    """The module that computes hidden states for a model's head; None where it is the model itself."""
    decoder = getattr(base, str(getattr(base, "base_model_prefix", "")) or " ", None)
    return decoder if isinstance(decoder, nn.Module) and decoder is not base else None


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Sequences and tokens of each in a call's batch; None where it names neither ids nor embeddings."""
    ids = args[0] if args else kwargs.get("input_ids")
    rows = ids if isinstance(ids, Tensor) else kwargs.get("inputs_embeds")
    return (int(rows.shape[0]), int(rows.shape[1])) if isinstance(rows, Tensor) and rows.dim() > 1 else None


def _lora_of(model: Any) -> LoRA | None:
    """Adapters as a plan counts them: all linears, of the largest rank there is."""
    ranks = [int(getattr(config, "r", 0) or 0) for config in getattr(model, "peft_config", {}).values()]
    return LoRA(r=max(ranks)) if any(ranks) else None
