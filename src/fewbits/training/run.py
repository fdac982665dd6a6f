"""One training run from beginning to end: the run folder, the data, the model, the training, what remains."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

import fewbits
from fewbits.errors import BadInput, SpecMismatch, TrainingStopped
from fewbits.models.checkpoint import is_disk_full
from fewbits.training.build import (
    Built,
    check_vocabulary,
    count_weights,
    load_model,
    load_tokenizer,
    max_positions,
    optimizer_class,
    sequence_length,
    sequences,
    total_steps,
    training_arguments,
    uses_gpu,
)
from fewbits.training.checkpointing import (
    Progress,
    checkpoints,
    load_weights,
    remove_leftovers,
    rotate,
    staged,
    step_of,
    write_atomic,
)
from fewbits.training.config import TrainConfig, parse_memory_budget
from fewbits.training.data import RowEncoder, TokenData, load_data, read_samples, split_rows
from fewbits.training.graph import wants_graph
from fewbits.training.memory_budget import OPTIMIZER_BYTES, MemoryBudget, budget_for
from fewbits.training.packing import Collator, SequenceDataset
from fewbits.training.samples import answer_all

if TYPE_CHECKING:  # they import transformers, which a run does when it begins
    from fewbits.training.callbacks import ProgressBar
    from fewbits.training.trainer import Trainer


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    output_dir: Path
    final: Path  # the adapter or the model
    steps: int
    tokens: int
    seconds: float
    metrics: dict[str, Any]  # the newest of each of metrics.jsonl's numbers
    best_metric: float | None = None  # the lowest evaluation loss
    best_step: int | None = None
    stopped_early: bool = False
    merged: Path | None = None
    report: Path | None = None


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.run = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.json"
        self.checkpoints = self.path / "checkpoints"
        self.final = self.path / "final"
        self.merged = self.path / "merged"
        self.is_ours = False  # until `open` has found that the folder may be written to

    def check(self, config: TrainConfig, *, resume: bool) -> None:
        """Refuse a folder that holds another run; writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"output_dir {self.path} is a file; choose another name.")
        held = any(
            path.exists() for path in (self.config, self.run, self.metrics, self.checkpoints, self.final)
        )
        if held and not resume:
            raise BadInput(
                f"output_dir {self.path} holds another run; choose another one, or go on with that run with"
                " resume."
            )
        if held and self.config.is_file():
            changed = config.differences(TrainConfig.from_yaml(self.config))
            if changed:
                raise BadInput(
                    f"output_dir {self.path} holds another run, with another {', '.join(changed)}; choose"
                    " another output_dir, or resume with the configuration in its config.yaml."
                )

    def open(self, config: TrainConfig, *, resume: bool) -> None:
        """Begin a run here, or go on with the same one; another run's folder is refused."""
        self.check(config, resume=resume)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
        write_atomic(self.config, config.to_yaml())
        self.is_ours = True

    def read(self) -> dict[str, Any]:
        """What run.json says so far."""
        return json.loads(self.run.read_text(encoding="utf-8")) if self.run.is_file() else {}

    def write(self, **facts: Any) -> None:
        """Add facts to run.json."""
        write_atomic(self.run, json.dumps({**self.read(), **facts}, indent=1, default=str) + "\n")


def train(config: TrainConfig, *, resume: bool = False, console: Console | None = None) -> TrainResult:
    """Train as the configuration says.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in ``output_dir``; without one, begin. A run that was killed
            and resumed ends with the weights of one that was not.
        console: where progress is shown; None: nowhere.

    Returns:
        Where the results are, and the last figures.

    Raises:
        BadInput, BadCheckpoint, SpecMismatch, Unsupported: configuration, data or a folder are not usable.
        TrainingStopped: bad numbers or a full disk; the checkpoints before stay.
    """
    console = console or Console(quiet=True)
    resume = resume or config.resume
    folder = RunFolder(config.output_dir)
    _check_paths(config)
    folder.check(config, resume=resume)
    if resume and folder.read().get("status") == "finished":
        folder.open(config, resume=True)
        return _result(folder)
    run = _Run(config, folder, console, resume=resume)
    with _Recorded(folder):
        run.prepare()
        run.train()
        run.finish()
    return _result(folder)


def _check_paths(config: TrainConfig) -> None:
    for path in (config.train_data, config.eval_data):
        if path is not None and not Path(path).exists():
            raise BadInput(f"there is no data file {path}; check the path.")


class _Recorded:
    """Notes in run.json how a run ended that did not end well; a full disk gets its sentence."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        try:
            if self.folder.is_ours and self.folder.run.is_file():
                self.folder.write(status="stopped", ended=_now(), error=f"{type(error).__name__}: {error}")
        except OSError as second:
            if not is_disk_full(second):
                raise
        if is_disk_full(error) and not isinstance(error, TrainingStopped):
            raise TrainingStopped(
                f"the disk is full, so {self.folder.path} cannot be written to; the checkpoints there are"
                " whole: make room, then go on with resume."
            ) from error


class _Run:
    """The stages of a run and what they hand on."""

    def __init__(self, config: TrainConfig, folder: RunFolder, console: Console, *, resume: bool) -> None:
        self.config = config
        self.folder = folder
        self.console = console
        self.resume = resume
        self.built: Built
        self.eval: TokenData | None = None
        self.bar: ProgressBar | None = None

    def prepare(self) -> None:
        """Read the data, then load the model; nothing is written before both are known to be good."""
        from transformers import set_seed

        config = self.config
        set_seed(config.seed)
        light = load_tokenizer(config)
        built = None if light else load_model(config)
        tokenizer, limit = light or (built.tokenizer, max_positions(built.model.config))  # type: ignore[union-attr]
        self.length = sequence_length(config, limit)
        self.encoder = RowEncoder(tokenizer, config, self.length)
        self.train_data = load_data(config.train_data, self.encoder)
        if config.eval_data is not None:
            self.eval = load_data(
                config.eval_data, self.encoder, splits=("validation", "test", "eval", "train")
            )
        elif config.eval_fraction:
            self.train_data, self.eval = split_rows(self.train_data, config.eval_fraction, config.seed)
        for data in (self.train_data, self.eval):
            if data is not None:
                self.console.print(str(data.report), highlight=False)
        self.built = built or load_model(config)
        check_vocabulary(self.built.model, self.train_data)
        self.folder.open(config, resume=self.resume)
        self._begin_record()

    def _begin_record(self) -> None:
        fingerprint = self.train_data.fingerprint()
        earlier = self.folder.read().get("data", {}).get("fingerprint")
        if earlier is not None and earlier != fingerprint:
            raise SpecMismatch(
                f"{self.config.train_data} or its tokenizer has changed since the run in {self.folder.path}"
                " began; bring back the old data, or begin in another output_dir."
            )
        model = self.built.model
        self.folder.write(
            status="running",
            error=None,
            started=self.folder.read().get("started", _now()),
            versions=_versions(),
            device=_device(model),
            model=self.config.model,
            recipe=_recipe_config(self.built),
            lora=None if self.built.lora is None else asdict(self.built.lora),
            receipt=self.built.receipt,
            parameters=count_weights(model),
            data={
                "fingerprint": fingerprint,
                "max_seq_length": self.length,
                "train": asdict(self.train_data.report),
                "eval": None if self.eval is None else asdict(self.eval.report),
            },
        )
        if self.built.receipt:
            self.console.print(self.built.receipt, highlight=False, markup=False)

    def train(self) -> None:
        """Samples, then the training itself, from the newest checkpoint if there is one."""
        from fewbits.training.callbacks import MetricsFile, ProgressBar, Schedule
        from fewbits.training.trainer import Trainer

        config, model = self.config, self.built.model
        found = checkpoints(self.folder.checkpoints) if self.resume else []
        progress = Progress.load(found[-1]) if found else Progress()
        self._samples_before(needs_base=bool(found))
        dataset = sequences(self.train_data, config, self.length)
        evaluation = None if self.eval is None else sequences(self.eval, config, self.length)
        steps = total_steps(config, len(dataset))
        args = training_arguments(
            config, self.folder.checkpoints, steps, evaluates=evaluation is not None, resumed=bool(found)
        )
        keep_best = config.keep_best and evaluation is not None
        schedule = Schedule(
            progress,
            evaluates=evaluation is not None,
            keep_best=keep_best,
            patience=config.early_stopping_patience,
        )
        self.bar = ProgressBar(self.console, progress)
        memory = self._memory(dataset)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=dataset,
            eval_dataset=evaluation,
            data_collator=self._collator([dataset, *([] if evaluation is None else [evaluation])]),
            callbacks=[schedule, MetricsFile(self.folder.metrics, progress), self.bar],
            keep_checkpoints=config.keep_checkpoints,
            progress=progress,
            memory=memory,
            cuda_graph=self._uses_graph(),
            optimizer_cls_and_kwargs=optimizer_class(config),
        )
        over = found and (progress.stopped_early or step_of(found[-1]) >= steps)
        try:
            if over:
                load_weights(model, found[-1])
                trainer.state = type(trainer.state).load_from_json(str(found[-1] / "trainer_state.json"))
                # killed after its last checkpoint, before an older one was removed: remove it now
                rotate(self.folder.checkpoints, config.keep_checkpoints, trainer.state.best_global_step)
            else:
                trainer.train(resume_from_checkpoint=str(found[-1]) if found else None)
        finally:
            self.bar.close()
        self._end_record(trainer, progress, keep_best=keep_best)

    def _memory(self, dataset: SequenceDataset) -> MemoryBudget | None:
        """What the layers keep for the backward pass, for the largest batch that may come."""
        config, built = self.config, self.built
        memory = budget_for(
            built.model,
            parse_memory_budget(config.memory_budget),
            recipe=built.recipe,
            lora=built.lora,
            batch=(config.batch_size, self.length if config.packing else dataset.longest()),
            optimizer_bytes=OPTIMIZER_BYTES.get(config.optimizer, 8),
        )
        if memory is not None:
            self.console.print(memory.notes[0], highlight=False)
        return memory

    def _uses_graph(self) -> bool:
        return wants_graph(
            self.config.cuda_graph,
            device=next(self.built.model.parameters()).device,
            hidden_size=self.built.model.config.get_text_config().hidden_size,
            fixed_shapes=self.config.packing,
        )

    def _collator(self, datasets: list[SequenceDataset]) -> Collator:
        tokenizer, config = self.built.tokenizer, self.config
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        flash = "flash" in str(getattr(self.built.model.config, "_attn_implementation", ""))
        graphed = self._uses_graph()
        rows = max(dataset.most_rows() for dataset in datasets)
        return Collator(
            pad,
            packed=config.packing,
            flatten=flash,
            width=self.length if uses_gpu(config) else 0,  # a CPU would only compute more padding
            multiple_of=self.length if config.cuda_graph == "true" else 1,  # a graph is good for one shape
            segments=config.batch_size * (rows + 1) if graphed else None,
        )

    def _end_record(self, trainer: Trainer, progress: Progress, *, keep_best: bool) -> None:
        state = trainer.state
        if keep_best and state.best_global_step and state.best_global_step != state.global_step:
            best = self.folder.checkpoints / f"checkpoint-{state.best_global_step}"
            load_weights(self.built.model, best)
            self.console.print(
                f"the best weights are those of step {state.best_global_step}", highlight=False
            )
        self.folder.write(
            steps=state.global_step,
            tokens=progress.tokens,
            seconds=round(progress.seconds, 3),
            best_metric=state.best_metric,
            best_step=state.best_global_step if state.best_metric is not None else None,
            stopped_early=progress.stopped_early,
            memory=[] if trainer.memory is None else trainer.memory.notes,
            cuda_graph=None if trainer.graphed is None else str(trainer.graphed),
        )

    def _samples_before(self, *, needs_base: bool) -> None:
        if self.folder.samples.is_file():
            return
        samples = [self.encoder.prompt(self._format(), prompt) for prompt in self.config.sample_prompts]
        if self.eval is not None and self.config.samples:
            path = self.config.eval_data or self.config.train_data
            splits = ("validation", "test", "eval", "train") if self.config.eval_data else ("train",)
            rows = list(dict.fromkeys(e.row for e in self.eval.examples))[: self.config.samples]
            samples += read_samples(path, self.encoder, rows, self._format(), splits=splits)
        answers = self._answers([sample["prompt"] for sample in samples])
        records = [{**sample, "before": text} for sample, text in zip(samples, answers, strict=True)]
        write_atomic(self.folder.samples, json.dumps(records, indent=1, ensure_ascii=False) + "\n")

    def _format(self) -> str:
        return self.train_data.report.format

    def _answers(self, prompts: list[str]) -> list[str]:
        limit = max_positions(self.built.model.config)
        return answer_all(
            self.built.model, self.encoder, prompts, tokens=self.config.sample_tokens, limit=limit
        )

    def finish(self) -> None:
        """Sample answers, the adapter or model in final/, the merged model, the report."""
        samples = json.loads(self.folder.samples.read_text(encoding="utf-8"))
        for sample, text in zip(samples, self._answers([s["prompt"] for s in samples]), strict=True):
            sample["after"] = text
        write_atomic(self.folder.samples, json.dumps(samples, indent=1, ensure_ascii=False) + "\n")
        model = self._packed_if_qat()
        model.config.use_cache = True  # the host switched it off for training
        with staged(self.folder.final) as folder:
            model.save_pretrained(str(folder))
            self.built.tokenizer.save_pretrained(str(folder))
        if self.config.merge and hasattr(model, "peft_config"):
            model.save_pretrained_merged(self.folder.merged, self.built.tokenizer)
        self.folder.write(status="finished", ended=_now(), error=None)
        if self.config.report:
            from fewbits.training.report import write_report

            self.folder.write(report=str(write_report(self.folder.path)))

    def _packed_if_qat(self) -> Any:
        if self.built.recipe is None or self.built.recipe.qat is None:
            return self.built.model
        from fewbits.training.qat import convert_qat

        model, receipt = convert_qat(self.built.model)
        self.folder.write(receipt=f"{self.built.receipt}\n{receipt}")
        return model


def _result(folder: RunFolder) -> TrainResult:
    from fewbits.training.callbacks import read_metrics

    facts = folder.read()
    metrics: dict[str, Any] = {}
    for record in read_metrics(folder.metrics):
        metrics |= record
    report = facts.get("report")
    return TrainResult(
        output_dir=folder.path,
        final=folder.final,
        steps=facts["steps"],
        tokens=facts["tokens"],
        seconds=facts["seconds"],
        metrics=metrics,
        best_metric=facts["best_metric"],
        best_step=facts["best_step"],
        stopped_early=facts["stopped_early"],
        merged=folder.merged if folder.merged.is_dir() else None,
        report=Path(report) if report else None,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    import peft
    import transformers

    return {
        "fewbits": fewbits.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
    }


def _device(model: Any) -> str:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} threads ({platform.machine()}, {sys.platform})"


def _recipe_config(built: Built) -> Any:
    from fewbits.recipes import recipe_to_config

    return None if built.recipe is None else recipe_to_config(replace(built.recipe, lora=built.lora))
