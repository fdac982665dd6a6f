"""`QuantizedExperts`: all experts of a decoder layer, their 3-D weights packed.

transformers keeps the experts of a layer in two parameters, ``gate_up_proj`` (E, 2I, H) and ``down_proj``
(E, H, I) (or turned round, with biases, or without a gate), and calls the module that holds them with the
rows, the experts chosen for each, and their weights. This module takes that one's place: same call, same
sums, each weight stored in a number format.

This is the definition, in plain torch: the pairs of a row and an expert are sorted by expert, each expert
multiplies its stretch of that table, and the results are weighted and added up row by row. A layer's weights
are decoded when they are used, in the backward pass once more, and kept by nothing in between.

Shapes: E experts, H width of the residual stream, I inner values, T rows, k experts a row, P = T k pairs,
r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.quantize import quantize
from fewbits.nn.finite import check_finite

_OURS = ("part_names", "formats", "shapes", "host_class", "branches", "dtype")


class QuantizedExperts(nn.Module):
    """The experts of one layer, with frozen packed weights.

    A packed weight's codes carry the name of the parameter that they stand for (``gate_up_proj``), its other
    parts that name and their own (``gate_up_proj_scales``): so PEFT's ``target_parameters`` finds it.

    Attributes:
        host_class: the class whose place this module takes; it knows the activation between the products.
        formats: of each packed weight, by its name.
        shapes: of each packed weight, as the host has it.
        dtype: that the weights had.
        branches: adapters (A, B, scaling) that the call at hand adds, by the weight's name.
    """

    def __init__(self, host: Any, formats: dict[str, Format]) -> None:
        """Take the place of ``host``; the weights are empty, on the meta device, until `pack`."""
        super().__init__()
        for name, value in vars(host).items():  # its sizes, limits and activation; biases stay the same
            if name not in ("_parameters", "_modules", "_buffers"):
                vars(self)[name] = value
        self._modules.update(host._modules)
        self._buffers.update(host._buffers)
        self._parameters = {n: p for n, p in host._parameters.items() if n not in formats}
        self.host_class, self.formats = type(host), formats
        self.shapes = {name: tuple(getattr(host, name).shape) for name in formats}
        self.dtype = next(getattr(host, name).dtype for name in formats)
        self.part_names: dict[str, tuple[str, ...]] = {}
        self.branches: dict[str, tuple[Tensor, Tensor, float]] = {}
        for name, format in formats.items():
            layout = format.layout(self._stored_shape(name))
            self.part_names[name] = tuple(layout)
            empty = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in layout.items()}
            self._take(name, empty)

    @property
    def is_turned(self) -> bool:
        """Whether the host stores each expert's weight as (inputs, outputs); packed it is the other way."""
        return bool(getattr(self, "is_transposed", False))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.parameters())).device

    def pack(self, name: str, weight: Tensor) -> None:
        """Take ``weight``, in the host's shape, rounding it to its format.

        Raises:
            NotFinite: it holds a NaN or an infinity.
        """
        check_finite(weight, name)
        weight = weight.detach()
        self.dtype = weight.dtype
        stored = weight.transpose(1, 2).contiguous() if self.is_turned else weight
        self._take(name, dict(quantize(stored, self.formats[name]).parts))

    def packed(self, name: str) -> Packed:
        """One weight as it is stored, (E, outputs, inputs)."""
        parts = {part: getattr(self, self.key(name, part)) for part in self.part_names[name]}
        return Packed(self.formats[name], self._stored_shape(name), self.dtype, parts)

    def dequantize(self, name: str) -> Tensor:
        """One weight in the host's shape and dtype."""
        weight = self.packed(name).dequantize()
        return weight.transpose(1, 2).contiguous() if self.is_turned else weight

    def weight_like(self, name: str) -> Tensor:
        """A tensor of the host's shape, dtype and device for this weight that takes no memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shapes[name])

    def host(self) -> nn.Module:
        """A module of the host's class that computes the same with plain weights, the decoded ones."""
        plain: Any = object.__new__(self.host_class)
        nn.Module.__init__(plain)
        for name, value in vars(self).items():
            if name not in ("_parameters", "_modules", "_buffers", *_OURS):
                vars(plain)[name] = value
        plain._modules.update(self._modules)
        plain._buffers.update(self._buffers)
        packed = {self.key(n, part) for n, parts in self.part_names.items() for part in parts}
        for name in self.shapes:
            weight = self.dequantize(name)
            plain.register_parameter(name, nn.Parameter(weight, requires_grad=torch.is_grad_enabled()))
        plain._parameters.update({n: p for n, p in self._parameters.items() if n not in packed})
        return plain.train(self.training)  # type: ignore[no-any-return]

    @staticmethod
    def key(name: str, part: str) -> str:
        """The parameter's name of one part of a packed weight."""
        return name if part == "codes" else f"{name}_{part}"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows (T, H), chosen experts (T, k) and their weights (T, k) to (T, H)."""
        experts = top_k_index.reshape(-1)
        order = experts.argsort(stable=True)  # the table: pairs sorted by expert
        count = next(iter(self.shapes.values()))[0]
        counts = torch.bincount(experts, minlength=count)[:count].tolist()
        rows = order // top_k_index.shape[-1]
        inner = self._activated(self._product(self._first, hidden_states[rows], counts))
        outer = self._product("down_proj", inner, counts)
        weighted = outer * top_k_weights.reshape(-1)[order, None].to(outer.dtype)
        return torch.zeros_like(hidden_states).index_add(0, rows, weighted.to(hidden_states.dtype))

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return ", ".join(f"{name}={f.name} {self.shapes[name]}" for name, f in self.formats.items())

    @property
    def _first(self) -> str:
        return next(name for name in self.shapes if name != "down_proj")

    def _activated(self, x: Tensor) -> Tensor:
        """The host's own activation of what the first product gives."""
        if not getattr(self, "has_gate", True):
            return self.act_fn(x)  # type: ignore[no-any-return, operator]
        return self.host_class._apply_gate(self, x)  # type: ignore[no-any-return]

    def _product(self, name: str, x: Tensor, counts: list[int]) -> Tensor:
        """Pairs (P, inputs) sorted by expert to (P, outputs), adapter and bias included."""
        y: Tensor = _ExpertProduct.apply(x, counts, self.packed(name))  # type: ignore[no-untyped-call]
        bias = getattr(self, f"{name}_bias", None)
        if bias is not None:
            y = y + bias.repeat_interleave(torch.tensor(counts, device=x.device), 0).to(y.dtype)
        if name not in self.branches:
            return y
        a, b, scaling = self.branches[name]
        a, b = expert_branches(a, b, len(counts))

        def branch(i: int, rows: Tensor) -> Tensor:
            return (rows.to(a.dtype) @ a[i].T) @ b[i].T

        return y + (_by_expert(x, counts, branch) * scaling).to(y.dtype)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        experts, first, second = self.shapes[name]
        return (experts, second, first) if self.is_turned else (experts, first, second)

    def _take(self, name: str, parts: dict[str, Tensor]) -> None:
        for part, tensor in parts.items():
            self.register_parameter(self.key(name, part), nn.Parameter(tensor, requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        # A cast is meant for numbers; stored parts move as they are.
        stored = {id(getattr(self, self.key(n, p))) for n, parts in self.part_names.items() for p in parts}

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if id(t) in stored and moved.dtype != t.dtype else moved

        super()._apply(move, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return self


def expert_branches(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """PEFT's two matrices of an adapter on E experts, expert by expert.

    Args:
        a: (E r, inputs), expert after expert.
        b: (outputs, r E): of each rank one column an expert.
        count: E.

    Returns:
        (E, r, inputs) and (E, outputs, r).
    """
    return a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1)


def _by_expert(x: Tensor, counts: list[int], function: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``function`` of each expert's stretch of x (P, ...), one below the other."""
    return torch.cat([function(i, rows) for i, rows in enumerate(x.split(counts))])


class _ExpertProduct(torch.autograd.Function):
    """``y_p = W_e(p) x_p`` for pairs sorted by expert; backward ``dx_p = W_e(p)^T dy_p``, decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], packed: Packed) -> Tensor:
        """x (P, inputs) to (P, outputs), in x's dtype, or autocast's."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.counts, ctx.packed, ctx.dtype, ctx.of = counts, packed, dtype, x.dtype
        weight = packed.dequantize(dtype)
        return _by_expert(x.to(dtype), counts, lambda i, rows: rows @ weight[i].T)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """dy (P, outputs) to dx (P, inputs)."""
        weight = ctx.packed.dequantize(ctx.dtype)
        dx = _by_expert(dy.to(ctx.dtype), ctx.counts, lambda i, rows: rows @ weight[i])
        return dx.to(ctx.of), None, None


__all__ = ["QuantizedExperts", "expert_branches"]
