"""Operations with products: `BasicLinear`, `Bias`, `Linear` of both, and `GroupedLinear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.layers import grouped_linear
from fewbits.te.layers.linear import Projection
from fewbits.te.layers.module import refuse
from fewbits.te.ops.operation import BasicOperation, FusedOperation
from fewbits.te.ranks.distributed import group_size
from fewbits.te.support import default_device
from fewbits.te.tensors.roles import QuantizerRole


def _size(mode: str | None, group: Any) -> int:
    return group_size(group) if mode is not None else 1


class BasicLinear(Projection, BasicOperation):
    """``y = x @ weight.T`` with operands quantised by the recipe that holds.

    Args:
        in_features: K.
        out_features: N.
        device: of the weight; None is the GPU where there is one.
        dtype: of the weight; None is torch's default.
        tensor_parallel_mode: "column", "row" or None.
        tensor_parallel_group: the process group.
        sequence_parallel: tensors between layers are cut by their first axis.
        accumulate_into_main_grad: the gradient is added to ``weight.main_grad``.
        userbuffers_options: refused.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        refuse(userbuffers_options is not None, "userbuffers_options", "there are no userbuffers")
        self.return_bias = False
        like = (dtype or torch.get_default_dtype(), default_device(device))
        size = _size(tensor_parallel_mode, tensor_parallel_group)
        parallel = (tensor_parallel_mode, sequence_parallel, tensor_parallel_group, size)
        self.make_parameters(in_features, out_features, False, None, None, like, parallel)
        del self.bias
        self.finish_parameters(False, accumulate_into_main_grad)

    def roles(self, *, forward: bool) -> list[QuantizerRole | None]:
        """Slots of an operation, which has none for its output."""
        kinds = ("input", "weight") if forward else ("grad_output",)
        return [QuantizerRole(self.module_type, kind, self.name or "") for kind in kinds]

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """(..., N) from x (..., K)."""
        return self.project(x, self.product_dtype(x), None)[0]

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """The type of products: autocast's, else the weight's.

        x may have any shape.
        """
        kind = x.device.type
        weight: Tensor = self._parameters["weight"]  # type: ignore[assignment]
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype

    def forward(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """As `compute`: (..., N) from x (..., K)."""
        return BasicOperation.forward(self, x, *extra, **words)


class Bias(BasicOperation):
    """``x + bias``.

    Args:
        size: of the last axis.
        device: of the parameter; None is the GPU where there is one.
        dtype: of the parameter; None is torch's default.
        tensor_parallel: this rank has its piece of the last axis.
        tensor_parallel_group: the process group.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        ranks = group_size(tensor_parallel_group) if tensor_parallel else 1
        if size % ranks:
            raise BadInput(f"{size} features cannot be split evenly over {ranks} ranks.")
        kind, place = dtype or torch.get_default_dtype(), default_device(device)
        self.bias = nn.Parameter(torch.zeros(size // ranks, dtype=kind, device=place))

    def reset_parameters(self) -> None:
        """Zeros; a parameter on the meta device is made first."""
        if self.bias.device.type == "meta":
            self.bias = nn.Parameter(torch.empty_like(self.bias, device=default_device(None)))
        nn.init.zeros_(self.bias)

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """The sum, for x (..., N)."""
        return x + self.bias.to(x.dtype)

    def get_extra_state(self) -> Tensor:
        """(0,) bytes: Transformer Engine's operations have this entry in their state dicts."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


class Linear(FusedOperation):
    """A `BasicLinear` and a `Bias`; the arguments are theirs.

    Its state dict has their entries (``basic_ops.0.weight``, ``basic_ops.1.bias``), as in Transformer Engine.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        **words: Any,
    ) -> None:
        product = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            **words,
        )
        added = []
        if bias:  # behind the sum over ranks of a row-parallel product, so that it is added once
            cut, group = tensor_parallel_mode == "column", tensor_parallel_group
            added = [
                Bias(
                    out_features, device=device, dtype=dtype, tensor_parallel=cut, tensor_parallel_group=group
                )
            ]
        super().__init__([product, *added])

    def _owner(self, name: str) -> Any:
        operations = self._modules["basic_ops"]
        index = ("weight", "bias").index(name)
        return operations[index] if index < len(operations) else None  # type: ignore[arg-type, index]

    def __getattr__(self, name: str) -> Any:
        """``weight`` and ``bias`` are those of the two operations; None where there is no bias."""
        if name in ("weight", "bias") and "basic_ops" in self.__dict__.get("_modules", {}):
            owner = self._owner(name)
            return None if owner is None else getattr(owner, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Another ``weight`` or ``bias`` is put into its operation."""
        if name not in ("weight", "bias"):
            super().__setattr__(name, value)
        elif self._owner(name) is not None:
            setattr(self._owner(name), name, value)
        elif value is not None:
            raise BadInput("this Linear was made with bias=False and has no place for a bias.")

    def register_parameter(self, name: str, param: Any) -> None:
        """A parameter, which for ``weight`` and ``bias`` goes to the operation that owns it."""
        setattr(self, name, param)


class GroupedLinear(grouped_linear.GroupedLinear, BasicOperation):
    """`fewbits.te.GroupedLinear` as an operation, with the rows of each group as a further input.

    Args:
        num_groups: pieces of the rows; parameters are ``weight0`` ..., ``bias0`` ...
        in_features: K.
        out_features: N.
        bias: whether there are biases.
        device: of the parameters.
        dtype: of the parameters.
        accumulate_into_main_grad: gradients are added to each weight's ``main_grad``.
        single_grouped_weight: refused, as is ``single_grouped_bias``.
        delay_wgrad_compute: gradients of the parameters wait for ``backward_dw``.
        scale_bias: a second further input has a number for each row, by which its bias is multiplied.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        self.num_extra_inputs = 2 if scale_bias and bias else 1
        super().__init__(
            num_groups,
            in_features,
            out_features,
            bias=bias,
            device=device,
            params_dtype=dtype,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_groups, self.scale_bias = num_groups, scale_bias and bias
        self.return_bias = self.scale_bias

    def compute(self, x: Tensor, *extra: Tensor, **words: Any) -> Any:
        """(M, N) from x (M, K), the rows of each group, and with ``scale_bias`` numbers (M,)."""
        refuse(bool(words), "buffers for outputs", "take the returned tensors")
        if not self.scale_bias:
            return grouped_linear.GroupedLinear.forward(self, x, extra[0])
        y, biases = grouped_linear.GroupedLinear.forward(self, x, extra[0])
        by_row = torch.cat([b.expand(int(n), -1) for b, n in zip(biases, extra[0].tolist(), strict=True)])
        return y + (by_row.float() * extra[1].float().unsqueeze(-1)).to(y.dtype).view_as(y)

    def forward(self, x: Tensor, *extra: Any, **words: Any) -> Any:  # type: ignore[override]
        """As `compute`: (M, N) from x (M, K)."""
        return BasicOperation.forward(self, x, *extra, **words)
