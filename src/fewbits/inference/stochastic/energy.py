"""Joules for a token, and which of several settings no other beats in both energy and perplexity.

The operations are those of `fewbits.inference.stochastic.work`, the prices those of a hardware.

    streams      cycles * sc_cycle + macs * sc_product, of the stochastic products
    conversion   stream bits * stream_bit + counts * count + codes * quantize
    integer      macs * int_mac            float   macs * float_mac
    near         bytes of a and b on their way into the array, and of the results out of it, * near_byte
    far          bytes of b * far_byte

How often each happens is said in `stochastic_work`. Results leave in two bytes. Products of whole numbers are
quantised as stochastic ones are, and their sums scaled (``count``) chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fewbits.errors import BadInput
from fewbits.inference.stochastic.work import Product, Work
from fewbits.recipes.energy_prices import Prices

PARTS = ("streams", "conversion", "integer", "float", "near", "far")
_RESULT_BYTES = 2
Point = TypeVar("Point")


@dataclass(frozen=True)
class Energy:
    """Joules for one token.

    Attributes:
        parts: by the names of `PARTS`.
        by_op: the same sum by kind of product: "linear", "lm_head", "scores", "values".
    """

    parts: Mapping[str, float]
    by_op: Mapping[str, float]

    @property
    def joules(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"joules": self.joules, "parts": dict(self.parts), "by_op": dict(self.by_op)}


def energy_of(work: Work, prices: Prices, *, tokens_per_pass: int = 1) -> Energy:
    """The energy of one token.

    Args:
        work: what is computed.
        prices: of the hardware.
        tokens_per_pass: tokens that share one reading of the weights, and of keys and values: 1 is decoding
            for one user, the length of the prompt is prefill.

    Raises:
        BadInput: a price that is needed is unknown, or fewer than one token in a pass.
    """
    if tokens_per_pass < 1:
        raise BadInput(f"{tokens_per_pass} tokens in a pass are refused; give at least 1.")
    parts, by_op = dict.fromkeys(PARTS, 0.0), dict[str, float]()
    for product in work.products:
        of_parts = _energy(product, prices, tokens_per_pass)
        for name, picojoules in of_parts.items():
            parts[name] += picojoules
        op = "lm_head" if product.layer.endswith("lm_head") else product.op
        by_op[op] = by_op.get(op, 0.0) + sum(of_parts.values())
    scale = 1e-12 / work.tokens
    return Energy(
        {name: value * scale for name, value in parts.items()},
        {name: value * scale for name, value in by_op.items()},
    )


def _energy(product: Product, prices: Prices, tokens_per_pass: int) -> dict[str, float]:
    """Picojoules of one product, by part."""
    macs, meet_b = product.macs, max(tokens_per_pass * product.sharing, 1)
    for_a, for_b = min(product.outputs, prices.columns), min(prices.rows, meet_b)
    results = product.rows * product.outputs
    moved = macs * (1 / max(for_a, 1) + 1 / for_b) * product.bits / 8 + results * _RESULT_BYTES
    picojoules = {"near": moved * prices.of("near_byte")}
    picojoules["far"] = macs / meet_b * product.b_bytes * prices.of("far_byte")
    if product.runs == "exact":
        return picojoules | {"float": macs * prices.of_bits("float_mac", product.bits)}
    codes: float = product.rows * product.inner
    if product.op != "linear":  # keys and values are operands that each token brings anew
        head_dim = product.inner if product.op == "scores" else product.outputs
        codes += product.rows * head_dim / product.sharing
    picojoules["conversion"] = codes * prices.of("quantize") + results * product.chunks * prices.of("count")
    if product.runs == "int":
        return picojoules | {"integer": macs * prices.of_bits("int_mac", product.bits)}
    bits = product.cycles * (1 / max(for_a, 1) + 1 / for_b)
    picojoules["conversion"] += bits * prices.of("stream_bit")
    streams = product.cycles * prices.of("sc_cycle") + macs * (prices.sc_product or 0.0)
    return picojoules | {"streams": streams}


def best_points(points: Sequence[Point], costs: Iterable[Callable[[Point], float]]) -> list[Point]:
    """Those that no other point beats: none is at most as high in every cost and lower in one.

    Args:
        points: any values.
        costs: what is to be low, such as energy and perplexity; a point with a NaN is none of them.

    Returns:
        In ascending order of the first cost.
    """
    measures = list(costs)
    numbers = [tuple(cost(point) for cost in measures) for point in points]
    best = [
        (mine, i)
        for i, mine in enumerate(numbers)
        if all(v == v for v in mine)
        and not any(_beats(other, mine) for j, other in enumerate(numbers) if j != i)
    ]
    return [points[i] for _, i in sorted(best)]


def _beats(other: tuple[float, ...], mine: tuple[float, ...]) -> bool:
    return all(x <= y for x, y in zip(other, mine, strict=True)) and other != mine
