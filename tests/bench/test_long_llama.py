"""The script that trains a Llama for long contexts: its rows, its optimizer, and a run of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
SCRIPT = ROOT / "benchmarks" / "quality" / "train_long_llama.py"


def long_llama(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import train_long_llama

    return train_long_llama


@pytest.mark.slow
def test_steps_of_matrices_are_nearly_orthogonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a linear learns what it is to be."""
    script = long_llama(monkeypatch)
    for shape in ((3, 96, 64), (2, 64, 96)):
        values = torch.linalg.svdvals(script.orthogonal(torch.randn(shape)).float())
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    torch.manual_seed(0)
    x, target = torch.randn(256, 32), torch.randn(16, 32)
    linear = torch.nn.Linear(32, 16, bias=False)
    muon = script.Muon([linear.weight], decay=0.0)
    for i in range(200):
        loss = (linear(x) - x @ target.t()).square().mean()
        linear.weight.grad = None
        loss.backward()
        muon.step(0.3 * (1 - i / 200))
    assert float(loss.detach()) < 0.01


@pytest.mark.slow
def test_rows_repeat_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    script = long_llama(monkeypatch)
    text = torch.arange(4 * 256).view(4, 256)
    for row in script.repeating(8, text, torch.Generator().manual_seed(0)):
        sizes = [size for size in (32, 64, 128) if torch.equal(row[size:], row[:-size])]
        assert sizes and int(row.max()) < text.numel()


@pytest.mark.nightly
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_it_runs(tmp_path: Path) -> None:
    words = ["--tiny", "--length", "64", "--device", "cpu"]
    tokens, out = tmp_path / "tokens.pt", tmp_path / "model"
    first = [*words, "--data", str(DATA), "--prepare", str(tokens)]
    then = [*words, "--prepared", str(tokens), "--out", str(out), "--seconds", "4", "--tokens", "256"]
    for command in (first, then):
        subprocess.run([sys.executable, str(SCRIPT), *command], check=True)
    assert torch.load(out / "held_out.pt").shape[1] == 64 and (out / "model.safetensors").exists()
