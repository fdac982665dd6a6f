"""Calls of a `Pair`: how its models generate, and what they are turned into.

Generation with caches in few bits, with guesses, of many texts at once and by the decode step; exports in
between; ``dequantize``, ``restore``, ``convert``, casts, copies through a file, words of ``forward``.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import fewbits
from fewbits import generate_many
from fewbits.decoder.fuse import fusion_of
from fewbits.errors import FewbitsError
from fewbits.formats.kv_cache import KVCache
from fewbits.inference.generate import Sampling
from fewbits.models.fast import with_methods
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.packed_cache import PackedCache
from fewbits.models.packing.cache_choice import FULL, layer_kinds
from fewbits.nn.linear import QuantizedLinear
from tests.models.sequences.computing import base_of, greedy, in_evaluation
from tests.models.sequences.exact import Results, allowed, error_of, roundoff
from tests.models.sequences.expected import Differs
from tests.models.sequences.setup import Setup
from tests.models.tiny import VOCAB

CACHES = ("int4", "int8", "int8/int4", KVCache(newest=3, first=1), KVCache(keys="int8", newest=2, first=0))
EXPORTS = ("merged_16bit", "merged_4bit", "gptq:int4_g16", "bitsandbytes:nf4", "torchao:int8", "lora")
RECIPES = ("qlora_nf4", "int8", "lora_bf16", "nf4_qat")


def word_tokenizer() -> Any:
    """One token a character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(VOCAB)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="#", pad_token="!")


class TurningCalls:
    """Calls; `tests.models.sequences.pair.Pair` has the models and compares.

    Attributes:
        rounded: whether the linears are fake-quantised.
    """

    setup: Setup
    rounded: bool
    plain: Any
    fused: Any
    both: tuple[Any, Any]
    adapters: list[str]
    merged: bool
    drops: bool
    dtype: torch.dtype
    placed: Any
    few_bits: bool
    undo: list[Callable[[], None]]
    weight: Any
    random: Any
    role: str
    choose: Callable[..., Any]
    note: Callable[[str], None]
    compare: Callable[..., Results]
    copies: Callable[..., Any]
    same_text: Callable[..., Any]
    each: Callable[..., Any]
    batch: Callable[..., dict[str, Any]]
    fit: Callable[..., dict[str, Any]]
    seen: Callable[..., Any]
    fuse: Callable[[], None]
    found_again: Callable[[], None]

    # 1. Text.

    def _texts(self, call: Callable[[Any], Any]) -> Any:
        """What ``call`` makes of both models in evaluation mode, which must be the same tokens."""
        self.placed.cache_asked = True

        def evaluated(model: Any) -> Any:
            with in_evaluation(model):
                return call(model)

        return self.same_text(evaluated)

    def generate_in_few_bits(self) -> None:
        """A cache of the call, or one of the caller's own."""
        kind, ids = self.choose(*CACHES), self.batch()["input_ids"]
        if FULL not in layer_kinds(base_of(self.plain).config):
            return
        own, length = self.random.random() < 0.4, self.choose(2, 9)
        self.note(f"{kind} {'own' if own else ''}")

        def call(model: Any) -> Tensor:
            words: dict[str, Any] = {"kv_cache": kind}
            if own:
                words = {"past_key_values": PackedCache(base_of(model).config, kind)}
            return greedy(model, ids, length, **words)

        self._texts(call)

    def read_into_packed_cache(self) -> None:
        """Two passes over one cache, with gradients on or off."""
        kind, ids, grad = self.choose(*CACHES), self.batch()["input_ids"], self.random.random() < 0.5
        if FULL not in layer_kinds(base_of(self.plain).config):
            return

        self.placed.cache_asked = True

        def call(model: Any) -> Results:
            cache = PackedCache(base_of(model).config, kind)
            with in_evaluation(model), torch.set_grad_enabled(grad):
                first = model(ids, past_key_values=cache, use_cache=True).logits
                second = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
            return {"first": first.detach() + 0, "second": second.detach() + 0}

        self.few_bits = True
        self.compare("over a packed cache", call)

    def generate_by_guesses(self) -> None:
        """Looked up in the text, or made by the other model."""
        ids = self.batch()["input_ids"][:1].repeat(1, 2)
        kind = self.choose("lookup", "draft")
        draft = base_of(self.plain)
        self.note(kind)

        def call(model: Any) -> Tensor:
            words: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
            if kind == "draft":
                words = {"assistant_model": draft}
            return greedy(model, ids, 6, **words)

        training = draft.training
        draft.eval()
        self._texts(call)
        draft.train(training)

    def generate_many_texts(self) -> None:
        """Of different lengths, some of which wait."""
        generator = torch.Generator().manual_seed(self.random.randrange(10**6))
        words = word_tokenizer()
        prompts = [
            "".join(chr(33 + int(i)) for i in torch.randint(3, VOCAB, (n,), generator=generator))
            for n in self.choose((3, 5, 2), (7,), (4, 4, 9, 1))
        ]
        sampling = Sampling(temperature=self.choose(0.0, 1.0), max_new_tokens=4, seed=3)
        slots = self.choose(1, 2)
        self._texts(lambda m: [a.text for a in generate_many(m, words, prompts, sampling, at_a_time=slots)])

    def generate_as_it_is(self) -> None:
        """In the mode that the models are in, with checkpointing or without.

        Not with dropout: checkpointed layers generate in evaluation mode, fused ones as they are.
        """
        if self.drops:
            return
        ids = self.batch()["input_ids"]
        self.placed.cache_asked = True
        self.same_text(lambda m: greedy(m, ids, 3))

    def decode_step(self) -> None:
        """Decoding's own kernels, by their definition: they see the weights and adapters as they are now."""
        if self.dtype != torch.bfloat16:
            return
        ids, model = self.batch()["input_ids"], self.fused
        self.placed.cache_asked = True
        with in_evaluation(model), in_evaluation(self.plain):
            with self._emulated():
                text = greedy(model, ids, 3, eos_token_id=None)[:, :-1]
            state = decoding_of(model)
            if state.step is None or state.refused or not state.proved:
                return
            self.note("by steps")
            exact, noisy = self.copies(roundoff(self.dtype))
            results = [self._last_logits(m, text) for m in (self.plain, exact, noisy)]
        step, bound = {"": state.step.logits}, allowed("", *results, roundoff(self.dtype))
        if not error_of("", step, results[1]) <= bound:
            raise Differs(f"the decode step's logits are off by {error_of('', step, results[1]):.2g}")

    @contextlib.contextmanager
    def _emulated(self) -> Iterator[None]:
        """The definitions of the decode step's kernels, where there is no GPU."""
        if self.setup.device != "cpu":
            yield
            return
        import pytest

        from tests.models.emulated import on_a_cpu

        with pytest.MonkeyPatch.context() as patch:
            on_a_cpu(patch)
            yield

    @staticmethod
    def _last_logits(model: Any, text: Tensor) -> Results:
        with torch.no_grad():
            return {"": model(input_ids=text).logits[:, -1]}

    # 2. What a model is turned into.

    def _either(self, call: Callable[[Any], Any]) -> bool:
        """Do something to both; False if both refuse it in the same words, figures aside."""
        said = []

        def tried(model: Any) -> None:
            try:
                call(model)
                said.append("")
            except (FewbitsError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")

        self.each(tried)
        if len({re.sub(r"\d[\d.e+-]*", "#", words) for words in said}) > 1:
            raise Differs(f"one says {said[0]!r}, the other {said[1]!r}")
        if said[0]:
            self.note("refused")
        return not said[0]

    def _trained(self) -> set[str]:
        return {name for name, p in self.fused.named_parameters() if p.requires_grad}

    def _no_more_trains(self, trained: set[str]) -> None:
        """Under adapters a base stays frozen, whatever becomes of its weights."""
        if self.adapters and (more := self._trained() - trained):
            raise Differs(f"{sorted(more)[0]} trains now")

    def _fuse_if_not(self) -> None:
        if fusion_of(self.fused) is None:
            self.fuse()

    def dequantize(self) -> None:
        """transformers' own call."""
        if self.weight is None or self.undo or self.setup.is_float8:
            return
        trained = self._trained()
        if self._either(lambda m: base_of(m).dequantize()):
            self.weight = None
            if any(isinstance(m, QuantizedLinear) for m in self.fused.modules()):
                raise Differs("a packed linear is left")
            if fusion_of(self.fused) is not None:
                raise Differs("the fusion is left")
            self._no_more_trains(trained)
        self._fuse_if_not()

    def restore(self) -> None:
        """All of ours out of both; the plain one may have nothing."""
        if self.undo or self.merged or self.setup.is_float8:
            return
        trained, converted = self._trained(), self.weight is not None or self.rounded
        self.rounded = False
        fewbits.restore(self.fused)
        if converted:
            fewbits.restore(self.plain)
            self.weight = None
        self._no_more_trains(trained)
        self._fuse_if_not()

    def convert(self) -> None:
        """To another recipe, before adapters or in vain."""
        recipe = self.choose(*RECIPES)
        self.note(recipe)
        if self.undo or self.setup.is_float8:
            return
        if self.weight is not None and not self.adapters and self.random.random() < 0.7:
            self.restore()
        if self._either(lambda m: fewbits.convert(m, recipe)):
            self.rounded = recipe.endswith("_qat")
            packed = [m for m in self.plain.modules() if isinstance(m, QuantizedLinear)]
            self.weight = packed[0].format if packed else None

    def cast(self) -> None:
        """To the other dtype; transformers refuses it for packed models."""
        other = torch.bfloat16 if self.dtype == torch.float32 else torch.float32
        if self.weight is None and not self.setup.is_float8 and self._either(lambda m: m.to(other)):
            self.dtype = other
            self.note(str(other))

    def through_a_file(self) -> None:
        """``torch.save`` and ``torch.load`` of whole models."""
        if self.undo:
            return

        kind = self.choose("torch.save", "pickle")

        def travelled(model: Any) -> Any:
            if kind == "pickle":
                return pickle.loads(pickle.dumps(model))
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        try:
            self.plain, self.fused = self.each(travelled)
        except AttributeError as error:
            if not str(error).startswith("Can't pickle local object"):
                raise  # but hooks that transformers itself leaves on a model, of both
            self.note("cannot travel")
        self.found_again()
        self._fuse_if_not()

    def resize(self) -> None:
        """The vocabulary grows by some tokens."""
        if self.merged or self.undo or self.setup.adapters == "head":
            return
        for model in self.both:
            model.zero_grad(set_to_none=True)  # transformers leaves gradients of the former size
        size = base_of(self.plain).get_input_embeddings().weight.shape[0] + 3
        self._either(lambda m: base_of(m).resize_token_embeddings(size, mean_resizing=False) and None)

    # 3. Adapters and exports.

    def weigh_adapters(self) -> None:
        """PEFT's ``add_weighted_adapter`` of two."""
        if len(self.adapters) < 2 or self.merged or self.undo or len(self.adapters) > 3:
            return
        names, name = self.adapters[:2], f"sum{len(self.adapters)}"
        kind = self.choose("linear", "cat", "svd", "ties", "dare_linear", "magnitude_prune")
        self.note(kind)
        words = {} if kind in ("linear", "cat", "svd") else {"density": 0.6}

        def call(model: Any) -> None:
            model.add_weighted_adapter(names, [0.7, 0.4], name, combination_type=kind, **words)
            model.set_adapter(name)

        self._either(call)

    def inside_disabled(self) -> None:
        """Several calls without adapters, merged or not, and one with them afterwards."""
        if not self.adapters:
            return
        batch, ids = self.batch(labels=False), self.batch()["input_ids"]
        self.placed.cache_asked = True

        def call(model: Any) -> Results:
            given, seen = self.fit(batch, model), self.seen(batch)
            with in_evaluation(model):
                with model.disable_adapter():
                    greedy(model, ids, 2)
                    with torch.no_grad():
                        first = model(**given).logits[seen].clone()
                    second = model(**given).logits[seen].detach()
                third = model(**given).logits[seen].detach()
            return {"without": first, "without, gradients on": second, "with": third}

        self.compare("without and with adapters", call)

    def words_of_forward(self) -> None:
        """``logits_to_keep`` and ``num_items_in_batch``, as trainers pass them."""
        batch = self.batch()
        keep = self.choose(0, 1, 2)
        count = self.choose(None, 7, torch.tensor(9))
        words = {} if count is None else {"num_items_in_batch": count}

        def call(model: Any) -> Results:
            out = model(**self.fit(batch, model), **words)
            logits = out.logits.detach()
            return {"loss": out.loss.detach().float().reshape(1), "outputs": logits, "logits": logits}

        if "attention_mask" not in batch:
            self.compare("words of forward", call)
        batch.pop("labels")
        if "attention_mask" not in batch and "position_ids" not in batch:
            self.compare("kept", lambda m: {"outputs": m(**batch, logits_to_keep=keep).logits.detach() + 0})

    def export(self) -> None:
        """Both are written, and the files hold the same; the models go on as they were."""
        if self.undo:
            return
        method = self.choose(*EXPORTS)
        self.note(method)
        with tempfile.TemporaryDirectory() as place:
            words = word_tokenizer()

            def write(model: Any) -> None:
                folder = Path(place) / ("plain" if model is self.plain else "fused")
                options = {} if ":" not in method else {"check": False}
                with_methods(model, base_of(model) if model is not base_of(model) else None)
                model.save_pretrained_merged(folder, words, save_method=method, **options)

            if self._either(write):
                self._same_files(Path(place))

    def save_base(self) -> None:
        """``save_pretrained`` of the model inside."""
        if self.undo:
            return
        with tempfile.TemporaryDirectory() as place:

            def write(model: Any) -> None:
                base_of(model).save_pretrained(Path(place) / ("plain" if model is self.plain else "fused"))

            if self._either(write):
                self._same_files(Path(place))

    def _same_files(self, place: Path) -> None:
        found: list[dict[str, Tensor]] = [{}, {}]
        for tensors, name in zip(found, ("plain", "fused"), strict=True):
            for file in sorted((place / name).rglob("*.safetensors")):
                tensors.update(load_file(file))
        a, b = found
        if not a or a.keys() != b.keys():
            raise Differs(f"names in files {sorted(a.keys() ^ b.keys())[:3]}")
        for name, tensor in a.items():
            if not torch.equal(tensor.float().nan_to_num(), b[name].float().nan_to_num()):
                raise Differs(f"{name} has other values in the file")
