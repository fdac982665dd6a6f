"""`fewbits demo`: a language model learns a task before your eyes, through the library's public paths only.

Score the packed base model, fine-tune adapters over it (QLoRA), score again, merge, reload with plain
transformers, score that too, and leave the run folder with its report. Every figure is measured in the run
that prints it.
"""

from __future__ import annotations

import json
import math
import secrets
import shlex
import sys
import sysconfig
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule as Line
from rich.table import Table
from rich.text import Text

from fewbits.demo.task import KINDS, Question, Task, make_task
from fewbits.errors import BadInput
from fewbits.words import size

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(__file__).parent / "assets"
RECIPE = "qlora_nf4"
MAX_SEEDS = 1_000_000
NEW_TOKENS = 10  # the longest answer has four, the end included


@dataclass(frozen=True)
class DemoSizes:
    """How much is done, and what it must reach."""

    steps: int
    num_test: int
    target: float
    batch: int = 16
    learning_rate: float = 5e-3


FULL = DemoSizes(steps=240, num_test=210, target=0.90)
QUICK = DemoSizes(steps=100, num_test=70, target=0.50)
MOST_BEFORE = 0.05


@dataclass(frozen=True)
class Score:
    """Answers to the test's questions, and the share that is right to the letter."""

    answers: tuple[str, ...]
    exact: float

    def __str__(self) -> str:
        return f"{self.exact:.1%}"


def run_demo(
    output_dir: str | Path | None = None,
    *,
    seed: int | None = None,
    quick: bool = False,
    open_report: bool = False,
    console: Console | None = None,
) -> int:
    """Runs the demo.

    Args:
        output_dir: where the run is written; if it is taken, a numbered folder beside it.
        seed: of the task, the adapters and the order of the data; None draws a new one.
        quick: fewer steps and questions, and a lower bar.
        open_report: show the report in the web browser at the end.
        console: where to show it.

    Returns:
        0 if the fine-tuned model reached the bar, else 1.

    Raises:
        BadInput: a negative seed.
    """
    if seed is not None and seed < 0:
        raise BadInput(f"The seed is {seed}; give a whole number from 0 on, or none for a new one.")
    demo = _Demo(
        QUICK if quick else FULL,
        _free_folder(Path("fewbits-demo" if output_dir is None else output_dir)),
        secrets.randbelow(MAX_SEEDS) if seed is None else seed,
        console or Console(),
    )
    with _one_thread():
        code = demo.run()
    report = demo.folder / "report.html"
    if open_report and report.is_file():
        webbrowser.open(report.resolve().as_uri())
    return code


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread.

    And they lose much where the cores are busy: 40 steps took 10 s with one thread, 57 s with two beside one
    other process, 446 s with two on two cores at load 5.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def score(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], *, batch: int = 70
) -> Score:
    """Greedy answers of the model, in batches padded on the left."""
    import torch

    model.eval()
    answers: list[str] = []
    for start in range(0, len(questions), batch):
        prompts = [question.prompt for question in questions[start : start + batch]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        ids, mask = inputs["input_ids"].to(model.device), inputs["attention_mask"].to(model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
            )
        texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        answers += [text.strip() for text in texts]
    right = sum(text == question.answer for text, question in zip(answers, questions, strict=True))
    return Score(tuple(answers), right / len(questions))


class _Demo:
    """The demo's steps in order; each shows what it found."""

    def __init__(self, plan: DemoSizes, folder: Path, seed: int, console: Console) -> None:
        self.plan, self.folder, self.seed, self.console = plan, folder, seed, console
        self.num_step = 0

    def run(self) -> int:
        """All steps; the exit code."""
        started = time.perf_counter()
        self._introduce()
        task = self._make_task()
        before = self._score_base(task)
        result = self._train()
        tuned, merged = self._score_tuned(task, result)
        self._show_answers(task, before, merged)
        return self._conclude(before, tuned, merged, result, time.perf_counter() - started)

    def _step(self, title: str) -> None:
        self.num_step += 1
        self.console.print()
        self.console.print(Line(f"[bold]{self.num_step}  {title}[/bold]", align="left", style="cyan"))

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def _introduce(self) -> None:
        text = (
            "A language model of one million parameters has read many small stories, and never a question. "
            "Packed to 4 bits, it now learns to work at the lost-property desk: to read a report and answer "
            "what is asked. All of it happens on this machine, without a network, in a minute or two."
        )
        self.console.print(Panel(text, title="[bold]fewbits demo[/bold]", border_style="cyan", expand=False))
        self._say(
            f"seed [bold]{self.seed}[/bold] (run it again with --seed {self.seed}), folder {self.folder}"
        )

    def _make_task(self) -> Task:
        self._step("The task")
        num_train = self.plan.steps * self.plan.batch
        task = make_task(self.seed, num_train=num_train, num_test=self.plan.num_test)
        data = self.folder / "data"
        data.mkdir(parents=True)
        for name, questions in (("train", task.train), ("test", task.test)):
            rows = "".join(json.dumps(question.row) + "\n" for question in questions)
            (data / f"{name}.jsonl").write_text(rows, encoding="utf-8")
        example = task.test[0]
        self._prompt_file().write_text(example.prompt, encoding="utf-8")
        self.console.print(
            Panel(f"{example.prompt} [green]{example.answer}[/green]", expand=False, title="for example")
        )
        self._say(
            f"{len(task.train):,} questions to learn from, {len(task.test)} for the test. Of the persons,"
            " colours and places in a test report none was ever seen with its thing in training: nothing can"
            " be known by heart."
        )
        return task

    def _prompt_file(self) -> Path:
        return self.folder / "data" / "prompt.txt"

    def _score_base(self, task: Task) -> Score:
        from fewbits.models.fast import FastLanguageModel

        self._step("The base model, packed to NF4")
        model, tokenizer = self._load(FastLanguageModel, ASSETS)
        plain, packed = _linear_bytes(model)
        self._say(
            f"{_num_parameters():,} parameters; its linear layers take {size(plain)} in 16 bits and"
            f" [bold]{size(packed)}[/bold] packed ({plain / packed:.1f} times less)."
        )
        before = score(model, tokenizer, task.test)
        self._say(f"exact answers before: [bold red]{before}[/bold red] of {len(task.test)} questions")
        return before

    def _load(self, loader: Any, path: Path) -> tuple[Any, Any]:
        import torch

        model, tokenizer = loader.from_pretrained(str(path), recipe=RECIPE, dtype=torch.float32)
        return model, tokenizer

    def _train(self) -> Any:
        from fewbits.training.config import TrainConfig
        from fewbits.training.run import train

        self._step("QLoRA: adapters learn, the packed weights stay as they are")
        plan = self.plan
        config = TrainConfig(
            model=str(ASSETS),
            title="The demo: a tiny model learns a task",
            recipe=RECIPE,
            dtype="float32",
            lora_r=16,
            lora_alpha=16,
            train_data=str(self.folder / "data" / "train.jsonl"),
            eval_data=str(self.folder / "data" / "test.jsonl"),
            format="completion",
            batch_size=plan.batch,
            max_steps=plan.steps,
            learning_rate=plan.learning_rate,
            scheduler="linear",
            warmup=10,
            seed=self.seed,
            eval_steps=max(1, plan.steps // 4),
            save_steps=plan.steps,
            keep_best=False,  # the test must not choose the weights
            samples=len(KINDS),
            sample_tokens=NEW_TOKENS,
            output_dir=str(self.folder),
        )
        return train(config, console=self.console)

    def _score_tuned(self, task: Task, result: Any) -> tuple[Score, Score]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from fewbits.models.fast import FastLanguageModel

        self._step("The same test again")
        model, tokenizer = self._load(FastLanguageModel, result.final)
        tuned = score(model, tokenizer, task.test)
        self._say(f"exact answers, packed model with adapters: [bold green]{tuned}[/bold green]")
        model.save_pretrained_merged(str(self.folder / "merged"), tokenizer)
        import torch

        plain = AutoModelForCausalLM.from_pretrained(self.folder / "merged", dtype=torch.float32)
        merged = score(plain, AutoTokenizer.from_pretrained(self.folder / "merged"), task.test)
        self._say(
            f"exact answers, merged to 16 bits and loaded with transformers alone:"
            f" [bold green]{merged}[/bold green]"
        )
        return tuned, merged

    def _show_answers(self, task: Task, before: Score, after: Score) -> None:
        self._step("What it says now")
        table = Table(expand=False, header_style="bold", row_styles=("", "dim"))
        for name, style in (("question", ""), ("expected", ""), ("before", "red"), ("after", "green")):
            table.add_column(name, style=style, overflow="fold")
        for i, question in enumerate(task.test[: len(KINDS)]):
            answer = after.answers[i]
            mark = Text(f"{answer}  ok") if answer == question.answer else Text(answer, style="yellow")
            table.add_row(question.question, question.answer, escape(_short(before.answers[i])), mark)
        self.console.print(table)

    def _conclude(self, before: Score, tuned: Score, merged: Score, result: Any, seconds: float) -> int:
        good = before.exact <= MOST_BEFORE and min(tuned.exact, merged.exact) >= self.plan.target
        table = Table.grid(padding=(0, 2))
        rows = (
            ("exact answers", f"{before} before, {tuned} after, {merged} merged"),
            ("adapter", f"{result.final}  {size(_file_bytes(result.final))}"),
            ("merged model", f"{self.folder / 'merged'}  {size(_file_bytes(self.folder / 'merged'))}"),
            ("time", f"{seconds:.0f} s in all, {result.seconds:.0f} s of it training"),
        )
        for name, value in rows:
            table.add_row(f"[bold]{name}[/bold]", escape(value))
        self.console.print()
        style = "green" if good else "red"
        self.console.print(
            Panel(table, title="it learned" if good else "below the bar", border_style=style, expand=False)
        )
        # Not in the panel, which breaks lines: these are there to be copied.
        if result.report:
            self._whole_line("report:", str(result.report.resolve()))
        merged_folder, questions = (p.resolve() for p in (self.folder / "merged", self._prompt_file()))
        generate = (
            f"generate --model {shlex.quote(str(merged_folder))} --prompt - < {shlex.quote(str(questions))}"
        )
        self._whole_line("try it:", f"{_this_program()} {generate}")
        if not good:
            self._say(
                f"The demo needs at most {MOST_BEFORE:.0%} before and at least {self.plan.target:.0%} after;"
                f" please report this seed, {self.seed}."
            )
        return 0 if good else 1

    def _whole_line(self, name: str, text: str) -> None:
        """A name, and below it a text that no width of the terminal breaks."""
        self.console.print(name, style="bold")
        self.console.print(text, soft_wrap=True, markup=False, highlight=False, no_wrap=True)


def _free_folder(preferred: Path) -> Path:
    """The folder itself, or the first free one of its numbered siblings."""
    folder, number = preferred, 1
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = preferred.with_name(f"{preferred.name}-{number}")
    return folder


def _linear_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the packed linears' weights in 16 bits, and as they are stored."""
    from fewbits.nn.linear import QuantizedLinear

    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    plain = sum(2 * module.in_features * module.out_features for module in packed)
    return plain, sum(part.nbytes for module in packed for part in module.packed.parts.values())


def _num_parameters() -> int:
    """Parameters of the base model, from its file: packed ones would be counted by the byte."""
    from safetensors import safe_open

    with safe_open(ASSETS / "model.safetensors", framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _this_program() -> str:
    """What a shell runs as this fewbits, also where no environment is active."""
    beside = Path(sysconfig.get_path("scripts")) / "fewbits"
    return shlex.quote(str(beside)) if beside.is_file() else f"{shlex.quote(sys.executable)} -m fewbits"


def _short(text: str, limit: int = 44) -> str:
    line = " / ".join(text.split("\n"))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
