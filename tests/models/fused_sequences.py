"""The fused decoder against the plain one over random sequences of calls; each seed is one sequence.

Two equal models get the same calls; one of them is fused, unfused and fused again on the way. Whatever gives
numbers (a loss, logits, gradients, text, a state dict) is compared. A call that the fused layers pass on to
their own forward is compared too: the fallback counter explains it, and excuses nothing.

    python -m tests.models.fused_sequences 0 2000

runs these seeds, prints each that differs with the calls that led there, and ends with status 1 if one did.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fewbits import FastLanguageModel, convert
from fewbits.decoder.fuse import fuse, fused_layers, fusion_of, unfuse
from fewbits.decoder.keep import KEEP_EVERYTHING, KEEP_NONE, KEEPS, Keep
from fewbits.formats import INT8, NF4
from fewbits.models.adapters import get_peft_model
from fewbits.models.fast import with_methods
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from tests.models.later_calls import Differs, LaterCalls
from tests.models.tiny import FAMILIES, VOCAB, tiny

CALLS = 9
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
_KEEPS = (*KEEPS, KEEP_NONE, KEEP_EVERYTHING, Keep(weights=True))
_TARGETS = (
    ("q_proj", "v_proj"),
    ("gate_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)


def _own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    out = type(self).forward(self, *args, **kwargs)
    return (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5


def _double(module: nn.Module, args: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def _double_gradient(module: nn.Module, given: Any, into: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in given)


class Pair(LaterCalls):
    """Two models and what has been done to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.calls: list[str] = []
        self.fallbacks: Counter[str] = Counter()
        self.undo: list[Callable[[], None]] = []  # hooks and forwards that are in place
        self.dtype = self.choose(torch.float32, torch.float32, torch.float32, torch.bfloat16)
        self.family = self.choose(*FAMILIES)
        self.weight = self.choose(None, NF4, INT8)
        self.steps = 0
        first, second = self._make(seed), self._make(seed)
        self.plain, self.fused = first, second
        fuse(second, keep=self.new_keep())

    def new_keep(self) -> Any:
        """A plan for layers that are fused again."""
        return self.choose(None, *_KEEPS)

    def choose(self, *of: Any) -> Any:
        """One of these."""
        return self.random.choice(of)

    def _make(self, seed: int) -> Any:
        again = random.Random(seed)
        changes = {**_SMALL, "num_hidden_layers": again.choice((1, 2, 2, 3))}
        if self.family in ("mistral", "gemma2", "gemma3_text"):
            changes["sliding_window"] = 6
        model = tiny(self.family, seed=seed, dtype=self.dtype, **changes)
        if self.weight is not None:
            convert(model, Recipe(name="packed", linear=Rule(weight=self.weight)))
        with_methods(model)
        model.set_attn_implementation("eager" if self.family == "gemma2" else again.choice(("sdpa", "eager")))
        if self.weight is not None or again.random() < 0.6:
            model = self._adapters(model, again)
        return model.train()

    def _adapters(self, model: Any, again: random.Random, name: str = "default") -> Any:
        lora = LoRA(
            r=again.choice((2, 4, 8)),
            alpha=again.choice((4, 8)),
            dropout=again.choice((0.0, 0.0, 0.0, 0.2)) * (not self.rounded),
            targets=self._targets(again),
        )
        model = get_peft_model(model, lora, adapter_name=name, seed=7)
        generator = torch.Generator().manual_seed(again.randrange(10**6))
        for path, p in model.named_parameters():
            if "lora_B" in path and f".{name}." in path:
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)
        return model

    def _targets(self, again: random.Random) -> Any:
        chosen = again.choice((*_TARGETS, "all-linear"))
        return "all-linear" if self.family == "phi3" else chosen

    @property
    def both(self) -> tuple[Any, Any]:
        """The plain model and the fused one."""
        return self.plain, self.fused

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters."""
        return list(getattr(self.plain, "peft_config", {}))

    @property
    def merged(self) -> bool:
        """Whether some adapter is in the base's weights."""
        return any(getattr(m, "merged_adapters", None) for m in self.plain.modules())

    # 1. Comparing.

    def same(self, what: str, a: Tensor, b: Tensor, loose: bool = False, floor: float = 0.0) -> None:
        """Equal up to rounding: sums of a few hundred terms in another order, or some 40 roundings."""
        tolerance = 0.2 if loose or self.dtype != torch.float32 else 2e-4
        a, b = a.detach().float(), b.detach().float()
        if not torch.equal(a.isfinite(), b.isfinite()):
            raise Differs(f"{what}: finite in one and not in the other")
        a, b = a.nan_to_num(), b.nan_to_num()
        error = float((a - b).norm())
        if error > tolerance * (float(b.norm()) + floor) + 1e-6:
            raise Differs(f"{what}: {error / max(float(b.norm()), 1e-30):.2g} apart")

    def batch(self) -> dict[str, Any]:
        """Rows of tokens, with padding or not."""
        rows, length = self.choose(1, 2, 3), self.choose(3, 8, 13)
        generator = torch.Generator().manual_seed(self.random.randrange(10**6))
        ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        kind = self.choose("none", "none", "left", "right", "both", "packed", "added")
        mask = torch.ones_like(ids)
        if kind in ("left", "both"):
            mask[0, : length // 2] = 0
        if kind in ("right", "both"):
            mask[-1, length - 1 :] = 0
        if kind in ("left", "right", "both"):
            batch["attention_mask"] = mask
            if self.random.random() < 0.7:
                batch["labels"] = ids.masked_fill(mask == 0, -100)
        elif kind == "packed" and length > 3:
            cut = length // 2
            positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
            batch["position_ids"] = positions.repeat(rows, 1)
            batch["use_cache"] = False  # with a cache transformers does not see that these are several rows
        elif kind == "added":
            lowest = torch.finfo(self.dtype).min
            batch["attention_mask"] = torch.full((length, length), lowest, dtype=self.dtype).triu(1)
            batch["attention_mask"] = batch["attention_mask"].repeat(rows, 1, 1, 1)
        self.note(f"[{kind} {rows}x{length}]")
        return batch

    def note(self, text: str) -> None:
        """Add to what the last call is called."""
        self.calls[-1] += f" {text}"

    def _run(self, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        seed = self.random.randrange(10**6)
        results = []
        for model in self.both:
            torch.manual_seed(seed)
            results.append(call(model))
        return results[0], results[1]

    def _gradients(self, call: Callable[[Any], Tensor], loose: bool = False) -> None:
        """Loss and gradients of both; the fused model then takes the plain one's, to stay equal."""
        for model in self.both:
            model.zero_grad(set_to_none=True)

        def backward(model: Any) -> Tensor:
            loss = call(model)
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

        self.same("loss", *self._run(backward), loose)
        parameters = dict(self.fused.named_parameters())
        grads = {n: p.grad for n, p in self.plain.named_parameters() if p.grad is not None}
        largest = max((float(g.float().norm()) for g in grads.values()), default=0.0)
        if grads.keys() != {n for n, p in parameters.items() if p.grad is not None}:
            other = {n for n, p in parameters.items() if p.grad is not None}
            raise Differs(f"gradients of {sorted(grads.keys() ^ other)[:3]} in one only")
        for name, gradient in grads.items():
            self.same(f"gradient of {name}", parameters[name].grad, gradient, loose, 0.02 * largest)
            parameters[name].grad = gradient.clone()

    # 2. Calls.

    def train(self) -> None:
        """A step."""
        batch, times = self.batch(), self.choose(1, 1, 2)
        self._gradients(lambda m: sum(m(**batch).loss for _ in range(times)))  # type: ignore[arg-type,misc]
        rate = 0.02
        with torch.no_grad():
            for model in self.both:
                for p in model.parameters():
                    if p.grad is not None and torch.isfinite(p.grad).all():
                        p.sub_(p.grad.clamp(-1, 1), alpha=rate)

    def train_cast(self) -> None:
        """Forward and backward under autocast."""
        if self.dtype == torch.float32:
            batch = self.batch()
            batch.pop("attention_mask", None)

            def call(model: Any) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return model(**batch).loss  # type: ignore[no-any-return]

            self._gradients(call, loose=True)

    def train_from_embeddings(self) -> None:
        """The gradient of the input."""
        ids = self.batch()["input_ids"]

        def call(model: Any) -> Tensor:
            x = model.get_input_embeddings()(ids).detach().requires_grad_()
            model(inputs_embeds=x, labels=ids).loss.backward()
            return x.grad  # type: ignore[no-any-return]

        self.same("gradient of the input", *self._run(call))
        for model in self.both:
            model.zero_grad(set_to_none=True)

    def forward_alone(self) -> None:
        """Gradients on, and no backward pass."""
        batch = self.batch()
        a, b = self._run(lambda m: m(**batch, output_hidden_states=True))
        self.same("logits", b.logits[self._seen(batch)], a.logits[self._seen(batch)])
        for i, (x, y) in enumerate(zip(b.hidden_states, a.hidden_states, strict=True)):
            self.same(f"hidden states {i}", x[self._seen(batch)], y[self._seen(batch)])

    def evaluate(self) -> None:
        """Logits without gradients."""
        batch = self.batch()
        mode = self.choose(torch.no_grad, torch.inference_mode)
        training = self.plain.training

        def call(model: Any) -> Tensor:
            model.eval()
            with mode():
                logits = model(**batch).logits
                logits = logits + 0
            model.train(training)
            return logits[self._seen(batch)].clone()  # type: ignore[no-any-return]

        self.same("logits", *self._run(call))

    @staticmethod
    def _seen(batch: dict[str, Any]) -> Any:
        """Tokens that are no padding: what stands at the others is anybody's."""
        mask = batch.get("attention_mask")
        return slice(None) if mask is None or mask.dim() != 2 else mask.bool()

    def generate(self) -> None:
        """Greedy text."""
        ids = self.batch()["input_ids"]
        training = self.plain.training

        def call(model: Any) -> Tensor:
            model.eval()
            text = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
            )
            model.train(training)
            return text  # type: ignore[no-any-return]

        a, b = self._run(call)
        if self.dtype == torch.float32 and not torch.equal(a, b):
            raise Differs("generated text")

    def for_inference_and_back(self) -> None:
        """As GRPO does."""
        for model in self.both:
            FastLanguageModel.for_inference(model)
        self.generate()
        for model in self.both:
            FastLanguageModel.for_training(model, self.choose(False, False, True))

    def checkpointing(self) -> None:
        """transformers' own, on or off."""
        on = self.random.random() < 0.5
        for model in self.both:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            if on:
                base.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                base.gradient_checkpointing_disable()
        self.note("on" if on else "off")

    def hook(self) -> None:
        """On a module of a layer, or a forward of its own."""
        path = self.choose(
            "mlp", "self_attn", "mlp.act_fn", "input_layernorm", "mlp.down_proj", "self_attn.o_proj"
        )
        if self.family == "phi3":
            path = path.replace("act_fn", "activation_fn")
        kind = self.choose("forward", "backward", "own")
        self.note(f"{kind} on {path}")
        for model in self.both:
            module = _layer(model).get_submodule(path)
            if kind == "forward":
                self.undo.append(module.register_forward_hook(_double).remove)
            elif kind == "backward":
                self.undo.append(module.register_full_backward_hook(_double_gradient).remove)
            elif "forward" not in vars(module):
                module.forward = MethodType(_own_forward, module)
                self.undo.append(lambda m=module: vars(m).pop("forward", None))  # type: ignore[misc]

    def unhook(self) -> None:
        """All hooks away."""
        for undo in self.undo:
            undo()
        self.undo.clear()

    def keep(self) -> None:
        """Another plan for one layer, or all."""
        chosen = self.choose(*_KEEPS)
        for layer in fused_layers(self.fused)[: self.choose(1, None)]:
            layer.keep = chosen
        self.note(str(chosen))

    def fuse_again(self) -> None:
        """Out and in."""
        self.count()
        unfuse(self.fused)
        if self.random.random() < 0.3:
            self.train()
        fuse(self.fused, keep=self.new_keep())

    def copy(self) -> None:
        """Deep copies go on in place of both."""
        if not self.undo:
            self.count()
            self.plain, self.fused = copy.deepcopy(self.plain), copy.deepcopy(self.fused)
            fusion_of(self.fused).fallbacks.clear()

    def add_adapter(self) -> None:
        """A second or third one, active or not."""
        if self.merged or len(self.adapters) > 2 or (self.adapters and self.undo):
            return
        name = f"other{len(self.calls)}"
        if not self.adapters:
            name = "default"
            if self.undo:
                return
        seed = self.random.randrange(10**6)
        self.plain = self._adapters(self.plain, random.Random(seed), name)
        self.fused = self._adapters(self.fused, random.Random(seed), name)
        for model in self.both:
            if self.steps % 2:
                model.set_adapter(name)

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

    def without_adapters(self) -> None:
        """DPO's reference pass: evaluation, or training of nothing."""
        if self.adapters:
            batch = self.batch()
            grad = self.random.random() < 0.5

            def call(model: Any) -> Tensor:
                with model.disable_adapter(), torch.set_grad_enabled(grad):
                    return model(**batch).loss.detach()  # type: ignore[no-any-return]

            self.same("loss without adapters", *self._run(call))

    def merge(self) -> None:
        """Into the base, or out of it."""
        if not self.adapters or self._has_several_targets():
            return
        out = self.merged
        self.note("out" if out else "in")
        for model in self.both:
            if out:
                model.unmerge_adapter()
            else:
                model.merge_adapter()

    def _has_several_targets(self) -> bool:
        active = self.plain.active_adapter
        return not isinstance(active, str) and len(active) > 1

    def save_and_load(self) -> None:
        """Adapters written by the fused model are read by both."""
        if not self.adapters or self.merged or self.undo or len(self.adapters) > 2:
            return
        name = f"read{len(self.calls)}"
        with tempfile.TemporaryDirectory() as folder:
            chosen = self.choose(*self.adapters)
            self.fused.save_pretrained(folder, selected_adapters=[chosen])
            place = folder if chosen == "default" else f"{folder}/{chosen}"
            for model in self.both:
                model.load_adapter(place, adapter_name=name, is_trainable=True)
                model.set_adapter(name)

    def state(self) -> None:
        """The same names and values."""
        a, b = (model.state_dict() for model in self.both)
        if a.keys() != b.keys():
            raise Differs(f"names {sorted(a.keys() ^ b.keys())[:3]}")
        for name, tensor in a.items():
            if not torch.equal(tensor.nan_to_num(), b[name].nan_to_num()):
                raise Differs(f"{name} has other values")

    def trained(self) -> None:
        """Norms train as well, or no longer; a plain base too."""
        on = self.random.random() < 0.6
        part = self.choose("norm", "proj", "bias") if self.weight is None else self.choose("norm", "bias")
        for model in self.both:
            for name, p in model.named_parameters():
                if part in name and "lora_" not in name and p.is_floating_point() and p.dtype == self.dtype:
                    p.requires_grad_(on)
        self.note(f"{part} {on}")

    def attention(self) -> None:
        """Another implementation."""
        if self.family != "gemma2":
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

    # 3. A sequence.

    def count(self) -> None:
        """Take the counter's reasons over before the fusion goes."""
        fusion = fusion_of(self.fused)
        if fusion is not None:
            self.fallbacks.update(fusion.fallbacks)

    def run(self, calls: int = CALLS) -> Counter[str]:
        """Some calls, chosen at random; what was counted as run unfused."""
        computing = (self.train, self.train, self.evaluate, self.forward_alone, self.train_from_embeddings)
        others = (
            self.train_cast, self.generate, self.for_inference_and_back, self.checkpointing, self.hook,
            self.unhook, self.keep, self.fuse_again, self.copy, self.add_adapter, self.switch_adapter,
            self.delete_adapter, self.without_adapters, self.merge, self.save_and_load, self.state,
            self.trained, self.attention, self.mode,
            self.generate_in_few_bits, self.read_into_packed_cache, self.generate_by_guesses,
            self.generate_many_texts, self.generate_as_it_is, self.decode_step, self.dequantize, self.restore,
            self.convert, self.cast, self.through_a_file, self.resize, self.weigh_adapters,
            self.inside_disabled, self.words_of_forward, self.export, self.save_base,
        )  # fmt: skip
        for self.steps in range(calls):
            call = self.choose(*others) if self.steps % 2 == 0 else self.choose(*computing)
            self.calls.append(call.__name__)
            call()
        self.calls.append("state")
        self.state()
        self.count()
        return self.fallbacks


def _layer(model: Any) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.model.layers[-1]


def run_seed(seed: int) -> tuple[str | None, Counter[str], list[str]]:
    """What differed or failed in the sequence of this seed, what ran unfused, and its calls."""
    pair, said = None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pair = Pair(seed)
            weight = pair.weight and pair.weight.name
            said = [f"{pair.family} {weight} {pair.dtype} {pair.adapters}"]
            return None, pair.run(), pair.calls
        except Exception as error:  # noqa: BLE001 (whatever a sequence meets is what it found)
            calls = [*said, *([] if pair is None else pair.calls)]
            return f"{type(error).__name__}: {str(error)[:300]}", Counter(), calls


def main(first: int, last: int) -> int:
    """Run these seeds and print what differs."""
    torch.set_num_threads(1)
    began, bad, fallbacks, calls = time.time(), 0, Counter[str](), 0
    for seed in range(first, last):
        problem, counted, done = run_seed(seed)
        fallbacks.update(counted)
        calls += len(done)
        if problem is not None:
            bad += 1
            print(f"seed {seed}: {problem}\n    {' | '.join(done)}", flush=True)
        if (seed + 1 - first) % 20 == 0:
            print(f"{seed + 1 - first} of {last - first} done, {bad} differ", flush=True)
    print(f"{last - first} sequences of {calls} calls, {bad} differ, {time.time() - began:.0f} s", flush=True)
    for reason, count in fallbacks.most_common():
        print(f"  unfused {count:6d} layer calls: {reason}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
