"""Whether a decoder layer may run fused in this call: what its own forward would do, and the nodes would not.

The nodes read weights out of a layer's linears and norms and call no module inside it. So a hook, a forward
of an instance, or another module in a place that the nodes pass by would be ignored; `Guard` finds them
before each call, and the layer takes its own forward, with the reason counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fewbits.errors import NotFused
from fewbits.families.spec import ModelSpec
from fewbits.host.spec import find
from fewbits.nn.loss import LazyHead
from fewbits.nn.norm import RMSNorm

# transformers puts these on every attention module when some call asks for attention weights, for good; they
# do nothing in a call that does not, and one that does is not fused.
_CAPTURING = "transformers.utils.output_capturing"
_READ_IN_EACH_CALL = {"training", "is_causal", "attention_dropout", "p"}
_UNFUSED_ONLY = "for_unfused_layers"


def for_unfused_layers(hook: Any) -> Any:
    """Mark a hook that does for a layer's own forward what the fused nodes do themselves; returns it."""
    setattr(hook, _UNFUSED_ONLY, True)
    return hook


def refuse_hooks(path: str, *modules: nn.Module) -> None:
    """Raise `NotFused` if one of these modules, by the name of ``path``, does more than its class says."""
    for module in modules:
        hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
        if (
            (hooks and _counts(hooks))
            or (pre_hooks and _counts(pre_hooks))
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            raise NotFused(f"{path} has hooks")
        attributes = vars(module)
        # A lazy head is our own: without gradients, as in decoding, it does what its class does.
        if "forward" in attributes and not isinstance(attributes["forward"], LazyHead):
            hook = attributes.get("_hf_hook")  # a device map's: the inputs are on this device already
            if hook is None or getattr(hook, "offload", False):
                raise NotFused(f"{path} has a forward of its own")


def _counts(hooks: Mapping[int, Any]) -> bool:
    """Whether one of these hooks would be missed."""
    return any(
        not getattr(hook, _UNFUSED_ONLY, False) and getattr(hook, "__module__", None) != _CAPTURING
        for hook in hooks.values()
    )


class _Passed(NamedTuple):
    """A module that the nodes compute by themselves, as it was when the layer was fused."""

    path: str
    parent: nn.Module
    name: str
    module: nn.Module
    forward: Any
    functions: dict[str, Callable[..., Any]]
    numbers: dict[str, Any]


class Guard:
    """What one decoder layer was when it was fused, and what must be so still."""

    def __init__(self, layer: nn.Module, spec: ModelSpec, called: tuple[str, ...] = ()) -> None:
        """``called``: paths of modules that are called as they stand; what is in them is theirs."""
        self._passed = [
            _Passed(path, parent, name, module, type(module).forward, _functions(module), _numbers(module))
            for path, parent, name, module in _below(layer, "", {*spec.linears, *spec.norms, *called})
        ]
        self._norms = {path: type(find(layer, path)) for path in spec.norms}
        self._attention: Any = None if spec.attention is None else find(layer, spec.attention.path)
        self._fields = {name: getattr(self._config, name, None) for name in _fields_of(spec)}

    @property
    def _config(self) -> Any:
        return getattr(self._attention, "config", None)

    def check(self) -> None:
        """Raise `NotFused` if something of the layer would be ignored.

        Linears, norms and adapters, which the nodes read, are checked where they are read.
        """
        if _has_any_global_hook():
            raise NotFused("hooks on every module are set")
        self._check_numbers()
        for path, parent, name, module, forward, functions, _ in self._passed:
            if parent._modules.get(name) is not module:
                raise NotFused(f"{path} was replaced after fuse")
            refuse_hooks(path, module)
            if type(module).forward is not forward:
                raise NotFused(f"{type(module).__name__}.forward was replaced after fuse")
            if functions and any(
                vars(module).get(key) is not function for key, function in functions.items()
            ):
                raise NotFused(f"a function of {path} was replaced after fuse")
            if isinstance(module, nn.Dropout) and module.training and module.p:
                raise NotFused(f"{path} is a dropout of {module.p}")

    def _check_numbers(self) -> None:
        config = self._config
        for key, value in self._fields.items():
            if getattr(config, key, None) != value:  # a layer that is made does not follow
                raise NotFused(f"the configuration's {key} was changed after fuse")
        for passed in self._passed:
            own = vars(passed.module)
            for key, number in passed.numbers.items():
                now = own.get(key)
                if type(now) is not type(number) or now != number:
                    raise NotFused(f"{passed.path}.{key} was changed after fuse")

    def check_norm(self, path: str, module: nn.Module) -> None:
        """Raise `NotFused` if a norm is not what it was, nor the one that `convert` puts in its place."""
        if type(module) is not self._norms[path] and type(module) is not RMSNorm:
            raise NotFused(f"{path} is a {type(module).__name__}, and was none when the layer was fused")
        refuse_hooks(path, module)


def _below(
    parent: nn.Module, prefix: str, without: set[str]
) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Path, parent, name and module of everything in a layer but linears and norms, parents first."""
    for name, module in parent.named_children():
        path = prefix + name
        if path not in without:
            yield path, parent, name, module
            yield from _below(module, f"{path}.", without)


def _functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Functions that a module holds as attributes, such as an activation that is no module."""
    return {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and key != "forward" and not isinstance(value, type)
    }


def _fields_of(spec: ModelSpec) -> list[str]:
    """The configuration's fields that the nodes read, and a layer read when it was made."""
    attention, mlp = spec.attention, spec.mlp
    fields = (attention and attention.multiplier, attention and attention.soft_cap, mlp and mlp.activation)
    return [name for name in fields if name]


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Numbers and words of a module that its forward computes with, and the nodes took when it was fused.

    Not those that the nodes read in each call, nor counts of heads, which `tensor_parallel` divides.
    """
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None)))
        and not key.startswith(("_", "num_"))
        and key not in _READ_IN_EACH_CALL
    }


__all__ = ["Guard", "for_unfused_layers", "refuse_hooks"]
