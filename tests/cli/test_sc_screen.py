"""``fewbits sc swap``, ``allocate`` and ``screen``, one after the other, on a small real model."""

from __future__ import annotations

import json

import pytest

from fewbits.recipes.stochastic_config import read_config


@pytest.mark.slow
def test_swap_allocate_screen(run, shared, tmp_path):
    text = tmp_path / "story.txt"
    text.write_text((shared / "data/text/tinystories_val.txt").read_text()[:1500])
    model = shared / "data/models/stories260k"
    common = ("--model", model, "--text", text, "--window", "64", "--max-tokens", "252", "--batch-size", "4")
    swaps, mixed, board = tmp_path / "swaps.json", tmp_path / "mixed.yaml", tmp_path / "board.jsonl"
    told = ("sc", "swap", *common, "--base", "32", "--attention", "--to", "16,64,int8", "--tied")
    rows = json.loads(run(*told, "--output", swaps, "--json").out)["swaps"]
    assert len(rows) == 6 * 3 and {row["to"] for row in rows} == {16, 64, "int8"}
    down = next(row for row in rows if (row["operator"], row["to"]) == ("down_proj", 64))
    assert down["loss"] < 0 < down["per_cycle"] and down["freed"] == pytest.approx(-32 * down["macs"])
    allocated = run("sc", "allocate", "--swaps", swaps, "--budget", "32", "--output", mixed, "--json")
    plain = json.loads(allocated.out)
    assert plain["cycles"] <= 32 + 1e-9 and plain["exact"] and plain["predicted"]["mean"] < 0
    assert read_config(mixed).model["hidden_size"] == 64
    shown = run("sc", "allocate", "--swaps", swaps, "--budget", "32", "--output", mixed, "--over", "all",
                "--int8", "--int8-cycles", "16").out  # fmt: skip
    assert "cycles over all products" in shown and "windows that did not choose" in shown
    free = run("sc", "allocate", "--swaps", swaps, "--budget", "32", "--output", mixed, "--int8").out
    assert "no product is left in streams" in free or "0.00 cycles" not in free
    other = tmp_path / "other.yaml"
    other.write_text("{fewbits_stochastic: 1, options: {stoc_len: 16}}")
    told = ("sc", "screen", *common, "--base", "32", "--attention", "--candidates", mixed, other,
            "--board", board, "--least", "2")  # fmt: skip
    found = json.loads(run(*told, "--json").out)
    assert [row["candidate"] for row in found["candidates"]] == [str(mixed), str(other)]
    assert "given up" in run(*told).out or "16.00" in run(*told).out
    said = run(*told[:-5], mixed, mixed).err
    assert "differ in nothing; leave one out" in said
    said = run("sc", "swap", *common, "--base", "32", "--to", "32").err
    assert "runs in the base at 32 already" in said
    text.write_text("Another story altogether, of a cat that sat on the mat and of the mat. " * 9)
    again = run(*told)
    assert again.code == 1 and "begun with another text" in again.err
    assert run("sc", "allocate", "--swaps", swaps, "--budget", "4", "--output", mixed).code == 1
