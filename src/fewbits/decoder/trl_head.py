"""TRL's own output head, computed by ours: what its trainers ask a fused model for costs no second pass.

TRL (from 1.15 on) gives the model that it trains a ``forward`` that takes ``fused_lm_head=True`` and returns,
without holding the logits, the log-probability of each label and what its metrics need: entropy, top 1, mean
logit. It computes the logits again in the backward pass. Two hooks of the model answer such calls with
`fewbits.kernels.loss.linear_log_probs`, which does not, where that computes the same: gradients are on, the
head is frozen and has no bias, the temperature is 1, and no more is asked for. Everything else takes TRL's
way.

Nothing of TRL is imported or replaced: what was asked for stands in the ``forward`` that it left on the
model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fewbits.kernels.loss.linear_log_probs import LogProbs, linear_log_probs
from fewbits.nn.loss import LazyHead, LogitFreeLoss

_IGNORED = -100
_GIVEN = {"log_probs", "entropy", "is_top1", "mean_logits"}
_SETTINGS = {"temperature", "cast_lm_head_to_fp32", "outputs", "final_logit_softcapping", "logit_scale"}
_RESULT = "FusedCausalLMOutput"


class _Asked(NamedTuple):
    """One call: labels (B, S) or, shifted, (B, S) too; what to return, and as what."""

    labels: Tensor
    is_shifted: bool
    num_items: Any
    outputs: frozenset[str]
    result: Callable[..., Any]


class TrlHead:
    """The two hooks, and what they did.

    Attributes:
        taken: calls by the way they went, "fused" or the reason why they took TRL's.
    """

    def __init__(self, model: Any, head: Any) -> None:
        self.head, self.taken = head, Counter[str]()
        self._asked: _Asked | None = None
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after),
        ]

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook: the call without labels, whose logits nobody computes."""
        self._asked = None
        if not kwargs.get("fused_lm_head"):
            return None
        settings, result = _settings_of(model)
        why = self._why_not(model, kwargs, settings)
        self.taken[why or "fused"] += 1
        if why:
            return None
        kwargs = dict(kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        num_items, outputs = kwargs.pop("num_items_in_batch", None), frozenset(settings["outputs"])
        chosen = labels if shifted is None else shifted
        self._asked = _Asked(chosen, shifted is not None, num_items, outputs, result)
        return args, {**kwargs, "fused_lm_head": False, "use_cache": False}

    def after(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        """A forward hook: the result that TRL expects."""
        question, self._asked = self._asked, None
        if question is None:
            return None
        logits = output.logits
        labels = question.labels.to(logits.device)
        hidden = logits.hidden if question.is_shifted else logits.hidden[:, :-1]
        labels = labels if question.is_shifted else labels[:, 1:]
        mask = labels != _IGNORED
        rows = hidden[mask]
        answers = linear_log_probs(rows, logits.weight, labels[mask], soft_cap=logits.soft_cap)
        return _result(question, answers, rows, logits.weight, mask)

    def _why_not(self, model: Any, kwargs: dict[str, Any], settings: dict[str, Any]) -> str:
        """Why a call takes TRL's way; "" if it does not."""
        head = self.head
        if not settings:
            return "the settings of TRL's head are not where they were in TRL 1.16"
        if not torch.is_grad_enabled() or not head.training:
            return "no gradients are asked for"
        if not isinstance(vars(head).get("forward"), LazyHead) or not _loss_is_ours(model):
            return "head or loss function were replaced"
        if head._forward_hooks or head._forward_pre_hooks:
            return "the head has hooks"
        if head.weight.requires_grad or head.bias is not None or hasattr(head.weight, "to_local"):
            return "the head trains, is sharded, or has a bias"
        if settings["temperature"] != 1 or settings["cast_lm_head_to_fp32"] or settings["logit_scale"] != 1:
            return "logits are scaled, or asked for in float32"
        outputs, capped = set(settings["outputs"]), settings["final_logit_softcapping"] is not None
        if not outputs <= (_GIVEN - {"mean_logits"} if capped else _GIVEN):
            return f"{', '.join(sorted(outputs - _GIVEN)) or 'mean logits under a cap'} were asked for"
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return "there are no labels"
        return "losses of experts were asked for" if kwargs.get("output_router_logits") else ""


def _settings_of(model: Any) -> tuple[dict[str, Any], Any]:
    """What TRL's ``forward`` on this model was made with, and the class of its results; empty if unknown."""
    function = getattr(vars(model).get("forward"), "__func__", None)
    code = getattr(function, "__code__", None)
    if function is None or code is None:
        return {}, None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    result = function.__globals__.get(_RESULT)
    if not cells.keys() >= _SETTINGS or result is None:
        return {}, None
    return {name: cells[name].cell_contents for name in _SETTINGS}, result


def _loss_is_ours(model: Any) -> bool:
    return isinstance(vars(model).get("_loss_function"), LogitFreeLoss)


def _result(question: _Asked, answers: LogProbs, rows: Tensor, weight: Tensor, mask: Tensor) -> Any:
    """TRL's result: fields of mask's shape (B, S), zero where no label counts."""

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    log_probs = spread(answers.log_probs)
    count = mask.sum().clamp(min=1) if question.num_items is None else question.num_items
    means = None
    if "mean_logits" in question.outputs:
        means = spread(rows.detach().float() @ weight.detach().mean(0, dtype=torch.float32))
    return question.result(
        loss=-log_probs.sum() / count,
        log_probs=log_probs,
        entropy=spread(answers.entropy) if "entropy" in question.outputs else None,
        mean_logits=means,
        is_top1=spread(answers.is_top) if "is_top1" in question.outputs else None,
        label_mask=mask,
    )
