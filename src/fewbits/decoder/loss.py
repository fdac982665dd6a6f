"""Puts `fewbits.nn.loss` into a causal LM: a head whose logits are lazy, a loss that needs none.

Nothing is computed here: the loss without logits is `fewbits.kernels.loss.linear_cross_entropy`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fewbits.decoder.trl_head import TrlHead
from fewbits.families.spec import ModelSpec
from fewbits.formats import E4M3, E4M3_ROW
from fewbits.host.conversion import conversion_of
from fewbits.host.receipt import Change, Receipt
from fewbits.host.spec import find, locate
from fewbits.host.unwrap import unwrap
from fewbits.kernels.product.matmul_packed import PLAIN
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.loss import Float8Head, LazyHead, LogitFreeLoss
from fewbits.recipes.recipe import Rule

_CAUSAL = "ForCausalLM"
_FLOAT8 = Rule(weight_operand=E4M3, activation=E4M3_ROW)
_FLOAT8_BOTH = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)


def fuse_loss(model: nn.Module, spec: ModelSpec, receipt: Receipt) -> TrlHead | None:
    """Give head and loss of ``model``, perhaps inside a PeftModel, their logit-free forms.

    The recipe that ``model`` was converted with says in which formats their products are. Returns the hooks
    that answer TRL's calls; None where head and loss stay as they are.
    """
    inner = unwrap(model)
    name = locate(model, spec, spec.head)
    head = _trained_copy(find(model, name))
    reason = _why_not(inner, head)
    if reason is not None:
        receipt.notes.append(f"the loss holds all logits: {reason}")
        return None
    assert isinstance(head, nn.Linear)
    conversion = conversion_of(model)
    rule = Rule() if conversion is None else replace(conversion.recipe.head, weight=None)
    reason = None if rule.is_plain else _why_not_float8(head, rule)
    if reason is not None:
        receipt.notes.append(f"{name} multiplies in its own dtype: {reason}")
        rule = Rule()
    float8 = None if rule.is_plain else Float8Head(head, gradient=rule.gradient is not None)
    head.forward = LazyHead(head, float8, inner)  # type: ignore[method-assign,assignment]
    inner.loss_function = LogitFreeLoss(inner.loss_function)
    before = type(head).__name__
    after = f"{before}, its loss computed without holding the logits"
    receipt.changes.append(Change(name, before, after if float8 is None else f"{after}, in float8", 0, 0))
    return TrlHead(inner, head)


def _trained_copy(head: nn.Module | None) -> nn.Module | None:
    """The copy of a head that an adapter trains whole (PEFT's ``modules_to_save``), else the head itself."""
    copies = getattr(head, "modules_to_save", None)
    active: list[str] = list(getattr(head, "active_adapters", ()))
    if not isinstance(copies, nn.ModuleDict) or len(active) != 1 or active[0] not in copies:
        return head
    return copies[active[0]]


def float8_head_of(model: nn.Module) -> Float8Head | None:
    """What `fuse_loss` gave the head of ``model``, if its products take 8-bit operands."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((f.float8 for f in forwards if isinstance(f, LazyHead)), None)


def unfuse_loss(model: nn.Module) -> None:
    """Take out what `fuse_loss` put in, if it did."""
    inner = unwrap(model)
    if isinstance(vars(inner).get("_loss_function"), LogitFreeLoss):  # else it has been replaced since
        del inner._loss_function
    for module in inner.modules():
        if isinstance(vars(module).get("forward"), LazyHead):
            del module.forward


def _why_not_float8(head: nn.Linear, rule: Rule) -> str | None:
    if rule not in (_FLOAT8, _FLOAT8_BOTH):
        return f"there is no product of a head for {rule}"
    if head.in_features % 16 or head.out_features % 16:
        return (
            f"8-bit products need sides that are multiples of 16, not {(head.out_features, head.in_features)}"
        )
    return None


def _why_not(model: nn.Module, head: nn.Module | None) -> str | None:
    if head is None or not hasattr(model, "loss_function"):
        return "the model has no output head"
    packed = type(head) is QuantizedLinear and not head.transposed and head.operands == PLAIN
    if type(head) is not nn.Linear and not packed:
        return f"its head is a {type(head).__name__}"
    if "forward" in vars(head):
        return "its head has a forward of its own"
    if "_loss_function" in vars(model):
        return "the model has been given a loss function of its own"
    if getattr(model, "loss_type", None) not in (None, _CAUSAL):
        return f"its loss is {model.loss_type}"
    return None
