"""Prediction, replay, advice and report on staged profiles."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from fewjobs import plan as planning
from fewjobs import replay as replay_module
from fewjobs.advice import advise
from fewjobs.errors import BadInput
from fewjobs.plan import plan_text, read_profile
from fewjobs.predict import FEW_HEADROOM, HEADROOM, LINE_HEADROOM, MOST_SIBLINGS, History, Siblings
from fewjobs.replay import (
    MOST_JOBS,
    items_of,
    lower_bound,
    plan,
    recommend,
    recommend_each,
    replay,
    units_of,
)
from fewjobs.report import report, write_report
from fewjobs.stage import Stage
from fewjobs.trace import Trace, thin, write_profile
from fewjobs.verdict import judge, known_fault
from fewjobs.watch import BudgetWatch
from tests.fewjobs.stages import staged

MB, GIB = 10**6, 2**30


def stage(
    unit: str, name: str, peak: int, start: float, seconds: float, arch: str = "", **facts: Any
) -> dict[str, Any]:
    end = start + seconds
    return {
        "unit": unit, "arch": arch, "stage": name, "predicted_bytes": peak, "predicted_from": "prior",
        "peak_bytes": peak, "resident_bytes": peak, "cpu_s": seconds, "queued_s": start, "started_s": start,
        "ended_s": end, "waited_s": 0.0, "paused_s": 0.0, "attempts": 1, "pauses": 0, "hibernations": 0,
        "pageouts": 0, "requeues": 0, "kills": 0, "code": 0,
        "curve": [[start + seconds * k / 10, peak * k // 10] for k in range(11)], **facts,
    }  # fmt: skip


def profile(stages: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    end = max((s["ended_s"] for s in stages), default=1.0)
    return {
        "format": 1, "command": facts.pop("command", ["ninja"]), "folder": "/w", "began": 0.0,
        "seconds": end, "exit_code": 0,
        "machine": {"name": "x", "architecture": "aarch64", "cpus": 4, "toolkit": "12.8"}, "slots": 4,
        "budget_bytes": facts.pop("budget_bytes", 8 * GIB), "peak_bytes": 4 * GIB,
        "facts": {"temporary": "/tmp", "temporary_file_system": "ext4", "binding": "machine",
                  **facts.pop("facts", {})},
        "budget": [[0.0, 8 * GIB]], "memory": [[0.0, GIB], [end, 2 * GIB]], "stages": stages, "kept": [],
        "events": [], "counts": {}, "verdicts": facts.pop("verdicts", []), "notes": [], **facts,
    }  # fmt: skip


def device_unit(
    name: str, at: float, archs: tuple[str, ...] = ("90", "100a"), heavy: int = 900 * MB
) -> list[dict[str, Any]]:
    found = [stage(name, "cudafe++", 400 * MB, at, 2.0)]
    for k, arch in enumerate(archs):
        found += [
            stage(name, "cicc", heavy, at + 2 + 7 * k, 4.0, arch),
            stage(name, "ptxas", 300 * MB, at + 6 + 7 * k, 3.0, arch),
        ]
    return [*found, stage(name, "c++", 350 * MB, at + 2 + 7 * len(archs), 2.0)]


@pytest.fixture
def random_profile() -> dict[str, Any]:
    stages, at = [], 0.0
    for k in range(20):
        heavy = random.randint(300, 4000) * MB
        stages += device_unit(f"u{k}.cu", at, heavy=heavy)
        at += 1.0
    return profile(stages)


def test_every_recommendation_holds_and_one_job_more_does_not(random_profile: dict[str, Any]) -> None:
    units = units_of(items_of(random_profile))
    checked = 0
    for memory in planning.MEMORIES:
        found = recommend(units, memory, cpus=4)
        if found is None:
            assert replay(units, jobs=1, cpus=4).peak_bytes > memory
            continue
        run = replay(units, jobs=found.jobs, threads=found.threads, cpus=4)
        assert run.peak_bytes == found.peak_bytes <= memory
        if found.jobs < min(MOST_JOBS, len(units)):
            checked += 1
            assert replay(units, jobs=found.jobs + 1, threads=found.threads, cpus=4).peak_bytes > memory
    assert checked > 0


def test_a_report_replays_each_setting_once(
    random_profile: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 tiny units ended with a second of processor time for the report, eight replays of each setting."""
    units, tried = units_of(items_of(random_profile)), []
    singly = [recommend(units, memory, cpus=4) for memory in planning.MEMORIES]

    def counted(units: Any, *, jobs: int, threads: int, cpus: int) -> Any:
        tried.append((jobs, threads))
        return replay(units, jobs=jobs, threads=threads, cpus=cpus)

    monkeypatch.setattr(replay_module, "replay", counted)
    assert recommend_each(units, planning.MEMORIES, cpus=4) == singly
    assert len(tried) == len(set(tried)) > 0


def test_replay_of_one_job_is_the_sum_and_the_largest() -> None:
    units = units_of(items_of(profile(device_unit("a.cu", 0.0) + device_unit("b.cu", 20.0))))
    run = replay(units, jobs=1, threads=1, cpus=1)
    assert run.seconds == pytest.approx(36.0)
    assert run.peak_bytes == 900 * MB
    together = replay(units, jobs=1, threads=2, cpus=2)
    assert together.seconds == pytest.approx(22.0)
    assert together.peak_bytes == 1800 * MB


def test_more_jobs_than_processors_share_them() -> None:
    items = [stage(f"{k}.cpp", "c++", 100 * MB, 0.0, 10.0) for k in range(4)]
    units = units_of(items_of(profile(items)))
    assert replay(units, jobs=4, cpus=2).seconds == pytest.approx(20.0)
    assert replay(units, jobs=2, cpus=2).seconds == pytest.approx(20.0)


def test_the_plan_stays_within_the_budget_and_near_the_bound(random_profile: dict[str, Any]) -> None:
    items = items_of(random_profile)
    largest = max(item.peak_bytes for item in items)
    for budget in (int(largest * 1.1), 8 * GIB, 64 * GIB):
        outcome = plan(items, budget_bytes=budget, slots=4)
        assert outcome.peak_bytes <= budget
        assert lower_bound(items, budget_bytes=budget, slots=4) <= outcome.seconds * 1.0001
    assert outcome.seconds <= 1.2 * lower_bound(items, budget_bytes=budget, slots=4)


def test_plan_as_text(tmp_path: Path, random_profile: dict[str, Any]) -> None:
    write_profile(random_profile, tmp_path / "p.json")
    text = plan_text(read_profile(tmp_path / "p.json"), memory_bytes=16 * GIB, jobs=4)
    assert "fewbits build with 16 GiB and 4 processors" in text
    assert re.search(r"MAX_JOBS=\d+ NVCC_THREADS=\d", text)
    (tmp_path / "q.json").write_text("{}")
    with pytest.raises(BadInput, match="no profile"):
        read_profile(tmp_path / "q.json")


def rules(p: dict[str, Any]) -> list[str]:
    return [a.rule for a in advise(p)]


@pytest.mark.parametrize(
    ("rule", "facts", "stages"),
    [
        ("TMPDIR in memory", {"temporary_file_system": "tmpfs"}, []),
        ("container limit", {"binding": "cgroup v2 (/sys/fs/cgroup/memory.max)"}, []),
        ("container limit", {"binding": "Slurm (SLURM_MEM_PER_NODE)"}, []),
        ("--threads", {"nvcc_threads": 8}, []),
        ("too many architectures", {"gpus": ["9.0"]}, device_unit("a.cu", 0.0, ("80", "90", "100a"))),
        (
            "one giant unit",
            {},
            [stage("big.cu", "ptxas", 6 * GIB, 0, 9, "90"), stage("s.cu", "ptxas", GIB, 0, 9, "90")],
        ),
        (
            "header-only .cu",
            {},
            [stage("h.cu", "cicc", 4 * GIB, 0, 90, "90"), stage("h.cu", "ptxas", 9 * MB, 90, 0.1, "90")],
        ),
    ],
)
def test_root_causes_are_named(rule: str, facts: dict[str, Any], stages: list[dict[str, Any]]) -> None:
    assert rule in rules(profile(stages, facts=facts))


def test_a_healthy_build_gets_no_advice() -> None:
    items = [stage(f"{k}.cpp", "c++", 200 * MB, 0.0, 3.0) for k in range(4)]
    assert rules(profile(items)) == []


def test_the_architecture_nobody_owns_is_told() -> None:
    p = profile(device_unit("a.cu", 0.0, ("80", "90")), facts={"gpus": ["9.0"]})
    text = next(a.what for a in advise(p) if a.rule == "too many architectures")
    assert "sm_80 50 %" in text
    assert "No GPU here needs sm_80." in text


def test_a_wheel_is_mentioned_for_named_packages() -> None:
    assert "a wheel may exist" in rules(profile([], command=["pip", "wheel", "--no-deps", "flash-attn"]))
    assert "a wheel may exist" not in rules(profile([], command=["pip", "wheel", "./here"]))


@pytest.mark.parametrize(
    "line, packages",
    [
        ("pip wheel -w wheels flash-attn", "flash-attn"),
        ("pip wheel --wheel-dir wheels flash-attn==2.8.3", "flash-attn"),
        ("pip wheel --wheel-dir=wheels -q -v flash-attn[a,b]>=2", "flash-attn"),
        ("python -m pip install -r requirements.txt -c limits -i index xformers", "xformers"),
        ("pip wheel --no-deps --no-build-isolation -C k=v vllm apex", "vllm apex"),
        ("uv pip install --no-build-isolation --python env zope.interface", "zope.interface"),
        ("pip wheel -w wheels .", ""),
        ("pip wheel -wwheels ./here here.tar.gz git+https://host/repository", ""),
        ("pip install -e folder", ""),
    ],
)
def test_the_packages_of_a_command_are_not_the_values_of_its_flags(line: str, packages: str) -> None:
    found = [a for a in advise(profile([], command=line.split())) if a.rule == "a wheel may exist"]
    assert [a.fix.partition(" says")[0] for a in found] == (
        [f"fewbits doctor {packages}"] if packages else []
    )


def runaway() -> Stage:
    found = staged("transpose.cu", "", "cudafe++", predicted_bytes=450 * MB)
    for k in range(100):
        found.memory.curve.extend((k * 0.3, k * 0.3 * 233e6))
    found.memory.high_bytes = int(100 * 0.3 * 233e6)
    return found


def test_the_verdict_names_stage_unit_growth_toolkit_and_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    from fewjobs.pressure import Kind

    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    verdict = judge(runaway(), Kind.RUNAWAY, budget_bytes=GIB, toolkit="12.8", why="--memory", has_pager=True)
    for word in (
        "transpose.cu cudafe++",
        "CUDA 12.8, aarch64",
        "222 MiB a second",
        "TransformerEngine issue 1996",
        "wheel",
    ):
        assert word in verdict.sentence
    assert known_fault("cicc", "12.8", "aarch64", "90") is None
    assert known_fault("cicc", "12.8", "x86_64", "120a").source == "MFEM issue 5363"
    assert known_fault("cudafe++", "12.6", "x86_64").source == "CLI11 issue 1378"


def test_the_report_is_whole_and_escaped(tmp_path: Path, random_profile: dict[str, Any]) -> None:
    random_profile["stages"].append(
        stage("<script>alert(1)</script>.cu", "cicc", GIB, 0.0, 1.0, "90", pauses=2)
    )
    random_profile["events"] = [[1.0, "paused", "u1.cu cicc"]]
    random_profile["counts"] = {"paused": 1}
    write_report(random_profile, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert not re.search(r"(src|href)=|https?://", text)
    for word in (
        "Memory over time",
        "<svg",
        "<polyline",
        "What each architecture costs",
        "MAX_JOBS",
        "Stages",
        "2 pauses",
    ):
        assert word in text, word


def test_a_report_of_nothing() -> None:
    assert "0 stages compiled" in report(profile([]))


def test_thinning_keeps_the_peak() -> None:
    points = [[float(k), float(random.randint(0, 1000))] for k in range(5000)]
    assert max(p[1] for p in thin(points, 100)) == max(p[1] for p in points)
    assert len(thin(points, 100)) <= 102


def test_history_first_then_siblings_then_kind(tmp_path: Path) -> None:
    history = History(tmp_path / "h.jsonl")

    def predicted(unit: str, size: int = 0, arch: str = "90") -> tuple[int, str]:
        asked = staged(unit, arch, "ptxas", keys=(unit,), input_bytes=size)
        history.predict(asked, room_bytes=8 * GIB, slots=4)
        return asked.predicted.bytes, asked.predicted.source

    assert predicted("new") == (200_000_000, "prior")
    for k in range(1, 6):
        known = staged(f"u{k}", "90", "ptxas", keys=(f"u{k}",), input_bytes=k * MB)
        history.learn(known, peak_bytes=(50 + 100 * k) * MB, seconds=1.0)
    assert predicted("u3") == (int(350 * MB * HEADROOM), "history")
    size, source = predicted("new", 10 * MB)
    assert source == "siblings"
    assert 800 * MB < size < 1600 * MB
    history.write()
    with (tmp_path / "h.jsonl").open("a") as file:
        file.write('{"keys": ["cut off')
    again = History(tmp_path / "h.jsonl")
    again.load()
    asked = staged("u5", "90", "ptxas", keys=("u5",))
    again.predict(asked, room_bytes=8 * GIB, slots=4)
    assert asked.predicted.source == "history"


def test_a_small_budget_tries_two_unknown_ones_at_once(tmp_path: Path) -> None:
    asked = staged("a.cpp", "", "c++")
    History(tmp_path / "h").predict(asked, room_bytes=400 * MB, slots=2)
    assert asked.predicted.bytes == int(0.95 * 200 * MB)


def stage_machine(root: Path, available: int, limit: int | None = None, used: int = 0) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {available // 1024} kB\n")
    if limit is not None:
        (root / "proc/self/cgroup").write_text("0::/job/step\n")
        (root / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        parent = root / "sys/fs/cgroup/job"
        parent.mkdir(parents=True, exist_ok=True)
        (parent / "memory.max").write_text(f"{limit}\n")
        (parent / "memory.current").write_text(f"{used}\n")


def test_the_budget_follows_what_others_do(tmp_path: Path) -> None:
    stage_machine(tmp_path, 48 * GIB)
    watch = BudgetWatch(root=tmp_path, environ={})
    first = watch.now(2 * GIB)
    assert first == 50 * GIB - 256 * 2**20
    assert not watch.fixed
    stage_machine(tmp_path, 20 * GIB)
    assert watch.now(2 * GIB) == first - 28 * GIB


def test_a_limit_on_a_parent_that_changes_while_running(tmp_path: Path) -> None:
    stage_machine(tmp_path, 48 * GIB, limit=8 * GIB, used=3 * GIB)
    watch = BudgetWatch(root=tmp_path, environ={})
    assert watch.now(3 * GIB) == 8 * GIB - 256 * 2**20
    assert watch.why.startswith("cgroup v2")
    stage_machine(tmp_path, 48 * GIB, limit=6 * GIB, used=3 * GIB)
    assert watch.now(3 * GIB) == 6 * GIB - 256 * 2**20


def test_the_flag_and_slurm_bind_when_they_are_smaller(tmp_path: Path) -> None:
    stage_machine(tmp_path, 48 * GIB)
    assert BudgetWatch(4 * GIB, root=tmp_path, environ={}).now(GIB) == 4 * GIB
    slurm = BudgetWatch(None, root=tmp_path, environ={"SLURM_MEM_PER_NODE": "4096"})
    assert slurm.now(0) == 4 * GIB - int(4 * GIB * 0.05)
    assert slurm.why.startswith("Slurm")


def test_a_trace_stays_small() -> None:
    trace = Trace(["ninja"], 4)
    for k in range(200_000):
        trace.note(k * 0.05, 10**9 + k % 7, 2 * 10**9, 1)
    assert len(trace.profile(code=0, budget_bytes=1)["memory"]) <= 4002


def test_a_new_unit_has_the_course_of_its_siblings(tmp_path: Path) -> None:
    history = History(tmp_path / "h.jsonl")
    for k in range(1, 8):
        peak = 100 * k * MB
        known = staged(f"u{k}", name="c++", keys=(f"u{k}",), input_bytes=k * MB, attempts=1, ended_s=float(k))
        known.memory.peak_bytes = peak
        for part in range(9):  # half of it until its last quarter
            known.memory.curve.extend((k * part / 8, float(peak if part >= 6 else peak // 2)))
        history.learn(known, peak_bytes=peak, seconds=float(k))
    asked = staged("new", name="c++", input_bytes=6_500_000)
    history.predict(asked, room_bytes=8 * GIB, slots=4)
    assert asked.predicted.source == "siblings"
    assert asked.predicted.bytes == pytest.approx(LINE_HEADROOM * 650 * MB, rel=0.01)
    assert asked.predicted.seconds == pytest.approx(LINE_HEADROOM * 6.5, rel=0.01)
    assert [round(part / asked.predicted.bytes, 2) for part in asked.predicted.parts] == [0.5] * 6 + [1.0] * 2
    far = staged("far", name="c++", input_bytes=60 * MB)  # nobody of its size has been seen: no course
    history.predict(far, room_bytes=8 * GIB, slots=4)
    assert (far.predicted.source, far.predicted.parts) == ("siblings", ())
    assert far.predicted.bytes > 6000 * MB


def test_two_siblings_tell_how_the_need_follows_from_the_input() -> None:
    siblings = Siblings()
    siblings.add(100 * MB, 1 * MB)
    assert siblings.like(8 * MB) == (100 * MB, False)
    siblings.add(200 * MB, 2 * MB)
    size, is_explained = siblings.like(8 * MB)
    assert is_explained
    assert size == pytest.approx(FEW_HEADROOM * 800 * MB)


def test_what_was_disturbed_tells_siblings_nothing(tmp_path: Path) -> None:
    history = History(tmp_path / "h.jsonl")
    for k, pageouts in ((1, 0), (2, 0), (3, 0), (4, 0), (5, 3)):
        stage = staged(
            f"u{k}", name="c++", keys=(f"u{k}",), input_bytes=k * MB, attempts=1, pageouts=pageouts
        )
        history.learn(stage, peak_bytes=100 * k * MB * (2 if pageouts else 1), seconds=1.0)
    asked = staged("new", name="c++", input_bytes=5 * MB)
    history.predict(asked, room_bytes=8 * GIB, slots=4)
    assert asked.predicted.bytes == pytest.approx(LINE_HEADROOM * 500 * MB, rel=0.01)


def test_a_busy_machine_does_not_count(tmp_path: Path) -> None:
    history = History(tmp_path / "h.jsonl")
    history.learn(staged("u", keys=("u",), attempts=1, cpu_s=2.0), peak_bytes=100 * MB, seconds=9.0)
    history.close()
    again = History(tmp_path / "h.jsonl")
    again.load()
    asked = staged("u", keys=("u",))
    again.predict(asked, room_bytes=GIB, slots=2)
    assert (asked.predicted.seconds, asked.predicted.cpu_s) == (2.0, 2.0)


def test_siblings_sums_forget_the_oldest() -> None:
    siblings = Siblings()
    for k in range(500):
        siblings.add(10**9 - k * MB, 10**6 + k)  # a line that falls explains nothing
    for k in range(1, MOST_SIBLINGS + 1):
        siblings.add(50 * MB + 2 * k * MB, k * MB)
    assert siblings.like(200 * MB) == (pytest.approx(LINE_HEADROOM * 450 * MB, rel=1e-6), True)


def test_damaged_lines_of_the_history_are_left_out(tmp_path: Path) -> None:
    history = History(tmp_path / "h.jsonl")
    history.learn(staged("u1", "90", "ptxas", keys=("u1",)), peak_bytes=100 * MB, seconds=1.0)
    history.write()
    whole = (tmp_path / "h.jsonl").read_text()
    odd = [
        "{",
        "3",
        "null",
        "[]",
        '{"keys": 3}',
        '{"peak": "x", "s": 1, "keys": []}',
        "[" * 100_000,
        "\x00\ufffd",
    ]
    odd += ['{"peak": 1e999, "s": 1, "keys": ["a"]}', '{"peak": 1, "s": {}, "keys": [["a"]], "unit": []}']
    (tmp_path / "h.jsonl").write_text("\n".join([*odd, whole]) + "\n")
    again = History(tmp_path / "h.jsonl")
    again.load()
    asked = staged("u1", "90", "ptxas", keys=("u1",))
    again.predict(asked, room_bytes=8 * GIB, slots=4)
    assert asked.predicted.source == "history"
