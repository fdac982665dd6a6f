"""A run up to its first step, with nothing written: everything that would stop it stops it here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fewbits.errors import BadInput
from fewbits.models.plan.memory_budget import OPTIMIZER_BYTES
from fewbits.models.plan.memory_plan import planner, static_of
from fewbits.recipes import Recipe
from fewbits.training.config import TrainConfig
from fewbits.training.data.sources import check_sources
from fewbits.training.preferences.run import stages
from fewbits.training.report.figures import duration
from fewbits.training.report.files import number, read_run
from fewbits.training.run import Run
from fewbits.training.run_folder.layout import RunFolder
from fewbits.training.setup.distribute import gather_ranks
from fewbits.training.setup.model_and_trainer import sequences_per_step, total_steps, uses_gpu
from fewbits.training.setup.record import device_of
from fewbits.training.setup.signals import StopRequest
from fewbits.words import counted, size


@dataclass(kw_only=True)
class Forecast:
    """What a run is expected to take.

    Attributes:
        steps: optimizer steps.
        tokens: that the run will read, padding aside; None where rows are made while it trains.
        memory: a sentence: predicted bytes at the peak of a step, or why there is no prediction.
        seconds: predicted, from the speed of another run; None without one.
        notes: sentences on how these came about.
    """

    steps: int
    tokens: int | None
    memory: str
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [counted(self.steps, "step")]
        if self.tokens is not None:
            lines[0] += f", {self.tokens:,} tokens"
        lines.append(self.memory)
        if self.seconds is not None:
            lines.append(f"time: about {duration(self.seconds)}")
        return "\n".join([*lines, *self.notes])


def dry_run(
    config: TrainConfig, *, console: Console | None = None, basis: str | None = None, resume: bool = False
) -> Forecast:
    """Check a run as `fewbits.training.run.train` would, load its model, make its first batch.

    Args:
        config: the run.
        console: where the data's lines and the receipt are shown; None: nowhere.
        basis: folder of an earlier run, whose tokens a second predict the time.
        resume: the run goes on in ``output_dir``, which may then hold it.

    Raises:
        BadInput, BadCheckpoint, SpecMismatch, Unsupported: what would stop the run.
    """
    console = console or Console(quiet=True)
    check_sources(config)
    ranks = gather_ranks(config, console, 0)
    if ranks.size > 1:
        raise BadInput(f"a dry run checks one process, and this one has {ranks.size}; start it alone.")
    folder = RunFolder(config.output_dir)
    folder.check(config, resume=resume or config.resume)
    folder.is_written = False
    run = stages(config, Run)(config, folder, console, ranks, StopRequest(ranks), resume=False)
    run.check()
    forecast = _of_rows(run) if isinstance(run, Run) else _of_preferences(run)
    if run.built.receipt:
        console.print(run.built.receipt, highlight=False, markup=False)
    if basis is None:
        forecast.notes.append("no time is predicted: --basis RUN takes the speed of an earlier run")
    elif forecast.tokens is not None:
        _predict_time(forecast, basis, device_of(run.built.model))
    return forecast


def _of_rows(run: Run) -> Forecast:
    config = run.config
    dataset, evaluation = run.datasets()
    collate = run.collator([dataset, *([] if evaluation is None else [evaluation])])
    collate([dataset[i] for i in range(min(config.batch_size, len(dataset)))])
    steps = total_steps(config, len(dataset))
    run.arguments(steps)  # refuses reporters that are not installed, and the like
    per_epoch = -(-len(dataset) // sequences_per_step(config))
    tokens = round(run.train_data.report.tokens * steps / per_epoch)
    budget = run.memory(dataset)
    batch = (config.batch_size, run.length if config.packing else dataset.longest())
    memory = budget.notes[0] if budget is not None else _memory(run, batch)
    return Forecast(steps=steps, tokens=tokens, memory=memory)


def _of_preferences(run: Any) -> Forecast:
    steps = total_steps(run.config, run.sequences())
    run.arguments(steps)
    memory = _memory(run, (run.config.batch_size, run.length))
    note = "memory is that of one sequence a row; methods that compare two take up to twice the activations"
    return Forecast(steps=steps, tokens=None, memory=memory, notes=[note])


def _memory(run: Any, batch: tuple[int, int]) -> str:
    """Where no budget is kept to, on a CPU above all: bytes by the same arithmetic, everything kept."""
    config, built = run.config, run.built
    model = built.model
    recipe = replace(built.recipe or Recipe(name="plain"), lora=built.lora)
    try:
        plans = planner(
            model.config.get_text_config().to_dict(),
            recipe,
            num_tokens=batch[0] * batch[1],
            sequence_length=batch[1],
            capability=(9, 0) if uses_gpu(config) else None,
            dtype_bytes=getattr(model, "dtype", next(model.parameters()).dtype).itemsize,
            is_fused=False,
            static=static_of(model, optimizer_bytes=OPTIMIZER_BYTES.get(config.optimizer, 8)),
        )
    except BadInput as error:
        return f"memory: no prediction for this model: {error}"
    predicted = plans.plan(1 << 62).predicted
    weights, dynamic = size(predicted.static.weights), size(predicted.dynamic)
    return (
        f"memory: {size(predicted.total)} predicted at the peak of a step ({weights} of weights, {dynamic}"
        " while it runs)"
    )


def _predict_time(forecast: Forecast, basis: str, device: str) -> None:
    data = read_run(Path(basis))
    tokens, seconds = number(data.run.get("tokens")), number(data.run.get("seconds"))
    if not tokens or not seconds:
        raise BadInput(f"{basis} has not ended, so it tells no speed; give a finished run.")
    forecast.seconds = (forecast.tokens or 0) / (tokens / seconds)
    forecast.notes.append(f"by the {tokens / seconds:,.0f} tokens/s of {basis}")
    measured = data.run.get("device")
    if measured != device:
        forecast.notes.append(f"that run was on another device, {measured}; this one would be on {device}")
