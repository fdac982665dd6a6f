"""The terms of a benchmark: a case, its operands, and the functions that compete on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]
Variant = Callable[[], Run]  # does what is not timed and returns what is


class Problem(NamedTuple):
    """Operands in memory, the functions that compete on them, and the exact result."""

    variants: Mapping[str, Variant]
    exact: Run


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured.

    Attributes:
        op: the kernel file's name.
        part: "forward", "backward" (frozen weight) or "backward_all" (the weight's gradient too).
        format: of the weight, or the dtype of all operands.
        M: rows.
        N: outputs, or values in a row.
        K: inputs; 0 for an op without a product.
        bytes_moved: each input read once and each output written once.
        flops: multiplications and additions of the products.
        tolerance: largest ``|out - exact| / |exact|`` of each output, in the Frobenius norm.
        build: makes the operands on a device.
    """

    op: str
    part: str
    format: str
    M: int
    N: int
    K: int = 0
    bytes_moved: int
    flops: int = 0
    tolerance: float
    build: Callable[[Case, torch.device], Problem]

    @property
    def shape(self) -> str:
        """As in ``8192x4096``."""
        return "x".join(str(n) for n in (self.M, self.N, self.K) if n)

    @property
    def name(self) -> str:
        """As in ``rmsnorm.forward bfloat16 8192x4096``."""
        return f"{self.op}.{self.part} {self.format} {self.shape}"


def randn(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """The one distribution of all operands, in the shape of the arguments."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def differentiated(f: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor, trained: int) -> Variant:
    """The backward pass of ``f(*inputs)`` to its first ``trained`` inputs; the forward pass is not timed.

    ``inputs`` are of any shape that f takes; ``dy`` is of the shape of its output.

    With ``trained`` 0, the forward pass itself.
    """
    if trained == 0:

        def forward() -> Sequence[Tensor]:
            with torch.no_grad():
                return (f(*inputs),)

        return lambda: forward

    leaves = [x.detach().requires_grad_(i < trained) for i, x in enumerate(inputs)]

    def prepare() -> Run:
        y = f(*leaves)
        return lambda: torch.autograd.grad(y, leaves[:trained], dy)

    return prepare
