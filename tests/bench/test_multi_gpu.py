"""The script for several GPUs, dry: two CPU processes, tiny shapes, every part."""

from __future__ import annotations

import json

import pytest

from training.processes import run_ranks
from training.rank_workers import dry_run


@pytest.mark.slow
def test_every_part_runs_and_is_noted(tmp_path):
    run_ranks(dry_run, 2, str(tmp_path))
    found = json.loads((tmp_path / "multi_gpu.json").read_text())
    assert found["dry_run"]
    rows = {(row["part"], row["what"].rsplit(" ", 1)[-1]): row for row in found["rows"]}
    assert [row["part"] for row in found["rows"]] == ["check", "weak", "fsdp", "full", "full", "full"]
    assert 0 < rows["check", "CPU"]["int8_error"] < 0.02
    assert rows["full", "int8"]["receipt"].startswith("gradients travel in int8")
    assert all(row["gpus"] == 2 and row.get("all_ms", 1) > 0 for row in found["rows"])
