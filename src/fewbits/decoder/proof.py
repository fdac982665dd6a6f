"""Proof that a decoder layer computes what the fused nodes compute: both ways on a few random tokens.

A spec says where a layer has its linears and norms, not how it combines them. A family may multiply its
residuals (Granite), put its norms elsewhere (OLMo 2) or turn other pairs of channels. So `fuse` takes one
layer of each kind that a model has and compares, on a copy that shares the weights:

1. what the attention is called with: scale, window, soft cap; exactly;
2. each norm and the activation by themselves, in float32;
3. queries, keys and values, what either half adds to its input, and the gradients of the input, of norms and
   of whatever trains.

A layer that differs stays unfused, and the receipt says why (`fewbits.decoder.comparison`).

The copy has no hooks, is in evaluation mode, multiplies in the formats of no recipe, and has adapters with
random values (`_set_adapters`). Nothing of the model changes: neither gradients, nor random states, nor
float8 histories, nor anything kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.decoder.comparison import Differs, NothingToCompare, compare_layer, like_of, random_like
from fewbits.decoder.keep import Keep
from fewbits.errors import NotFused
from fewbits.families.spec import ModelSpec
from fewbits.kernels.product.matmul_packed import PLAIN

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OF_THIS_INSTANCE = ("forward", "_hf_hook", "_old_forward")
_LARGEST_GRADIENT = 2**22  # values of a weight whose gradient is compared, beside adapters


@dataclass
class Proofs:
    """What was found about the layers of one model, a layer of each kind.

    Attributes:
        decoder: holds the layers and their rotary embedding.
        spec: of its family.
        keep: as the layers are to be fused.
        reasons: why layers of a kind cannot be fused, None where they can.
        error: the largest relative error that was found where they can.
        skipped: why layers were not compared.
        refused: layers that stay unfused, by reason.
        pending: layers that the nodes do not take as they are now, and which stay unfused until the model is
            fused again.
    """

    decoder: nn.Module
    spec: ModelSpec
    keep: Keep
    reasons: dict[Any, str | None] = field(default_factory=dict)
    error: float = 0.0
    skipped: str | None = None
    refused: dict[str, list[str]] = field(default_factory=dict)
    pending: dict[str, list[str]] = field(default_factory=dict)

    def why_not(self, layer: nn.Module, spec: ModelSpec) -> str | None:
        """Why this layer must not be fused, or None; ``spec`` is the layer's own.

        Raises:
            NotFused: it cannot be compared now, because of something that may change.
        """
        self.skipped = _cannot_compare(layer)
        if self.skipped is not None:
            return None
        kind = _kind(layer, spec)
        if kind not in self.reasons:
            try:
                self.reasons[kind] = self._compare(layer, spec)
            except NothingToCompare as reason:  # another layer of the kind may have other values
                return str(reason)
        return self.reasons[kind]

    def notes(self) -> list[str]:
        """Sentences for the receipt."""
        lines = []
        for reason, (first, *others) in (*self.refused.items(), *self.pending.items()):
            more = f" and {len(others)} more" if others else ""
            lines.append(f"{first}{more} stays unfused: {reason}")
        if self.skipped is not None:
            lines.append(f"the fused nodes were not compared with the layers' own forward: {self.skipped}")
        proved = sum(reason is None for reason in self.reasons.values())
        if proved:
            lines.append(
                f"compared with the layers' own forward, one of each kind ({proved}): outputs and gradients"
                f" agree to {self.error:.0e}"
            )
        return lines

    def _compare(self, layer: nn.Module, spec: ModelSpec) -> str | None:
        device, width = like_of(layer, spec).device, self._rotary_width(layer)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            torch.random.fork_rng([] if device.type == "cpu" else [device]),
        ):
            try:
                self.error = max(self.error, _prove(layer, spec, self.keep, width))
            except NothingToCompare:
                raise
            except Differs as reason:
                return str(reason)
        return None

    def _rotary_width(self, layer: Any) -> int:
        """How many channels of a head are turned."""
        for name, buffer in self.decoder.named_buffers():
            if name.endswith("inv_freq"):
                return 2 * buffer.numel()
        return int(layer.get_submodule(_attention_path(self.spec)).head_dim)


def _cannot_compare(layer: nn.Module) -> str | None:
    parameters = list(layer.parameters())
    if any(p.is_meta for p in parameters):
        return "its weights have no values yet"
    if vars(layer).get("tensor_group") is not None or any(hasattr(p, "device_mesh") for p in parameters):
        return "its weights are spread over several ranks already"
    return None


# 1. Kinds of layers.


def _kind(layer: nn.Module, spec: ModelSpec) -> Any:
    """What tells one layer's arithmetic from another's: classes, numbers, words, whose place in a list."""
    facts = [(path, type(m), _plain_facts(m)) for path, m in layer.named_modules()]
    attention = layer.get_submodule(_attention_path(spec))
    config, index = getattr(attention, "config", None), getattr(attention, "layer_idx", None)
    own = []
    for name, value in sorted((vars(config) if config is not None else {}).items()):
        if isinstance(value, (list, tuple)) and isinstance(index, int) and index < len(value):
            own.append((name, repr(value[index])))
    return tuple(facts), tuple(own)


def _attention_path(spec: ModelSpec) -> str:
    assert spec.attention is not None  # `check_layer` has refused the others
    return spec.attention.path


def _plain_facts(module: nn.Module) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, repr(value))
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str, type(None))) and name not in ("layer_idx", "training")
    )


# 2. The copy.


def _prove(layer: nn.Module, spec: ModelSpec, keep: Keep, rotary_width: int) -> float:
    """The largest relative error; raises `Differs`, and `NotFused` where nothing can be compared."""
    pristine = _copy(layer, spec)
    try:
        return compare_layer(pristine, spec, keep, rotary_width)
    except NotFused:  # perhaps an adapter's doing: they come and go
        if not _without_adapters(pristine):
            raise
        return compare_layer(pristine, spec, keep, rotary_width)


def _copy(layer: nn.Module, spec: ModelSpec) -> Any:
    """The layer with the same weights under other parameters; see the module's text."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        own = vars(module)
        memo |= {id(own[name]): type(own[name])() for name in _HOOKS if name in own}
        memo |= {id(own[name]): None for name in _OF_THIS_INSTANCE if name in own}
    for name, p in layer.named_parameters():
        if type(p) is nn.Parameter:
            compared = "lora_" in name or p.numel() <= _LARGEST_GRADIENT
            needs_grad = (p.requires_grad and compared) or name.removesuffix(".weight") in spec.norms
            memo[id(p)] = nn.Parameter(_lasting(p.detach()), requires_grad=needs_grad)
        else:
            memo[id(p)] = p
    memo |= {id(buffer): _lasting(buffer) for buffer in layer.buffers()}
    pristine = copy.deepcopy(layer, memo)
    for module in pristine.modules():
        for name in _OF_THIS_INSTANCE:
            vars(module).pop(name, None)
        if hasattr(module, "operands"):
            module.operands = PLAIN  # type: ignore[assignment]
        if getattr(module, "activation_format", None) is not None:
            module.activation_format = None  # type: ignore[assignment]
    _set_adapters(pristine)
    return pristine.eval()


def _lasting(tensor: Tensor) -> Tensor:
    """The tensor of any shape, or a copy of one that was made in inference mode and may have no gradient."""
    return tensor.clone() if tensor.is_inference() else tensor


def _adapted(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in list(layer.named_modules()):
        if hasattr(module, "base_layer") and hasattr(module, "lora_B"):
            yield path, module


def _set_adapters(layer: nn.Module) -> None:
    """One adapter is active, with random values that are as large under every rank and alpha.

    Zeros would prove nothing, and a branch that is far larger than its weight as little: it makes scores of
    thousands, whose softmax no rounding survives. What is proved is the arithmetic, not these values.
    """
    for _, module in _adapted(layer):
        names = [name for name in module.active_adapters if name in module.lora_A] or list(module.lora_A)
        if module.merged_adapters or not names:
            continue
        module._active_adapter, module._disable_adapters = names[:1], False
        for part in (module.lora_A, module.lora_B):
            linear = part[names[0]]
            if isinstance(linear, nn.Linear):
                smaller = 4 * abs(module.scaling.get(names[0], 1.0)) or 1.0 if part is module.lora_B else 1.0
                random = random_like(tuple(linear.weight.shape), linear.weight)
                random *= linear.weight.shape[1] ** -0.5 / smaller
                linear.weight = nn.Parameter(random, requires_grad=linear.weight.requires_grad)


def _without_adapters(layer: nn.Module) -> bool:
    """Put every adapted linear in the place of its adapter; whether there was one."""
    has_adapters = False
    for path, module in list(layer.named_modules()):
        if hasattr(module, "base_layer"):
            layer.set_submodule(path, module.base_layer)  # type: ignore[arg-type]
            has_adapters = True
    return has_adapters


__all__ = ["Proofs"]
