"""The report shows what a run's files say, whatever state they are in, and asks for nothing else."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from fewbits.errors import BadInput
from fewbits.training.report import figures as show
from fewbits.training.report.chart import Series, line_chart, nice_ticks, smoothed, thin
from fewbits.training.report.page import write_report

VOID = {"meta", "wbr", "br", "link", "input", "img", "hr"}


class Page(HTMLParser):
    """Checks that tags are closed in order; collects the text and the attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def metrics(steps: int) -> list[dict[str, object]]:
    records: list[dict[str, object]] = [{"step": 0, "tokens": 0, "seconds": 0, "eval_loss": 5.0}]
    for s in range(1, steps + 1):
        loss = 3 + 2 * math.exp(-s / 10)
        base = {"step": s, "epoch": s / 50, "tokens": 100 * s, "seconds": s / 2, "memory_bytes": 5e8 + s}
        records.append(
            base | {"loss": loss, "learning_rate": 2e-4, "grad_norm": 1.0, "tokens_per_second": 200.0}
        )
        if s % 10 == 0:
            records.append(base | {"eval_loss": loss + 0.1})
    return records


def write_run(folder: Path, *, status: str = "finished", steps: int = 40, **facts: object) -> Path:
    folder.mkdir(exist_ok=True)
    run = {
        "status": status,
        "started": "2026-11-20T23:14:05+00:00",
        "versions": {"torch": "2.13.0"},
        "device": "CPU, 2 threads",
        "model": "/models/stories3m",
        "recipe": {"name": "qlora_nf4", "linear": {"weight": "nf4"}},
        "receipt": "7 modules replaced, 1 -> 0.3 MiB\n  <q_proj>",
        "parameters": {
            "bytes": 2_811_904,
            "trainable": 270_336,
            "total": 3_148_224,
            "packed_bytes": 700_000,
            "packed_bytes_in_16_bits": 2_600_000,
        },
        "data": {"train": {"path": "rows.jsonl", "rows": 3000}, "eval": None},
    }
    (folder / "run.json").write_text(json.dumps(run | facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metrics(steps)))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": "/models/stories3m", "lora_r": 16, "packing": True})
    )
    samples = [
        {"prompt": "2 + 2 <b>", "before": "<script>alert(1)</script>", "after": "4", "expected": "4"},
        {"prompt": "hello", "before": "", "after": "hi"},
    ]
    (folder / "samples.json").write_text(json.dumps(samples))
    return folder


def test_a_title_of_its_own_and_one_epoch(tmp_path):
    folder = write_run(tmp_path / "run", parameters={"bytes": 2**20})
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": "/models/assets", "title": "One & two"}))
    rows = [json.loads(line) | {"epoch": 1.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_report(folder).read_text()
    assert "<h1>One &amp; two</h1>" in html and "<title>One &amp; two" in html
    assert "40 steps, 1 epoch<" in html
    assert "Model size 1 MiB adapters included" in Page(html).words


def test_a_finished_run(tmp_path):
    path = write_report(write_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    html = path.read_text()
    words = Page(html).words
    for shown in (
        "stories3m",
        "finished",
        "qlora_nf4",
        "Evaluation loss 5 \u2192 3.137",  # 3 + 2 exp(-4) + 0.1
        "Perplexity 148 \u2192 23",
        "270k 8.59% of 3.15M",
        "2.68 MiB 684 KiB of packed weights, 2.48 MiB in 16 bits",
        "Tokens 4,000 40 steps, 0.8 epochs",
        "Training time 20.0 s 200 tokens/s overall",
        "Peak memory 477 MiB",
        "Learning rate",
        "Throughput",
        "Gradient norm",
        "<q_proj>",
        "lora_r 16",
        "packing yes",
        "torch 2.13.0",
        "Training data",
        "2 + 2 <b>",
        "After as expected 4",
        "Before <script>alert(1)</script>",
        "nothing",
    ):
        assert shown in words, shown
    assert "<script>alert" not in html
    assert "Evaluation data" not in words
    assert not list((tmp_path / "run").glob(".*"))  # nothing of the writing is left


def test_it_asks_for_nothing(tmp_path):
    html = write_report(write_run(tmp_path / "run")).read_text()
    names = {name for name, _ in Page(html).attributes}
    assert not names & {"src", "href", "srcset", "action", "onload", "onclick"}
    assert not re.search(r"https?:|//\w|url\(|@import|fetch\(|XMLHttp", html)


def test_its_curves_hold_every_value(tmp_path):
    page = Page(write_report(write_run(tmp_path / "run")).read_text())
    charts = [json.loads(value) for name, value in page.attributes if name == "data-chart"]
    assert len(charts) == 6  # the loss in two widths, and four small ones
    training, evaluation = charts[0]["curves"]
    assert [p[2] for p in training["points"]] == list(range(1, 41))
    assert [p[2] for p in evaluation["points"]] == [0, 10, 20, 30, 40]
    assert evaluation["points"][0][3] == "5"


def test_a_killed_run(tmp_path):
    run = write_run(tmp_path / "run", status="running")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    (run / "samples.json").unlink()
    words = Page(write_report(run).read_text()).words
    assert "was killed" in words
    assert "up to step 40" in words
    assert f"fewbits train {run}/config.yaml --resume" in words
    assert "could not be read" not in words  # half a line at the end is no fault


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            "TrainingStopped: the loss is NaN: see <x>",
            "stopped qlora_nf4 CPU, 2 threads 2026-11-20 23:14 the loss is NaN: see <x>",
        ),
        ("KeyError: 'a'", "stopped qlora_nf4 CPU, 2 threads 2026-11-20 23:14 KeyError: 'a'"),
        (
            "KeyboardInterrupt: ",
            "This run was interrupted. The page shows what was logged up to step 40. It goes on with",
        ),
        (None, "The run stopped before its end."),
    ],
)
def test_why_a_run_stopped(tmp_path, error, shown):
    run = write_run(tmp_path / "run", status="stopped", error=error)
    assert shown in Page(write_report(run).read_text()).words


def test_a_stopped_run(tmp_path):
    words = Page(
        write_report(write_run(tmp_path / "r", status="stopped", error="the loss is NaN <x>")).read_text()
    ).words
    assert "stopped" in words
    assert "the loss is NaN <x>" in words


def test_an_early_end_is_told(tmp_path):
    run = write_run(tmp_path / "run", stopped_early=True)
    assert "no longer fell" in Page(write_report(run).read_text()).words


@pytest.mark.parametrize("keep", ["run.json", "metrics.jsonl", "config.yaml", "samples.json"])
def test_one_file_is_enough(tmp_path, keep):
    run = write_run(tmp_path / "run")
    for path in run.iterdir():
        if path.name != keep:
            path.unlink()
    Page(write_report(run).read_text())


def test_damaged_files_are_named(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text("{")
    (run / "samples.json").write_text('{"a": 1}')
    (run / "config.yaml").write_text("a: [")
    (run / "metrics.jsonl").write_text(
        'nonsense\n[1]\n{"loss": 1}\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": 2.0}\n'
    )
    words = Page(write_report(run).read_text()).words
    for name in ("run.json", "samples.json", "config.yaml"):
        assert f"{name} could not be read" in words
    assert "3 lines of metrics.jsonl" in words
    assert "Training loss 2" in words


def test_steps_logged_twice_count_once(tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 1.25}) + "\n")
    page = Page(write_report(run).read_text())
    chart = next(json.loads(value) for name, value in page.attributes if name == "data-chart")
    assert [p[2] for p in chart["curves"][0]["points"]] == [1, 2, 3, 4, 5]
    assert chart["curves"][0]["points"][-1][3] == "1.25"


def test_one_step_only(tmp_path):
    Page(write_report(write_run(tmp_path / "run", steps=1)).read_text())


def test_no_step_at_all(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    assert "No training step was logged." in Page(write_report(run).read_text()).words


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match="there is no run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="holds no training run"):
        write_report(tmp_path)


def test_a_long_run_stays_small(tmp_path):
    size = write_report(write_run(tmp_path / "run", steps=20_000)).stat().st_size
    assert size < 400_000


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (3.1, 5.3), (-2, 7), (1e-9, 2e-9), (5, 5), (0, 0), (0, 123_456), (99.9, 100.1)]
)
def test_ticks_are_round_and_cover(low, high):
    ticks = nice_ticks(low, high, 5)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 10
    steps = {round(b - a, 12) for a, b in pairwise(ticks)}
    assert len(steps) == 1


def test_smoothing_and_thinning():
    points = [(float(i), 2.0) for i in range(1000)]
    assert smoothed(points, 9) == points
    short = thin(points, 100)
    assert len(short) == 100
    assert (short[0][0], short[-1][0]) == (0.0, 999.0)
    assert smoothed([(0, 0.0), (1, 3.0), (2, 6.0)], 3) == [(0, 1.5), (1, 3.0), (2, 4.5)]


def test_points_lie_inside_the_picture():
    points = [(i, math.sin(i)) for i in range(1, 50)]
    svg = line_chart("x", [Series(label="a", points=points)], show.decimal)
    path = re.search(r' d="M([^"]+)"', svg).group(1)
    for pair in path.split("L"):
        x, y = map(float, pair.split())
        assert 58 <= x <= 480 - 14
        assert 12 <= y <= 240 - 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (show.count(12_345), "12,345"),
        (show.count(3_148_224), "3.15M"),
        (show.count(7e9), "7B"),
        (show.duration(59.99), "1 min 00 s"),
        (show.duration(4.25), "4.2 s"),
        (show.duration(7384), "2 h 03 min"),
        (show.small(2e-4), "2e-4"),
        (show.small(1.5e-5), "1.5e-5"),
        (show.small(0.01), "0.01"),
        (show.rate(3768.4), "3.77k"),
        (show.decimal(4.0), "4"),
    ],
)
def test_numbers(text, expected):
    assert text == expected
