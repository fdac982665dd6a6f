"""The folder that a run leaves says whether its bytes are still those that were written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fewbits.cli.models import merge_adapter
from fewbits.errors import BadCheckpoint
from fewbits.models.fast import FastLanguageModel
from fewbits.models.folders.folder_manifest import FILE
from fewbits.models.folders.whole_folder import whole_folder
from fewbits.training.config import TrainConfig
from fewbits.training.run import train
from tests.training.damaged_runs import damage, settings


@pytest.fixture(scope="module", params=["adapter", "model"])
def ended(request, tiny_folder, tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended") / "run"
    config = {**settings(tiny_folder, tiny_data, folder), "max_steps": 1, "samples": 0}

    config |= {"lora_r": 0} if request.param == "model" else {"lora_r": 2}
    train(TrainConfig.from_mapping({**config, "report": False}), resume=False)
    return folder / "final"


@pytest.fixture
def final(ended, tmp_path) -> Path:
    import shutil

    return Path(shutil.copytree(ended, tmp_path / "run" / "final"))


def test_one_flipped_bit_in_any_file_that_is_read_is_named(final):
    FastLanguageModel.from_pretrained(final, load_in_4bit=False)
    names = [p.name for p in final.iterdir() if p.name != FILE]
    assert {"tokenizer.json"} < set(names) and len(names) > 3
    for name in (n for n in names if n != "README.md"):  # PEFT's page, which nothing reads
        whole = (final / name).read_bytes()
        damage(final / name, "flipped", random.Random(name))
        with pytest.raises(BadCheckpoint, match=f"^{final} is damaged: .*{name}.*; copy it again.*delete"):
            FastLanguageModel.from_pretrained(final, load_in_4bit=False)
        if (final / "adapter_config.json").is_file():
            with pytest.raises(BadCheckpoint, match=f"{name}"):
                merge_adapter(str(final), str(final.parent / "merged"))
        (final / name).write_bytes(whole)
    (final / "tokenizer.json").unlink()  # an adapter would take its base's
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is missing"):
        FastLanguageModel.from_pretrained(final, load_in_4bit=False)


def test_who_changes_the_folder_deletes_the_manifest_and_other_tools_have_their_own(final):
    (final / "README.md").write_text("my page")
    FastLanguageModel.from_pretrained(final, load_in_4bit=False)
    config = final / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json"):
        FastLanguageModel.from_pretrained(final, load_in_4bit=False)
    (final / FILE).write_text('{"files": ["another tool\'s"]}')
    FastLanguageModel.from_pretrained(final, load_in_4bit=False)
    (final / FILE).unlink()
    FastLanguageModel.from_pretrained(final, load_in_4bit=False)


def test_a_manifest_goes_with_what_it_describes(tmp_path):
    for overwrite in (True, None):
        place = tmp_path / str(overwrite)
        place.mkdir()
        for name in ("config.json", "model.safetensors", FILE):
            (place / name).write_text("old")
        with whole_folder(place, overwrite=overwrite) as new:
            (new / "config.json").write_text("new")
            (new / "model.safetensors").write_text("new")
        assert not (place / FILE).exists()
