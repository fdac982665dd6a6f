"""Products of pairs with packed matrices: the definition, the kernel, and experts that take it."""

from __future__ import annotations

import pytest
import torch

import fewbits
from fewbits.formats import get_format
from fewbits.kernels.codec.quantize import quantize
from fewbits.kernels.product.packed_pairs import (
    SORTED,
    PairTile,
    launch,
    packed_pairs,
    packed_pairs_ref,
    takes,
)
from fewbits.nn.expert_products import NO_BRANCH, Branch, Weights, pair_products
from fewbits.nn.experts import QuantizedExperts

SIZES = {"one has none": (3, 0, 20, 1), "one by one": (1, 1, 1), "all on one": (0, 0, 37)}
FORMATS = ("nf4_dq", "nf4", "int4_g64", "int8", "float8_e4m3_row")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("sizes", "N", "K"), [("one has none", 48, 192), ("one by one", 32, 64), ("all on one", 17, 320)]
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(
    name: str, sizes: str, N: int, K: int, kernel_device: str, poisoned_memory: None
) -> None:
    """Both round decoded values to 16 bits; K terms are summed in float32, and rounded once."""
    counts, generator = SIZES[sizes], torch.Generator().manual_seed(N + K)
    E, P = 5, sum(SIZES[sizes])
    packed = quantize(torch.randn(E, N, K, generator=generator), get_format(name)).to(kernel_device)
    dtype = torch.float16
    assert takes(packed.format, tuple(packed.shape), dtype)
    x = torch.randn(P, K, generator=generator).to(dtype).to(kernel_device)
    rows = torch.randint(0, P, (P,), generator=generator).to(kernel_device)
    ends = torch.tensor(counts, device=kernel_device).cumsum(0).int()
    chosen = torch.randint(0, E, (len(counts),), generator=generator).to(kernel_device)
    for r in (None, rows):
        for c in (None, chosen):
            for tile in (SORTED, PairTile(outputs=16, inner=64, num_warps=1, num_stages=1)):
                out = torch.empty(P, N, dtype=dtype, device=kernel_device)
                launch(x, r, packed, ends, c, out, tile)
                need = packed_pairs_ref(x, r, packed, ends, c)
                bound = K**0.5 * 2**-9 * 4  # sums of K products of about 1, rounded to float16
                torch.testing.assert_close(out, need, rtol=2**-9, atol=bound * 2**-2)


def test_a_format_that_decodes_by_its_definition_is_not_taken() -> None:
    assert not takes(get_format("mxfp4"), (5, 48, 192), torch.float16)


def test_the_definition_is_a_decoded_product() -> None:
    packed = quantize(torch.randn(3, 8, 64), get_format("nf4_dq"))
    x, ends = torch.randn(4, 64, dtype=torch.bfloat16), torch.tensor([1, 1, 4], dtype=torch.int32)
    y = packed_pairs(x, torch.tensor([3, 0, 1, 2]), packed, ends, torch.tensor([2, 0, 1]))
    dense = packed.dequantize(torch.bfloat16).float()
    want = torch.stack([dense[2] @ x[3].float(), *(dense[1] @ x[i].float() for i in (0, 1, 2))])
    torch.testing.assert_close(y, want.bfloat16())


def test_experts_multiply_few_pairs_by_packed_matrices() -> None:
    """The same products whether matrices are decoded first or within, with an adapter and without."""
    packed = quantize(torch.randn(3, 8, 64), get_format("nf4_dq"))
    x, rows = torch.randn(4, 64), torch.tensor([3, 0, 1, 2])
    ends = torch.tensor([1, 1, 4], dtype=torch.int32)
    few = Weights(lambda: packed.dequantize(torch.float32), few=lambda x, r, e: packed_pairs(x, r, packed, e))
    decoded = few._replace(few=None)
    for branch in (NO_BRANCH, Branch(torch.randn(3, 2, 64), torch.randn(3, 8, 2), 0.5)):
        for one, r in ((x, rows), (x, None)):
            ours, inner = pair_products(one, r, few, branch, ends)
            need, need_inner = pair_products(one, r, decoded, branch, ends)
            torch.testing.assert_close(ours, need)
            assert inner is None or torch.equal(inner, need_inner)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_packed_experts_take_the_kernel(tokens: int) -> None:
    """What a layer gives without gradients, where pairs are few, is what it gives with them."""
    from tests.models.mixtures import mixture

    torch.manual_seed(0)
    model = mixture("qwen3_moe").to("cuda", torch.bfloat16)
    fewbits.convert(model, "qlora_nf4")
    experts = next(m for m in model.modules() if isinstance(m, QuantizedExperts))
    x = torch.randn(tokens, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, experts.num_stored, device="cuda").topk(2).indices
    weights = torch.rand(tokens, 2, device="cuda", dtype=torch.bfloat16)
    want = experts(x, chosen, weights)
    with torch.no_grad():
        few = experts._multiplies_few("down_proj", torch.bfloat16, chosen.numel())
        assert few == (chosen.numel() <= experts.num_stored)
        torch.testing.assert_close(experts(x, chosen, weights), want, rtol=2e-2, atol=2e-3)
