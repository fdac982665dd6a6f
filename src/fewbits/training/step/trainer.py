"""The Hugging Face Trainer with exact resuming, evaluation by tokens, and a stop at the first bad number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fewbits.decoder.fuse import load_scales, scales_of
from fewbits.errors import TrainingStopped
from fewbits.formats import Format
from fewbits.models.plan.memory_budget import MemoryBudget
from fewbits.models.plan.memory_ends import first_sentence
from fewbits.training.checkpoints.folders import (
    PREFIX,
    Progress,
    rotate,
    staged,
    trainable,
)
from fewbits.training.checkpoints.manifest import Writers
from fewbits.training.checkpoints.model_state import read_weights, write_weights
from fewbits.training.checkpoints.sharded import is_sharded_checkpoint
from fewbits.training.data.collator import Batch, count_trained
from fewbits.training.data.step_sampler import EpochSampler, StepBatches
from fewbits.training.plan.out_of_memory import Pass, Rerun
from fewbits.training.plan.parallel import Layout
from fewbits.training.ranks.averaging import GradientMean
from fewbits.training.step.bad_numbers import NumberCheck
from fewbits.training.step.graph import GraphedStep
from fewbits.training.step.saving import OPTIMIZER_FILE, SCHEDULER_FILE, SavingBeside


class Trainer(transformers.Trainer):
    """Changes: the order of the data, what a checkpoint is, how an evaluation is averaged, when to stop.

    The loss stays the model's own, divided by the number of trained tokens of all batches of a step, on all
    ranks: a step is the same on any number of them.
    """

    def __init__(
        self,
        *args: Any,
        keep_checkpoints: int = 2,
        progress: Progress | None = None,
        memory: MemoryBudget | None = None,
        cuda_graph: bool = False,
        layout: Layout | None = None,
        communication: Format | None = None,
        per_step: int | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
        **kwargs: Any,
    ) -> None:
        """Args: those of transformers.Trainer, and ours.

        Args:
            args: of transformers.Trainer.
            keep_checkpoints: how many stay beside the best one.
            progress: the counters to go on with.
            memory: the model's memory plan; a step that runs out of memory is repeated under a smaller one.
            cuda_graph: replay forward and backward passes as one CUDA graph, where batches have one shape.
            layout: how several processes share the model; None: each holds all of it.
            communication: the format in which gradients travel between processes.
            per_step: sequences of an optimizer step on all processes together; None: as the host counts them.
            asked_to_stop: whether this process was asked to; all then stop behind a checkpoint.
            kwargs: of transformers.Trainer.
        """
        super().__init__(*args, **kwargs)
        self.args.average_tokens_across_devices = False  # `get_batch_samples` has counted all ranks' tokens
        self.memory, self.cuda_graph, self.communication = memory, cuda_graph, communication
        self.layout, self.per_step = layout or self._plain_layout(), per_step
        self.graphed: GraphedStep | None = None
        self.exchange: Any = None  # a GradientExchange, once training has begun
        self.keep_checkpoints = keep_checkpoints
        self.progress = progress or Progress()
        self.batches: StepBatches
        self.order: EpochSampler | None = None
        self.control: Any
        self._seen: list[tuple[Tensor, list[list[int]]]] = []
        self._resumed: Path | None = None
        one = self.accelerator.num_processes == 1 and not self.layout.is_sharded
        self._saving = SavingBeside(is_possible=one)
        self._trained: list[nn.Parameter] = []
        self._token_ops = 0  # floating-point operations of one token
        self._numbers = NumberCheck(
            self.model,
            num_ranks=self.accelerator.num_processes,
            is_sharded=self.layout.is_sharded,
            exchange=partial(self.layout.ranks.exchange, "bad numbers"),
            stop_asked=asked_to_stop,
        )
        self._mean = GradientMean(self.model.parameters(), self.layout.data_size) if self._waits() else None
        alone = self.accelerator.num_processes == 1 or self._mean is not None
        self._rerun = Rerun(memory) if memory is not None and alone else None
        if memory is not None and not alone:
            memory.notes.append(
                "memory: a step that runs out of memory ends the run, for ranks that meet within a pass"
                " cannot repeat it."
            )
        self.remove_callback(transformers.PrinterCallback)
        self.add_callback(_EpochOrder(self))

    def _plain_layout(self) -> Layout:
        size = self.accelerator.num_processes
        kind = "one" if size == 1 else "ddp"
        return Layout(kind=kind, data_rank=self.accelerator.process_index, data_size=size)

    def _waits(self) -> bool:
        """Whether gradients are averaged after a step's last pass instead of during it."""
        small = hasattr(self.model, "peft_config") or self.cuda_graph
        return self.layout.kind == "ddp" and self.communication is None and small

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The host wraps in torch's DDP, where gradients are averaged during the pass."""
        alone = self.layout.kind == "one" and torch.distributed.is_initialized()
        if training and (alone or self._mean is not None or self.layout.is_sharded):
            # the host's mixed precision without its wrapper
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            return model
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
        return wrapped

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        self.order = EpochSampler(len(dataset), self.args.seed)
        return self.order

    def get_train_dataloader(self) -> Any:
        """This rank's share of each step; accelerate brings it to the device, and shares out nothing more."""
        args, layout = self.args, self.layout
        passes = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.batches = StepBatches(
            self._get_train_sampler(),
            per_step=self.per_step or passes * layout.data_size,
            batch_size=args.per_device_train_batch_size,
            rank=layout.data_rank,
            size=layout.data_size,
        )
        return self._loader(self.train_dataset, self.batches)

    def _loader(self, dataset: Any, batches: Any) -> Any:
        args = self.args
        loader = DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=self.accelerator.non_blocking,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The passes of a step, and what its loss is divided by, a scalar.

        That is the number of all ranks' trained tokens, which each rank knows; gradients are averaged over
        the ranks, so each divides by an even share of it.
        """
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        sequences = self.batches.of_step(self.state.global_step % self.batches.num_steps)
        self.progress.tokens += self.train_dataset.num_tokens(sequences)
        count, size = self.train_dataset.num_trained(sequences), self.layout.data_size
        dtype = torch.int64 if size == 1 else torch.float32
        return samples, torch.full((), count if size == 1 else count / size, dtype=dtype, device=device)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Only matrices decay; biases and norms are vectors."""
        return [name for name, p in model.named_parameters() if p.ndim >= 2]

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass: its loss, a scalar; before a step, all of it must be sound."""
        rows = inputs.pop("rows", [])
        inputs.pop("num_tokens", None)
        last, step = self.accelerator.sync_gradients, self.state.global_step + 1
        torch.manual_seed(self.batches.seed_of(step, len(self._seen)))
        if self.memory is not None:
            self.memory.begin(inputs["input_ids"].numel())

        once = self._pass_of(model)
        if self._rerun is not None:
            loss = self._rerun.run(once, inputs, num_items_in_batch, step=step, last=last)
        else:
            loss = once(inputs, num_items_in_batch)
        self._seen.append((loss, rows))
        if last:
            if self._mean is not None:
                self._mean()
            batches, self._seen = self._seen, []
            scaled = getattr(self.accelerator, "scaler", None) is not None
            self._numbers.see(batches, step, self.optimizer, scaled=scaled)
            if self.memory is not None:
                self.memory.end_step()
        return loss

    def asked_to_stop(self) -> bool:
        """Whether the run ends behind this step, with a checkpoint, because a signal came to some rank."""
        return self._numbers.asked_to_stop()

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
        if self.accelerator.num_processes > 1 and self._mean is None:
            return "several processes meet within a pass"
        if getattr(self.accelerator, "scaler", None) is not None:
            return "a gradient scaler changes its factor"
        if self.memory is not None and self.memory.plan.offloads:
            return "the memory plan keeps inputs on the host"
        return None

    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the host's; no bad number is left unseen, and memory that ran out has one sentence."""
        self._resumed = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise TrainingStopped(
                f"memory ran out after step {self.state.global_step} ({first_sentence(error)}); the"
                " checkpoints are whole: resume with a smaller memory_budget or batch_size."
            ) from error
        finally:
            self._saving.wait()
        self._numbers.settle()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Nothing is logged of a step that was not sound; the host has waited for the device here already."""
        self._numbers.settle()
        super().log(logs, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """All sequences in their order, shared out like a step's."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        layout = self.layout
        batches = StepBatches(
            _InOrder(len(dataset)),
            per_step=self.args.per_device_eval_batch_size * layout.data_size,
            batch_size=self.args.per_device_eval_batch_size,
            rank=layout.data_rank,
            size=layout.data_size,
        )
        return self._loader(dataset, batches)

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
            part = torch.where(count > 0, loss.double() * count, 0.0)  # a rank without a batch has no token
            total += torch.stack([part, count.double()])
        total = self.accelerator.gather(total).view(-1, 2).sum(0)
        metrics = {f"{metric_key_prefix}_loss": float(total[0] / total[1])}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Write a checkpoint: of adapters beside the training, else before the next step."""
        self._numbers.settle()
        self._saving.wait()
        self.store_flos()
        self._share_scales()
        folder = Path(self.args.output_dir)
        final = folder / f"{PREFIX}{self.state.global_step}"
        ranks = self.layout.ranks
        with ExitStack() as stack:
            stack.enter_context(self._rotated(folder, self.state.best_global_step))
            writers = Writers(ranks.rank, ranks.size, partial(ranks.exchange, "manifest"))
            wait, leads = self.accelerator.wait_for_everyone, self.args.should_save
            staging = stack.enter_context(staged(final, leader=leads, barrier=wait, writers=writers))
            self._save_rng_state(str(staging))
            self._save_scaler(str(staging))
            if self.exchange is not None:
                self.exchange.save(staging)
            if self.args.should_save:
                self.progress.save(staging)
                self.state.save_to_json(str(staging / "trainer_state.json"))
            model = self._plain_model()
            trained = trainable(model)
            if self._saving.takes(model, trained, self.optimizer):
                torch.save(self.lr_scheduler.state_dict(), staging / SCHEDULER_FILE)
                rest = stack.pop_all()
                self._saving.begin(model, trained, self.optimizer, staging=staging, rest=rest)
            else:
                self._save_optimizer_and_scheduler(str(staging))
                write_weights(model, staging, self.optimizer, leads=self.args.should_save)

    @contextmanager
    def _rotated(self, folder: Path, best_step: int | None) -> Iterator[None]:
        """Remove older checkpoints once what stands inside has ended well."""
        yield
        if self.args.should_save:
            rotate(folder, self.keep_checkpoints, best_step)

    def reserve_memory(self) -> None:
        """After a run's first step: what checkpoints on a GPU's host will need is locked in a thread."""
        if self.args.save_strategy != "no" and self.args.device.type == "cuda":
            self._saving.reserve(self._plain_model(), self.optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.layout.is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:  # the optimizer's shares are written with the weights'
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        read_weights(self._plain_model(), Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        several_cpus = self.args.device.type == "cpu" and self.args.world_size > 1
        shards = checkpoint is not None and (
            self.layout.is_sharded or is_sharded_checkpoint(Path(checkpoint))
        )
        if checkpoint is None or not (shards or several_cpus):
            super()._load_optimizer_and_scheduler(checkpoint)
            self._take_schedule()
            return
        if shards:
            read_weights(self._plain_model(), Path(checkpoint), self.optimizer)
        else:  # the base class loads to "cpu:0", which torch 2.11 knows no way to
            state = torch.load(Path(checkpoint) / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True))
        self._take_schedule()

    def _take_schedule(self) -> None:
        """A prolonged run has another schedule than the one whose learning rates were stored."""
        schedule, where = self.lr_scheduler, getattr(self.lr_scheduler, "last_epoch", 0)
        rules = zip(getattr(schedule, "lr_lambdas", ()), getattr(schedule, "base_lrs", ()), strict=False)
        for group, (rule, base) in zip(self.optimizer.param_groups, rules, strict=False):
            rate = base * rule(where)
            if not isinstance(group["lr"], Tensor) and not math.isclose(group["lr"], rate, rel_tol=1e-9):
                group["lr"] = rate
                schedule._last_lr = [g["lr"] for g in self.optimizer.param_groups]  # what is logged

    def _plain_model(self) -> Any:
        if self.accelerator.num_processes == 1:  # nothing is wrapped, which accelerate walks to find
            return self.model
        return self.accelerator.unwrap_model(self.model)

    def _share_scales(self) -> None:
        """Ranks record float8 scales of their own; from a checkpoint on, all go on with the largest."""
        scales = scales_of(self.model) if self.layout.kind == "ddp" else {}
        for name in sorted(scales):
            there = scales[name].to(self.args.device)
            torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX)
            scales[name] = there.cpu()
        if scales:
            load_scales(self.model, scales)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.get_tp_size() > 1:  # some gradients are whole on the ranks of a layer, some are cut
            from fewbits.training.ranks.tensor_parallel import clip_grad_norm

            return clip_grad_norm(model, self.args.max_grad_norm or float("inf"))
        if self.layout.kind in ("one", "ddp"):
            return self.accelerator.clip_grad_norm_(self._stepped(), self.args.max_grad_norm)
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _stepped(self) -> list[nn.Parameter]:
        """What the optimizer steps, in the model's order; a packed model has thousands of others."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if len(self._trained) != count:
            self._trained = [p for p in self.model.parameters() if p.requires_grad]
        return self._trained

    def floating_point_ops(self, inputs: Batch) -> int:
        """As the host's, which counts the parameters anew for each pass."""
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        if tokens and not self._token_ops:
            self._token_ops = int(super().floating_point_ops(inputs)) // tokens
        return self._token_ops * tokens

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.get_tp_size() > 1:
            grad_norm = self._clip_grad_norm(model)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def get_tp_size(self) -> int:
        """Ranks that see the same data."""
        return int(self.accelerator.num_processes) // self.layout.data_size

    def _ranks_per_machine(self) -> int:
        """Where there are several machines, with as many ranks each; they add up among themselves first."""
        ranks = self.layout.ranks
        hosts = ranks.exchange("hosts", ranks.host)
        counts = {hosts.count(host) for host in hosts}
        return counts.pop() if len(set(hosts)) > 1 and len(counts) == 1 else 1

    def begin_communication(self) -> None:
        """Gradients travel in few bits from here on, where that was asked for and there are other ranks."""
        if self.communication is None or self.layout.data_size == 1:
            return
        if self.layout.kind == "ddp":
            from fewbits.training.ranks.ddp import quantize_gradients

            self.exchange = quantize_gradients(
                self.model_wrapped,
                self.communication,
                seed=self.args.seed,
                timeout=self.args.ddp_timeout_delta,
                node_size=self._ranks_per_machine(),
            )
        else:
            from fewbits.training.ranks.fsdp_communication import quantize_reduce_scatter

            self.exchange = quantize_reduce_scatter(self.model, self.communication, seed=self.args.seed)
        if self._resumed is not None:
            self.exchange.load(self._resumed)


class _InOrder(EpochSampler):
    """The sequences as they come."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0)

    def order(self, epoch: int) -> list[int]:
        """The same in each epoch."""
        return list(range(self.size))


class _EpochOrder(transformers.TrainerCallback):
    """Tells the sampler the epoch, also where accelerate has wrapped it; begins with few bits on the way.

    Epochs are counted in steps, which are the same on any number of ranks; the host counts passes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.is_first_step = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_communication()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step / self.trainer.batches.num_steps
        if self.is_first_step:
            self.is_first_step = False
            self.trainer.reserve_memory()
        if self.trainer.asked_to_stop():
            control.should_log = control.should_save = control.should_training_stop = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.order is not None:
            self.trainer.order.set_epoch(int(state.epoch or 0))
