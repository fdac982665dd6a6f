"""`FusedAdam` and `FusedSGD` under Transformer Engine's arguments, over torch's own arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fewbits.errors import BadInput
from fewbits.te.layers.module import refuse
from fewbits.te.multi_tensor import MultiTensorApply as MultiTensorApply
from fewbits.te.multi_tensor import multi_tensor_applier as multi_tensor_applier
from fewbits.te.multi_tensor import multi_tensor_l2norm as multi_tensor_l2norm
from fewbits.te.multi_tensor import multi_tensor_scale as multi_tensor_scale
from fewbits.te.multi_tensor import multi_tensor_scale_tensor as multi_tensor_scale_tensor
from fewbits.te.multi_tensor import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm
from fewbits.te.tensors.quantizers import Float8CurrentScalingQuantizer
from fewbits.te.tensors.roles import DType

_MOMENTS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_HALF_RANGE = torch.finfo(torch.float16).max / 2


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
        master_weight_dtype: float32 or float16.
        exp_avg_dtype: float32, bfloat16, float16, or uint8 for E4M3, as exp_avg_sq_dtype. In float16 and
            E4M3 a tensor has one float32 scale, from its largest magnitude.
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
        refuse(wrong, "another type of a moment", "take float32, bfloat16, float16, or uint8 for E4M3")
        refuse(
            master_weights and master_weight_dtype not in (torch.float32, torch.float16),
            f"{master_weight_dtype} for master weights",
            "take torch.float32 or torch.float16",
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
        if capturable:  # then a GradScaler leaves the division, of gradients in float16 too, to `step`
            self._step_supports_amp_scaling = True
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.master_weight_dtype = master_weight_dtype
        self._scales: dict[tuple[Tensor, str], Tensor] = {}
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
            grad_scaler: torch's; gradients are divided by its scale, where they lie, and a step with an
                infinite one is skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = 1.0
        if grad_scaler is not None:
            if any(bool(flag) for flag in grad_scaler._check_inf_per_device(self).values()):
                return loss
            is_divided = grad_scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED
            factor = 1.0 if is_divided else 1.0 / float(grad_scaler._get_scale_async())
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                if gradient is None:
                    continue
                divided = gradient.float() * factor
                if factor != 1.0:
                    gradient.copy_(divided)  # as the scaler would have left it
                self._update(parameter, divided, group)
        return loss

    def initialize_state(self, parameter: Tensor, store_param_remainders: bool = False) -> None:
        """Make a parameter's running means, zeros, and its first value if that is kept.

        The parameter may have any shape, which its states share.
        """
        zeros = torch.zeros_like(parameter, dtype=torch.float32)
        self.set_scaled_state(parameter, "exp_avg", zeros)
        self.set_scaled_state(parameter, "exp_avg_sq", zeros)
        if self.master_weights:
            first = getattr(parameter, "get_high_precision_init_val", lambda: None)()
            source = parameter.detach() if first is None else first.to(parameter.device)
            self.set_scaled_state(parameter, "master_param", source.float())

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        value = parameter.detach().float()
        if self.master_weights:
            value = self.get_unscaled_state(parameter, "master_param")
        if decay and not self.adam_w_mode:
            gradient = gradient + decay * value
        mean = self.get_unscaled_state(parameter, "exp_avg").lerp(gradient, 1 - beta1)
        square = self.get_unscaled_state(parameter, "exp_avg_sq") * beta2 + (1 - beta2) * gradient * gradient
        self.set_scaled_state(parameter, "exp_avg", mean)
        self.set_scaled_state(parameter, "exp_avg_sq", square)
        step, correct = group["step"], group["bias_correction"]
        first, second = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
        update = (mean / first) / ((square / second).sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            update = update + decay * value
        value = value - group["lr"] * update
        if self.master_weights:
            self.set_scaled_state(parameter, "master_param", value)
        parameter.copy_(value.to(parameter.dtype))

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state of a parameter in float32: "exp_avg", "exp_avg_sq" or "master_param".

        It is of the parameter's shape.
        """
        state: Tensor = self.state[param][state_name]
        scale = self._scales.get((param, state_name))
        return state.float() if scale is None else state.float() * scale

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Write a state of a parameter from float32, rounded to the type that the optimizer keeps it in.

        ``unscaled_state`` is float32 of the parameter's shape; int16 for "master_param" is what Transformer
        Engine's ``store_param_remainders`` leaves there, the lower half of the float32 value.
        """
        states, dtype = self.state[param], self._dtype_of(state_name)
        if unscaled_state.dtype is torch.int16:
            unscaled_state = _with_remainder(param.detach(), unscaled_state.to(param.device))
        value = unscaled_state.detach().to(device=param.device, dtype=torch.float32)
        if dtype is torch.uint8:
            states[state_name] = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(value)
            return
        if dtype is torch.float16:
            largest = value.abs().amax() if value.numel() else value.new_zeros(())
            scale = torch.where(largest > 0, largest / _HALF_RANGE, torch.ones_like(largest))
            self._scales[param, state_name] = scale
            value = value / scale
        if state_name in states:
            states[state_name].copy_(value)
        else:
            states[state_name] = value.to(dtype, copy=True)

    def _dtype_of(self, state_name: str) -> torch.dtype:
        dtypes = {
            "exp_avg": self.exp_avg_dtype,
            "exp_avg_sq": self.exp_avg_sq_dtype,
            "master_param": self.master_weight_dtype,
        }
        return dtypes[state_name]

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with all states in float32, so that an optimizer with other types reads it too."""
        content = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in content["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if index in content["state"]:
                names = content["state"][index]
                content["state"][index] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` of this library or of Transformer Engine returned.

        torch's own would round master weights and moments to the type of their parameter.
        """
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            saved = state_dict["state"].get(index)
            if saved is not None:
                self.state[parameter] = {}
                for name in ("exp_avg", "exp_avg_sq", *(("master_param",) if self.master_weights else ())):
                    if saved.get(name) is not None:
                        self.set_scaled_state(parameter, name, saved[name])
                if self.master_weights and saved.get("master_param") is None:
                    self.set_scaled_state(parameter, "master_param", parameter.detach().float())


def _with_remainder(value: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers whose rounded upper half is ``value`` (bfloat16), the lower ``remainder``."""
    upper = value.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)  # it was rounded up
    return ((upper << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


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
