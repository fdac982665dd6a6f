"""Corrupt model folders: one sentence each, within seconds, through every public door."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fewbits.errors import BadCheckpoint
from fewbits.models.folders.checkpoint import inspect_folder
from tests.models.corrupt_folders import INDEX, cases
from tests.models.loading import save_tiny

ROOT = Path(__file__).resolve().parents[2]


def tried(*options: str) -> dict[str, Any]:
    """What `corrupt_folders` found, in a process of its own: it forks one for every try."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-m", "tests.models.corrupt_folders", *options]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    assert found["bad"] == []
    assert found["outcomes"]["sentence"] > found["tries"] / 2  # most corruptions do harm


def test_some_corrupt_folders() -> None:
    check(tried("--every", "120", "--seconds", "60"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_corrupt_folders() -> None:
    found = tried("--seconds", "60")
    assert found["folders"] >= 600
    check(found)


def test_names_differ() -> None:
    names = [(base, what) for base, what, _ in cases()]
    assert len(set(names)) == len(names)


def test_a_door_that_fails_is_seen(tmp_path: Path) -> None:
    """The harness is not blind: an error of another kind, one that hangs, and a sentence of two lines."""
    from fewbits.errors import FewbitsError
    from tests.models.corrupt_folders import outcome

    def raises(error: Exception) -> Any:
        def door(folder: Path) -> None:
            raise error

        return door

    assert outcome(raises(KeyError("x")), tmp_path, 20)[0] == "raw"
    assert outcome(raises(FewbitsError("two\nlines.")), tmp_path, 20)[0] == "raw"
    assert outcome(raises(FewbitsError("it is so.")), tmp_path, 20) == ("sentence", "it is so.")
    assert outcome(lambda folder: _for_ever(), tmp_path, 1)[0] == "hang"
    assert outcome(lambda folder: None, tmp_path, 20) == ("fine", "")


def _for_ever() -> None:
    while True:
        pass


@pytest.mark.parametrize("layers", [1, 3, 10**6, 2**31 - 1])
def test_another_number_of_layers_than_the_weights_have(layers: int, tmp_path: Path) -> None:
    """Fewer would load and compute something else; a million would be built for minutes."""
    save_tiny(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": layers}))
    with pytest.raises(BadCheckpoint, match=rf"layers {layers:,}, but the weights .* have 2\b"):
        inspect_folder(tmp_path / "model")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/x/y.safetensors", "a/../../x.safetensors"])
def test_an_index_that_leaves_its_folder(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "other")
    save_tiny(tmp_path / "model", shard="60KB")
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="is not in the folder"):
        inspect_folder(tmp_path / "model")


def test_a_pickle_in_a_safetensors_index_is_not_read_even_where_pickles_are(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", shard="60KB")
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "pytorch_model.bin"
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    for allow_pickle in (False, True):
        with pytest.raises(BadCheckpoint, match=r"'pytorch_model\.bin', which is no safetensors file"):
            inspect_folder(tmp_path / "model", allow_pickle=allow_pickle)
