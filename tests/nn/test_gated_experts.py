"""A layer's experts as one node, beside one product, one activation and one sum after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.formats import FORMATS
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.product.matmul_float8 import float8_weight, weight_scale
from fewbits.nn.expert_products import NO_BRANCH, Branch, Weights, into_experts, out_of_experts
from fewbits.nn.gated_experts import gated_experts
from fewbits.nn.grouped import Table

T, k, E, H, I, R = 13, 2, 5, 32, 16, 3


def tensors(dtype: torch.dtype, branches: str) -> dict[str, Tensor]:
    """Rows, routing, and the adapters' matrices as PEFT has them; all of them train."""
    torch.manual_seed(0)
    values = {"x": torch.randn(T, H), "routing": torch.rand(T, k)}
    if branches in ("both", "first"):
        values |= {"a1": torch.randn(E * R, H), "b1": torch.randn(2 * I, R * E) / 4}
    if branches in ("both", "last"):
        values |= {"a2": torch.randn(E * R, I), "b2": torch.randn(H, R * E) / 4}
    return {name: value.to(dtype).requires_grad_() for name, value in values.items()}


def branch(values: dict[str, Tensor], number: int, scaling: float) -> Branch:
    if f"a{number}" not in values:
        return NO_BRANCH
    a, b = values[f"a{number}"], values[f"b{number}"]
    return Branch(a.reshape(E, R, -1), b.reshape(len(b), R, E).permute(2, 0, 1), scaling)


def choices() -> Tensor:
    """Expert 3 gets no token, 0 many."""
    chosen = torch.stack([torch.zeros(T, dtype=torch.int64), torch.randint(1, 3, (T,))], 1)
    chosen[3:6, 1] = 4
    return chosen


@pytest.mark.parametrize("branches", ["both", "first", "last", "none"])
@pytest.mark.parametrize("frozen", [(), ("x",), ("routing", "b1"), ("a1", "b1", "a2")], ids=str)
def test_it_is_the_sum_over_experts(branches: str, frozen: tuple[str, ...]) -> None:
    """In float64: every pair by itself, and what autograd makes of that."""
    values, table = tensors(torch.float64, branches), Table.of(choices(), E)
    for name in frozen:
        if name in values:
            values[name].requires_grad_(False)
    w1, w2 = torch.randn(E, 2 * I, H, dtype=torch.float64), torch.randn(E, H, I, dtype=torch.float64)
    one, two = branch(values, 1, 0.5), branch(values, 2, 2.0)
    y = gated_experts(
        values["x"], values["routing"], table, (Weights(lambda: w1), one), (Weights(lambda: w2), two)
    )

    def whole(w: Tensor, b: Branch) -> Tensor:
        return w if b.a is None else w + b.scaling * b.b @ b.a

    gate, up = torch.einsum("tkih,th->tki", whole(w1, one)[choices_of(table)], values["x"]).chunk(2, -1)
    z = torch.nn.functional.silu(gate) * up
    pairs = torch.einsum("tkhi,tki->tkh", whole(w2, two)[choices_of(table)], z)
    need = (pairs * values["routing"][..., None]).sum(1)
    torch.testing.assert_close(y, need)
    train = [value for value in values.values() if value.requires_grad]
    if not train:
        return
    dy = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, train, dy), torch.autograd.grad(need, train, dy), strict=True
    ):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        again = gated_experts(
            values["x"], values["routing"], table, (Weights(lambda: w1), one), (Weights(lambda: w2), two)
        )
    assert torch.equal(again, y)


def choices_of(table: Table) -> Tensor:
    """(T, k) again."""
    return table.experts[table.inverse]


@pytest.mark.parametrize("branches", ["both", "none"])
def test_in_8_bits_it_is_its_three_steps(branches: str) -> None:
    """The same roundings in the same places, so float32 leaves nothing but the order of sums apart."""
    values, table = tensors(torch.float32, branches), Table.of(choices(), E)

    def float8(rows: int, columns: int) -> Weights:
        packed = quantize(torch.randn(E * rows, columns), FORMATS["nf4"])
        scale = weight_scale(packed)

        def turned_or_not(turned: bool) -> tuple[Tensor, Tensor]:
            w = float8_weight(packed, transposed=turned, inverse_scale=scale.reciprocal())
            w = w.view(columns, E, rows).transpose(0, 1) if turned else w.view(E, rows, columns)
            return w, scale

        def never() -> Any:
            raise AssertionError("the weight is asked for in E4M3 alone")

        return Weights(never, float8=turned_or_not)

    first, last = (float8(2 * I, H), branch(values, 1, 0.5)), (float8(H, I), branch(values, 2, 2.0))
    y = gated_experts(values["x"], values["routing"], table, first, last)
    z = gated_activation(into_experts(values["x"], table, *first))
    need = out_of_experts(z, values["routing"], None, table, *last)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, need)
    got, want = (torch.autograd.grad(out, list(values.values()), dy) for out in (y, need))
    for name, one, other in zip(values, got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=name)
