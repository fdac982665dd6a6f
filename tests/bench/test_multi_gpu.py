"""The script for several GPUs, dry: two CPU processes, tiny shapes, every part."""

from __future__ import annotations

import csv
import json

import pytest

from tests.training.processes import run_ranks
from tests.training.rank_workers import dry_run


@pytest.mark.nightly
def test_every_part_runs_and_is_noted(tmp_path):
    run_ranks(dry_run, 2, str(tmp_path))
    found = json.loads((tmp_path / "multi_gpu.json").read_text())
    assert found["dry_run"]
    parts = [row["part"] for row in found["rows"]]
    assert parts == ["check", "weak", "fsdp", *["full"] * 4, *["sharded"] * 4, *["exchange"] * 8]
    rows = {(row["part"], row["format"]): row for row in found["rows"]}
    assert 0 < rows["check", ""]["int8_error"] < 0.02
    assert rows["full", "int8"]["receipt"].startswith("gradients travel in int8")
    assert all(row["gpus"] == 2 and row.get("ms", 1) > 0 for row in found["rows"])
    with (tmp_path / "rows.csv").open() as file:
        recorded = list(csv.DictReader(file))
    assert len([row for row in recorded if row["metric"] == "time"]) == len(parts) - 1
    assert all(row["commit"] == "none" and float(row["value"]) >= 0 for row in recorded)
