"""The adapters of a batch's texts, handed to each forward, row by row, as PEFT's layers take them.

PEFT's ``adapter_names`` is a word of one call, for rows that stay. Texts of a batch that lives come and go,
so that here each forward is told the names of its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.models.generation.adapters_by_row import BASE

if TYPE_CHECKING:
    from torch import nn


class RowAdapters:
    """Says to a model's layers which adapter each row of the next forward has.

    Attributes:
        names: of all that rows of the call ask for, in order; (): every row has the active one.
    """

    def __init__(self, model: Any, rows: Sequence[str | None]) -> None:
        """For a call whose rows ask for these adapters; None is the active one.

        Raises:
            BadInput: there is no such adapter, or adapters are merged.
        """
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
        self._told = [m for m in model.modules() if hasattr(m, "lora_A") or hasattr(m, "modules_to_save")]
        self._now: list[str] = []
        self._active = BASE
        if any(rows):
            self._active = self._checked(rows)
        self.names = tuple(sorted({name or self._active for name in rows})) if any(rows) else ()

    def _checked(self, rows: Sequence[str | None]) -> str:
        """The active adapter."""
        there = {
            name
            for layer in self._layers
            for name in (*layer.lora_A, *getattr(layer, "lora_embedding_A", ()))
        }
        for number, name in enumerate(rows, 1):
            if name not in (None, BASE, *there):
                names = ", ".join(sorted(there)) or "none"
                raise BadInput(
                    f"row {number} asks for the adapter {name!r}; the model's are: {names} ({BASE}: none)."
                )
        if any(layer.merged for layer in self._layers):
            raise BadInput("adapters cannot be chosen by row while they are merged; unmerge them first.")
        active = {name for layer in self._layers for name in layer.active_adapters}
        if len(active) > 1 and None in rows:
            raise BadInput(f"several adapters are active ({', '.join(sorted(active))}); name one a row.")
        return next(iter(active), BASE)

    def of(self, name: str | None) -> str:
        """The name by which the layers know a row's adapter."""
        return name or self._active

    def next_rows(self, names: Sequence[str | None]) -> None:
        """The adapters of the rows of the next forwards."""
        self._now[:] = [self.of(name) for name in names] if self.names else []

    def nobodys(self) -> None:
        """The next forwards are none of the call's own, until `next_rows` says otherwise."""
        self._now.clear()

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Layers are told meanwhile."""
        hooks = []
        try:
            for layer in self._told if self.names else ():
                hook = partial(_hand_over, adapter_names=self._now)
                hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for handle in hooks:
                handle.remove()


def _hand_over(
    module: nn.Module, args: Any, kwargs: dict[str, Any], adapter_names: list[str]
) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "adapter_names": list(adapter_names)} if adapter_names else kwargs
