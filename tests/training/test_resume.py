"""A run killed at any moment and resumed ends with the weights, bit for bit, of one that was not killed."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewbits.cli import describe
from fewbits.errors import SpecMismatch, StoppedBySignal
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.training.checkpoints.folders import load_weights, save_weights
from fewbits.training.config import TrainConfig, prolongs
from fewbits.training.ranks.processes import Ranks
from fewbits.training.run_folder.lock import RunLock
from fewbits.training.setup.signals import StopRequest
from tests.models.mixtures import mixture

LORA = {"load_in_4bit": False, "lora_r": 4, "lora_dropout": 0.2, "gradient_accumulation": 2, "batch_size": 3}
FULL = {"load_in_4bit": False, "lora_r": 0, "packing": True, "max_seq_length": 64, "batch_size": 2}


def settings(tiny_folder, tiny_data, output, **options):
    return {
        "model": str(tiny_folder),
        "train_data": str(tiny_data),
        "eval_fraction": 0.2,
        "output_dir": str(output),
        "epochs": 3,
        "learning_rate": 5e-3,
        "eval_steps": 3,
        "save_steps": 4,
        "logging_steps": 2,
        "early_stopping_patience": 4,
        "samples": 1,
        "sample_tokens": 4,
        "report": False,
        "device": "cpu",
        **options,
    }


def remains(folder: Path) -> dict:
    """All that a run leaves which does not depend on the clock."""
    run = json.loads((folder / "run.json").read_text())
    timed = ("seconds", "tokens_per_second", "memory_bytes")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = max((folder / "checkpoints").iterdir(), key=lambda p: int(p.name.removeprefix("checkpoint-")))
    state = torch.load(newest / "optimizer.pt", weights_only=True)["state"]
    trainer = json.loads((newest / "trainer_state.json").read_text())
    return {
        "weights": load_file(next((folder / "final").glob("*model.safetensors"))),
        "optimizer": {f"{i}.{k}": v for i, entry in state.items() for k, v in entry.items()},
        "metrics": [{k: v for k, v in record.items() if k not in timed} for record in records],
        "samples": json.loads((folder / "samples.json").read_text()),
        "facts": {
            k: run[k] for k in ("status", "steps", "tokens", "best_metric", "best_step", "stopped_early")
        },
        "state": {k: trainer[k] for k in ("global_step", "epoch", "best_metric", "best_global_step")},
        "files": sorted(p.name for p in (*folder.iterdir(), *(folder / "checkpoints").iterdir())),
    }


def assert_same(found: dict, want: dict) -> None:
    for part in ("weights", "optimizer"):
        assert found[part].keys() == want[part].keys()
        for name, tensor in want[part].items():
            assert torch.equal(found[part][name], tensor), name
    for part in ("metrics", "samples", "facts", "state", "files"):
        assert found[part] == want[part], part


@pytest.fixture(scope="module")
def whole(killer, tiny_folder, tiny_data, tmp_path_factory):
    """Runs that nobody killed: what they leave, how long they take, how often they sync."""
    runs = {}
    for name, options in (("lora", LORA), ("full", FULL)):
        folder = tmp_path_factory.mktemp("whole") / name
        outcome = killer.run(settings(tiny_folder, tiny_data, folder, **options), resume=False)
        assert outcome["status"] == 0
        runs[name] = (remains(folder), outcome)
    return runs


@pytest.mark.parametrize(
    "kind, options", [("lora", LORA), pytest.param("full", FULL, marks=pytest.mark.nightly)]
)
def test_killed_at_writes(kind, options, whole, killer, tiny_folder, tiny_data, tmp_path):
    """Each attempt dies at an fsync: inside config, run.json, a checkpoint, before and after its rename."""
    want, outcome = whole[kind]
    config = settings(tiny_folder, tiny_data, tmp_path / "run", **options)
    choose = random.Random(kind)
    kills = 0
    for attempt in range(9):
        at = attempt + 1 if attempt < 3 else choose.randrange(8, max(9, outcome["fsyncs"] // 3))
        result = killer.run(config, at_fsync=at, resume=True)
        if result["status"] == 0:
            break
        assert result["status"] == -9
        kills += 1
    assert killer.run(config, resume=True)["status"] == 0
    assert kills >= 4
    assert_same(remains(tmp_path / "run"), want)


def test_killed_by_the_clock(whole, killer, tiny_folder, tiny_data, tmp_path):
    want, outcome = whole["lora"]
    config = settings(tiny_folder, tiny_data, tmp_path / "run", **LORA)
    choose = random.Random()
    for _ in range(4):
        result = killer.run(config, after=choose.uniform(0.1, outcome["seconds"]), resume=True)
        assert result["status"] in (0, -9)
    assert killer.run(config, resume=True)["status"] == 0
    assert_same(remains(tmp_path / "run"), want)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_checkpoint_and_the_end(number, whole, killer, tiny_folder, tiny_data, tmp_path):
    """As schedulers announce it: the step under way is ended; resumed, the run is one that nobody stopped."""
    want, _ = whole["lora"]
    config = settings(tiny_folder, tiny_data, tmp_path / "run", **LORA)
    outcome = killer.run(config, at_step=6, signal=number, resume=True)
    sentence = f"{number.name} came: the checkpoint of step 6 of 21 is written; go on with --resume."
    assert (outcome["status"], outcome["error"]) == (1, f"StoppedBySignal: {sentence}")
    assert (tmp_path / "run/checkpoints/checkpoint-6").is_dir()
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert (run["status"], run["error"]) == ("stopped", f"StoppedBySignal: {sentence}")
    assert killer.run(config, resume=True)["status"] == 0
    assert_same(remains(tmp_path / "run"), want)


def test_the_exit_code_of_a_run_that_a_signal_ends(killer, tiny_folder, tiny_data, tmp_path):
    """As shells count: 128 and the signal's number; of one process, while it trains."""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)):
        config = settings(tiny_folder, tiny_data, tmp_path / number.name, **LORA)
        outcome = killer.run(config, at_step=2, signal=number, resume=False, command=True)
        assert f"fewbits train ended with {code};" in outcome["error"], outcome
        assert json.loads((tmp_path / number.name / "run.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize(
    "scheduler, kind",
    [
        pytest.param("constant", {"epochs": 1.0}, id="constant", marks=pytest.mark.slow),  # five runs
        pytest.param("cosine", {"max_steps": 4}, id="cosine", marks=pytest.mark.nightly),
    ],
)
def test_a_finished_run_is_prolonged(scheduler, kind, killer, tiny_folder, tiny_data, tmp_path):
    """With a constant learning rate to the weights of a run that was as long from the beginning."""
    options = {**LORA, "scheduler": scheduler, "warmup": 0, "logging_steps": 1, "eval_fraction": 0.0}
    options |= {"learning_rate": 1e-3, "gradient_accumulation": 4, "save_steps": 2}
    longer = {name: 2 * value for name, value in kind.items()}
    run, whole = (settings(tiny_folder, tiny_data, tmp_path / n, **options) for n in ("run", "whole"))
    assert killer.run({**whole, **longer}, resume=False)["status"] == 0
    assert killer.run({**run, **kind}, resume=False)["status"] == 0
    short = remains(tmp_path / "run")["facts"]["steps"]
    assert killer.run({**run, **kind}, resume=True)["status"] == 0  # finished, and that is all
    assert killer.run({**run, **longer}, resume=True, at_fsync=4)["status"] == -9  # before it has begun
    assert killer.run({**run, **longer}, resume=True)["status"] == 0
    found, want = remains(tmp_path / "run"), remains(tmp_path / "whole")
    assert found["facts"]["steps"] == want["facts"]["steps"] > short
    if scheduler == "constant":
        assert_same(found, want)
    rates = [[r["learning_rate"] for r in records["metrics"]][short:] for records in (found, want)]
    assert rates[0] == pytest.approx(rates[1])
    shorter = killer.run({**run, **kind}, resume=True)
    assert f"with another {next(iter(kind))}" in shorter["error"]


def test_what_prolongs_a_run():
    def config(**changes):
        return TrainConfig(model="m", train_data="d", **changes)

    assert prolongs(config(max_steps=9), config(max_steps=8))
    assert prolongs(config(epochs=2.0, report=False), config(epochs=1.5))
    for now, earlier in (
        ({"max_steps": 8}, {"max_steps": 9}),
        ({"max_steps": 9}, {}),
        ({"max_steps": 9, "seed": 1}, {"max_steps": 8}),
        ({"seed": 2}, {"seed": 1}),
        ({}, {}),
    ):
        assert not prolongs(config(**now), config(**earlier))


def test_a_signal_before_the_training_ends_at_once():
    said = r"SIGUSR1 came to rank 0 of 1 .*, which was not training"
    with pytest.raises(StoppedBySignal, match=said) as stopped, StopRequest(Ranks()):
        signal.raise_signal(signal.SIGUSR1)
    assert stopped.value.number == signal.SIGUSR1 and describe(stopped.value)[0] == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_who_handles_these_signals_goes_on_handling_them():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with StopRequest(Ranks()) as stop:
            signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] and not stop()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.nightly  # a few kills in the slow tests: test_killed_at_writes and test_killed_by_the_clock
@pytest.mark.parametrize("kind, options", [("lora", LORA), ("full", FULL)])
@pytest.mark.timeout(1800)
def test_killed_many_times(kind, options, whole, killer, tiny_folder, tiny_data, tmp_path, record_property):
    """Twenty kills of ``fewbits train``, at any moment or write, over as many runs as that takes.

    Each run ends as one that was not disturbed, bit for bit.
    """
    want, outcome = whole[kind]
    seed = random.randrange(10**6)
    choose, kills, in_saves, runs = random.Random(seed), 0, 0, 0
    record_property("seed", seed)
    while kills < 20:
        folder = tmp_path / f"run{runs}"
        config, runs = settings(tiny_folder, tiny_data, folder, **options), runs + 1
        for _ in range(choose.randrange(3, 9)):
            fate = {"after": choose.uniform(0, outcome["seconds"])}
            if choose.random() < 0.5:
                fate = {"at_fsync": choose.randrange(1, outcome["fsyncs"])}
            ended = killer.run(config, resume=True, command=True, **fate)
            assert ended["status"] in (0, -9), (seed, ended)
            kills += ended["status"] == -9
            in_saves += ended["status"] == -9 and any(folder.rglob(".*.writing"))
        ended = killer.run(config, resume=True, command=True)
        assert ended["status"] == 0, (seed, ended)
        assert_same(remains(folder), want)
    record_property("kills", kills)
    record_property("of them during a save", in_saves)
    record_property("runs", runs)
    assert in_saves


def test_a_job_that_goes_on_on_another_machine(whole, killer, tiny_folder, tiny_data, tmp_path):
    """Requeued by its scheduler, or started again by its launcher; another job does not take the folder."""
    want, outcome = whole["lora"]
    config = settings(tiny_folder, tiny_data, tmp_path / "run", **LORA)
    killed = killer.run(config, at_fsync=outcome["fsyncs"] // 2, host="node1", launch="run 7")
    assert killed["status"] == -9
    for launch in ("run 8", None):
        refused = killer.run(config, host="node2", launch=launch)
        assert "on node1, another machine" in refused["error"] and "take_over=true" in refused["error"]
    gone_on = killer.run(config, resume=False, attempt=1, host="node2", launch="run 7")
    assert gone_on["status"] == 0, gone_on
    assert_same(remains(tmp_path / "run"), want)


def test_a_folder_in_use_is_left_alone(whole, killer, tiny_folder, tiny_data, tmp_path):
    """A second run is refused and touches nothing; after a kill the folder is taken over."""
    want, outcome = whole["lora"]
    config = settings(tiny_folder, tiny_data, tmp_path / "run", **LORA)
    assert killer.run(config, after=0.7 * outcome["seconds"])["status"] in (0, -9)
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    with RunLock(tmp_path / "run") as lock:
        lock.take()
        for resume in (True, False):
            refused = killer.run(config, resume=resume)
            assert refused["status"] == 1 and ("in use by" if resume else "another run") in refused["error"]
    after = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    ours = tmp_path / "run", tmp_path / "run/run.lock"
    assert [x for x in after if x[0] not in ours] == [x for x in before if x[0] not in ours]
    assert killer.run(config)["status"] == 0
    assert_same(remains(tmp_path / "run"), want)


def test_a_checkpoint_of_other_layers_says_which_and_how_to_go_on(tmp_path):
    """As of runs on Mixtral that began when all-linear left its experts out."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    saved = get_peft_model(mixture("mixtral"), r=4, target_modules=attention, seed=1)
    save_weights(saved, tmp_path)
    with pytest.raises(SpecMismatch, match="all-linear has come to mean the routed experts") as error:
        load_weights(get_peft_model(mixture("mixtral"), r=4), tmp_path)
    advice = re.search(r"set lora_targets: \[(.*?)\] in the config.yaml", str(error.value))
    again = get_peft_model(mixture("mixtral"), r=4, target_modules=advice[1].split(", "), seed=2)
    load_weights(again, tmp_path)
    before = saved.state_dict()
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())
    with pytest.raises(SpecMismatch, match=r"adapters on k_proj.* and the model on q_proj; set") as error:
        load_weights(get_peft_model(mixture("mixtral"), r=4, target_modules=["q_proj"]), tmp_path)
    assert "all-linear" not in str(error.value)
    with pytest.raises(SpecMismatch, match="written for another model or other adapters"):
        load_weights(get_peft_model(mixture("mixtral"), r=8, target_modules=attention), tmp_path)
    save_weights(get_peft_model(mixture("mixtral"), r=4), tmp_path)
    with pytest.raises(SpecMismatch, match="resume with the configuration it was started with"):
        load_weights(get_peft_model(mixture("mixtral"), r=4, target_modules=attention), tmp_path)
