"""Logits that are not there until somebody looks: `LazyLogits`, their head, the loss that needs none.

In training a causal LM makes its logits only to hand them to its loss, which can do without them
(`fewbits.kernels.loss.linear_cross_entropy`). Whoever else reads them, a metric or another loss, gets the
true values, with their gradient: any use of a `LazyLogits` other than its shape, dtype or device computes it.
With a `Float8Head` the loss's products take 8-bit operands; logits that somebody reads do not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.kernels.loss.linear_cross_entropy import linear_cross_entropy
from fewbits.kernels.loss.linear_cross_entropy_float8 import (
    HeadOperands,
    head_operands,
    linear_cross_entropy_float8,
)
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.tensor_state import state_of

_FLOAT8_SIDES = 16
# What can be read of logits that do not exist.
_FACTS = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.__len__,
        torch.Tensor.is_floating_point,
        torch.Tensor.element_size,
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "layout",
                "ndim",
                "is_cuda",
                "requires_grad",
                "grad_fn",
                "is_leaf",
            )
        ),
    }
)
_DIVISIONS = frozenset({torch.Tensor.__truediv__, torch.Tensor.div, torch.div})
_PRODUCTS = frozenset({torch.Tensor.__mul__, torch.Tensor.mul, torch.mul})
_TANHS = frozenset({torch.tanh, torch.Tensor.tanh})
_WIDENINGS = frozenset({torch.Tensor.float})


def head_weight(head: nn.Linear) -> Tensor:
    """The weight (V, K) of an output head; of a packed one it is decoded, in the dtype that it had."""
    return head.dequantize() if isinstance(head, QuantizedLinear) else head.weight


def is_frozen(head: nn.Linear) -> bool:
    """Whether the head's weight does not train; a packed one never does."""
    return isinstance(head, QuantizedLinear) or not head.weight.requires_grad


class Float8Head:
    """The 8-bit operands of a head: made once of a frozen weight, anew in each pass of one that trains.

    FSDP2 gathers a weight for each pass, so that what it manages is made anew as well, and not kept.
    """

    def __init__(self, head: nn.Linear, *, gradient: bool) -> None:
        """``gradient``: the product of the backward pass takes 8 bits, too."""
        self.head, self.gradient = head, gradient
        self._known: tuple[Any, HeadOperands] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, and for a file: the operands are of this head's weight, and torch pickles no float8."""
        return {**vars(self), "_known": None}

    @property
    def is_kept(self) -> bool:
        """Whether the operands stay from step to step."""
        return is_frozen(self.head) and not getattr(self.head, "_is_fsdp_managed_module", False)

    @property
    def if_it_fits(self) -> Float8Head | None:
        """This; None, with a warning, if the head's sides are others by now, and 8 bits do not take them."""
        sides = self.head.out_features, self.head.in_features
        if not any(side % _FLOAT8_SIDES for side in sides):
            return self
        warnings.warn(
            f"the output head has the sides {sides} by now, and 8-bit products take multiples of"
            f" {_FLOAT8_SIDES}: it multiplies in its own dtype (resize_token_embeddings(...,"
            f" pad_to_multiple_of={_FLOAT8_SIDES}) keeps 8 bits).",
            stacklevel=2,
        )
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the operands, made or not."""
        return self.head.out_features * self.head.in_features * (2 if self.gradient else 1)

    def forget(self) -> None:
        """Make the operands again when they are asked for."""
        self._known = None

    def operands(self) -> HeadOperands:
        """Those of the weight as it is."""
        if not self.is_kept:
            self._known = None
            return head_operands(head_weight(self.head), gradient=self.gradient)
        key = state_of([*self.head.parameters()])
        if self._known is None or self._known[0] != key:
            self._known = None  # two of them would need twice the memory
            self._known = (key, head_operands(head_weight(self.head), gradient=self.gradient))
        return self._known[1]


class _Then:
    """The operands of logits that were put off, as they were then."""

    _SAMPLES = 1024

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """hidden (..., K), weight (V, K), bias (V,)."""
        self.tensors = [t for t in (hidden, weight, bias) if t is not None]
        self._state = state_of(self.tensors)
        self._sample = self._some_of(weight) if weight.requires_grad else None

    def check(self) -> None:
        """Raise `Unsupported` if they are others by now.

        torch's fused optimizers count no version, so that of a weight that trains some values are compared.
        """
        same = state_of(self.tensors) == self._state
        if same and self._sample is not None:
            same = torch.equal(self._some_of(self.tensors[1]), self._sample)
        if not same:
            raise Unsupported(
                "these logits were put off until somebody reads them, and the output head has changed since "
                "(an optimizer's step, a load, a merge); read outputs.logits before that, or call "
                "fewbits.unfuse(model), after which logits are computed at once."
            )

    @classmethod
    def _some_of(cls, weight: Tensor) -> Tensor:
        values = weight.detach().view(-1)
        return values[:: max(1, values.numel() // cls._SAMPLES)].clone()


class LazyLogits(torch.Tensor):
    """``hidden @ weight^T + bias`` (..., V), computed when it is first used, once.

    Division by a number, tanh, and multiplication by the same number, in this order, are put off as well:
    they are the soft cap that some families lay over their logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[tuple[str, float], ...]
    float8: Float8Head | None
    then: _Then | None
    computed: tuple[Tensor, int] | None

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        steps: tuple[tuple[str, float], ...] = (),
        dtype: torch.dtype | None = None,
        float8: Float8Head | None = None,
        then: _Then | None = None,
    ) -> LazyLogits:
        """Logits of hidden (..., K) under weight (V, K); ``steps`` are what was put off so far.

        ``float8``: what the loss multiplies by in place of the weight. ``then``: the operands as they are;
        None: as they are now.
        """
        shape = (*hidden.shape[:-1], weight.shape[0])
        logits: LazyLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype or hidden.dtype, device=hidden.device
        )
        logits.hidden, logits.weight, logits.bias, logits.steps, logits.float8 = (
            hidden,
            weight,
            bias,
            steps,
            float8,
        )
        logits.computed = None
        logits.then = then
        if then is None and not torch.compiler.is_compiling():
            logits.then = _Then(hidden, weight, bias)
        return logits

    @property
    def soft_cap(self) -> float | None:
        """The cap, 0 for none; None if what was put off is no whole soft cap."""
        with torch._C.DisableTorchFunctionSubclass():
            match self.steps:
                case ():
                    return 0.0
                case (("div", divisor), ("tanh", _), ("mul", factor)) if divisor == factor:
                    return divisor
            return None

    @property
    def was_changed(self) -> bool:
        """Whether somebody has computed the logits and written into them."""
        return self.computed is not None and self.computed[0]._version != self.computed[1]

    def value(self) -> Tensor:
        """The logits (B, S, V), an ordinary tensor with its gradient; the same one each time.

        Raises:
            Unsupported: the head is another by now.
        """
        if self.computed is not None:
            return self.computed[0]
        if self.then is not None:
            self.then.check()
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_inference_mode_enabled():  # whose tensors are of no use afterwards
                return self._compute()
            with torch.enable_grad():  # as they were asked for where they were put off
                logits = self._compute()
            self.computed = logits, logits._version
            return logits

    def _compute(self) -> Tensor:
        x = F.linear(self.hidden, self.weight, self.bias)
        for step, number in self.steps:
            x = x.tanh() if step == "tanh" else x / number if step == "div" else x * number
        return x.to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Facts are answered, a soft cap and a widening are put off, all else computes the logits."""
        answer = _uncompiled() if "torch._dynamo" in sys.modules else _answer
        return answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For callers below Python: they get the values."""
        return func(*_computed(args), **_computed(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without computing them."""
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _answer(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if func in _FACTS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    later = _later(func, args, kwargs)
    if later is not None:
        return later
    args, kwargs = _computed(args), _computed(kwargs)
    return func(*args, **kwargs)


@lru_cache(maxsize=1)
def _uncompiled() -> Callable[..., Any]:
    """`_answer`, for torch.compile to leave alone: it would burn in which function was asked for first.

    Without a guard on it: torch 2.13 took Gemma 2's product for the division before. Not made at import, for
    this imports the compiler.
    """
    plain: Callable[..., Any] = torch.compiler.disable(_answer)
    return plain


def _later(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> LazyLogits | None:
    """The logits with one more step put off, if ``func`` is such a step."""
    if kwargs or not args or not isinstance(args[0], LazyLogits):
        return None
    x: LazyLogits = args[0]
    rest = args[1:]
    if x.computed is not None:
        return None  # they are there, and somebody may have written into them
    if func in _TANHS:
        return _with(x, ("tanh", 0.0))
    if func in _WIDENINGS and x.dtype == torch.float32:
        return x
    if func in _WIDENINGS:
        return LazyLogits(x.hidden, x.weight, x.bias, x.steps, torch.float32, x.float8, x.then)
    if len(rest) == 1 and isinstance(rest[0], (int, float)):
        if func in _DIVISIONS:
            return _with(x, ("div", float(rest[0])))
        if func in _PRODUCTS:
            return _with(x, ("mul", float(rest[0])))
    return None


def _with(x: LazyLogits, step: tuple[str, float]) -> LazyLogits:
    return LazyLogits(x.hidden, x.weight, x.bias, (*x.steps, step), x.dtype, x.float8, x.then)


def _computed(x: Any) -> Any:
    if isinstance(x, LazyLogits):
        return x.value()
    if isinstance(x, (tuple, list)):
        return type(x)(_computed(v) for v in x)
    if isinstance(x, dict):
        return {key: _computed(v) for key, v in x.items()}
    return x


class LazyHead:
    """The forward of an output head: lazy logits where gradients are on, else the head's own."""

    def __init__(
        self, head: nn.Linear, float8: Float8Head | None = None, model: nn.Module | None = None
    ) -> None:
        """``model``: logits are lazy while its loss is a `LogitFreeLoss`; None: always.

        While ``asked_for_labels`` is set they are lazy without gradients, too.
        """
        self.head, self.float8, self.model = head, float8, model
        self.asked_for_labels = False

    def __call__(self, x: Tensor) -> Tensor:
        """(..., K) to (..., V)."""
        is_ours = self.model is None or isinstance(vars(self.model).get("_loss_function"), LogitFreeLoss)
        if is_ours and (self.asked_for_labels or (torch.is_grad_enabled() and self.head.training)):
            float8 = None if self.float8 is None else self.float8.if_it_fits
            return LazyLogits(x, head_weight(self.head), self.head.bias, float8=float8)
        return type(self.head).forward(self.head, x)


class LogitFreeLoss:
    """A causal LM's loss function, as transformers calls it; `LazyLogits` stay uncomputed."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over the labels that count, each predicted from the position before it.

        ``valid_rows``, a bound on their number, leaves the others out of the head's products.
        """
        cap = logits.soft_cap if isinstance(logits, LazyLogits) else None
        if cap is None or not isinstance(logits, LazyLogits) or logits.was_changed:
            return self.original(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden, weight, float8 = logits.hidden, logits.weight, logits.float8
        targets = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
        options: dict[str, Any] = {
            "bias": logits.bias,
            "ignore_index": ignore_index,
            "num_items": num_items_in_batch,
            "soft_cap": cap or None,
            "valid_rows": kwargs.get("valid_rows"),
        }
        if float8 is None:
            return linear_cross_entropy(hidden, weight, targets, **options)
        return linear_cross_entropy_float8(hidden, weight, targets, float8.operands(), **options)
