"""What fewbits does with a family of models: found out by trying it on a tiny one, in memory and in a blink.

A family is `fused` (its decoder layers compute as hand-written nodes), `unfused` (packed, adapted and trained
through its own forward) or `refused`. No list says which: a model of one layer is made from the family's own
configuration, packed and fused, as a real one would be. Where a default of that configuration switches off
what all published models of the family do (Granite's multipliers are 1 there), the tiny model does it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from fewbits.errors import BadInput, FewbitsError, SpecMismatch, Unsupported
from fewbits.families.catalog import SPECS
from fewbits.families.registry import family_of, known_families

if TYPE_CHECKING:
    from torch import nn

# As small as the kernels' blocks allow; a configuration takes those of them that it knows.
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOST_VALUES = 20_000_000
# What building a model of sizes that its authors did not think of may raise.
_CANNOT_BUILD = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of a tiny model of one family.

    Attributes:
        model_type: as config.json calls it.
        outcome: "fused", "unfused", "refused"; "untried" where no tiny model of it can be built.
        has_spec: whether somebody wrote a spec for the family.
        linears: names of the linears inside a layer that are packed and adapted; none if refused.
        reason: why it is not fused, or not all of its layers; empty if they all are.
    """

    model_type: str
    outcome: str
    has_spec: bool
    linears: tuple[str, ...] = ()
    reason: str = ""


def decoder_types() -> list[str]:
    """Every ``model_type`` that transformers has a causal decoder for, and the user's own families."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *known_families()})


def try_family(model_type: str, *, recipe: str = "qlora_nf4") -> Trial:
    """Pack and fuse a tiny model of a family.

    Args:
        model_type: as config.json calls it.
        recipe: the recipe that it is packed with.

    Raises:
        BadInput: transformers has no causal decoder of that name.
    """
    if model_type not in decoder_types():
        raise BadInput(
            f"transformers has no causal decoder {model_type!r}; fewbits models --all lists the names."
        )
    has_spec = family_of(model_type) is not None
    try:
        model = _tiny(model_type)
    except _CANNOT_BUILD as error:
        return Trial(model_type=model_type, outcome="untried", has_spec=has_spec, reason=_first(error))
    return _tried(model, model_type, has_spec, recipe)


def _tried(model: nn.Module, model_type: str, has_spec: bool, recipe: str) -> Trial:
    from fewbits.decoder.fuse import fuse, fusion_of
    from fewbits.host.spec import spec_for
    from fewbits.models.packing.convert import convert

    try:
        spec = spec_for(model)
        convert(model, recipe)
    except FewbitsError as error:
        return Trial(model_type=model_type, outcome="refused", has_spec=has_spec, reason=_first(error))
    names = tuple(dict.fromkeys(spec.linear_names))
    try:
        receipt = fuse(model)
    except (Unsupported, SpecMismatch) as error:
        return Trial(
            model_type=model_type, outcome="unfused", has_spec=has_spec, linears=names, reason=_first(error)
        )
    fusion = fusion_of(model)
    if fusion is None or not fusion.layers:
        reason = next((note for note in receipt.notes if "layer" in note), "its layers are not fused")
        return Trial(
            model_type=model_type, outcome="unfused", has_spec=has_spec, linears=names, reason=reason
        )
    some = next((note for note in receipt.notes if "stays unfused" in note), "")
    own = next((forward for forward in fusion.layers if forward.parts.own_mlp is not None), None)
    if own is not None and not some:
        some = f"{own.parts.name}: one fused node for its attention; the rest are modules of the model"
    return Trial(model_type=model_type, outcome="fused", has_spec=has_spec, linears=names, reason=some)


def _tiny(model_type: str) -> Any:
    """A model of one layer with random float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type)
    text = config.get_text_config()
    small: dict[str, Any] = {**_SMALL, **_as_published(model_type)}
    with suppress(*_CANNOT_BUILD):
        small["layer_types"] = text.layer_types[: small["num_hidden_layers"]]
    for name, value in small.items():
        with suppress(*_CANNOT_BUILD):  # some are computed from others, or differ from layer to layer
            if hasattr(text, name):
                setattr(text, name, value)
    with torch.device("meta"):
        values = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if values > _MOST_VALUES:
        raise ValueError(f"its configuration cannot be made small: {values:,} values are left")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _as_published(model_type: str) -> dict[str, Any]:
    """What the published models do, and the default values of their configuration, or one layer, do not."""
    fields: dict[str, Any] = {}
    for spec in (SPECS.get(model_type), family_of(model_type)):  # a user's own spec may know less
        if spec is not None and spec.residual_multiplier is not None:
            fields[spec.residual_multiplier] = 0.25
        if spec is not None and spec.attention is not None and spec.attention.rotary_layers is not None:
            fields |= {"num_hidden_layers": 2, spec.attention.rotary_layers: [1, 0]}
    return fields


def _first(error: BaseException) -> str:
    """The error's first sentence, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition(". ")[0][:300]
