"""The command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable:
    """``run("doctor")`` in this process: an object with code and out."""
    from types import SimpleNamespace

    def call(*argv: str) -> SimpleNamespace:
        from fewbits.cli import main

        code = main(list(argv))
        return SimpleNamespace(code=code, out=capsys.readouterr().out)

    return call
