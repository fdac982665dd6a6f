"""What the fused decoder cannot compute, told from a family's spec before anything is tried.

The fused nodes are two halves, each a norm, products and an addition to the residual stream. A family that
does more runs through its layers' own forward, and the receipt gives the reason found here. What a spec does
not say is found by comparison (`fewbits.decoder.proof`).
"""

from __future__ import annotations

from typing import Any

from fewbits.families.shapes import field_of
from fewbits.families.spec import Attention, ModelSpec

_NORMS_STAND = {
    "post": "its norms stand behind attention and MLP",
    "parallel": "attention and MLP stand side by side behind one norm",
}


def why_not_by_spec(spec: ModelSpec, config: Any, index: int | None = None) -> str | None:
    """Why the fused nodes do not compute what a layer of this family does; None if nothing speaks against it.

    Args:
        spec: of the family.
        config: of the text model.
        index: number of the layer, for what differs from layer to layer; None: of any.
    """
    if spec.experts is not None:
        return "its MLP is experts, for which there is no fused node yet"
    if spec.attention is None or spec.mlp is None:
        return "its spec does not say what its attention or its MLP computes"
    if not spec.mlp.is_gated:
        return "its MLP has no gate"
    if spec.norm.query is not None and spec.norm.query_key_over == "row":
        # Decoding asks here as well, and its kernels do not compute them.
        return "its norms of queries and keys go over all heads at once"
    return why_not_attention(spec, config, index)


def why_not_attention(spec: ModelSpec, config: Any, index: int | None = None) -> str | None:
    """Why the attention's node does not compute a layer's first half, whatever its second half is; or None.

    The arguments are those of `why_not_by_spec`.
    """
    if spec.attention is None:
        return "its spec does not say what its attention computes"
    # A half of modules of the model's own is multiplied as it is added, and attention's result before o.
    residual = None if spec.experts is not None else _residual(spec, config)
    return _norms(spec) or residual or _attention(spec.attention, config, index)


def _norms(spec: ModelSpec) -> str | None:
    norm = spec.norm
    if norm.kind != "rms":
        return "its norms are LayerNorms, which take the mean away"
    return _NORMS_STAND.get(norm.layout)


def _residual(spec: ModelSpec, config: Any) -> str | None:
    factor = field_of(config, spec.residual_multiplier, 1.0)
    if factor != 1.0:
        return f"each half is multiplied by {spec.residual_multiplier} ({factor:g}) before it is added"
    return None


def _attention(attention: Attention, config: Any, index: int | None) -> str | None:
    if attention.extras:
        return f"its attention has {' and '.join(attention.extras)}"
    if attention.rotary != "halves":
        return {
            "pairs": "its positions turn neighbouring channels together",
            "none": "its positions come in otherwise than by turning",
        }[attention.rotary]
    clip = field_of(config, attention.clip)
    if clip is not None:
        return f"its queries, keys and values are cut to {attention.clip} ({clip:g})"
    rotates = field_of(config, attention.rotary_layers)
    if rotates is not None and index is not None and index < len(rotates) and not rotates[index]:
        return "its queries and keys are not turned by their positions"
    return None
