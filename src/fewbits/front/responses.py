"""Train on responses only: which tokens of an already tokenised row belong to responses.

The markers are looked for in the text that the tokens stand for, not among the token ids: a marker's last
token may hold the first characters of what follows it (a line's end and a blank line), and then the ids of
the marker alone occur nowhere. Each token has a place in the text, and a token is trained if a part of it
lies in a response. A response goes from its marker to the next marker of either kind, and the last one to
the end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from fewbits.errors import BadInput
from fewbits.models.chat.named_templates import parts_of

logger = logging.getLogger("fewbits")
Span = tuple[int, int]
_IGNORED = -100


def train_on_responses_only(
    trainer: Any,
    instruction_part: str | None = None,
    response_part: str | None = None,
    force_match: bool = True,
    tokenizer: Any = None,
    return_function: bool = False,
    num_proc: int | None = None,
    last_response_only: bool = False,
) -> Any:
    """Give the rows of a trainer labels that count the responses alone.

    Args:
        trainer: TRL's SFTTrainer (or transformers' Trainer) over rows with "input_ids"; changed in place.
        instruction_part: what a user's turn begins with; None: as the named chat template that the tokenizer
            has says.
        response_part: what a response begins with, likewise.
        force_match: chooses nothing here: markers are always found as they are written.
        tokenizer: that of the rows; None: the trainer's.
        return_function: return the function from a batch to labels, and leave the trainer alone.
        num_proc: processes; None: this one.
        last_response_only: count the last response of a row alone.

    Returns:
        The trainer, whose rows have "labels"; or the function. Rows without a response are left out, which
        a warning counts; a collator of transformers that would lose the labels is replaced.

    Raises:
        BadInput: markers that nobody names, no tokenised rows, or not one row with a response.
    """
    tokenizer = tokenizer if tokenizer is not None else getattr(trainer, "processing_class", None)
    if tokenizer is None:
        raise BadInput("train_on_responses_only needs the tokenizer of the rows; pass tokenizer=...")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    markers = _markers(tokenizer, instruction_part, response_part)

    def label(batch: dict[str, Any]) -> dict[str, list[list[int]]]:
        nothing: Any = [None] * len(batch["input_ids"])
        lengths, before = (batch.get(n, nothing) for n in ("seq_lengths", "labels"))
        rows = zip(batch["input_ids"], lengths, before, strict=True)
        masks = (
            (row, _mask(tokenizer, row, parts, markers, last_response_only), old) for row, parts, old in rows
        )
        return {"labels": [_labels(row, mask, old) for row, mask, old in masks]}

    if return_function:
        return label
    for name in ("train_dataset", "eval_dataset"):
        data = getattr(trainer, name, None)
        if isinstance(data, dict):
            setattr(trainer, name, {k: _labelled(d, label, k, markers, num_proc) for k, d in data.items()})
        elif data is not None:
            setattr(trainer, name, _labelled(data, label, name, markers, num_proc))
    _keep_labels(trainer, tokenizer)
    return trainer


def _keep_labels(trainer: Any, tokenizer: Any) -> None:
    """Give a trainer that collates by transformers' own collators one that pads labels and keeps them.

    Those pad no labels, and the one for language models puts the input in their place.
    """
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorWithPadding,
        default_data_collator,
    )

    collator = getattr(trainer, "data_collator", None)
    kinds = (DataCollatorForLanguageModeling, DataCollatorWithPadding)
    if type(collator) in kinds or collator is default_data_collator:
        trainer.data_collator = DataCollatorForSeq2Seq(tokenizer)
        logger.warning(
            "the rows have labels now, which %s does not keep; they are collated by DataCollatorForSeq2Seq.",
            getattr(collator, "__name__", type(collator).__name__),
        )


def _markers(tokenizer: Any, instruction: str | None, response: str | None) -> tuple[str, str]:
    if instruction is None or response is None:
        markers = parts_of(tokenizer)
        if markers is None:
            raise BadInput(
                "train_on_responses_only knows the markers of its named chat templates alone, and this"
                " tokenizer has another one; pass instruction_part=... and response_part=..."
            )
        instruction, response = instruction or markers[0], response or markers[1]
    if not instruction or not response or instruction == response:
        raise BadInput(
            f"instruction_part is {instruction!r} and response_part {response!r}; give two different texts."
        )
    return instruction, response


def _labelled(
    data: Any, label: Callable[..., Any], name: str, markers: tuple[str, str], num_proc: int | None
) -> Any:
    columns = getattr(data, "column_names", None) or []
    if "input_ids" not in columns:
        raise BadInput(
            f"the {name} has no input_ids but {', '.join(columns) or 'no named columns'}; let the trainer"
            " tokenise its rows (without skip_prepare_dataset) before train_on_responses_only."
        )
    if not hasattr(data, "__len__"):  # a stream: its rows are labelled as they come
        return data.map(label, batched=True)
    labelled = data.map(label, batched=True, num_proc=num_proc)
    has_response = [any(value != _IGNORED for value in row) for row in labelled["labels"]]
    if not any(has_response):
        raise BadInput(
            f"no row of the {name} has a response behind {markers[1]!r}, so there would be nothing to train"
            " on; write response_part as the chat template writes it, and see that max_length does not cut"
            " the responses off."
        )
    if all(has_response):
        return labelled
    logger.warning(
        "%d of %d rows of the %s have no response behind %r (cut off by max_length?) and are left out.",
        has_response.count(False),
        len(has_response),
        name,
        markers[1],
    )
    return labelled.select([i for i, has in enumerate(has_response) if has])


def _labels(row: Sequence[int], mask: Sequence[bool], before: Sequence[int] | None) -> list[int]:
    labels = list(row) if before is None else list(before)  # what was not trained before stays so
    return [value if trained else _IGNORED for value, trained in zip(labels, mask, strict=True)]


def _mask(
    tokenizer: Any,
    row: Sequence[int],
    lengths: Sequence[int] | None,
    markers: tuple[str, str],
    last_only: bool,
) -> list[bool]:
    """Which tokens of a row train; a packed row consists of sequences of these lengths."""
    mask: list[bool] = []
    for length in lengths or [len(row)]:
        ids = [int(i) for i in row[len(mask) : len(mask) + length]]
        text, places = places_of(tokenizer, ids)
        spans = responses_in(text, *_as_decoded(tokenizer, text, markers))
        mask += [_touches(place, spans[-1:] if last_only else spans) for place in places]
    return mask


def _as_decoded(tokenizer: Any, text: str, markers: tuple[str, str]) -> tuple[str, str]:
    """The markers as they are written, or, where decoding changes spaces in them, as they then read."""
    if markers[1] in text:
        return markers
    read = [tokenizer.decode(tokenizer(m, add_special_tokens=False)["input_ids"]) for m in markers]
    stripped = [r if r.strip() else m for r, m in zip(read, markers, strict=True)]
    return stripped[0], stripped[1]


def responses_in(text: str, instruction: str, response: str) -> list[Span]:
    """Where responses stand in a text: from behind their marker to the next marker, or to the end."""
    places = sorted(
        [(m.start(), m.end(), True) for m in re.finditer(re.escape(response), text)]
        + [(m.start(), m.end(), False) for m in re.finditer(re.escape(instruction), text)]
    )
    ends = [*(start for start, _, _ in places), len(text)][1:]
    return [(end, stop) for (_, end, is_response), stop in zip(places, ends, strict=True) if is_response]


def _touches(place: Span, spans: Sequence[Span]) -> bool:
    start, end = place
    return any(start < stop and max(end, start + 1) > begin for begin, stop in spans)


def places_of(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Span]]:
    """The text that tokens stand for, and the place (first character, behind the last) of each in it.

    A token that only begins a character lies where that character will be.
    """
    pieces = _pieces(tokenizer, ids)
    places: list[Span] = []
    position = 0
    for piece in pieces:
        places.append((position, position + len(piece)))
        position += len(piece)
    return "".join(pieces), places


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's part of the text, special tokens too; empty until a character is whole."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(backend, i) or "" for i in ids]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    pieces, begin, group, shown = [], 0, 0, ""  # group: the first token since a character was whole
    for index in range(len(ids)):
        text = tokenizer.decode(ids[begin : index + 1], **options)
        if text.endswith("\ufffd"):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        begin, group = group, index + 1  # the next piece is what it adds to these tokens
        shown = tokenizer.decode(ids[begin:group], **options)
    return pieces
