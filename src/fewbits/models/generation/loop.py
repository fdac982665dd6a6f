"""``model.generate`` at the speed of `DecodeStep`: transformers prepares, this loop decodes.

transformers' ``generate`` takes a decoding loop from outside (``custom_generate``): it has made logits
processors, stopping criteria and special tokens by then, so sampling, repetition penalties, stop strings,
streamers, several answers a prompt and left padding are its own. This loop has the prompt read by the model
itself, copies its keys and values into the step's cache, and replays the step's CUDA graph for every token.

tokens.py chooses the tokens and looks whether texts have ended. What this loop does not take
goes to transformers' own, with one line that says why, once for each reason.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fewbits.decoder.fuse import free_prompt_weights, fusion_of
from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.host.unwrap import unwrap
from fewbits.models.generation.adapters_by_row import adapter_rows
from fewbits.models.generation.calls import (
    check_keywords,
    drops,
    option_of,
    other_speculation,
    other_way,
    speculates,
    with_stop_strings,
)
from fewbits.models.generation.model_state import state_of_model
from fewbits.models.generation.model_step import TOKENS_TO_PROVE, ModelStep, why_no_model_step
from fewbits.models.generation.own_caches import cache_to_return, give_back, length_of, remember
from fewbits.models.generation.packed_keys import fill_step, packed_keywords, why_not_cache
from fewbits.models.generation.products import products_in_16_bits
from fewbits.models.generation.prompt import HowToRead, ReadPrompt, left_padding, read_prompt
from fewbits.models.generation.prompt_graph import PromptGraphs
from fewbits.models.generation.speculation import (
    ROUNDING,
    Draft,
    Lookup,
    Speculation,
    SpeculativeTokens,
    most_guesses,
    together_with,
)
from fewbits.models.generation.step import DecodeStep, why_not
from fewbits.models.generation.step_ranks import check_draws
from fewbits.models.generation.tokens import RefuseNotFinite, guarded, tokens_of
from fewbits.models.packing.cache_choice import cache_of_call

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fewbits")
# Beside the models and not on them: a CUDA graph can be neither copied nor pickled.
_STATES: WeakKeyDictionary[Any, Decoding] = WeakKeyDictionary()
_EXACT = {torch.float32: 1e-3, torch.float64: 1e-6}  # how far apart logits may be; 16 bits: `ROUNDING`
_ROOM_STEP = 256  # tokens: a longer prompt of the next call often finds room


class Decoding:
    """What is kept on a model between calls: the step, whether it was proved, why there is none.

    A step is one of decoding's kernels, or for families without them one of the model's own modules.

    A step has one cache: ``busy`` is held while one call decodes, and another one, of a second thread or of a
    stopping criterion that generates itself, goes to transformers' own loop meanwhile.
    """

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.prompts = PromptGraphs()
        self.step: DecodeStep | ModelStep | None = None
        self.together: tuple[DecodeStep, DecodeStep] | None = None  # the step, and the one that verifies
        self.of_model: tuple[Any, ...] = ()
        self.proved, self.apart = False, float("nan")
        self.refused = self.no_kernels = ""  # why there is no step at all, and none of decoding's kernels
        self.refused_caches: dict[KVCache, str] = {}  # the same of steps over packed keys and values
        self.said: set[str] = set()

    def make_room(self) -> None:
        """Let go of graphs of prompts, and of a step that keeps decoded weights: the model is to train."""
        self.prompts.forget()
        if isinstance(self.step, DecodeStep) and self.step.products.decoded is not None:
            self.step = self.together = None

    def say(self, reason: str, done: str = "generate() decodes through transformers' own loop") -> None:
        """One line for each reason: what is done instead, and why."""
        line = f"{done}: {reason}."
        if line not in self.said:
            self.said.add(line)
            logger.warning(line)


def decoding_of(model: nn.Module) -> Decoding:
    """What is kept on a model."""
    base = unwrap(model)
    decoding = _STATES.get(base)
    if decoding is None:
        decoding = _STATES[base] = Decoding()
    return decoding


def with_loop(model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """What transformers' ``generate`` is called with: the call's keywords, with this loop where it serves."""
    state = decoding_of(model)
    choice = keywords.get("kv_cache")
    keywords = {name: value for name, value in keywords.items() if name != "kv_cache"}
    bound = inspect.signature(type(model).generate).bind_partial(model, *args, **keywords).arguments
    arguments = {**bound, **bound.pop("kwargs", {})}
    kind = cache_of_call(model, arguments, choice)
    if (state.refused or state.no_kernels or state.refused_caches) and state.of_model != state_of_model(
        model
    ):
        state.refused, state.no_kernels, state.refused_caches = "", "", {}  # the model is another one now
    no_kernels = state.no_kernels or why_not(model)
    own = arguments.get("past_key_values")
    in_step: KVCache | None = kind or getattr(own, "kind", None)  # of the caller's packed cache
    reason = (
        state.refused
        or _why_no_step(model, no_kernels, arguments, own)
        or other_way(model, arguments)
        or drops(model)
    )
    reason = reason or other_speculation(model, arguments)
    reason = reason or ("" if no_kernels else why_not_cache(model, in_step))
    if in_step is not None:
        reason = reason or state.refused_caches.get(in_step, "")
    if kind is not None and option_of(model, arguments, "return_dict_in_generate"):
        reason = reason or "the call asks for its cache, which is in few bits"
    if reason:
        if torch.cuda.is_available():
            state.say(reason)
        check_draws(model, bool(option_of(model, arguments, "do_sample")), reason)
        rest = {**keywords, **packed_keywords(model, kind, arguments.get("attention_mask"))}
        # Processors that are given by position are the caller's alone.
        return rest if len(args) > 2 else guarded(model, rest)
    # transformers hands a loop from outside neither a streamer nor a draft model.
    streamer, draft = arguments.get("streamer"), arguments.get("assistant_model")
    loop = partial(_decode, beside=_Beside(streamer, draft, kind, own))
    rest = {name: value for name, value in keywords.items() if name != "assistant_model"}
    return {**with_stop_strings(rest), "custom_generate": loop}


def _why_no_step(model: nn.Module, no_kernels: str, arguments: dict[str, Any], own: Any) -> str:
    """Why neither decoding's kernels nor the model's own modules make a step for a call; "" if they do."""
    if not no_kernels:
        return ""
    reason = why_no_model_step(model)
    packed = getattr(own, "kind", None) is not None
    if not reason and (packed or speculates(model, arguments)):
        what = "a packed cache of the caller's is" if packed else "guesses are"
        return f"{no_kernels}, and {what} for its kernels alone"
    if not reason or reason in no_kernels:
        return no_kernels if reason else ""
    return f"{no_kernels}, and {reason}"


@dataclass(frozen=True)
class _Beside:
    """Of a call, what transformers does not hand to a loop from outside, or hands to it changed.

    Attributes:
        streamer: receives each token.
        draft: the model that guesses.
        kv_cache: in which formats keys and values are kept; None: as the model computes them.
        own_cache: the caller's cache, which goes on.
    """

    streamer: Any = None
    draft: Any = None
    kv_cache: KVCache | None = None
    own_cache: Any = None


@torch.no_grad()
def _decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    beside: _Beside | None = None,
    **keywords: Any,
) -> Any:
    """The loop that transformers calls; (batch, prompt and new tokens), or an output that holds them."""
    state = decoding_of(model)
    beside = beside or _Beside()
    streamer, draft, kv_cache = beside.streamer, beside.draft, beside.kv_cache
    own_cache = beside.own_cache
    own_cache = cache_to_return(generation_config, keywords) if own_cache is None else own_cache
    mask = keywords.get("attention_mask")
    choose = (logits_processor, stopping_criteria, generation_config, streamer)
    embedded = keywords.get("inputs_embeds")
    read = input_ids if embedded is None else embedded[..., 0]  # its shape and device
    most = most_guesses(generation_config, draft) if embedded is None else 0
    end = generation_config.max_length + (1 + most if most else 0) + read.shape[1] - input_ids.shape[1]
    with alone(state) as is_alone, ExitStack() as held:
        try:
            if not is_alone:
                raise Unsupported("another call of generate() runs on this model.")
            padding = left_padding(read, mask)
            check_keywords(model, read, padding, keywords)
            before = 0 if own_cache is None else length_of(own_cache, read, padding, end)
            restore = None if own_cache is None else remember(own_cache)
            piece = generation_config.prefill_chunk_size
            how = HowToRead(kv_cache, embedded, piece, own_cache, before, restore)
            prompt, how = _read(state, model, read, mask, padding, how)
            step = _ready_or_as_before(state, model, read, prompt, (padding, mask, end, how))
        except Unsupported as error:
            state.say(str(error).rstrip("."))
            check_draws(model, generation_config.do_sample, str(error).rstrip("."))
        else:
            guessed = _speculation(model, draft, most, (input_ids, prompt, padding, mask), held)
            if guessed is not None and isinstance(step, DecodeStep):
                tokens = SpeculativeTokens(
                    model, step, guessed, logits_processor, stopping_criteria, streamer
                )
                out: Any = tokens.run(prompt.logits, input_ids)
            else:
                prompt.cache = None  # the step has its keys and values, and a long prompt's are large
                out = tokens_of(model, step, prompt.logits, input_ids, *choose)
            if own_cache is not None:
                give_back(step, own_cache, read.shape[1], getattr(out, "sequences", out).shape[1] - 1)
                if hasattr(out, "sequences"):
                    out.past_key_values = own_cache
            return out
    logits_processor.append(RefuseNotFinite(model))
    return model._sample(  # type: ignore[no-any-return]
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        streamer=streamer,
        **{**keywords, **packed_keywords(model, kv_cache, mask)},
    )


def _read(
    state: Decoding, model: nn.Module, read: Tensor, mask: Tensor | None, padding: Tensor, how: HowToRead
) -> tuple[ReadPrompt, HowToRead]:
    """The prompt, read once more where what earlier calls left took the memory for it."""
    try:
        prompt = state.prompts.read(model, read, padding, how)
        if state.prompts.refused:
            state.say(state.prompts.refused.rstrip("."), "short prompts are read launch by launch")
        return prompt or read_prompt(model, read, mask, padding, how), how
    except torch.OutOfMemoryError:
        if state.step is None and not state.prompts.graphs:
            raise
    state.step = state.together = None
    state.prompts.forget()
    if how.restore is not None:
        how.restore()
        how = replace(how, restore=remember(how.cache))
    return read_prompt(model, read, mask, padding, how), how


def _speculation(
    model: nn.Module,
    draft: Any,
    most: int,
    prompted: tuple[Tensor, ReadPrompt, Tensor, Tensor | None],
    held: ExitStack,
) -> Speculation | None:
    """Who guesses and what verifies; None without, and a line of the log where that was asked for."""
    if not most:
        return None
    input_ids, prompt, padding, mask = prompted
    state = decoding_of(model)
    step = state.step
    assert isinstance(step, DecodeStep)  # `_why_no_step` has refused guesses over others
    try:
        if state.together is None or state.together[0] is not step or state.together[1].batch != most + 1:
            state.together = None  # its memory first
            with products_in_16_bits(model):
                rows_step = together_with(model, step, most + 1, deepcopy(prompt.cache), mask)
            state.together = step, rows_step
        together = state.together[1]
        together.refresh()
        together.choose(adapter_rows(model) * together.batch)
        together.first.copy_(padding.expand(together.batch))
        if draft is None:
            return Speculation(Lookup(most), together)
        own = unwrap(draft)
        of_draft = decoding_of(own)
        if own is model or not held.enter_context(alone(of_draft)):
            raise Unsupported("another call of generate() runs on the draft model")
        read = read_prompt(own, input_ids, mask, padding)
        guesser = _ready(of_draft, own, input_ids, read, padding, mask, step.room)
        if not isinstance(guesser, DecodeStep):
            raise Unsupported(f"the draft model has no kernels of a step ({of_draft.no_kernels})")
        return Speculation(Draft(guesser, input_ids[0].tolist(), most), together)
    except Unsupported as error:
        state.say(str(error).rstrip("."), "generate() decodes without guesses")
        return None


@contextmanager
def alone(state: Decoding) -> Iterator[bool]:
    """Whether no other call decodes on this model; others find this one meanwhile."""
    is_alone = state.busy.acquire(blocking=False)
    try:
        yield is_alone
    finally:
        if is_alone:
            state.busy.release()


def _ready_or_as_before(
    state: Decoding,
    model: nn.Module,
    input_ids: Tensor,
    prompt: ReadPrompt,
    rest: tuple[Tensor, Tensor | None, int, HowToRead],
) -> DecodeStep | ModelStep:
    """`_ready`; without a step the caller's cache is as it was, for transformers' loop."""
    padding, mask, end, how = rest
    try:
        return _ready(state, model, input_ids, prompt, padding, mask, end)
    except Unsupported:
        if how.restore is not None:
            how.restore()
        raise


def _ready(
    state: Decoding,
    model: nn.Module,
    input_ids: Tensor,
    prompt: ReadPrompt,
    padding: Tensor,
    mask: Tensor | None,
    end: int,
) -> DecodeStep | ModelStep:
    """The step for this call, its cache filled: of decoding's kernels, else of the model's own modules."""
    call = (state, model, input_ids, prompt, padding, mask, end)
    try:
        return _ready_one(*call)
    except Unsupported as error:
        packed = getattr(prompt.cache, "kind", None) is not None
        if state.no_kernels or packed or not state.refused or why_no_model_step(model):
            raise
        state.no_kernels, state.refused = str(error).rstrip("."), ""
        return _ready_one(*call)


def _ready_one(
    state: Decoding,
    model: nn.Module,
    input_ids: Tensor,
    prompt: ReadPrompt,
    padding: Tensor,
    mask: Tensor | None,
    end: int,
) -> DecodeStep | ModelStep:
    """`_ready` with one kind of step."""
    batch, length = input_ids.shape
    of_model = prompt.of_model or state_of_model(model)
    step = state.step
    kind = getattr(prompt.cache, "kind", None)
    rows = adapter_rows(model)
    to_prove = max(end, length + TOKENS_TO_PROVE)
    long_enough = step is not None and step.room >= (end if state.proved else to_prove)
    fits = step is not None and long_enough and step.takes(batch) and step.kv_cache == kind
    fits = fits and step is not None and bool(rows) == bool(step.adapters) and {*rows} <= {*step.adapters}
    if step is None or not fits or state.of_model != of_model:
        rooms = _rooms(model, to_prove, step if step is not None and step.batch == batch else None)
        state.step = state.together = step = None  # their memory first
        try:
            step = _new_step(model, rooms, _maker(state, model, batch, prompt.cache, rows))
        except Unsupported as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                state.of_model = of_model
                _refuse(state, kind, str(error).rstrip("."))
            raise
        state.step, state.of_model, state.proved = step, of_model, False
    step.refresh()
    step.choose(rows)
    fill_step(step, prompt.cache, length)
    step.position.fill_(length)
    step.first.copy_(padding)
    if not state.proved:
        _prove(state, model, step, prompt, mask)
    if isinstance(step, ModelStep):
        _record(state, step)
    return step


def _record(state: Decoding, step: ModelStep) -> None:
    """Have a step of the model's modules recorded for the texts at hand, or refuse it for good."""
    try:
        step.record()
    except Unsupported as error:
        state.step, state.refused = None, f"{state.no_kernels}, and {str(error).rstrip('.')}"
        raise Unsupported(f"{state.refused}.") from error


def _rooms(model: Any, needed: int, before: DecodeStep | ModelStep | None) -> list[int]:
    """Tokens of a new step: half as much again as one that has become too short, or just what is needed.

    A conversation that grows gets a new step, and a new graph, a few times and not every 256 tokens.
    """
    rooms = {needed}
    if before is not None and before.room < needed:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or needed
        rooms.add(max(needed, min(before.room * 3 // 2, context)))
    return sorted({-(-room // _ROOM_STEP) * _ROOM_STEP for room in rooms}, reverse=True)


def _maker(
    state: Decoding, model: nn.Module, batch: int, cache: Any, rows: tuple[str, ...]
) -> Callable[[int], DecodeStep | ModelStep]:
    """What makes a step for so many tokens of each text."""
    state.no_kernels = state.no_kernels or why_not(model)
    own = getattr(cache, "kind", None)
    if not state.no_kernels:
        # The step stays between calls: a model that trains between them wants the memory itself.
        fusion = fusion_of(model)
        keep = fusion is not None and fusion.for_inference
        keep = keep or not any(p.requires_grad for p in model.parameters())
        how: dict[str, Any] = {"kv_cache": own, "adapters": sorted({*rows}), "keep_decoded": keep}
        return lambda room: DecodeStep(model, batch=batch, room=room, **how)
    if why_no_model_step(model):
        raise Unsupported(f"{state.no_kernels}.")
    state.say(state.no_kernels, "generate() decodes by a CUDA graph of the model's own modules")
    return lambda room: ModelStep(model, batch=batch, room=room, like=cache, kv_cache=own)


def _new_step(
    model: nn.Module, rooms: list[int], make: Callable[[int], DecodeStep | ModelStep]
) -> DecodeStep | ModelStep:
    """A step with the first of these rooms for which there is memory."""
    for room in rooms:
        try:
            # Inference mode's tensors could not be written by a later call outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return make(room)
        except torch.OutOfMemoryError as error:
            full = error
    decoding_of(model).prompts.forget()
    if free_prompt_weights(model, "keys and values take the memory"):
        return _new_step(model, rooms, make)
    raise Unsupported(f"there is no memory for the keys and values of {rooms[-1]:,} tokens.") from full


def _refuse(state: Decoding, kind: KVCache | None, reason: str) -> None:
    """Remember why there is no step for this model, or none with such a cache."""
    if kind is None:
        state.refused = reason
    else:
        state.refused_caches[kind] = reason


def _prove(
    state: Decoding, model: nn.Module, step: DecodeStep | ModelStep, prompt: ReadPrompt, mask: Tensor | None
) -> None:
    """One token through both ways; refuses the step for good if they differ by more than rounding."""
    if not bool(prompt.logits.isfinite().all()):  # no fault of the step
        raise Unsupported("the prompt's logits are NaN or infinite, with which no step can be compared.")
    step.tokens.copy_(prompt.logits.argmax(-1))
    longer = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    restore = remember(prompt.cache)
    try:
        with products_in_16_bits(model):
            apart = step.difference(model, prompt.cache, longer)
    except Unsupported as error:
        state.step = None
        _refuse(state, step.kv_cache, str(error).rstrip("."))
        raise
    finally:
        restore()
    if not apart <= _EXACT.get(step.keys[0].dtype, ROUNDING * len(step.keys) ** 0.5):
        state.step = None
        how = "through its kernels" if isinstance(step, DecodeStep) else "over fixed places for its keys"
        reason = f"one step {how} gives logits {apart:.2g} apart from the model's own"
        _refuse(state, step.kv_cache, reason)
        raise Unsupported(f"{reason}.")
    state.proved, state.apart = True, apart
