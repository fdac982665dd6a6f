"""Exports that a full disk or a kill ends: what was there stays whole, and nothing else is left."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewbits import FastLanguageModel
from fewbits.errors import BadInput
from fewbits.models.folders.whole_folder import remove_leftovers
from tests.models.loading import save_tiny
from tests.models.test_whole_folder import child, names, partials
from tests.models.tiny_folders import pair_tokenizer, saved

METHODS = (
    "gptq:int4_g32",
    "awq:int4_g32_zp",
    "bitsandbytes:nf4",
    "torchao:int8",
    "compressed_tensors:w4a16",
    "gguf",
)


def base(folder: Path, method: str) -> tuple[Any, Any]:
    """A model with weights of about 100 kB."""
    if method == "gguf":
        saved(folder / "base", "llama", pair_tokenizer())
    else:
        save_tiny(folder / "base", hidden_size=64, intermediate_size=128)
    return FastLanguageModel.from_pretrained(folder / "base", load_in_4bit=False)


def export(model: Any, words: Any, folder: Path, method: str, **options: Any) -> Any:
    if method == "gguf":
        return model.save_pretrained_gguf(folder, words, "q8_0", **options)
    return model.save_pretrained_merged(folder, words, save_method=method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, method: str) -> None:
    """The real thing: the kernel refuses to write on, in the middle of the weights."""
    model, words = base(tmp_path, method)
    export(model, words, tmp_path / "out", method, check=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(BadInput, match=r"^the disk is full [^\n]+\.$"):
            export(model, words, tmp_path / "out", method, overwrite=True, check=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert names(tmp_path) == {"base", "out"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["gptq:int4_g32", "gguf"])
def test_killed_before_any_change_of_a_file(
    tmp_path: Path, method: str, record_property: Callable[[str, object], None]
) -> None:
    """At each of them: the folder is whole or not there, and a later run leaves nothing else."""
    model, words = base(tmp_path, method)
    for moment in range(1, 300):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        status = child(lambda: export(model, words, tmp_path / "out", method, check=False), kill_at=moment)
        remove_leftovers(tmp_path)
        for partial in partials(tmp_path):  # killed before it could say whose it is
            assert names(partial) <= {"owner.json"}
            os.utime(partial, (0, 0))
        remove_leftovers(tmp_path)
        assert names(tmp_path) <= {"base", "out"}, moment
        if (tmp_path / "out").exists():
            assert (tmp_path / "out" / "export.json").is_file(), moment
        if status == 0:
            break
        assert status == -signal.SIGKILL
    record_property("kills", moment - 1)
    assert status == 0 and moment > 20 and (tmp_path / "out" / "export.json").is_file()
