"""Variants of LoRA: which one a configuration asks for, and over which bases it may be.

A variant (DoRA, KaSA, aLoRA, ...) keeps PEFT's own arithmetic, which reads the base weight: a packed one is
decoded for it (`fewbits.nn.decoded_weight`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fewbits.errors import Unsupported
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import QuantizedLinear

# What PEFT of before 0.18 did not mark as variants; layer_replication builds other layers.
_OTHERS = ("use_dora", "alora_invocation_tokens", "arrow_config", "layer_replication")
# Initialisations (and KaSA) that subtract from the base weight or truncate it.
_CHANGES_BASE = (
    "kasa_config",
    *(f"init_lora_weights={name!r}"[:-1] for name in ("pissa", "olora", "loftq", "corda", "lora_ga")),
)


def variant_of(config: Any) -> str | None:
    """The setting of a ``peft.LoraConfig`` that asks for a variant, if there is one."""
    for field in fields(config):
        value = getattr(config, field.name, None)
        # PEFT marks its fields
        if value and (field.metadata.get("is_lora_variant") or field.name in _OTHERS):
            return str(field.name)
    init = config.init_lora_weights
    if isinstance(init, str) and init not in ("gaussian", "orthogonal", "eva"):
        return f"init_lora_weights={init!r}"
    return None


def check_variant(variant: str, kinds: set[type]) -> None:
    """Refuse a variant (as `variant_of` names it) over linears of these kinds.

    Raises:
        Unsupported: it needs a weight that is not rounded in the product, or changes one that is packed.
    """
    if any(issubclass(kind, FakeQuantizedLinear) for kind in kinds):
        raise Unsupported(
            f"{variant} needs the weight itself, and that of a fake-quantised layer is rounded in the "
            "product; use plain LoRA, or do not convert the model."
        )
    if variant.startswith(_CHANGES_BASE) and any(issubclass(kind, QuantizedLinear) for kind in kinds):
        raise Unsupported(
            f"{variant} takes a part of the base weight away, and what remains of a packed one would be "
            "rounded again; leave this setting out, or do not convert the model (init_lora_weights='loftq' "
            "begins from the error of packing)."
        )
    if "pissa_niter" in variant:
        raise Unsupported(
            f"{variant} begins from random numbers that loading the adapter would draw anew, which gives "
            "another model; use 'pissa', whose decomposition is exact, or load_in_4bit=True with 'loftq'."
        )
