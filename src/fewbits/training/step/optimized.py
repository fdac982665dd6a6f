"""The trainer of a run, with what some optimizers need: rates of their own, weights that are averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fewbits.training.step.trainer import Trainer


class OptimizedTrainer(Trainer):
    """`Trainer` whose optimizer may have learning rates for some parameters, or no schedule.

    Attributes:
        set_rates: gives parameters of a new optimizer learning rates of their own, before schedules begin.
    """

    set_rates: Callable[[Any, nn.Module], None] | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The host's optimizer, with the learning rates that the run gives to some parameters."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*(() if model is None else (model,)))  # 5.0 takes no model
        if is_new and self.set_rates is not None:
            self.set_rates(optimizer, self.model if model is None else model)
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer`; the model ends with the weights that the optimizer is judged by."""
        result = super().train(*args, **kwargs)
        self._take_average()
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer`, of the weights that the optimizer is judged by."""
        self._take_average()
        return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        self._take_average()
        super()._save_checkpoint(model, trial)

    def _take_average(self) -> None:
        """Have an optimizer without a schedule put its average in place; its next step undoes it."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


__all__ = ["OptimizedTrainer"]
