"""Where things are in a Hugging Face model: `ModelSpec`, and one of it per family, in a few lines each.

To add one: write its spec, list it in `SPECS`, add a tiny config in tests/models/tiny.py; the tests run over
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fewbits.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Paths and facts of one family.

    Attributes:
        model_type: the ``model_type`` of its config.json.
        layers: path of the list of decoder layers.
        linears: paths of the linears inside one layer.
        norms: paths of the RMSNorms inside one layer.
        final_norm: path of the norm after the last layer.
        embed: path of the token embedding.
        head: path of the output head.
        norm_offset: what a norm adds to its weight; 1.0 where the weight is stored as its distance from one.
        fused: name of a linear that holds several, and the names that other families give to those.
        generic: True if nobody wrote this spec: it was read from a model's modules and says only where its
            linears are. Whatever needs to know the family's arithmetic leaves such a model alone.
    """

    model_type: str
    layers: str = "model.layers"
    linears: tuple[str, ...]
    norms: tuple[str, ...]
    final_norm: str = "model.norm"
    embed: str = "model.embed_tokens"
    head: str = "lm_head"
    norm_offset: float = 0.0
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    generic: bool = False

    @property
    def without_spec(self) -> str:
        """How messages begin about a family that nobody wrote a spec for."""
        return f"{self.model_type} has no spec"

    @property
    def linear_names(self) -> tuple[str, ...]:
        """The last part of each linear's path: what LoRA targets are named by."""
        return tuple(path.rpartition(".")[2] for path in self.linears)


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_SANDWICH_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

LLAMA = ModelSpec(model_type="llama", linears=_ATTENTION + _MLP, norms=_NORMS)
MISTRAL = replace(LLAMA, model_type="mistral")
QWEN2 = replace(LLAMA, model_type="qwen2")
QWEN3 = replace(LLAMA, model_type="qwen3", norms=_NORMS + _HEAD_NORMS)
GEMMA = replace(LLAMA, model_type="gemma", norm_offset=1.0)
GEMMA2 = replace(GEMMA, model_type="gemma2", norms=_SANDWICH_NORMS)
GEMMA3_TEXT = replace(GEMMA2, model_type="gemma3_text", norms=_SANDWICH_NORMS + _HEAD_NORMS)
PHI3 = ModelSpec(  # Phi-3 and Phi-4
    model_type="phi3",
    linears=("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    norms=_NORMS,
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)

SPECS: dict[str, ModelSpec] = {
    spec.model_type: spec for spec in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, PHI3)
}

# Classes of transformers that inherit from nn.Linear and compute exactly what it does; a layer of ours may
# take their place. Other subclasses may do more, and stay as they are.
SAME_AS_LINEAR = ("FalconLinear",)

_REGISTERED: dict[str, ModelSpec] = {}  # what the user's own code has added, by calling `register_family`


def register_family(spec: ModelSpec, *, replace: bool = False) -> None:
    """Make a family known to this process: ``spec`` describes models of its ``model_type`` from now on.

    Args:
        spec: where things are in the family's models; often ``dataclasses.replace(LLAMA, model_type=...)``.
        replace: take the place of a spec that the name has already, fewbits' own ones included.

    Raises:
        BadInput: it is no spec, it names no model_type or no linears, or the name has a spec already and
            ``replace`` is False.
    """
    if not isinstance(spec, ModelSpec):
        raise BadInput(
            f"register_family takes a fewbits.ModelSpec, and this is a {type(spec).__name__}; write one with "
            "the paths of the family's modules."
        )
    if not spec.model_type or not spec.linears:
        raise BadInput("a spec needs a model_type and the paths of the linears inside a layer; add them.")
    if family_of(spec.model_type) is not None and not replace:
        raise BadInput(
            f"there is a spec for {spec.model_type!r} already; pass replace=True to have yours in its place."
        )
    _REGISTERED[spec.model_type] = spec


def family_of(model_type: str) -> ModelSpec | None:
    """The spec that somebody wrote for this ``model_type``: the user's own, else fewbits'; else None."""
    return _REGISTERED.get(model_type) or SPECS.get(model_type)


def known_families() -> list[str]:
    """The ``model_type`` of every family with a written spec, in alphabetical order."""
    return sorted({*SPECS, *_REGISTERED})
