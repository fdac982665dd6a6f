"""Token after token of a step of decoding: chosen, handed out, looked at, until all texts have ended.

Unless something has to see every token on the host (a streamer, a stopping criterion other than length and
end tokens, a logits processor that is not transformers' own), the host looks whether all sequences have ended
only every `_LOOK_EVERY` tokens and drops what was too much, so that the GPU never waits. Logits that are NaN
or infinite are told at such a look, too: argmax would take token 0 of them, and drawing would end the process
on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, NotFinite
from fewbits.models.generation.model_step import ModelStep
from fewbits.models.generation.step import DecodeStep
from fewbits.nn.finite import why_not_finite

_LOOK_EVERY = 16


class RefuseNotFinite:
    """A logits processor of transformers that changes nothing and refuses NaN and infinity at every token.

    It takes the scores as they come; minus infinity is what banned tokens have, and only a row of it is
    refused.
    """

    def __init__(self, model: nn.Module, text: str = "") -> None:
        """Watch a model's logits; ``text`` names the text, where a call has one alone."""
        self.model, self.text = model, text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (batch, vocabulary) themselves."""
        good = scores.amax(-1).isfinite()
        if not bool(good.all()):
            row = int((~good).nonzero()[0])
            refuse(self.model, self.text or f"row {row + 1}", banned=bool((scores[row] == -torch.inf).all()))
        return scores


def refuse(model: nn.Module, text: str, *, banned: bool = False) -> None:
    """Raise `NotFinite` for a text, naming the first bad weight; `BadInput` if every token is ``banned``."""
    if banned:
        raise BadInput(f"logits processors leave no token to choose for {text}; ban fewer tokens.")
    raise NotFinite(f"the model's logits for {text} are NaN or infinite{why_not_finite(model)}")


def guarded(model: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords of ``generate`` with a look at every token's logits, unless they remove what is not finite."""
    if keywords.get("remove_invalid_values") or isinstance(keywords.get("custom_generate"), str):
        return keywords
    from transformers import LogitsProcessorList

    processors = [*(keywords.get("logits_processor") or ()), RefuseNotFinite(model)]
    return {**keywords, "logits_processor": LogitsProcessorList(processors)}


def _is_a_users(processor: Any) -> bool:
    """Whether a logits processor runs code from outside, which nobody calls for a text that has ended."""
    kind = type(processor)
    return not kind.__module__.startswith("transformers.") or kind.__name__.startswith("PrefixConstrained")


class _Extras:
    """What a call wants to have beside the tokens."""

    def __init__(self, step: DecodeStep | ModelStep, config: Any) -> None:
        self.step, self.config, self.begin = step, config, int(step.position[0])
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def add(self, logits: Tensor, scores: Tensor) -> None:
        """Of one token, before and after the processors."""
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.scores.append(scores)
        if self.config.return_dict_in_generate and self.config.output_logits:
            self.logits.append(logits)

    def with_ids(self, ids: Tensor, count: int) -> Any:
        """``ids`` whose last ``count`` tokens are new, as transformers returns them."""
        if not self.config.return_dict_in_generate:
            return ids
        from transformers import DynamicCache
        from transformers.generation import GenerateDecoderOnlyOutput

        cache, end = DynamicCache(), self.begin + count - 1  # the last token has not been taken in
        for i, (keys, values) in enumerate(zip(self.step.keys, self.step.values, strict=True)):
            cache.update(keys[:, :, :end].clone(), values[:, :, :end].clone(), i)
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(self.scores[:count]) if self.config.output_scores else None,
            logits=tuple(self.logits[:count]) if self.config.output_logits else None,
            past_key_values=cache,
        )


def tokens_of(
    model: nn.Module,
    step: DecodeStep | ModelStep,
    logits: Tensor,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
) -> Any:
    """Prompt and new tokens (batch, length), with what the call wants beside them.

    Args:
        model: the model, which an error is about.
        step: its step, behind the prompt.
        logits: (batch, vocabulary) float32: behind the prompt.
        input_ids: (batch, length) the prompt.
        logits_processor: transformers' list.
        stopping_criteria: transformers' list.
        generation_config: what the call asks for.
        streamer: receives each token, or None.

    Raises:
        NotFinite: logits are NaN or infinite.
        BadInput: the processors ban every token.
    """
    pad = getattr(generation_config, "_pad_token_tensor", None)
    kinds = {type(c).__name__ for c in stopping_criteria}
    ends = "EosTokenCriteria" in kinds or any(hasattr(c, "eos_token_id") for c in stopping_criteria)
    at_once = streamer is not None or bool(kinds - {"MaxLengthCriteria", "EosTokenCriteria"})
    at_once = at_once or any(map(_is_a_users, logits_processor))
    if step.ranks is not None:  # one of them may have a streamer alone
        at_once = step.ranks.any(at_once)
    look_every = 1 if at_once else _LOOK_EVERY
    open_rows = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    all_ended: list[Tensor] = []
    troubles: list[Tensor] = []
    so_far, length = _Extras(step, generation_config), input_ids.shape[1]
    while True:
        scores = logits_processor(input_ids, logits)
        so_far.add(logits, scores)
        trouble = _trouble(logits, scores) * open_rows
        troubles.append(trouble)
        chosen = _drawn(scores, trouble) if generation_config.do_sample else scores.argmax(-1)
        if ends and pad is not None:
            chosen = chosen * open_rows + pad.to(chosen.device) * (1 - open_rows)
        if step.ranks is not None:
            chosen = step.ranks.agree(chosen)
        input_ids = torch.cat([input_ids, chosen[:, None]], dim=-1)
        if streamer is not None:
            streamer.put(chosen.cpu())
        open_rows = open_rows & ~stopping_criteria(input_ids, None)
        if step.ranks is not None and at_once:  # a clock tells each rank another time
            open_rows = step.ranks.agree(open_rows)
        all_ended.append(open_rows.max() == 0)
        full = input_ids.shape[1] >= generation_config.max_length
        if full or len(all_ended) % look_every == 0:
            _look(model, troubles)
            ended = torch.stack(all_ended)
            if full or bool(ended[-1]):
                count = int(ended.long().argmax()) + 1 if bool(ended.any()) else len(all_ended)
                input_ids = input_ids[:, : length + count]
                break
        step.tokens.copy_(chosen)
        logits = step.advance().clone()
    if streamer is not None:
        streamer.end()
    return so_far.with_ids(input_ids, input_ids.shape[1] - length)


def _trouble(logits: Tensor, scores: Tensor) -> Tensor:
    """Of each row (batch,) int64: 0, or where no token can be chosen 1, and 2 where that is the logits'."""
    bad = ~scores.amax(-1).isfinite()
    return bad * (1 + (~logits.amax(-1).isfinite()).long())


def _drawn(scores: Tensor, trouble: Tensor) -> Tensor:
    """Drawn tokens (batch,); of rows in trouble, where torch would end the process on a GPU, any at all."""
    shares = scores.softmax(-1).masked_fill(trouble[:, None] > 0, 1.0)
    return torch.multinomial(shares, num_samples=1).squeeze(1)


def _look(model: nn.Module, troubles: list[Tensor]) -> None:
    """Raise for rows in trouble at the steps since the last look, and forget these steps."""
    rows = torch.stack(troubles).amax(0).tolist()
    troubles.clear()
    for number, trouble in enumerate(rows, 1):
        if trouble:
            refuse(model, f"row {number}", banned=trouble == 1)
