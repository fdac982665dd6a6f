"""Stochastic attention in a Hugging Face model, by the attention interface of transformers, on one instance.

`use_stochastic_attention` gives the instance's config the name of our attention function and each attention
module its products; masks are those that transformers builds for its eager attention, so a key-value cache,
grouped heads, padding, packed rows and sliding windows are the host's own. Two hooks on the decoder make sure
that nothing goes another way unseen: a forward pass raises if the config names another function by then, or
if a layer's attention did not come through ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.decoder.fuse import fused_layers
from fewbits.errors import BadInput, Unsupported
from fewbits.host.attention import (
    attention_modules,
    decoder_of,
    is_plain_mask,
    restore_attention,
    set_attention_name,
    use_attention,
    used_attention,
)
from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of, put_part, take_part
from fewbits.host.spec import layer_names, spec_for
from fewbits.nn.row_plan import RowPlan
from fewbits.nn.stochastic.attention import AttentionProducts, stochastic_attention

NAME = "fewbits_stochastic"
_PRODUCTS = "stochastic_products"  # of an attention module, which its function is given


@dataclass
class StochasticAttentionState:
    """What `use_stochastic_attention` left on a model.

    Attributes:
        before: the host's name of its attention function.
        by_fewbits: whether `fewbits.host.attention.use_attention` was in force before.
        wanted: names of the attention modules that have stochastic products.
        ran: those of them whose attention ran in this forward pass.
        handles: of the hooks.
        listeners: called as ``listener(name, q, weights, products)`` for each attention that ran, with its
            queries (B, H, S, D) and weights (B, H, S, T).
    """

    before: str
    by_fewbits: bool
    wanted: frozenset[str]
    ran: set[str] = field(default_factory=set)
    handles: list[Any] = field(default_factory=list)
    listeners: list[Callable[[str, Tensor, Tensor, AttentionProducts], None]] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """What an attention module knows of itself: its name, its products, and the state that all share."""

    name: str
    products: AttentionProducts
    state: StochasticAttentionState


def use_stochastic_attention(
    model: nn.Module, products: AttentionProducts | Mapping[str, AttentionProducts]
) -> Receipt:
    """Compute the attention products of this model stochastically; in place, `fewbits.restore` undoes it.

    Args:
        model: a Hugging Face model of a known family; a PeftModel will do.
        products: for all layers, or by the full name of the attention module; a layer without an entry stays
            exact.

    Returns:
        The receipt, a note for each kind of layer.

    Raises:
        Unsupported: the model's layers are fused, or its attention is stochastic already.
        BadInput: a name that is no attention module of this model.
    """
    modules = attentions_of(model)
    if not modules:
        raise Unsupported(f"{spec_for(model).without_spec}, so its attention stays transformers' own.")
    if not isinstance(products, Mapping):
        products = dict.fromkeys(modules, products)
    unknown = sorted(set(products) - set(modules))
    if unknown:
        raise BadInput(
            f"{unknown[0]} is no attention module of this model; its first is {next(iter(modules))}."
        )
    if fused_layers(model):
        raise Unsupported(
            "fused decoder layers compute attention themselves, past the stochastic products; call "
            "fewbits.unfuse first."
        )
    if stochastic_attention_of(model) is not None:
        raise Unsupported(
            "this model's attention is stochastic already; call restore_stochastic_attention first."
        )
    by_fewbits = used_attention(model) is not None
    if by_fewbits:
        restore_attention(model)
    decoder = decoder_of(model)
    names = frozenset(name for name, p in products.items() if p != AttentionProducts())
    state = StochasticAttentionState(str(_config_of(decoder)._attn_implementation), by_fewbits, names)
    _register()
    for name in names:
        setattr(modules[name], _PRODUCTS, _Place(name, products[name], state))
    set_attention_name(decoder, NAME)
    state.handles = [
        decoder.register_forward_pre_hook(_Before(state)),
        decoder.register_forward_hook(_After(state)),
    ]
    put_part(model, state)
    return Receipt("", notes=stochastic_attention_receipt(model))


def restore_stochastic_attention(model: nn.Module) -> Receipt:
    """Undo `use_stochastic_attention` alone; the receipt's note says what the attention is now."""
    decoder, state = decoder_of(model), stochastic_attention_of(model)
    if state is None:
        said = f"attention: {_config_of(decoder)._attn_implementation}, as it was"
        return Receipt("", notes=[said])
    for handle in state.handles:
        handle.remove()
    for module in attentions_of(model).values():
        module.__dict__.pop(_PRODUCTS, None)
    set_attention_name(decoder, state.before)
    take_part(model, StochasticAttentionState)
    if state.by_fewbits:
        return use_attention(model)
    return Receipt("", notes=[f"attention: transformers' {state.before} again"])


def attentions_of(model: nn.Module) -> dict[str, Any]:
    """The attention modules whose products can be stochastic, by their full names, in order.

    Those of a family with a spec; of another, such as a vision transformer, those of its layers that call
    transformers' attention interface and look both ways, so that no mask decides anything. None: how its
    attention works is not known.
    """
    spec = spec_for(model)
    if spec.attention is not None:
        return dict(attention_modules(model))
    return {
        f"{layer}.{path}": module
        for layer in layer_names(model, spec)
        for path, module in model.get_submodule(layer).named_modules()
        if getattr(module, "is_causal", None) is False
        and hasattr(module, "config")
        and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")
    }


def stochastic_attention_of(model: nn.Module) -> StochasticAttentionState | None:
    """What `use_stochastic_attention` left on this model; None without it."""
    return part_of(model, StochasticAttentionState)


def attention_products(model: nn.Module) -> dict[str, AttentionProducts]:
    """The products of each attention module that has stochastic ones, by its full name."""
    places = {name: module.__dict__.get(_PRODUCTS) for name, module in attentions_of(model).items()}
    return {name: place.products for name, place in places.items() if place is not None}


def stochastic_attention_receipt(model: nn.Module) -> list[str]:
    """Which layers' products are stochastic, in which options: sentences for a receipt."""
    groups: dict[AttentionProducts, int] = {}
    for products in attention_products(model).values():
        groups[products] = groups.get(products, 0) + 1
    lines = [
        f"attention x{count}: QK^T {_name(p.scores, p.scores_plan)}, PV {_name(p.values, p.values_plan)}, "
        "softmax as it was"
        for p, count in groups.items()
    ]
    exact = len(attentions_of(model)) - sum(groups.values())
    return [*lines, f"attention x{exact}: exact"] if exact and groups else lines


def _config_of(decoder: Any) -> Any:
    """The config that names the attention's function: the decoder's own, or that of a module inside."""
    own = getattr(decoder, "config", None)
    return own if own is not None else next(m.config for m in decoder.modules() if hasattr(m, "config"))


def _name(options: Any, plan: RowPlan) -> str:
    if options is None:
        return "exact"
    if plan.integer:
        return f"whole numbers of {options.sc_prec} bits"
    lengths = plan.lengths or (options.streams.length,)
    return f"stochastic, {'/'.join(map(str, lengths))} cycles"


class _Before:
    """Hook: this forward pass has to come through our function."""

    def __init__(self, state: StochasticAttentionState) -> None:
        self.state = state

    def __call__(self, decoder: Any, args: tuple[Any, ...]) -> None:
        name = _config_of(decoder)._attn_implementation
        if name != NAME:
            raise Unsupported(
                f"this model's attention was set to {name!r} after its products were made stochastic; call "
                f"restore_stochastic_attention, or set it to {NAME!r} again."
            )
        self.state.ran.clear()


class _After:
    """Hook: every layer that was to compute stochastic products has done so."""

    def __init__(self, state: StochasticAttentionState) -> None:
        self.state = state

    def __call__(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        missed = self.state.wanted - self.state.ran
        if missed and not torch.compiler.is_compiling():
            raise Unsupported(
                f"the attention of {min(missed)} was computed elsewhere, past its stochastic products; undo "
                "what replaced this module's forward (fused layers, for one)."
            )


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for every layer of a model whose config bears our name."""
    place = module.__dict__.get(_PRODUCTS)
    if place is None:
        eager: Any = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        exact: tuple[Tensor, Tensor | None] = eager(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return exact
    is_open = getattr(module, "is_causal", None) is False  # looks both ways: no mask hides nothing
    if is_plain_mask(attention_mask) or (attention_mask is None and query.shape[2] > 1 and not is_open):
        raise Unsupported(
            "stochastic attention needs the mask that transformers builds; pass a 2-D mask or none."
        )
    place.state.ran.add(place.name)
    kind = query.device.type  # rotary positions are in float32 under autocast, and values are not
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query = query.to(dtype)
    out, weights = stochastic_attention(
        query,
        key.to(dtype),
        value.to(dtype),
        attention_mask,
        place.products,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        soft_cap=kwargs.get("softcap"),
        dropout=dropout,
    )
    for listener in place.state.listeners:
        listener(place.name, query, weights, place.products)
    return out, weights


def _register() -> None:
    """Make our name known to transformers, which has one table of them; no entry of it is changed."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAME, _forward)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
