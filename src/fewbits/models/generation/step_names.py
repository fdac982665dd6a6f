"""Other names of transformers' ways to compute, in a model's configurations, while a step runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def named(configs: Sequence[Any], field: str, name: str) -> Iterator[None]:
    """Each of ``configs`` says ``name`` in ``field``; then what it said before."""
    before = [getattr(config, field) for config in configs]
    try:
        for config in configs:
            setattr(config, field, name)
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            setattr(config, field, own)


__all__ = ["named"]
