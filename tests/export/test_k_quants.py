"""K-quants: the bytes decode by the gguf package to what the search chose, with less error than its peers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fewbits.formats import FORMATS
from fewbits.formats.k_quants import SEARCHED, search
from tests import peers

gguf = pytest.importorskip("gguf")

K_QUANTS = tuple(kind for kind in SEARCHED if kind.endswith("_K"))

# What llama.cpp's own quantiser (libggml of August 2026, no importance matrix) leaves of these very values.
LLAMA_CPP = {"Q2_K": 0.2977, "Q3_K": 0.1510, "Q4_K": 0.0716, "Q5_K": 0.0362, "Q6_K": 0.0178}


def quantize_k(x: torch.Tensor, kind: str) -> torch.Tensor:
    return FORMATS[f"gguf_{kind.lower()}"].quantize(x).codes


def weights(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 512, generator=generator)
    if kind == "one sign":
        return x.abs() + 0.5
    if kind == "outliers":
        return x * torch.rand(16, 512, generator=generator).pow(8).mul(50)
    if kind == "zeros":
        return x.where(torch.arange(512) % 64 < 32, torch.zeros(()))
    return x


def decoded(data: torch.Tensor, kind: str) -> torch.Tensor:
    return peers.live_gguf(data.numpy(), gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize("values", ["normal", "one sign", "outliers", "zeros"])
def test_the_bytes_hold_the_codes_that_were_chosen(kind: str, values: str) -> None:
    x = weights(values)
    sizes = SEARCHED[kind]
    codes = search(x.reshape(-1, 256 // sizes.sub, sizes.sub), sizes)
    back = decoded(quantize_k(x, kind), kind)
    np.testing.assert_allclose(back.numpy(), codes.values().reshape(x.shape).numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_the_error_is_no_larger_than_llama_cpps(kind: str) -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))[:64]
    error = (decoded(quantize_k(x, kind), kind) - x).norm() / x.norm()
    assert error < LLAMA_CPP[kind]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_every_code_and_scale_keeps_its_place(kind: str) -> None:
    """A value that is decoded at another place than its own would show as the other's size."""
    x = torch.zeros(1, 256)
    for place in range(0, 256, 7):
        x[0, place] = 1.0 + place / 256
        back = decoded(quantize_k(x, kind), kind)
        assert back[0, place] == pytest.approx(x[0, place].item(), rel=0.02)
        assert back.count_nonzero() == 1
        x[0, place] = 0


# The same quantiser under an importance matrix (libggml of October 2026): the error that the matrix weighs.
LLAMA_CPP_BY_IMPORTANCE = {
    "Q2_K": 0.06104,
    "Q3_K": 0.07265,
    "Q4_K": 0.0175,
    "Q5_K": 0.01208,
    "Q6_K": 0.00792,
    "IQ4_NL": 0.02678,
    "IQ4_XS": 0.02963,
    "Q4_0": 0.04098,
    "Q5_0": 0.02024,
}


@pytest.mark.parametrize("kind", LLAMA_CPP_BY_IMPORTANCE)
def test_an_importance_matrix_is_followed_further_than_by_llama_cpp(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1024, generator=generator)
    importance = torch.randn(1024, generator=generator).square().exp()
    format = FORMATS[f"gguf_{kind.lower()}"]
    back = decoded(format.quantize_for(x, importance).codes, kind)
    plain = decoded(format.quantize(x).codes, kind)

    def error(y: torch.Tensor) -> float:
        return float((((y - x).square() * importance).sum() / (x.square() * importance).sum()).sqrt())

    assert error(back) < LLAMA_CPP_BY_IMPORTANCE[kind] and error(back) < 0.8 * error(plain)
    alike = format.quantize_for(x, torch.full((1024,), 2.0)).codes
    if kind in SEARCHED:  # all columns alike: a power of two changes no comparison and no sum
        assert torch.equal(alike, format.quantize(x).codes)
