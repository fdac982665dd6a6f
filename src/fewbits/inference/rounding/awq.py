"""AWQ (Lin et al. 2023): columns that see large inputs are made larger before rounding, their inputs smaller.

For linears that read the same input x, ``W x = (W diag(s)) (x / s)``. The division is folded into what makes
x: the norm before q, k, v and before gate, up; the up projection before down. ``s = mean|x| ** power``, and
the power of twenty between 0 and 1 with the least error of the outputs (by H, see `gptq`) is taken.

Names do not say what stands between: Arcee and Nemotron square what comes out of ``up_proj``, BitNet
normalises it, and a norm may have more readers. So each fold is tried first with powers of two, which round
nothing, and is made only where the layer's output stays what it was.

SmoothQuant (Xiao et al. 2023) folds other scales into the same places: those that leave the inputs and the
columns the same ranges, for engines that round both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fewbits.families.catalog import LLAMA
from fewbits.families.spec import ModelSpec
from fewbits.formats.base import Format
from fewbits.inference.rounding.activations import LayerMoments
from fewbits.inference.rounding.gptq import loss_of, nearest

if TYPE_CHECKING:
    from torch import nn

_EQUAL = 1e-6  # of the layer's output, where sums are taken in another order
_POWERS = tuple(number / 20 for number in range(20))


class Fold(NamedTuple):
    """A place for scales.

    Attributes:
        maker: name in the layer of what makes the input: a norm, or a linear whose rows it is.
        readers: of all linears that read it. Those that are not rounded (a router) are scaled too.
        is_proven: whether the layer is known to stay what it was; else it is tried.
    """

    maker: str
    readers: Sequence[str]
    is_proven: bool = False


Folds: TypeAlias = Sequence[Fold]


def folds_of(spec: ModelSpec) -> Folds:
    """What makes the input of linears (a norm, or a linear whose rows it is), and the linears that read it.

    Of a family that nobody wrote a spec for, Llama's: each fold is tried before it is made.
    """
    spec = LLAMA if spec.generic else spec
    attention = () if spec.attention is None else spec.attention.inputs
    mlp = () if spec.mlp is None else spec.mlp.inputs
    if spec.norm.layout == "parallel":  # one norm for both halves
        folds = [(spec.norm.before_attention, (*attention, *mlp))]
    else:
        folds = [(spec.norm.before_attention, attention), (spec.norm.before_mlp, mlp)]
    if spec.mlp is not None and spec.mlp.is_gated and len(mlp) == 2:
        folds.append((mlp[1], (spec.mlp.output,)))  # the product of gate and up is linear in up
    return [Fold(maker, readers) for maker, readers in folds if maker is not None and readers]


@torch.no_grad()
def fold_scales(
    layer: Any,
    moments: LayerMoments,
    formats: Mapping[str, Format],
    output: Callable[[], Tensor],
    folds: Folds,
    *,
    smooth: bool = False,
) -> tuple[LayerMoments, tuple[str, ...]]:
    """Scale the columns of a decoder layer's linears, in place.

    Args:
        layer: a decoder layer with plain linears; what it lacks of ``folds`` is left out.
        moments: of their inputs.
        formats: how each linear will be stored, by its name in the layer.
        output: computes what the layer makes of some rows, as it now is.
        folds: from `folds_of`.
        smooth: take SmoothQuant's scales, for engines that round the inputs too, in place of AWQ's.

    Returns:
        The moments of the scaled layer, and what a scale was folded into.
    """
    folded = []
    for fold in folds:
        present = [name for name in fold.readers if name in formats]
        maker = _find(layer, fold.maker)
        linears: list[Any] = [_find(layer, name) for name in fold.readers]
        if maker is None or not present or None in linears:
            continue
        if not fold.is_proven and not _holds(maker, linears, output):
            continue
        weights = [layer.get_submodule(name).weight for name in present]
        if smooth:
            scale = _smoothing(weights, torch.stack([moments.largest[n] for n in present]).amax(0))
        else:
            scale = _best(weights, [formats[n] for n in present], present, moments)
        _fold(maker, linears, scale)
        moments = moments.divided(present, scale)
        folded.append(fold.maker)
    return moments, tuple(folded)


def _smoothing(weights: Sequence[Tensor], largest: Tensor) -> Tensor:
    """SmoothQuant's scales (K,) (Xiao et al. 2023, alpha of a half): both factors get the same range."""
    columns = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    scale = (largest.clamp_min(1e-5) / columns.clamp_min(1e-5)).sqrt()
    return scale / (scale.max() * scale.min()).sqrt()


def _fold(maker: Any, linears: Sequence[Any], scale: Tensor) -> None:
    """Columns of the linears times ``scale`` (K,), what makes their input divided by it."""
    for linear in linears:
        linear.weight.data = (linear.weight.float() * scale).to(linear.weight.dtype)
    rows = scale[:, None] if maker.weight.dim() == 2 else scale
    maker.weight.data = (maker.weight.float() / rows).to(maker.weight.dtype)
    if getattr(maker, "bias", None) is not None:
        maker.bias.data = (maker.bias.float() / scale).to(maker.bias.dtype)


def _holds(maker: Any, linears: Sequence[Any], output: Callable[[], Tensor]) -> bool:
    """Whether a fold changes nothing: tried with powers of two, of which no product is rounded otherwise."""
    columns = {tuple(linear.weight.shape)[-1] for linear in linears}
    weight = getattr(maker, "weight", None)
    if weight is None or columns != {weight.shape[0]} or weight.dim() not in (1, 2):
        return False
    before, of_maker = output(), [maker, *linears]
    originals = [
        (m, name, getattr(m, name).data)
        for m in of_maker
        for name in ("weight", "bias")
        if getattr(m, name, None) is not None
    ]
    try:
        _fold(maker, linears, 2.0 ** (torch.arange(weight.shape[0], device=weight.device) % 4 - 1))
        after = output()
    finally:
        for module, name, data in originals:
            getattr(module, name).data = data
    return float((after - before).float().norm()) <= _EQUAL * float(before.float().norm())


def _find(layer: nn.Module, name: str) -> Any:
    try:
        return layer.get_submodule(name)
    except AttributeError:
        return None


def _best(
    weights: Sequence[Tensor], formats: Sequence[Format], names: Sequence[str], moments: LayerMoments
) -> Tensor:
    """The scales (K,) under which these linears' outputs lose least."""
    magnitude = torch.stack([moments.magnitude[name] for name in names]).mean(0)
    best, least = torch.ones_like(magnitude), float("inf")
    for power in _POWERS:
        scale = magnitude.clamp_min(1e-6) ** power
        scale = scale / (scale.max() * scale.min()).sqrt()
        error, moved = 0.0, {}  # linears that read one tensor share its moments
        for weight, format, name in zip(weights, formats, names, strict=True):
            hessian, wide = moments.second[name], weight.float() * scale
            if id(hessian) not in moved:
                moved = {id(hessian): hessian / scale[:, None] / scale[None, :]}
            error += loss_of(wide, nearest(wide, format, search=False), moved[id(hessian)])
        if error < least:
            best, least = scale, error
    return best
