"""Puts `fewbits.nn.loss` into a causal LM: a head whose logits are lazy, a loss that needs none."""

from __future__ import annotations

from typing import Any

from torch import nn

from fewbits.models.receipt import Change, Receipt
from fewbits.models.spec import ModelSpec, find, locate
from fewbits.nn.loss import LazyHead, LogitFreeLoss

_CAUSAL = "ForCausalLM"


def fuse_loss(model: Any, spec: ModelSpec, receipt: Receipt) -> None:
    """Give head and loss of ``model``, perhaps inside a PeftModel, their logit-free forms."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = locate(model, spec, spec.head)
    head = find(model, name)
    reason = _why_not(inner, head)
    if reason is not None:
        receipt.notes.append(f"the loss holds all logits: {reason}")
        return
    assert isinstance(head, nn.Linear)
    head.forward = LazyHead(head)  # type: ignore[method-assign,assignment]
    inner.loss_function = LogitFreeLoss(inner.loss_function)
    before = type(head).__name__
    receipt.changes.append(Change(name, before, f"{before}, loss without logits", 0, 0))


def unfuse_loss(model: Any) -> None:
    """Take out what `fuse_loss` put in, if it did."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    loss = vars(inner).get("_loss_function")
    if not isinstance(loss, LogitFreeLoss):
        return
    del inner._loss_function
    for module in inner.modules():
        if isinstance(vars(module).get("forward"), LazyHead):
            del module.forward


def _why_not(model: Any, head: nn.Module | None) -> str | None:
    if head is None or not hasattr(model, "loss_function"):
        return "the model has no output head"
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}"
    if "forward" in vars(head):
        return "its head has a forward of its own"
    if "_loss_function" in vars(model):
        return "the model has been given a loss function of its own"
    if getattr(model, "loss_type", None) not in (None, _CAUSAL):
        return f"its loss is {model.loss_type}"
    return None
