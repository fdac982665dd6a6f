"""Ops of many arguments: their names and types are written once, as the fields of a NamedTuple.

torch.library derives an op's schema from a function's signature, and hands the op's implementations tensors
and numbers one by one: ten arguments would be written for the definition, again for the CUDA kernel and again
for the fake. Here each of the three takes one value, and `one_by_one` makes of it the function that torch
asks for:

    class Sum(NamedTuple):
        x: Tensor  # (M, N)
        y: Tensor  # (M, N)
        scale: float

    @torch.library.custom_op("fewbits::sum", mutates_args=())
    @one_by_one
    def _sum(o: Sum) -> Tensor:
        return o.x + o.scale * o.y

    run(_sum, launch_sum, x, Sum(x, y, 2.0))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

Result = TypeVar("Result")


def one_by_one(function: Callable[[Any], Result]) -> Callable[..., Result]:
    """The function of a NamedTuple's fields, for torch.library, of a function of that NamedTuple.

    Fields that are NamedTuples themselves are taken apart too.
    """
    kinds = get_type_hints(function)
    returned = None if kinds["return"] is type(None) else kinds["return"]
    (fields,) = (kind for name, kind in kinds.items() if name != "return")
    filled = _filling(fields)
    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for name, kind in _flat(fields)
    ]

    def of_values(*values: object) -> Result:
        return function(filled(iter(values)))

    of_values.__signature__ = Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    of_values.__name__, of_values.__doc__ = function.__name__, function.__doc__
    return of_values


def passes_dispatcher(x: Tensor) -> bool:
    """Whether a public function calls the CUDA kernel of its op itself, for operands like x (any shape).

    The dispatcher costs the host as much time as such a kernel takes. What is being compiled needs it.
    """
    return x.is_cuda and not torch.compiler.is_compiling()


def run(op: Callable[..., Result], on_cuda: Callable[[Any], Result], x: Tensor, values: tuple) -> Result:
    """An op's result for a NamedTuple of its arguments, by its kernel itself if `passes_dispatcher` of x."""
    return on_cuda(values) if passes_dispatcher(x) else op(*_taken_apart(values))


def _taken_apart(values: tuple) -> Iterator[object]:
    for value in values:
        if hasattr(value, "_fields"):
            yield from _taken_apart(value)
        else:
            yield value


def _flat(fields: type) -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(fields).items():
        if hasattr(kind, "_fields"):
            yield from _flat(kind)
        else:
            yield name, kind


def _filling(fields: type) -> Callable[[Iterator[object]], Any]:
    """What takes a NamedTuple's values from an iterator, those of NamedTuples inside it in their place."""
    kinds = get_type_hints(fields).values()
    parts = [_filling(kind) if hasattr(kind, "_fields") else next for kind in kinds]
    return lambda values: fields(*[take(values) for take in parts])
