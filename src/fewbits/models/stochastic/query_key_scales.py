"""Scales between queries and keys, folded into a model's weights: the scores stay, the ranges change.

    q'[h, i] = q[h, i] * s[g, i]        k'[g, i] = k[g, i] / s[g, i]        q'[h] . k'[g] = q[h] . k[g]

for every head h of queries and its head g of keys. It holds behind rotary positions too where both channels
that are turned together have one s. So s belongs to the rows of the projections and their biases, or, where
queries and keys are normalised, to the weights of those norms (which all heads share if each head is
normalised by itself: then s must be the same for all). A low-precision product of q' and k' quantises other
ranges than one of q and k; that is what this is for. In floating point nothing changes but roundings, and
with powers of two not even those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.host.attention import attention_modules, decoder_of, set_attention_name
from fewbits.host.conversion import conversion_of
from fewbits.host.spec import spec_for

_NAME = "fewbits_watched"
_KEPT = "fewbits_watched_operands"  # of an attention module, while it is watched
_PARTIAL = ("partial_rotary_factor", "rotary_pct")


@dataclass(frozen=True)
class QueryKeyPlace:
    """Where the scales of one attention module go.

    Attributes:
        query: the parameters whose leading axis is (query heads, head size), or (head size,) of a norm.
        key: the same of keys.
        heads: heads of keys.
        group: query heads for each of them.
        size: values of a head.
        shared: whether all heads have one scale for each channel, as their norm has.
        pairs: channels that are turned together, (2, size / 2); None: none are.
        offset: what the norms add to their weights.
    """

    query: tuple[nn.Parameter, ...]
    key: tuple[nn.Parameter, ...]
    heads: int
    group: int
    size: int
    shared: bool
    pairs: Tensor | None
    offset: float


def query_key_places(model: nn.Module) -> dict[str, QueryKeyPlace]:
    """Every attention module's place by its full name.

    Raises:
        Unsupported: the model is converted, or its family has no separate queries and keys, or turns them in
            a way that leaves no scales.
    """
    if conversion_of(model) is not None:
        raise Unsupported("this model is converted already; fold scales into its original form.")
    spec = spec_for(model)
    attention = spec.attention
    if spec.generic or attention is None or attention.extras or len(attention.inputs) != 3:
        raise Unsupported(
            f"{spec.model_type} has no queries and keys of their own linears, or more in its attention than "
            "a product of both, so no scales can be folded between them; leave them out."
        )
    config = decoder_of(model).config
    rotary = getattr(config, "rope_parameters", None) or {}
    partial = [rotary.get(name) or getattr(config, name, None) for name in _PARTIAL]
    if any(share not in (None, 1, 1.0) for share in partial):
        raise Unsupported(
            "this model turns only a part of each head, which has no scales here; leave them out."
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise Unsupported(
            f"this model cuts queries and keys off at {config.clip_qkv} (clip_qkv), which scaled ones would "
            "meet elsewhere; leave the scales out."
        )
    return {name: _place(model, spec, name) for name, _ in attention_modules(model)}


def _place(model: nn.Module, spec: ModelSpec, name: str) -> QueryKeyPlace:
    assert spec.attention is not None
    layer = name[: -len(spec.attention.path)]
    query, key = (model.get_submodule(layer + path) for path in spec.attention.inputs[:2])
    if not (isinstance(query, nn.Linear) and isinstance(key, nn.Linear)):
        raise Unsupported(f"{name} has projections that are no plain linears; merge adapters first.")
    module: Any = model.get_submodule(name)
    size = int(getattr(module, "head_dim", 0)) or decoder_of(model).config.head_dim
    heads, group = key.out_features // size, query.out_features // key.out_features
    norms = [None if p is None else _module(model, layer + p) for p in (spec.norm.query, spec.norm.key)]
    if norms[0] is None or norms[1] is None:
        owners: tuple[nn.Module, nn.Module] = (query, key)
    else:
        owners = (norms[0], norms[1])
    normed = owners[0] is not query
    return QueryKeyPlace(
        query=tuple(owners[0].parameters(recurse=False)),
        key=tuple(owners[1].parameters(recurse=False)),
        heads=heads,
        group=group,
        size=size,
        shared=normed and next(owners[0].parameters(recurse=False)).numel() == size,
        pairs=_pairs(spec.attention.rotary, size),
        offset=spec.norm.offset if normed else 0.0,
    )


def _module(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _pairs(rotary: str, size: int) -> Tensor | None:
    if rotary == "none":
        return None
    channels = torch.arange(size)
    return channels.view(2, -1) if rotary == "halves" else channels.view(-1, 2).t()


@torch.no_grad()
def fold_query_key_scales(model: nn.Module, scales: Mapping[str, Tensor]) -> None:
    """Multiply queries by ``scales`` and divide keys by them, in the weights; in place.

    Args:
        model: a Hugging Face model of a known family, in its original form.
        scales: of attention modules by their full names: (heads of keys, head size), positive. The inverse
            scales undo it.

    Raises:
        BadInput: a name that is no attention module, or scales that would change the scores.
        Unsupported: see `query_key_places`.
    """
    places = query_key_places(model)
    for name, s in scales.items():
        if name not in places:
            raise BadInput(f"{name} is no attention module of this model; its first is {next(iter(places))}.")
        _check_scales(name, s, places[name])
    for name, s in scales.items():
        place = places[name]
        of_keys = s[0] if place.shared else s
        of_queries = s[0] if place.shared else s.repeat_interleave(place.group, 0)
        for parameters, factor in ((place.query, of_queries), (place.key, 1.0 / of_keys)):
            for parameter in parameters:
                _multiply(parameter, factor.flatten(), place.offset)


def _check_scales(name: str, s: Tensor, place: QueryKeyPlace) -> None:
    if tuple(s.shape) != (place.heads, place.size) or not bool(((s > 0) & s.isfinite()).all()):
        raise BadInput(
            f"{name} has scales of shape {tuple(s.shape)}; give ({place.heads}, {place.size}) positive, "
            "finite ones."
        )
    if place.pairs is not None and not torch.equal(s[:, place.pairs[0]], s[:, place.pairs[1]]):
        raise BadInput(
            f"{name} has different scales for channels that rotary positions turn together, which would "
            f"change the scores; give both one, such as channels {int(place.pairs[0, 0])} and "
            f"{int(place.pairs[1, 0])}."
        )
    if place.shared and not torch.equal(s, s[:1].expand_as(s)):
        raise BadInput(
            f"{name} has different scales for its heads, whose norms have one weight for all; give all "
            "heads the same."
        )


def _multiply(parameter: nn.Parameter, factor: Tensor, offset: float) -> None:
    factor = factor.to(parameter.device, torch.float32)
    # A projection has a row for each channel, a norm a weight (of (heads, head size), some of them).
    factor = factor.view(parameter.shape) if factor.numel() == parameter.numel() else factor[:, None]
    parameter.copy_((parameter.float() + offset) * factor - offset)


# What is multiplied.


@dataclass(frozen=True)
class QueriesAndKeys:
    """Of one attention module and batch.

    Attributes:
        q: queries (B, H, T, D), behind rotary positions.
        k: keys (B, K, T, D).
        factor: of the scores.
        soft_cap: of the scores, or None.
    """

    q: Tensor
    k: Tensor
    factor: float
    soft_cap: float | None


def captured_queries_and_keys(
    model: nn.Module, batches: Iterable[Tensor]
) -> Iterator[dict[str, QueriesAndKeys]]:
    """What each attention module multiplies for each batch of token ids (B, T), by its full name."""
    modules = dict(attention_modules(model))
    device = next(model.parameters()).device
    for ids in batches:
        with torch.no_grad(), _watched(model, modules):
            model(input_ids=ids.to(device), use_cache=False)
            yield {name: module.__dict__[_KEPT] for name, module in modules.items()}


@contextmanager
def _watched(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if _NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(_NAME, _forward)
        AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    decoder = decoder_of(model)
    before = str(decoder.config._attn_implementation)
    set_attention_name(decoder, _NAME)
    try:
        yield
    finally:
        set_attention_name(decoder, before)
        for module in modules.values():
            module.__dict__.pop(_KEPT, None)


def _forward(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    scaling = kwargs.get("scaling")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    module.__dict__[_KEPT] = QueriesAndKeys(query, key, float(factor), kwargs.get("softcap"))
    eager: Any = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    return eager(module, query, key, *args, **kwargs)
