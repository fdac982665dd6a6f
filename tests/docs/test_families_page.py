"""docs/reference/families.md says what this version does with each family that has a spec."""

from __future__ import annotations

import re
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import __version__ as transformers_version

from fewbits.families.catalog import SPECS
from fewbits.models.packing.trial import try_family

ROOT = Path(__file__).resolve().parents[2]
TABLE = runpy.run_path(str(ROOT / "scripts" / "families_table.py"))
PAGE = TABLE["PAGE"].read_text(encoding="utf-8")
SAME_REASONS = f"of transformers {transformers_version}," in PAGE  # of another version reasons may differ


def rows() -> dict[str, str]:
    return {row.split("`")[1]: row for row in PAGE.splitlines() if row.startswith("| `")}


@pytest.mark.parametrize("model_type", SPECS)
def test_the_table_says_what_becomes_of_a_family(model_type: str) -> None:
    written = rows().get(model_type, "no row")
    tried = TABLE["row"](asdict(try_family(model_type)))
    if not SAME_REASONS:
        written, tried = (row.rpartition(" | ")[0] for row in (written, tried))
    way_out = "run `fewbits models --all --json | python scripts/families_table.py`"
    assert written == tried, f"docs/reference/families.md has another row: {way_out}"


def test_a_family_without_a_row_of_its_own_has_no_spec() -> None:
    """Only those are said to lack one; and the counts at the head of the page are those of its rows."""
    without = {name for name, row in rows().items() if "it has no [spec]" in row}
    assert without and not without & SPECS.keys()
    for outcome in TABLE["OUTCOMES"].values():
        count = sum(f"| {outcome} |" in row for row in rows().values())
        assert re.search(rf"\b{count} {re.escape(outcome)}\b", PAGE)
