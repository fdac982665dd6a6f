"""``fewbits plan-gpus``."""

from __future__ import annotations

import json

ARGS = ("plan-gpus", "--values", "8e9", "--step-ms", "980", "--network-gbit", "100")


def test_a_table(run):
    shown = run(*ARGS, "--gpus", "8,64")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert all(name in lines[0] for name in ("GPUs", "float32", "bfloat16", "int8", "int4"))
    assert lines[3].split()[0] == "64"


def test_json(run):
    shown = run(*ARGS, "--gpus", "64", "--json")
    steps = {step["format"]: step for step in json.loads(shown.out)}
    assert steps["int4"]["seconds"] < steps["int8"]["seconds"] < steps["bfloat16"]["seconds"]


def test_what_is_no_cluster(run):
    assert run(*ARGS, "--gpus", "63").code == 1
    assert "whole numbers" in run(*ARGS, "--gpus", "many").err
