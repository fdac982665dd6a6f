"""A step that runs out of memory is repeated under a smaller plan, and nothing of it is lost.

The batches of one optimizer step, and the random state in which each began, are remembered until the step is
whole. When memory runs out, what the step has left behind is freed, gradients included, the memory plan
steps down, and all of its batches run again: same data, same random numbers, hence the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import TrainingStopped
from fewbits.models.plan.memory_budget import MemoryBudget
from fewbits.models.plan.memory_ends import first_sentence, is_out_of_memory, random_state, set_random_state
from fewbits.models.plan.memory_plan import GIB
from fewbits.training.data.collator import Batch

Pass = Callable[
    [Batch, Any], Tensor
]  # one forward and backward pass: batch and the step's token count to loss


@dataclass(frozen=True)
class _Begun:
    batch: Batch
    num_items: Any
    random: tuple[Tensor, list[Tensor]]


class Rerun:
    """Runs the passes of a step, as often as it takes."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.count = 0  # of passes that ran out of memory
        self._begun: list[_Begun] = []

    def run(self, once: Pass, batch: Batch, num_items: Any, *, step: int, last: bool) -> Tensor:
        """The loss of one batch, a scalar, its gradients added to those of the step's earlier batches.

        Args:
            once: runs forward and backward pass.
            batch: the model's inputs.
            num_items: trained tokens of the whole step.
            step: its number, for the note.
            last: the optimizer steps after this batch.

        Raises:
            TrainingStopped: the smallest plan does not fit.
        """
        self._begun.append(_Begun(batch, num_items, random_state()))
        todo, why = self._begun[-1:], ""
        while True:
            try:
                for begun in todo:
                    if why:
                        set_random_state(begun.random)
                    loss = once(dict(begun.batch), begun.num_items)
                break
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                why = first_sentence(error)
            # Here the error and its frames, which hold the step's tensors, are gone.
            self._step_down(why, step)
            todo = self._begun
        if last:
            self._begun = []
        return loss

    def _step_down(self, why: str, step: int) -> None:
        self.count += 1
        self.budget.release()
        if not self.budget.step_down(why, step):
            raise TrainingStopped(
                f"step {step} does not fit into memory ({why}), not even under the smallest plan"
                f" ({self.budget.plan.predicted.total / GIB:.2f} GiB predicted); take a smaller batch_size or"
                " max_seq_length, and gradient_accumulation to make up for it."
            )
