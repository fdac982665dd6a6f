"""The Hugging Face Trainer with exact resuming, evaluation by tokens, and a stop at the first bad number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fewbits.errors import TrainingStopped
from fewbits.training.checkpointing import PREFIX, Progress, load_weights, rotate, save_weights, staged
from fewbits.training.graph import GraphedStep
from fewbits.training.memory_budget import MemoryBudget
from fewbits.training.numbers import NumberCheck
from fewbits.training.packing import Batch, EpochSampler, count_trained
from fewbits.training.rerun import Pass, Rerun, first_sentence


class Trainer(transformers.Trainer):
    """Changes: the order of the data, what a checkpoint is, how an evaluation is averaged, when to stop.

    The loss stays the model's own, divided by the number of trained tokens of all accumulated batches.
    """

    def __init__(
        self,
        *args: Any,
        keep_checkpoints: int = 2,
        progress: Progress | None = None,
        memory: MemoryBudget | None = None,
        cuda_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        """Args: those of transformers.Trainer, and ours.

        Args:
            args: of transformers.Trainer.
            keep_checkpoints: how many stay beside the best one.
            progress: the counters to go on with.
            memory: the model's memory plan; a step that runs out of memory is repeated under a smaller one.
            cuda_graph: replay forward and backward passes as one CUDA graph, where batches have one shape.
            kwargs: of transformers.Trainer.
        """
        super().__init__(*args, **kwargs)
        self.memory, self.cuda_graph = memory, cuda_graph
        self.graphed: GraphedStep | None = None
        self.keep_checkpoints = keep_checkpoints
        self.progress = progress or Progress()
        self.order: EpochSampler | None = None
        self.control: Any
        self._seen: list[tuple[Tensor, list[list[int]]]] = []
        self._numbers = NumberCheck(self.model)
        self._rerun = Rerun(memory) if memory is not None and self.accelerator.num_processes == 1 else None
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
        last, step = self.accelerator.sync_gradients, self.state.global_step + 1
        if self.memory is not None:
            self.memory.begin(inputs["input_ids"].numel())

        once = self._pass_of(model)
        if self._rerun is not None:
            loss = self._rerun.run(once, inputs, num_items_in_batch, step=step, last=last)
        else:
            loss = once(inputs, num_items_in_batch)
        self._seen.append((loss, rows))
        if last:
            seen, self._seen = self._seen, []
            scaled = getattr(self.accelerator, "scaler", None) is not None
            self._numbers.see(seen, step, self.optimizer, scaled=scaled)
            if self.memory is not None:
                self.memory.end_step()
        return loss

    def _pass_of(self, model: nn.Module) -> Pass:
        """The host's forward and backward pass, as a graph where that was asked for."""

        def once(batch: Batch, num_items: Any) -> Tensor:
            loss: Tensor = super(Trainer, self).training_step(model, batch, num_items)
            return loss

        if not self.cuda_graph:
            return once
        if self.graphed is None:
            self.graphed = GraphedStep(once, model.parameters(), refuse=self._no_graph)
            if self.memory is not None:
                self.memory.target.on_change.append(self.graphed.reset)
        return self.graphed

    def _no_graph(self) -> str | None:
        """Why this run may not capture passes now."""
        if self.accelerator.num_processes > 1:
            return "there are several processes"
        if getattr(self.accelerator, "scaler", None) is not None:
            return "a gradient scaler changes its factor"
        if self.memory is not None and self.memory.plan.offloads:
            return "the memory plan keeps inputs on the host"
        return None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the host's; no bad number is left unseen, and memory that ran out has one sentence."""
        try:
            result = super().train(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise TrainingStopped(
                f"memory ran out after step {self.state.global_step} ({first_sentence(error)}); the"
                " checkpoints are whole: resume with a smaller memory_budget or batch_size."
            ) from error
        self._numbers.settle()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Nothing is logged of a step that was not sound; the host has waited for the device here already."""
        self._numbers.settle()
        super().log(logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean loss of all trained tokens, whatever their batches."""
        self._numbers.settle()
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
        self._numbers.settle()
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
