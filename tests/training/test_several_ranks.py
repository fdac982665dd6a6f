"""Runs of several processes over gloo: the curve of one process, resumed, killed, with mismatches."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fewbits.errors import Unsupported
from fewbits.training.checkpoints.folders import staged
from fewbits.training.config import OPTIMIZERS, TrainConfig
from fewbits.training.ranks.ddp import fit_ddp
from fewbits.training.setup import distribute
from tests.models.tiny import tiny
from tests.training.processes import run_ranks
from tests.training.rank_workers import short_of_memory, with_an_idle_part
from tests.training.test_resume import FULL, LORA, assert_same, remains, settings

FAST = {"period_s": 0.2, "silence_s": 60.0}


@pytest.fixture(scope="module")
def still_folder(tiny_folder, tmp_path_factory):
    """The tiny model without dropout, whose numbers do not depend on how a step is cut into passes."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("still") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return folder


@pytest.fixture
def make(tiny_data, tmp_path):
    def make(folder, name, **options):
        return settings(folder, tiny_data, tmp_path / name, **{"max_steps": 7, "epochs": 1, **options})

    return make


def ran(outcomes):
    assert [outcome["status"] for outcome in outcomes] == [0] * len(outcomes), outcomes
    return outcomes


def curve(folder: Path) -> list[tuple]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["tokens"], r.get("loss", r.get("eval_loss"))) for r in records]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "final").glob("*model.safetensors")))


@pytest.mark.parametrize("options", [LORA, {**FULL, "gradient_accumulation": 2}], ids=["lora", "full"])
def test_two_ranks_are_one_process_to_the_bit(options, killer, make, tiny_folder, tmp_path):
    """Two passes a step, one on each rank: a sum of two numbers knows no order. Dropout is on."""
    assert killer.run(make(tiny_folder, "one", **options), resume=False)["status"] == 0
    ran(killer.run_ranks([make(tiny_folder, "two", **options)] * 2))
    one, two = remains(tmp_path / "one"), remains(tmp_path / "two")
    # the evaluation is a sum in float64 of other parts
    for records in (one["metrics"], two["metrics"]):
        for record in records:
            for name in ("eval_loss",):
                if name in record:
                    record[name] = round(record[name], 9)
    for part in (one["facts"], two["facts"], one["state"], two["state"]):
        if "best_metric" in part:
            part["best_metric"] = round(part["best_metric"], 9)
    assert_same(two, one)
    assert json.loads((tmp_path / "two/run.json").read_text())["ranks"] == 2


@pytest.mark.parametrize(
    "size", [pytest.param(3, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_ranks_with_uneven_ends_follow_the_same_curve(size, killer, make, still_folder, tmp_path):
    """40 rows in steps of 9, on three ranks and on two: the epoch ends with ranks that have no rows."""
    options = {**LORA, "lora_dropout": 0.0, "gradient_accumulation": 3, "max_steps": 12}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    ran(killer.run_ranks([make(still_folder, "ranks", **options)] * size))
    found, want = curve(tmp_path / "ranks"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=1e-6, atol=0)
    for name, tensor in weights(tmp_path / "one").items():
        other = weights(tmp_path / "ranks")[name]
        # Adam divides by the gradient's own size: where that is near zero, a rounding moves a whole step.
        assert (other - tensor).norm() <= 1e-3 * tensor.norm() + 1e-6, name


def test_a_killed_rank_ends_the_run_which_resumes_to_the_same_weights(killer, make, tiny_folder, tmp_path):
    config = make(tiny_folder, "whole", **LORA)
    ran(killer.run_ranks([config] * 2))
    broken = make(tiny_folder, "broken", **LORA)
    first, second = killer.run_ranks([broken] * 2, kill=(1, -6), pace=FAST)
    assert second["status"] == -9 and first["status"] == 1
    # either by the broken connection, or by the system, which the watch asks
    lost = r"rank 0 of 2 .* lost the connection|rank 1 of 2 \(process \d+ on .*\) is gone"
    assert re.match(f"PeerLost: ({lost})", first["error"]) and "go on with resume" in first["error"]
    assert first["seconds"] < 60
    run = json.loads((tmp_path / "broken/run.json").read_text())
    assert run["status"] == "stopped" and re.search(lost, run["error"])
    ran(killer.run_ranks([broken] * 2, resume=True))
    assert_same(remains(tmp_path / "broken"), remains(tmp_path / "whole"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ranks_killed_at_random_moments(killer, make, tiny_folder, tmp_path, record_property):
    """Twenty kills of either rank, in a step or at a write: the run ends as if undisturbed."""
    config = make(tiny_folder, "whole", **LORA)
    fsyncs = [outcome["fsyncs"] for outcome in ran(killer.run_ranks([config] * 2))]
    want, seed = remains(tmp_path / "whole"), random.randrange(10**6)
    choose, kills, runs = random.Random(seed), 0, 0
    record_property("seed", seed)
    while kills < 20:
        broken, folder = make(tiny_folder, f"broken{runs}", **LORA), tmp_path / f"broken{runs}"
        runs += 1
        for _ in range(choose.randrange(2, 6)):
            rank = choose.randrange(2)
            at = -choose.randrange(1, 8)
            if fsyncs[rank] and choose.random() < 0.5:  # the first rank writes
                at = choose.randrange(1, fsyncs[rank] + 1)
            outcomes = killer.run_ranks([broken] * 2, kill=(rank, at), pace=FAST, resume=True)
            killed = outcomes[rank]["status"] == -9
            assert killed or [outcome["status"] for outcome in outcomes] == [0, 0], (rank, at, outcomes)
            # The other one is told by its connection, or ended by its watch, which says so on stderr alone.
            other = outcomes[1 - rank]
            told = other["status"] == 1 and re.match("PeerLost: |$", other["error"])
            assert not killed or other["status"] == 0 or told, (at, other)
            kills += killed
        ran(killer.run_ranks([broken] * 2, resume=True))
        assert_same(remains(folder), want)
    record_property("kills", kills)
    record_property("runs", runs)


def test_a_rank_that_dies_while_a_checkpoint_is_written_is_no_full_disk(tmp_path):
    """The others wait for it before the folder gets its name; who is gone is found out elsewhere."""

    def lost():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")

    with pytest.raises(RuntimeError, match="closed by peer"), staged(tmp_path / "checkpoint-3", barrier=lost):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "parallel, rank",
    [("ddp", 1), pytest.param("fsdp", 0, marks=pytest.mark.nightly)],
)
def test_a_signal_to_one_rank_stops_all_behind_one_checkpoint(
    parallel, rank, killer, make, tiny_folder, tmp_path
):
    options = {**LORA, "parallel": parallel, "logging_steps": 1}
    ran(killer.run_ranks([make(tiny_folder, "whole", **options)] * 2))
    config = make(tiny_folder, "asked", **options)
    outcomes = killer.run_ranks([config] * 2, kill=(rank, -2), signal=int(signal.SIGTERM), pace=FAST)
    step = int(newest(tmp_path / "asked").name.removeprefix("checkpoint-"))
    assert step in (2, 3)  # what the ranks tell each other is read one step later
    sentence = f"SIGTERM came to rank {rank} of 2: the checkpoint of step {step} of 7 is written;"
    for outcome in outcomes:
        assert outcome["status"] == 1 and outcome["error"].startswith(f"StoppedBySignal: {sentence}")
    ran(killer.run_ranks([config] * 2, resume=True))
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "asked")[name], tensor), name
    assert curve(tmp_path / "asked") == curve(tmp_path / "whole")


def test_resumed_on_another_number_of_ranks(killer, make, still_folder, tmp_path):
    """Two ranks, then one, then four: batches stay where they were."""
    options = {**LORA, "lora_dropout": 0.0, "gradient_accumulation": 4, "batch_size": 2}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    config = make(still_folder, "moved", **options)
    killer.run_ranks([config] * 2, kill=(0, -5), pace=FAST)
    assert max(p.name for p in (tmp_path / "moved/checkpoints").iterdir()) == "checkpoint-4"
    ran(killer.run_ranks([config] * 4, resume=True))
    found, want = curve(tmp_path / "moved"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=1e-6, atol=0)


def test_ranks_that_differ_are_refused_with_the_field(
    killer, make, tiny_folder, tiny_data, still_folder, tmp_path
):
    config = make(tiny_folder, "run", **LORA)
    other = tmp_path / "rows.jsonl"
    other.write_text(tiny_data.read_text().replace("plus", "and"))
    for change, sentence in (
        ({"learning_rate": 1e-4}, "learning_rate differs between the ranks: rank 0 (on "),
        ({"train_data": str(other)}, "train_data differs between the ranks"),
        ({"model": str(still_folder)}, "model.attention_dropout differs between the ranks"),
    ):
        outcomes = killer.run_ranks([config, {**config, **change}])
        for outcome in outcomes:
            assert outcome["status"] == 1
            assert outcome["error"].startswith(f"SpecMismatch: {sentence}"), outcome["error"]
    assert not (tmp_path / "run").exists()


def test_what_one_rank_refuses_all_refuse(killer, make, tiny_folder, tmp_path):
    config = make(tiny_folder, "run", **LORA)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    outcomes = killer.run_ranks([config] * 2)
    assert [outcome["error"] for outcome in outcomes] == [
        f"BadInput: output_dir {tmp_path / 'run'} holds another run; choose another one, or go on with that"
        " run with resume."
    ] * 2
    few = make(tiny_folder, "few", **{**LORA, "batch_size": 1, "gradient_accumulation": 2})
    for outcome in killer.run_ranks([few] * 3):
        assert "one step has 2 sequences" in outcome["error"] and "too few for 3 ranks" in outcome["error"]


@pytest.mark.slow
def test_sharded_and_killed_and_resumed_on_more_ranks(killer, make, still_folder, tmp_path):
    """FSDP2 on two ranks, killed, and on three: the curve of one process that holds the whole model."""
    options = {**LORA, "lora_dropout": 0.0, "gradient_accumulation": 3}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    config = make(still_folder, "shares", parallel="fsdp", **options)
    killer.run_ranks([config] * 2, kill=(1, -6), pace=FAST)
    ran(killer.run_ranks([{**config, "keep_gathered": True}] * 3, resume=True))
    found, want = curve(tmp_path / "shares"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=1e-6, atol=0)
    run = json.loads((tmp_path / "shares/run.json").read_text())
    assert run["parallel"] == "fsdp: 3 ranks, as configured" and "sharded over 3 ranks" in run["receipt"]
    assert weights(tmp_path / "shares").keys() == weights(tmp_path / "one").keys()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**LORA, "optimizer": "adamw_8bit"}, id="lora 8 bit", marks=pytest.mark.slow),
        pytest.param(FULL, id="full", marks=pytest.mark.nightly),
    ],
)
def test_whole_and_then_in_shares_or_cut(options, killer, make, still_folder, tmp_path):
    """Two ranks with the whole model each, killed; three with shares, killed; two that cut layers."""
    options = {**options, "lora_dropout": 0.0, "gradient_accumulation": 3, "max_steps": 6, "save_steps": 2}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    config = make(still_folder, "moved", **options)
    killer.run_ranks([config] * 2, kill=(1, -3), pace=FAST)
    assert not (newest(tmp_path / "moved") / "sharded.json").exists()
    killer.run_ranks([{**config, "parallel": "fsdp"}] * 3, resume=True, kill=(1, -5), pace=FAST)
    assert (newest(tmp_path / "moved") / "sharded.json").exists()
    ran(killer.run_ranks([{**config, "parallel": "tensor"}] * 2, resume=True))
    found, want = curve(tmp_path / "moved"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=1e-4, atol=0)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**LORA, "communication": "int8"}, id="lora", marks=pytest.mark.nightly),
        pytest.param({**FULL, "optimizer": "adamw_8bit"}, id="full", marks=pytest.mark.slow),
    ],
)
def test_two_copies_of_two_shares_each(options, killer, make, still_folder, tmp_path):
    """Four ranks, two and two of which share a copy of the weights; killed, and on two that share one."""
    options = {**options, "lora_dropout": 0.0, "gradient_accumulation": 4, "max_steps": 6, "save_steps": 2}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    config = make(still_folder, "copies", parallel="fsdp", **options)
    killer.run_ranks([{**config, "shard_size": 2}] * 4, kill=(3, -5), pace=FAST)
    run = json.loads((tmp_path / "copies/run.json").read_text())
    assert "in 2 copies over 2 ranks each" in run["receipt"]
    ran(killer.run_ranks([config] * 2, resume=True))
    found, want = curve(tmp_path / "copies"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    close = 2e-3 if "communication" in options else 1e-4  # INT8 takes away a 254th of the largest of a block
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=close, atol=0)
    for outcome in killer.run_ranks([{**config, "shard_size": 3, "output_dir": str(tmp_path / "odd")}] * 4):
        assert "shard_size is 3, which does not divide the 4 ranks" in outcome["error"]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param({}, id="two"),
        pytest.param({"parallel": "fsdp", "tensor_size": 2}, id="two pairs", marks=pytest.mark.nightly),
    ],
)
def test_layers_cut_between_two_ranks_follow_one_process(then, killer, make, still_folder, tmp_path):
    """Tensor parallelism: both ranks see the same rows, and sums over a layer's halves have another order.

    Resumed by the same two, or by two such pairs that share the rest by FSDP2.
    """
    options = {**LORA, "lora_dropout": 0.0, "max_steps": 3, "save_steps": 1}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    config = make(still_folder, "halves", parallel="tensor", **options)
    killer.run_ranks([config] * 2, kill=(1, -2), pace=FAST)
    assert newest(tmp_path / "halves").name == "checkpoint-1"
    ran(killer.run_ranks([{**config, **then}] * (4 if then else 2), resume=True))
    found, want = curve(tmp_path / "halves"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=1e-5, atol=0)


@pytest.mark.parametrize("parallel", ["fsdp", "tensor"])
def test_ranks_that_read_their_own_shares_follow_one_process(parallel, killer, make, still_folder, tmp_path):
    """As ranks on GPUs load a folder; their adapters must begin with the very values of one process."""
    options = {**LORA, "lora_dropout": 0.0, "max_steps": 4, "logging_steps": 1, "samples": 0, "seed": 11}
    options |= {"dtype": "float32", "eval_fraction": 0.0}
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    ran(killer.run_ranks([make(still_folder, "shares", parallel=parallel, **options)] * 2, by_slices=True))
    assert "loaded by slices" in json.loads((tmp_path / "shares/run.json").read_text())["receipt"]
    found, want = curve(tmp_path / "shares"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want] and len(want) > 1
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=1e-6, atol=0)
    started, other = (weights(tmp_path / name) for name in ("one", "shares"))
    for name, tensor in started.items():
        if "lora_A" in name:  # nearly as they began: B was zero at the first step
            assert (other[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


@pytest.mark.parametrize(
    "then, ranks, note",
    [
        pytest.param({"parallel": "fsdp", "tensor_size": 2}, 4, "", marks=pytest.mark.slow, id="the same"),
        *(
            pytest.param(then, ranks, note, marks=pytest.mark.nightly, id=id)
            for then, ranks, note, id in (
                ({"parallel": "fsdp", "tensor_size": 2}, 2, "send no gradients", "one pair"),
                ({"parallel": "fsdp"}, 4, "dropped, begun at zero", "shares"),
                ({"parallel": "ddp"}, 2, "dropped, begun at zero", "whole"),
                ({"parallel": "tensor"}, 2, "send no gradients", "cut"),
            )
        ),
    ],
)
def test_gradients_in_few_bits_of_shared_layers_go_on_anywhere(
    then, ranks, note, killer, make, still_folder, tmp_path
):
    """Two pairs of ranks that share layers, killed; resumed anywhere, in the same layout to the bit."""
    options = {**FULL, "gradient_accumulation": 4, "max_steps": 6, "save_steps": 2, "logging_steps": 1}
    options |= {"communication": "int8", "samples": 0, "learning_rate": 1e-3}
    config = make(still_folder, "moved", parallel="fsdp", tensor_size=2, **options)
    whole = {**config, "output_dir": str(tmp_path / "whole")}
    ran(killer.run_ranks([whole] * 4))
    killer.run_ranks([config] * 4, kill=(3, -5), pace=FAST)
    config = {k: v for k, v in config.items() if k not in ("parallel", "tensor_size")}
    ran(killer.run_ranks([{**config, **then}] * ranks, resume=True))
    found, want = curve(tmp_path / "moved"), curve(tmp_path / "whole")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    if not note:
        assert found == want
        assert all(
            torch.equal(t, weights(tmp_path / "whole")[n]) for n, t in weights(tmp_path / "moved").items()
        )
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=2e-3, atol=0)
    run = json.loads((tmp_path / "moved/run.json").read_text())
    assert note in f"{run['parallel']} {run['communication']}"


# Each way to share weights, with an optimizer of its own, in the slow tests (under DDP all optimizers are in
# test_optimizers_on_ranks.py); all of their combinations every night.
ONCE = {
    ("adamw", "fsdp", "full"),
    ("adamw_8bit", "tensor", "lora"),
    ("adafactor", "fsdp", "lora"),
}


@pytest.mark.parametrize(
    ("optimizer", "parallel", "options"),
    [
        pytest.param(
            *(optimizer, parallel, options),
            marks=pytest.mark.slow if (optimizer, parallel, kind) in ONCE else pytest.mark.nightly,
            id=f"{kind}-{parallel}-{optimizer}",
        )
        for kind, options in (("lora", LORA), ("full", FULL))
        for parallel in ("ddp", "fsdp", "tensor")
        for optimizer in ("adamw", "adamw_8bit", "adafactor", "sgd")
    ],
)
def test_every_optimizer_is_one_process_or_refused(
    optimizer, parallel, options, killer, make, still_folder, tmp_path
):
    """Also after a kill in the middle, from what the checkpoint holds of its state."""
    options = {**options, "lora_dropout": 0.0, "gradient_accumulation": 2, "max_steps": 4, "save_steps": 1}
    options |= {"optimizer": optimizer, "weight_decay": 0.1, "samples": 0, "logging_steps": 1}
    options["learning_rate"] = 0.5 if optimizer == "sgd" else 5e-3
    config = make(still_folder, "two", parallel=parallel, **options)
    if optimizer == "adafactor" and parallel != "ddp":
        for outcome in killer.run_ranks([config] * 2):
            assert f"which no process has under parallel={parallel}; set optimizer to" in outcome["error"]
        return
    assert killer.run(make(still_folder, "one", **options), resume=False)["status"] == 0
    killer.run_ranks([config] * 2, kill=(1, -4), pace=FAST)
    assert newest(tmp_path / "two").name == "checkpoint-3"
    ran(killer.run_ranks([config] * 2, resume=True))
    found, want = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert [record[:2] for record in found] == [record[:2] for record in want]
    # moments of 8 bits have other blocks in a slice, and are rounded otherwise
    close = 2e-4 if optimizer == "adamw_8bit" and parallel != "ddp" else 2e-6
    torch.testing.assert_close([r[2] for r in found], [r[2] for r in want], rtol=close, atol=0)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adamw", "adamw_8bit", "sgd"}))
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_optimizers_that_are_not_shared_are_refused(optimizer, kind):
    config = TrainConfig.from_mapping({"model": "m", "train_data": "d", "optimizer": optimizer})
    with pytest.raises(Unsupported, match=f"{optimizer} .*parallel={kind}.*parallel=ddp"):
        distribute._refuse(config, None, kind)


def test_a_rank_that_runs_out_of_memory_repeats_its_step_alone(tmp_path):
    plain = run_ranks(short_of_memory, 2, str(tmp_path / "plain"), False)
    short = run_ranks(short_of_memory, 2, str(tmp_path / "short"), True)
    assert [found[2] for found in short] == [0, 2]
    for found in (*plain, *short):
        assert found[0] == plain[0][0]
        assert all(torch.equal(p, q) for p, q in zip(found[1], plain[0][1], strict=True))


def test_parts_that_a_batch_leaves_alone(tmp_path):
    """DDP would wait for their gradients, and say at the next step that it had."""
    first, second = run_ranks(with_an_idle_part, 2, str(tmp_path))
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_known_families_touch_all_their_weights():
    for family, finds in (("llama", False), ("unheard_of", True)):
        model, args = tiny("llama"), SimpleNamespace()
        model.config.model_type = family
        fit_ddp(args, model)
        assert args.ddp_find_unused_parameters is finds and args.ddp_bucket_cap_mb == 25
