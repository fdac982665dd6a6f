"""What both nodes of the fused decoder share: the norm, the residual, what is kept for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.decoder.keep import Keep
from fewbits.decoder.projection import Rows
from fewbits.errors import BadInput
from fewbits.kernels.decoder.rmsnorm import rmsnorm_backward_rows, rmsnorm_rows


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: ``x / sqrt(mean(x^2) + eps) * (offset + weight)``."""

    weight: Tensor
    eps: float
    offset: float = 0.0


class Normed(NamedTuple):
    """A norm's output as rows of a product, and 1/rms (M,)."""

    rows: Rows
    r: Tensor

    @property
    def dense(self) -> Tensor:
        """(M, K) in the dtype of the products."""
        assert self.rows.dense is not None
        return self.rows.dense


def normed_rows(
    x: Tensor,
    norm: Norm,
    *,
    quantize: bool = False,
    dense: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Normed:
    """The norm of x (M, K) in ``dtype`` (None: x's), with float8 rows on request.

    ``dense`` is its output where it was kept.
    """
    if dense is not None and not quantize:
        return Normed(Rows(dense), x.new_empty(0))
    made = rmsnorm_rows(x, norm.weight, norm.eps, offset=norm.offset, quantize=quantize, dtype=dtype)
    return Normed(Rows(made.y, made.q, made.scale), made.r)


def reads_output(x: Tensor, dtype: torch.dtype, needs: Sequence[bool]) -> bool:
    """Whether the gradients of a projection, four for each part, are made from the norm's output.

    Those of a weight are; those of A follow from the norm's input, unless that has another dtype than the
    products, or r * t may be too large for it: see `gradient_of_a`.
    """
    return any(needs[::4]) or (any(needs[2::4]) and (x.dtype != dtype or dtype == torch.float16))


def gradient_of_a(t: Tensor | None, x: Tensor, norm: Norm, r: Tensor, needs: Sequence[bool]) -> Tensor | None:
    """``t^T @ norm(x)``, from x: ``((r t)^T @ x) * (offset + weight)``; None where no A trains.

    t (M, R), x (M, K), r (M,). The norm's output need be neither kept nor made again.
    """
    if t is None or not any(needs[2::4]):
        return None
    scaled = torch.mul(t, r[:, None], out=t.new_empty(t.shape))
    return (scaled.t() @ x) * (norm.weight + norm.offset if norm.offset else norm.weight)


def backward_norm(
    dn: Tensor, x: Tensor, norm: Norm, r: Tensor, *, residual: Tensor | None = None, needs_dw: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the norm's input, plus ``residual``, in x's dtype, and that of its weight."""
    made = rmsnorm_backward_rows(
        dn, x, norm.weight, r, offset=norm.offset, residual=residual, needs_dw=needs_dw
    )
    return made.dx, made.dw


@dataclass
class Residual:
    """``y = x + post(z)`` in x's dtype, which is wider than z's under autocast.

    Without a norm the product that makes z adds `term` to it.
    """

    x: Tensor
    z: Tensor | None
    norm: Norm | None
    r: Tensor | None = None

    @property
    def term(self) -> Tensor | None:
        """x, where the product of z's dtype can add it at no cost and without a rounding more."""
        assert self.z is not None
        return self.x if self.norm is None and self.z.dtype == self.x.dtype else None

    def forward(self) -> Tensor:
        """y (M, H); keeps 1/rms of z, and drops z where nothing needs it."""
        assert self.z is not None
        if self.norm is None:
            y = self.z if self.z.dtype == self.x.dtype else self.x + self.z
            self.z = None
            return y
        normed = rmsnorm_rows(
            self.z, self.norm.weight, self.norm.eps, offset=self.norm.offset, dtype=self.x.dtype
        )
        self.r = normed.r
        assert normed.y is not None
        return normed.y.add_(self.x)

    def backward(self, dy: Tensor, needs_dw: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """dz (M, H) in the products' dtype, and the gradient of the norm's weight."""
        if self.norm is None:
            return dy.to(dtype), None
        assert self.z is not None and self.r is not None
        return backward_norm(dy, self.z, self.norm, self.r, needs_dw=needs_dw)


class Kept:
    """What one node keeps between its forward and its backward pass.

    It is let go when the backward pass begins, not when the graph dies: a loss that somebody holds on to then
    holds no activations.
    """

    def __init__(self, keep: Keep, stash: Any) -> None:
        self._stash = stash if keep.offload else None
        self._tensors: dict[str, Any] | None = {}
        self._handles: dict[str, Any] = {}

    def inputs(self, **tensors: Tensor) -> None:
        """Keep these, on the host where the plan says so."""
        for name, tensor in tensors.items():
            if self._stash is not None:
                self._handles[name] = self._stash.put(tensor)
            else:
                self.always(**{name: tensor})

    def always(self, **tensors: Any) -> None:
        """Keep these."""
        assert self._tensors is not None
        self._tensors.update(tensors)

    def where(self, wanted: bool, **tensors: Any) -> None:
        """Keep these if ``wanted``; otherwise their names give None."""
        self.always(**(tensors if wanted else dict.fromkeys(tensors)))

    def take(self) -> dict[str, Any]:
        """All of it, once."""
        if self._tensors is None:
            raise BadInput(
                "a fused decoder layer keeps its activations for one backward pass, and this is a second "
                "one; run the forward pass again, or unfuse the model (fewbits.unfuse)."
            )
        taken, self._tensors = self._tensors, None
        for name, handle in self._handles.items():
            assert self._stash is not None
            taken[name] = self._stash.get(handle)
        self._handles = {}
        return taken


@contextlib.contextmanager
def on_own_dtype(x: Tensor) -> Any:
    """Products in the dtypes that they are given: autocast stays out."""
    with torch.autocast(x.device.type, enabled=False):
        yield
