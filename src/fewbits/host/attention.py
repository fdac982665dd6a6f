"""A Hugging Face model's attention, computed by `fewbits.nn.attention`: plain causal batches and packed rows.

`use_attention` changes one instance, at two seams of the host: the name of the attention function in its
config, and a hook before its stack of decoder layers. The hook looks at each batch once. A plain one (causal,
without a cache, padding at the right end at most, rows packed or not) gets an empty attention mask, which
transformers hands down as it is: no mask is built, nothing waits for the GPU, and each layer computes what a
mask would have said from its own window and the `Segments`. Any other batch takes transformers' own way,
unchanged, and the reason is counted in the receipt.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.families.registry import model_type_of, written_spec
from fewbits.families.shapes import field_of, scores_factor, window_of
from fewbits.families.spec import Attention
from fewbits.host.receipt import Receipt
from fewbits.host.record import part_of, put_part, take_part
from fewbits.host.spec import layer_names, locate, spec_for
from fewbits.host.unwrap import unwrap
from fewbits.nn.attention import Choice, attention, choose_attention
from fewbits.nn.cut_dropout import attend_dropping
from fewbits.nn.segments import KEYWORDS, Segments

NAMES = {"sdpa": "fewbits", "eager": "fewbits_eager"}  # what the host had, and what it is called then
PLAIN_MASK_SHAPE = (1, 1, 0, 0)


def is_plain_mask(attention_mask: Any) -> bool:
    """Whether a layer's attention mask is the empty one that stands for: causal, by window and segments."""
    return isinstance(attention_mask, Tensor) and attention_mask.shape == PLAIN_MASK_SHAPE


def plain_mask(model: nn.Module, device: torch.device) -> Tensor | None:
    """The empty mask (1, 1, 0, 0) for a plain batch that fills a new cache; None where a model takes none.

    Without a mask transformers decides whether it makes one, and does while a CUDA graph is captured: the
    graph would hold another attention than the one that runs outside of it.

    Args:
        model: a Hugging Face model; a PeftModel will do.
        device: where its tokens are.
    """
    decoder, attention = decoder_of(model), spec_for(model).attention
    if used_attention(model) is None or not _is_ours(decoder) or attention is None:
        return None
    if field_of(decoder.config, attention.soft_cap) is not None:
        return None  # capped scores come with a mask in any case, and without one by a kernel to be compiled
    return torch.empty(PLAIN_MASK_SHAPE, dtype=torch.bool, device=device)


@dataclass
class UsedAttention:
    """What `use_attention` left on a model.

    Attributes:
        before: the host's name of the attention function that the model had before.
        handle: removes the hook.
        taken: how many batches had a mask that fewbits replaces by the plain one ("plain"), and how many had
            not, by reason.
    """

    before: str
    handle: Any
    taken: Counter[str] = field(default_factory=Counter)


def use_attention(model: nn.Module) -> Receipt:
    """Let the attention of this model go through fewbits wherever that computes the same; in place.

    Args:
        model: a Hugging Face model; a PeftModel will do.

    Returns:
        The receipt, with one note; a model that cannot take it is unchanged, and the note says why.
        `fewbits.restore` undoes it.
    """
    return Receipt("", notes=[_take_attention(model)])


def _take_attention(model: nn.Module) -> str:
    spec = written_spec(model)
    if spec is None or spec.attention is None:
        return f"attention: the host's own, because fewbits has no spec for {model_type_of(model)!r}"
    if spec.attention.extras:
        return f"attention: the host's own, because it has {' and '.join(spec.attention.extras)}"
    decoder = decoder_of(model)
    config = decoder.config
    before = str(config._attn_implementation)
    if (state := used_attention(model)) is not None:
        return f"attention: by fewbits already, over transformers' {state.before}"
    if before not in NAMES:
        return f"attention: transformers' {before}, as this model asked for it"
    if getattr(config, "use_bidirectional_attention", False):
        return f"attention: transformers' {before}, because {config.model_type} is not causal here"
    _register(before)
    set_attention_name(decoder, NAMES[before])
    state = UsedAttention(before, None)
    state.handle = decoder.register_forward_pre_hook(_PlainBatches(state.taken), with_kwargs=True)
    put_part(model, state)
    dropout = getattr(config, "attention_dropout", 0.0)
    but = f"; transformers' own in training, because attention has dropout {dropout}" if dropout else ""
    return f"attention: by fewbits, over transformers' {before}{but}"


def restore_attention(model: nn.Module) -> Receipt:
    """Undo `use_attention` alone; the receipt's note says what the attention is now."""
    return Receipt("", notes=[_give_attention_back(model)])


def _give_attention_back(model: nn.Module) -> str:
    decoder = decoder_of(model)
    state = used_attention(model)
    if state is None:
        return f"attention: transformers' {decoder.config._attn_implementation}, as it was"
    state.handle.remove()
    take_part(model, UsedAttention)
    if not _is_ours(decoder):
        return f"attention: transformers' {decoder.config._attn_implementation}, as it was chosen since"
    set_attention_name(decoder, state.before)
    return f"attention: transformers' {state.before} again"


def used_attention(model: nn.Module) -> UsedAttention | None:
    """What `use_attention` left on this model, with the counts of its batches; None without it."""
    return part_of(model, UsedAttention)


@dataclass(frozen=True)
class AttentionFacts:
    """What the attention module of one layer computes.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: values in a head.
        scale: of the scores.
        window: keys that a token sees, itself included; None: all before it.
        soft_cap: of the scores.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None


def attention_facts(module: Any, attention: Attention) -> AttentionFacts:
    """The facts of one layer's attention module, as its forward hands them to the attention function.

    Args:
        module: the attention module.
        attention: what its family's spec says of it.
    """
    config = module.config
    return AttentionFacts(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=module.head_dim,
        scale=scores_factor(attention, config, module.head_dim),
        window=window_of(attention, config, module) or None,
        soft_cap=field_of(config, attention.soft_cap),
    )


def attention_receipt(
    model: Any,
    *,
    seq_len: int | None = None,
    packed: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[str]:
    """Which backend computes the attention of which layers, and why: sentences for a receipt.

    Args:
        model: a Hugging Face model of a known family; a PeftModel will do.
        seq_len: the longest row; None: as long as the model allows.
        packed: several rows in a sequence.
        dtype: of the activations; None: the embedding's.
        device: None: the model's.
    """
    spec = written_spec(model)
    if spec is None or spec.attention is None or spec.attention.extras:
        return []
    state = used_attention(model)
    where = torch.device(device) if device is not None else next(model.parameters()).device
    dtype = dtype or model.get_input_embeddings().weight.dtype
    groups: dict[tuple[AttentionFacts, Choice], int] = {}
    for _, module in attention_modules(model):
        facts = attention_facts(module, spec.attention)
        choice = choose_attention(where, dtype, facts.head_dim, facts.window, facts.soft_cap, packed, seq_len)
        groups[facts, choice] = groups.get((facts, choice), 0) + 1
    lines = []
    for (facts, choice), count in groups.items():
        kind = f"{facts.heads}/{facts.kv_heads} heads of {facts.head_dim}"
        kind += f", window {facts.window}" if facts.window is not None else ""
        kind += f", scores capped at {facts.soft_cap:g}" if facts.soft_cap is not None else ""
        if state is None:
            name = decoder_of(model).config._attn_implementation
            lines.append(f"attention x{count} ({kind}): transformers' {name}")
        else:
            lines.append(f"attention x{count} ({kind}): {choice.name}, {choice.reason}")
    if state is not None:
        others = {why: n for why, n in state.taken.items() if why != "plain"}
        lines += [
            f"attention: {n} batches by transformers' {state.before}, {why}" for why, n in others.items()
        ]
    return lines


class _PlainBatches:
    """The hook: gives plain batches the empty mask, and packed ones their segments if they have none."""

    def __init__(self, counts: Counter[str]) -> None:
        self.taken = counts

    def __call__(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        why = _not_plain(decoder, args, kwargs)
        if not torch.compiler.is_compiling():
            self.taken[why or "plain"] += 1
        if why:
            return None
        mask = kwargs.get("attention_mask")
        ids = args[0] if args else kwargs.get("input_ids")
        x = kwargs["inputs_embeds"] if ids is None else ids
        kwargs = {
            **kwargs,
            "attention_mask": torch.empty(PLAIN_MASK_SHAPE, dtype=torch.bool, device=x.device),
        }
        positions = kwargs.get("position_ids")
        if mask is None and positions is not None and kwargs.get(KEYWORDS[0]) is None:  # as transformers does
            segments = Segments.from_position_ids(positions.expand(x.shape[0], -1), device="cpu")
            if len(segments.bounds()) > x.shape[0]:
                kwargs |= segments.to(x.device).keywords()
        return args, kwargs


def _not_plain(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a batch needs a mask of the host's; "" if it does not."""
    mask = kwargs.get("attention_mask")
    if not _is_ours(decoder):
        return f"set_attn_implementation has chosen {decoder.config._attn_implementation!r} since"
    if len(args) > 1:
        return "its arguments came without names"
    if kwargs.get("past_key_values") is not None:
        return "there is a key-value cache"
    if decoder.training and getattr(decoder.config, "attention_dropout", 0.0):
        return "attention has dropout"
    if kwargs.get("output_attentions") or decoder.config.output_attentions:
        return "the attention weights were asked for"
    if mask is not None and not is_plain_mask(mask) and not _pads_right(mask):
        return "its attention mask is more than padding at the right end"
    return ""


def _is_ours(decoder: Any) -> bool:
    """Whether the name of the attention function is still the one that `use_attention` set."""
    return decoder.config._attn_implementation in NAMES.values()


def _pads_right(mask: Any) -> bool:
    """Whether each row of a (B, T) mask is ones and then zeros, at which no token looks. Waits for a GPU."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    visible = mask.bool()
    return bool((visible[:, :1].all()) & (visible[:, 1:] <= visible[:, :-1]).all())


def _attention_function(fallback: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """What transformers calls: ours where the mask is the plain one, else what ``fallback`` finds."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        group = vars(module).get("tensor_group")
        if group is not None and kwargs.get("dropout") and not is_plain_mask(attention_mask):
            dropped = attend_dropping(
                query,
                key,
                value,
                attention_mask,
                group,
                scale=scaling,
                dropout=kwargs["dropout"],
                soft_cap=kwargs.get("softcap"),
            )
            return dropped, None
        if not is_plain_mask(attention_mask):
            theirs: tuple[Tensor, Tensor | None] = fallback(module)(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
            return theirs
        if kwargs.get("dropout"):
            raise Unsupported("attention with dropout needs a mask; give none and let the model build it.")
        segments = Segments.from_keywords(kwargs, query.shape[0] * query.shape[2])
        kind = query.device.type  # rotary positions are in float32 under autocast, and values are not
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
        out = attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            scale=scaling,
            window=kwargs.get("sliding_window"),
            soft_cap=kwargs.get("softcap"),
            segments=segments,
        )
        return out, None

    return forward


def _register(before: str) -> None:
    """Make our names known to transformers, which has one table of them; no entry of it is changed."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def eager(module: nn.Module) -> Any:
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]

    def sdpa(module: nn.Module) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"]

    if NAMES[before] not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAMES[before], _attention_function(eager if before == "eager" else sdpa))
        AttentionMaskInterface.register(NAMES[before], ALL_MASK_ATTENTION_FUNCTIONS[before])


def decoder_of(model: nn.Module) -> Any:
    """The module that holds the decoder layers."""
    base = unwrap(model)
    spec = spec_for(base)
    return base.get_submodule(locate(base, spec, spec.layers).rpartition(".")[0])


def attention_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Full name and module of each decoder layer's attention, in order.

    Raises:
        Unsupported: nobody wrote a spec for the model's family, and how its attention works is not known.
    """
    spec = spec_for(model)
    if spec.attention is None:
        raise Unsupported(f"{spec.without_spec}, so its attention stays transformers' own.")
    for layer in layer_names(model, spec):
        yield f"{layer}.{spec.attention.path}", model.get_submodule(f"{layer}.{spec.attention.path}")


def set_attention_name(decoder: Any, name: str) -> None:
    """Give every config in a decoder this name of an attention function."""
    configs = {id(m.config): m.config for m in decoder.modules() if hasattr(m, "config")}
    for config in configs.values():
        config._attn_implementation = name
