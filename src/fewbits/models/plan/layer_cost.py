"""What one decoder layer's items take in bytes, and seconds to have them again: what a memory plan weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fewbits.decoder.keep import Keep
from fewbits.decoder.limits import why_not_attention
from fewbits.errors import BadInput
from fewbits.families.catalog import LLAMA
from fewbits.families.registry import written_spec
from fewbits.families.shapes import linear_shapes
from fewbits.families.spec import ModelSpec
from fewbits.models.packing.model_shapes import LayerShapes
from fewbits.recipes import Recipe
from fewbits.recipes.recipe import Rule

# What host traffic costs although it runs beside the products, of its own time: on an H200 at the 8B shape
# less than could be measured.
_HIDDEN_SHARE = 0.02
# Values that transformers' own Llama layer keeps for each token beside the linears' outputs, in widths of the
# residual and of the MLP; fitted to the measured peak of HF + PEFT at the 8B shape (62.4 GiB, 8,192 tokens).
_PLAIN_RESIDUALS, _PLAIN_INNERS = 8, 3
_OF_AN_MLP = 4  # of these residuals: what its norm reads and gives, and what its output is made of


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The rates that seconds are predicted with: what large products and copies reach, not the data sheet."""

    flops: float
    bandwidth: float  # bytes a second of the device's memory
    host_bandwidth: float  # bytes a second to or from pinned host memory


_MACHINES = {
    (8, 0): Machine(flops=240e12, bandwidth=1.4e12, host_bandwidth=22e9),
    (8, 6): Machine(flops=65e12, bandwidth=0.8e12, host_bandwidth=22e9),
    (8, 9): Machine(flops=150e12, bandwidth=0.8e12, host_bandwidth=22e9),
    (9, 0): Machine(flops=600e12, bandwidth=3.6e12, host_bandwidth=45e9),
    (10, 0): Machine(flops=1400e12, bandwidth=6e12, host_bandwidth=45e9),
    (12, 0): Machine(flops=180e12, bandwidth=1.4e12, host_bandwidth=45e9),
}
_PLAIN_MACHINE = Machine(flops=1e11, bandwidth=2e10, host_bandwidth=1e10)


def machine_of(capability: tuple[int, int] | None) -> Machine:
    """The rates of a GPU by its compute capability, of the nearest older one that is known; None: a CPU's."""
    older = [c for c in _MACHINES if capability is not None and c <= capability]
    return _MACHINES[max(older)] if older else _PLAIN_MACHINE


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Bytes that one decoder layer's items take and seconds that making them again takes.

    Attributes:
        always: bytes that stay whatever is chosen: statistics of the norms, the adapters' inner products.
        inputs, attention, mlp, normed, weights: bytes of the items of `Keep`.
        attention_s, mlp_s, normed_s, offload_s, weights_s: seconds of giving each one up.
        working: bytes of the backward pass through the layer while it is at work.
        plain: bytes that transformers' own layer keeps without recomputation.
        forward_s: the layer's forward pass.
    """

    always: int
    inputs: int
    attention: int
    mlp: int
    normed: int
    attention_s: float
    mlp_s: float
    normed_s: float
    offload_s: float
    working: int
    plain: int
    forward_s: float
    weights: int = 0
    weights_s: float = 0.0

    def kept_bytes(self, keep: Keep) -> int:
        """Bytes that stay on the device from the forward to the backward pass."""
        chosen = (
            (self.inputs, not keep.offload),
            (self.attention, keep.attention),
            (self.mlp, keep.mlp),
            (self.normed, keep.normed),
            (self.weights, keep.weights),
        )
        return self.always + sum(size for size, stays in chosen if stays)

    def remade(self, keep: Keep) -> int:
        """Bytes that are there only while the layer's backward pass is at work."""
        half = max(0 if keep.attention else self.attention, 0 if keep.mlp else self.mlp)
        return half + (0 if keep.normed else self.normed // 2) + (self.inputs if keep.offload else 0)

    def seconds(self, keep: Keep) -> float:
        """What giving up costs in one step."""
        costs = (
            (self.attention_s, not keep.attention),
            (self.mlp_s, not keep.mlp),
            (self.normed_s, not keep.normed),
            (self.offload_s, keep.offload),
            (self.weights_s, not keep.weights),
        )
        return sum(cost for cost, pays in costs if pays)


def layer_cost(
    config: Mapping[str, Any],
    recipe: Recipe,
    machine: Machine,
    *,
    num_tokens: int,
    sequence_length: int,
    dtype_bytes: int = 2,
    shapes: LayerShapes | None = None,
) -> LayerCost:
    """The cost of one decoder layer.

    A dense layer of a family with a spec is counted node by node, as the fused decoder computes it, and so is
    the attention of one with experts. What modules keep that run by themselves (experts, and all of a layer
    of a family that nobody wrote a spec for) is estimated from the shapes of their matrices: what can be
    chosen for them is to recompute them as a whole, or not.

    Args:
        config: the mapping in config.json.
        recipe: tells whether weights are decoded for each product, and the adapters' rank.
        machine: the rates.
        num_tokens: tokens of a batch, padding included.
        sequence_length: tokens that attend to each other; that of the longest sequence.
        dtype_bytes: bytes of a value in activations.
        shapes: of all its layers' matrices; needed where nobody said what a layer of this family computes.

    Raises:
        BadInput: they are needed, and missing.
    """
    spec = written_spec(config) if config.get("model_type") else LLAMA
    if spec is None or spec.attention is None or spec.mlp is None:
        if shapes is None:
            raise BadInput(
                f"there is no description of a layer of {config.get('model_type')}; give its matrices'"
                " shapes."
            )
        cost = _cost_of_matrices(shapes, recipe, machine, num_tokens=num_tokens, dtype_bytes=dtype_bytes)
        if spec is None or spec.attention is None or why_not_attention(spec, config) is not None:
            return cost
        attention = _attention_cost(
            config, spec, recipe, machine, tokens=(num_tokens, sequence_length), dtype_bytes=dtype_bytes
        )
        return _beside_own_mlp(attention, cost, shapes, recipe, machine, num_tokens, dtype_bytes)
    T, e, H = num_tokens, dtype_bytes, int(config["hidden_size"])
    linears = linear_shapes(config)
    half = _attention_cost(config, spec, recipe, machine, tokens=(T, sequence_length), dtype_bytes=e)
    q, qkv, inner = half.q, half.qkv, linears[spec.mlp.output][1]
    added = 2 * T * H * e if spec.norm.after_mlp is not None else 0  # what the second norms read
    rank = 0 if recipe.lora is None else recipe.lora.r
    is_packed = recipe.linear.weight is not None

    def product(outputs: int) -> float:
        return _product_s(outputs * H, T, e, recipe, machine)

    norm_s, gate_up_s = half.norm_s, product(2 * inner)
    forward_s = half.forward_s + gate_up_s + product(inner)
    travel_s = 2 * T * H * e / machine.host_bandwidth  # one way; the other way hides behind the backward pass
    decoded = max(2 * inner * H, qkv * H) * e if is_packed else 0
    turns = recipe.lora is None and not is_packed and recipe.linear.weight_operand is not None
    values = sum(n * k for n, k in linears.values()) if turns else 0  # kept beside the norms' outputs
    # the gradients of adapters come from the norms' inputs where these are in the products' own 16 bits
    normed = 2 * T * H * e + values if recipe.lora is None or e != 2 else 0
    weights, weights_s = _weight_values(recipe, sum(n * k for n, k in linears.values()), e, machine)
    return LayerCost(
        always=2 * T * 4 + 7 * rank * T * e + added,
        inputs=2 * T * H * e,
        attention=half.kept_bytes,
        mlp=T * 2 * inner * e,
        normed=normed,
        attention_s=half.again_s,
        mlp_s=gate_up_s + norm_s,
        normed_s=2 * norm_s + 2 * values / machine.bandwidth if normed else 0.0,
        offload_s=2 * travel_s * _HIDDEN_SHARE + max(0.0, travel_s - forward_s),
        working=max(4 * inner, 2 * qkv + q) * T * e + 3 * T * H * e + decoded,
        plain=T * e * (_PLAIN_RESIDUALS * H + 2 * qkv + _PLAIN_INNERS * inner + q),
        forward_s=forward_s,
        weights=weights,
        weights_s=weights_s,
    )


def _weight_values(recipe: Recipe, values: int, dtype_bytes: int, machine: Machine) -> tuple[int, float]:
    """Bytes of a layer's frozen weights as the products take them, and seconds to make them twice a step."""
    rule = recipe.linear
    in_float8 = rule.weight_operand is not None
    if recipe.lora is None or recipe.qat is not None or not (in_float8 or rule.weight is not None):
        return 0, 0.0
    stored = 0.6 if rule.weight is not None else dtype_bytes
    new_bytes = 1 if in_float8 else dtype_bytes
    return values * (2 if in_float8 else dtype_bytes), 2 * values * (stored + new_bytes) / machine.bandwidth


def _cost_of_matrices(
    shapes: LayerShapes, recipe: Recipe, machine: Machine, *, num_tokens: int, dtype_bytes: int
) -> LayerCost:
    """The cost of a layer that runs through its own forward, from its matrices alone."""
    T, e, H = num_tokens, dtype_bytes, shapes.hidden
    rank = 0 if recipe.lora is None else recipe.lora.r
    is_packed = recipe.linear.weight is not None
    decode_s = shapes.values * (e + 0.6) / machine.bandwidth if is_packed else 0.0
    forward_s = 2 * T * shapes.products / machine.flops + decode_s
    activations = T * e * (_PLAIN_RESIDUALS * H + shapes.kept_values)
    branches = 7 * rank * T * e * (1 + shapes.chosen * len(shapes.experts) // max(1, shapes.num_layers))
    spread = (
        3 * shapes.chosen * T * H * e if shapes.experts else 0
    )  # rows of pairs: spread, their gradient, a sum
    return LayerCost(
        always=0,
        inputs=2 * T * H * e,
        attention=0,
        mlp=0,
        normed=0,
        attention_s=0.0,
        mlp_s=0.0,
        normed_s=0.0,
        offload_s=0.0,
        working=T * e * (3 * H + 2 * shapes.kept_values)
        + spread
        + (2 * shapes.widest * e if is_packed else 0),
        plain=activations + branches,
        forward_s=forward_s,
    )


@dataclass(frozen=True, kw_only=True)
class _AttentionCost:
    """The attention's node: what it keeps, and what having that again costs.

    Attributes:
        q, qkv: values of a token's queries; of its queries, keys and values.
        kept_bytes: the product after the rotation, the attention's output and its statistics.
        norm_s, again_s, forward_s: seconds of the norm; of what makes ``kept_bytes`` again; of all.
        weights, weights_s: `LayerCost.weights` of its linears.
    """

    q: int
    qkv: int
    kept_bytes: int
    norm_s: float
    again_s: float
    forward_s: float
    weights: int
    weights_s: float


def _attention_cost(
    config: Mapping[str, Any],
    spec: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    *,
    tokens: tuple[int, int],
    dtype_bytes: int,
) -> _AttentionCost:
    """``tokens``: of a batch, and of its longest sequence."""
    assert spec.attention is not None
    (T, longest), e, H = tokens, dtype_bytes, int(config["hidden_size"])
    linears = linear_shapes(config)
    q = linears[spec.attention.output][1]
    qkv = sum(linears[path][0] for path in spec.attention.inputs)
    # Normed q and k stand beside the product.
    normed_qk = qkv - (qkv - q) // 2 if spec.norm.query is not None else 0
    norm_s = 2 * T * H * e / machine.bandwidth
    attention_s = 2 * T * min(longest, T) * q / (0.6 * machine.flops)  # causal: half of 4 T S q
    qkv_s = _product_s(qkv * H, T, e, recipe, machine)
    values = sum(linears[path][0] * linears[path][1] for path in spec.attention.linears)
    weights, weights_s = _weight_values(recipe, values, e, machine)
    return _AttentionCost(
        q=q,
        qkv=qkv,
        kept_bytes=T * (qkv + q + normed_qk) * e + T * int(config["num_attention_heads"]) * 4,
        norm_s=norm_s,
        again_s=qkv_s + attention_s + norm_s,
        forward_s=qkv_s + attention_s + _product_s(q * H, T, e, recipe, machine),
        weights=weights,
        weights_s=weights_s,
    )


def _product_s(values: int, num_tokens: int, dtype_bytes: int, recipe: Recipe, machine: Machine) -> float:
    """Seconds of a product with a weight of so many values, which is decoded for it where it is packed."""
    is_packed = recipe.linear.weight is not None
    decode = values * (dtype_bytes + 0.6) / machine.bandwidth if is_packed else 0.0
    return 2 * num_tokens * values / machine.flops + decode


def _beside_own_mlp(
    half: _AttentionCost,
    own: LayerCost,
    shapes: LayerShapes,
    recipe: Recipe,
    machine: Machine,
    num_tokens: int,
    dtype_bytes: int,
) -> LayerCost:
    """The cost of a layer of which the attention's half is a node, and the rest runs as modules.

    ``own`` is the cost of all of it as modules. Experts multiply in 16 bits, whatever linears do.
    """
    H, token_bytes = shapes.hidden, num_tokens * dtype_bytes
    in_16_bits = replace(recipe, linear=Rule(weight=recipe.linear.weight))
    values = sum(map(prod, shapes.experts)) // shapes.num_layers
    weights, weights_s = _weight_values(in_16_bits, values, dtype_bytes, machine)
    of_attention = sum(width for width in (half.q, 3 * half.qkv // 2) if width != H)
    of_mlp = own.plain - token_bytes * ((_PLAIN_RESIDUALS - _OF_AN_MLP) * H + of_attention)
    normed = token_bytes * H if recipe.lora is None else 0
    return replace(
        own,
        attention=half.kept_bytes,
        mlp=max(of_mlp, token_bytes * H),
        normed=normed,
        attention_s=half.again_s,
        mlp_s=max(own.forward_s - half.forward_s, 0.0) + half.norm_s,
        normed_s=2 * half.norm_s if normed else 0.0,
        offload_s=own.offload_s,
        weights=half.weights + weights,
        weights_s=half.weights_s + weights_s,
    )
