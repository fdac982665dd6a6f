"""One step of decoding by a model's own modules, in one CUDA graph: for families without kernels of a step.

A small model's forward for one token is some hundred launches, and the host gives them out more slowly than a
GPU runs them. Here everything that changes from token to token (the tokens, their positions, keys and values,
masks) lies in tensors that stay where they are (fixed_cache.py), so that the step is recorded once for each
number of texts and replayed at every position. What the modules compute is theirs: sandwich norms, soft caps,
windows, experts, adapters; only packed linears go through decoding's kernels (module_products.py). It stands
in `DecodeStep`'s place, behind the same loop.

Nothing is taken on trust. `why_no_model_step` says what is known not to work; `HostReads` finds what waits
for the device or depends on its values, and such a step is not recorded; and two tokens through both ways are
compared before the first text (`ModelStep.difference`). Elsewhere than on a GPU the step runs as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.host.unwrap import unwrap
from fewbits.host.walks import all_modules
from fewbits.models.generation.adapters_by_row import adapter_rows
from fewbits.models.generation.fixed_cache import fixed_cache, fixed_layers, masks
from fewbits.models.generation.fixed_packed import FixedPackedLayer
from fewbits.models.generation.live.slots import kinds_of
from fewbits.models.generation.model_state import is_spread
from fewbits.models.generation.module_products import ModuleProducts
from fewbits.models.generation.products import products_in_16_bits
from fewbits.models.generation.step_attention import heads_in_groups
from fewbits.models.generation.step_experts import experts_without_the_host
from fewbits.models.generation.step_rotary import rope_kind
from fewbits.nn.split_experts import SplitExperts

_WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "aten.equal.", "unique", "masked_select")
TOKENS_TO_PROVE = 4  # at most: so many places a step has behind a prompt that it is compared for
CANNOT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError)


def why_no_model_step(model: Any) -> str:
    """Why a model's own modules cannot be recorded as a step; "" if nothing speaks against trying."""
    base: Any = unwrap(model)
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    if config is not model.config:
        return "it reads more than text"
    if getattr(base, "_is_stateful", False):
        return "it keeps something else than keys and values by position"
    if "past_key_values" not in inspect.signature(type(base).forward).parameters:
        return "its forward takes no keys and values"
    if rope_kind(model) in ("dynamic", "longrope"):
        return f"the rotary embedding {rope_kind(model)!r} depends on the length"
    try:
        kinds_of(config)
    except Unsupported as error:
        return str(error).rstrip(".")
    if adapter_rows(model):
        return "adapters are chosen by row"
    reason = why_not_modules(model)
    if reason:
        return reason
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return "the model is not on one GPU"
    return ""


def why_not_modules(model: nn.Module) -> str:
    """What in a model a graph of its modules would get wrong; "" if nothing is known."""
    for name, module in model.named_modules():
        if isinstance(module, SplitExperts):
            return "the host asks which of its experts have rows"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if hasattr(module, "_hf_hook") or not all(map(_is_of_no_consequence, hooks)):
            return f"{name or 'the model'} has hooks, which a CUDA graph would not call"
    if is_spread(model):
        return "its weights are spread over several processes"
    return ""


def _is_of_no_consequence(hook: Any) -> bool:
    """Whether a hook does nothing to a token that is decoded: ours, transformers' and PEFT's own."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith(("fewbits.", "transformers.", "peft."))


class HostReads(TorchDispatchMode):
    """Raises `Unsupported` for an operation that waits for a device, or depends on what is there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself, if it is none of these."""
        here = any(isinstance(x, Tensor) and x.device == self.device for x in args)
        if here and any(name in str(func) for name in _WAITING):
            raise Unsupported(f"{_module_at_work()} asks the host for values ({func}).")
        return func(*args, **(kwargs or {}))


def _module_at_work() -> str:
    """The class of the innermost module whose forward is running."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return type(module).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return "a module"


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Let what would wait for the device raise instead."""
    with HostReads(device):
        if device.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def casts_in_place() -> Iterator[None]:
    """Let autocast cast weights where they are used: the copies that it keeps go when its block ends."""
    before = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class ModelStep:
    """The step of one model for a number of texts; see `DecodeStep`, whose place it takes.

    Attributes:
        batch: texts of the call at hand, at most `rows`.
        rows: for which there is room.
        room: tokens of each, prompt included.
        graphs: recorded steps, by the number of texts.
        kv_cache: in which formats keys and values are kept; None: as the model computes them.
        packed: the layers that are, by number.
        adapters, ranks: as a `DecodeStep` has them; here there are none.
    """

    adapters: tuple[str, ...] = ()
    ranks: None = None

    def __init__(
        self, model: Any, *, batch: int, room: int, like: Any, kv_cache: KVCache | None = None
    ) -> None:
        """Make room.

        Args:
            model: a causal language model for which `why_no_model_step` has nothing to say.
            batch: texts.
            room: tokens of each, prompt included.
            like: a cache that the model has filled, from which sizes and dtypes are taken.
            kv_cache: the formats of its packed layers.

        Raises:
            Unsupported: the cache is not one of keys and values by position.
        """
        self.rows, self.batch, self.room = batch, batch, room
        self._model = ref(model)  # what is kept for a model must not keep it
        self.kv_cache = kv_cache
        self._kinds, self._window = kinds_of(model.config.get_text_config())
        self._layers = fixed_layers(like, batch, room)
        self.packed = {
            i: layer for i, layer in enumerate(self._layers) if isinstance(layer, FixedPackedLayer)
        }
        self.device = self._layers[0].keys.device
        self._cache = fixed_cache(self._layers)
        self._places = torch.arange(room, device=self.device)
        self._tokens, self._position, self._first = (
            torch.zeros(batch, dtype=torch.long, device=self.device) for _ in range(3)
        )
        # Losses of routers are of the masks that training has.
        has_losses = getattr(model.config, "output_router_logits", None) is not None
        self._words = {"output_router_logits": False} if has_losses else {}
        self._products = ModuleProducts(model, self.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def tokens(self) -> Tensor:
        """(batch,) int64: what the next step takes in."""
        return self._tokens[: self.batch]

    @property
    def position(self) -> Tensor:
        """(batch,) int64: where it goes; `advance` counts on."""
        return self._position[: self.batch]

    @property
    def first(self) -> Tensor:
        """(batch,) int64: the first position of each text that is seen."""
        return self._first[: self.batch]

    @property
    def keys(self) -> list[Tensor]:
        """Of each layer (batch, heads, room, size)."""
        return [layer.keys[: self.batch] for layer in self._layers]

    @property
    def values(self) -> list[Tensor]:
        """Of each layer (batch, heads, room, size)."""
        return [layer.values[: self.batch] for layer in self._layers]

    def takes(self, batch: int) -> bool:
        """Whether it has room for so many texts; it is theirs from here on."""
        if batch <= self.rows:
            self.batch = batch
        return batch <= self.rows

    @torch.no_grad()
    def refresh(self) -> None:
        """Let nothing of earlier calls stay: what is hidden counts with weight zero, and zero by NaN is NaN.

        The modules read adapters where they are.
        """
        for layer in self._layers:
            layer.clear()

    def choose(self, rows: Sequence[str]) -> None:
        """Nothing to do: every row has the active adapter."""

    @torch.no_grad()
    def run(self) -> Tensor:
        """One step, launch by launch; logits (batch, vocabulary) float32. The position stays."""
        position, first = self.position, self.first
        places = position[:, None, None, None]
        for layer in self._layers:
            layer.places = places
            if isinstance(layer, FixedPackedLayer):
                layer.begin = first[:, None, None, None]
        kinds = sorted(self._kinds)
        dtype = self._layers[0].keys.dtype
        model = self._model()
        assert model is not None
        ways = products_in_16_bits(model), experts_without_the_host(model), heads_in_groups(model)
        with ways[0], ways[1], ways[2], self._products.in_place():
            out = model(
                input_ids=self.tokens[:, None],
                position_ids=(position - first)[:, None],
                attention_mask=masks(kinds, self._places, position, first, self._window, dtype),
                past_key_values=self._cache,
                use_cache=True,
                **self._words,
            )
        return out.logits[:, -1].float()  # type: ignore[no-any-return]

    def advance(self) -> Tensor:
        """One step (batch, vocabulary), then the position moves on; on a GPU a CUDA graph (`record`)."""
        if self.device.type != "cuda":
            logits = self.run()
            self.position.add_(1)
            return logits
        self.record()
        graph, logits = self.graphs[self.batch]
        graph.replay()
        return logits

    @torch.no_grad()
    def record(self) -> None:
        """Record the step for the number of texts at hand, unless it is; it does not run, and nothing moves.

        Raises:
            Unsupported: something in the step waits for the host, or cannot be recorded.
        """
        if self.batch in self.graphs:
            return
        try:
            with casts_in_place():
                self.run()  # products by kernels are prepared, which reads scales
                with no_waits(self.device):
                    self.run()
                if self.device.type == "cuda":
                    self.graphs[self.batch] = self._recorded()
        except torch.OutOfMemoryError:
            raise
        except CANNOT as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Unsupported(f"its modules cannot be recorded in a CUDA graph ({first}).") from error

    def _recorded(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        with torch.cuda.device(self.device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self.run()  # kernels are compiled; it writes what the graph will write again
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads (of a data loader that pins memory, of NCCL) go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = self.run()
                self.position.add_(1)
        return graph, logits

    @torch.no_grad()
    def difference(self, model: Any, cache: Any, attention_mask: Tensor | None) -> float:
        """The largest relative difference of some tokens' logits to those of the model's own forward.

        The second one stands at another position: a number of the host's would show. Where experts are
        chosen, rounding may turn over a choice that is nearly a tie, which makes a token's logits others in
        either way: then of each text the second smallest difference of four tokens counts.

        Args:
            model: the model.
            cache: its own cache of what stands before; the model's forward adds the tokens to it.
            attention_mask: (batch, tokens before and one more), or None.

        Raises:
            Unsupported: the model's forward does not take what a step gives it.
        """
        chooses = any(hasattr(module, "is_transposed") for module in all_modules(model))
        count, by_token, mask = TOKENS_TO_PROVE if chooses else 2, [], attention_mask
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None:  # of learned positions there are no more
            count = max(min(count, context - int((self.position - self.first).max())), 1)
        for _ in range(count):
            ours = _tried(self.run)
            out = model(
                input_ids=self.tokens[:, None],
                position_ids=(self.position - self.first)[:, None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **self._words,
            )
            theirs = out.logits[:, -1].float()
            rows = -1 if chooses else None  # by text, or all of them
            by_token.append((ours - theirs).norm(dim=rows) / theirs.norm(dim=rows))
            self.position.add_(1)
            self.tokens.copy_(theirs.argmax(-1))
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        self.position.sub_(count)
        apart = torch.stack(by_token)
        return float(apart.sort(dim=0).values[:2][-1].max() if chooses else apart.max())


def _tried(run: Any) -> Tensor:
    try:
        return run()  # type: ignore[no-any-return]
    except torch.OutOfMemoryError:
        raise
    except CANNOT as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unsupported(
            f"the model's forward does not take fixed places for its keys ({first})."
        ) from error
