"""The scripts of the learning comparison: data, curves, summary; the `slow` test runs both as a whole."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared/data"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "quality" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def points(module: ModuleType) -> list:
    losses = {
        "bitsandbytes_peft": 4.0,
        "fewbits_nf4": 4.001,
        "fewbits_nf4_fp8": 4.001,
        "fewbits_nf4_fp8_own": 4.03,
        "fewbits_nf4_fp8_head": 4.01,
    }
    return [
        module.Point("m", variant, seed, step, loss + 0.01 * seed + (step == 0))
        for variant, loss in losses.items()
        for seed in range(3)
        for step in (0, 10)
    ]


def test_summary_says_what_holds_and_what_does_not(capsys, tmp_path: Path) -> None:
    module = load("same_learning")
    made = points(module)
    module.summary(made)
    printed = capsys.readouterr().out
    assert "within seed noise: True; NF4 + FP8 within 0.5 %: True, in its own products: False" in printed
    assert "with an FP8 head: True" in printed
    rows = {row.variant: row for row in module.table(made)}
    assert rows["fewbits_nf4"].value == pytest.approx(4.011) and rows[
        "bitsandbytes_peft"
    ].high == pytest.approx(4.02)
    module.plot(made, tmp_path / "x.svg")
    assert "evaluated in FP8" in (tmp_path / "x.svg").read_text()


def test_a_seed_that_did_not_end_is_left_out(capsys) -> None:
    module = load("same_learning")
    made = [p for p in points(module) if (p.variant, p.seed, p.step) != ("fewbits_nf4_fp8_head", 2, 10)]
    module.summary(made)
    assert "4.0050 (4.0000 to 4.0100)" in capsys.readouterr().out
    assert all(len(values) == 2 for values in module.final(made)["m"].values())
    made = [p for p in made if (p.variant, p.step) != ("fewbits_nf4_fp8_head", 10)]  # nowhere at its end
    assert {v: len(values) for v, values in module.final(made)["m"].items()} == dict.fromkeys(
        ("bitsandbytes_peft", "fewbits_nf4", "fewbits_nf4_fp8", "fewbits_nf4_fp8_own"), 3
    )


def test_some_of_the_variants_alone(capsys, tmp_path: Path) -> None:
    module = load("same_learning")
    made = [p for p in points(module) if p.variant in ("bitsandbytes_peft", "fewbits_nf4_fp8_head")]
    module.summary(made)
    assert "with an FP8 head: True" in capsys.readouterr().out
    assert len(module.table(made)) == 2
    module.plot(made, tmp_path / "x.svg")


def test_curves_of_several_processes_are_read_together(tmp_path: Path) -> None:
    module = load("same_learning")
    made = points(module)
    for seed in range(3):
        with (tmp_path / f"curves_m_{seed}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(module.Point._fields)
            writer.writerows(p for p in made if p.seed == seed)
    assert sorted(module.read(tmp_path)) == sorted(made)


def test_adapters_begin_alike_whatever_the_order_of_modules() -> None:
    module = load("same_learning")

    def model(names: list[str]) -> torch.nn.Module:
        made = torch.nn.Module()
        for name in names:
            made.add_module(name, torch.nn.Linear(4, 3, bias=False))
        return made

    one, two = model(["lora_A", "lora_B"]), model(["lora_B", "lora_A"])
    for m in (one, two):
        module.same_adapters(m, seed=1)
    assert torch.equal(one.lora_A.weight, two.lora_A.weight) and one.lora_A.weight.any()
    assert not one.lora_B.weight.any()


@pytest.mark.nightly
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_both_scripts_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    scripts = ROOT / "benchmarks" / "quality"
    first = [scripts / "train_llama_100m.py", "--data", DATA, "--out", model, "--steps", 2, "--batch", 2]
    second = [
        scripts / "same_learning.py",
        "--model",
        f"m={model}",
        "--data",
        DATA,
        "--out",
        tmp_path / "out",
    ]
    second += ["--steps", 2, "--every", 2, "--batch", 2, "--seeds", "0", "--eval-windows", 4]
    for command in ([*first, "--tiny"], second):
        subprocess.run([sys.executable, *map(str, command), "--device", "cpu"], check=True)
    module = load("same_learning")
    assert {p.variant for p in module.read(tmp_path / "out")} == set(module.SHOWN)
