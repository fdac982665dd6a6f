"""The first decoder layers of a forward pass, computed once and kept, for passes that differ only after them.

`KeptLayers.record` notes what decoder layers give in one pass. `KeptLayers.skipping` then lets the model run
with its first layers replaced by what they gave: embeddings, masks and rotary positions are the host's
own, the remaining layers compute as ever, so that the result has the bits of a whole pass, provided that a
layer depends on those before it through its input alone. `KeptLayers.check` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fewbits.errors import Unsupported
from fewbits.host.spec import layer_names, spec_for
from fewbits.models.stochastic.attention import stochastic_attention_of


class _Kept(nn.Module):
    """Stands where a decoder layer stood: gives what was kept, and otherwise answers as the layer does."""

    def __init__(self, layer: nn.Module, output: Any, on_call: Callable[[], None]) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not a submodule: nothing walks into it
        self.__dict__["_output"], self.__dict__["_on_call"] = output, on_call

    def forward(self, *_: Any, **__: Any) -> Any:
        self.__dict__["_on_call"]()
        return self.__dict__["_output"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class KeptLayers:
    """What the decoder layers of one model gave in one pass.

    Attributes:
        names: full names of the decoder layers, in order.
        outputs: what a layer gave, by its number; those that are never needed are not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = list(layer_names(model, spec_for(model)))
        self.outputs: dict[int, Any] = {}

    def layer_of(self, name: str) -> int:
        """The number of the decoder layer that a module of this full name belongs to.

        Raises:
            Unsupported: to none.
        """
        for i, layer in enumerate(self.names):
            if name.startswith(f"{layer}."):
                return i
        raise Unsupported(f"{name} lies in no decoder layer, so nothing before it can be kept.")

    @contextmanager
    def record(self, starts: set[int]) -> Iterator[None]:
        """Within it, keep what a pass needs that starts at one of these layers."""
        self.outputs = {}

        def keep(number: int) -> Callable[[Any, Any, Any], None]:
            def hook(_: Any, __: Any, output: Any) -> None:
                self.outputs[number] = output

            return hook

        handles = [
            self.model.get_submodule(self.names[start - 1]).register_forward_hook(keep(start - 1))
            for start in starts
            if start > 0
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def skipping(self, start: int) -> Iterator[None]:
        """Within it, layers before number ``start`` give what they gave in the recorded pass."""
        if start == 0:
            yield
            return
        layers: Any = self.model.get_submodule(self.names[0].rpartition(".")[0])
        whole, output = [layers[i] for i in range(start)], self.outputs[start - 1]
        try:
            for i, layer in enumerate(whole):
                layers[i] = _Kept(layer, output, self._seen(i))
            yield
        finally:
            for i, layer in enumerate(whole):
                layers[i] = layer

    def _seen(self, number: int) -> Callable[[], None]:
        """Tell stochastic attention that this layer's products were computed, in the recorded pass."""
        state = stochastic_attention_of(self.model)
        inside = [] if state is None else [n for n in state.wanted if n.startswith(f"{self.names[number]}.")]

        def on_call() -> None:
            if state is not None:
                state.ran.update(inside)

        return on_call

    def check(self, run: Callable[[], Any]) -> None:
        """Compare a whole pass with one that starts at its last layer.

        Args:
            run: a pass; gives figures that can be compared with ``==``.

        Raises:
            Unsupported: they differ, so this model's layers share more than their input.
        """
        last = len(self.names) - 1
        with self.record({last}):
            whole = run()
        with self.skipping(last):
            again = run()
        if whole != again:
            raise Unsupported(
                f"the layers of this {type(self.model).__name__} depend on more than the layer before "
                "them, so none can be computed once and kept; give reuse=False."
            )
        self.outputs = {}
