"""`AdamW8bit`: AdamW whose moments take two bytes a parameter instead of eight.

How a step is computed is in `fewbits.kernels.optimizer.adamw`: on a GPU one launch for all parameters of a
group, on a CPU the definition. The class is an ordinary torch optimizer: schedules, gradient scalers (a step
whose ``found_inf`` is set changes nothing, without waiting for the device), ``state_dict`` and capture in a
CUDA graph (``capturable``) work as with torch's.

Of a DTensor (FSDP2, tensor parallelism) each rank steps its own slice and keeps that slice's moments, with
blocks that begin at the slice's first value; `fewbits.training.checkpoints.sharded` saves them so that
another number of ranks can go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.optimizer.adamw import (
    AdamWOptions,
    Moments,
    Prepared,
    adamw,
    scalars_on_device,
    scalars_to_device,
    takes,
)

_PARTS = ("m", "v", "m_scales", "v_scales")
_MIX = (0x9E3779B97F4A7C15, 0x94D049BB133111EB)  # odd numbers: distinct seeds stay distinct


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    """What an optimizer's closure computes anew, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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
        capturable: steps are counted on the device, where learning rates may be too; for CUDA graphs.
    """

    _step_supports_amp_scaling = True

    def __init__(  # noqa: PLR0913 - the names of torch's and bitsandbytes' AdamW
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
        capturable: bool = False,
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
        self._prepared: dict[int, tuple[list[int], Prepared]] = {}
        self._captured: list[Any] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "capturable": capturable})

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: torch's own has no word of what a subclass adds; launches are made anew."""
        own = {name: getattr(self, name) for name in ("stochastic_rounding", "seed", "min_8bit_size")}
        return {**super().__getstate__(), **own, "_prepared": {}, "_captured": []}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; gives the closure's loss."""
        loss = _loss_of(closure)
        index = 0
        for group in self.param_groups:
            by_step: dict[Any, list[tuple[Tensor, int]]] = defaultdict(list)
            for param in group["params"]:
                index += 1
                if param.grad is not None:
                    state = self.state[param] or self._begin(param)
                    by_step[state["step"]].append((param, index))
            for step, members in by_step.items():
                self._update(group, step, [p for p, _ in members], [i for _, i in members])
        return loss

    def _begin(self, param: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first step."""
        if not param.is_floating_point() or param.grad is None or param.grad.is_sparse:
            raise Unsupported(
                f"AdamW8bit steps dense floating-point tensors, not {param.dtype} with a "
                f"{param.grad.layout if param.grad is not None else None} gradient; use torch's optimizers."
            )
        moments = Moments.zeros(_slice(param), packed=param.numel() >= self.min_8bit_size)
        state: dict[str, Any] = self.state[param]
        state["step"] = 0
        state.update({name: getattr(moments, name) for name in _PARTS if getattr(moments, name) is not None})
        return state

    def _update(
        self, group: dict[str, Any], step: int | Tensor, params: list[Tensor], indices: list[int]
    ) -> None:
        """One step of parameters that have had equally many."""
        device, guard = params[0].device, self._guard(params[0].device)
        options = AdamWOptions(
            lr=0.0 if group["capturable"] else float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=1 if isinstance(step, Tensor) else step + 1,
        )
        if group["capturable"]:
            if not isinstance(step, Tensor):
                step = torch.full((), float(step), device=device, dtype=torch.float32)
                self._count(params, step)
            step.add_(1.0 if guard is None else (guard[0] == 0).float())
        else:
            self._count(params, options.step)
        # of a short tensor some ranks have nothing
        held = [pair for pair in zip(params, indices, strict=True) if _slice(pair[0]).numel()]
        if held:
            self._step_held(group, step, [p for p, _ in held], [i for _, i in held], options, guard)

    def _step_held(
        self,
        group: dict[str, Any],
        step: int | Tensor,
        params: list[Tensor],
        indices: list[int],
        options: AdamWOptions,
        guard: tuple[Tensor, Tensor] | None,
    ) -> None:
        """The arithmetic, of parameters with values on this rank."""
        slices, device = [_slice(param) for param in params], params[0].device
        prepared = self._prepare(params, indices, needed=group["capturable"])
        if prepared is None:
            grads, moments, seeds = self._tensors(params, indices)
            adamw(slices, grads, moments, options, seeds=seeds, guard=guard)
        elif isinstance(step, Tensor):
            lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            scalars = scalars_on_device(lr, step, options)
            prepared.step(scalars, guard)
            if torch.cuda.is_current_stream_capturing():
                self._captured += [prepared, scalars]
        else:
            prepared.step(scalars_to_device(options, device), guard)
        if prepared is not None:  # torch did not see the kernel write, and scales are kept by this number
            torch.autograd.graph.increment_version(slices)

    def _count(self, params: list[Tensor], step: int | Tensor) -> None:
        for param in params:
            self.state[param]["step"] = step

    def _tensors(
        self, params: list[Tensor], indices: list[int]
    ) -> tuple[list[Tensor], list[Moments], list[int] | None]:
        """Gradients, moments and seeds; the seed of a parameter is the same in all steps."""
        moments = [Moments(**{name: self.state[param].get(name) for name in _PARTS}) for param in params]
        seeds = None
        if self.stochastic_rounding:
            seeds = [(self.seed * _MIX[0] + index * _MIX[1]) % 2**63 for index in indices]
        return [_slice(param.grad) for param in params], moments, seeds  # type: ignore[arg-type]

    def _prepare(self, params: list[Tensor], indices: list[int], *, needed: bool) -> Prepared | None:
        """The kernel's launches, those of the last step if no address has changed; None: the definition."""
        if not params[0].is_cuda and not needed:
            return None
        slices = [_slice(param) for param in params]
        grads = [_slice(param.grad) for param in params]  # type: ignore[arg-type]
        addresses = [t.data_ptr() for pair in zip(slices, grads, strict=True) for t in pair]
        before = self._prepared.get(indices[0])
        if before is not None and before[0] == addresses:
            return before[1]
        grads, moments, seeds = self._tensors(params, indices)
        fits = all(map(takes, slices, grads, moments)) and len({param.device for param in params}) == 1
        if needed and not fits:
            raise Unsupported(
                "capturable steps need contiguous float32, bfloat16 or float16 parameters on one CUDA "
                "device; set capturable=False."
            )
        if not fits:
            return None
        prepared = Prepared(slices, grads, moments, seeds)
        self._prepared[indices[0]] = addresses, prepared
        return prepared

    def _guard(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """What a gradient scaler left here: whether to skip, and the gradients' scale."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if found_inf is None and scale is None:
            return None
        factors = (
            torch.zeros((), device=device, dtype=torch.float32) if found_inf is None else found_inf.float(),
            torch.ones((), device=device, dtype=torch.float32) if scale is None else scale.float(),
        )
        return factors[0].to(device), factors[1].to(device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep their types: torch would cast codes to the parameter's."""
        super().load_state_dict(state_dict)
        self._prepared.clear()
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(number, {})
            if "step" in saved:
                self.state[param]["step"] = int(saved["step"])
            for name in _PARTS:
                if saved.get(name) is not None:
                    self.state[param][name] = saved[name].to(param.device, copy=True)


def _slice(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return (
        tensor.to_local() if hasattr(tensor, "to_local") else tensor
    )  # no import of torch.distributed.tensor


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for parameters of two dimensions, ``torch.optim.AdamW`` for the others.

    Updates of matrices are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so that
    learning rates and decays of AdamW serve for both. Groups and state are those of one optimizer:
    schedules, checkpoints and groups that are added later work as everywhere.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        weight_decay: decoupled decay.
        momentum: of Muon.
        betas: of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        probe = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32))
        self._muon = torch.optim.Muon(
            [probe], lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW([probe], lr=lr, weight_decay=weight_decay, betas=betas)
        defaults = {**self._adamw.defaults, **self._muon.defaults}
        super().__init__(params, {name: value for name, value in defaults.items() if name != "eps"})

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: torch's own has no word of what a subclass adds."""
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group of each kind of which it has parameters."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        for inner, is_muon, members in ((self._muon, True, matrices), (self._adamw, False, others)):
            if members:
                group = {"eps": inner.defaults["eps"], **param_group, "params": members, "is_muon": is_muon}
                super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; gives the closure's loss."""
        loss = _loss_of(closure)
        for inner, is_muon in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [group for group in self.param_groups if group["is_muon"] == is_muon]
            inner.state = self.state
            if inner.param_groups:
                inner.step()
        return loss


__all__ = ["AdamW8bit", "MuonAdamW"]
