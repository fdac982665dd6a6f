"""Linear layers: `QuantizedLinear` stores its weight packed, `LowPrecisionLinear` multiplies in few bits.

Shapes: weight (N, K) = (out_features, in_features), x (..., K), y (..., N).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.product.matmul_operands import operand_linear
from fewbits.kernels.product.matmul_packed import Operands, packed_linear
from fewbits.nn.decoded_weight import DecodedWeight
from fewbits.nn.finite import check_finite
from fewbits.nn.lasting import lasting_tensors


class LinearFormats(Protocol):
    """The formats of one linear layer; a recipe's rule is one such."""

    @property
    def weight(self) -> Format | None:
        """The format in which the weight is stored; None: it stays as it is."""

    @property
    def activation(self) -> Format | None:
        """The format of x in the product."""

    @property
    def gradient(self) -> Format | None:
        """The format of dy in the products of the backward pass."""

    @property
    def weight_operand(self) -> Format | None:
        """The format of the weight in the product."""


def operands_of(rule: LinearFormats) -> Operands:
    """The formats of the product's operands."""
    return Operands(activation=rule.activation, gradient=rule.gradient, weight_operand=rule.weight_operand)


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is stored in a number format.

    It is a kind of ``torch.nn.Linear`` so that libraries which look for those find it (PEFT's own layers,
    ``target_modules="all-linear"``); ``weight`` is then a `DecodedWeight`.

    The parts of the packed weight are parameters ``weight_<part>`` (``weight_codes``, ``weight_scales``, ...)
    that carry no gradient: they are saved, moved and sharded as parameters are, and keep their dtype when the
    module is cast; a cast changes only `dtype` and the bias.

    Attributes:
        format: how the weight is stored.
        dtype: the dtype that the weight had, and the one in which `dequantize` gives it back. The product
            itself is computed in the dtype of the input, or in autocast's.
        transposed: whether the layer stands for one whose plain weight is stored as (K, N), as GPT-2's Conv1D
            does; what is packed here is (N, K) all the same.
        repacked: whether the weight is another one than the layer was made or loaded with (an adapter was
            merged into it, numbers were assigned): the checkpoint that it came from then has another one.
        operands: formats to which the operands of the product are rounded; in the constructor the keywords
            ``activation``, ``gradient`` and ``weight_operand``.
    """

    transposed: bool = False
    repacked: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: Format,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **operands: Format | None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features, self.format = in_features, out_features, format
        self.operands = Operands(**operands)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        layout = format.layout((out_features, in_features))
        self.part_names = tuple(layout)
        self.before: list[tuple[dict[str, Tensor], bool]] = []  # what was assigned over, for unmerging
        for name, part in layout.items():
            empty = torch.empty(part.shape, dtype=part.dtype, device=device)
            self.register_parameter(f"weight_{name}", nn.Parameter(empty, requires_grad=False))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=self.dtype, device=device)) if bias else None  # type: ignore[assignment]

    @classmethod
    def from_linear(cls, linear: nn.Linear, rule: LinearFormats) -> QuantizedLinear:
        """The layer that holds ``linear``'s weight in ``rule.weight``; the bias is the same parameter.

        A linear on the meta device gives an empty layer on the meta device, to be filled from a checkpoint.
        """
        weight, format = linear.weight.detach(), rule.weight
        if format is None:
            raise ValueError(
                "a rule without a weight format leaves the weight as it is; use LowPrecisionLinear."
            )
        layer = cls(linear.in_features, linear.out_features, format, dtype=weight.dtype, device="meta")
        layer.operands = operands_of(rule)
        if linear.bias is not None:
            layer.bias = linear.bias
        if weight.device.type != "meta":
            layer.pack(weight)
            layer.repacked = False
        return layer.train(linear.training)

    @property
    def packed(self) -> Packed:
        """The weight as it is stored."""
        parts = {name: getattr(self, f"weight_{name}") for name in self.part_names}
        return Packed(self.format, (self.out_features, self.in_features), self.dtype, parts)

    def frozen(self) -> Packed:
        """`packed`, for a product whose gradients do not reach the weight.

        Raises:
            Unsupported: somebody wants them to: a part was told to train, which torch allows floating dtypes.
        """
        packed = self.packed
        told = [part for part in packed.parts.values() if part.requires_grad and part.is_leaf]
        if told and torch.is_grad_enabled():  # no leaf: FSDP1's view into what trains beside it
            raise Unsupported(
                f"a weight stored as {self.format.name} is to train (by requires_grad_, or as a copy by"
                " PEFT's modules_to_save), and it cannot; put an adapter on this linear, or leave it as it is"
                " with the recipe's skip."
            )
        return packed

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight (N, K) as other libraries read a linear's: decoded when used, packed when assigned."""
        return DecodedWeight(self)

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        return self.packed.codes.device

    def load_packed(self, packed: Packed) -> None:
        """Take ``packed`` as the weight; its shapes and dtypes are those of the format's layout."""
        if packed.format != self.format or tuple(packed.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"this layer holds {self.format.name} of {(self.out_features, self.in_features)}; "
                f"it was given {packed.format.name} of {tuple(packed.shape)}."
            )
        for name in self.part_names:
            self.register_parameter(f"weight_{name}", nn.Parameter(packed.parts[name], requires_grad=False))

    def pack(self, weight: Tensor) -> None:
        """Take ``weight`` (N, K), rounding it to the layer's format.

        Raises:
            NotFinite: it holds a NaN or an infinity.
        """
        check_finite(weight)
        with lasting_tensors():
            self.load_packed(quantize(weight, self.format))
        self.repacked = True

    def stored(self) -> dict[str, Tensor]:
        """The parameters that stand for the weight, by name: what `pack` replaces."""
        return {f"weight_{name}": part for name, part in self.packed.parts.items()}

    def load_stored(self, parts: dict[str, Tensor]) -> None:
        """Take back what `stored` gave, on the device where the layer is now.

        The parts are those of a weight (N, K).
        """
        for name, part in parts.items():
            self.register_parameter(name, nn.Parameter(part.detach().to(self.device), requires_grad=False))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (N, K) that the layer multiplies by, in ``dtype`` (default: `self.dtype`)."""
        return self.packed.dequantize(self.dtype if dtype is None else dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        operands = self.operands
        return packed_linear(
            x,
            self.frozen(),
            self.bias,
            activation=operands.activation,
            gradient=operands.gradient,
            weight_operand=operands.weight_operand,
        )

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return _repr(self, self.bias is not None, {"weight": self.format, **_named(self.operands)})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        loaded = {name: state_dict.get(prefix + name) for name in self.stored()}
        for name, part in self.stored().items():
            new = loaded[name]
            if new is not None and new.shape == part.shape and part.device.type != "meta":
                self.repacked |= not torch.equal(new.detach().to(part), part)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        # A cast (model.bfloat16(), .to(dtype)) is meant for numbers; here it moves the stored parts as they
        # are and says in which dtype the weight is wanted.
        parts = {id(part) for part in self.packed.parts.values()}

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if id(t) in parts and moved.dtype != t.dtype else moved

        super()._apply(move, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return self


class LowPrecisionLinear(nn.Linear):
    """A trained linear layer whose products see operands of few bits; the master weight stays as it is.

    Attributes:
        operands: formats to which x, dy and the weight are rounded.
    """

    operands: Operands

    @classmethod
    def from_linear(cls, linear: nn.Linear, rule: LinearFormats) -> LowPrecisionLinear:
        """The layer with ``linear``'s own parameters."""
        layer: LowPrecisionLinear = take_parameters(cls, linear)
        layer.operands = operands_of(rule)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        return operand_linear(
            x,
            self.weight,
            self.bias,
            weight_operand=self.operands.weight_operand,
            activation=self.operands.activation,
            gradient=self.operands.gradient,
        )

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return _repr(self, self.bias is not None, _named(self.operands))


def take_parameters(cls: Any, linear: nn.Linear) -> Any:
    """A module of ``cls``, a kind of nn.Linear, that has ``linear``'s very parameters."""
    layer = cls(linear.in_features, linear.out_features, bias=False, device="meta")
    layer.weight, layer.bias = linear.weight, linear.bias
    return layer.train(linear.training)


def _named(operands: Operands) -> dict[str, Format | None]:
    return {
        "activation": operands.activation,
        "gradient": operands.gradient,
        "weight_operand": operands.weight_operand,
    }


def _repr(module: nn.Module, bias: bool, formats: dict[str, Format | None]) -> str:
    named = "".join(f", {role}={format.name}" for role, format in formats.items() if format is not None)
    return f"in_features={module.in_features}, out_features={module.out_features}, bias={bias}{named}"
