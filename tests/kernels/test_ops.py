"""Ops of many arguments: a NamedTuple of them says their names and types once."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import CustomOpDef

from fewbits import kernels
from fewbits.kernels.launch.ops import one_by_one, run


class Inner(NamedTuple):
    scale: float
    shifts: Sequence[Tensor]


class Outer(NamedTuple):
    x: Tensor
    inner: Inner
    bias: Tensor | None


def computed(o: Outer) -> Tensor:
    y = o.inner.scale * o.x + sum(o.inner.shifts)
    return y if o.bias is None else y + o.bias


def test_the_schema_names_every_field() -> None:
    op = torch.library.custom_op("fewbits_tests::computed", one_by_one(computed), mutates_args=())
    op.register_fake(one_by_one(_fake))
    assert str(op._opoverload._schema).endswith(
        "computed(Tensor x, float scale, Tensor[] shifts, Tensor? bias) -> Tensor"
    )
    x, ones = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    values = Outer(x, Inner(2.0, [ones, ones]), None)
    assert torch.equal(run(op, computed, x, values), 2 * x + 2)
    assert torch.equal(op(x, scale=2.0, shifts=[ones], bias=ones), 2 * x + 2)
    torch.library.opcheck(op, (x, 2.0, [ones], ones), test_utils=("test_schema", "test_faketensor"))


def _fake(o: Outer) -> Tensor:
    return torch.empty_like(o.x)


def test_what_writes_returns_nothing() -> None:
    def into(o: Outer) -> None:
        o.x.mul_(o.inner.scale)

    op = torch.library.custom_op("fewbits_tests::into", one_by_one(into), mutates_args=("x",))
    x = torch.ones(2)
    op(x, 3.0, [], None)
    assert str(op._opoverload._schema).endswith("-> ()") and x.tolist() == [3, 3]


def ops() -> dict[str, CustomOpDef]:
    names = [m.name for m in pkgutil.walk_packages(kernels.__path__, "fewbits.kernels.")]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return {op._qualname: op for op in values if isinstance(op, CustomOpDef)}


@pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in ops().items()])
def test_every_implementation_takes_the_ops_arguments(op: CustomOpDef) -> None:
    """A CPU never calls the CUDA kernel of an op, so that a wrong signature there would be seen on a GPU."""
    values = [argument.name for argument in op._opoverload._schema.arguments]
    for function in (*op._backend_fns.values(), op._abstract_fn):
        if function is not None:
            bound = inspect.signature(function).bind(*values)
            bound.apply_defaults()
            taken = {name for name in bound.arguments if name in values}
            assert all(bound.arguments[name] == name for name in taken), f"{function} has another order"
