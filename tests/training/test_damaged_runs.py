"""A run folder with a file damaged in any way: one sentence, or the very run; never a raw exception."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaConfig

from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch
from fewbits.training.checkpoints.manifest import FILE, Writers, fault_of, write_manifest
from fewbits.training.checkpoints.sharded import load_sharded, write_sharded
from fewbits.training.config import TrainConfig
from fewbits.training.run import train
from tests.training import damaged_runs
from tests.training.damaged_runs import as_if_killed, damage, settings, tried

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def killed(killer, tiny_folder, tiny_data, tmp_path_factory):
    """A run with an adapter that was killed after its best checkpoint and one more; its configuration."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    config = settings(tiny_folder, tiny_data, folder)
    assert killer.run(config, resume=False)["status"] == 0
    whole = load_file(folder / "final/adapter_model.safetensors")
    as_if_killed(folder)
    return folder, config, whole


@pytest.fixture
def copy(killed, tmp_path):
    """A fresh copy of the killed run, and its configuration."""
    folder, config, whole = killed
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", TrainConfig.from_mapping({**config, "output_dir": str(tmp_path / "run")}), whole


def resumed(config: TrainConfig) -> str:
    """What the run told while it went on."""
    text = io.StringIO()
    train(config, resume=True, console=Console(file=text, width=10_000))
    return text.getvalue()


def test_undamaged_it_ends_as_it_would_have(copy):
    folder, config, whole = copy
    assert "manifest" not in resumed(config)
    found = load_file(folder / "final/adapter_model.safetensors")
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "fewbits.json", "trainable.safetensors"]
)
@pytest.mark.parametrize("kind", ["removed", "flipped", "truncated", "emptied", "a folder"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(copy, name, kind):
    folder, config, _ = copy
    newest = folder / "checkpoints/checkpoint-5"
    damage(newest / name, kind, random.Random(1))
    with pytest.raises(BadCheckpoint) as error:
        resumed(config)
    text = str(error.value)
    assert f"{newest} is damaged: " in text and name in text and "checkpoint-4 before it is whole" in text
    assert text.endswith(f"rm -r {newest} && fewbits train {folder}/config.yaml --resume")
    shutil.rmtree(newest)  # the command
    assert train(TrainConfig.from_yaml(folder / "config.yaml"), resume=True).steps == 6


def test_damage_of_several_is_seen_before_one_is_offered(copy):
    folder, config, _ = copy
    for step in (5, 4):
        damage(folder / f"checkpoints/checkpoint-{step}/optimizer.pt", "flipped", random.Random(step))
    with pytest.raises(BadCheckpoint, match=r"checkpoint-3 before .* rm -r .*checkpoint-5 .*checkpoint-4 &&"):
        resumed(config)


def test_a_damaged_best_checkpoint(copy):
    folder, config, _ = copy
    best = json.loads((folder / "checkpoints/checkpoint-5/trainer_state.json").read_text())[
        "best_global_step"
    ]
    path = folder / f"checkpoints/checkpoint-{best}"
    assert best < 5
    damage(path / "trainable.safetensors", "flipped", random.Random(1))
    with pytest.raises(BadCheckpoint, match="the best one so far, is damaged: the bytes of trainable"):
        resumed(config)


def test_a_checkpoint_of_an_earlier_version(copy):
    """Without a manifest what can be seen is seen, and what cannot is said."""
    folder, config, _ = copy
    newest = folder / "checkpoints/checkpoint-5"
    (newest / FILE).unlink()
    with pytest.raises(BadCheckpoint, match=f"{FILE} is missing"):  # it was written with one
        resumed(config)
    facts = json.loads((newest / "fewbits.json").read_text())
    del facts["has_manifest"]
    (newest / "fewbits.json").write_text(json.dumps(facts))
    assert fault_of(newest) is None
    kept = (newest / "optimizer.pt").read_bytes()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        for kind in ("removed", "truncated", "emptied", "a folder"):
            if name == "rng_state.pth" and kind == "removed":
                continue  # another number of ranks has other ones
            broken = newest.with_name("checkpoint-9")
            shutil.copytree(newest, broken)
            damage(broken / name, kind, random.Random(1))
            assert name in str(fault_of(broken)), (name, kind)
            shutil.rmtree(broken)
    with zipfile.ZipFile(newest / "optimizer.pt") as archive:
        entry = max(archive.infolist(), key=lambda e: e.file_size)
    changed = bytearray(kept)
    changed[entry.header_offset + 200] ^= 1
    (newest / "optimizer.pt").write_bytes(changed)
    assert fault_of(newest) == "optimizer.pt cannot be read"  # by the archive's own checksums
    (newest / "optimizer.pt").write_bytes(kept)
    assert "checkpoint-5 has no manifest.json (an earlier version" in resumed(config)


def test_a_manifest_names_every_byte(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one").write_bytes(b"1" * 100)
    (tmp_path / "two").write_bytes(b"")
    write_manifest(tmp_path, Writers())
    assert fault_of(tmp_path) is None
    text = (tmp_path / FILE).read_bytes()
    for at in range(0, len(text), 3):
        changed = bytearray(text)
        changed[at] ^= 1
        (tmp_path / FILE).write_bytes(changed)
        if json_of(bytes(changed)) != json_of(text):  # white space may be another
            assert fault_of(tmp_path) is not None, at
    (tmp_path / FILE).write_bytes(text)
    (tmp_path / "a/one").write_bytes(b"1" * 50 + b"0" + b"1" * 49)
    assert fault_of(tmp_path) == "the bytes of a/one are not those that were written"
    assert [fault_of(tmp_path, rank, 2) is None for rank in range(2)].count(True) == 1  # a share each


def json_of(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_several_ranks_note_what_each_has_written(tmp_path):
    for name in ("sharded/__0_0.distcp", "sharded/__1_0.distcp", "rng_state_1.pth", "scheduler.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    parts: list[dict[str, object]] = []
    for rank in range(2):
        write_manifest(tmp_path, Writers(rank, 2, lambda part: parts.append(part) or parts))
    assert [sorted(part) for part in parts] == [
        ["scheduler.pt", "sharded/__0_0.distcp"],
        ["rng_state_1.pth", "sharded/__1_0.distcp"],
    ]


def test_a_sharded_checkpoint_with_a_flipped_bit(tmp_path):
    model = torch.nn.Linear(8, 8)
    write_sharded(tmp_path / "checkpoint-1", WithConfig(model))
    load_sharded(tmp_path / "checkpoint-1", WithConfig(model))
    path = next((tmp_path / "checkpoint-1/sharded").glob("*.distcp"))
    damage(path, "flipped", random.Random(1))
    with pytest.raises(BadCheckpoint, match=r"is damaged: the bytes of sharded/.*distcp are not those"):
        load_sharded(tmp_path / "checkpoint-1", WithConfig(model))


class WithConfig(torch.nn.Module):
    """A module that can be kept: it has a configuration to write beside it."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.config = LlamaConfig()


@pytest.mark.parametrize("what", ["eval_data", "weights"])
def test_what_a_run_was_begun_with_is_compared(killer, tiny_folder, tiny_data, tmp_path, what):
    model, rows = tmp_path / "model", tmp_path / "eval.jsonl"
    shutil.copytree(tiny_folder, model)
    rows.write_text("".join(tiny_data.read_text().splitlines(keepends=True)[:9]))
    config = TrainConfig.from_mapping(
        {"model": str(model), "train_data": str(tiny_data), "eval_data": str(rows), "max_steps": 4,
         "save_steps": 1, "output_dir": str(tmp_path / "run"), "load_in_4bit": False, "samples": 0,
         "device": "cpu", "report": False}
    )  # fmt: skip
    train(config)
    facts = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**facts, "status": "running"}))
    if what == "eval_data":
        rows.write_text(rows.read_text().replace("plus", "and"))
    else:
        path = model / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    sentence = r"eval.jsonl or its tokenizer has changed" if what == "eval_data" else "weights in .*model has"
    with pytest.raises(SpecMismatch, match=sentence):
        train(config, resume=True)


@pytest.mark.parametrize("name", ["run.json", "samples.json", "config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_folder_or_a_file_in_the_wrong_place(copy, name):
    folder, config, _ = copy
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(BadInput, match=f"{name} is a f.* belongs; move it away"):
        resumed(config)


def test_missing_records_are_said(copy):
    folder, config, _ = copy
    (folder / "run.json").unlink()
    (folder / "config.yaml").unlink()
    told = resumed(config)
    assert "config.yaml is missing, so" in told and "run.json is missing, so" in told


def test_damaged_lines_of_metrics_are_said_and_no_other_is_lost(copy):
    folder, config, _ = copy
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "}{\n", "[3]\n", '{"step": "x"}\n', *lines[2:]]))
    assert "3 lines of" in resumed(config)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert set(range(1, 7)) <= set(steps)


def test_written_files_have_the_mode_that_the_umask_leaves(tmp_path, tiny_folder, tiny_data):
    config = TrainConfig.from_mapping(
        {
            "model": str(tiny_folder),
            "train_data": str(tiny_data),
            "max_steps": 1,
            "samples": 0,
            "output_dir": str(tmp_path / "run"),
            "load_in_4bit": False,
            "device": "cpu",
            "merge": True,
        }
    )
    before = os.umask(0o027)
    try:
        train(config)
    finally:
        os.umask(before)
    modes = {
        str(p.relative_to(tmp_path / "run")): oct(stat.S_IMODE(p.stat().st_mode))
        for p in (tmp_path / "run").rglob("*")
        if p.is_file()
    }
    assert len(modes) > 12 and set(modes.values()) == {"0o640"}, modes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("every", "least"),
    [pytest.param(61, 8, marks=pytest.mark.slow), pytest.param(1, 500, marks=pytest.mark.nightly)],
)
def test_damages(every, least):
    """What each is: benchmarks/robustness/README.md."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.training.damaged_runs", "--every", str(every)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bad"] == []
    assert (
        found["folders"] >= least
        and min(found["outcomes"][kind] for kind in ("fine", "sentence")) > least // 4
    )


def test_a_door_that_fails_is_seen(killed, monkeypatch, tmp_path):
    """The harness is not blind: to an error of another kind, nor to a run that ends with other weights."""
    folder, *_ = killed
    shutil.copytree(folder, tmp_path / "killed")
    for name, text in (("killed", "other"), ("whole", "wanted")):
        (tmp_path / name / "final").mkdir(parents=True)
        (tmp_path / name / "final/adapter_model.safetensors").write_text(text)

    def resume(folder):
        """Says that all went well."""

    def merge(folder):
        raise KeyError(str(folder))

    monkeypatch.setattr(damaged_runs, "resume", resume)
    monkeypatch.setattr(damaged_runs, "doors", lambda name: [merge, resume])
    found = list(tried(tmp_path, ("killed", "samples.json", "emptied"), 20))
    assert [(door, kind) for door, kind, _ in found] == [("merge", "raw"), ("resume", "wrong")]
