"""A tensor times one number: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.kernels.loss.scaled import launch, scaled, scaled_ref

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 4096), (4097,), (0, 5)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    to: torch.dtype,
    kernel_device: str,
    poisoned_memory: None,
) -> None:
    x = torch.randn(shape, device=kernel_device).to(dtype)
    factor = torch.rand((), device=kernel_device) * 1e-2
    y = torch.empty(shape, dtype=to, device=kernel_device)
    launch(x, factor, y)
    rtol = 2.0**-7 if kernel_device == "cpu" and to == torch.bfloat16 else 0  # the interpreter cuts off
    torch.testing.assert_close(y, scaled_ref(x, factor, to), rtol=rtol, atol=0)


def test_one_rounding_and_what_is_not_finite() -> None:
    x = torch.tensor([1.0, 3.0, -7.0, torch.inf, torch.nan], dtype=torch.bfloat16)
    y = scaled(x, torch.tensor(1 / 8188))
    assert torch.equal(y[:3], (x[:3].double() / 8188).to(torch.bfloat16)) and y[3].isinf() and y[4].isnan()
    assert scaled(x, torch.tensor(2.0), torch.float32).dtype == torch.float32
    assert scaled(x.double(), torch.tensor(1 / 3, dtype=torch.float64))[1] == 1.0
    with pytest.raises(BadInput, match="one factor"):
        scaled(x, torch.ones(5))


def test_opcheck() -> None:
    x = torch.randn(3, 5)
    torch.library.opcheck(torch.ops.fewbits.scaled.default, (x.t(), torch.tensor(2.0), torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x, factor = torch.randn(1000, 517, device="cuda").to(dtype), torch.rand((), device="cuda")
    assert torch.equal(scaled(x, factor), scaled_ref(x, factor, dtype))
    assert torch.equal(scaled(x.t(), factor, torch.float32), scaled_ref(x.t(), factor, torch.float32))
