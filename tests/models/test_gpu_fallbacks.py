"""The receipt says what a GPU computes in plain torch, for every format, and says it of nothing else."""

from __future__ import annotations

from dataclasses import replace

from fewbits.formats import E4M3, E4M3_ROW, INT8, MXFP4, NF4, STOCHASTIC, TERNARY_ROW, Format
from fewbits.kernels.codec.dequantize import has_kernel
from fewbits.models.packing.convert import convert, explain
from fewbits.recipes import QAT, Recipe, Rule
from tests.every_format import every_format
from tests.models.tiny import tiny

WANT = "in plain torch, for want of a kernel: the same numbers in more time"


def said(recipe: Recipe) -> list[str]:
    model = tiny("llama")
    notes = [note for note in convert(model, recipe).notes if WANT in note]
    assert [note for note in explain(model).notes if WANT in note] == notes
    return notes


@every_format
def test_weights_without_a_kernel(format: Format) -> None:
    notes = said(Recipe(name="r", linear=Rule(weight=format)))
    alone = format.contract.product == "stochastic" or has_kernel(format, (64, 64))
    assert notes == ([] if alone else [f"on a GPU weights in {format.name} are decoded {WANT} (14 layers)"])
    assert alone or format.contract.coding is None or format.contract.coding.bits not in (4, 8)


def test_rounding_in_training_and_operands() -> None:
    assert said(Recipe(name="r", qat=QAT(weight=NF4))) == []
    both = said(Recipe(name="r", qat=QAT(weight=TERNARY_ROW, activation=INT8)))
    assert both == [f"on a GPU values are rounded to ternary_row in each step {WANT} (14 layers)"]
    of_products = said(Recipe(name="r", linear=Rule(activation=MXFP4)))
    assert of_products == [f"on a GPU operands of products are rounded to mxfp4 {WANT} (14 layers)"]
    assert said(Recipe(name="r", linear=Rule(weight=NF4))) == []


def test_stochastic_products_whose_tables_no_kernel_has() -> None:
    signs = replace(STOCHASTIC, signs="twos_complement")
    notes = said(Recipe(name="r", linear=Rule(weight=signs)))
    reason = "signs are in the streams, and the kernels' tables are of magnitudes"
    assert notes == [f"on a GPU stochastic products ({reason}) are computed {WANT} (14 layers)"]
    assert said(Recipe(name="r", linear=Rule(weight=STOCHASTIC))) == []


def test_a_heads_operands_that_have_no_product() -> None:
    receipt = convert(tiny("llama"), Recipe(name="r", head=Rule(activation=INT8)))
    assert "the head has products in 8-bit floats alone, not in int8: they keep their dtype" in receipt.notes
    eight = convert(tiny("llama"), Recipe(name="r", head=Rule(weight_operand=E4M3, activation=E4M3_ROW)))
    assert not any("8-bit floats alone" in note for note in eight.notes)
    assert any("until the decoder is fused" in note for note in eight.notes)
