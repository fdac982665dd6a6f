"""What both nodes of the fused decoder share: A's gradient from the norm's input."""

from __future__ import annotations

import pytest
import torch

from fewbits.decoder.both_halves import Norm, gradient_of_a, reads_output
from fewbits.decoder.trainable import PerHalf, PerPart, of_half
from fewbits.kernels.decoder.rmsnorm import rmsnorm_rows


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2.0**-7)])
def test_gradient_of_a_from_the_norms_input(dtype: torch.dtype, tolerance: float, offset: float) -> None:
    """The bfloat16 one is rounded three times beside the sum: r t, the product, and that times the weight."""
    x, w = torch.randn(50, 24).mul(3).to(dtype), torch.randn(24).to(dtype)
    wide = torch.randn(50, 7).to(dtype)  # t lies beside dy
    made = rmsnorm_rows(x, w, 1e-6, offset=offset)
    have = gradient_of_a(wide[:, 2:6], x, Norm(w, 1e-6, offset), made.r, [PerPart(False, False, True, True)])
    exact = rmsnorm_rows(x.double(), w.double(), 1e-6, offset=offset)
    assert exact.y is not None and have is not None
    need = wide[:, 2:6].double().t() @ exact.y
    assert (have.double() - need).norm() < tolerance * need.norm()


def test_who_reads_the_norms_output() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    branch = [PerPart(False, False, True, True)]
    weight, nothing = [PerPart(True, False, False, False)], [PerPart(False, False, False, False)]
    assert gradient_of_a(x, x, Norm(x[0], 0.0), x[:, 0], nothing) is None
    assert not reads_output(x, torch.bfloat16, branch * 2) and not reads_output(x, torch.bfloat16, nothing)
    assert reads_output(x, torch.bfloat16, branch + weight) and reads_output(x, torch.float32, branch)
    assert reads_output(x.half(), torch.float16, branch) and not reads_output(
        x.half(), torch.float16, nothing
    )


def test_positions_have_names_and_go_both_ways() -> None:
    norms, first = {"norm": 0, "post_norm": 1}, [PerPart(2, 3, 4, 5), PerPart(6, 7, 8, 9)]
    half = PerHalf(norms, first, [PerPart(10, 11, 12, 13)])
    assert half.flat() == list(range(14))
    assert of_half(half.flat(), ("norm", "post_norm"), into=2, back=1) == half
    with pytest.raises(AssertionError, match="more values than tensors"):
        of_half(half.flat(), ("norm",), into=2, back=1)
