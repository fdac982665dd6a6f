"""What both nodes of the fused decoder share: `Half`, its norms, its residual, what it keeps.

Either half of a layer is the same walk, and only its middle differs (attention, or the gated activation):

    n = norm(x)            x (M, H), n (M, H), 1/rms r (M,)     `Half.enter`
    u = n @ W_into^T       u (M, N)                             the projection ``into``: qkv, or gate and up
    m = middle(u)          m (M, J)                             attention_half.py, mlp_half.py
    z = m @ W_back^T       z (M, H)                             the projection ``back``: o, or down
    y = x + post(z)        y (M, H)                             `Half.leave`, with a second norm or none

and backward, for dy (M, H):

    dz = post'(dy)         (M, H)       `Half.begin_backward`
    dm, du                 (M, J), (M, N): the middle, and the gradients of ``back``
    dn = du @ W_into       (M, H)       `Half.end_backward`, with the gradients of ``into``
    dx = norm'(dn) + dy    (M, H)

With several ranks, each with its own heads or columns of J, z and dn are sums over ranks.

Kept from forward to backward, by name, in `SavedValues`: x, r, the inner values of both projections'
branches (xa, xa_back), z and its 1/rms where a second norm needs them, n where it is asked for, and what the
middle keeps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fewbits.decoder.keep import KEEP_PRODUCTS, Keep
from fewbits.decoder.projection import InnerGradients, Projection, Rows
from fewbits.decoder.trainable import PerHalf, PerPart, of_half
from fewbits.errors import BadInput
from fewbits.kernels.decoder.rmsnorm import rmsnorm_backward_rows, rmsnorm_rows
from fewbits.kernels.decoder.rmsnorm_triton import NormedRows
from fewbits.nn.tensor_group import TensorGroup

T = TypeVar("T")


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
    norm_out = rmsnorm_rows(x, norm.weight, norm.eps, offset=norm.offset, quantize=quantize, dtype=dtype)
    return Normed(Rows(norm_out.y, norm_out.q, norm_out.scale), norm_out.r)


def reads_output(x: Tensor, dtype: torch.dtype, needs: Sequence[PerPart[bool]]) -> bool:
    """Whether the gradients of a projection are made from the norm's output, for x (M, K).

    Those of a weight are; those of A follow from the norm's input, unless that has another dtype than the
    products, or r * t may be too large for it: see `gradient_of_a`.
    """
    from_input = x.dtype == dtype and dtype != torch.float16
    return any(need.weight for need in needs) or (any(need.a for need in needs) and not from_input)


def gradient_of_a(
    t: Tensor | None, x: Tensor, norm: Norm, r: Tensor, needs: Sequence[PerPart[bool]]
) -> Tensor | None:
    """``t^T @ norm(x)``, from x: ``((r t)^T @ x) * (offset + weight)``; None where no A trains.

    t (M, R), x (M, K), r (M,). The norm's output need be neither kept nor made again.
    """
    if t is None or not any(need.a for need in needs):
        return None
    scaled = torch.mul(t, r[:, None], out=t.new_empty(t.shape))  # (M, R): row m times r[m]
    return (scaled.t() @ x) * (norm.weight + norm.offset if norm.offset else norm.weight)


def backward_norm(
    dn: Tensor, x: Tensor, norm: Norm, r: Tensor, *, residual: Tensor | None = None, needs_dw: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the norm's input, plus ``residual``, in x's dtype, and that of its weight.

    dn and ``residual`` are (M, K), x (M, K), r (M,) float32; the results (M, K) and (K,), or None.
    """
    normed = NormedRows(x, norm.weight, r, norm.offset)
    gradients = rmsnorm_backward_rows(dn, normed, residual=residual, needs_dw=needs_dw)
    return gradients.dx, gradients.dw


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
        """x (M, N), where the product of z's dtype can add it at no cost and without a rounding more."""
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


class SavedValues:
    """What one node keeps between its forward and its backward pass.

    It is let go when the backward pass begins, not when the graph dies: a loss that somebody holds on to then
    holds no activations.
    """

    def __init__(self, keep: Keep, stash: Any) -> None:
        self._stash = stash if keep.offload else None
        self._tensors: dict[str, Any] | None = {}
        self._handles: dict[str, Any] = {}
        self._watched: tuple[Sequence[Tensor | None], list[int]] = ((), [])

    def watch(self, tensors: Sequence[Tensor | None]) -> None:
        """Refuse a backward pass with other values of these (of any shape), or of x, than the forward had.

        They are not saved by torch, which would look; some are kept in the products' dtype as they were, and
        others are read again, so that gradients after an optimizer's step would be of neither.
        """
        if not torch.compiler.is_compiling():
            read_again = *tensors, (self._tensors or {}).get("x")  # which is not here where it is on the host
            self._watched = read_again, _versions(read_again)

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

    def where(self, condition: bool, **tensors: Any) -> None:
        """Keep these if ``condition`` holds; otherwise their names give None."""
        self.always(**(tensors if condition else dict.fromkeys(tensors)))

    def take(self) -> dict[str, Any]:
        """All of it, once."""
        if self._tensors is None:
            raise BadInput(
                "a fused decoder layer keeps its activations for one backward pass, and this is a second "
                "one; run the forward pass again, or unfuse the model (fewbits.unfuse)."
            )
        watched, versions = self._watched
        if _versions(watched) != versions:
            raise BadInput(
                "weights, adapters or the input of a fused decoder layer were changed in place (by an "
                "optimizer's step, say) after its forward pass, whose gradients are asked for now; run the "
                "backward pass before the change, or the forward pass again."
            )
        tensors, self._tensors, self._watched = self._tensors, None, ((), [])
        for name, handle in self._handles.items():
            assert self._stash is not None
            tensors[name] = self._stash.get(handle)
        self._handles = {}
        return tensors


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """How often torch has counted a change of each; it counts none of those made in inference mode."""
    return [x._version for x in tensors if x is not None and not x.is_inference()]


def records_nothing() -> bool:
    """Whether no derivative can be asked of this call: a half then needs no node, and keeps nothing.

    A prompt of some thousand tokens is short beside what the host takes for a node.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None


def on_own_dtype(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Products in the dtypes that they are given: autocast stays out, where it is on at all.

    Only the device of x, a tensor of any shape, is read.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    return torch.autocast(kind, enabled=False)


_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Half(ABC):
    """What a node computes with; made anew for each forward pass from the layer's modules.

    Attributes:
        norm: the norm before the products.
        post_norm: the norm of the output before it is added to x, or None.
        keep: what is kept for the backward pass.
        stash: where x waits with ``keep.offload``.
        dtype: of the products and of all between them; None: x's. Under autocast x is float32 and this is
            autocast's: the sum of the layers, and what the parameters receive, stay float32.
        group: ranks that have the other heads, or columns; None: all are here.
    """

    norm: Norm
    post_norm: Norm | None = None
    keep: Keep = KEEP_PRODUCTS
    stash: Any = None
    dtype: torch.dtype | None = None
    group: TensorGroup | None = None

    @property
    @abstractmethod
    def into(self) -> Projection:
        """The projection that reads the norm's output."""

    @property
    @abstractmethod
    def back(self) -> Projection:
        """The projection whose output is added to x."""

    @property
    def norms(self) -> dict[str, Norm | None]:
        """All norms of the half, in the order in which the node takes their weights."""
        return {"norm": self.norm, "post_norm": self.post_norm}

    # What may train, by name.

    def tensors(self) -> list[Tensor | None]:
        """What may train, of any shape, as the node takes it and gives gradients."""
        weights = {name: None if norm is None else norm.weight for name, norm in self.norms.items()}
        return PerHalf(weights, self.into.tensors(), self.back.tensors()).flat()

    def named(self, flat: Sequence[T]) -> PerHalf[T]:
        """Values that stand beside `tensors`, by name."""
        return of_half(flat, tuple(self.norms), len(self.into.parts), len(self.back.parts))

    # Forward.

    def enter(self, x: Tensor) -> Normed:
        """The norm of x (M, H), in float8 too where the first product takes it."""
        return normed_rows(x, self.norm, quantize=self.into.is_float8, dtype=self.dtype)

    def leave(self, x: Tensor, middle: Rows, xa_back: Tensor | None) -> tuple[Tensor, Residual]:
        """y (M, H), for what the middle made (M, J) and its inner values (M, R)."""
        z = self.back.product(middle)  # (M, J) @ (J, H)
        post = Residual(x, z, self.post_norm)
        if self.group is None:
            self.back.finish_(z, xa_back, post.term)
        else:
            self.group.sum_(self.back.finish_(z, xa_back, self.group.once(post.term)))
        return post.forward(), post

    def save(
        self,
        x: Tensor,
        n: Normed,
        post: Residual,
        inner_values: tuple[Tensor | None, Tensor | None],
        needs: PerHalf[bool],
    ) -> SavedValues:
        """What both halves keep; ``inner_values`` are those of into and back, each (M, R) or None."""
        saved = SavedValues(self.keep, self.stash)
        saved.inputs(x=x)
        xa, xa_back = inner_values
        saved.always(r=n.r, xa=xa, xa_back=xa_back, z=post.z, r_post=post.r)
        saved.where(self.keep.normed and reads_output(x, n.dense.dtype, needs.into), normed=n.dense)
        return saved

    # Backward.

    def begin_backward(self, saved: dict[str, Any], dy: Tensor, needs: PerHalf[bool]) -> BeginBackward:
        """From dy (M, H) back through the residual and the second norm."""
        x = saved["x"]
        dtype = self.dtype or x.dtype
        post = Residual(x, saved["z"], self.post_norm, saved["r_post"])
        dz, dpost = post.backward(dy, needs.norms["post_norm"], dtype)  # (M, H), and (H,) or None
        return BeginBackward(dz, dpost, saved.pop("normed"), reads_output(x, dtype, needs.into))

    def enter_again(self, x: Tensor, begun: BeginBackward, first_product: bool) -> Normed | None:
        """The norm of x (M, H) again, where the first product runs again or gradients are made from it."""
        if not first_product and not begun.reads_output:
            return None
        quantize = first_product and self.into.is_float8
        return normed_rows(x, self.norm, quantize=quantize, dense=begun.normed, dtype=self.dtype or x.dtype)

    def end_backward(
        self,
        saved: dict[str, Any],
        dy: Tensor,
        du: Rows,
        inner: InnerGradients,
        n: Normed | None,
        needs: PerHalf[bool],
        needs_dx: bool,
    ) -> EndBackward:
        """From du (M, N), the gradient of the first product, back through that product and the norm."""
        x, rows = saved["x"], None if n is None else n.dense
        da = None if n is not None else gradient_of_a(inner.t, x, self.norm, saved["r"], needs.into)  # (R, H)
        gradients = self.into.gradients(du.dense, inner, rows, needs.into, da=da)
        needs_dw = needs.norms["norm"]
        if not needs_dx and not needs_dw:
            return EndBackward(None, None, gradients)
        dn = self.into.backward_product(du, inner.t)  # (M, N) @ (N, H) + (M, R) @ (R, H)
        if self.group is not None:
            self.group.sum_(dn)
        dx, dnorm = backward_norm(dn, x, self.norm, saved["r"], residual=dy, needs_dw=needs_dw)
        return EndBackward(dx, dnorm, gradients)


class BeginBackward(NamedTuple):
    """What `Half.begin_backward` gives.

    Attributes:
        dz: (M, H), the gradient of the second product.
        dpost: (H,), that of the second norm's weight, or None.
        normed: (M, H), the first norm's output where it was kept, or None.
        reads_output: gradients of ``into`` are made from the first norm's output.
    """

    dz: Tensor
    dpost: Tensor | None
    normed: Tensor | None
    reads_output: bool


class EndBackward(NamedTuple):
    """What `Half.end_backward` gives: dx (M, H), that of the norm's weight (H,), those of ``into``."""

    dx: Tensor | None
    dnorm: Tensor | None
    into: list[PerPart[Tensor | None]]
