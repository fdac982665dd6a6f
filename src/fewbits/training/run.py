"""One training run from beginning to end: the run folder, the data, the model, the training, what remains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fewbits.models.plan.memory_budget import OPTIMIZER_BYTES, MemoryBudget, budget_for
from fewbits.training.checkpoints.folders import Progress, rotate, staged, step_of, write_atomic
from fewbits.training.checkpoints.manifest import Writers
from fewbits.training.checkpoints.model_state import read_weights
from fewbits.training.config import TrainConfig
from fewbits.training.config_values import parse_memory_budget
from fewbits.training.data.collator import Collator
from fewbits.training.data.examples import RowEncoder, Sample
from fewbits.training.data.mix import load_run_data, read_run_samples
from fewbits.training.data.packing import SequenceDataset
from fewbits.training.data.sources import check_sources
from fewbits.training.data.step_sampler import passes_of
from fewbits.training.data.token_data import TokenData
from fewbits.training.late_results import add_results
from fewbits.training.preferences.run import stages
from fewbits.training.ranks.watch import Watch
from fewbits.training.run_folder.killed import KILLED, note_if_killed
from fewbits.training.run_folder.layout import FullDisk, Recorded, RunFolder, now
from fewbits.training.run_folder.lock import RunLock
from fewbits.training.run_folder.resume import check_best, check_unchanged, resumable, weights_of
from fewbits.training.setup.distribute import (
    check_loaded,
    check_start,
    communication_of,
    gather_ranks,
    layout_for,
    load_distributed,
)
from fewbits.training.setup.images import check_images, look_of
from fewbits.training.setup.model_and_trainer import (
    check_vocabulary,
    load_model,
    load_tokenizer,
    max_positions,
    optimizer_class,
    reporters,
    sequence_length,
    sequences,
    sequences_per_step,
    set_rates,
    total_steps,
    training_arguments,
    uses_gpu,
)
from fewbits.training.setup.record import TrainResult, result_of
from fewbits.training.setup.samples import answer_all
from fewbits.training.setup.signals import StopRequest
from fewbits.training.setup.stages import Stages
from fewbits.training.step.graph import wants_graph

if TYPE_CHECKING:  # they import transformers, which a run does when it begins
    from fewbits.training.setup.callbacks import ProgressBar, Schedule
    from fewbits.training.step.trainer import Trainer


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    console: Console | None = None,
    launch: str | None = None,
    attempt: int = 0,
) -> TrainResult:
    """Train as the configuration says.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in ``output_dir``; without one, begin. A run that was killed
            and resumed ends with the weights of one that was not.
        console: where progress is shown; None: nowhere.
        launch: a name of the job that this process belongs to, the same after the job was requeued or its
            processes started again, and of no other job: such a process goes on in the folder that a process
            of its job has left on another machine. None: none is known.
        attempt: how often a launcher has started this process again; if it has, the run resumes.

    Returns:
        Where the results are, and the last figures.

    Raises:
        BadInput, BadCheckpoint, SpecMismatch, Unsupported: configuration, data or a folder are not usable.
        TrainingStopped: bad numbers or a full disk; the checkpoints before stay.
    """
    console = console or Console(quiet=True)
    resume = resume or config.resume
    check_sources(config)
    reporters(config)  # one that is not installed is told before a folder is made
    ranks = gather_ranks(config, console, attempt)
    if not ranks.leads:
        console = Console(quiet=True)
    tell = partial(console.print, highlight=False, markup=False)
    lock = RunLock(config.output_dir, launch=launch or ranks.launch, take_over=config.take_over, tell=tell)
    folder = RunFolder(config.output_dir, lock)
    folder.is_written = ranks.leads
    stop = StopRequest(ranks)
    with folder.lock, Recorded(folder), stop:
        with Watch(ranks, told=folder.note_end), FullDisk(folder):
            check_start(ranks, config, resume=resume)
            resume = resume or ranks.again
            if not ranks.led("run folder", lambda: _is_over(folder, config, tell, resume=resume)):
                run = stages(config, Run)(config, folder, console, ranks, stop, resume=resume)
                run.prepare()
                run.train()
                if stop.answer is None:
                    run.finish()
                    _report(folder, config)
            ranks.leave()
        if stop.answer is not None:
            stop.end(*run.reached)
    return replace(result_of(folder), leads=ranks.leads)


def _report(folder: RunFolder, config: TrainConfig) -> None:
    """The page of a run of any method, by the leader."""
    if config.report and folder.is_written:
        from fewbits.training.report.page import write_report

        folder.write(report=str(write_report(folder.path)))


def _is_over(folder: RunFolder, config: TrainConfig, tell: Callable[[str], None], *, resume: bool) -> bool:
    """Whether the folder holds this run, finished; another run is refused."""
    note_if_killed(folder.path)
    folder.check(config, resume=resume)
    if folder.path.is_dir():
        folder.lock.take()
    facts = folder.read() if resume else {}
    if facts.get("status") == KILLED:
        tell(f"{folder.path}: {facts.get('error')}")
    over = facts.get("status") == "finished" and not folder.prolonged(config)
    if over:
        folder.open(config, resume=True)
        add_results(folder, config, tell)
    return over


class Run(Stages):
    """The stages of a run with fewbits' own trainer."""

    eval: TokenData | None = None
    bar: ProgressBar | None = None

    def check(self) -> Mapping[str, str | None]:
        """All of `prepare` that writes nothing; hashes of the data by the name of their setting."""
        from transformers import set_seed

        config = self.config
        set_seed(config.seed)
        light = load_tokenizer(config)
        built = None if light else load_model(config)
        tokenizer, shapes = light or (built.tokenizer, built.model.config)  # type: ignore[union-attr]
        self.length = sequence_length(config, max_positions(shapes))
        self.layout = layout_for(config, self.ranks, shapes, (config.batch_size, self.length))
        passes_of(sequences_per_step(config), config.batch_size, self.layout.data_size)  # refuses too few
        if self.ranks.size > 1:
            self.console.print(str(self.layout), highlight=False)
        self.encoder = RowEncoder(tokenizer, config, self.length, look_of(shapes, tokenizer, config.model))
        self._read_data()
        self.built = built or load_distributed(config, self.layout)
        check_vocabulary(self.built.model, self.train_data)
        facts = {name: data.fingerprint() for name, data in self._data().items()}
        check_loaded(self.layout, {**facts, "max_seq_length": self.length}, self.built.model)
        return facts

    def _read_data(self) -> None:
        self.data = load_run_data(self.encoder)
        self.train_data, self.eval = self.data.train, self.data.eval
        self.sight = self.encoder.chat.sight
        check_images(self.config, list(self._data().values()), self.sight)
        for report in self.data.reports:
            self.console.print(str(report), highlight=False, markup=False)

    def _data(self) -> dict[str, TokenData]:
        both = {"train_data": self.train_data, "eval_data": self.eval}
        return {name: data for name, data in both.items() if data is not None}

    def open_folder(self, facts: Mapping[str, str | None]) -> None:
        """Begin or go on in the run folder."""
        for path in self.folder.missing():
            self.tell(f"{path} is missing, so what it would be compared with goes unseen on this resume.")
        self.folder.open(self.config, resume=self.resume)
        self.facts = {"eval_data": None, **facts, "weights": weights_of(self.config.model)}
        check_unchanged(self.folder, self.config, self.facts)

    def data_record(self) -> dict[str, Any]:
        """See `Stages.data_record`."""
        return {
            "train": asdict(self.train_data.report),
            "eval": None if self.eval is None else asdict(self.eval.report),
        }

    def train(self) -> None:
        """Samples, then the training itself, from the newest checkpoint if there is one."""
        from fewbits.training.setup.callbacks import Schedule, damaged_metrics
        from fewbits.training.step.optimized import OptimizedTrainer

        config, model = self.config, self.built.model
        earlier = resumable(self.folder, self.ranks, self.tell) if self.resume else []
        progress = Progress.load(earlier[-1]) if earlier else Progress()
        if earlier and (count := damaged_metrics(self.folder.metrics)):
            self.tell(f"{count} lines of {self.folder.metrics} cannot be read and are left out.")
        self._samples_before()
        dataset, evaluation = self.datasets()
        steps = total_steps(config, len(dataset))
        args = self.arguments(steps, resumed=bool(earlier))
        if self.layout.kind == "ddp":
            from fewbits.training.ranks.ddp import fit_ddp

            fit_ddp(args, model)
        keep_best = config.keep_best and evaluation is not None
        schedule = Schedule(
            progress,
            evaluates=evaluation is not None,
            keep_best=keep_best,
            patience=config.early_stopping_patience,
        )
        trainer = OptimizedTrainer(
            model=model,
            args=args,
            train_dataset=dataset,
            eval_dataset=evaluation,
            data_collator=self.collator([dataset, *([] if evaluation is None else [evaluation])]),
            callbacks=self._callbacks(schedule, progress),
            keep_checkpoints=config.keep_checkpoints,
            progress=progress,
            memory=self.memory(dataset),
            cuda_graph=self._uses_graph(),
            layout=self.layout,
            communication=communication_of(config, self.layout),
            per_step=sequences_per_step(config),
            optimizer_cls_and_kwargs=optimizer_class(config),
            asked_to_stop=self.stop,
        )
        trainer.set_rates = partial(set_rates, config)
        over = earlier and (progress.stopped_early or step_of(earlier[-1]) >= steps)
        if earlier and progress.stopped_early:
            self.tell(
                f"the run had stopped early at step {step_of(earlier[-1])}, where evaluations got no better,"
                " so it is not trained further; begin another one for more steps."
            )
        try:
            if over:
                read_weights(model, earlier[-1])
                trainer.state = type(trainer.state).load_from_json(str(earlier[-1] / "trainer_state.json"))
                # killed after its last checkpoint, before an older one was removed: remove it now
                if self.ranks.leads:
                    rotate(self.folder.checkpoints, config.keep_checkpoints, trainer.state.best_global_step)
            else:
                with self.stop.noted():
                    trainer.train(resume_from_checkpoint=str(earlier[-1]) if earlier else None)
        finally:
            if self.bar is not None:
                self.bar.close()
        self.reached = trainer.state.global_step, steps
        if self.stop.answer is None:
            self._end_record(trainer, progress, keep_best=keep_best)

    def datasets(self) -> tuple[SequenceDataset, SequenceDataset | None]:
        """The sequences to train on, and those to evaluate."""
        evaluation = None if self.eval is None else sequences(self.eval, self.config, self.length)
        return sequences(self.train_data, self.config, self.length), evaluation

    def arguments(self, steps: int, *, resumed: bool = False) -> Any:
        """The host's arguments for so many steps."""
        return training_arguments(
            self.config,
            self.folder.checkpoints,
            steps,
            evaluates=self.eval is not None,
            resumed=resumed,
            layout=self.layout,
        )

    def _callbacks(self, schedule: Schedule, progress: Progress) -> list[Any]:
        from fewbits.training.setup.callbacks import MetricsFile, ProgressBar, StillOurs

        if not self.ranks.leads:
            return [schedule]
        self.bar = ProgressBar(self.console, progress)
        return [StillOurs(self.folder.lock), schedule, MetricsFile(self.folder.metrics, progress), self.bar]

    def memory(self, dataset: SequenceDataset) -> MemoryBudget | None:
        """What the layers keep for the backward pass, for the largest batch that may come."""
        config, built = self.config, self.built
        memory = budget_for(
            built.model,
            parse_memory_budget(config.memory_budget),
            recipe=built.recipe,
            lora=built.lora,
            batch=(config.batch_size, self.length if config.packing else dataset.longest()),
            optimizer_bytes=OPTIMIZER_BYTES.get(config.optimizer, 8),
            agree=partial(self.ranks.exchange, "memory"),
        )
        if memory is not None:
            self.console.print(memory.notes[0], highlight=False)
        return memory

    def _uses_graph(self) -> bool:
        if self.config.cuda_graph == "auto" and self.layout.is_sharded:
            return False
        return wants_graph(
            self.config.cuda_graph,
            device=next(self.built.model.parameters()).device,
            hidden_size=self.built.model.config.get_text_config().hidden_size,
            fixed_shapes=self.config.packing,
        )

    def collator(self, datasets: list[SequenceDataset]) -> Collator:
        """Makes batches of these."""
        tokenizer, config = self.built.tokenizer, self.config
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        flash = "flash" in str(getattr(self.built.model.config, "_attn_implementation", ""))
        rows = max(dataset.most_rows() for dataset in datasets)
        return Collator(
            pad,
            packed=config.packing,
            flatten=flash,
            width=self.length if uses_gpu(config) else 0,  # a CPU would only compute more padding
            multiple_of=self.length if config.cuda_graph == "true" else 1,  # a graph is good for one shape
            segments=config.batch_size * (rows + 1) if self._uses_graph() else None,
            sight=self.sight,
        )

    def _end_record(self, trainer: Trainer, progress: Progress, *, keep_best: bool) -> None:
        state = trainer.state
        if keep_best and state.best_global_step and state.best_global_step != state.global_step:
            self._take_best(self.folder.checkpoints / f"checkpoint-{state.best_global_step}")
        self.folder.write(
            steps=state.global_step,
            tokens=progress.tokens,
            seconds=round(progress.seconds, 3),
            best_metric=state.best_metric,
            best_step=state.best_global_step if state.best_metric is not None else None,
            stopped_early=progress.stopped_early,
            memory=[] if trainer.memory is None else trainer.memory.notes,
            cuda_graph=None if trainer.graphed is None else str(trainer.graphed),
            communication=None if trainer.exchange is None else str(trainer.exchange),
        )

    def _take_best(self, best: Path) -> None:
        """End with the weights of the best checkpoint, unless somebody has removed it."""
        if not self.ranks.led("best", best.is_dir):
            note = f"the best weights, {best.name}, were removed: the run ends with its newest weights."
            self.folder.write(best_weights=note)
            self.tell(note)
            return
        check_best(best, self.folder, self.ranks, self.tell)
        read_weights(self.built.model, best)
        self.tell(f"the best weights are those of step {step_of(best)}")

    def _samples_before(self) -> None:
        if self.ranks.led("samples", self.folder.samples.is_file):
            return
        samples = [self.encoder.prompt(self._format(), prompt) for prompt in self.config.sample_prompts]
        if self.eval is not None and self.config.samples:
            rows = list(dict.fromkeys(e.row for e in self.eval.examples))[: self.config.samples]
            samples += read_run_samples(self.encoder, self.data, rows)
        answers = self._answers(samples)
        records = [{**sample, "before": text} for sample, text in zip(samples, answers, strict=True)]
        self._write_samples(records)

    def _write_samples(self, records: list[dict[str, Any]]) -> None:
        if self.ranks.leads:
            write_atomic(self.folder.samples, json.dumps(records, indent=1, ensure_ascii=False) + "\n")

    def _format(self) -> str:
        return self.train_data.report.format

    def _answers(self, samples: list[Sample]) -> list[str]:
        """By the leader; by all ranks where each holds a part of the model."""
        if not (self.ranks.leads or self.layout.is_sharded):
            return [""] * len(samples)
        limit = max_positions(self.built.model.config)
        return answer_all(
            self.built.model, self.encoder, samples, tokens=self.config.sample_tokens, limit=limit
        )

    def finish(self) -> None:
        """Sample answers, the adapter or model in final/, the merged model, the report."""
        samples = self.ranks.led("samples", self.folder.read_samples)
        for sample, text in zip(samples, self._answers(samples), strict=True):
            sample["after"] = text
        self._write_samples(samples)
        if self.layout.is_sharded:
            self._export()
        if not self.ranks.leads:
            return
        model = self._packed_if_qat()
        model.config.use_cache = True  # the host switched it off for training
        if not self.layout.is_sharded:
            self.save_final(model)
        if self.config.merge and hasattr(model, "peft_config"):
            model.save_pretrained_merged(self.folder.merged, self.built.tokenizer, overwrite=True)
        self.folder.write(status="finished", ended=now(), error=None)

    def _export(self) -> None:
        from fewbits.training.checkpoints.sharded import export

        self.built.model.config.use_cache = True
        ranks = self.ranks
        writers = Writers(ranks.rank, ranks.size, partial(ranks.exchange, "final's manifest"))
        with staged(self.folder.final, leader=ranks.leads, barrier=ranks.barrier, writers=writers) as folder:
            export(self.built.model, folder, self.built.tokenizer)

    def _packed_if_qat(self) -> Any:
        if self.built.recipe is None or self.built.recipe.qat is None:
            return self.built.model
        from fewbits.training.calibration.qat import convert_qat

        model, receipt = convert_qat(self.built.model)
        self.folder.write(receipt=f"{self.built.receipt}\n{receipt}")
        return model
