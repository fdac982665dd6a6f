"""The benchmark's parts: cases that are right, the gate that stops wrong ones, quantiles, rows."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fewbits.bench import run
from fewbits.bench.cases import cases
from fewbits.bench.measure import (
    CudaTimer,
    HostTimer,
    Peaks,
    measure,
    quantiles,
    relative_error,
    worst_errors,
)
from fewbits.bench.problem import Case, Problem
from fewbits.bench.record import COLUMNS, Conditions, append, conditions, rows_of
from fewbits.errors import BadInput, Unsupported

CPU = torch.device("cpu")
SMALL = [c for c in cases(max_size=128) if c.op != "attention"] + cases("attention", max_size=32)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_variant_computes_the_same(case: Case) -> None:
    errors = worst_errors(case.build(case, CPU))
    assert "fewbits" in errors
    assert max(errors.values()) <= case.tolerance, errors


def test_floor_of_rmsnorm_counts_each_byte_once() -> None:
    case = next(c for c in cases("rmsnorm") if (c.part, c.M, c.N) == ("forward", 8192, 4096))
    assert case.bytes_moved == 2 * 8192 * 4096 * 2 + 4096 * 2 + 8192 * 4


def test_relative_error_never_passes_nan_or_another_shape() -> None:
    one = torch.ones(2, 2)
    assert relative_error(one * 1.5, one) == 0.5
    assert relative_error(one * math.nan, one) == math.inf
    assert relative_error(one[0], one) == math.inf


def test_quantiles() -> None:
    assert quantiles([float(i) for i in range(11)]) == (2.0, 5.0, 8.0)


def test_variants_take_turns() -> None:
    turns: list[str] = []

    def timer(variant, repeats: int) -> list[float]:
        variant()()
        return [1.0] * repeats

    variants = {name: lambda name=name: lambda: turns.append(name) for name in "ab"}
    times = measure(variants, timer, rounds=2, repeats=5)
    assert turns == ["a", "a", "b", "b", "a", "b", "a", "b"] and times["a"] == (1.0, 1.0, 1.0)


def test_only_the_run_itself_is_timed() -> None:
    def prepare():
        torch.randn(2**18).sum()
        return lambda: ()

    assert min(HostTimer()(prepare, 5)) < 50


def make_case(wrong: str = "") -> Case:
    def build(case: Case, device: torch.device) -> Problem:
        x = torch.ones(case.M, case.N)
        outputs = {name: x * 2 if name == wrong else x for name in ("fewbits", "peer")}
        return Problem({name: lambda out=out: lambda: (out,) for name, out in outputs.items()}, lambda: (x,))

    return Case(
        op="x", part="forward", format="float32", M=2, N=3, bytes_moved=48, tolerance=1e-6, build=build
    )


@pytest.mark.parametrize(("wrong", "code"), [("", 0), ("peer", 0), ("fewbits", 1)])
def test_a_wrong_result_is_not_timed(monkeypatch, tmp_path: Path, capsys, wrong: str, code: int) -> None:
    monkeypatch.setattr(run, "cases", lambda op=None, max_size=None: [make_case(wrong)])
    target = tmp_path / "rows.csv"
    argv = ["kernels", "--device", "cpu", "--rounds", "1", "--record", str(target), "--commit", "abc"]
    assert run.main(argv) == code
    with target.open(newline="") as file:
        variants = [row["variant"] for row in csv.DictReader(file)]
    assert variants == [name for name in ("fewbits", "peer") if name != wrong]
    assert ("is wrong" in capsys.readouterr().out) == bool(wrong)


def test_rows_carry_share_and_ratio() -> None:
    times = {"fewbits": quantiles([10.0]), "peer": quantiles([20.0])}
    ours, peer = rows_of(make_case(), times, Peaks(48 / 5e-6, 1e12, 2e12))
    assert (ours.peak_share, ours.ratio) == (0.5, 1.0) and (peer.peak_share, peer.ratio) == (0.25, 2.0)


def test_the_floor_is_of_bytes_or_of_products() -> None:
    peaks = Peaks(48 / 5e-6, 1e12, 2e12)
    assert peaks.floor_s(replace(make_case(), flops=int(8e6))) == pytest.approx(8e-6)
    assert peaks.floor_s(replace(make_case(), flops=int(8e6), format="float8_e4m3")) == 5e-6
    assert peaks._replace(float8_flops=0).floor_s(
        replace(make_case(), flops=int(8e6), format="float8_e4m3")
    ) == pytest.approx(8e-6)


def test_peers_are_left_out_and_ops_are_chosen(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "cases", lambda op=None, max_size=None: [replace(make_case(), op=op)])
    target = tmp_path / "rows.csv"
    argv = ["kernels", "--device", "cpu", "--rounds", "1", "--record", str(target), "--commit", "abc"]
    assert run.main([*argv, "--op", "x,y", "--without", "peer"]) == 0
    with target.open(newline="") as file:
        rows = [(row["op"], row["variant"]) for row in csv.DictReader(file)]
    assert rows == [("x", "fewbits"), ("y", "fewbits")]


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    rows = rows_of(make_case(), {"fewbits": quantiles([10.0])}, None)
    here = conditions(CPU, command="fewbits bench kernels", commit="abc")
    for _ in range(2):
        append(tmp_path / "rows.csv", rows, here)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].split(",") == COLUMNS
    assert isinstance(here, Conditions) and here.torch == torch.__version__


def test_a_file_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="has other columns"):
        append(other, [], conditions(CPU, command="", commit="abc"))
    assert other.read_text() == "a,b\n1,2\n"


def test_published_rows_have_these_columns() -> None:
    published = Path(__file__).resolve().parents[2] / "benchmarks" / "results.csv"
    with published.open(newline="") as file:
        rows = list(csv.DictReader(file))
        assert rows == [] or list(rows[0]) == COLUMNS
    for row in rows:
        assert all(
            row[name] for name in ("value", "metric", "unit", "gpu", "commit", "date", "command", "torch")
        )


def test_unknown_op_is_refused() -> None:
    with pytest.raises(BadInput, match=r"no case for op 'nothing': known are .*rmsnorm"):
        run.main(["kernels", "--op", "nothing", "--device", "cpu"])


@pytest.mark.gpu
def test_cuda_times_are_those_of_the_device() -> None:
    x = torch.randn(2**28, device="cuda")
    timer = CudaTimer(torch.device("cuda"))
    times = measure(
        {"one": lambda: lambda: (x.clone(),), "two": lambda: lambda: (x.clone(), x.clone())}, timer
    )
    assert 1.8 < times["two"].p50 / times["one"].p50 < 2.2


def test_runs_that_overfill_the_queue_are_taken_in_parts(monkeypatch) -> None:
    """A variant of many kernels: the host waits for the queue, so that the device runs dry in every batch."""
    timer = object.__new__(CudaTimer)
    batches: list[int] = []

    def batch(self, variant, repeats: int, sleep_s: float) -> list[float] | None:
        batches.append(repeats)
        return [1.0] * repeats if repeats <= 3 else None

    monkeypatch.setattr(CudaTimer, "_batch", batch)
    assert timer(lambda: lambda: (), 10) == [1.0] * 10
    assert sum(n for n in batches if n <= 3) == 10
    monkeypatch.setattr(CudaTimer, "_batch", lambda *_: None)
    with pytest.raises(Unsupported, match="to queue 1 runs"):
        timer(lambda: lambda: (), 10)


def test_a_variant_that_cannot_be_timed_is_said_and_the_others_are(
    monkeypatch, tmp_path: Path, capsys
) -> None:
    calls = []

    def timer(variant, repeats: int) -> list[float]:
        calls.append(variant)
        if len(calls) == 2:  # the peer's first
            raise Unsupported("the device would wait.")
        return [1.0] * repeats

    monkeypatch.setattr(run, "cases", lambda op=None, max_size=None: [make_case()])
    monkeypatch.setattr(run, "HostTimer", lambda: timer)
    target = tmp_path / "rows.csv"
    argv = ["kernels", "--device", "cpu", "--rounds", "2", "--record", str(target), "--commit", "abc"]
    assert run.main(argv) == 0
    assert "peer of x.forward float32 2x3 is not timed: the device would wait." in capsys.readouterr().out
    with target.open(newline="") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == ["fewbits"]
    del calls[:]
    with pytest.raises(Unsupported, match="would wait"):
        measure({name: lambda: lambda: () for name in "ab"}, timer)
