"""Recipes by name, each a function of no arguments; ``dataclasses.replace(qlora_nf4(), ...)`` changes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fewbits.formats import E4M3, E4M3_ROW, INT4_G32, INT8, NF4, NF4_DQ, STOCHASTIC
from fewbits.recipes.recipe import QAT, LoRA, Recipe, Rule

_HEAD = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)


def qlora_nf4() -> Recipe:
    """QLoRA: frozen 4-bit NF4 weights with double-quantised scales, LoRA adapters on all linear layers."""
    return Recipe(name="qlora_nf4", linear=Rule(weight=NF4_DQ), lora=LoRA())


def lora_bf16() -> Recipe:
    """LoRA without quantisation: adapters on weights in the dtype of the loaded model."""
    return Recipe(name="lora_bf16", lora=LoRA())


def qlora_nf4_fp8() -> Recipe:
    """QLoRA with matrix products in FP8 (E4M3): NF4 weights are converted to FP8 before each product.

    All operands are E4M3: rows of x and of the gradient with a scale each, the weight with one scale, so that
    the same codes serve both of its products. The scale of a row absorbs most of the range for which E5M2
    gives up a mantissa bit; within a row E4M3 still spans 17 binades (subnormals
    included) and rounds with half of E5M2's error, 2**-4 against 2**-3. DeepSeek-V3 trains with E4M3
    gradients for that reason. Where gradients within a row spread further, set ``gradient=E5M2_ROW``.
    """
    rule = Rule(weight=NF4_DQ, weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)
    return Recipe(name="qlora_nf4_fp8", linear=rule, lora=LoRA())


def float8_full() -> Recipe:
    """Full fine-tuning with the decoder's matrix products in FP8 (E4M3); weights stay in 16 or 32 bits."""
    return Recipe(
        name="float8_full", linear=Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)
    )


def qlora_nf4_fp8_head() -> Recipe:
    """`qlora_nf4_fp8` with the output head in FP8 too, wherever a step computes its loss without logits.

    The gradient of the logits is E4M3 with a scale for each row, the label's entry in 16 bits beside it: see
    `fewbits.kernels.loss.linear_cross_entropy_float8`. A frozen head keeps two FP8 copies, 2 bytes a weight.
    ``head=Rule(weight_operand=E4M3, activation=E4M3_ROW)`` leaves that gradient's product in 16 bits.
    """
    return replace(qlora_nf4_fp8(), name="qlora_nf4_fp8_head", head=_HEAD)


def float8_full_head() -> Recipe:
    """`float8_full` with the output head in FP8 too, except for its weight gradient (16 bits)."""
    return replace(float8_full(), name="float8_full_head", head=_HEAD)


def int8() -> Recipe:
    """Frozen INT8 weights with one scale per row: for inference, or as the base of adapters that you add."""
    return Recipe(name="int8", linear=Rule(weight=INT8))


def int4_qat() -> Recipe:
    """Quantisation-aware training of all weights, which are rounded to INT4 in blocks of 32 in each pass."""
    return Recipe(name="int4_qat", qat=QAT(weight=INT4_G32))


def nf4_qat() -> Recipe:
    """Quantisation-aware training of all weights, which are rounded to NF4 in blocks of 64 in each pass."""
    return Recipe(name="nf4_qat", qat=QAT(weight=NF4))


def stochastic() -> Recipe:
    """Simulates stochastic-computing hardware: matrix products of INT8 codes by bit streams of 128 cycles.

    Weights are prepared as codes with a scale for each row and chunk.

    scmp_llm's operating point: 8 bits, halved streams (128 cycles), chunks of 128, bit-reversed masks.
    """
    return Recipe(name="stochastic", linear=Rule(weight=STOCHASTIC))


def sc_qat() -> Recipe:
    """LoRA for stochastic-computing hardware: the forward pass is exactly what that hardware computes.

    The effective weight, adapter included, goes through the streams as one, so merging and preparing it after
    the training changes nothing.
    """
    return Recipe(name="sc_qat", qat=QAT(weight=STOCHASTIC), lora=LoRA())


CATALOG: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        qlora_nf4,
        lora_bf16,
        qlora_nf4_fp8,
        float8_full,
        qlora_nf4_fp8_head,
        float8_full_head,
        int8,
        int4_qat,
        nf4_qat,
        stochastic,
        sc_qat,
    )
}
