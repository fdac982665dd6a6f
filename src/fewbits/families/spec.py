"""`ModelSpec`: where things are in the models of a family, and what its decoder layers compute.

A spec is the whole truth about a family: whoever must know something of it reads it here. Paths in
`Attention`, `MLP`, `Norms` and `Experts` begin at a decoder layer, those of `ModelSpec` itself at the model.
Where a number differs from model to model, a spec names the field of config.json that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# The names under which LoRA targets ask for the parts of a linear that holds several.
_ATTENTION_NAMES, _MLP_NAMES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Where the norms of a decoder layer are, and what they compute.

    Attributes:
        before_attention, after_attention: of what goes into the attention, and of what comes out of it before
            that is added to the residual stream; None: there is no such norm.
        before_mlp, after_mlp: the same of the MLP.
        query, key: of queries and keys, before they are turned.
        query_key_over: what `query` and `key` normalise: each "head", or the whole "row" of all heads.
        query_key_if: the config's field that says whether a model has these two; None: all have.
        kind: "rms" (RMSNorm) or "layer" (LayerNorm, which takes the mean away).
        offset: what a norm adds to its weight; 1.0 where the weight is stored as its distance from one.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    query: str | None = None
    key: str | None = None
    query_key_over: Literal["head", "row"] = "head"
    query_key_if: str | None = None
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0

    @property
    def layout(self) -> Literal["pre", "post", "sandwich", "parallel"]:
        """Where norms stand: before each half, after it, both, or one before both halves side by side."""
        if self.before_attention is None:
            return "post"
        if self.before_mlp is None:
            return "parallel"
        return "pre" if self.after_attention is None else "sandwich"

    @property
    def paths(self) -> tuple[str, ...]:
        """All there are, in the order of the forward pass, those of heads last."""
        order = (
            self.before_attention,
            self.after_attention,
            self.before_mlp,
            self.after_mlp,
            self.query,
            self.key,
        )
        return tuple(path for path in order if path is not None)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a decoder layer.

    Attributes:
        path: of the attention module.
        inputs: the linears of queries, keys and values; or the one that holds all three.
        output: the linear behind the attention.
        window: where the sliding window of a layer is: in the attribute ``sliding_window`` of its module
            ("layer"; None there: it sees all), or in the config for all layers ("config").
        soft_cap: the config's field of the soft cap on scores; None: scores are not capped.
        multiplier: the config's field of the number that takes the place of the head's size in the scores'
            factor; None: it is ``head_dim ** -0.5``.
        multiplier_power: what that number is raised to.
        rotary: which channels of a head are turned together: the two "halves", neighbours ("pairs"), or
            none, where positions come in otherwise.
        rotary_layers: the config's field that says for each layer whether it turns at all; None: all do.
        clip: the config's field of the largest magnitude that queries, keys and values are cut to; None: they
            are not cut in any model.
        extras: what attention has beyond this, in words for messages ("sinks", "an output gate"); attention
            is then transformers' own.
    """

    path: str = "self_attn"
    inputs: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    window: Literal["layer", "config"] = "layer"
    soft_cap: str | None = None
    multiplier: str | None = None
    multiplier_power: float = 1.0
    rotary: Literal["halves", "pairs", "none"] = "halves"
    rotary_layers: str | None = None
    clip: str | None = None
    extras: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """Paths of all its linears."""
        return (*self.inputs, self.output)


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The MLP of a decoder layer: an activation, gated or not, between two products.

    Attributes:
        path: of the MLP module.
        inputs: the linears of gate and up; the one that holds both; or with ``is_gated`` False the only one.
        output: the linear behind the activation.
        is_gated: whether the activated half is multiplied by another.
        activation: the config's field of the activation's name.
        width: the config's field of the number of inner values.
    """

    path: str = "mlp"
    inputs: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    output: str = "mlp.down_proj"
    is_gated: bool = True
    activation: str = "hidden_act"
    width: str = "intermediate_size"

    @property
    def linears(self) -> tuple[str, ...]:
        """Paths of all its linears."""
        return (*self.inputs, self.output)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a decoder layer, each a gated MLP whose weights are slices of 3-D parameters.

    Attributes:
        path: of the module that holds the 3-D parameters; transformers calls it with the rows, the experts
            chosen for each, and their weights.
        router: path of the module that chooses; it stays in its own dtype.
        parameters: names of the 3-D parameters at `path`, gate and up first.
        shared: paths of linears of an expert that every token takes; none without one.
        count: the config's field of the number of experts.
        chosen: the config's field of how many of them a token takes.
        width: the config's field of the inner values of one expert.
        are_linears: whether transformers 4 kept each expert as linears, which "all-linear" then means.
    """

    path: str = "mlp.experts"
    router: str = "mlp.gate"
    parameters: tuple[str, ...] = ("gate_up_proj", "down_proj")
    shared: tuple[str, ...] = ()
    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    are_linears: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What fewbits knows of one family.

    Attributes:
        model_type: the ``model_type`` of its config.json.
        layers: path of the list of decoder layers.
        embed: path of the token embedding.
        head: path of the output head.
        final_norm: path of the norm after the last layer.
        norm: where norms are in a layer.
        attention: of a layer; None: nobody said, and it is transformers' own.
        mlp: of a layer; None where experts are in its place, or nobody said.
        experts: of a layer, or of some layers.
        other_linears: paths of linears in a layer that are none of attention, MLP and experts.
        some_layers: paths of linears that only some layers have (a dense layer among layers of experts).
        left: paths of linears that stay in their own dtype and get no adapter, each with the reason, in words
            for receipts and messages.
        embedding_multiplier: the config's field that embeddings are multiplied by.
        residual_multiplier: the config's field that each half is multiplied by before it is added.
        logits_divisor, logits_multiplier: the config's field that logits are divided or multiplied by.
        logits_soft_cap: the config's field of the soft cap on logits.
        towers: paths of what reads other things than text; it stays in its own dtype.
        gguf: llama.cpp's name of the architecture; None: not written there.
        generic: True if nobody wrote this spec: it was read from a model's modules and says only where its
            linears are. Whatever needs to know the family's arithmetic leaves such a model alone.
    """

    model_type: str
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str | None = "model.norm"
    norm: Norms = field(default_factory=Norms)
    attention: Attention | None = field(default_factory=Attention)
    mlp: MLP | None = field(default_factory=MLP)
    experts: Experts | None = None
    other_linears: tuple[str, ...] = ()
    some_layers: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    logits_soft_cap: str | None = None
    towers: tuple[str, ...] = ()
    gguf: str | None = None
    generic: bool = False

    @property
    def without_spec(self) -> str:
        """How messages begin about a family that nobody wrote a spec for."""
        return f"{self.model_type} has no spec"

    @property
    def linears(self) -> tuple[str, ...]:
        """Paths of all linears inside one layer."""
        halves = (self.attention, self.mlp)
        named = [path for half in halves if half is not None for path in half.linears]
        shared = () if self.experts is None else self.experts.shared
        return tuple(dict.fromkeys((*named, *shared, *self.other_linears, *self.some_layers)))

    @property
    def norms(self) -> tuple[str, ...]:
        """Paths of all norms inside one layer."""
        return self.norm.paths

    @property
    def linear_names(self) -> tuple[str, ...]:
        """The last part of each linear's path: what LoRA targets are named by."""
        return tuple(dict.fromkeys(path.rpartition(".")[2] for path in self.linears))

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Name of a linear that holds several, and the names that other families give to those."""
        holders: dict[str, tuple[str, ...]] = {}
        if self.attention is not None and len(self.attention.inputs) == 1:
            holders[_last(self.attention.inputs[0])] = _ATTENTION_NAMES
        if self.mlp is not None and self.mlp.is_gated and len(self.mlp.inputs) == 1:
            holders[_last(self.mlp.inputs[0])] = _MLP_NAMES
        return holders

    @property
    def products(self) -> tuple[tuple[str, ...], ...]:
        """The linears of a layer by the product that they are computed in: those of one input together."""
        halves = (self.attention, self.mlp)
        return tuple(group for half in halves if half is not None for group in (half.inputs, (half.output,)))


def _last(path: str) -> str:
    return path.rpartition(".")[2]
