"""Preference methods on two processes over gloo: the losses of one process with the whole batch; resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewbits.errors import BadInput, Unsupported
from fewbits.training.config import TrainConfig
from fewbits.training.preferences.trainers import check_method, rows_of_a_pass
from fewbits.training.setup.callbacks import read_metrics

pytest.importorskip("trl")


def longer(completions, **columns):
    """A reward for GRPO: the length of a completion."""
    return [float(len(str(c))) for c in completions]


def rows_for(method: str) -> list[dict]:
    if method == "kto":
        return [
            {"prompt": f"Q{i}", "completion": "Yes" * (i % 5 + 1), "label": i % 2 == 0} for i in range(16)
        ]
    if method == "grpo":
        return [{"prompt": f"Once {i}"} for i in range(16)]
    return [
        {"prompt": f"Q{i}", "chosen": "Yes" * (i % 5 + 1), "rejected": "No." * (i % 3 + 1)} for i in range(16)
    ]


@pytest.fixture
def make(tmp_path, tiny_folder):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shapes = json.loads((folder / "config.json").read_text())  # dropout would be drawn anew on each process
    (folder / "config.json").write_text(json.dumps({**shapes, "attention_dropout": 0.0}))

    def make(method: str, name: str, **changes) -> dict:
        data = tmp_path / f"{method}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows_for(method)))
        values = {
            "model": str(folder), "train_data": str(data), "output_dir": str(tmp_path / name),
            "method": method, "max_steps": 3, "max_seq_length": 64, "batch_size": 4, "lora_r": 4,
            "save_steps": 1, "keep_checkpoints": 3, "learning_rate": 1e-2, "device": "cpu",
        }  # fmt: skip
        if method == "grpo":
            values |= {"rewards": [f"{__name__}:longer"], "num_generations": 2, "max_completion_length": 6}
        return values | changes

    return make


def curve(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def ran(outcomes: list[dict]) -> None:
    assert [outcome["status"] for outcome in outcomes] == [0] * len(outcomes), outcomes


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("orpo", marks=pytest.mark.slow),
        *(pytest.param(method, marks=pytest.mark.nightly) for method in ("dpo", "kto", "simpo", "reward")),
    ],
)  # of pairs the test of a killed run below has one of the slow tests
def test_two_processes_learn_as_one_with_the_whole_batch(killer, make, tmp_path, method):
    # ORPO's own likelihood is a mean over the tokens of a pass, so the passes must be the same, too
    passes = {"batch_size": 2, "gradient_accumulation": 2} if method == "orpo" else {}
    one = killer.run(make(method, "one", **passes), resume=False)
    assert one["status"] == 0, one
    ran(killer.run_ranks([make(method, "two", **passes)] * 2))
    facts = json.loads((tmp_path / "two" / "run.json").read_text())
    assert facts["ranks"] == 2 and facts["parallel"].startswith("ddp")
    want, found = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [step for step, _ in found] == [step for step, _ in want] == [1, 2, 3]
    torch.testing.assert_close([loss for _, loss in found], [loss for _, loss in want], rtol=1e-4, atol=1e-5)
    for name, tensor in weights(tmp_path / "one").items():
        other = weights(tmp_path / "two")[name]
        assert (other - tensor).norm() <= 2e-2 * tensor.norm() + 1e-6, name


@pytest.mark.slow
def test_grpo_trains_on_two_processes(killer, make, tmp_path):
    """Completions are drawn on each process, so only what both must share can be compared."""
    ran(killer.run_ranks([make("grpo", "two", learning_rate=1e-1)] * 2))
    lines = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3]
    assert any("lora_B" in name and w.abs().max() > 0 for name, w in weights(tmp_path / "two").items())


@pytest.mark.slow
def test_a_run_of_two_processes_that_was_killed_goes_on_to_the_same_weights(killer, make, tmp_path):
    ran(killer.run_ranks([make("dpo", "whole")] * 2))
    config = make("dpo", "cut")
    killer.run_ranks([config] * 2, kill=(1, -3), pace={"period_s": 0.2, "silence_s": 60.0})
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["status"] == "stopped"
    ran(killer.run_ranks([config] * 2, resume=True))
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert curve(tmp_path / "whole") == curve(tmp_path / "cut")


@pytest.mark.parametrize(
    ("method", "processes", "changes", "error", "sentence"),
    [
        ("dpo", 2, {"parallel": "fsdp"}, Unsupported, "set parallel to auto or ddp"),
        ("dpo", 2, {"batch_size": 3}, BadInput, "a step has 3 rows .* 2 processes cannot share evenly"),
        ("dpo", 8, {"batch_size": 4}, BadInput, "too few for 8 ranks"),
        ("kto", 4, {"batch_size": 4}, BadInput, "4 processes have 1 in a pass; set batch_size to at least 8"),
    ],
)
def test_what_cannot_be_shared_is_refused(make, method, processes, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        check_method(TrainConfig.from_mapping(make(method, "no", **changes)), processes)


def test_a_step_has_the_same_rows_on_any_number_of_processes(make):
    config = TrainConfig.from_mapping(make("dpo", "rows", batch_size=4, gradient_accumulation=2))
    assert [rows_of_a_pass(config, processes) for processes in (1, 2, 4, 8)] == [4, 4, 2, 1]
