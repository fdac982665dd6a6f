"""One decoder layer computed both ways, for `fewbits.decoder.proof`: its own forward, the fused nodes.

What is compared, and the bound for each difference, which follows from the dtype (`_tolerance`): see
`compare_layer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.decoder.attention_half import fused_attention
from fewbits.decoder.keep import Keep
from fewbits.decoder.mlp_half import fused_mlp
from fewbits.decoder.parts import LayerParts
from fewbits.errors import FewbitsError
from fewbits.families.spec import ModelSpec
from fewbits.host.attention import PLAIN_MASK_SHAPE

_ROWS, _TOKENS = 2, 9
_NAME = "fewbits_proof"
_NOTES = "notes_of_proof"
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FewbitsError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_CALLED_WITH = {  # what attention is called with beside scale, window and soft cap, and may be
    "dropout",
    "position_ids",
    "use_cache",
    "past_key_values",
    "is_causal",
    "output_attentions",
    "cache_position",
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Differs(Exception):
    """A layer's own forward and the fused nodes do not compute the same; in words."""


class NothingToCompare(Differs):
    """The values of this layer, not its arithmetic, leave nothing to compare."""


@dataclass
class _Pass:
    """What one way of computing gave; tensors in float32.

    Attributes:
        values: q, k and v as attention gets them, what either half adds to its input, and gradients.
        calls: what attention was called with, if transformers called it.
        middle: what goes from the first half to the second.
        into_mlp: what the second half was given in its place.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    middle: Tensor | None = None
    into_mlp: Tensor | None = None

    def attention_gets(self, *qkv: Tensor) -> None:
        """Note q, k and v (B, heads, S, D)."""
        for name, tensor in zip(("queries", "keys", "values"), qkv, strict=True):
            self.values[name] = tensor.detach().float()

    def halves(self, x: Tensor, y: Tensor) -> None:
        """Note what both halves add, of x and y (B, S, H)."""
        if y.shape != x.shape or self.middle is None or self.middle.shape != x.shape:
            raise Differs("it is not an attention half and an MLP half, one after the other")
        middle = self.middle.detach()
        self.values["attention"] = (middle - x.detach()).float()
        self.values["MLP"] = (y - (middle if self.into_mlp is None else self.into_mlp)).detach().float()

    def gradients(self, layer: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> None:
        """Note what the layer adds to dy, and the gradients of what trains."""
        trained = {f"gradient of {name}": p for name, p in layer.named_parameters() if p.requires_grad}
        dx, *others = torch.autograd.grad(y, [x, *trained.values()], dy, allow_unused=True)
        self.values["gradient of the input"] = (dx - dy).float()
        for (name, p), gradient in zip(trained.items(), others, strict=True):
            self.values[name] = (torch.zeros_like(p) if gradient is None else gradient).float()


def compare_layer(layer: nn.Module, spec: ModelSpec, keep: Keep, rotary_width: int) -> float:
    """Compute a layer that may be changed both ways.

    Args:
        layer: a copy, in evaluation mode; its attention is set to a definition of its own.
        spec: of its family.
        keep: what the nodes keep.
        rotary_width: channels of a head that are turned.

    Returns:
        The largest relative error.

    Raises:
        Differs: the nodes compute something else, or nothing can be compared.
        NotFused: the nodes do not take the layer as it is now.
    """
    parts = LayerParts(layer, spec, "")
    keep = replace(keep, offload=False)
    x, rotary = _inputs(layer, spec, rotary_width)
    mask = torch.empty(PLAIN_MASK_SHAPE, dtype=torch.bool, device=x.device)
    try:
        attention = parts.attention(x, rotary, mask, {}, keep, None)
        mlp = None if parts.own_mlp is not None else parts.mlp(x, keep, None, None)
    except _ERRORS as error:
        raise Differs(f"its parts are not those of its spec ({_words(error)})") from error
    _compare_norms(layer, parts)
    if mlp is not None:
        _compare_activation(layer, spec, mlp.activation)

    def own(x: Tensor, notes: _Pass) -> Tensor:
        return _own_forward(layer, x, spec, notes, mask, rotary)

    def fused(x: Tensor, notes: _Pass) -> Tensor:
        half = parts.attention(x, rotary, mask, {}, keep, None)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            notes.attention_gets(q, k, v)
            return half.attend(q, k, v)

        notes.middle = fused_attention(x, replace(half, attend=attend))
        if parts.own_mlp is None:
            return fused_mlp(notes.middle, parts.mlp(x, keep, None, None))
        # A rounding may have a router choose other experts: they get the values of the layer's own forward,
        # and the gradient goes to the node.
        assert expected.middle is not None
        notes.into_mlp = expected.middle.detach() + (notes.middle - notes.middle.detach())
        return parts.own_mlp.run(notes.into_mlp, None, keep, None)  # its norm has been compared

    _use_definition(layer)
    x = x * _size_of_halves(own, x)
    dy = random_like(tuple(x.shape), x)
    expected = _pass(layer, own, x, dy, "its own forward")
    _compare_attention(layer.get_submodule(parts.attention_path), expected.calls, attention.attend.keywords)  # type: ignore[attr-defined]
    of_nodes = _pass(layer, fused, x, dy, "the fused nodes")
    tolerance = _tolerance(x, layer)

    def moved() -> Mapping[str, Tensor]:
        with torch.no_grad():
            near = x * (1 + _unit(x) * random_like(tuple(x.shape), x).sign())
        near_values = _pass(layer, own, near, dy, "its own forward").values
        return {name: near_values[name] - value for name, value in expected.values.items()}

    return _errors(expected.values, of_nodes.values, x, dy, _Bound(tolerance, moved))


def _inputs(layer: nn.Module, spec: ModelSpec, rotary_width: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    like = like_of(layer, spec)
    angles = random_like((1, _TOKENS, rotary_width // 2), like, torch.float32) * 3
    angles = torch.cat([angles, angles], -1)
    return random_like((_ROWS, _TOKENS, like.shape[-1]), like), (angles.cos().to(like), angles.sin().to(like))


def _size_of_halves(own: Callable[[Tensor, _Pass], Tensor], x: Tensor) -> float:
    """What to multiply x by to make it as large as what the halves add to it."""
    notes = _Pass()
    try:
        with torch.no_grad():
            notes.halves(x, own(x, notes))
    except _ERRORS as error:
        raise Differs(f"its own forward takes other arguments ({_words(error)})") from error
    sizes = [float(notes.values[half].square().mean().sqrt()) for half in ("attention", "MLP")]
    if not all(0 < size < float("inf") for size in sizes):
        raise NothingToCompare(
            f"its halves add {sizes[0]:.1g} and {sizes[1]:.1g} to a random input, which proves nothing"
        )
    return min(max(*sizes, 0.02), 1.0) if min(sizes) < 1e-3 else min(1.0, max(min(sizes), 0.02))


def _own_forward(
    layer: nn.Module,
    x: Tensor,
    spec: ModelSpec,
    notes: _Pass,
    mask: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    def between(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        notes.middle = args[0]

    assert spec.norm.before_mlp is not None and spec.attention is not None
    handle = layer.get_submodule(spec.norm.before_mlp).register_forward_pre_hook(between)
    setattr(layer.get_submodule(spec.attention.path), _NOTES, notes)
    try:
        y = type(layer).forward(
            layer,
            x,
            attention_mask=mask,
            position_ids=torch.arange(x.shape[1], device=x.device)[None],
            past_key_values=None,
            use_cache=False,
            position_embeddings=rotary,
        )
    finally:
        handle.remove()
    result: Tensor = y[0] if isinstance(y, tuple) else y
    return result


def _pass(layer: nn.Module, run: Callable[[Tensor, _Pass], Tensor], x: Tensor, dy: Tensor, who: str) -> _Pass:
    notes, x = _Pass(), x.detach().requires_grad_()
    try:
        y = run(x, notes)
        notes.halves(x, y)
        notes.gradients(layer, x, y, dy)
    except _ERRORS as error:
        raise Differs(f"{who} cannot compute it ({_words(error)})") from error
    return notes


def _tolerance(x: Tensor, layer: nn.Module) -> float:
    """How far two ways in this dtype may be apart, relative to what they give.

    A value goes through some 16 roundings of u = eps / 2 on its way through a layer, and as many on the way
    back; those of two ways are independent, which makes sqrt(2 * 32) * u = 8 u; sums of K terms in float32
    add sqrt(K) * 2**-24 each. Softmax and norms may enlarge that by their condition, for which there is a
    factor of 4; where it is worse than that, `_Bound` measures it.
    """
    terms = max(int(getattr(module, "in_features", 1)) for module in layer.modules())
    return 32 * (_unit(x) + math.sqrt(terms) * 2**-24)


def _unit(x: Tensor) -> float:
    """u, the relative size of one rounding; a GPU's float32 products may be TensorFloat-32."""
    return 2**-11 if x.is_cuda and x.dtype == torch.float32 else float(torch.finfo(x.dtype).eps) / 2


_MOST_BY_CONDITION = 2e-3
_LEAST_GAIN = 3e-3  # nearer to one a factor is seen in the values, or not in this dtype


@dataclass
class _Bound:
    """How far results may be apart.

    Attributes:
        tolerance: relative, for a layer whose condition is ordinary.
        moved: how far the layer's own results move when each value of its input moves by one rounding;
            computed where the tolerance does not suffice. 32 independent roundings move them by sqrt(32)
            times as much, two ways differ by sqrt(2) times that, and another factor of 2 makes 16. Scores of
            thousands ask for it, whose softmax turns a rounding of a score into a relative error as large as
            the score. It explains no more than 2e-3 of a result's size, or as much again as the tolerance: a
            factor that is 1 % off is no rounding.
    """

    tolerance: float
    moved: Callable[[], Mapping[str, Tensor]]
    _moved: Mapping[str, Tensor] | None = None

    def by_condition(self, name: str, size: float) -> float:
        if self._moved is None:
            self._moved = self.moved()
        most = max(_MOST_BY_CONDITION, self.tolerance) * size
        return min(16 * float(self._moved[name].norm()), most)


def _check_gain(name: str, a: Tensor, b: Tensor, tolerance: float, rounding: float) -> None:
    """Refuse results ``a`` that are the expected ones ``b`` times a factor: single roundings cancel in it.

    Values are off by an eighth of the tolerance, and by ``rounding`` over all of them. In the factor these
    are as many draws as there are values that count, sum(b**2)**2 / sum(b**4): four times their mean error.
    All values of a row may share an error, as behind a branch of rank 1: hence a least bound.
    """
    squares = (b * b).double()
    gain = float((a * b).sum(dtype=torch.float64) / squares.sum())
    values = float(squares.sum().square() / squares.square().sum())
    most = max(_LEAST_GAIN, (tolerance / 2 + rounding / float(b.norm())) / math.sqrt(values))
    if not abs(gain - 1) <= most:
        raise Differs(
            f"the fused nodes compute something else than its own forward: {name} is {gain:.4g} times as"
            f" large, where rounding explains {most:.1g} more or less"
        )


def _errors(
    expected: Mapping[str, Tensor], results: Mapping[str, Tensor], x: Tensor, dy: Tensor, bound: _Bound
) -> float:
    """The largest relative error; raises `Differs` where one is too large.

    Differences of sums with x or dy have those sums' rounding, and small gradients that of the large ones.
    """
    eps, tolerance = torch.finfo(x.dtype).eps, bound.tolerance
    largest = max(float(v.norm()) for name, v in expected.items() if name.startswith("gradient of "))
    of_sum = {"gradient of the input": dy, "attention": x, "MLP": x}
    worst = 0.0
    for name, b in expected.items():
        a = results[name]
        size, error = float(b.norm()), float((a - b).norm()) if a.shape == b.shape else float("nan")
        rounding = 0.05 * largest * tolerance if name.startswith("gradient of ") else 0.0
        if name in of_sum:
            rounding = eps * (2 * float(of_sum[name].float().norm()) + size)
        allowed = tolerance * size + rounding
        if not error <= allowed and not error <= allowed + bound.by_condition(name, size):  # NaN neither
            raise Differs(
                f"the fused nodes compute something else than its own forward: {name} differs by"
                f" {error / max(size, 1e-30):.2g} of its size, where rounding explains {tolerance:.1g}"
            )
        if not name.startswith("gradient of "):
            _check_gain(name, a, b, tolerance, rounding)
        worst = max(worst, error / max(size, rounding, 1e-30))
    return worst


def _compare_attention(attention: Any, calls: list[dict[str, Any]], fused: Mapping[str, Any]) -> None:
    if len(calls) != 1:
        raise Differs(f"it calls transformers' attention function {len(calls)} times, not once")
    call = dict(calls[0])
    scaling = call.pop("scaling", None)
    window, cap = call.pop("sliding_window", None), call.pop("softcap", None)
    own = {
        "scale": attention.head_dim**-0.5 if scaling is None else scaling,
        "window": int(window) if window else None,
        "soft_cap": cap or None,
    }
    for name, value in own.items():
        theirs = fused.get(name) or None
        if value != theirs:
            raise Differs(f"its attention has the {name} {value}, and the fused nodes would take {theirs}")
    others = [k for k, v in call.items() if k not in _CALLED_WITH and v is not None]
    if others:
        raise Differs(f"its attention takes {', '.join(others)}, which the fused nodes do not")
    kinds = getattr(attention.config, "layer_types", None)
    kind = kinds[attention.layer_idx] if kinds else "full_attention"
    if kind not in ("full_attention", "sliding_attention") or (
        kind == "sliding_attention" and not own["window"]
    ):
        raise Differs(f"its attention is of the kind {kind!r} and says no window")


def _compare_norms(layer: nn.Module, parts: LayerParts) -> None:
    """Each norm that a node computes, in float32, on rows so small that eps counts as well."""
    for path in parts.norm_paths:
        module, norm = layer.get_submodule(path), parts.norm(path)
        sizes = torch.tensor([0.5 * norm.eps**0.5, 1.0, 30.0], device=norm.weight.device, dtype=torch.float32)
        x = random_like((3, norm.weight.shape[0]), norm.weight, torch.float32) * sizes[:, None]
        with torch.no_grad():
            try:
                y = module(x).double()
            except _ERRORS as error:
                raise Differs(
                    f"{path} takes no float32 rows, as an RMSNorm does ({_words(error)})"
                ) from error
            wide = x.double()
            scale = (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
            apart = _relative(y, wide * scale * (norm.offset + norm.weight.double()))
        if not apart < 1e-4:  # its weight may have been added to in its own dtype
            raise Differs(f"{path} is no RMSNorm of its weight, offset {norm.offset:g} and eps {norm.eps:g}")


def _compare_activation(layer: nn.Module, spec: ModelSpec, name: str) -> None:
    assert spec.mlp is not None
    for path in ("act_fn", "activation_fn"):
        module: Any = getattr(layer.get_submodule(spec.mlp.path), path, None)
        if module is not None:
            grid = torch.linspace(-6, 6, 193, device=like_of(layer, spec).device, dtype=torch.float32)
            with torch.no_grad():
                error = _relative(module(grid), _ACTIVATIONS[name](grid))
            if not error < 1e-5:
                raise Differs(f"{spec.mlp.path}.{path} is not the {name} that its configuration names")


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm()) / max(float(b.norm()), 1e-30)


def like_of(layer: nn.Module, spec: ModelSpec) -> Tensor:
    """A norm's weight (H,): the dtype, device and width of what goes through the layer."""
    assert spec.norm.before_mlp is not None
    return layer.get_parameter(f"{spec.norm.before_mlp}.weight")


def random_like(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Normal numbers that depend on the shape alone, and leave every generator as it is.

    The result is of ``shape``, in ``dtype`` (None: like's), on the device of ``like``, of any shape.
    """
    generator = torch.Generator(device="cpu").manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return values.to(device=like.device, dtype=dtype or like.dtype)


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention by its definition; notes what it is called with."""
    notes = getattr(module, _NOTES)
    notes.calls.append({"scaling": scaling, **kwargs})
    notes.attention_gets(query, key, value)
    groups = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(groups, 1).float() for t in (key, value))
    scores = query.float() @ k.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    cap = kwargs.get("softcap")
    scores = cap * torch.tanh(scores / cap) if cap else scores
    steps = torch.arange(scores.shape[-1], device=scores.device)
    behind = steps[:, None] - steps
    visible = (behind >= 0) & (behind < (kwargs.get("sliding_window") or scores.shape[-1]))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).to(query.dtype).transpose(1, 2).contiguous(), None


def _use_definition(layer: nn.Module) -> None:
    """Have a copy's attention call it; transformers knows it by name, as those of `use_attention`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    if _NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(_NAME, _attention)
    for config in {id(m.config): m.config for m in layer.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = _NAME  # type: ignore[union-attr]


__all__ = ["Differs", "NothingToCompare", "compare_layer", "like_of", "random_like"]
