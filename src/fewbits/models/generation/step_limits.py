"""What a family's layers have that the kernels of a step do not compute."""

from __future__ import annotations

from typing import Any

from fewbits.families.shapes import field_of
from fewbits.families.spec import ModelSpec


def built_differently(spec: ModelSpec, config: Any) -> str | None:
    """What a step's kernels cannot compute and the fused nodes can."""
    assert spec.attention is not None and spec.mlp is not None  # `why_not_by_spec` has refused the others
    if len(spec.attention.inputs) != 3 or len(spec.mlp.inputs) != 2:
        return "one linear holds several"
    if spec.norm.layout != "pre":
        return "norms stand behind attention and MLP as well"
    if field_of(config, spec.attention.soft_cap) is not None:
        return "scores are capped"
    rotary = field_of(config, spec.attention.rotary_layers)
    return None if rotary is None or all(rotary) else "some layers do not turn queries and keys"


def changed_by(spec: ModelSpec, config: Any) -> list[str]:
    """What a family does to embeddings and logits beside its layers, where this config does it at all."""
    facts = {
        "its embeddings": ((spec.embedding_multiplier, 1.0),),
        "its logits after the head": (
            (spec.logits_divisor, 1.0),
            (spec.logits_multiplier, 1.0),
            (spec.logits_soft_cap, None),
        ),
    }
    return [
        what
        for what, fields in facts.items()
        if any(field_of(config, name, neutral) != neutral for name, neutral in fields)
    ]
