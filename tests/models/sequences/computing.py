"""Calls of a `Pair` that give numbers: losses, gradients, logits, hidden states."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from tests.models.sequences.exact import Results, roundoff
from tests.models.sequences.expected import Differs
from tests.models.sequences.setup import Setup
from tests.models.tiny import VOCAB


class Stop(Exception):
    """What a hook of a sequence raises in the middle of a pass."""


def stop(*_: Any) -> None:
    """A hook that raises."""
    raise Stop


def base_of(model: Any) -> Any:
    """The model inside PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class ComputingCalls:
    """Calls that compare; `tests.models.sequences.pair.Pair` has the models."""

    setup: Setup
    plain: Any
    fused: Any
    both: tuple[Any, Any]
    role: str
    adapters: list[str]
    dtype: torch.dtype
    merged: bool
    drops: bool
    placed: Any
    random: Any
    choose: Callable[..., Any]
    note: Callable[[str], None]
    batch: Callable[..., dict[str, Any]]
    fit: Callable[..., dict[str, Any]]
    seen: Callable[..., Any]
    compare: Callable[..., Results]
    copies: Callable[..., Any]
    each: Callable[..., Any]
    magnitudes: Callable[[Any], Results]

    # 1. Gradients.

    def gradients(self, what: str, call: Callable[[Any], Tensor], *, u: float | None = None) -> None:
        """Compare a loss that ``call`` gives after its backward passes, and all gradients that are there.

        The fused model then takes the plain one's gradients, to stay equal.
        """
        self.clear_gradients()

        def computed(model: Any) -> Results:
            results = {"loss": call(model).detach().float().reshape(1)}
            if self.role != "fused" and self._logits is not None:
                results["logits"] = self._logits
            of = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            results |= {f"gradient of {name}": gradient for name, gradient in of.items()}
            return {**results, **self.magnitudes(model)}

        self.compare(what, computed, u=u)
        grads = {n: p.grad for n, p in self.plain.named_parameters()}
        for name, p in self.fused.named_parameters():
            p.grad = None if grads[name] is None else grads[name].clone()

    _logits: Tensor | None = None

    def clear_gradients(self) -> None:
        """By None, or by zeros."""
        to_none = self.random.random() < 0.7
        for model in self.both:
            model.zero_grad(set_to_none=to_none)

    def loss_of(self, model: Any, batch: dict[str, Any], **words: Any) -> Tensor:
        """The loss; what its bound is made of is noted."""
        out = model(**self.fit(batch, model), **words)
        if self.role != "fused":
            self._logits = out.logits.detach().float()
        loss: Tensor = out.loss
        return loss

    def backward(self, loss: Tensor) -> Tensor:
        """The loss, after its backward pass if it has one."""
        if loss.requires_grad:
            loss.backward()
        return loss

    def step(self) -> None:
        """An optimizer's, of both; not with gradients that are not finite."""
        kind = self.choose("by hand", "by hand", "fused", "foreach")
        self.note(kind)
        for model in self.both:
            trained = [p for p in model.parameters() if p.grad is not None]
            if not trained or not all(bool(torch.isfinite(p.grad).all()) for p in trained):
                continue
            if kind == "by hand":
                with torch.no_grad():
                    for p in trained:
                        p.sub_(p.grad.clamp(-1, 1), alpha=0.02)  # type: ignore[union-attr]
            else:
                words = {"fused": True} if kind == "fused" else {"foreach": True}
                torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0, **words).step()

    def train(self) -> None:
        """A step."""
        batch, times = self.batch(), self.choose(1, 1, 2)

        def call(model: Any) -> Tensor:
            return self.backward(sum(self.loss_of(model, batch) for _ in range(times)))  # type: ignore[arg-type]

        self.gradients("training", call)
        self.step()

    def accumulate(self) -> None:
        """Gradients of two batches, of different lengths, and a step."""
        first, second, kept = self.batch(), self.batch(), self.choose(True, False)
        self.note("first both forward passes" if kept else "one after the other")

        def call(model: Any) -> Tensor:
            if not kept:
                return self.backward(self.loss_of(model, first)) + self.backward(self.loss_of(model, second))
            losses = [self.loss_of(model, first), self.loss_of(model, second)]
            return self.backward(losses[0]) + self.backward(losses[1])

        self.gradients("accumulated", call)
        self.step()

    def train_on_nothing(self) -> None:
        """All labels are masked."""
        batch = self.batch()
        batch["labels"] = torch.full_like(batch["labels"], -100)
        count = self.choose(None, 5)
        words = {} if count is None else {"num_items_in_batch": count}

        def call(model: Any) -> Tensor:
            # transformers' mean of no loss is NaN, and ours 0; the gradients of both are 0
            return self.backward(self.loss_of(model, batch, **words)).detach().nan_to_num()

        self.gradients("nothing to train on", call)
        for model in self.both:
            model.zero_grad(set_to_none=True)

    def train_cast(self) -> None:
        """Forward and backward under autocast."""
        if self.dtype != torch.float32:
            return
        batch = self.batch()
        if batch.get("attention_mask") is not None and batch["attention_mask"].dim() == 4:
            return
        narrow = torch.bfloat16

        def call(model: Any) -> Tensor:
            with torch.autocast(self.setup.device, narrow, enabled=self.role in ("plain", "fused")):
                loss = self.loss_of(model, batch)
            return self.backward(loss)

        self.gradients("under autocast", call, u=roundoff(narrow))

    def train_from_embeddings(self) -> None:
        """The gradient of the input."""
        ids = self.batch()["input_ids"]

        def call(model: Any) -> Results:
            x = model.get_input_embeddings()(ids).detach().requires_grad_()
            model(inputs_embeds=x, labels=ids).loss.backward()
            return {"input's gradient": x.grad}  # type: ignore[dict-item]

        self.compare("from embeddings", call)
        for model in self.both:
            model.zero_grad(set_to_none=True)

    def train_around_an_evaluation(self) -> None:
        """A pass without gradients between the forward and the backward pass."""
        first, second = self.batch(), self.batch(labels=False)
        mode, with_adapters = self.choose(torch.no_grad, torch.inference_mode), self.random.random() < 0.6
        with_adapters = with_adapters or not self.adapters or self.merged  # else the weights would change

        def call(model: Any) -> Tensor:
            loss = self.loss_of(model, first)
            with mode(), contextlib.nullcontext() if with_adapters else model.disable_adapter():
                model(**self.fit(second, model))
            return self.backward(loss)

        self.gradients("around an evaluation", call)
        self.step()

    def train_with_a_cache(self) -> None:
        """Somebody asks for a cache while training: own forwards, and the same numbers."""
        batch = self.batch()
        recomputes = any(getattr(m, "gradient_checkpointing", False) for m in self.fused.modules())
        if "position_ids" in batch or recomputes:  # transformers fills none then
            return
        self.placed.cache_asked = True
        self.gradients("with a cache", lambda m: self.backward(self.loss_of(m, batch, use_cache=True)))

    def train_in_a_thread(self) -> None:
        """Everything in a thread of its own."""
        batch = self.batch()

        def call(model: Any) -> Tensor:
            seed = int(torch.randint(10**6, ()))

            def work() -> Tensor:
                torch.manual_seed(seed)
                return self.backward(self.loss_of(model, batch))

            (loss,) = _in_threads([work])
            return loss

        self.gradients("in a thread", call)
        self.step()

    # 2. Passes that end early.

    def stop_in_a_pass(self) -> None:
        """A hook raises, in the forward or the backward pass; the next call goes on."""
        batch = self.batch()
        where = self.choose("embedding", "layer", "inside", "norm", "backward")
        self.note(where)
        for model in self.both:
            inner = base_of(model).model
            with contextlib.ExitStack() as places, contextlib.suppress(Stop):
                if where == "inside":
                    number = len(inner.layers) - 1
                    self.placed.inside.add((number, "mlp"))
                    places.callback(self.placed.inside.discard, (number, "mlp"))
                places.callback(self._hook_of_stop(model, where).remove)
                self.role = "fused" if model is self.fused else "plain"
                self.backward(model(**self.fit(batch, model)).loss)
        self.role = "plain"
        for model in self.both:
            model.zero_grad(set_to_none=True)
        if self.random.random() < 0.5:
            self.train()

    def _hook_of_stop(self, model: Any, where: str) -> Any:
        inner = base_of(model).model
        if where == "backward":
            return inner.layers[-1].register_full_backward_pre_hook(stop)
        place = {
            "embedding": inner.embed_tokens,
            "layer": inner.layers[-1],
            "inside": inner.layers[-1].mlp,
            "norm": inner.norm,
        }[where]
        return place.register_forward_pre_hook(stop)

    # 3. Logits.

    def forward_alone(self) -> None:
        """Gradients on, and no backward pass."""
        batch = self.batch()

        def call(model: Any) -> Results:
            out = model(**self.fit(batch, model), output_hidden_states=True)
            states = {f"states {i}": x[self.seen(batch)].detach() for i, x in enumerate(out.hidden_states)}
            return {**states, "outputs": out.logits[self.seen(batch)].detach()}

        self.compare("forward", call)

    def evaluate(self) -> None:
        """Logits and loss without gradients."""
        batch = self.batch(labels=self.random.random() < 0.5)
        mode, training = self.choose(torch.no_grad, torch.inference_mode), self.plain.training

        def call(model: Any) -> Results:
            model.eval()
            with mode():
                out = model(**self.fit(batch, model))
                results = {"outputs": (out.logits + 0)[self.seen(batch)].clone()}
                if "labels" in batch and self.role != "fused":
                    results["logits"] = results["outputs"]
                if "labels" in batch:
                    results["loss"] = out.loss.clone().reshape(1)
            model.train(training)
            return results

        self.compare("evaluation", call)

    def evaluate_as_it_is(self) -> None:
        """Without gradients, without a cache, in the mode that the models are in: layers run fused."""
        batch = self.batch(labels=False) | {"use_cache": False}

        def call(model: Any) -> Tensor:
            with torch.no_grad():
                return model(**self.fit(batch, model)).logits[self.seen(batch)] + 0

        self.compare("as it is", call)

    def evaluate_in_threads(self) -> None:
        """Two passes at once, as a server has them."""
        if self.drops:
            return
        batches = [self.batch(labels=False) | {"use_cache": False} for _ in range(2)]

        def call(model: Any) -> Results:
            def work(batch: dict[str, Any]) -> Tensor:
                with torch.no_grad():
                    return model(**self.fit(batch, model)).logits[self.seen(batch)] + 0

            both = _in_threads([lambda b=batch: work(b) for batch in batches])  # type: ignore[misc]
            return {"first": both[0], "second": both[1]}

        self.compare("in threads", call)

    def without_adapters(self) -> None:
        """DPO's reference pass: evaluation, or training of nothing."""
        if not self.adapters:
            return
        batch = self.batch()
        mode = self.choose(torch.no_grad, torch.enable_grad, torch.inference_mode)
        if self.setup.adapters == "dora" and mode is torch.inference_mode:
            return  # PEFT's layer unmerges there, into a weight that cannot train

        def call(model: Any) -> Results:
            with mode(), model.disable_adapter():
                loss = self.loss_of(model, batch).detach().reshape(1).clone()
            return {"loss": loss} if self.role == "fused" else {"loss": loss, "logits": self._logits}  # type: ignore[dict-item]

        self.compare("without adapters", call)

    def read_logits_late(self) -> None:
        """After the optimizer's step: they are those of before, or the fused model says why not."""
        if self.drops:
            return
        batch = self.batch()
        copies = self.copies(roundoff(self.dtype, self.setup.device))
        early = self.each(lambda m: m(**self.fit(batch, m)))
        heads = [_head_of(m).clone() for m in self.both]
        self.train()
        changed = not torch.equal(heads[0], _head_of(self.plain))

        def call(model: Any) -> Tensor:
            if self.role in ("exact", "noisy"):
                return model(**self.fit(batch, model)).logits[self.seen(batch)].detach()
            out = early[0] if self.role == "plain" else early[1]
            return out.logits[self.seen(batch)].detach()  # type: ignore[no-any-return]

        try:
            self.compare("logits read late", call, copies=copies)
        except Unsupported as error:
            self.note("refused")
            if not changed:
                raise Differs(f"the head is as it was, and: {error}") from error

    def ask_for_weights(self) -> None:
        """Attention weights, which only a layer's own forward gives."""
        if base_of(self.plain).config._attn_implementation != "eager":
            return
        batch = self.batch(labels=False) | {"use_cache": False}

        def call(model: Any) -> Tensor:
            out = model(**self.fit(batch, model), output_attentions=True)
            return out.logits[self.seen(batch)].detach()  # type: ignore[no-any-return]

        self.compare("with attention weights", call)


def _in_threads(works: list[Callable[[], Tensor]]) -> list[Tensor]:
    """What they give, run at once; the first of their errors is raised."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _head_of(model: Any) -> Tensor:
    head = base_of(model).get_output_embeddings()
    return torch.cat([p.detach().float().flatten() for p in head.parameters()])


def greedy(model: Any, ids: Tensor, length: int, **words: Any) -> Tensor:
    """Prompts (rows, tokens) and the most probable continuation."""
    words = {"attention_mask": torch.ones_like(ids), "do_sample": False, **words}
    text: Tensor = model.generate(input_ids=ids, max_new_tokens=length, **words)
    return text


def random_ids(count: int, seed: int) -> list[int]:
    """Tokens, none of them special."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@contextlib.contextmanager
def in_evaluation(model: Any) -> Iterator[None]:
    """The model in evaluation mode, and then in the mode it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
