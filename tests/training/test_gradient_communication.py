"""Gradients in few bits over DDP: two processes and more, gloo; what arrives, what is kept, what is saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats import get_format
from fewbits.training.ranks.communication import GradientExchange, Lane, Travel
from fewbits.training.ranks.ddp import DDPExchange, bucket_mib
from fewbits.training.ranks.fsdp_communication import quantize_reduce_scatter
from tests.training.communication_workers import (
    Aligned,
    Net,
    bad_number,
    exact_mean,
    failing,
    many_steps,
    saved_and_loaded,
    sharded_steps,
)
from tests.training.processes import run_ranks

SMALL = ("first.bias", "norm.weight", "norm.bias", "odd")  # what travels in float32


def largest(x: dict[str, Tensor]) -> float:
    return max(float(t.abs().max()) for t in x.values())


@pytest.mark.parametrize(
    ("format", "ranks", "how"),
    [
        ("int8", 2, {}),
        ("int4", 3, {}),
        ("float8_e4m3", 1, {}),
        ("int4", 2, {"stochastic": True, "seed": 7}),
        ("int4", 4, {"node_size": 2}),
        ("int8", 2, {"node_size": 2}),
    ],
    ids=str,
)
def test_what_arrived_and_what_is_kept_are_all_gradients(format: str, ranks: int, how: dict) -> None:
    """Also over the step at which DDP orders its buckets anew."""
    count = 4
    found = run_ranks(many_steps, ranks, format, count, how)
    first = found[0]
    for other in found[1:]:
        for mine, theirs in zip(first["steps"], other["steps"], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    exact = [exact_mean(step, ranks) for step in range(count)]
    for name in exact[0]:
        arrived = sum(step[name].double() for step in first["steps"])
        whole = sum(step[name] for step in exact)
        kept = first["pending"][name][: whole.numel()].view(whole.shape)
        # float32 sums of a few numbers below 30, a few roundings each step
        torch.testing.assert_close(arrived + kept, whole, rtol=0, atol=count * 30 * 2**-22)
        if name in SMALL:
            assert not kept.any()
        else:
            assert kept.abs().max() > 100 * count * 30 * 2**-22  # without it the sum does not close
    assert first["counter"] == count
    assert len(first["buckets"]) > 1


def test_what_is_kept_in_half_the_memory() -> None:
    """bfloat16 rounds what is kept to 2**-9 of itself: of half a code of a number below 30, twice."""
    count = 4
    found = run_ranks(many_steps, 2, "int8", count, {"residual_dtype": torch.bfloat16})[0]
    exact, lost = [exact_mean(step, 2) for step in range(count)], count * 2 * 30 / 127 / 2 * 2**-9
    for name in exact[0]:
        arrived = sum(step[name].double() for step in found["steps"])
        whole = sum(step[name] for step in exact)
        kept = found["pending"][name][: whole.numel()].view(whole.shape)
        torch.testing.assert_close(arrived + kept, whole, rtol=0, atol=lost)
        assert name in SMALL or kept.abs().max() > 2 * lost


@pytest.mark.parametrize(("format", "most"), [("int8", 0.02), ("int4", 0.25), ("float8_e4m3", 0.08)])
def test_one_step_is_near_the_mean(format: str, most: float) -> None:
    """Two roundings of half a step, of 1/127 or 1/7 of a block's largest; E4M3: twice 2**-4 of a number."""
    (got, _) = run_ranks(many_steps, 2, format, 1, {"error_feedback": False, "stochastic": False})
    exact = exact_mean(0, 2)
    for name, want in exact.items():
        error = (got["steps"][0][name].double() - want).abs().max() / max(float(want.abs().max()), 1e-9)
        assert error < (1e-6 if name in SMALL else most)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_of_one_rank_is_seen_by_all_and_forgotten(bad: float) -> None:
    found = run_ranks(bad_number, 2, "int8", bad)
    for steps in found:
        clean = [all(bool(g.isfinite().all()) for g in step.values()) for step in steps]
        assert clean == [True, False, True, True]
        assert not steps[1]["second.weight"][3, 4].isfinite()
        assert not steps[1]["first.bias"][2].isfinite()
        assert steps[1]["first.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("ranks", "node_size", "kept"), [(2, 1, torch.bfloat16), (4, 2, torch.bfloat16), (2, 1, torch.float32)]
)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(
    ranks: int, node_size: int, kept: torch.dtype, tmp_path: Path
) -> None:
    """Bit by bit, though DDP begins once more with its first order of buckets."""
    how = {"net": Aligned, "node_size": node_size, "residual_dtype": kept}
    whole = run_ranks(many_steps, ranks, "int4", 5, how)[0]
    run_ranks(saved_and_loaded, ranks, "int4", str(tmp_path), True, [0, 3], how)
    after = run_ranks(saved_and_loaded, ranks, "int4", str(tmp_path), False, [3, 5], how)[0]
    assert after["counter"] == whole["counter"] == 5
    assert any(bool(t.any()) for t in after["before"].values())
    for mine, theirs in zip(whole["steps"][3:], after["steps"], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("ranks", "node_size"), [(1, 1), (3, 1), (4, 2)])
def test_another_number_of_ranks_takes_up_what_was_kept(ranks: int, node_size: int, tmp_path: Path) -> None:
    written = run_ranks(saved_and_loaded, 2, "int8", str(tmp_path), True, [0, 3], {})[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "gradient_exchange_00000.safetensors",
        "gradient_exchange_00001.safetensors",
    ]
    how = {"node_size": node_size}
    read = run_ranks(saved_and_loaded, ranks, "int8", str(tmp_path), False, [3, 4], how)[0]
    assert largest(written["pending"]) > 1e-3
    for name, kept in written["pending"].items():
        torch.testing.assert_close(read["before"][name], kept, rtol=0, atol=1e-6)
    exact = exact_mean(3, ranks)
    for name, want in exact.items():
        before, after = (run["pending"][name][: want.numel()].view(want.shape) for run in (written, read))
        torch.testing.assert_close(read["steps"][0][name].double() + after, want + before, rtol=0, atol=1e-4)
    assert "2 ranks had kept" in read["receipt"]


def test_bytes_and_receipt() -> None:
    """A small model has padding and float32 vectors; what a large one sends is in the receipt."""
    (got, _) = run_ranks(many_steps, 2, "int8", 1, {})
    values = sum(p.numel() for p in Net().parameters())
    assert got["bytes"] < 2 * values * 1.5  # float32 would be 4 * values for two ranks
    assert "int8_g128 (asked: int8)" in got["receipt"] and "0.516 of bfloat16" in got["receipt"]


def test_an_error_of_the_exchange_is_told_and_stays() -> None:
    for told in run_ranks(failing, 2):  # the second step may fail in DDP, which has not finished the first
        assert len(told) == 2 and "planted" in told[0]


def test_what_a_checkpoint_lacks_is_said(tmp_path: Path) -> None:
    exchange = DDPExchange(get_format("int8"), Travel(None), {}, Lane(torch.device("cpu")))
    exchange.load(tmp_path)
    assert "begin at zero" in str(exchange)
    exchange.travel.size = 2
    exchange.save(tmp_path)
    with pytest.raises(BadCheckpoint, match="1 of 2 ranks"):
        exchange.load(tmp_path)
    (tmp_path / "gradient_exchange_00000.safetensors").write_bytes(b"no")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        exchange.load(tmp_path)


def test_seeds_are_unlike() -> None:
    exchange = DDPExchange(
        get_format("int8"), Travel(None), {}, Lane(torch.device("cpu")), error_feedback=False, seed=5
    )
    seeds = {exchange.seed_of(a, b, c) for a in range(20) for b in (1, 2) for c in range(20)}
    assert len(seeds) == 800 and all(2**62 <= seed < 2**63 for seed in seeds)
    exchange.stochastic = False
    assert exchange.seed_of(0, 1, 0) is None


# FSDP2.


@pytest.mark.parametrize(("format", "ranks"), [("int8", 2), ("int4", 3), ("float8_e4m3", 2)])
def test_sharded_what_arrived_and_what_is_kept_are_all_gradients(format: str, ranks: int) -> None:
    how = {"residual_dtype": torch.float32}
    found = run_ranks(sharded_steps, ranks, format, [0, 3], how)[0]
    exact = [exact_mean(step, ranks) for step in range(3)]
    for name in exact[0]:
        arrived = sum(step[name].double() for step in found["steps"])
        whole = sum(step[name] for step in exact)
        kept = found["kept"][name].view(whole.shape)
        torch.testing.assert_close(arrived + kept, whole, rtol=0, atol=3 * 30 * 2**-22)
        # an axis of 3 is cut in slices of 1 or 2: "odd" is a matrix here
        assert bool(kept.any()) == (whole.dim() > 1)
    assert found["step"] == 6 and f"{ranks} ranks" in found["receipt"]


def test_sharded_without_feedback_a_bad_number_is_seen_by_all() -> None:
    how = {"error_feedback": False, "seed": 3}
    for found in run_ranks(sharded_steps, 2, "int8", [0, 3], how, "", False, 1):
        clean = [all(bool(g.isfinite().all()) for g in step.values()) for step in found["steps"]]
        assert clean == [True, False, True]
        assert not found["kept"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_a_checkpoint_goes_on(ranks: int, tmp_path: Path) -> None:
    """With as many ranks bit by bit; with another number, nothing of what was kept is lost."""
    written = run_ranks(sharded_steps, 2, "int4", [0, 2], {}, str(tmp_path), True)[0]
    read = run_ranks(sharded_steps, ranks, "int4", [2, 4], {}, str(tmp_path), False)[0]
    for name, kept in written["kept"].items():
        torch.testing.assert_close(read["before"][name], kept, rtol=0, atol=1e-6)
    if ranks == 2:
        whole = run_ranks(sharded_steps, 2, "int4", [0, 4], {})[0]
        assert read["step"] == whole["step"]
        for mine, theirs in zip(whole["steps"][2:], read["steps"], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_ddp_kept_goes_on_in_shares(tmp_path: Path) -> None:
    """Of each rank's gradients and of their mean: nothing is lost."""
    written = run_ranks(saved_and_loaded, 2, "int4", str(tmp_path), True, [0, 3], {})[0]
    read = run_ranks(sharded_steps, 2, "int4", [3, 4], {}, str(tmp_path), False)[0]
    assert any(bool(kept.any()) for kept in written["pending"].values())
    for name, kept in written["pending"].items():
        found = read["before"].get(name, torch.zeros_like(kept))
        torch.testing.assert_close(found[: kept.numel()], kept[: found.numel()], rtol=0, atol=1e-6)


def test_what_ranks_kept_of_parts_of_layers_is_not_added_to_other_parts(tmp_path: Path) -> None:
    """Two ranks to a layer have residuals of other rows; other ranks begin at zero, and say so."""
    run_ranks(sharded_steps, 2, "int4", [0, 2], {}, str(tmp_path), True)
    files = sorted(tmp_path.glob("gradient_exchange_*"))
    exchange = SimpleNamespace(size=2, rank=0, node_size=1, tensor_size=2, notes=[], step=0)
    for number in (1, 2):
        exchange.notes.clear()
        exchange.size = 2 * number  # as many ranks, which now share layers; or more
        GradientExchange.load(exchange, tmp_path)  # it has no _set_state: that would fail
        assert exchange.step == 4 and len(files) == 2
        note = exchange.notes[0]
        assert "2 ranks, 1 to a layer" in note and "dropped and begin at zero" in note


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(Unsupported, match="not sharded"):
        quantize_reduce_scatter(Net(), get_format("int8"))


def test_buckets_are_large_where_there_are_many() -> None:
    def of(mib: int) -> int:
        return bucket_mib(torch.nn.Linear(mib, 2**18, bias=False, device="meta"))

    assert [of(mib) for mib in (100, 800, 1600, 100_000)] == [25, 25, 50, 128]
