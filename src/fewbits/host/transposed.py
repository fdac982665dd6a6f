"""Linears whose weight is stored turned round: GPT-2's ``Conv1D`` keeps (K, N) where nn.Linear keeps (N, K).

It computes ``y = x W + b``, which is a linear layer with the weight ``W^T``. A packed layer holds that
``W^T`` (N, K) as any other does, and remembers by ``transposed`` that a checkpoint of its family has it the
other way round: reading turns the weight, and what is decoded or merged is turned back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D`` itself, not a class made from it."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_transposed(module: nn.Module) -> bool:
    """Whether checkpoints hold the weight of this linear, plain or packed, as (K, N)."""
    return is_conv1d(module) or bool(getattr(module, "transposed", False))


def as_linear(module: Any) -> nn.Linear:
    """The nn.Linear that computes what ``module`` does: itself, or for a Conv1D one over the turned weight.

    The bias is the same parameter. The weight (N, K) is a view of the Conv1D's (K, N), on its device.
    """
    if not is_conv1d(module):
        return module  # type: ignore[no-any-return]
    linear = nn.Linear(module.nx, module.nf, bias=False, device="meta", dtype=module.weight.dtype)
    linear.weight = nn.Parameter(module.weight.detach().t(), requires_grad=module.weight.requires_grad)
    linear.register_parameter("bias", module.bias)
    linear.transposed = True  # type: ignore[assignment]
    return linear.train(module.training)


def as_conv1d(linear: nn.Linear) -> nn.Module:
    """The Conv1D that computes what ``linear`` (N, K) does; the bias is the same parameter."""
    from transformers.pytorch_utils import Conv1D

    conv: Any = Conv1D.__new__(Conv1D)  # its own beginning would draw random weights
    nn.Module.__init__(conv)
    conv.nx, conv.nf = linear.in_features, linear.out_features
    requires_grad = linear.weight.requires_grad
    conv.weight = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=requires_grad)
    conv.register_parameter("bias", linear.bias)
    return conv.train(linear.training)  # type: ignore[no-any-return]


def transposed_like(weight: Tensor, module: nn.Module) -> Tensor:
    """From (N, K) to what a checkpoint has for ``module``, or back: transposed where its own is."""
    return weight.t() if is_transposed(module) else weight
