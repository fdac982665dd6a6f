"""`fewbits warm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fewbits.cli.warm as command
from fewbits.training.ahead.warming import Warmed


def test_the_command_says_what_was_compiled(run, tmp_path, monkeypatch):
    asked = []

    def warm(model, recipe, **options):
        asked.append((model, recipe, options))
        return Warmed("an H200", Path("/cache"), ("b_kernel", "few_rows"), 3 << 20, 4.25)

    monkeypatch.setattr(command, "warm", warm)
    told = json.loads(
        run("warm", tmp_path, "--recipe", "int8", "--batch", "4x512", "--rank", 8, "--json").out
    )
    assert asked == [(str(tmp_path), "int8", {"batch": (4, 512), "rank": 8})]
    assert told.pop("kernels") == ["b_kernel", "few_rows"]
    assert told == {"gpu": "an H200", "folder": "/cache", "bytes": 3 << 20, "seconds": 4.25}
    text = run("warm", tmp_path).out
    assert "2 kernels for an H200: b_kernel, few_rows" in text and "/cache" in text


@pytest.mark.parametrize(
    ("flags", "message"), [(["--batch", "4"], "as in 4x2048"), (["--rank", "0"], "a rank of at least 1")]
)
def test_bad_questions(run, tmp_path, flags, message):
    ran = run("warm", tmp_path, *flags)
    assert ran.code == 1 and message in ran.err
