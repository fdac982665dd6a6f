"""Quantisation-aware training: prepare, train, pack.

`prepare_qat` makes the linears compute with rounded weights (and inputs) while their weights stay trainable;
`convert_qat` then packs the weights. The packed model's forward pass equals the trained one's bit for bit,
because both decode the same codes and multiply in the same order.

The gradient passes the rounding straight through and is not clipped: scales are taken from the values
themselves in every step, so nothing ever lies outside of the representable range
(`fewbits.nn.fake_quantize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fewbits.errors import Unsupported
from fewbits.host.receipt import Receipt
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.loading.in_memory import mark_packed
from fewbits.models.packing.convert import convert, record_change
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.finite import check_finite
from fewbits.nn.packed_layers import packed_layer
from fewbits.recipes import Recipe, Rule, get_recipe


def prepare_qat(
    model: nn.Module, recipe: str | Recipe | Mapping[str, Any], *, fuse_norms: bool = True
) -> Any:
    """Fake-quantise a model as ``recipe.qat`` says, and add ``recipe.lora`` if there is one.

    With LoRA the effective weight is rounded as a whole, ``Q(W + s B A)``, and only the adapters train.

    Args:
        model: a Hugging Face model of a known family; changed in place.
        recipe: a recipe with ``qat``, by name, value or plain data.
        fuse_norms: replace the RMSNorms by the library's own.

    Returns:
        The model, or the PeftModel around it; `fewbits.explain` gives the receipt.

    Raises:
        Unsupported: the recipe has no ``qat``.
    """
    recipe = get_recipe(recipe)
    if recipe.qat is None:
        raise Unsupported(f"recipe {recipe.name!r} has no qat; use int4_qat or nf4_qat, or set Recipe.qat.")
    convert(model, recipe, fuse_norms=fuse_norms)
    return model if recipe.lora is None else get_peft_model(model, recipe.lora)


def convert_qat(model: Any) -> tuple[Any, Receipt]:
    """Pack the weights of a model that was trained under `prepare_qat`; in place.

    Adapters are merged first, which changes no effective weight. ``save_pretrained`` then writes a packed
    checkpoint.

    Returns:
        The packed model (for a PeftModel its base model) and the receipt.

    Raises:
        Unsupported: nothing in the model is fake-quantised.
        NotFinite: a trained weight holds a NaN or an infinity.
    """
    fake = [name for name, module in model.named_modules() if isinstance(module, FakeQuantizedLinear)]
    if not fake:
        raise Unsupported("nothing in this model is fake-quantised; call prepare_qat before training.")
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
        fake = [name for name, module in model.named_modules() if isinstance(module, FakeQuantizedLinear)]
    for name in fake:  # before anything is changed
        check_finite(model.get_submodule(name).weight, f"{name}.weight")
    receipt = Receipt("packed after quantisation-aware training")
    for name in fake:
        linear = model.get_submodule(name)
        rule = Rule(weight=linear.weight_format, activation=linear.activation_format)
        record_change(model, name, packed_layer(linear, rule), receipt)
    mark_packed(model)
    return model, receipt
