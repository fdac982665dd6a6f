"""Calls of a `Pair` that change its models: hooks, plans, modes, adapters, merges, what trains."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fused_layers, unfuse
from tests.models.sequences.computing import base_of, greedy, in_evaluation
from tests.models.sequences.expected import Differs
from tests.models.sequences.setup import PLANS, Setup

_AS_MADE = ("act_fn", "activation_fn", "scaling", "hidden_act")  # what fuse finds, and refuses or takes


def _own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    out = type(self).forward(self, *args, **kwargs)
    return (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5


def _double(module: nn.Module, args: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def _double_gradient(module: nn.Module, given: Any, into: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in given)


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


class _Softplus(nn.Module):
    """Another activation."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(x)


class ChangingCalls:
    """Calls that change both models alike; `tests.models.sequences.pair.Pair` has the models."""

    setup: Setup
    plain: Any
    fused: Any
    both: tuple[Any, Any]
    adapters: list[str]
    merged: bool
    rounded: bool
    dtype: torch.dtype
    placed: Any
    undo: list[Callable[[], None]]
    random: Any
    weight: Any
    histories: Any
    choose: Callable[..., Any]
    note: Callable[[str], None]
    batch: Callable[..., dict[str, Any]]
    same_text: Callable[..., Any]
    each: Callable[..., Any]
    define: Callable[[], None]
    fuse: Callable[[], None]
    train: Callable[[], None]
    evaluate: Callable[[], None]

    # 1. Hooks and the like.

    def hook(self) -> None:
        """On a module of a layer, a forward of its own, or another module in its place."""
        path = self.choose(
            "mlp", "self_attn", "mlp.act_fn", "input_layernorm", "mlp.down_proj", "self_attn.o_proj", ""
        )
        if self.setup.family == "phi3":
            path = path.replace("act_fn", "activation_fn")
        if self.setup.family == "olmo2":
            path = path.replace("input_layernorm", "mlp")
        kind = self.choose("forward", "backward", "own", "another")
        number = self.random.randrange(self.setup.layers)
        if (not path and kind in ("own", "another")) or (kind == "another" and "act" not in path):
            kind = "forward"
        self.note(f"{kind} on {path or 'the layer'} {number}")
        for model in self.both:
            layer = base_of(model).model.layers[number]
            self._put(layer, path, kind)
        if path:
            self.placed.inside.add((number, path))

    def _put(self, layer: Any, path: str, kind: str) -> None:
        module = layer.get_submodule(path)
        if kind == "forward":
            self.undo.append(module.register_forward_hook(_double).remove)
        elif kind == "backward":
            self.undo.append(module.register_full_backward_hook(_double_gradient).remove)
        elif kind == "another":
            layer.set_submodule(path, _Softplus())
            self.undo.append(lambda: layer.set_submodule(path, module))
        else:
            before = vars(module).get("forward")
            module.forward = MethodType(_own_forward, module)
            self.undo.append(lambda: _put_back(module, before))

    def number(self) -> None:
        """Another number in a layer, or in the configuration, which a layer that is made does not follow."""
        number = self.random.randrange(self.setup.layers)
        kind = self.choose("scaling", "activation")
        if self.setup.family in ("gemma2", "gemma3_text", "gemma", "phi3") and kind == "activation":
            kind = "scaling"
        self.note(f"{kind} of layer {number}")
        for model in self.both:
            attention = base_of(model).model.layers[number].self_attn
            place, name = (attention, "scaling") if kind == "scaling" else (attention.config, "hidden_act")
            before = getattr(place, name)
            setattr(place, name, before * 1.5 if kind == "scaling" else "gelu")
            self.undo.append(lambda place=place, name=name, before=before: setattr(place, name, before))  # type: ignore[misc]
        if kind == "scaling":
            self.placed.inside.add((number, "self_attn.scaling"))
        else:
            self.placed.inside |= {(i, "hidden_act") for i in range(self.setup.layers)}

    def unhook(self) -> None:
        """All of that away."""
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()
        self.placed.inside.clear()

    def hook_everywhere(self) -> None:
        """A hook on every module there is, for one call."""
        handle = register_module_forward_pre_hook(_nothing)
        self.placed.everywhere = True
        try:
            self.choose(self.train, self.evaluate)()
        finally:
            handle.remove()
            self.placed.everywhere = False

    # 2. How it runs.

    def keep(self) -> None:
        """Another plan for one layer, or all."""
        plan = self.choose(*PLANS)
        for layer in fused_layers(self.fused)[: self.choose(1, None)]:
            layer.keep = plan
        self.note(str(plan))

    def checkpointing(self) -> None:
        """transformers' own, on or off."""
        on = self.random.random() < 0.5
        for model in self.both:
            base = base_of(model)
            if on:
                base.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                base.gradient_checkpointing_disable()
        self._define_again()
        self.note("on" if on else "off")

    def _define_again(self) -> None:
        """The definition of FP8 products computes nothing again, and gradients begin where the twin's do."""
        if not self.setup.is_float8:
            return
        for module in self.plain.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        self.plain.config.use_cache = self.fused.config.use_cache
        hooks = [model.get_input_embeddings()._forward_hooks for model in self.both]
        if not hooks[1]:
            hooks[0].clear()

    def for_training(self) -> None:
        """What ``use_gradient_checkpointing`` may be."""
        chosen = self.choose(False, True, "unsloth", None)
        self.note(str(chosen))
        for model in self.both:
            FastLanguageModel.for_training(model, chosen)
        self._define_again()

    def for_inference_and_back(self) -> None:
        """As GRPO does."""
        for model in self.both:
            FastLanguageModel.for_inference(model)
        self.generate()
        self.for_training()

    def generate(self) -> None:
        """Greedy text."""
        ids = self.batch()["input_ids"]
        self.placed.cache_asked = True

        def call(model: Any) -> Tensor:
            with in_evaluation(model):
                return greedy(model, ids, 3)

        self.same_text(call)

    def fuse_again(self) -> None:
        """Out and in."""
        if any(path.endswith(_AS_MADE) for _, path in self.placed.inside):
            self.unhook()
        unfuse(self.fused)
        if self.random.random() < 0.3 and not self.setup.is_float8:
            self.train()
        self.fuse()

    def copy(self) -> None:
        """Deep copies go on in place of both."""
        if not self.undo:
            self.plain, self.fused = copy.deepcopy(self.plain), copy.deepcopy(self.fused)
            self.found_again()

    def found_again(self) -> None:
        """The models are other objects now."""
        if self.setup.is_float8:
            before = self.histories
            self.define()
            if before is not None and self.histories is not None:
                self.histories.take(before)

    def attention(self) -> None:
        """Another implementation."""
        if self.setup.family != "gemma2":
            chosen = self.choose("eager", "sdpa")
            for model in self.both:
                model.set_attn_implementation(chosen)
            self.note(chosen)

    def mode(self) -> None:
        """Training or evaluation mode."""
        on = self.random.random() < 0.5
        for model in self.both:
            model.train(on)
        self.note("train" if on else "eval")

    def trained(self) -> None:
        """Norms train as well, or no longer; a plain base too."""
        on = self.random.random() < 0.6
        parts = ("norm", "proj", "bias", "lm_head") if self.weight is None else ("norm", "bias")
        part = self.choose(*parts)
        for model in self.both:
            for name, p in model.named_parameters():
                if part in name and "lora_" not in name and p.is_floating_point() and p.dtype == self.dtype:
                    p.requires_grad_(on)
        self.note(f"{part} {on}")

    # 3. Adapters.

    def add_adapter(self) -> None:
        """A second or third one, active or not."""
        if self.merged or len(self.adapters) > 2 or self.undo:
            return
        name = f"other{len(self.adapters)}" if self.adapters else "added"
        if name in self.adapters:
            return
        seed, active = self.random.randrange(10**6), self.random.random() < 0.5
        self.plain = self.setup.adapted(self.plain, name, seed, rounded=self.rounded)
        self.fused = self.setup.adapted(self.fused, name, seed, rounded=self.rounded)
        self.found_again()
        for model in self.both:
            if active:
                model.set_adapter(name)
        self.note(f"{name} {'active' if active else ''}")

    def switch_adapter(self) -> None:
        """One of them, or several at once."""
        if self.adapters and not self.merged:
            name, several = self.choose(*self.adapters), self.random.random() < 0.2
            for model in self.both:
                if several:
                    model.base_model.set_adapter(self.adapters)
                else:
                    model.set_adapter(name)
            self.note("all" if several else name)

    def delete_adapter(self) -> None:
        """But the last one."""
        if len(self.adapters) > 1 and not self.merged:
            name = self.choose(*self.adapters)
            rest = [a for a in self.adapters if a != name]
            for model in self.both:
                model.set_adapter(rest[0])
                model.delete_adapter(name)
            self.note(name)

    def merge(self) -> None:
        """Into the base, or out of it."""
        if not self.adapters or self._has_several_active():
            return
        out = self.merged
        self.note("out" if out else "in")
        if out:
            self.each(lambda m: m.unmerge_adapter())
        elif not any(config.lora_bias for config in self.plain.peft_config.values()):  # PEFT refuses it
            self.each(lambda m: m.merge_adapter())

    def _has_several_active(self) -> bool:
        active = self.plain.active_adapter
        return not isinstance(active, str) and len(active) > 1

    def save_and_load(self) -> None:
        """Adapters written by the fused model are read by both."""
        if not self.adapters or self.merged or self.undo or len(self.adapters) > 2:
            return
        name = f"read{len(self.adapters)}"
        if name in self.adapters:
            return
        with tempfile.TemporaryDirectory() as folder:
            chosen = self.choose(*self.adapters)
            self.fused.save_pretrained(folder, selected_adapters=[chosen])
            place = folder if chosen == "default" else f"{folder}/{chosen}"
            for model in self.both:
                model.load_adapter(place, adapter_name=name, is_trainable=True)
                model.set_adapter(name)

    # 4. States.

    def state(self) -> None:
        """The same names and values."""
        a, b = (model.state_dict() for model in self.both)
        if a.keys() != b.keys():
            raise Differs(f"names {sorted(a.keys() ^ b.keys())[:3]}")
        for name, tensor in a.items():
            if not torch.equal(tensor.nan_to_num(), b[name].nan_to_num()):
                raise Differs(f"{name} has other values")

    def back_to_a_state(self) -> None:
        """A state dict is taken, something is trained, and it is loaded again."""
        if self.merged:
            return
        states = [{k: v.clone() for k, v in model.state_dict().items()} for model in self.both]
        self.choose(self.train, self.evaluate)()
        for model, state in zip(self.both, states, strict=True):
            model.load_state_dict(state)
        self.evaluate()


def _put_back(module: Any, forward: Any) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward
