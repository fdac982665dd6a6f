"""``fewbits sc energy`` on a small real model."""

from __future__ import annotations

import json

import pytest


def test_joules_beside_perplexity(run, shared, tmp_path):
    text = tmp_path / "story.txt"
    text.write_text((shared / "data/text/tinystories_val.txt").read_text()[:1500])
    command = ("sc", "energy", "--model", shared / "data/models/stories260k", "--text", text, "--window",
               "64", "--max-tokens", "126", "--lengths", "16,64", "--halve", "yes", "--attention",
               "--output", tmp_path / "e.jsonl")  # fmt: skip
    done = run(*command, "--prices", "horowitz-45nm", "--json", "--plot", tmp_path / "front.svg")
    found = json.loads(done.out)
    rows = {row["setting"]: row for row in found["settings"]}
    assert found["prices"] == "horowitz-45nm" and len(rows) == 4
    short, long = rows["16 cycles, bitrev, halved"], rows["64 cycles, bitrev, halved"]
    assert short["joules"] < long["joules"] and short["perplexity"] > long["perplexity"]
    assert short["best"] and long["mean_cycles"] == 64 and rows["as it is"]["mean_cycles"] is None
    assert long["joules"] == pytest.approx(sum(long["parts"].values()))
    assert (tmp_path / "front.svg").read_text().startswith("<?xml")
    prices = ("--prices", "tubgemm-5nm", "--prices", "jouppi-7nm")
    shown = run(*command, *prices, "--tokens-per-pass", "64").out
    assert "tubgemm-5nm + jouppi-7nm" in shown and "64 tokens in a pass" in shown
    lacking = run(*command, "--prices", "tubgemm-5nm")
    assert lacking.code == 1 and "tubgemm-5nm has no price for near_byte" in lacking.err
    absent = run(*command, "--prices", "nowhere.yaml")
    assert absent.code == 1 and "no file of prices nowhere.yaml" in absent.err
