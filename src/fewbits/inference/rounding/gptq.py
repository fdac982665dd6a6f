"""Codes chosen by what a layer computes: GPTQ, and rounding to nearest under searched scales beside it.

The loss of a rounded weight Q over inputs X is ``||X (Q - W)^T||^2 = tr((Q - W) H (Q - W)^T)`` with
``H = X^T X``. GPTQ (Frantar et al. 2022) rounds one column after another and moves the columns that are left
so that they make up for its error; a block's scale is chosen when its first column is reached, from the
columns as they then are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.errors import NotFinite
from fewbits.formats.base import Format, Packed
from fewbits.inference.rounding.grids import Choice, Grid, Grids

_DAMPING = 0.01  # of H's mean diagonal, added to it
_AIM_DAMPING, _AIM = 0.05, 0.25
_COLUMNS = 128  # whose errors are collected before the rest of the weight moves


def nearest(weight: Tensor, format: Format, hessian: Tensor | None = None, *, search: bool = True) -> Packed:
    """Every value to the nearest code, under scales with the least error (H's diagonal weighs the columns).

    Args:
        weight: (N, K), floating point.
        format: one that `Grids` knows.
        hessian: (K, K) float32, or None: all columns count the same.
        search: choose each block's scale for the least error, in place of the format's own.
    """
    grids = Grids(format, weight.float())
    return grids.finish(choose_nearest(weight, grids, hessian, search=search), weight.dtype)


def choose_nearest(weight: Tensor, grids: Grids, hessian: Tensor | None, *, search: bool = True) -> Choice:
    """The codes of `nearest` and the scales they are under, for a weight (N, K) and H (K, K)."""
    w = weight.float()
    importance = torch.ones_like(w[0]) if hessian is None else hessian.diagonal().clamp_min(1e-12)
    chosen, codes = [], torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    for start in range(0, w.shape[1], grids.size):
        at = slice(start, start + grids.size)
        grids.reach(start, w, importance)
        grid = grids.best(w[:, at], importance[at]) if search else grids.plain(w[:, at])
        codes[:, at] = grid.round(w[:, at])[0]
        chosen.append(grid)
    return Choice(codes=codes, grids=chosen, wanted=w)


def gptq(weight: Tensor, format: Format, hessian: Tensor, *, damping: float = _DAMPING) -> Packed:
    """A weight rounded so that its layer's outputs move little.

    Args:
        weight: (N, K), floating point.
        format: one that `Grids` knows.
        hessian: (K, K) float32, ``X^T X`` over the layer's inputs, in any scale.
        damping: see `_DAMPING`.

    Raises:
        NotFinite: the weight or the inputs hold a NaN or an infinity.
    """
    grids = Grids(format, weight.float())
    return grids.finish(choose_by_gptq(weight, grids, hessian, damping=damping), weight.dtype)


def choose_by_gptq(weight: Tensor, grids: Grids, hessian: Tensor, *, damping: float = _DAMPING) -> Choice:
    """The codes of `gptq`, the scales they are under, and what the columns had become when they were rounded.

    ``weight`` is (N, K), ``hessian`` (K, K).
    """
    w, (N, K) = weight.float().clone(), weight.shape
    if not bool(w.isfinite().all() and hessian.isfinite().all()):
        raise NotFinite("a weight or the inputs of its layer hold a NaN or an infinity; nothing is rounded.")
    dead = hessian.diagonal() == 0
    w[:, dead] = 0.0  # an input that is always zero: any value will do
    upper = _inverse_factor(hessian, dead, damping)
    importance = 1 / upper.diagonal().square()
    codes = torch.empty(N, K, dtype=torch.uint8, device=w.device)
    chosen: list[Grid] = []
    grid: Grid | None = None
    step = _COLUMNS if grids.whole == K else -(-_COLUMNS // grids.whole) * grids.whole
    for first in range(0, K, step):
        last = min(first + step, K)
        errors = torch.zeros(N, last - first, dtype=torch.float32, device=w.device)
        for column in range(first, last):
            if column % grids.size == 0:
                at = slice(column, column + grids.size)
                grids.reach(column, w, importance)
                grid = grids.best(w[:, at], importance[at])
                chosen.append(grid)
            assert grid is not None
            code, value = grid.round(w[:, column : column + 1])
            codes[:, column] = code[:, 0]
            error = (w[:, column] - value[:, 0]) / upper[column, column]
            w[:, column + 1 : last] -= error[:, None] * upper[column, column + 1 : last]
            errors[:, column - first] = error
        w[:, last:] -= errors @ upper[first:last, last:]
    return Choice(codes=codes, grids=chosen, wanted=w)


def _inverse_factor(hessian: Tensor, dead: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of H's inverse: (K, K) float32."""
    h = hessian.double()
    h = h / h.diagonal().mean().clamp_min(1e-30)
    h.diagonal()[dead] = 1.0
    for attempt in range(6):
        damped = h + torch.eye(h.shape[0], dtype=h.dtype, device=h.device) * damping * 10**attempt
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(factor)
            upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
            return upper.float()
    raise NotFinite("the inputs of a layer have no usable second moments; give more calibration text.")


def aimed_at_plain(
    weight: Tensor, second: Tensor, cross: Tensor, *, damping: float = _AIM_DAMPING, part: float = _AIM
) -> Tensor:
    """The weight that comes nearest, on the rounded model's inputs, to what the plain one has there.

    With inputs X of the rounded model and Y of the plain one, ``||X Q^T - Y W^T||^2`` is, up to a constant,
    ``||X (Q - V)^T||^2`` for ``V = W Y^T X (X^T X)^-1``: rounding V instead of W under the same H makes up
    for what the layers before have lost (GPTAQ's asymmetric calibration, Li et al. 2025, has this aim).

    Args:
        weight: (N, K), floating point.
        second: ``X^T X`` (K, K) float32.
        cross: ``Y^T X`` (K, K) float32.
        damping: of X^T X's mean diagonal, added to it: it draws V to W.
        part: of the way from W to V, so that a text is not learned by heart.

    Returns:
        ``W + part * (V - W)`` (N, K) float32.
    """
    h, w = second.double(), weight.double()
    h = h + torch.eye(len(h), dtype=h.dtype, device=h.device) * damping * h.diagonal().mean().clamp_min(1e-30)
    change = torch.linalg.solve(h, (w @ (cross.double() - second.double())).t()).t()
    result: Tensor = (w + part * change).float()
    return result


def loss_of(weight: Tensor, packed: Packed, hessian: Tensor) -> float:
    """``tr(D H D^T) / tr(W H W^T)`` for ``D = decoded - W``: the relative squared error of the outputs.

    ``weight`` is (N, K), ``packed`` of the same shape, ``hessian`` H (K, K), all float32.
    """
    error, whole = squares_of(weight, packed, hessian)
    return error / max(whole, 1e-30)


def squares_of(weight: Tensor, packed: Packed, hessian: Tensor) -> tuple[float, float]:
    """``tr(D H D^T)`` and ``tr(W H W^T)`` of `loss_of`, for W (N, K) and H (K, K)."""
    w = weight.float()
    d = packed.dequantize(torch.float32) - w
    return float(((d @ hessian) * d).sum()), float(((w @ hessian) * w).sum())
