"""A format that nobody knew before goes everywhere by its contract alone: nothing else is edited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fewbits.errors import Unsupported
from fewbits.formats import FORMATS, Contract, Format, Packed
from fewbits.formats.base import PartSpec
from fewbits.formats.bits import pack_bits, packed_size, unpack_bits
from fewbits.formats.bitsandbytes import to_bitsandbytes
from fewbits.formats.blocks import block_absmax, from_blocks, scale_shape, to_blocks
from fewbits.formats.compressed_tensors import to_compressed_tensors
from fewbits.inference.rounding.grids import Grids
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.codec.gradient_wire import wire_format
from fewbits.kernels.generation.cut import reading_of
from fewbits.models.loading.in_memory import convert
from fewbits.recipes import Recipe, Rule
from fewbits.training.ranks.packed_slices import cut
from tests.docs.pages import GUIDE, run_page
from tests.formats import test_contract
from tests.models.tiny import tiny, tokens


@dataclass(frozen=True, kw_only=True)
class Odd(Format):
    """The odd numbers from -31 to 31 times a scale: 5 bits, and no zero."""

    block: tuple[int, int] = (1, 16)

    def promise(self) -> Contract:
        return Contract(largest_error=1 / 31, block=self.block)

    def layout(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        *lead, K = shape
        codes = PartSpec((*lead, packed_size(K, 5)), torch.uint8)
        return {"codes": codes, "scales": PartSpec(scale_shape(shape, self.block), torch.float32)}

    def quantize(self, x: Tensor, *, seed: int | None = None) -> Packed:
        blocks = to_blocks(x.detach().float(), self.block)
        scales = block_absmax(blocks).clamp(min=1e-30) / 31
        codes = ((blocks / scales + 31) / 2).round().clamp(0, 31).to(torch.uint8)
        shape = tuple(x.shape)
        parts = {"codes": pack_bits(from_blocks(codes, shape, self.block), 5), "scales": scales}
        layout = self.layout(shape)
        return Packed(self, shape, x.dtype, {n: parts[n].reshape(s.shape) for n, s in layout.items()})

    def dequantize(self, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
        codes = unpack_bits(packed.codes, 5, packed.shape[-1]).view(packed.shape)
        blocks = 2.0 * to_blocks(codes, self.block).float() - 31
        values = blocks * packed.scales.view(blocks.shape[0], 1, blocks.shape[2], 1)
        return from_blocks(values, packed.shape, self.block).to(dtype or packed.dtype)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Odd]:
    format = Odd(name="odd5")
    monkeypatch.setitem(FORMATS, format.name, format)
    yield format


def test_a_model_in_it_computes_and_comes_back(odd: Odd, tmp_path: Path) -> None:
    recipe = Recipe(name="mine", linear=Rule(weight=odd))
    model = tiny("llama")
    model.set_attn_implementation("eager")
    assert "on a GPU weights in odd5 are decoded in plain torch" in str(convert(model, recipe))
    ids = tokens(1, 12)
    before = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(again(input_ids=ids).logits, before)
    assert again.model.layers[0].mlp.up_proj.format == odd


def test_who_does_not_know_it_says_so(odd: Odd) -> None:
    packed = odd.quantize(torch.randn(32, 32))
    assert ((packed.dequantize() - dequantize(packed)) == 0).all()
    assert reading_of(packed) is None
    half = cut(packed, 0, (0, 16))
    assert torch.equal(half.dequantize(), packed.dequantize()[:16])
    for refuse in (
        lambda: wire_format(odd),
        lambda: to_bitsandbytes(packed),
        lambda: to_compressed_tensors(packed),
        lambda: Grids(odd, torch.randn(32, 32)),
    ):
        with pytest.raises(Unsupported, match="odd5"):
            refuse()


def test_formats_of_the_guide_keep_what_they_promise() -> None:
    """The page for people who add a format: each value on it goes through the tests of all formats."""
    names: dict[str, Any] = {"__name__": __name__}
    run_page(GUIDE / "adding-a-format.md", names)
    written = [value for value in names.values() if isinstance(value, Format)]
    assert [format.name for format in written] == ["myf4", "sevens_g64", "half_sevens_g64"]
    for format in written:
        test_contract.test_parts_are_as_laid_out(format)
        test_contract.test_error_is_below_half_a_step(format)
        test_contract.test_requantising_a_decoded_tensor(format)
        test_contract.test_zeros_stay_zeros(format)
        test_contract.test_what_is_not_finite_is_never_a_plausible_number(format, torch.inf)
        test_contract.test_extremes(format)
        test_contract.test_stochastic_rounding_is_unbiased(format)
