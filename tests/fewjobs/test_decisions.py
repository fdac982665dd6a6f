"""Who may start, who gives way: decisions on staged figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fewjobs.pressure import Kind, relieve, runaways
from fewjobs.schedule import PATIENCE_S, admit
from fewjobs.stage import Predicted, Stage, State
from tests.fewjobs.stages import staged

MB = 10**6


def waiting(predicted: int, queued: float = 0.0, **facts) -> Stage:
    return staged(f"u{predicted}.cpp", predicted_bytes=predicted * MB, queued_s=queued, **facts)


def running(rss: int, started: float, predicted: int = 0, **facts) -> Stage:
    stage = staged(f"r{rss}.cpp", predicted_bytes=predicted * MB, started_s=started, pid=1, **facts)
    stage.state = facts.get("state", State.RUNNING)
    stage.memory.rss_bytes = stage.memory.size_bytes = stage.memory.high_bytes = rss * MB
    return stage


def admitted(stages, present=(), budget=1000, other=0, slots=8, now=1.0):
    found = admit(stages, present, budget_bytes=budget * MB, other_bytes=other * MB, slots=slots, now_s=now)
    return [s.predicted.bytes // MB for s in found]


def test_biggest_first_and_smaller_ones_in_the_gap() -> None:
    assert admitted([waiting(s) for s in (100, 700, 300, 150)]) == [700, 150, 100]


def test_of_unknown_ones_the_median_input_is_first_then_the_smallest() -> None:
    stages = [waiting(100, source="prior", input_bytes=size) for size in (50, 10, 90, 30, 70)]
    chosen = admit(stages, [], budget_bytes=250 * MB, other_bytes=0, slots=2, now_s=1.0)
    assert [s.input_bytes for s in chosen] == [50, 10]
    known = waiting(120, source="siblings")
    assert admit([*stages, known], [], budget_bytes=250 * MB, other_bytes=0, slots=1, now_s=1.0) == [known]


def on_its_way(used_cpu_s: float, since_s: float, held: int) -> Stage:
    parts = tuple(part * MB for part in (100, 100, 100, 100, 100, 100, 600, 600))
    stage = running(held, 0.0, predicted=600, source="history", attempts=1, predicted_s=8.0)
    stage.predicted.parts, stage.predicted.cpu_s = parts, 8.0
    stage.times.used_cpu_s, stage.memory.sampled_s = used_cpu_s, since_s
    return stage


def test_how_far_a_stage_has_come_is_told_by_its_processor_time() -> None:
    # Eight seconds after its start, of which it has had one: its peak is still far away.
    short = waiting(500, predicted_s=2.0)
    short.predicted.parts = (500 * MB,) * 8
    slow = on_its_way(1.0, 8.0, 100)
    assert slow.done_share(8.0) == pytest.approx(1 / 8)
    assert admitted([short], [slow], now=8.0) == [500]
    assert admitted([short], [on_its_way(5.0, 8.0, 100)], now=8.0) == []
    # On a machine that goes at a third of the speed everything takes longer, the course of others too.
    started = admit([short], [slow], budget_bytes=1000 * MB, other_bytes=0, slots=8, now_s=8.0, pace=3.0)
    assert started == [short]


def test_no_more_than_slots() -> None:
    assert admitted([waiting(s) for s in (10, 20, 30)], slots=2) == [30, 20]
    assert admitted([waiting(10)], [running(5, 0.0)], slots=1) == []


def test_what_is_present_counts_with_what_it_will_need() -> None:
    assert admitted([waiting(500)], [running(50, 0.0, predicted=600)]) == []
    assert admitted([waiting(500)], [running(50, 0.0, predicted=400)]) == [500]
    hibernated = replace(running(5, 0.0, predicted=900), state=State.HIBERNATED)
    assert admitted([waiting(500)], [hibernated]) == [500]
    assert admitted([waiting(500)], [hibernated], now=10.0) == []  # it has rested long enough


def test_a_stage_larger_than_the_budget_runs_alone() -> None:
    assert admitted([waiting(5000), waiting(100)]) == [5000]
    assert admitted([waiting(5000)], [running(10, 0.0)]) == []


def test_other_processes_count() -> None:
    assert admitted([waiting(500), waiting(300)], other=400) == [500]


def test_who_waits_too_long_lets_nobody_pass() -> None:
    present = [running(600, 0.0, predicted=600)]
    assert admitted([waiting(700), waiting(100)], present, now=1.0) == [100]
    assert admitted([waiting(700), waiting(100)], present, now=PATIENCE_S + 1) == []


def test_a_retry_waits_until_it_is_alone() -> None:
    alone = waiting(100, alone=True)
    assert admitted([alone, waiting(50)], [running(10, 0.0)], now=PATIENCE_S + 1) == []
    assert admitted([alone], []) == [100]
    assert admitted([waiting(50)], [replace(running(10, 0.0), alone=True)]) == []


def decide(*present: Stage, budget=1000, now=10.0, fixed=True):
    actions = relieve(present, budget_bytes=budget * MB, other_bytes=0, now_s=now, fixed=fixed)
    return [(a.kind, a.stage.memory.rss_bytes // MB) for a in actions]


def test_nothing_while_there_is_room() -> None:
    assert decide(running(400, 1.0), running(300, 2.0)) == []


def test_the_youngest_is_paused_before_the_limit_is_reached() -> None:
    old, young = running(500, 1.0, rate=600 * MB), running(400, 2.0, rate=0.0)
    assert decide(old, young) == [(Kind.PAUSE, 400)]
    old.memory.rate = 200 * MB
    assert decide(old, young) == []
    actions = relieve([old, young], budget_bytes=1000 * MB, other_bytes=0, now_s=10.0, horizon_s=0.4)
    assert [a.stage for a in actions] == [young]  # where samples come late


def test_what_is_known_may_come_nearer_to_the_limit() -> None:
    facts = {"source": "history", "rate": 100 * MB}
    assert decide(running(560, 1.0, predicted=561, **facts), running(395, 2.0, predicted=396, **facts)) == []
    assert decide(running(560, 1.0, rate=100 * MB), running(395, 2.0, rate=0.0)) == [(Kind.PAUSE, 395)]


def test_the_first_moment_of_a_compiler_is_no_growth() -> None:
    stage = staged("x.cpp", state=State.RUNNING)
    for now, held in ((0.05, 5), (0.10, 29), (0.15, 30)):
        stage.memory.sized(now, held * MB)
    assert stage.memory.rate == 0
    stage.memory.sized(0.20, 50 * MB)
    assert stage.memory.rate == pytest.approx(400 * MB)


def test_past_the_limit_all_but_the_oldest_stop_at_once() -> None:
    assert [size for _, size in decide(running(500, 1.0), running(300, 2.0), running(190, 3.0))] == [190, 300]


@pytest.mark.parametrize(("can_page", "kind"), [(True, Kind.HIBERNATE), (False, Kind.REQUEUE)])
def test_a_paused_one_is_hibernated_or_requeued(can_page: bool, kind: Kind) -> None:
    paused = running(400, 2.0, state=State.PAUSED, can_page=can_page)
    assert decide(running(550, 1.0, rate=100 * MB), paused)[0] == (kind, 400)


def test_alone_it_is_paged_and_without_a_pager_told_what_it_needs() -> None:
    assert decide(running(970, 1.0, can_page=True)) == [(Kind.PAGE, 970)]
    assert decide(running(970, 1.0)) == [(Kind.TOO_LARGE, 970)]
    assert decide(running(970, 1.0), fixed=False) == [(Kind.REQUEUE, 970)]


def test_the_oldest_goes_on_when_there_is_room_again() -> None:
    first = running(200, 1.0, predicted=300, state=State.PAUSED)
    second = running(200, 2.0, predicted=300, state=State.PAUSED)
    assert decide(second, first, running(300, 0.0, predicted=300)) == [(Kind.RESUME, 200)]
    assert decide(first, running(500, 0.0, predicted=700)) == []
    assert decide(replace(first, predicted=Predicted(5000 * MB))) == [(Kind.RESUME, 200)]


def grow(stage: Stage, rates: list[float], step: float = 0.05) -> float:
    now, held = 0.0, 0.0
    for rate in rates:
        now, held = now + step, held + rate * step
        stage.memory.sized(now, int(held))
    return now


def test_growth_without_a_plateau_past_the_class_is_a_runaway() -> None:
    stage = staged("x.cu", name="cudafe++", state=State.RUNNING)
    now = grow(stage, [200e6] * 600)  # 30 s: 6 GB
    assert runaways([stage], now_s=now)[0].kind is Kind.RUNAWAY
    assert not runaways([stage], now_s=now, limit_bytes=7 * 10**9)


def test_what_stops_growing_is_no_runaway() -> None:
    stage = staged("x.cu", name="cudafe++", state=State.RUNNING)
    now = grow(stage, [200e6] * 600 + [0.0] * 60)
    assert stage.memory.size_bytes > stage.class_bytes
    assert not runaways([stage], now_s=now)


def test_a_saw_is_no_runaway() -> None:
    stage = staged("x.cu", name="cudafe++", state=State.RUNNING)
    now = grow(stage, ([200e6] * 30 + [-4e9]) * 5 + [2e9] * 46)
    assert not runaways([stage], now_s=now, limit_bytes=3 * 10**9) or stage.memory.rising_s < now - 1.0


def test_the_class_follows_what_was_measured() -> None:
    assert staged("x", name="cudafe++", predicted_bytes=6 * 10**9).class_bytes == 12 * 10**9


def test_what_it_took_is_known_though_it_was_paged_out_and_shrank_again() -> None:
    stage = staged("x.cpp", state=State.RUNNING, hibernations=1, peak_bytes=400 * MB)
    stage.reset()
    grow(stage, [500e6] * 26 + [-450e6] * 20)  # 650 MB, most of it on the disk; then the assembler alone
    assert stage.memory.size_bytes < 250 * MB
    assert stage.memory.most_bytes == pytest.approx(650 * MB, rel=0.01)
    stage.reset()
    assert stage.memory.most_bytes == 0
