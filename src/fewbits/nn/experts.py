"""`QuantizedExperts`: all experts of a decoder layer, their 3-D weights packed.

transformers keeps the experts of a layer in two parameters, ``gate_up_proj`` (E, 2I, H) and ``down_proj``
(E, H, I) (or turned round, with biases, or without a gate), and calls the module that holds them with the
rows, the experts chosen for each, and their weights. This module takes that one's place: same call, same
sums, each weight stored in a number format.

The pairs of a row and an expert are sorted by expert (`fewbits.nn.grouped`), each expert multiplies its
stretch of that table (`fewbits.nn.expert_products`), and the results are weighted and added up row by row.
A layer's weights are decoded when they are used, in the backward pass once more, and kept by nothing in
between, unless `keep_values` says so. Where few rows come and no gradient is asked for, as in generation,
only the experts that are hit are decoded, on a GPU within the product
(`fewbits.kernels.product.packed_pairs`).

Shapes: E experts, H width of the residual stream, I inner values, T rows, k experts a row, P = T k pairs,
r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.product.matmul_float8 import float8_weight, weight_scale
from fewbits.kernels.product.matmul_packed import PLAIN, product_dtype
from fewbits.kernels.product.packed_pairs import packed_pairs, takes
from fewbits.nn.expert_products import NO_BRANCH, Branch, Weights, into_experts, out_of_experts
from fewbits.nn.finite import check_finite
from fewbits.nn.gated_experts import gated_experts
from fewbits.nn.grouped import Table
from fewbits.nn.lasting import lasting_tensors
from fewbits.nn.tensor_state import TensorState, state_of

_OF_WEIGHTS = ("part_names", "formats", "shapes", "dtype", "operands", "scales", "keeps_values", "kept")
_OURS = (*_OF_WEIGHTS, "repacked", "host_class", "branches")
# As many times the experts there are: scales of scales that straddle two experts show in the sum of so many.
_MANY = 1024
# Pairs for each expert: up to so many are multiplied by packed matrices as they lie; more were not timed.
_FEW = 1


class QuantizedExperts(nn.Module):
    """The experts of one layer, with frozen packed weights.

    A packed weight's codes carry the name of the parameter that they stand for (``gate_up_proj``), its other
    parts that name and their own (``gate_up_proj_scales``): so PEFT's ``target_parameters`` finds it.

    Attributes:
        host_class: the class whose place this module takes; it knows the activation between the products.
        formats: of each packed weight, by its name.
        shapes: of each packed weight, as the host has it.
        dtype: that the weights had.
        branches: of each adapter that the call at hand adds, (A, B, scaling), by the weight's name.
        operands: formats of the products' operands: plain, or both in E4M3 (rows under a scale each, a weight
            under one), where every weight can be decoded row by row (`has_room`).
        scales: of weights in E4M3, by name, and the state of the stored tensors that they were found in.
        keeps_values: whether decoded weights stay from pass to pass.
        kept: those that do, by name and dtype, with columns for a branch behind them; and the state of the
            stored tensors that they were decoded from (`fewbits.nn.tensor_state`).
        repacked: names of the weights that are others than the module was made or loaded with (an adapter was
            merged into them).
    """

    def __init__(self, host: Any, formats: dict[str, Format]) -> None:
        """Take the place of ``host``; the weights are empty, on the meta device, until `pack`."""
        super().__init__()
        self.become(host, tuple(formats))
        self.formats.update(formats)
        for name, format in formats.items():
            layout = format.layout(self._stored_shape(name))
            self.part_names[name] = tuple(layout)
            empty = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in layout.items()}
            self.take(name, empty)

    def become(self, host: Any, weights: tuple[str, ...]) -> None:
        """Take the host's sizes, limits, activation, biases and modules, and leave its weights."""
        for name, value in vars(host).items():
            if name not in ("_parameters", "_modules", "_buffers"):
                vars(self)[name] = value
        self._modules.update(host._modules)
        self._buffers.update(host._buffers)
        self._parameters = {n: p for n, p in host._parameters.items() if n not in weights}
        self.host_class: Any = type(host)
        self.formats: dict[str, Format] = {}
        self.shapes = {name: tuple(getattr(host, name).shape) for name in weights}
        self.dtype = next(getattr(host, name).dtype for name in weights)
        self.part_names: dict[str, tuple[str, ...]] = {}
        self.branches: dict[str, tuple[tuple[Tensor, Tensor, float], ...]] = {}
        self.operands = PLAIN
        self.scales: dict[str, tuple[tuple[TensorState, ...], Tensor]] = {}
        self.keeps_values = False
        self.kept: dict[tuple[str, torch.dtype | str], tuple[tuple[TensorState, ...], Tensor]] = {}
        self.repacked: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: decoded values are made anew."""
        return {**super().__getstate__(), "kept": {}, "scales": {}}  # type: ignore[misc]

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
        if not getattr(self, self.key(name, "codes")).is_meta:  # it is not filled for the first time
            self.repacked |= {name}
        with lasting_tensors():
            stored = weight.transpose(1, 2).contiguous() if self.is_turned else weight
            self.take(name, quantize(stored, self.formats[name]).parts)

    def packed(self, name: str) -> Packed:
        """One weight as it is stored, (E, outputs, inputs)."""
        parts = {part: getattr(self, self.key(name, part)) for part in self.part_names[name]}
        return Packed(self.formats[name], self._stored_shape(name), self.dtype, parts)

    def dequantize(self, name: str) -> Tensor:
        """One weight in the host's shape and dtype."""
        weight = dequantize(self.packed(name))
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
        if self.shapes.keys() == {"down_proj"}:  # the host's order, in which PEFT nests adapters
            plain._parameters["down_proj"] = plain._parameters.pop("down_proj")
        return plain.train(self.training)  # type: ignore[no-any-return]

    @staticmethod
    def key(name: str, part: str) -> str:
        """The parameter's name of one part of a packed weight."""
        return name if part == "codes" else f"{name}_{part}"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows (T, H), chosen experts (T, k) and their weights (T, k) to (T, H).

        Raises:
            Unsupported: a parametrization stands on a weight, or one that the recipe left plain is to train.
        """
        if "parametrizations" in self._modules:
            raise Unsupported(
                "a parametrization stands on packed experts, such as PEFT's own layer for target_parameters: "
                "it would add to codes, not to weights; call fewbits.get_peft_model in place of PEFT's."
            )
        if self.training and torch.is_grad_enabled():
            self._check_trained()
        count, dtype = self.num_stored, product_dtype(hidden_states)
        hit: Tensor | None = None
        pairs = top_k_index.numel()
        if not torch.is_grad_enabled() and 2 * pairs <= count:
            hit, table = top_k_index.reshape(-1).long(), Table.one_by_one(top_k_index)
        else:
            table = Table.of(top_k_index, count)
        first, last = self._first, "down_proj"
        with torch.autocast(hidden_states.device.type, enabled=False):
            x = hidden_states.to(dtype)
            if self._is_one_node:
                of_first = self._weights(first, dtype, hit, pairs), self._branch(first, hit)
                of_last = self._weights(last, dtype, hit, pairs), self._branch(last, hit)
                out = gated_experts(x, top_k_weights, table, of_first, of_last)
                return out.to(hidden_states.dtype)
            y = into_experts(x, table, self._weights(first, dtype, hit, pairs), self._branch(first, hit))
            bias = self._bias(first, hit)
            if bias is not None:
                y = y + bias.to(dtype)[table.experts]
            out = out_of_experts(
                self._activated(y),
                top_k_weights,
                self._bias(last, hit),
                table,
                self._weights(last, dtype, hit, pairs),
                self._branch(last, hit),
            )
        return out.to(hidden_states.dtype)

    def _check_trained(self) -> None:
        """Refuse to train a 3-D weight that stands plain beside a packed one: it would get no gradient."""
        for name in {self._first, "down_proj"} - self.formats.keys():
            if getattr(self, name).requires_grad:
                raise Unsupported(
                    f"{name} of these experts is plain, and gets no gradient beside packed weights; freeze it"
                    " (requires_grad_(False)), or leave all weights of the experts plain."
                )

    def keep_values(self, on: bool) -> None:
        """Keep the decoded weights from pass to pass from now on, or let go of them: memory against time."""
        self.keeps_values = on
        self.kept.clear()

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return ", ".join(f"{name}={f.name} {self.shapes[name]}" for name, f in self.formats.items())

    @property
    def _first(self) -> str:
        return "gate_up_proj" if hasattr(self, "gate_up_proj") else "up_proj"

    @property
    def num_stored(self) -> int:
        """E."""
        count: int = next(iter(self.shapes.values()))[0]
        return count

    @property
    def _is_one_node(self) -> bool:
        """Whether all of it is two products without biases around a gated SiLU."""
        biased = any(getattr(self, f"{name}_bias", None) is not None for name in self.shapes)
        gated = getattr(self, "has_gate", True)
        return gated and not biased and _is_gated_silu(self.host_class, getattr(self, "act_fn", None))

    def _activated(self, x: Tensor) -> Tensor:
        """The host's own activation of what the first product gives."""
        if not getattr(self, "has_gate", True):
            return self.act_fn(x)  # type: ignore[no-any-return, operator]
        if _is_gated_silu(self.host_class, getattr(self, "act_fn", None)):  # with biases
            return gated_activation(x)
        return self.host_class._apply_gate(self, x)  # type: ignore[no-any-return]

    def _multiplies_few(self, name: str, dtype: torch.dtype, pairs: int) -> bool:
        """Whether so many pairs are multiplied by packed matrices as they lie, by the kernel for few."""
        if torch.is_grad_enabled() or self.device.type != "cuda" or self.keeps_values:
            return False
        few = pairs <= _FEW * self.num_stored and name in self.formats and self.operands == PLAIN
        return few and takes(self.formats[name], self._stored_shape(name), dtype)

    def _weights(self, name: str, dtype: torch.dtype, hit: Tensor | None, pairs: int) -> Weights:
        whole = partial(self._values, name, dtype, hit)
        if self._multiplies_few(name, dtype, pairs):
            packed = self.packed(name)
            return Weights(whole, few=lambda x, rows, ends: packed_pairs(x, rows, packed, ends, hit))
        if hit is not None or name not in self.formats:
            return Weights(whole)
        packed = self.packed(name)
        if self.operands != PLAIN and has_room(packed):
            return Weights(whole, float8=partial(self._float8, name))
        if not self.keeps_values:
            return Weights(whole, lambda columns: decode_with_room(packed, dtype, columns))
        if not has_room(packed):
            return Weights(whole)
        return Weights(whole, lambda columns: self._kept(name, dtype, columns))

    def _values(self, name: str, dtype: torch.dtype, hit: Tensor | None) -> Tensor:
        """A weight (E, outputs, inputs), or with ``hit`` (P,) the matrices of those experts."""
        if name not in self.formats:  # its rule left it as it is
            plain: Tensor = getattr(self, name).to(dtype)
            plain = plain.transpose(1, 2) if self.is_turned else plain
            return plain if hit is None else plain[hit]
        if self.keeps_values:
            weight = self._kept(name, dtype, 0)[..., : self._stored_shape(name)[2]]
            return weight if hit is None else weight[hit]
        return (
            dequantize(self.packed(name), dtype)
            if hit is None
            else decode_some(self.packed(name), hit, dtype)
        )

    def _kept(self, name: str, dtype: torch.dtype, columns: int) -> Tensor:
        """The kept weight (E, outputs, inputs and at least ``columns`` more); decoded, unless it is there.

        ``columns`` is 0 where the weight has no room for any (`has_room`).
        """
        packed = self.packed(name)
        state, key = state_of(packed.parts.values()), (name, dtype)
        before = self.kept.get(key)
        if before is not None and before[0] == state and before[1].shape[2] >= packed.shape[2] + columns:
            return before[1]
        self.kept.pop(key, None)
        with lasting_tensors():  # a training step writes its adapter beside what an evaluation decoded
            weight = decode_with_room(packed, dtype, columns) if columns else None
            weight = dequantize(packed, dtype) if weight is None else weight
        self.kept[key] = state, weight
        return weight

    def _float8(self, name: str, transposed: bool) -> tuple[Tensor, Tensor]:
        """A weight in E4M3 (E, outputs, inputs), or transposed (E, inputs, outputs), and its scale (1, 1)."""
        packed = rows_below_each_other(self.packed(name))
        state, key = state_of(packed.parts.values()), (name, "turned" if transposed else "float8")
        before = self.scales.get(name)
        if before is None or before[0] != state:
            with lasting_tensors():
                before = self.scales[name] = state, weight_scale(packed)
        scale, entry = before[1], self.kept.get(key)
        if entry is not None and entry[0] == state:
            return entry[1], scale
        experts, outputs, inputs = self._stored_shape(name)
        with lasting_tensors() if self.keeps_values else nullcontext():
            values = float8_weight(packed, transposed=transposed, inverse_scale=scale.reciprocal())
        if transposed:
            values = values.view(inputs, experts, outputs).transpose(0, 1)
        else:
            values = values.view(experts, outputs, inputs)
        if self.keeps_values:
            self.kept[key] = state, values
        return values, scale

    def _branch(self, name: str, hit: Tensor | None) -> Branch:
        if name not in self.branches:
            return NO_BRANCH
        added = self.branches[name]
        pairs = [expert_branches(a, b, self.num_stored) for a, b, _ in added]
        if len(pairs) == 1:
            (a, b), scaling = pairs[0], added[0][2]
        else:  # several at once are one of the sum of their ranks
            a = torch.cat([a for a, _ in pairs], 1)
            b = torch.cat([b * s for (_, b), (_, _, s) in zip(pairs, added, strict=True)], 2)
            scaling = 1.0
        return Branch(a, b, scaling) if hit is None else Branch(a[hit], b[hit], scaling)

    def _bias(self, name: str, hit: Tensor | None) -> Tensor | None:
        bias = getattr(self, f"{name}_bias", None)
        return bias if bias is None or hit is None else bias[hit]

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        experts, first, second = self.shapes[name]
        return (experts, second, first) if self.is_turned else (experts, first, second)

    def take(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Hold these stored parts of a weight (E, N, K) from now on, frozen."""
        self.kept.clear()
        for part, tensor in parts.items():
            self.register_parameter(self.key(name, part), nn.Parameter(tensor, requires_grad=False))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parts in self.part_names.items():
            for key in (self.key(name, part) for part in parts):
                part, new = getattr(self, key), state_dict.get(prefix + key)
                if new is None or new.shape != part.shape or part.is_meta:
                    continue
                if not torch.equal(new.detach().to(part), part):
                    self.repacked |= {name}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        # A cast is meant for numbers; stored parts move as they are.
        stored = {id(getattr(self, self.key(n, p))) for n, parts in self.part_names.items() for p in parts}

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if id(t) in stored and moved.dtype != t.dtype else moved

        super()._apply(move, recurse)
        self.kept.clear()
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


def decode_some(packed: Packed, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded matrices of a packed (E, N, K), those of ``chosen`` (P,) one after the other: (P, N, K).

    Only these are decoded, unless the format's scales do not end where a matrix ends (double quantisation of
    few values).
    """
    experts, *matrix = packed.shape
    one, many = packed.format.layout((1, *matrix)), packed.format.layout((_MANY * experts, *matrix))
    layout = packed.format.layout((len(chosen), *matrix))
    parts = {}
    for name, part in packed.parts.items():
        size, sizes = prod(one[name].shape), prod(many[name].shape)
        if sizes == size:  # one for all, such as the scale of a whole tensor
            parts[name] = part
        elif sizes == _MANY * experts * size:
            parts[name] = part.reshape(experts, size)[chosen].view(layout[name].shape)
        else:
            return dequantize(packed, dtype)[chosen]
    return dequantize(Packed(packed.format, (len(chosen), *matrix), packed.dtype, parts), dtype)


def has_room(packed: Packed) -> bool:
    """Whether `decode_with_room` decodes it: where each row's values hang on no other row's scales."""
    experts, N, K = packed.shape
    coding, layout = packed.format.contract.coding, packed.format.layout((experts * N, K))
    if coding is None or coding.block[0] != 1:
        return False
    return all(part.numel() == prod(layout[name].shape) for name, part in packed.parts.items())


def decode_with_room(packed: Packed, dtype: torch.dtype, columns: int) -> Tensor | None:
    """The decoded weight (E, N, K) in the first columns of a new (E, N, K + ``columns``).

    None for a format whose scales cover several rows at once (`has_room`).
    """
    if not has_room(packed):
        return None
    experts, N, K = packed.shape
    weight = torch.empty(experts, N, K + columns, dtype=dtype, device=packed.codes.device)
    rows = weight.view(experts * N, K + columns)[:, :K]
    dequantize(rows_below_each_other(packed), out=rows)
    return weight


def rows_below_each_other(packed: Packed) -> Packed:
    """The same weight (E, N, K) as one of (E N, K); of a format for which `has_room` says yes."""
    experts, N, K = packed.shape
    layout = packed.format.layout((experts * N, K))
    parts = {name: part.reshape(layout[name].shape) for name, part in packed.parts.items()}
    return Packed(packed.format, (experts * N, K), packed.dtype, parts)


def _is_gated_silu(host_class: Any, activation: Any) -> bool:
    """Whether the host's gate is ``silu(gate) * up`` of two halves side by side."""
    from transformers.activations import ACT2FN
    from transformers.integrations import moe

    plain = getattr(moe, "_default_apply_gate", None)
    is_silu = isinstance(activation, (nn.SiLU, type(ACT2FN["silu"])))
    return is_silu and plain is not None and getattr(host_class, "_apply_gate", None) is plain


__all__ = [
    "QuantizedExperts",
    "decode_some",
    "decode_with_room",
    "expert_branches",
    "has_room",
    "rows_below_each_other",
]
