"""Perplexity of stories3m under stochastic computing: every length, halving, scramble, uniform and mixed.

    python benchmarks/stochastic/sc_grid_stories3m.py --out FOLDER [--data ../shared/data] [--share 0/3]
    python benchmarks/stochastic/sc_grid_stories3m.py --out FOLDER --finish [--record rows.csv --commit HASH]

All 42 linears of the blocks and both attention products; the first ``--max-tokens`` tokens of TinyStories and
of WikiText-2 in windows of 512. Uniform: 16 to 256 cycles, halved and full streams, four scrambles. Mixed:
lengths of each chunk of each linear under a budget of mean cycles, calibrated on 4,088 tokens of TinyStories
after the 20,000th, the attention products at the budget; at 32 cycles, halved, bitrev, also with row groups,
smoothing, an INT8 mask and protected channels. Processes of other shares may run beside this one; what was
stopped goes on where it was. ``--finish`` prints the tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fewbits.bench.record import Row, append, conditions
from fewbits.cli.sc.plots import draw_lines
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.inference.evaluate import TextWindows, text_windows
from fewbits.inference.stochastic.error import settings_of
from fewbits.inference.stochastic.evaluation import EvalSetting, Ledger, evaluate_setting
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig, read_config, write_config
from fewbits.training.calibration.stochastic import Calibration, calibrate_stochastic

LENGTHS, SCRAMBLES = (16, 32, 64, 128, 256), ("bitrev", "counter", "random", "off")
TEXTS = {"TinyStories": "tinystories_val.txt", "WikiText": "wikitext2_raw_test.txt"}
WINDOW, CALIBRATED_FROM, CALIBRATED_TOKENS = 512, 20_000, 4_088
# At 32 cycles, halved, bitrev, beside what every scramble gets.
VARIANTS: dict[str, dict[str, Any]] = {
    "4 groups of rows": {"groups": 4},
    "SmoothQuant": {"smoothing": "smoothquant"},
    "AWQ": {"smoothing": "awq"},
    "AWQ, 4 groups of rows": {"smoothing": "awq", "groups": 4},
    "AWQ, 4 groups, 10 % of MACs INT8": {"smoothing": "awq", "groups": 4, "int8_share": 0.1},
    "AWQ, 4 groups, 4 protected channels": {"smoothing": "awq", "groups": 4, "protected": 4},
}
_PREFIX = {"mixed": "mixed, ", "variants": "mixed, "}


@dataclass(frozen=True)
class Job:
    """A row of the tables: a setting, how its configuration is found, and where it stands."""

    table: str
    name: str
    cycles: int
    options: Stochastic | None = None
    calibration: Calibration | None = None
    recipe: str | None = None


def columns() -> Iterator[tuple[str, Stochastic]]:
    for half, scramble in itertools.product((True, False), SCRAMBLES):
        options = replace(STOCHASTIC, halve_bipolar_stoc_len=half, scramble=scramble)
        yield f"{scramble}, {'halved' if half else 'full'}", options


def jobs() -> list[Job]:
    made = [Job("baseline", "float32", 0), Job("baseline", "int8", 0, recipe="int8")]
    for name, options in columns():
        half = options.halve_bipolar_stoc_len
        for of_length in settings_of(options, LENGTHS, (options.scramble,), (half,)):
            made.append(Job("uniform", name, of_length.streams.length, of_length))
        usual = (options.scramble, half) == ("bitrev", True)
        for budget in (24, 32, 48, 64) if usual else (32, 64):
            settings = Calibration(budget=budget, attention=budget, smoothing="none")
            made.append(Job("mixed", name, budget, options, settings))
            if usual:
                made.append(Job("uniform", name, budget, options.with_length(budget)))
    for name, changes in VARIANTS.items():
        settings = replace(Calibration(budget=32, attention=32, smoothing="none"), **changes)
        made.append(Job("variants", name, 32, STOCHASTIC, settings))
    return list(dict.fromkeys(made))


class Grid:
    """The model, its texts and what is done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        folder = args.data / "models/stories3m"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        words = {name: (args.data / "text" / file).read_text("utf-8") for name, file in TEXTS.items()}
        cut = 12 * args.max_tokens  # characters that hold at least so many tokens
        self.texts: dict[str, TextWindows] = {
            name: text_windows(
                self.model, self.tokenizer, text[:cut], window=WINDOW, max_tokens=args.max_tokens
            )
            for name, text in words.items()
        }
        self.calibration_text = words["TinyStories"]

    def config(self, job: Job) -> StochasticConfig | None:
        """The configuration of a job; a calibrated one is kept in the folder."""
        if job.options is None:
            return None
        if job.calibration is None:
            length = job.options.streams.length
            return StochasticConfig(options=job.options, attention=_attention(length))
        file = self.args.out / f"{job.table}-{job.name}-{job.cycles}.yaml".replace(" ", "_").replace(",", "")
        if not file.exists():
            made = calibrate_stochastic(self.model, self.batches(), job.calibration, options=job.options)
            write_config(made, file)
        return read_config(file)

    def batches(self) -> list[torch.Tensor]:
        ids = self.tokenizer(self.calibration_text, add_special_tokens=False, verbose=False)["input_ids"]
        rows = torch.tensor(ids[CALIBRATED_FROM:][:CALIBRATED_TOKENS]).view(-1, WINDOW - 1)
        whole = torch.cat([torch.full((len(rows), 1), self.tokenizer.bos_token_id), rows], dim=1)
        return list(whole.to(self.device)[:, None])

    def run(self, job: Job, ledger: Ledger, text: str) -> dict[str, Any]:
        setting = EvalSetting(f"{job.name}, {job.cycles} cycles", self.config(job), job.recipe)
        facts = {"text": text, "model": "stories3m"}
        found = evaluate_setting(self.model, self.texts[text], setting, ledger, facts=facts, batch_size=8)
        keys = {"table": job.table, "name": job.name, "cycles": job.cycles, "text": text}
        return keys | {"perplexity": found["perplexity"], "nats": found["nll"], "tokens": found["tokens"]}


def _attention(length: int) -> Any:
    return (("*", AttentionSetting(scores=length, values=length)),)


def done_rows(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Every finished row of any share, by what it is of."""
    lines = [line for file in sorted(folder.glob("rows-*.jsonl")) for line in file.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return {tuple(row[key] for key in ("table", "name", "cycles", "text")): row for row in rows}


def evaluate(args: argparse.Namespace) -> None:
    share, shares = (int(word) for word in args.share.split("/"))
    args.out.mkdir(parents=True, exist_ok=True)
    grid, ledger = Grid(args), Ledger(args.out / f"ledger-{share}of{shares}.jsonl")
    mine = [(job, text) for job in jobs()[share::shares] for text in TEXTS]
    for count, (job, text) in enumerate(mine):
        spent = time.perf_counter() - grid.start
        if (job.table, job.name, job.cycles, text) in done_rows(args.out):
            continue
        if spent > args.deadline:
            print(f"{len(mine) - count} of {len(mine)} are left; the same command goes on", flush=True)
            break
        row = grid.run(job, ledger, text)
        with (args.out / f"rows-{share}of{shares}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        took = time.perf_counter() - grid.start - spent
        print(
            f"[{spent:5.1f} s] {job.table:9s} {job.name:36s} {job.cycles:4d} {text:12s} "
            f"{row['perplexity'] or float('inf'):12.3f}  ({took:.2f} s)",
            flush=True,
        )


def table(rows: list[dict[str, Any]], what: str, text: str) -> None:
    """A Markdown table of one text: settings by cycles."""
    found = {(r["name"], r["cycles"]): r for r in rows if (r["table"], r["text"]) == (what, text)}
    if not found:
        return
    names, cycles = list(dict.fromkeys(name for name, _ in found)), sorted({c for _, c in found})
    print(f"\n| {text}, {what} | {' | '.join(str(c) for c in cycles)} |\n| --- |{' ---: |' * len(cycles)}")
    for name in names:
        cells = (_shown(found[name, c]["perplexity"]) if (name, c) in found else "" for c in cycles)
        print(f"| {name} | {' | '.join(cells)} |")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def draw(rows: list[dict[str, Any]], text: str, path: Path) -> None:
    """The uniform settings of one text over the stream length."""
    drawn, levels = [], {}
    for row in rows:
        if (row["table"], row["text"]) == ("baseline", text):
            levels[row["name"]] = row["perplexity"]
        if (row["table"], row["text"]) == ("uniform", text) and row["cycles"] in LENGTHS:
            scramble, grid = row["name"].split(", ")
            of_row = {"length": row["cycles"], "scramble": scramble, "halve": grid == "halved"}
            drawn.append(of_row | {"perplexity": row["perplexity"]})
    draw_lines(drawn, "perplexity", f"perplexity, {text}", path, levels=levels)


def finish(args: argparse.Namespace) -> None:
    order = [(job.table, job.name, job.cycles, text) for job in jobs() for text in TEXTS]
    done = done_rows(args.out)
    rows = [done[key] for key in order if key in done]
    print(f"{len(rows)} of {len(order)} rows")
    for what, text in itertools.product(("baseline", "uniform", "mixed", "variants"), TEXTS):
        table(rows, what, text)
    (args.out / "grid.json").write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        for text in TEXTS:
            draw(rows, text, args.plot / f"stochastic-perplexity-{text.lower()}.svg")
    if args.record is None:
        return
    made = []
    for row in rows:
        if row["perplexity"] is not None:
            value = round(row["perplexity"], 4)
            setting = (f"{row['cycles']} cycles, " if row["cycles"] else "") + row["name"]
            made.append(
                Row(
                    op="stochastic_llm", part=f"stories3m, {row['text']}, {row['tokens']:,} tokens",
                    variant="fewbits", format=_PREFIX.get(row["table"], "") + setting,
                    metric="perplexity", unit="per token", low=value, value=value, high=value,
                )
            )  # fmt: skip
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    command = "python benchmarks/stochastic/sc_grid_stories3m.py"
    append(
        args.record,
        made,
        conditions(device, command=command, commit=args.commit, packages=("transformers",)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path(__file__).resolve().parents[3] / "shared/data"
    parser.add_argument("--data", type=Path, default=shared, help="folder of models/stories3m and text")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is done and of the answer")
    parser.add_argument("--max-tokens", type=int, default=16_352)
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th job from the I-th on")
    parser.add_argument("--deadline", type=float, default=1e9, help="begin nothing after so many seconds")
    parser.add_argument("--finish", action="store_true", help="print the tables of what is there")
    parser.add_argument("--record", type=Path, default=None, help="with --finish: a CSV file to add rows to")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--plot", type=Path, default=None, help="with --finish: a folder for the plots")
    args = parser.parse_args()
    if args.finish:
        finish(args)
    else:
        evaluate(args)


if __name__ == "__main__":
    main()
