"""Several adapters in one batch, chosen by row: PEFT's ``adapter_names`` of a call, in a step of decoding.

The adapters of a linear become one branch of all their ranks side by side,

    y = x W^T + (mask * (x A^T)) B^T        A (sum of r, K), B (N, sum of r), mask (rows, sum of r)

where a row's mask is the scaling of its own adapter in that adapter's columns, and zero elsewhere. Which row
has which adapter is a value of the mask, so that one recorded step serves every choice among its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.decoder.parts import part_of
from fewbits.decoder.projection import Branch, Part
from fewbits.errors import Unsupported
from fewbits.host.walks import all_modules
from fewbits.nn.tensor_group import WholeLinear

BASE = "__base__"  # PEFT's name for none


@dataclass(frozen=True)
class Mixed(Branch):
    """The branches of several adapters side by side; ``a`` and ``b`` hold all, ``scaling`` stands in a mask.

    Attributes:
        of: each by its adapter's name, in the order of their columns.
    """

    of: tuple[tuple[str, Branch], ...] = ()


@dataclass
class AdaptersByRow:
    """The adapters of a step, and whose turn it is in each row.

    Attributes:
        names: of the adapters that a row can have, `BASE` among them.
    """

    names: tuple[str, ...]
    _masks: list[tuple[Tensor, tuple[Mixed, ...]]] = field(default_factory=list)
    _tables: dict[int, Tensor] = field(default_factory=dict)  # of each mask, made at the first choice

    def part(self, module: Any, path: str) -> Part:
        """A linear with the branches of all its adapters.

        Raises:
            Unsupported: an adapter that is more than a plain LoRA, or that is merged.
        """
        part, _ = part_of(module.base_layer, path)
        branches = tuple(_branches(module, path, self.names))
        if not branches:
            return part
        a = torch.cat([branch.a.detach() for _, branch in branches])
        b = torch.cat([branch.b.detach() for _, branch in branches], dim=1)
        return Part(part.weight, part.bias, Mixed(a, b, 1.0, branches))

    def mask(self, branches: Sequence[Branch], rows: int, device: torch.device) -> Tensor:
        """A mask (rows, all ranks) float32 of the branches of one product; `choose` fills it."""
        mixed = tuple(branch for branch in branches if isinstance(branch, Mixed))
        ranks = sum(len(branch.a) for branch in mixed)
        mask = torch.zeros(rows, ranks, dtype=torch.float32, device=device)
        self._masks.append((mask, mixed))
        return mask

    @torch.no_grad()
    def choose(self, rows: Sequence[str]) -> None:
        """Give each row (one name for each) its adapter from now on."""
        which = [self.names.index(row) if row in self.names else len(self.names) for row in rows]
        chosen: Tensor | None = None
        for i, (mask, mixed) in enumerate(self._masks):
            if i not in self._tables:
                self._tables[i] = self._table(mixed, mask.device)
            if chosen is None:
                chosen = torch.tensor(which, device=mask.device)
            torch.index_select(self._tables[i], 0, chosen, out=mask)

    def _table(self, mixed: Sequence[Mixed], device: torch.device) -> Tensor:
        """A row of the mask (adapters and one more, all ranks) for each adapter, and one of zeros."""
        ranks = [len(own.a) for branch in mixed for _, own in branch.of]
        table = [
            [own.scaling if own_name == name else 0.0 for branch in mixed for own_name, own in branch.of]
            for name in (*self.names, None)
        ]
        columns = torch.tensor(table, dtype=torch.float32).repeat_interleave(torch.tensor(ranks), dim=1)
        return columns.to(device)


def adapter_rows(model: nn.Module) -> tuple[str, ...]:
    """The adapters by row that PEFT's call of ``generate`` asks for; () if every row has the active one."""
    for module in all_modules(model):
        if "lora_A" in module._modules:
            hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if names_adapters(hook)]
            # Those of a batch that lives name none while its caller does something else.
            return next((tuple(n) for hook in hooks if (n := hook.keywords["adapter_names"])), ())
    return ()


def drop_adapter_rows(model: nn.Module) -> None:
    """Take away the hooks of a call with ``adapter_names`` that ended with an error: PEFT leaves them.

    Every later call would have these adapters by row, whatever it asks for. Hooks of a batch that lives, in
    the midst of which the call was made, stay.
    """
    for module in all_modules(model):
        for key in [key for key, hook in module._forward_pre_hooks.items() if _is_of_peft(hook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def names_adapters(hook: Any) -> bool:
    """Whether a hook is the one by which PEFT hands ``adapter_names`` to its layers."""
    return isinstance(hook, partial) and "adapter_names" in hook.keywords


def _is_of_peft(hook: Any) -> bool:
    return names_adapters(hook) and hook.func.__module__.startswith("peft.")


def _branches(module: Any, path: str, names: Sequence[str]) -> Iterator[tuple[str, Branch]]:
    """The branches of one linear, by name."""
    from fewbits.nn.lora import LoRALinear

    if type(module) is not LoRALinear or module.merged or module.disable_adapters or module.lora_variant:
        raise Unsupported(f"the adapters of {path}, chosen by row, are merged, or more than plain LoRA.")
    for name in names:
        if name not in module.lora_A:
            continue
        a, b = module.lora_A[name], module.lora_B[name]
        if module.lora_bias[name] or any(type(side) not in (nn.Linear, WholeLinear) for side in (a, b)):
            raise Unsupported(f"the adapter {name!r} of {path}, chosen by row, is more than plain LoRA.")
        yield name, Branch(a.weight, b.weight, module.scaling[name])
