"""`FusedAdam` and `FusedSGD` under Transformer Engine's arguments, over torch's own arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.te.module import refuse

_MOMENTS = (torch.float32, torch.bfloat16)


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW (the default), computed in float32.

    Args:
        params: parameters or groups of them.
        lr: step size.
        betas: of the two running means.
        eps: added to the denominator.
        weight_decay: decoupled with ``adam_w_mode``, else added to the gradient.
        amsgrad: True is refused.
        bias_correction: divide the means by what they lack in the first steps.
        adam_w_mode: see ``weight_decay``.
        capturable: accepted; the step counts in Python, so CUDA graphs are not.
        master_weights: keep each parameter in float32 in the optimizer, and round it to the parameter.
        master_weight_dtype: float32.
        exp_avg_dtype: float32 or bfloat16, as exp_avg_sq_dtype.
        use_decoupled_grad: read ``parameter.decoupled_grad`` instead of ``grad``.
        store_param_remainders: accepted: the whole float32 value is kept, which computes the same.
        set_grad_none: an older way to say what `zero_grad` does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse(amsgrad, "amsgrad", "leave it at False")
        wrong = exp_avg_dtype not in _MOMENTS or exp_avg_sq_dtype not in _MOMENTS
        refuse(wrong, "a moment of 8 bits or in float16", "take torch.float32 or torch.bfloat16")
        refuse(
            master_weights and master_weight_dtype is not torch.float32,
            "master weights in float16",
            "take torch.float32",
        )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.capturable, self.master_weights = adam_w_mode, capturable, master_weights
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.use_decoupled_grad, self.set_grad_none = use_decoupled_grad, set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is the older way to say zero_grad(set_to_none=...).",
                DeprecationWarning,
                stacklevel=2,
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Forget gradients, or with ``set_to_none=False`` fill them with zeros."""
        chosen = self.set_grad_none if set_to_none is None else set_to_none
        if self.use_decoupled_grad:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.decoupled_grad = None
        super().zero_grad(set_to_none=True if chosen is None else chosen)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step.

        Args:
            closure: computes the loss again, with gradients.
            grad_scaler: torch's; gradients are divided by its scale; a step with an infinite one is skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = 1.0
        if grad_scaler is not None:
            found_inf = getattr(self, "found_inf", None)
            if found_inf is not None and bool(found_inf):
                return loss
            factor = 1.0 / float(grad_scaler._get_scale_async())
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                if gradient is not None:
                    self._update(parameter, gradient.float() * factor, group)
        return loss

    def initialize_state(self, parameter: Tensor, store_param_remainders: bool = False) -> None:
        """Make a parameter's running means, zeros, and its float32 value if that is kept.

        The parameter may have any shape, which its states share.
        """
        state, device = self.state[parameter], parameter.device
        state["exp_avg"] = torch.zeros(parameter.shape, dtype=self.exp_avg_dtype, device=device)
        state["exp_avg_sq"] = torch.zeros(parameter.shape, dtype=self.exp_avg_sq_dtype, device=device)
        if self.master_weights:
            first = getattr(parameter, "get_high_precision_init_val", lambda: None)()
            source = parameter.detach() if first is None else first.to(parameter.device)
            state["master_param"] = source.float().clone()

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        state, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        value = state["master_param"] if self.master_weights else parameter.detach().float()
        if decay and not self.adam_w_mode:
            gradient = gradient + decay * value
        mean = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float() * beta2 + (1 - beta2) * gradient * gradient
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        step, correct = group["step"], group["bias_correction"]
        first, second = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
        update = (mean / first) / ((square / second).sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            update = update + decay * value
        value = value - group["lr"] * update
        if self.master_weights:
            state["master_param"].copy_(value)
        parameter.copy_(value.to(parameter.dtype))

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state of a parameter in float32: "exp_avg", "exp_avg_sq" or "master_param".

        It is of the parameter's shape.
        """
        state: Tensor = self.state[param][state_name]
        return state.float()

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Write a state of a parameter from float32.

        ``unscaled_state`` is float32 of the parameter's shape.
        """
        if state_name not in self.state[param]:
            self.initialize_state(param)
        self.state[param][state_name].copy_(unscaled_state)


class FusedSGD(torch.optim.SGD):
    """torch's SGD under Transformer Engine's arguments.

    Args:
        params: parameters or groups of them.
        lr: step size.
        momentum: of the running mean of gradients.
        dampening: of what is added to it.
        weight_decay: added to the gradient.
        nesterov: look ahead.
        wd_after_momentum: True is refused.
        materialize_master_grads: accepted and without meaning.
        set_grad_none: an older way to say what ``zero_grad`` does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse(wd_after_momentum, "wd_after_momentum", "leave it at False")
        if lr is None:
            raise BadInput("FusedSGD needs lr: the step size.")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Forget gradients, or with ``set_to_none=False`` fill them with zeros."""
        chosen = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=True if chosen is None else chosen)
