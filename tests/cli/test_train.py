"""Flags, key=value words and the YAML file become one configuration."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest

from fewbits.training.config import TrainConfig


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Calls of `train`, which is replaced."""

    class Calls(list):
        """With what the last one was told of its launcher."""

    calls = Calls()

    def train(config, *, resume=False, console=None, launch=None, attempt=0):
        calls.append((config, resume))
        calls.launched = launch, attempt
        return SimpleNamespace(
            final=tmp_path / "run/final",
            merged=None,
            report=tmp_path / "r.html",
            best_metric=1.25,
            best_step=7,
            leads=True,
        )

    module = ModuleType("fewbits.training.run")
    module.train = train
    monkeypatch.setitem(sys.modules, "fewbits.training.run", module)
    return calls


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: m\ntrain_data: d.jsonl\nlearning_rate: 1.0e-3\n")
    return path


def test_the_command_line_wins(run, trained, config):
    shown = run(
        "train", config, "epochs=3", "--learning-rate", "1e-4", "batch_size=2", "--packing", "--no-merge",
        "--resume", "lr=5", "--lora-targets", "q_proj,v_proj", "fields.prompt=question",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    ((got, resume),) = trained
    assert resume
    assert (got.model, got.epochs, got.batch_size, got.packing, got.merge) == ("m", 3.0, 2, True, False)
    assert got.learning_rate == 1e-4  # the flag, not lr=5
    assert got.lora_targets == ("q_proj", "v_proj")
    assert got.fields == {"prompt": "question"}
    assert "evaluation loss 1.2500 at step 7" in shown.out
    assert "run/final" in shown.out
    assert "merged" not in shown.out


def test_what_the_launcher_said_is_passed_on(run, trained, config, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert run("train", config).code == 0
    assert trained.launched == ("slurm 12.0", 2)


def test_without_a_file(run, trained):
    assert run("train", "--model", "m", "--train-data", "d").code == 0
    assert run("train", "model=m", "train_data=d", "--seed", "3").code == 0
    assert [c.model for c, _ in trained] == ["m", "m"]
    assert trained[1][0].seed == 3


def test_every_field_has_a_flag(run):
    shown = run("train", "--help").out
    for item in dataclasses.fields(TrainConfig):
        assert f"--{item.name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["missing.yaml"], "there is no configuration file missing.yaml"),
        (["learnin_rate=1", "model=m", "train_data=d"], "did you mean learning_rate?"),
        ([], "has no model"),
        (["--model", "m", "--train-data", "d", "--seed", "x"], "seed is 'x'; it must be a whole number"),
    ],
)
def test_bad_settings(run, trained, argv, message):
    shown = run("train", *argv)
    assert shown.code == 1
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not trained
