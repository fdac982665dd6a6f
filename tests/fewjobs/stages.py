"""Stages in any situation, for tests: a fact goes into the part of the stage that holds it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fewjobs.stage import Stage

OWN = {field.name for field in fields(Stage)}


def staged(*names: str, **facts: Any) -> Stage:
    """A stage with these facts; those of `Predicted` are called ``predicted_bytes`` and the like."""
    stage = Stage(*names, **{name: facts[name] for name in facts if name in OWN})
    for name in facts.keys() - OWN:
        leaf = {"predicted_s": "seconds"}.get(name, name.removeprefix("predicted_"))
        parts = (stage.times, stage.memory, stage.paging, stage.counts, stage.predicted)
        (part, *_) = [p for p in (parts if leaf == name else parts[-1:]) if hasattr(p, leaf)]
        setattr(part, leaf, facts[name])
    return stage
