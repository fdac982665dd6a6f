"""What pip is told to install can be installed elsewhere: scripts/check_install.py finds what cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uv")
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.nightly
def test_versions_that_the_index_has_not_together_are_found(tmp_path: Path) -> None:
    """Triton is pinned to another version than the one that the pinned torch asks for, as it once was."""
    text = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not line.startswith(("torch=", "torch>", "triton"))]
    pins = tmp_path / "constraints.txt"
    pins.write_text("\n".join([*kept, "torch==2.13.0", "triton==3.6.0"]) + "\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "check_install.py"), "--constraints", str(pins)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    plain = [line for line in done.stdout.splitlines() if line.startswith("plain index")]
    assert len(plain) == 16 and all(line.endswith("FAILED") for line in plain)
    assert "triton" in done.stdout
