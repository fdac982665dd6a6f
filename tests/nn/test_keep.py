"""The presets are what they say, from the fastest to the smallest."""

from __future__ import annotations

from itertools import pairwise

from fewbits.decoder.keep import KEEP_EVERYTHING, KEEP_NONE, KEEP_ON_HOST, KEEPS, Keep


def test_the_order_never_computes_less_and_keeps_more() -> None:
    def products(keep: Keep) -> int:
        return 2 * keep.mlp + keep.attention  # gate_up is the larger one

    assert KEEPS[0] == KEEP_EVERYTHING and KEEPS[-1] == KEEP_ON_HOST
    assert all(products(a) >= products(b) for a, b in pairwise(KEEPS))
    assert len(set(KEEPS)) == len(KEEPS)


def test_as_text() -> None:
    assert str(Keep()) == "attention+mlp"
    assert str(KEEP_EVERYTHING) == "attention+mlp+normed+weights"
    assert str(KEEP_NONE) == "inputs"
    assert str(KEEP_ON_HOST) == "inputs, inputs on the host"
