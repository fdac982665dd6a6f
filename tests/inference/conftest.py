"""The small real models beside the checkout, loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any


def _load(path: Path) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Loaded(model, AutoTokenizer.from_pretrained(path))


@pytest.fixture(scope="session")
def stories260k(shared: Path) -> Loaded:
    return _load(shared / "data/models/stories260k")


@pytest.fixture(scope="session")
def stories3m(shared: Path) -> Loaded:
    return _load(shared / "data/models/stories3m")


@pytest.fixture(scope="session")
def tinystories(shared: Path) -> str:
    return (shared / "data/text/tinystories_val.txt").read_text()
