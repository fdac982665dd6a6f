"""Writes docs/reference/families.md: what becomes of every causal family of the installed transformers.

    fewbits models --all --json | python scripts/families_table.py

Each row is the outcome of a trial: a tiny model of the family is packed and fused
(`fewbits.models.packing.trial`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
OUTCOMES = {
    "fused": "packed, trained through the fused decoder",
    "unfused": "packed, trained through its own layers",
    "refused": "refused",
    "untried": "no tiny model of it could be built",
}


def page(trials: list[dict[str, Any]], version: str) -> str:
    """The page: a line of counts, and a table sorted by outcome."""
    counts = Counter(trial["outcome"] for trial in trials)
    summary = "; ".join(f"{counts[name]} {said}" for name, said in OUTCOMES.items())
    lines = [
        "# Model families",
        "",
        f"Every causal language model of transformers {version}, tried as a tiny model by",
        "`fewbits models --all`; this page is written by `scripts/families_table.py`. A trial takes the",
        "default values of a configuration, but for what they switch off and all published models of the",
        "family do (Granite's multipliers, SmolLM3's layers without positions).",
        "",
        f"{summary}.",
        "",
        "| family | what fewbits does | why it is not fused, or not all of it |",
        "|---|---|---|",
    ]
    order = list(OUTCOMES)
    lines += map(row, sorted(trials, key=lambda trial: (order.index(trial["outcome"]), trial["model_type"])))
    return "\n".join(lines) + "\n"


def row(trial: dict[str, Any]) -> str:
    """One family's line of the table; tests/docs/test_families_page.py holds the page to it."""
    reason = trial["reason"].partition(", and its modules do not make a generic one: ")
    why = (reason[2] or reason[0]).replace("|", "/").replace("<", "&lt;")
    if " has no spec, so " in why:
        why = "it has no [spec](../guide/adding-a-model.md)"
    return f"| `{trial['model_type']}` | {OUTCOMES[trial['outcome']]} | {why[:160]} |"


if __name__ == "__main__":
    from transformers import __version__

    PAGE.write_text(page(json.load(sys.stdin), __version__), encoding="utf-8")
