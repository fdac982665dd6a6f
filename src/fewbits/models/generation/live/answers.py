"""Texts of many prompts, as they end: through decoding's kernels, the model's own forward, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.host.unwrap import unwrap
from fewbits.models.generation.calls import option_of, other_way, speculates
from fewbits.models.generation.live.batch import LiveBatch
from fewbits.models.generation.live.plan import SlotPlan, check_slots, free_share, plan_slots
from fewbits.models.generation.live.prompts import Prompts, Read
from fewbits.models.generation.live.row_adapters import RowAdapters
from fewbits.models.generation.live.rows import Request, Row, Text, is_from_transformers, request_of
from fewbits.models.generation.live.slot_layers import size_of_slot
from fewbits.models.generation.live.slots import ModelSlots, Slots, packed_layers
from fewbits.models.generation.live.step_slots import StepSlots
from fewbits.models.generation.loop import Decoding, alone, decoding_of
from fewbits.models.generation.packed_keys import packed_keywords, why_not_cache
from fewbits.models.generation.step import why_not
from fewbits.models.generation.step_ranks import ranks_of
from fewbits.models.generation.tokens import RefuseNotFinite, refuse
from fewbits.models.packing.cache_choice import chosen_cache

if TYPE_CHECKING:
    from torch import nn

_LOOK_EVERY = 8  # steps on a GPU
_PIECE_TOKENS = {"cuda": 4096, "cpu": 512}  # of a forward that reads prompts


@dataclass
class Report:
    """What was done, filled in on the way.

    Attributes:
        way: "kernels", "forward" or "one by one".
        reason: why not the way before it; "" if nothing is to be said.
        plan: slots and their room; None one by one.
        steps: steps of all slots together.
        mean_texts: texts in a step, on average.
        cache: in which formats keys and values are kept, by name; "": as the model computes them.
    """

    way: str = ""
    reason: str = ""
    plan: SlotPlan | None = None
    steps: int = 0
    mean_texts: float = 0.0
    cache: str = ""


@torch.no_grad()
def answers(
    model: nn.Module,
    rows: Sequence[Row],
    keywords: dict[str, Any],
    *,
    slots: int | None = None,
    within_context: bool = False,
    report: Report | None = None,
) -> Iterator[Text]:
    """The texts of all rows, each as soon as it has ended.

    Args:
        model: a causal language model of transformers, plain or quantised, with or without adapters. It is in
            evaluation mode meanwhile.
        rows: prompts as tokens, with a seed each.
        keywords: those of ``generate``; what they mean for one prompt they mean for each.
        slots: texts at a time, 1 to 256; None: as many as the memory holds.
        within_context: end a text where the model's context is full; else, as ``generate``, where its length
            says.
        report: is told what was done.

    Raises:
        BadInput: ``slots`` that are no whole number of 1 to 256, an empty prompt, one that fills the model's
            context, an adapter that is not there, or memory that does not do.
        NotFinite: logits are NaN or infinite.
    """
    _check_words(keywords)
    check_slots(slots)
    if not rows:
        return
    report = report or Report()
    base = unwrap(model)
    with evaluating(model), ExitStack() as held:
        guesses = ("assistant_model", "prompt_lookup_num_tokens", "assistant_tokenizer", "kv_cache")
        settings = _Settings(base, {k: v for k, v in keywords.items() if k not in guesses}, within_context)
        lengths = [settings.length(row) for row in rows]
        adapters = RowAdapters(base, [row.adapter for row in rows])
        held.enter_context(adapters.handed_over())
        state = decoding_of(base)
        kind = chosen_cache(base, keywords.get("kv_cache"))
        try:
            reason = other_way(base, keywords)
            if speculates(base, keywords):
                reason = "guesses are for one text at a time"
            if ranks_of(base) is not None:
                reason = "ranks share the model's layers, and each would join texts at another time"
            if reason:
                raise Unsupported(reason)
            around = _Around(settings, state, held, report, kind, adapters)
            batch = _batch(base, rows, lengths, around, slots)
        except Unsupported as error:
            report.way, report.reason = "one by one", str(error).rstrip(".")
            state.say(report.reason, "many texts are made one by one")
            texts = _one_by_one(model, rows, keywords, settings, (kind, adapters))
        else:
            texts = batch.run(rows)
        for text in texts:
            if text.stopped_by in ("not finite", "banned"):
                refuse(base, f"row {text.row.index + 1}", banned=text.stopped_by == "banned")
            adapters.nobodys()  # whoever takes the text may ask the model for something else
            yield text
        if report.way != "one by one":
            report.steps, report.mean_texts = batch.steps, batch.filled / max(batch.steps, 1)


def _check_words(keywords: dict[str, Any]) -> None:
    """Raise `BadInput` for words of ``generate`` that many texts do not have."""
    if keywords.get("streamer") is not None:
        raise BadInput(
            "a streamer follows one text at a time; take the answers as they end, or generate one."
        )
    if (keywords.get("num_return_sequences") or 1) > 1:
        raise BadInput(
            "num_return_sequences is for one prompt; give the prompt as often as it is to be answered."
        )


class _Settings:
    """What the call asks for, by the length of a prompt."""

    def __init__(self, model: Any, keywords: dict[str, Any], within_context: bool) -> None:
        self.model, self.keywords, self.within_context = model, keywords, within_context
        context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context = context or 2**31
        self._kept: dict[int, Request] = {}

    def __call__(self, row: Row) -> Request:
        """Of one row; of rows of one length the same, unless code from outside may keep something."""
        request = self._kept.get(len(row.ids))
        if request is None:
            request = request_of(self.model, row.ids, self.keywords)
            if self.within_context:
                request = replace(request, limit=min(request.limit, self.context - len(row.ids)))
            if all(map(is_from_transformers, (*request.processors, *request.criteria))):
                self._kept[len(row.ids)] = request
        return request

    def length(self, row: Row) -> int:
        """Tokens of a row's text at most.

        Raises:
            BadInput: there is nothing to start from, or no room for an answer.
        """
        number, length = row.index + 1, len(row.ids)
        if not length:
            raise BadInput(f"row {number} has a prompt without tokens; give at least one.")
        if length >= self.context:
            raise BadInput(
                f"row {number} has a prompt of {length:,} tokens and the model's context holds "
                f"{self.context:,}; shorten it."
            )
        return length + self(row).limit


class _Around(NamedTuple):
    """What belongs to a call, and what is kept on its model."""

    settings: _Settings
    state: Decoding
    held: ExitStack
    report: Report
    kind: KVCache | None
    adapters: RowAdapters


def _batch(
    model: Any, rows: Sequence[Row], lengths: Sequence[int], around: _Around, at_a_time: int | None
) -> LiveBatch:
    settings, report, kind = around.settings, around.report, around.kind
    device = model.device
    reason = why_not(model) or why_not_cache(model, kind)
    if not reason and not around.held.enter_context(alone(around.state)):
        reason = "another call of generate() runs on this model"
    if not reason:
        around.state.step = around.state.together = None  # their memory first
    most_tokens = _PIECE_TOKENS.get(device.type, 512)
    together = device.type == "cuda"
    prompts = Prompts(model, most_tokens=most_tokens, together=together, adapters=around.adapters)
    while rows[0].prompt not in prompts.ready:
        prompts.turn([row.prompt for row in rows[: at_a_time or 1]])
    first = prompts.ready[rows[0].prompt]
    if not bool(first.logits.isfinite().all()):
        refuse(model, f"row {rows[0].index + 1}")
    report.cache = "" if kind is None else kind.name
    look_every = _LOOK_EVERY if _looks_seldom(device) else 1
    each = size_of_slot(first, packed_layers(model, kind, len(first.keys)), kind, decoded=bool(reason))
    # The longest prompt is read in 16 bits, beside the slots.
    reading = (max(len(row.ids) for row in rows) - first.length) * first.bytes_per_token
    report.plan = plan_slots(lengths, each, free_share(device) - reading, at_a_time)
    room = report.plan.room + look_every
    slots = _kernels(model, around, (report.plan.slots, room), first, reason)
    if slots is None:
        report.way = "forward"
        how: dict[str, Any] = {"like": first, "kind": kind, "adapters": around.adapters}
        slots = ModelSlots(model, count=report.plan.slots, room=room, **how)
        slots.prove(first)
    return LiveBatch(slots, prompts, settings, look_every=look_every)


def _looks_seldom(device: torch.device) -> bool:
    """Whether the host runs ahead of the device, so that a look costs a wait."""
    return device.type == "cuda"


def _kernels(model: Any, around: _Around, size: tuple[int, int], first: Read, reason: str) -> Slots | None:
    """Slots over decoding's kernels; None if there are none, and why."""
    state, report = around.state, around.report
    try:
        if reason:
            raise Unsupported(reason)
        how: dict[str, Any] = {"kind": around.kind, "adapters": around.adapters}
        slots = StepSlots(model, count=size[0], room=size[1], **how)
        slots.prove(first)
    except Unsupported as error:
        report.reason = str(error).rstrip(".")
        if model.device.type == "cuda":
            state.say(report.reason, "many texts are made through the model's own forward")
        return None
    report.way = "kernels"
    return slots


def _one_by_one(
    model: Any,
    rows: Sequence[Row],
    keywords: dict[str, Any],
    settings: _Settings,
    how: tuple[KVCache | None, RowAdapters],
) -> Iterator[Text]:
    from transformers import LogitsProcessorList

    kind, adapters = how
    keywords = {name: value for name, value in keywords.items() if name != "kv_cache"}
    knows_caches = isinstance(vars(unwrap(model)).get("generate"), partial)  # FastLanguageModel's

    for row in rows:
        request = settings(row)
        prompt = torch.tensor([row.ids], device=model.device)
        arguments = {"attention_mask": torch.ones_like(prompt), **keywords, "num_return_sequences": 1}
        looks = [*(arguments.get("logits_processor") or ()), RefuseNotFinite(model, f"row {row.index + 1}")]
        arguments["logits_processor"] = LogitsProcessorList(looks)
        if kind is not None:
            arguments |= {"kv_cache": kind} if knows_caches else packed_keywords(model, kind, None)
        adapters.next_rows([row.adapter] * (option_of(unwrap(model), keywords, "num_beams") or 1))
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(row.seed)
            out = model.generate(prompt, **arguments)
        tokens = getattr(out, "sequences", out)[0, len(row.ids) :].tolist()
        ended = bool(tokens) and tokens[-1] in request.ends
        full = "length" if len(tokens) >= request.limit else "stop"
        yield Text(row, request, tokens, [], "end" if ended else full)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; each module's own mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
