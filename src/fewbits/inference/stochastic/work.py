"""How many operations of which kind a model computes: what `fewbits.inference.stochastic.energy` prices.

Every product ``a b^T`` of a forward pass is one `Product`: the decoder's linears, lm_head, and both products
of each layer's attention, stochastic, of whole numbers or of floating-point ones. Embeddings, norms, softmax
and rotary positions are not counted. Attention is counted as it is computed, over all pairs of tokens, masked
ones too, without a cache.

With N rows of a, D inner dimensions, M outputs, and b shared by ``sharing`` rows for each token (1 in a
linear, the query heads of a group in attention), T tokens in a pass, and an array of R rows and C columns:

    macs      N M D                             cycles     the stream steps of all products
    a's way   macs / min(M, C) values           b's way    macs / min(R, T sharing) values, from near memory
    far       macs / (T sharing) values of b    counts     N M (number of chunks)
    streams   cycles / min(M, C) bits of a's and cycles / min(R, T sharing) of b's
    codes     N D values of a are quantised for each product, and in attention N / sharing of b's as well

So a linear's weight is read once in a pass, and an operand once for all that share it in the array. Of an
expert, ``sharing`` is the share of the tokens that were sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.host.attention import AttentionFacts, attention_facts, attention_modules
from fewbits.host.spec import find, layer_names, spec_for
from fewbits.inference.evaluate import evaluating
from fewbits.inference.stochastic.trace import chunk_sizes
from fewbits.models.packing.split_experts import experts_split
from fewbits.models.stochastic.attention import attention_products, stochastic_attention_of
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.split_experts import SplitExperts
from fewbits.nn.stochastic.attention import AttentionProducts
from fewbits.nn.stochastic.linear import StochasticLinear


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product ``a b^T`` of a forward pass; see the module's text.

    Attributes:
        layer: full name of the module.
        op: "linear", "scores" (QK^T) or "values" (PV).
        runs: "stochastic", "int" (whole numbers) or "exact" (floating point).
        bits: of an operand: codes and floating-point numbers.
        rows: N.
        inner: D.
        outputs: M.
        chunks: of the inner dimension, each counted apart.
        sharing: rows of a that meet the same b for each token, on average.
        cycles: stream steps of all products; 0 unless stochastic.
        b_bytes: what a value of b takes in the far memory.
    """

    layer: str
    op: str
    runs: str
    bits: int
    rows: int
    inner: int
    outputs: int
    chunks: int = 1
    sharing: float = 1
    cycles: int = 0
    b_bytes: float = 0.0

    @property
    def macs(self) -> int:
        """Products of two numbers."""
        return self.rows * self.inner * self.outputs


@dataclass(frozen=True)
class Work:
    """The products of a forward pass.

    Attributes:
        products: in the order of the pass.
        tokens: that went through the model.
    """

    products: tuple[Product, ...]
    tokens: int

    @property
    def mean_cycles(self) -> float | None:
        """Stream steps of a product, on average over the stochastic ones; None without any."""
        macs = sum(p.macs for p in self.products if p.runs == "stochastic")
        return sum(p.cycles for p in self.products) / macs if macs else None


def count_work(model: Any, input_ids: Tensor) -> Work:
    """Count the products of one forward pass without a cache.

    Args:
        model: a Hugging Face model of a known family, as it is or under a stochastic configuration.
        input_ids: (B, T) token ids.

    Raises:
        Unsupported: the model holds weights of a kind that is not counted, or its attention is not known.
        BadInput: no tokens.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise BadInput(f"token ids of shape {tuple(input_ids.shape)} hold no rows of tokens; give (B, T).")
    products: list[Product] = []
    tokens = input_ids.numel()
    with experts_split(model, lambda _: True), _counting(model, products.append, tokens), evaluating(model):
        model(input_ids=input_ids.to(model.device), use_cache=False)
    return Work(tuple(products), input_ids.numel())


@contextmanager
def _counting(model: Any, note: Callable[[Product], None], tokens: int) -> Iterator[None]:
    spec = spec_for(model)
    if spec.attention is None:
        raise Unsupported(
            f"the attention of {type(model).__name__} is not described, so its products cannot be counted; "
            "give its family a spec with an attention."
        )
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)} | _routers(model)
    _check_all_counted(model, set(map(id, linears.values())))
    experts = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, SplitExperts))
    handles = []
    for name, m in linears.items():
        hook = _linear_hook(name, m, note, tokens if name.startswith(experts) else None)
        handles.append(m.register_forward_pre_hook(hook, with_kwargs=True))
    stochastic, state = attention_products(model), stochastic_attention_of(model)
    facts_by_name = {}
    for name, module in attention_modules(model):
        facts = facts_by_name[name] = attention_facts(module, spec.attention)
        of_attention = _exact_attention(
            name, facts, stochastic.get(name, AttentionProducts()), model.dtype, note
        )
        handles.append(module.register_forward_pre_hook(of_attention, with_kwargs=True))

    def listener(name: str, q: Tensor, weights: Tensor, products: AttentionProducts) -> None:
        for product in _of_attention(name, facts_by_name[name], q, weights, products):
            note(product)

    if state is not None:
        state.listeners.append(listener)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if state is not None:
            state.listeners.remove(listener)


def _routers(model: nn.Module) -> dict[str, Any]:
    """Modules of the host that choose experts by a product with a weight (experts, hidden size)."""
    spec = spec_for(model)
    if spec.experts is None:
        return {}
    names = [f"{layer}.{spec.experts.router}" for layer in layer_names(model, spec)]
    modules: dict[str, Any] = {name: find(model, name) for name in names}
    return {
        name: m
        for name, m in modules.items()
        if not isinstance(m, nn.Linear) and getattr(m, "weight", None) is not None and m.weight.dim() == 2
    }


def _check_all_counted(model: nn.Module, counted: set[int]) -> None:
    for name, module in model.named_modules():
        if id(module) in counted or isinstance(module, nn.Embedding):
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                raise Unsupported(
                    f"{name}.{part} is a weight of {type(module).__name__}, whose products are not counted; "
                    "an energy without them would be too small, so this model has none here."
                )


def _linear_hook(
    name: str, layer: Any, note: Callable[[Product], None], tokens: int | None
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    def on_call(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        outputs, inner = _sizes(layer)
        rows = x.numel() // inner
        of_layer = Product(
            layer=name,
            op="linear",
            runs="exact",
            bits=8 * x.element_size(),
            rows=rows,
            inner=inner,
            outputs=outputs,
            sharing=1 if tokens is None else rows / tokens,
        )
        if isinstance(layer, StochasticLinear):
            for product in _of_stochastic(layer, x, of_layer):
                note(product)
            return
        note(replace(of_layer, b_bytes=_stored_bytes(layer) / max(inner * outputs, 1)))

    return on_call


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear, packed or not, or of a router."""
    sizes = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    return tuple(layer.weight.shape) if None in sizes else sizes


def _stored_bytes(layer: Any) -> int:
    if isinstance(layer, QuantizedLinear):
        return sum(part.numel() * part.element_size() for part in layer.packed.parts.values())
    return int(layer.weight.numel() * layer.weight.element_size())


def _of_stochastic(layer: StochasticLinear, x: Tensor, like: Product) -> Iterator[Product]:
    """What goes through the streams, or through whole numbers, and what is protected from them."""
    bits, protected = layer.format.sc_prec, 0 if layer.protected is None else len(layer.protected)
    sizes, C = chunk_sizes(layer), layer.num_chunks
    common = replace(
        like, bits=bits, inner=sum(sizes), chunks=C, b_bytes=bits / 8 + 4 / layer.in_features * C
    )
    if layer.int8:
        yield replace(common, runs="int")
    else:
        lengths = layer.lengths_of(x).expand(like.rows, C).sum(0).tolist() if like.rows else [0] * C
        steps = sum(size * length for size, length in zip(sizes, lengths, strict=True))
        yield replace(common, runs="stochastic", cycles=steps * layer.out_features)
    if protected:
        yield replace(like, inner=protected, b_bytes=torch.finfo(layer.dtype).bits / 8)


def _exact_attention(
    name: str,
    facts: AttentionFacts,
    products: AttentionProducts,
    dtype: torch.dtype,
    note: Callable[[Product], None],
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    """Those of the two products that no listener will hear of."""
    bits = torch.finfo(dtype).bits

    def on_call(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        rows = hidden.shape[0] * facts.heads * hidden.shape[1]
        for op, options in (("scores", products.scores), ("values", products.values)):
            if options is None:
                note(_attention_product(name, op, facts, rows, hidden.shape[1], bits))

    return on_call


def _of_attention(
    name: str, facts: AttentionFacts, q: Tensor, weights: Tensor, products: AttentionProducts
) -> Iterator[Product]:
    """Those that are stochastic, or of whole numbers."""
    rows, T = q.shape[:-1].numel(), weights.shape[-1]
    for op, options, plan, a in (
        ("scores", products.scores, products.scores_plan, q),
        ("values", products.values, products.values_plan, weights),
    ):
        if options is not None:
            like = _attention_product(name, op, facts, rows, T, options.sc_prec)
            runs = "int" if plan.integer else "stochastic"
            cycles = plan.steps(a, options) * like.inner * like.outputs
            yield replace(like, runs=runs, chunks=options.num_chunks(like.inner), cycles=cycles)


def _attention_product(name: str, op: str, facts: AttentionFacts, rows: int, keys: int, bits: int) -> Product:
    inner, outputs = (facts.head_dim, keys) if op == "scores" else (keys, facts.head_dim)
    return Product(
        layer=name,
        op=op,
        runs="exact",
        bits=bits,
        rows=rows,
        inner=inner,
        outputs=outputs,
        sharing=facts.heads // facts.kv_heads,
        b_bytes=bits / 8,
    )
