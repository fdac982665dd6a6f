"""Matrices of experts, turned: the definition, the kernel, the op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.product.expert_matrices import Matrices, expert_matrices, expert_matrices_ref, launch


def problem(E: int, N: int, r: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """PEFT's second matrix expert by expert, that transposed, and a gradient on its way back."""
    generator = torch.Generator().manual_seed(E + N)
    b = torch.randn(N, r * E, generator=generator).to(device, dtype).view(N, r, E)
    db = torch.randn(E, r, N, generator=generator).to(device, dtype)
    return {"forward": b.permute(2, 0, 1), "backward": b.permute(2, 1, 0), "gradient": db.permute(2, 1, 0)}


@pytest.mark.parametrize(("E", "N", "r"), [(8, 48, 4), (70, 300, 3), (1, 5, 1), (130, 33, 16)])
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(E: int, N: int, r: int, kernel_device: str) -> None:
    """To the bit: of whole tensors, and beside other columns, which stay."""
    for name, x in problem(E, N, r, kernel_device).items():
        for dtype in (torch.float32, torch.float16):
            wide = torch.full((*x.shape[:2], x.shape[2] + 8), 7.0, dtype=dtype, device=kernel_device)
            for out in (torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), wide):
                part, need = out[..., : x.shape[2]], torch.empty(x.shape, dtype=dtype, device=kernel_device)
                launch(Matrices(x, part))
                expert_matrices_ref(Matrices(x, need))
                assert torch.equal(part, need), name
            assert (wide[..., x.shape[2] :] == 7.0).all()


def test_any_strides_and_shapes_that_do_not_fit() -> None:
    for x in (torch.randn(3, 4, 5), torch.randn(5, 4, 3, dtype=torch.float64).transpose(0, 2)):
        assert torch.equal(expert_matrices(x), x) and expert_matrices(x).is_contiguous()
    assert expert_matrices(torch.randn(2, 3, 4), dtype=torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(BadInput, match="expert_matrices takes"):
        expert_matrices(torch.randn(2, 3, 4), out=torch.empty(2, 4, 3))


def test_opcheck() -> None:
    x = problem(3, 5, 2, "cpu")["forward"]
    torch.library.opcheck(torch.ops.fewbits.expert_matrices.default, (x, torch.empty(3, 5, 2)))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for x in problem(128, 2048, 16, "cuda").values():
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(expert_matrices(x, dtype=dtype), x.to(dtype))
