"""A short prompt's forward in one CUDA graph: the host takes longer to launch it than a GPU to run it.

A forward of 2,048 tokens through the fused layers of the 8B shape keeps an H200 busy for 26 ms, and the host
that launches it for 70. So a length of prompts that comes again is recorded: the tokens go to a place that
stays where it is, and the graph leaves keys, values and logits where the step's cache takes them over. A
prompt that is shorter than the recorded length is continued by its own last token: what stands behind a token
changes nothing in it, and what those tokens leave is not taken over. Lengths are rounded up so that a few
graphs serve many prompts; they share their memory.

Recorded is, of fused models after ``for_inference`` alone, what no host decides (`HostReads` in model_step.py
looks), for prompts without padding in a new cache; logits are compared with those of the model's own forward
when a length is recorded. A graph is forgotten when the model, its frozen weights, or values that were kept
of them are other ones than before; adapters' newest values are read where they are.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from fewbits.decoder.fuse import fused_layers, fusion_of
from fewbits.errors import Unsupported
from fewbits.formats import E4M3_ROW
from fewbits.host.attention import plain_mask
from fewbits.host.record import part_of
from fewbits.host.walks import all_modules
from fewbits.models.generation.adapters_by_row import adapter_rows
from fewbits.models.generation.model_state import state_and_writes
from fewbits.models.generation.model_step import CANNOT, casts_in_place, no_waits, why_not_modules
from fewbits.models.generation.prompt import HowToRead, ReadPrompt, read_prompt
from fewbits.models.generation.step_rotary import rope_kind
from fewbits.nn.experts import QuantizedExperts
from fewbits.recipes.stochastic_config import StochasticConfig

_MOST_TOKENS = 4096  # of all texts together: longer ones keep the device busy
_LENGTHS = (16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
_MOST_GRAPHS = 12  # each keeps keys and values of its tokens; the one that was not used for longest goes
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6}
_SIXTEEN_BITS = 0.04  # times the square root of the layers, as steps of decoding are compared


def recorded_length(length: int) -> int:
    """The length under which a prompt of ``length`` tokens is recorded; 0 where it is too long."""
    return next((size for size in _LENGTHS if size >= length), 0)


class PromptGraphs:
    """The recorded forwards of one model.

    Attributes:
        refused: why there are none, for as long as the model stays as it is.
        graphs: by texts and length, the one that was used last at the end.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, int], _PromptGraph] = {}
        self.refused = ""
        self._seen: Counter[tuple[int, int]] = Counter()
        self._key: Any = None
        self._pool: Any = None

    def read(self, model: Any, input_ids: Tensor, padding: Tensor, how: HowToRead) -> ReadPrompt | None:
        """The prompts (batch, length) through a graph; None where they are to be read as ever.

        Its keys and values stay as they are until the next call.

        Args:
            model: the model.
            input_ids: (batch, length).
            padding: (batch,) tokens in front of each.
            how: as `read_prompt` has it.
        """
        size = len(input_ids), recorded_length(input_ids.shape[1])
        plain = (how.kind, how.embedded, how.piece, how.cache) == (None, None, None, None)
        if not plain or not size[1] or size[0] * size[1] > _MOST_TOKENS or not _records(model):
            return None
        if adapter_rows(model):
            return None  # a graph holds the adapters that were active when it was recorded
        fusion = fusion_of(model)
        if fusion is not None and not fusion.for_inference:
            self.forget()  # it trains between prompts, and its memory is planned
            return None
        key = _key_of(model)
        if key != self._key:
            if self.graphs or self.refused:
                self.forget()
            self._key = key
        self._seen[size] += 1
        if self.refused or self._seen[size] < 2 or bool(padding.any()):
            return None
        try:
            graph = self._graph_of(model, size, input_ids, padding)
        except Unsupported as error:
            self.forget()
            self._key, self.refused = key, str(error)
            return None
        if graph is None:
            return None
        prompt = graph.read(input_ids)
        prompt.of_model = key[0]
        return prompt

    def _graph_of(
        self, model: Any, size: tuple[int, int], input_ids: Tensor, padding: Tensor
    ) -> _PromptGraph | None:
        """The graph for prompts of this size, recorded if it is not there; the one that is used last."""
        graph = self.graphs.pop(size, None)
        if graph is None:
            graph = self._record(model, size, input_ids, padding)
            self._key = _key_of(model)  # values of weights may be kept since
        if graph is None:
            return None
        while len(self.graphs) >= _MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[size] = graph
        return graph

    def forget(self) -> None:
        """Let go of all graphs and of their memory."""
        self.graphs.clear()
        self._seen.clear()
        self.refused, self._key, self._pool = "", None, None

    @torch.no_grad()
    def _record(
        self, model: Any, size: tuple[int, int], input_ids: Tensor, padding: Tensor
    ) -> _PromptGraph | None:
        """The graph of this length; None where these prompts' logits are not finite, which proves nothing."""
        reason = why_not_modules(model) or _why_not(model)
        if reason:
            raise Unsupported(reason)
        need = read_prompt(model, input_ids, None, padding)
        if not bool(need.logits.isfinite().all()):
            return None
        try:
            # Inference mode's tensors could not be written by a later call outside of it.
            with torch.inference_mode(False), torch.no_grad(), casts_in_place():
                graph = _PromptGraph(model, size, input_ids.device)
                graph.take(input_ids)
                graph.run()  # tables are made, which wait for the device once
                with no_waits(input_ids.device):
                    graph.run()
                if input_ids.is_cuda:
                    graph.record(self._pool)
                    self._pool = self._pool or graph.pool
        except CANNOT as error:  # for want of memory too
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = _place_of(error)
            raise Unsupported(f"the forward of a prompt cannot be recorded ({first}, {where}).") from error
        logits = graph.read(input_ids).logits
        apart = float((logits - need.logits).norm() / need.logits.norm())
        if not apart <= _ROUNDING.get(model.dtype, _SIXTEEN_BITS * len(need.cache.layers) ** 0.5):
            raise Unsupported(f"a recorded prompt's logits are {apart:.2g} apart from the model's own.")
        return graph


class _PromptGraph:
    """The forward of some prompts of one length."""

    def __init__(self, model: Any, size: tuple[int, int], device: torch.device) -> None:
        self._model = ref(model)  # what is kept for a model must not keep it
        self.ids = torch.zeros(size, dtype=torch.long, device=device)
        self.last = torch.zeros(1, dtype=torch.long, device=device)
        self.positions = torch.arange(size[1], device=device)[None].repeat(size[0], 1)
        self._mask = plain_mask(model, device)
        self.pool: Any = None
        self._graph: Any = None
        self._out: tuple[Tensor, Any] | None = None

    def take(self, input_ids: Tensor) -> None:
        """The prompts (batch, length) into their place, each continued by its last token."""
        length = input_ids.shape[1]
        self.ids[:, :length].copy_(input_ids)
        self.ids[:, length:].copy_(input_ids[:, -1:].expand(-1, self.ids.shape[1] - length))
        self.last.fill_(length - 1)

    def run(self) -> tuple[Tensor, Any]:
        """Logits (batch, vocabulary) behind the last tokens, and the cache, launch by launch."""
        from transformers import DynamicCache

        cache = DynamicCache()  # without a config every layer keeps all tokens
        model = self._model()
        assert model is not None
        out = model(
            input_ids=self.ids,
            attention_mask=self._mask,
            position_ids=self.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=self.last,
        )
        return out.logits[:, -1].float(), cache

    def record(self, pool: Any) -> None:
        """Record `run`, in the memory of other graphs, if there are any."""
        with torch.cuda.device(self.ids.device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self.run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._out = self.run()
            self._graph, self.pool = graph, graph.pool()

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> ReadPrompt:
        """What the model makes of these prompts (batch, length); the next call overwrites it."""
        from transformers import DynamicCache

        self.take(input_ids)
        if self._graph is not None:
            self._graph.replay()
        logits, whole = self.run() if self._out is None else self._out
        cache, length = DynamicCache(), input_ids.shape[1]
        for i, layer in enumerate(whole.layers):
            cache.update(layer.keys[:, :, :0], layer.values[:, :, :0], i)
            cache.layers[i].keys, cache.layers[i].values = (
                layer.keys[:, :, :length],
                layer.values[:, :, :length],
            )
        return ReadPrompt(logits.clone(), cache)


def _place_of(error: BaseException) -> str:
    """Where an error began, for somebody who looks for its cause."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"in line {frame.lineno} of {Path(frame.filename).name}"


def _records(model: Any) -> bool:
    """Whether the model is where a graph helps."""
    return bool(model.device.type == "cuda")


def _why_not(model: nn.Module) -> str:
    if rope_kind(model) in ("dynamic", "longrope"):
        return f"the rotary embedding {rope_kind(model)!r} depends on the length."
    if any(isinstance(module, QuantizedExperts) and module.keeps_values for module in all_modules(model)):
        return "its experts keep decoded weights for training."
    formats = {
        getattr(getattr(module, "operands", None), "activation", None) for module in all_modules(model)
    }
    if part_of(model, StochasticConfig) is not None or formats - {None, E4M3_ROW}:
        return "a token's products depend on those beside it."
    if len({p.device for p in model.parameters()}) != 1:
        return "it lies on several devices."
    return ""


def _key_of(model: Any) -> tuple[Any, ...]:
    """Equal while the model, its frozen weights and what is kept of them are the same."""
    state, writes = state_and_writes(model)
    return state, writes, tuple(layer.parts.values_kept for layer in fused_layers(model))
