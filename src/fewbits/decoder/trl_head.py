"""TRL's own output head, computed by ours: what its trainers ask a fused model for costs no second pass.

TRL (from 1.15 on) gives the model that it trains a ``forward`` that takes ``fused_lm_head=True`` and returns,
without holding the logits, the log-probability of each label and what its metrics need: entropy, top 1, mean
logit. It computes the logits again in the backward pass. Two hooks of the model answer such calls with
`fewbits.kernels.loss.linear_log_probs`, which does not, where that computes the same: the head is frozen and
has no bias, and no more is asked for. Everything else takes TRL's way. A temperature, or a scale of the
logits, is multiplied into the hidden states.

Passes without gradients are answered too, so that a reference and the policy beside it take the same
products: where the head multiplies in 8 bits, it does in both. In evaluation mode it does not, as in any
other evaluation here.

The host does not wait for the device to know how many rows count: the number is on its way to the host while
the decoder is given its work, and is asked for behind that, so that a trainer which runs ahead of the device
stays ahead.

Nothing of TRL is imported or replaced: what was asked for stands in the ``forward`` that it left on the
model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fewbits.kernels.loss.linear_log_probs import linear_log_probs
from fewbits.nn.loss import Float8Head, LazyHead, LogitFreeLoss, is_frozen

if TYPE_CHECKING:
    from torch import nn

_IGNORED = -100
_GIVEN = {"log_probs", "entropy", "is_top1", "mean_logits"}
_SETTINGS = {"temperature", "cast_lm_head_to_fp32", "outputs", "final_logit_softcapping", "logit_scale"}
_RESULT = "FusedCausalLMOutput"
_BELOW = "original_forward"  # the cell in which TRL's keeps the forward that was there before
_ALMOST_ALL = 0.9  # of the rows: to choose them would cost more than it saves


class _Rows:
    """Which positions count, and how many, which the host learns when it asks.

    Args:
        labels: (B, S), those ignored where a position does not count.
    """

    def __init__(self, labels: Tensor) -> None:
        self._count_there = (labels != _IGNORED).view(-1)
        self._count = self._count_there.sum().to("cpu", non_blocking=True)
        self._arrival = torch.cuda.Event() if labels.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(torch.cuda.current_stream(labels.device))

    def places(self) -> Tensor | None:
        """(N,) those that count, in their order; None: so many do that all are computed."""
        if self._arrival is not None:
            self._arrival.synchronize()
        count, there = int(self._count), self._count_there
        return None if count > _ALMOST_ALL * there.numel() else places_of(there, count)


def places_of(is_chosen: Tensor, count: int) -> Tensor:
    """Where (M,) bools are true, (N,) in their order, without asking the device how many are: ``count``."""
    slots = torch.where(is_chosen, is_chosen.cumsum(0) - 1, count)  # all others share the last one
    places = slots.new_zeros(count + 1)
    return places.scatter_(0, slots, torch.arange(len(slots), device=slots.device))[:count]


class _Asked(NamedTuple):
    """One call.

    Attributes:
        labels: (B, S), that of the next token at each position.
        rows: which of the B * S positions count.
        is_shifted: the caller shifted the labels, and wants S results a row; else S - 1.
        num_items: what the loss is divided by.
        outputs: the names of the results that are asked for.
        factor: of the logits.
        result: makes TRL's result.
    """

    labels: Tensor
    rows: _Rows
    is_shifted: bool
    num_items: Any
    outputs: frozenset[str]
    factor: float
    result: Callable[..., Any]


class TrlHead:
    """The two hooks, and what they did.

    Attributes:
        taken: how many calls were answered here ("fused"), and how many by TRL's own code, by reason.
    """

    def __init__(self, model: nn.Module, head: Any) -> None:
        self.head, self.taken = head, Counter[str]()
        self._question: _Asked | None = None
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after),
        ]

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook: the call without labels, whose logits nobody computes."""
        self._follow(model)
        self._expect(None)
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
        if shifted is None:
            labels = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        labels = (labels if shifted is None else shifted).contiguous()
        factor = settings["logit_scale"] / settings["temperature"]
        self._expect(_Asked(labels, _Rows(labels), shifted is not None, num_items, outputs, factor, result))
        return args, {**kwargs, "fused_lm_head": False, "use_cache": False}

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A forward hook: the result that TRL expects."""
        question = self._asked
        self._expect(None)
        if question is None:
            return None
        logits = output.logits
        rows, labels = logits.hidden.flatten(0, 1), question.labels.to(logits.device).view(-1)
        places = question.rows.places()
        index = None if places is None else places.to(rows.device)
        if index is not None:
            rows, labels = rows.index_select(0, index), labels.index_select(0, index)
        if question.factor != 1:
            rows = rows * question.factor
        float8 = logits.float8 if self.head.training else None
        answers: dict[str, Tensor | None] = linear_log_probs(
            rows,
            logits.weight,
            labels,
            soft_cap=logits.soft_cap or 0.0,
            operands=None if float8 is None else float8.operands(),
        )._asdict()
        if "mean_logits" in question.outputs:
            means = rows.detach().float() @ logits.weight.detach().mean(0, dtype=torch.float32)
            answers["mean_logits"] = means.where(labels != _IGNORED, 0.0)
        return _result(question, answers, index)

    def _follow(self, model: Any) -> None:
        """Go over to the head that has taken the former one's place, as resizing embeddings makes one."""
        head, forward = model.get_output_embeddings(), vars(self.head).get("forward")
        if head is self.head or type(head) is not type(self.head) or "forward" in vars(head):
            return
        if not isinstance(forward, LazyHead) or forward.model is not model:  # unfused, or that of a copy
            return
        float8 = forward.float8 and Float8Head(head, gradient=forward.float8.gradient)
        head.forward = LazyHead(head, float8, model)
        del self.head.forward
        self.head = head

    def _expect(self, question: _Asked | None) -> None:
        """What the pass that begins is for; None: nothing of TRL's."""
        self._asked = question
        forward = vars(self.head).get("forward")
        if isinstance(forward, LazyHead):
            forward.asked_for_labels = question is not None

    def _why_not(self, model: nn.Module, kwargs: dict[str, Any], settings: dict[str, Any]) -> str:
        """Why a call takes TRL's way; "" if it does not."""
        head = self.head
        if not settings:
            return "the settings of TRL's head are not where they were in TRL 1.16"
        if _is_of_a_copy(vars(model).get("forward"), model):
            return "the model was copied after TRL had it, and TRL's forward goes on to the former one"
        if torch.is_inference_mode_enabled():
            return "inference mode is on"
        if not isinstance(vars(head).get("forward"), LazyHead) or not _loss_is_ours(model):
            return "head or loss function were replaced"
        if head._forward_hooks or head._forward_pre_hooks:
            return "the head has hooks"
        is_sharded = any(hasattr(parameter, "to_local") for parameter in head.parameters())
        if not is_frozen(head) or head.bias is not None or is_sharded:
            return "the head trains, is sharded, or has a bias"
        capped = settings["final_logit_softcapping"] is not None
        is_scaled = settings["temperature"] != 1 or settings["logit_scale"] != 1
        if settings["cast_lm_head_to_fp32"] or (capped and is_scaled):
            return "logits are asked for in float32, or scaled and capped"
        outputs = set(settings["outputs"])
        if not outputs <= (_GIVEN - {"mean_logits"} if capped else _GIVEN):
            return f"{', '.join(sorted(outputs - _GIVEN)) or 'mean logits under a cap'} were asked for"
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return "there are no labels"
        return "losses of experts were asked for" if kwargs.get("output_router_logits") else ""


def _settings_of(model: nn.Module) -> tuple[dict[str, Any], Any]:
    """What TRL's ``forward`` on this model was made with, and the class of its results; empty if unknown."""
    forward = vars(model).get("forward")
    cells, function = _cells_of(forward), getattr(forward, "__func__", None)
    result = getattr(function, "__globals__", {}).get(_RESULT)
    if not cells.keys() >= _SETTINGS or result is None:
        return {}, None
    return {name: cells[name] for name in _SETTINGS}, result


def _is_of_a_copy(forward: Any, model: Any) -> bool:
    """Whether TRL's ``forward``, or one below it, goes on to another model than this one.

    ``copy.deepcopy`` of a model that TRL has had copies the method and not the function's cell, which goes on
    to the model that was copied.
    """
    while forward is not None:
        if getattr(forward, "__self__", model) is not model:
            return True
        forward = _cells_of(forward).get(_BELOW)
    return False


def _cells_of(forward: Any) -> dict[str, Any]:
    """What a bound method's function was made with, by name."""
    function = getattr(forward, "__func__", None)
    code = getattr(function, "__code__", None)
    if function is None or code is None:
        return {}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _loss_is_ours(model: nn.Module) -> bool:
    return isinstance(vars(model).get("_loss_function"), LogitFreeLoss)


def _result(question: _Asked, answers: dict[str, Tensor | None], index: Tensor | None) -> Any:
    """TRL's result: fields of shape (B, S), or (B, S - 1) of shifted labels, zero where none counts."""
    batch, length = question.labels.shape
    width = length if question.is_shifted else length - 1

    def spread(name: str) -> Tensor | None:
        values = answers.get(name)
        if values is None:
            return None
        if index is not None:
            values = values.new_zeros(batch * length).index_copy(0, index, values)
        return values.view(batch, length)[:, :width]

    mask = (question.labels != _IGNORED)[:, :width]
    log_probs = spread("log_probs")
    assert log_probs is not None
    count = mask.sum().clamp(min=1) if question.num_items is None else question.num_items
    return question.result(
        loss=-log_probs.sum() / count,
        log_probs=log_probs,
        entropy=spread("entropy") if "entropy" in question.outputs else None,
        mean_logits=spread("mean_logits"),
        is_top1=spread("is_top") if "is_top1" in question.outputs else None,
        label_mask=mask,
    )
