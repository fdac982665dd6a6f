"""A trace for energy models: every stochastic product that a model computes, one JSON object a line.

    {"layer": "model.layers.0.mlp.up_proj", "op": "linear", "runs": "stochastic", "rows": 64, "macs": 6291456,
     "cycles": 201326592}

``rows`` are rows of the left operand, ``macs`` its products of two numbers, ``cycles`` their stream steps,
added up over all of them (cycles / macs is the mean stream length). ``op`` is "linear", "scores" (QK^T) or
"values" (PV). Attention is counted as it is computed, over all pairs of tokens, masked ones too. A linear
that runs INT8 has 0 cycles; products of protected channels are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.models.stochastic.attention import stochastic_attention_of
from fewbits.nn.stochastic.attention import AttentionProducts
from fewbits.nn.stochastic.linear import StochasticLinear

if TYPE_CHECKING:
    from torch import nn

Event = dict[str, Any]


class Trace:
    """Attached to one model until `detach`, or the end of its ``with`` block.

    Attributes:
        macs: products so far.
        cycles: stream steps so far.
    """

    def __init__(self, model: nn.Module, sink: Path | str | Callable[[Event], None]) -> None:
        """Attach a trace.

        Args:
            model: a model with stochastic products.
            sink: a file to append to, or what is called with each event.

        Raises:
            Unsupported: the model has no stochastic products.
        """
        self.macs = self.cycles = 0
        self._file: TextIO | None = None
        self._undo: list[Callable[[], None]] = []
        linears = {n: m for n, m in model.named_modules() if isinstance(m, StochasticLinear)}
        attention = stochastic_attention_of(model)
        if not linears and attention is None:
            raise Unsupported("this model has no stochastic products to trace; call apply_stochastic first.")
        if callable(sink):
            self._sink = sink
        else:
            self._file = Path(sink).open("a", encoding="utf-8")  # noqa: SIM115 - closed by detach
            self._sink = self._write
        for name, layer in linears.items():
            self._undo.append(layer.register_forward_pre_hook(self._linear_hook(name)).remove)
        if attention is not None:
            attention.listeners.append(self._on_attention)
            self._undo.append(lambda: attention.listeners.remove(self._on_attention))

    def detach(self) -> None:
        """Leave the model as it was, and close the file."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _write(self, event: Event) -> None:
        assert self._file is not None
        self._file.write(json.dumps(event) + "\n")

    def _emit(self, layer: str, op: str, runs: str, rows: int, macs: int, cycles: int) -> None:
        self.macs += macs
        self.cycles += cycles
        self._sink({"layer": layer, "op": op, "runs": runs, "rows": rows, "macs": macs, "cycles": cycles})

    def _linear_hook(self, name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def on_call(layer: StochasticLinear, args: tuple[Tensor, ...]) -> None:
            rows = args[0].numel() // layer.in_features
            sizes = chunk_sizes(layer)
            macs = rows * sum(sizes) * layer.out_features
            cycles = 0
            if not layer.int8 and rows:
                lengths = layer.lengths_of(args[0]).expand(rows, len(sizes)).sum(0).tolist()
                steps = sum(size * length for size, length in zip(sizes, lengths, strict=True))
                cycles = steps * layer.out_features
            self._emit(name, "linear", "int8" if layer.int8 else "stochastic", rows, macs, cycles)

        return on_call

    def _on_attention(self, name: str, q: Tensor, weights: Tensor, products: AttentionProducts) -> None:
        B, H, S, D = q.shape
        of_a_row = weights.shape[3] * D  # the same for both products
        for op, options, plan, rows in (
            ("scores", products.scores, products.scores_plan, q),
            ("values", products.values, products.values_plan, weights),
        ):
            if options is not None:
                runs = "int8" if plan.integer else "stochastic"
                steps = plan.steps(rows, options) * of_a_row
                self._emit(name, op, runs, B * H * S, B * H * S * of_a_row, steps)


def has_stochastic_products(model: nn.Module) -> bool:
    """Whether there is anything to trace."""
    linears = any(isinstance(module, StochasticLinear) for module in model.modules())
    return linears or stochastic_attention_of(model) is not None


def chunk_sizes(layer: StochasticLinear) -> list[int]:
    """Inner dimensions of each chunk that go through streams."""
    protected = [] if layer.protected is None else layer.protected.tolist()
    chunks = layer.format.chunks(layer.in_features)
    return [c.stop - c.start - sum(c.start <= p < c.stop for p in protected) for c in chunks]
