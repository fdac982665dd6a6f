"""`SplitExperts`: the experts of a decoder layer as linears of their own, expert by expert.

transformers keeps all experts of a layer in two 3-D parameters. What is chosen, measured or prepared for each
linear (stream lengths, INT8, smoothing) has no place there. This module takes the host's place, with the same
call and the same sums, and gives every expert e its linears under the names that checkpoints have:

    e.gate_proj, e.up_proj (H -> I each, or up_proj alone where there is no gate)        e.down_proj (I -> H)

    y_t = sum over the experts e of t, ascending: c_te * down_e(act(gate_e x_t) * up_e x_t)

The linears' weights are parts of the host's parameters, so splitting takes no memory. `host` puts them
together again, which does (one layer's weights at a time).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported


class SplitExperts(nn.Module):
    """The experts of one layer; see the module's text.

    Attributes:
        names: of each expert's linears, in the order of its products.
    """

    def __init__(self, host: Any) -> None:
        """Take the place of ``host``, whose parameters hold what these linears read.

        Raises:
            Unsupported: its experts cannot be linears of their own (`why_not_split`).
        """
        super().__init__()
        reason = why_not_split(host)
        if reason is not None:
            raise Unsupported(f"these experts cannot be split into linears: {reason}.")
        parts = _parts_of(host)
        self.names = (*parts, "down_proj")
        self.act_fn = host.act_fn
        self.count = int(host.down_proj.shape[0])
        for expert in range(self.count):
            block = nn.Module()
            for name, weight in (*parts.items(), ("down_proj", host.down_proj)):
                block.add_module(name, _linear(weight[expert]))
            self.add_module(str(expert), block)
        shell = copy.copy(host)
        shell._parameters = {}
        # Not a child: it has no parameters, and its class and sizes alone are wanted.
        object.__setattr__(self, "shell", shell)
        self.train(host.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows (T, H), chosen experts (T, k) and their weights (T, k) to (T, H)."""
        out = torch.zeros_like(hidden_states)
        for expert in hit_experts(top_k_index, self.count):
            rows, places = torch.where(top_k_index == expert)
            linears = self.get_submodule(str(expert))
            x = hidden_states[rows]
            inner = [linears.get_submodule(name)(x) for name in self.names[:-1]]
            z = self.act_fn(inner[0]) * inner[1] if len(inner) == 2 else self.act_fn(inner[0])
            y = linears.get_submodule("down_proj")(z) * top_k_weights[rows, places, None]
            out.index_add_(0, rows, y.to(out.dtype))
        return out

    def host(self) -> nn.Module:
        """A module of the host's class with these weights in its 3-D parameters; for plain linears only.

        Raises:
            Unsupported: a linear is converted.
        """
        weights: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for name, into in weights.items():
            for expert in range(self.count):
                linear = self.get_submodule(f"{expert}.{name}")
                if type(linear) is not nn.Linear:
                    raise Unsupported(f"expert {expert}'s {name} is converted; restore the model first.")
                into.append(linear.weight.detach())
        trainable = self.get_submodule("0.down_proj").weight.requires_grad
        down = torch.stack(weights.pop("down_proj"))
        first = torch.stack([torch.cat(parts) for parts in zip(*weights.values(), strict=True)])
        plain: Any = copy.copy(vars(self)["shell"])
        plain._parameters = {}
        for name, tensor in (
            ("gate_up_proj" if len(weights) == 2 else "up_proj", first),
            ("down_proj", down),
        ):
            plain.register_parameter(name, nn.Parameter(tensor, requires_grad=bool(trainable)))
        plain.train(self.training)
        return plain  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{self.count} experts of {', '.join(self.names)}"


def hit_experts(top_k_index: Tensor, count: int) -> list[int]:
    """The experts in ``top_k_index`` (T, k) int64, ascending; numbers from ``count`` on stand for none."""
    return [expert for expert in top_k_index.unique().tolist() if expert < count]


def why_not_split(host: Any) -> str | None:
    """Why a module's experts cannot be linears of their own; None if they can.

    Args:
        host: holds experts as transformers does: 3-D parameters (E, outputs, inputs).
    """
    from transformers.integrations import moe

    if getattr(host, "is_transposed", False) or getattr(host, "has_bias", False):
        return "their weights are stored turned round, or they have biases"
    if getattr(host, "has_post_expert_norm", False):
        return "each of them ends in a norm"
    plain = getattr(moe, "_default_apply_gate", None)
    if getattr(host, "has_gate", True) and getattr(type(host), "_apply_gate", None) is not plain:
        return "their gate is not the activation of one half times the other"
    if not callable(getattr(host, "act_fn", None)):
        return "their activation is not known"
    return None


def _parts_of(host: Any) -> dict[str, Tensor]:
    if not getattr(host, "has_gate", True):
        return {"up_proj": host.up_proj}
    gate, up = host.gate_up_proj.chunk(2, dim=1)
    return {"gate_proj": gate, "up_proj": up}


def _linear(weight: Tensor) -> nn.Linear:
    """A linear of this weight (outputs, inputs), which stays where it is."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    return linear
