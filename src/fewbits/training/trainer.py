"""The Hugging Face Trainer with exact resuming, evaluation by tokens, and a stop at the first bad number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fewbits.errors import TrainingStopped
from fewbits.training.checkpointing import PREFIX, Progress, load_weights, rotate, save_weights, staged
from fewbits.training.packing import Batch, EpochSampler, count_trained


class Trainer(transformers.Trainer):
    """Changes: the order of the data, what a checkpoint is, how an evaluation is averaged, when to stop.

    The loss stays the model's own, divided by the number of trained tokens of all accumulated batches.
    """

    def __init__(
        self, *args: Any, keep_checkpoints: int = 2, progress: Progress | None = None, **kwargs: Any
    ) -> None:
        """Args: those of transformers.Trainer, how many checkpoints to keep, the counters to go on with."""
        super().__init__(*args, **kwargs)
        self.keep_checkpoints = keep_checkpoints
        self.progress = progress or Progress()
        self.order: EpochSampler | None = None
        self.control: Any
        self._seen: list[tuple[Tensor, list[list[int]]]] = []
        self.remove_callback(transformers.PrinterCallback)
        self.add_callback(_EpochOrder(self))

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        self.order = EpochSampler(len(dataset), self.args.seed)
        return self.order

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Only matrices decay; biases and norms are vectors."""
        return [name for name, p in model.named_parameters() if p.ndim >= 2]

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass; before the optimizer steps, loss and gradients must be sound."""
        rows = inputs.pop("rows", [])
        self.progress.tokens += inputs.pop("num_tokens", 0)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._seen.append((loss, rows))
        if self.accelerator.sync_gradients:
            seen, self._seen = self._seen, []
            check_numbers(
                self.model,
                seen,
                self.state.global_step + 1,
                scaled=getattr(self.accelerator, "scaler", None) is not None,
            )
        return loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean loss of all trained tokens, whatever their batches."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in self.get_eval_dataloader(eval_dataset):
            batch.pop("rows", None)
            batch.pop("num_tokens", None)
            inputs = self._prepare_inputs(batch)
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.model(**inputs).loss
            count = count_trained(inputs)
            total += torch.stack([loss.double() * count, count.double()])
        total = self.accelerator.gather(total).view(-1, 2).sum(0)
        metrics = {f"{metric_key_prefix}_loss": float(total[0] / total[1])}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        self.store_flos()
        folder = Path(self.args.output_dir)
        final = folder / f"{PREFIX}{self.state.global_step}"
        with staged(
            final, leader=self.args.should_save, barrier=self.accelerator.wait_for_everyone
        ) as staging:
            self._save_rng_state(str(staging))
            self._save_optimizer_and_scheduler(str(staging))
            self._save_scaler(str(staging))
            if self.args.should_save:
                save_weights(self.accelerator.unwrap_model(self.model), staging)
                self.progress.save(staging)
                self.state.save_to_json(str(staging / "trainer_state.json"))
        if self.args.should_save:
            rotate(folder, self.keep_checkpoints, self.state.best_global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_weights(self.accelerator.unwrap_model(self.model), Path(resume_from_checkpoint))


class _EpochOrder(transformers.TrainerCallback):
    """Tells the sampler the epoch, also where accelerate has wrapped it to skip batches."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.order is not None:
            self.trainer.order.set_epoch(int(state.epoch or 0))


def check_numbers(
    model: nn.Module, seen: list[tuple[Tensor, list[list[int]]]], step: int, *, scaled: bool = False
) -> None:
    """Raise TrainingStopped unless the losses are finite and the gradients finite and not all zero.

    Args:
        model: the model, after the backward passes of one step and before clipping.
        seen: loss and rows of each accumulated batch.
        step: for the message.
        scaled: a gradient scaler is at work, which itself skips steps that overflow.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    losses = torch.stack([loss.float().mean() for loss, _ in seen])
    norm = (
        torch.stack([g.float() for g in torch._foreach_norm(gradients)]).norm()
        if gradients
        else losses.new_zeros(())
    )
    sound = torch.stack([losses.isfinite().all().float(), norm])
    losses_are_finite, size = sound.tolist()  # the one wait for the device
    if losses_are_finite and (scaled or 0 < size < float("inf")):
        return
    if not losses_are_finite:
        loss, rows = next((loss, rows) for loss, rows in seen if not loss.isfinite().all())
        raise TrainingStopped(
            f"the loss became {float(loss)} at step {step} on rows {_numbers(rows)} of the training data"
            f"{_first_bad_weight(model)}; no weight was changed by it: look at these rows, lower the learning"
            " rate, or resume from the last checkpoint."
        )
    rows_of_step = [group for _, rows in seen for group in rows]
    if size == 0:
        raise TrainingStopped(
            f"all gradients are zero at step {step} ({len(gradients)} parameters with a gradient), so"
            f" nothing would be learned from rows {_numbers(rows_of_step)}; check that the trained layers are"
            " part of the forward pass."
        )
    name = next(n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all())
    raise TrainingStopped(
        f"the gradient of {name} is not finite at step {step} on rows {_numbers(rows_of_step)} of the"
        " training data; no weight was changed by it: lower the learning rate, or resume from the last"
        " checkpoint."
    )


def _first_bad_weight(model: nn.Module) -> str:
    for name, p in model.named_parameters():
        if p.is_floating_point() and not p.isfinite().all():
            return f", and {name} already holds a number that is not finite"
    return ""


def _numbers(rows: list[list[int]]) -> str:
    flat = sorted({number for group in rows for number in group})
    text = ", ".join(map(str, flat[:8]))
    return f"{text} and {len(flat) - 8} more" if len(flat) > 8 else text or "unknown"
