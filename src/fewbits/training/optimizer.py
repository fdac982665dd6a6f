"""`AdamW8bit`: AdamW whose moments take two bytes a parameter instead of eight.

How a step is computed is in `fewbits.kernels.adamw`: on a GPU one launch for all parameters of a group, on a
CPU the definition. The class is an ordinary torch optimizer: schedules, gradient scalers (a step whose
``found_inf`` is set changes nothing, without waiting for the device) and ``state_dict`` work as with torch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.adamw import AdamWOptions, Moments, adamw

_PARTS = ("m", "v", "m_scales", "v_scales")
_MIX = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
)  # odd numbers: distinct seeds stay distinct


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments of 8 bits in blocks of 256; small tensors keep theirs in float32.

    Args:
        params: parameters or groups of them, as for every torch optimizer.
        lr: learning rate.
        betas: shares of the first and the second moment that are kept in a step.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        stochastic_rounding: round bfloat16 parameters stochastically, so that small updates are not lost.
        seed: of that rounding.
        min_8bit_size: tensors of fewer values keep their moments in float32.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
        min_8bit_size: int = 4096,
    ) -> None:
        for name, value, bad in (
            ("lr", lr, lr < 0),
            ("betas", betas, not all(0 <= b < 1 for b in betas)),
            ("eps", eps, eps < 0),
            ("weight_decay", weight_decay, weight_decay < 0),
        ):
            if bad:
                raise BadInput(f"{name}={value} is out of range; betas are in [0, 1), the others at least 0.")
        self.stochastic_rounding, self.seed, self.min_8bit_size = stochastic_rounding, seed, min_8bit_size
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; gives the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            by_step: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
            for param in group["params"]:
                index += 1
                if param.grad is not None:
                    state = self.state[param] or self._begin(param)
                    state["step"] += 1
                    by_step[state["step"]].append((param, self._seed(state["step"], index)))
            for step, members in by_step.items():
                self._update(group, step, members)
        return loss

    def _begin(self, param: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first step."""
        if not param.is_floating_point() or param.grad is None or param.grad.is_sparse:
            raise Unsupported(
                f"AdamW8bit steps dense floating-point tensors, not {param.dtype} with a "
                f"{param.grad.layout if param.grad is not None else None} gradient; use torch's optimizers."
            )
        moments = Moments.zeros(param, packed=param.numel() >= self.min_8bit_size)
        state: dict[str, Any] = self.state[param]
        state["step"] = 0
        state.update({name: getattr(moments, name) for name in _PARTS if getattr(moments, name) is not None})
        return state

    def _seed(self, step: int, index: int) -> int:
        return (self.seed * _MIX[0] + step * _MIX[1] + index * _MIX[2]) % 2**63

    def _update(self, group: dict[str, Any], step: int, members: list[tuple[Tensor, int]]) -> None:
        params = [param for param, _ in members]
        options = AdamWOptions(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        )
        adamw(
            params,
            [param.grad for param in params],  # type: ignore[misc]
            [Moments(**{name: self.state[param].get(name) for name in _PARTS}) for param in params],
            options,
            seeds=[seed for _, seed in members] if self.stochastic_rounding else None,
            guard=self._guard(params[0].device),
        )

    def _guard(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """What a gradient scaler left here: whether to skip, and the gradients' scale."""
        found: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if found is None and scale is None:
            return None
        made = (
            torch.zeros((), device=device) if found is None else found.float(),
            torch.ones((), device=device) if scale is None else scale.float(),
        )
        return made[0].to(device), made[1].to(device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep their types: torch would cast codes to the parameter's."""
        super().load_state_dict(state_dict)
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in _PARTS:
                if saved.get(name) is not None:
                    self.state[param][name] = saved[name].to(param.device, copy=True)


__all__ = ["AdamW8bit"]
