"""`StochasticLinear`: a linear layer on stochastic hardware, exactly, with a prepared weight.

Shapes: x (..., K), weight (N, K), C chunks of K, y (..., N).

    y = SC(x / f, W f) + x[:, p] W[:, p]^T + bias

SC is `prepared_matmul`: the weight, times its smooth scales f, was quantised once; x is quantised in each
forward pass. The channels p are protected: they are 0 in both operands of SC, and their product is computed
as any other. The sum is taken in float32. A row of x with a value that is not finite becomes NaN.

A stream's length belongs to x's rows and to chunks. It is the one of the layer's options, or comes from a
table of G groups of rows: a row's group in a chunk is the number of thresholds above the largest magnitude
there (largest code times scale, of x without the protected channels, divided by f), of the chunk or of the
row.

Backward is straight-through, the gradient of the product with the weight that is stored:
``dx = (dy W'^T') / f`` in the channels that are not protected, where ``W' = dequantised(W f)``; the stored
weight has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Format, PartSpec
from fewbits.formats.stochastic import Stochastic, stochastic_options
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.launch.matrix import rows_of
from fewbits.kernels.product.matmul_packed import decode, product_dtype, signature
from fewbits.kernels.stochastic.integer_product import integer_product
from fewbits.kernels.stochastic.matmul import product_of_codes
from fewbits.kernels.stochastic.quantize import quantize_stochastic
from fewbits.kernels.stochastic.rows import stochastic_rows
from fewbits.nn.finite import check_finite
from fewbits.nn.linear import LinearFormats, QuantizedLinear
from fewbits.nn.row_plan import call_groups
from fewbits.nn.stochastic.group import StochasticGroup

# What a layer may hold beside its codes and scales; all are saved with the model.
EXTRAS = ("smooth_scales", "protected", "weight_protected", "length_table", "length_thresholds", "settings")
_CLASSIFIERS = ("row", "chunk", "call")
_FLAGS = 3  # in ``settings``: int8, by_chunk, by_call; files from before "call" have two


def _refresh(module: StochasticLinear, _: Any) -> None:
    """A function with a name, so that pickle finds it again."""
    module.refresh()


class StochasticLinear(QuantizedLinear):
    """A linear layer whose product is that of stochastic hardware; see the module's text.

    Attributes:
        format: the options of the product, in which the weight is prepared.
        smooth_scales: f (K,), or None.
        protected: p (P,) int64, ascending, or None.
        weight_protected: W[:, p] (N, P) in the dtype of the weight, or None.
        int8: whether the product is that of the codes as integers, in place of their streams.
        exact: whether it is that of x and the dequantised weight, for `exact_products`.
        levels: the stream lengths that occur.
        group: layers that may be multiplied with this one, or None.
        on_groups: called with the groups of rows, (rows, C or 1) int64, as they are computed; or None.
        length_table: (G, C or 1) int16, or None: all streams have the length of ``format``.
        length_thresholds: (G - 1,) float32, descending, or None.
    """

    format: Stochastic

    def __init__(self, in_features: int, out_features: int, format: Stochastic, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, format, **kwargs)
        if any(operand is not None for operand in vars(self.operands).values()):
            raise Unsupported(
                "a stochastic product quantises its input itself, so formats of its operands have no place; "
                "leave out activation, gradient and weight_operand."
            )
        for name in EXTRAS:
            if name == "weight_protected":
                self.register_parameter(name, None)
            else:
                self.register_buffer(name, None)
        self.int8 = False
        self.exact = False
        self.by_chunk = False
        self.by_call = False
        self.group: StochasticGroup | None = None
        self.on_groups: Callable[[Tensor], None] | None = None
        self.levels: tuple[int, ...] = (format.length,)
        self.register_buffer("level_index", None, persistent=False)
        self.register_load_state_dict_post_hook(_refresh)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rule: LinearFormats | Stochastic,
        *,
        smooth_scales: Tensor | None = None,
        protected: Tensor | Sequence[int] | None = None,
        int8: bool = False,
    ) -> StochasticLinear:
        """The layer for ``linear``'s weight; the bias is the same parameter.

        Args:
            linear: the layer; on the meta device it gives an empty one, to be filled from a checkpoint.
            rule: the options of the product, or a recipe's rule with them as its weight format.
            smooth_scales: (K,), positive.
            protected: numbers of input channels.
            int8: see the class.
        """
        weights = rule if isinstance(rule, Format) else rule.weight
        format = stochastic_options(weights)
        if format is None:
            raise Unsupported(
                f"the format {getattr(weights, 'name', None)!r} has no stochastic product; give a"
                " Stochastic(...) format."
            )
        operands = {} if isinstance(rule, Format) else _operands(rule)
        weight = linear.weight.detach()
        layer = cls(
            linear.in_features, linear.out_features, format, dtype=weight.dtype, device="meta", **operands
        )
        if linear.bias is not None:
            layer.bias = linear.bias
        layer._take_extras(smooth_scales, protected, weight.device)
        layer.use_int8(int8)
        if weight.device.type != "meta":
            layer.pack(weight)
            layer.repacked = False
        return layer.train(linear.training)

    def _take_extras(
        self, smooth_scales: Tensor | None, protected: Tensor | Sequence[int] | None, device: torch.device
    ) -> None:
        K = self.in_features
        if smooth_scales is not None:
            usable = (smooth_scales > 0) & smooth_scales.isfinite()
            if smooth_scales.shape != (K,) or not bool(usable.all()):
                shape = tuple(smooth_scales.shape)
                raise BadInput(f"smooth_scales has shape {shape}; give {K} positive, finite numbers.")
            self.smooth_scales = smooth_scales.detach().to(device, torch.float32)
        if protected is not None and len(protected):
            if self.format.streams.signed:
                raise Unsupported(
                    f'protected channels stay in the streams as zeros, which count with signs="'
                    f'{self.format.signs}"; use signs="magnitude", or protect none.'
                )
            chosen = torch.as_tensor(protected, dtype=torch.int64).unique()
            if int(chosen.min()) < 0 or int(chosen.max()) >= K:
                raise BadInput(f"protected names input channels outside of 0 to {K - 1}; choose others.")
            self.protected = chosen.to(device)
            empty = torch.empty(self.out_features, len(chosen), dtype=self.dtype, device="meta")
            self.weight_protected = nn.Parameter(empty, requires_grad=False)

    def pack(self, weight: Tensor) -> None:
        """Prepare ``weight`` (N, K): smoothed, protected channels apart."""
        weight = weight.detach()
        check_finite(weight)
        if self.protected is not None:
            apart = weight[:, self.protected].to(self.dtype)
            self.weight_protected = nn.Parameter(apart, requires_grad=False)
            weight = weight.index_fill(1, self.protected, 0.0)
        if self.smooth_scales is not None:
            weight = weight * self.smooth_scales.to(weight.dtype)
        self.load_packed(quantize(weight, self.format))
        self.repacked = True

    def use_int8(self, int8: bool) -> None:
        """Multiply the codes as integers, or (False) count their streams."""
        self.int8 = int8
        self._write_settings()

    def set_lengths(
        self,
        table: Tensor | Sequence[Sequence[int]] | None,
        thresholds: Tensor | Sequence[float] | None = None,
        classify: str = "row",
    ) -> None:
        """Give the streams lengths of their own.

        Args:
            table: (G, C) or (G, 1) whole numbers, the length of each group of rows in each chunk; 0 skips
                it. None: all streams have the length of ``format`` again.
            thresholds: (G - 1,), descending; None for one group.
            classify: "row" or "chunk": whose largest magnitude is compared with the thresholds; or "call":
                where a row's lies between the least and the greatest of its call (`fewbits.nn.row_plan`).

        Raises:
            BadInput: numbers or shapes that do not fit this layer.
        """
        if table is None:
            self.length_table = self.length_thresholds = None
            self.refresh()
            return
        lengths = torch.as_tensor(table)
        limits = torch.as_tensor([] if thresholds is None else thresholds, dtype=torch.float32)
        self._check_lengths(lengths, limits, classify)
        device = self.device if self.device.type != "meta" else torch.device("cpu")
        self.length_table = lengths.to(device, torch.int16)
        self.length_thresholds = limits.to(device) if len(limits) else None
        self.by_chunk, self.by_call = classify == "chunk", classify == "call"
        self._write_settings()
        self.refresh()

    def _check_lengths(self, lengths: Tensor, limits: Tensor, classify: str) -> None:
        C, longest = self.num_chunks, self.format.longest
        if classify not in _CLASSIFIERS:
            raise BadInput(f"classify={classify!r} is unknown; choose one of {', '.join(_CLASSIFIERS)}.")
        if lengths.is_floating_point() or lengths.dim() != 2 or lengths.shape[1] not in (1, C):
            raise BadInput(
                f"the table of stream lengths is {lengths.dtype} {tuple(lengths.shape)}, and this layer of "
                f"{self.in_features} inputs has {C} chunks; give whole numbers of shape (groups, {C})."
            )
        if not len(lengths) or int(lengths.min()) < 0 or int(lengths.max()) > longest:
            raise BadInput(f"a table of stream lengths holds numbers from 0 to {longest}; this one does not.")
        if limits.shape != (len(lengths) - 1,) or bool((limits[1:] > limits[:-1]).any()):
            raise BadInput(
                f"{len(lengths)} groups of rows need {len(lengths) - 1} thresholds in descending order, not "
                f"{limits.tolist()}."
            )

    @property
    def num_chunks(self) -> int:
        """C."""
        return self.format.num_chunks(self.in_features)

    def expect_extras(self, extras: Mapping[str, PartSpec]) -> None:
        """Make room, on the meta device, for what a checkpoint holds beside codes and scales."""
        for name, spec in extras.items():
            empty = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            if name == "weight_protected":
                self.weight_protected = nn.Parameter(empty, requires_grad=False)
            else:
                setattr(self, name, empty)

    def refresh(self) -> None:
        """Read again what is kept beside the buffers, after they were loaded."""
        if self.settings is not None and self.settings.device.type != "meta":
            flags = [bool(flag) for flag in self.settings.tolist()]
            self.int8, self.by_chunk, self.by_call = (flags + [False] * _FLAGS)[:_FLAGS]
        self.levels, self.level_index = (self.format.length,), None
        if self.length_table is not None and self.length_table.device.type != "meta":
            levels, index = torch.unique(self.length_table, return_inverse=True)
            self.levels = tuple(levels.tolist())
            self.level_index = index.to(torch.uint8) if len(self.levels) > 1 else None

    def problem(self) -> str | None:
        """What was loaded and does not fit this layer: the rest of a sentence, or None."""
        codes, largest = self.packed.codes, self.format.max_code
        if codes.numel() and not -largest <= int(codes.min()) <= int(codes.max()) <= largest:
            return (
                f"was prepared with codes beyond {largest}, the largest of the sc_prec="
                f"{self.format.sc_prec} in its config.json"
            )
        protected = 0 if self.protected is None else len(self.protected)
        held = {"smooth_scales": self.smooth_scales, "weight_protected": self.weight_protected}
        shapes = {"smooth_scales": (self.in_features,), "weight_protected": (self.out_features, protected)}
        for name, tensor in held.items():
            if tensor is not None and tuple(tensor.shape) != shapes[name]:
                return f"has {name} of shape {tuple(tensor.shape)} where its weight needs {shapes[name]}"
        table, limits = self.length_table, self.length_thresholds
        if table is not None and table.shape[1] not in (1, self.num_chunks):
            return (
                f"has stream lengths for {table.shape[1]} chunks, and its {self.in_features} inputs make "
                f"{self.num_chunks}"
            )
        if table is not None and (0 if limits is None else len(limits)) != len(table) - 1:
            return f"has stream lengths for {len(table)} groups of rows and thresholds for others"
        return None

    def _write_settings(self) -> None:
        flags = [self.int8, self.by_chunk, *([True] if self.by_call else [])]
        device = self.device if self.device.type != "meta" else torch.device("cpu")
        self.settings = torch.tensor(flags, dtype=torch.uint8, device=device) if any(flags) else None

    def lengths_of(self, x: Tensor) -> Tensor:
        """The stream lengths that a forward pass with x (..., K) uses, (rows or 1, C or 1) int64."""
        if self.level_index is None:
            return torch.tensor([[self.levels[0]]], device=x.device)
        rows = rows_of(x.detach())
        _, scales = self._quantized(rows)
        index = self._level_index(rows, scales)
        assert index is not None
        return torch.tensor(self.levels, device=x.device)[index[0].long()]

    def groups_of(self, x: Tensor) -> Tensor:
        """The group of rows that decides each row's lengths, for x (..., K): (rows, C or 1) int64."""
        rows = rows_of(x.detach())
        if self.length_thresholds is None:
            return torch.zeros(len(rows), 1, dtype=torch.int64, device=x.device)
        return self._groups(rows, self._quantized(rows)[1], self.length_thresholds)

    def _groups(self, rows: Tensor, scales: Tensor, thresholds: Tensor) -> Tensor:
        if self.by_call:
            return call_groups(rows, thresholds)[:, None]
        largest = scales if self.by_chunk or not scales.shape[1] else scales.amax(1, keepdim=True)
        return (thresholds > (largest * self.format.max_code)[..., None]).sum(-1)

    def _level_index(self, rows: Tensor, scales: Tensor) -> Tensor | None:
        """(1, rows or 1, C or 1) uint8 for the input (rows, K) and its scales (rows, C)."""
        if self.level_index is None or self.length_thresholds is None:
            return None if self.level_index is None else self.level_index[None]
        groups = self._groups(rows, scales, self.length_thresholds)
        if self.on_groups is not None:
            self.on_groups(groups)
        if self.level_index.shape[1] == 1:
            index: Tensor = self.level_index[:, 0][groups]
            return index[None]
        columns = torch.arange(max(groups.shape[1], self.level_index.shape[1]), device=groups.device)
        index = self.level_index[groups, columns % self.level_index.shape[1]]
        return index[None]

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.protected is not None:
            x = x.index_fill(1, self.protected, 0.0)
        return quantize_stochastic(x, self.format, self.smooth_scales)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        dtype = product_dtype(x)
        if self.exact:
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), self.dequantize(dtype), bias)
        y = None if self.group is None else self.group.product(self, x)
        if y is None:
            rows = rows_of(x.to(dtype))
            y = self._differentiated(rows) if torch.is_grad_enabled() else self._rounded(rows, dtype)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(dtype).view(*x.shape[:-1], self.out_features)  # type: ignore[no-any-return]

    def _differentiated(self, rows: Tensor) -> Tensor:
        packed = self.packed
        return _Product.apply(rows, self, signature(packed), *packed.parts.values())  # type: ignore[no-any-return, no-untyped-call]

    def _rounded(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`product`, in ``dtype`` already where nothing is added to it; in fewer launches if rows are few."""
        if self.int8 or self.protected is not None or self.level_index is not None:
            return self.product(rows)
        dtype = dtype if self.bias is None else torch.float32
        b, smooth = self.packed, self.smooth_scales
        return stochastic_rows(rows, b.codes, b.scales, self.format, smooth, self.levels, dtype)

    def product(self, rows: Tensor) -> Tensor:
        """(rows, K) to (rows, N) float32, without the bias and without a gradient."""
        codes, scales = self._quantized(rows)
        if self.int8:
            y = integer_product(codes, scales, self.packed.codes, self.packed.scales, self.format)
        else:
            levels = self.levels
            y = product_of_codes(
                codes, scales, self.packed, self.format, levels, self._level_index(rows, scales)
            )
        if self.protected is not None:
            assert self.weight_protected is not None
            y = y + (rows[:, self.protected] @ self.weight_protected.to(rows.dtype).t()).float()
        return y

    def input_gradient(self, dy: Tensor, prepared: Tensor) -> Tensor:
        """(rows, K) for dy (rows, N) and the decoded prepared weight (N, K), in dy's dtype."""
        dx = dy @ prepared
        if self.smooth_scales is not None:
            dx = dx / self.smooth_scales.to(dx.dtype)
        if self.protected is not None:
            assert self.weight_protected is not None
            dx[:, self.protected] = dy @ self.weight_protected.to(dy.dtype)
        return dx

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (N, K) that the product approximates, in ``dtype`` (default: `self.dtype`)."""
        weight = self.packed.dequantize(torch.float32)
        if self.smooth_scales is not None:
            weight = weight / self.smooth_scales
        if self.protected is not None:
            assert self.weight_protected is not None
            weight[:, self.protected] = self.weight_protected.to(weight.dtype)
        return weight.to(self.dtype if dtype is None else dtype)

    def stored(self) -> dict[str, Tensor]:
        """What stands for the weight; see `QuantizedLinear.stored`."""
        tensors = super().stored()
        return (
            tensors
            if self.weight_protected is None
            else {**tensors, "weight_protected": self.weight_protected}
        )

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        cycles = "int8" if self.int8 else f"cycles={'/'.join(str(n) for n in self.levels)}"
        smoothed = ", smoothed" if self.smooth_scales is not None else ""
        apart = "" if self.protected is None else f", protected={len(self.protected)}"
        return f"{super().extra_repr()}, {cycles}{smoothed}{apart}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StochasticLinear:
        # Numbers of the product's definition: they move with the layer, and a cast leaves them as they are.
        scales = {n: b for n, b in self._buffers.items() if b is not None and b.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in scales.items():
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = buffer.to(moved.device) if moved.dtype != buffer.dtype else moved
        return self


@contextmanager
def exact_products(model: nn.Module) -> Iterator[None]:
    """Within it, stochastic layers multiply their inputs by their dequantised weights, without streams."""
    layers = [module for module in model.modules() if isinstance(module, StochasticLinear)]
    before = [layer.exact for layer in layers]
    try:
        for layer in layers:
            layer.exact = True
        yield
    finally:
        for layer, exact in zip(layers, before, strict=True):
            layer.exact = exact


def _operands(rule: LinearFormats) -> dict[str, Any]:
    named = ("activation", "gradient", "weight_operand")
    return {name: getattr(rule, name) for name in named}


class _Product(torch.autograd.Function):
    """`StochasticLinear.product` forward, `StochasticLinear.input_gradient` backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: StochasticLinear, like: Any, *parts: Tensor) -> Tensor:
        ctx.layer, ctx.like, ctx.dtype = layer, like, rows.dtype
        ctx.save_for_backward(*parts)
        return layer.product(rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx = None
        parts = ctx.saved_tensors  # once: gradient checkpointing makes them again for one reading
        needs_dx, *_ = ctx.needs_input_grad
        if needs_dx:
            dy = dy.to(ctx.dtype)
            dx = ctx.layer.input_gradient(dy, decode(ctx.like, parts, dy.dtype))
        return dx, None, None, *(None for _ in parts)
