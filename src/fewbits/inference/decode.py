"""Greedy decoding with buffers that stay in place, so that one CUDA graph is a step, or one on each device.

A step of a small batch is some thousand launches, and the host gives them out more slowly than a GPU runs
them. `Decoding` puts everything that changes from token to token (the tokens, their position, keys and
values) into tensors that stay where they are and are written by the step itself, records the step once, and
replays it: as one graph, or, where the layers lie on several GPUs, as graphs of one GPU each with copies
between them (pieces.py). Any model of transformers will do whose layers attend to all that came before;
quantised and stochastic layers need nothing of their own. Nothing is read back to the host.

    decoding = Decoding(model, batch_size=1, max_tokens=2048)
    decoding.prefill(input_ids)
    ids = decoding.decode(128)                       # (1, 128), on the model's device

On a CPU, where there is no graph, tests compare the step with transformers' own ``generate`` and see that it
reads nothing back; on a GPU they compare the graph with launches one by one. It is timed by
benchmarks/stochastic/stochastic_decode.py, and over two GPUs by stochastic_two_gpus.py beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.inference.pieces import Gpus, Pieces
from fewbits.nn.split_experts import SplitExperts

if TYPE_CHECKING:
    from torch import nn


class Decoding:
    """One batch of sequences of equal length, a token at a time.

    Attributes:
        model: a causal language model of transformers.
        cache: transformers' StaticCache of ``max_tokens``.
        length: tokens whose keys and values are in the cache.
        tokens: (batch_size, 1) the next ones, which are not.
        without_graph: why steps are not replayed from CUDA graphs; "" if they are.
        recorded: in a few words, what a step is replayed from; "" before the first.
    """

    def __init__(self, model: Any, *, batch_size: int = 1, max_tokens: int, cuda_graph: bool = True) -> None:
        """Make room for ``max_tokens`` tokens of each sequence, prompt included.

        Raises:
            BadInput: a size below 1.
            Unsupported: layers that do not attend to all that came before.
        """
        from transformers import StaticCache

        if batch_size < 1 or max_tokens < 1:
            raise BadInput(
                f"batch_size is {batch_size} and max_tokens is {max_tokens}; both must be at least 1."
            )
        self.model, self.max_tokens, self.length = model, max_tokens, 0
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        if any(layer.is_sliding for layer in self.cache.layers):
            raise Unsupported(
                "this model has layers of a sliding window, whose cache counts on the host; use "
                "model.generate."
            )
        device = model.device
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        self._position = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._places = torch.arange(max_tokens, device=device)
        self._graph: torch.cuda.CUDAGraph | Pieces | None = None
        self.recorded = ""
        self.without_graph = "" if cuda_graph else "it was not asked for"
        if cuda_graph:
            self.without_graph = _obstacle(model)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Begin anew with a prompt (batch_size, T); the first new tokens (batch_size, 1).

        Raises:
            BadInput: another batch, or more tokens than there is room for.
        """
        batch, length = input_ids.shape
        if batch != len(self.tokens) or not 1 <= length <= self.max_tokens:
            raise BadInput(
                f"the prompt is {tuple(input_ids.shape)}; this decoding holds {len(self.tokens)} sequences "
                f"of 1 to {self.max_tokens} tokens."
            )
        self.cache.reset()
        logits = self.model(
            input_ids=input_ids.to(self.tokens.device),
            position_ids=torch.arange(length, device=self.tokens.device)[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self.tokens.copy_(logits.argmax(-1))
        self._position.fill_(length)
        self.length = length
        return self.tokens.clone()

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Take `tokens` in; the next ones (batch_size, 1), in the buffer that the next step overwrites.

        Raises:
            BadInput: no prompt yet, or no room for another token.
        """
        if not 0 < self.length < self.max_tokens:
            fact = (
                "has no prompt yet; call prefill first"
                if not self.length
                else "is full; make max_tokens larger"
            )
            raise BadInput(f"this decoding of max_tokens={self.max_tokens} {fact}.")
        if self.without_graph:
            self._advance()
        else:
            if self._graph is None:
                self._graph = self._recorded()
            self._graph.replay()
        self.length += 1
        return self.tokens

    @torch.inference_mode()
    def decode(self, num_tokens: int) -> Tensor:
        """The next ``num_tokens`` tokens (batch_size, num_tokens), the one that the prompt gave included."""
        tokens = []
        for _ in range(num_tokens):
            tokens.append(self.tokens.clone())
            if len(tokens) < num_tokens:
                self.step()
        return torch.cat(tokens, dim=1)

    def _advance(self) -> None:
        """A step: all that it reads and writes stays where it is."""
        visible = (self._places <= self._position).expand(len(self.tokens), 1, 1, -1)
        logits = self.model(
            input_ids=self.tokens,
            position_ids=self._position.expand(len(self.tokens), 1),
            attention_mask=visible,
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self.tokens.copy_(logits[:, -1:].argmax(-1))
        self._position.add_(1)

    def _recorded(self) -> torch.cuda.CUDAGraph | Pieces:
        """The graph of a step, or its pieces; it has not run, and all is as it was."""
        state = [self.tokens, self._position, *(layer.cumulative_length for layer in self.cache.layers)]
        before = [x.clone() for x in state]

        def restore() -> None:
            for x, saved in zip(state, before, strict=True):
                x.copy_(saved)

        device = self.tokens.device
        devices = dict.fromkeys([device, *(p.device for p in self.model.parameters())])
        if len(devices) > 1:
            pieces = Gpus(list(devices)).record(self._advance, restore)
            self.recorded = f"{pieces.graphs} CUDA graphs, {len(pieces.items) - pieces.graphs} copies"
            return pieces
        self.recorded = "one CUDA graph"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(2):  # kernels are compiled and tables made by the first
                    self._advance()
                    restore()
            current.wait_stream(side)
            with torch.cuda.graph(graph):
                self._advance()
        return graph


def _obstacle(model: nn.Module) -> str:
    """Why a model's step cannot be recorded in CUDA graphs; "" if it can."""
    if any(isinstance(module, SplitExperts) for module in model.modules()):
        return "the host asks which experts have rows"
    kinds = {p.device.type for p in model.parameters()}
    if kinds == {"cuda"}:
        return ""
    return "the model is not on a GPU" if "cuda" not in kinds else "a part of the model is not on a GPU"
