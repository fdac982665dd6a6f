"""What a layer of FP8 operands computes when it runs fused, defined in plain torch for the plain twin.

An FP8 recipe means the same whether a layer runs fused or not; but where values are rounded differs, by the
design that `fewbits.decoder.products` and `fewbits.decoder.scales` describe, and with E4M3's 2**-4 no bound
would see a fault through that. So the plain twin rounds where the fused nodes do, in the calls in which these
must run fused; in the others, where both take a layer's own forward, it is left alone. The rules:

* linears over one input (q, k, v; gate, up) are one product: one scale for all their weights, and one for
  each row of the gradient of their outputs side by side;
* a weight's gradient, and the branch of an adapter, see no rounding;
* with ``delayed_scaling`` h (the input of down) and the gradient of gate and up are rounded under one scale
  for the tensor, twice the largest magnitude of the last 16 passes over 448, and cut beyond; by rows while
  there is no such history. A branch then sees the rounded gradient, if nothing needs the whole one: no bias
  of gate and up trains, no weight of theirs, and one kernel does not take all three branches in one pass
  (which needs a branch of one rank on all three linears).

`Histories` is that state, kept by the definition; after each call it is compared with the fused model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.nn.linear import QuantizedLinear
from tests.models.sequences.expected import begins

_STEPS, _LARGEST, _SMALLEST = 16, 448.0, 2.0**-126
_ONE_PASS_RANK = 32
_NORMS_BEHIND = ("post_feedforward_layernorm",)


def to_codes(x: Tensor, scale: Tensor) -> Tensor:
    """What E4M3 values under a scale stand for; beyond 448 they are cut."""
    scaled = (x.float() / scale).clamp(-_LARGEST, _LARGEST)
    return (scaled.to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def by_rows(x: Tensor) -> Tensor:
    """x (M, N), a scale for each row."""
    return to_codes(x, (x.float().abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST))


@dataclass
class Histories:
    """Magnitudes of the tensors of all layers that have a delayed scale: two a layer, h and the gradient.

    Attributes:
        amax: (slots,) of the pass that runs.
        history: (16, slots), the newest first.
        known: which slots had a history when the pass began.
        used: which slots ever recorded.
        begun: whether a pass ever began.
    """

    amax: Tensor
    history: Tensor
    known: list[bool]
    used: list[bool]
    begun: bool = False

    @classmethod
    def of(cls, layers: int) -> Histories:
        """Nothing recorded."""
        count = 2 * layers
        return cls(torch.zeros(count), torch.zeros(_STEPS, count), [False] * count, [False] * count)

    def take(self, other: Histories) -> None:
        """Go on from what these are."""
        self.amax.copy_(other.amax)
        self.history.copy_(other.history)
        self.known[:], self.used[:], self.begun = other.known, other.used, other.begun

    def clear(self) -> None:
        """Nothing recorded again."""
        self.amax.zero_()
        self.history.zero_()
        self.known[:] = self.used[:] = [False] * len(self.known)
        self.begun = False

    def advance(self) -> None:
        """A pass begins."""
        self.begun = True
        for slot in range(len(self.known)):
            amax = self.amax[slot]
            if bool(amax.isfinite()) and float(amax) > _LARGEST * _SMALLEST:
                self.history[:, slot] = torch.cat([amax[None], self.history[:-1, slot]])
            self.known[slot] = self.used[slot] and float(self.history[:, slot].max()) > 0
        self.amax.zero_()

    def rounded(self, x: Tensor, slot: int, known: bool) -> Tensor:
        """x (M, N) rounded under the slot's scale, or by rows; its magnitude is recorded."""
        scale = self.history[:, slot].max() * 2 / _LARGEST
        self.used[slot] = True
        self.amax[slot] = torch.maximum(self.amax[slot], x.detach().float().abs().max().cpu())
        return to_codes(x, scale) if known else by_rows(x)


@dataclass
class Group:
    """Linears over one input, as the fused nodes multiply them.

    Attributes:
        modules: the linears, or the adapters over them.
        histories: None: every scale is by row.
        slot_in: of the input.
        slot_out: of the gradient of the outputs.
        beside: for gate and up: down, whose branch decides whether one kernel takes all.
        norms: those behind the MLP.
        on: whether this call is computed so.
        counts: whether it records magnitudes.
        given: the input of the call that runs.
        outputs: and what it gave.
    """

    modules: list[Any]
    histories: Histories | None = None
    slot_in: int | None = None
    slot_out: int | None = None
    beside: Any = None
    norms: list[Any] = field(default_factory=list)
    on: bool = False
    counts: bool = False
    given: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)

    def output(self, number: int, x: Tensor) -> Tensor:
        """That of one linear (..., N) for x (..., K)."""
        if number == 0 or self.given is not x:
            self.given, self.outputs = x, self._all(x)
        y = self.outputs[number]
        if number == len(self.modules) - 1:
            self.given, self.outputs = None, []
        return y

    def _all(self, x: Tensor) -> list[Tensor]:
        bases = [getattr(m, "base_layer", m) for m in self.modules]
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        if torch.is_grad_enabled() and not rows.requires_grad and self._half_trains():
            rows = rows.detach().requires_grad_()
        known = self._known(self.slot_out)
        self.counts = torch.is_grad_enabled()  # a pass without gradients leaves no trace
        outputs = _Product.apply(rows, self, self._known(self.slot_in), known, *map(_weight, bases))
        of_branch = _AsRounded.apply if known and not self._sees_whole(bases) else None
        results = []
        for module, base, y in zip(self.modules, bases, outputs, strict=True):
            y = y if base.bias is None else y + base.bias.to(y.dtype)
            branch = _branch_of(module, rows)
            if branch is not None:
                y = y + (branch if of_branch is None else of_branch(branch, self.histories, self.slot_out))
            results.append(y.view(*x.shape[:-1], y.shape[-1]))
        return results

    def _half_trains(self) -> bool:
        """Whether something behind this product trains: the node's backward pass then makes all."""
        linears = () if self.beside is None else (*self.modules, self.beside)
        used = [p for norm in self.norms for p in norm.parameters()]
        for module in linears:
            used += getattr(module, "base_layer", module).parameters()
            name = _active(module)
            used += [] if name is None else [module.lora_A[name].weight, module.lora_B[name].weight]
        return any(p.requires_grad for p in used)

    def _known(self, slot: int | None) -> bool:
        known = self.histories is not None and slot is not None and self.histories.known[slot]
        return known and torch.is_grad_enabled()

    def _sees_whole(self, bases: list[Any]) -> bool:
        trains = any(
            p is not None and p.requires_grad
            for b in bases
            for p in (b.bias, None if isinstance(b, QuantizedLinear) else b.weight)
        )
        ranks = [_rank_of(m) for m in (*self.modules, self.beside)]
        down = getattr(self.beside, "base_layer", self.beside)
        down_trains = not isinstance(down, QuantizedLinear) and down.weight.requires_grad
        one_pass = len(ranks) == 3 and len(set(ranks)) == 1 and 0 < ranks[0] <= _ONE_PASS_RANK
        return trains or (one_pass and not down_trains)

    def round_input(self, x: Tensor, known: bool) -> Tensor:
        """The rows of the product."""
        if self.histories is None or self.slot_in is None or not self.counts:
            return by_rows(x)
        return self.histories.rounded(x, self.slot_in, known)

    def round_gradient(self, dy: Tensor, known: bool) -> Tensor:
        """The rows of the product of the backward pass."""
        if self.histories is None or self.slot_out is None:
            return by_rows(dy)
        return self.histories.rounded(dy, self.slot_out, known)


class Member:
    """The forward of one linear, or of the adapter over it."""

    def __init__(self, group: Group, number: int) -> None:
        self.group, self.number = group, number

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., K) to (..., N); its own while operands are as they are (as merges are compared)."""
        module = self.group.modules[self.number]
        if not self.group.on or getattr(module, "base_layer", module).operands == PLAIN:
            return type(module).forward(module, x, *args, **kwargs)  # type: ignore[no-any-return]
        return self.group.output(self.number, x)


class _Product(torch.autograd.Function):
    """``x @ W^T`` of weights below each other, both operands rounded; see the module's text."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, known_in: bool, known_out: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        w = torch.cat([weight.float() for weight in weights])
        codes = to_codes(w, (w.abs().max() / _LARGEST).clamp(min=_SMALLEST))
        ctx.save_for_backward(x, codes)
        ctx.group, ctx.known = group, known_out
        ctx.sizes, ctx.dtypes = [weight.shape[0] for weight in weights], [weight.dtype for weight in weights]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            y = group.round_input(x, known_in).to(wide) @ codes.to(wide).t()
        return tuple(part.contiguous() for part in y.to(x.dtype).split(ctx.sizes, -1))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, codes = ctx.saved_tensors
        dy = torch.cat(list(dys), -1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dx = (ctx.group.round_gradient(dy, ctx.known).to(wide) @ codes.to(wide)).to(x.dtype)
        dws = [
            (part.t() @ x).to(dtype) if needed else None
            for part, dtype, needed in zip(dys, ctx.dtypes, ctx.needs_input_grad[4:], strict=True)
        ]
        return dx, None, None, None, *dws


class _AsRounded(torch.autograd.Function):
    """What it is given; its gradient is rounded under a known scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, histories: Histories, slot: int) -> Tensor:
        ctx.histories, ctx.slot = histories, slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        scale = ctx.histories.history[:, ctx.slot].max() * 2 / _LARGEST
        return to_codes(dy, scale), None, None


def _weight(base: Any) -> Tensor:
    if isinstance(base, QuantizedLinear):
        return base.packed.dequantize(torch.float32)
    return base.weight  # type: ignore[no-any-return]


def _active(module: Any) -> str | None:
    if not hasattr(module, "lora_A") or module.disable_adapters or module.merged:
        return None
    return next((name for name in module.active_adapters if name in module.lora_A), None)


def _rank_of(module: Any) -> int:
    name = _active(module)
    return 0 if name is None else int(module.lora_A[name].weight.shape[0])


def _branch_of(module: Any, x: Tensor) -> Tensor | None:
    name = _active(module)
    if name is None:
        return None
    a, b = module.lora_A[name].weight.to(x.dtype), module.lora_B[name].weight.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return ((x @ a.t()) * module.scaling[name]) @ b.t()  # type: ignore[no-any-return]


class Switch:
    """A hook before a plain layer: whether this call of it is computed as a fused one's."""

    def __init__(self, groups: list[Group], number: int, must_be_fused: Callable[..., bool]) -> None:
        self.groups, self.number, self.must_be_fused = groups, number, must_be_fused

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Before each call."""
        has_cache = kwargs.get("past_key_values") is not None
        histories = self.groups[-1].histories
        begins_a_step = self.number == 0 and torch.is_grad_enabled() and not has_cache
        if histories is not None and begins_a_step:
            histories.advance()
        if has_cache:  # a prompt that fills an empty cache is fused like a call without one
            x = args[0] if args else kwargs["hidden_states"]
            has_cache = not begins(self.number, x, kwargs.get("attention_mask"), kwargs["past_key_values"])
        fused = self.must_be_fused(layer, self.number, has_cache, kwargs)
        for group in self.groups:
            group.on = fused


def fills_no_cache(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook before the plain decoder: it fills a cache where the fused one does; no number depends on it."""
    asked = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    if asked or not (torch.is_grad_enabled() or decoder.training):
        return None
    return args, {**kwargs, "use_cache": False}


def define(layers: list[Any], delayed: bool, must_be_fused: Callable[..., bool]) -> Histories | None:
    """Let the layers of the plain twin round where fused ones do, while they must run fused."""
    histories = Histories.of(len(layers)) if delayed else None
    for number, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        of_attention = [attention.qkv_proj] if hasattr(attention, "qkv_proj") else [
            attention.q_proj, attention.k_proj, attention.v_proj
        ]  # fmt: skip
        into_mlp = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
        behind = [getattr(layer, name) for name in _NORMS_BEHIND if hasattr(layer, name)]
        groups = [
            Group(of_attention),
            Group([attention.o_proj]),
            Group(into_mlp, histories, slot_out=2 * number + 1, beside=mlp.down_proj, norms=behind),
            Group([mlp.down_proj], histories, slot_in=2 * number),
        ]
        for group in groups:
            for place, module in enumerate(group.modules):
                module.forward = Member(group, place)
        layer.register_forward_pre_hook(Switch(groups, number, must_be_fused), with_kwargs=True)
    return histories


def forget(model: Any) -> None:
    """Take out what `define` put into a plain twin, and `fills_no_cache`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Member):
            del module.forward
        hooks = module._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if isinstance(hook, Switch) or hook is fills_no_cache]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def histories_of(model: Any) -> Histories | None:
    """Those of a twin or of a copy of it; None without delayed scales."""
    members = (vars(module).get("forward") for module in model.modules())
    found = (member.group.histories for member in members if isinstance(member, Member))
    return next((histories for histories in found if histories is not None), None)
