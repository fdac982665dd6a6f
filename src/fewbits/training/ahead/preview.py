"""Rows as the model will see them, before anything is trained: text, trained parts, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbits.errors import BadInput, Unsupported
from fewbits.training.config import TrainConfig
from fewbits.training.data.examples import Example, RowEncoder
from fewbits.training.data.mix import load_run_data
from fewbits.training.data.packing import pack
from fewbits.training.data.sources import check_sources
from fewbits.training.setup.images import check_images, look_of
from fewbits.training.setup.model_and_trainer import load_tokenizer, max_positions, sequence_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = tuple[str, bool]  # a text, and whether its tokens are trained


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One row as the model sees it.

    Attributes:
        row: where it stands in its file.
        name: which of the row's sequences; empty where it has one ("chosen", "rejected").
        parts: its text in order, cut where training begins and ends.
        tokens: how many.
        trained: how many of them the loss counts.
    """

    row: int
    parts: tuple[Part, ...]
    tokens: int
    trained: int
    name: str = ""


@dataclass(kw_only=True)
class Preview:
    """What a configuration makes of its data.

    Attributes:
        report: the data's own line: rows, tokens, what was skipped or cut.
        max_length: longest row in tokens that the run takes.
        lengths: tokens of every row.
        trained: tokens in all that the loss counts.
        shown: the first rows.
        packed: share of a packed sequence that is no padding; None where a method does not pack.
        padded: the same for batches of single rows, in a random order.
        bins: how many rows have so many tokens: edges and counts of ten bins.
        notes: sentences worth knowing.
    """

    report: str
    max_length: int
    lengths: tuple[int, ...]
    trained: int
    shown: tuple[Shown, ...]
    packed: float | None
    padded: float
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)

    @property
    def bins(self) -> list[tuple[int, int, int]]:
        """Ten bins of lengths: (from, to, rows)."""
        counts, edges = np.histogram(self.lengths, bins=10, range=(0, max(self.lengths)))
        marks = [int(np.ceil(e)) for e in edges]
        return [(marks[i], marks[i + 1], int(n)) for i, n in enumerate(counts)]

    @property
    def quantiles(self) -> dict[str, int]:
        """Shortest, median, 95th percentile and longest row."""
        values = np.quantile(self.lengths, (0, 0.5, 0.95, 1), method="nearest")
        return dict(zip(("shortest", "median", "95 %", "longest"), map(int, values), strict=True))


def preview(config: TrainConfig, rows: int = 3) -> Preview:
    """Read and tokenise a run's training data.

    Args:
        config: the run.
        rows: how many rows are shown.

    Raises:
        BadInput, Unsupported: what would stop the run for its data or tokenizer.
    """
    light = load_tokenizer(config)
    if light is None:
        raise BadInput(
            f"{config.model} has no tokenizer that can be loaded; check the folder or the hub's name."
        )
    tokenizer, shapes = light
    check_sources(config)
    length = sequence_length(config, max_positions(shapes))
    if config.method != "sft":
        return _of_preferences(config, tokenizer, length, rows)
    look = look_of(shapes, tokenizer, config.model)
    return _of_rows(config, RowEncoder(tokenizer, replace(config, eval_data=None), length, look), rows)


def _of_rows(config: TrainConfig, encoder: RowEncoder, rows: int) -> Preview:
    tokenizer, length = encoder.tokenizer, encoder.max_length
    loaded = load_run_data(encoder)
    data = loaded.train
    check_images(config, [data], encoder.chat.sight)
    lengths = [len(e) for e in data.examples]
    sequences = pack(lengths, length, seed=config.seed)
    result = Preview(
        report="; ".join(map(str, loaded.reports)),
        max_length=length,
        lengths=tuple(lengths),
        trained=sum(int(e.trained.sum()) for e in data.examples),
        shown=tuple(_shown(e, tokenizer) for e in data.examples[:rows]),
        packed=sum(lengths) / (len(sequences) * length),
        padded=_padded(lengths, config),
    )
    if (
        encoder.chat.sight is None
        and not config.packing
        and result.packed
        and result.packed > 1.15 * result.padded
    ):
        result.notes.append(
            f"packing: true would fill {result.packed:.0%} of what is computed, where single rows fill"
            f" {result.padded:.0%}."
        )
    return result


def _shown(example: Example, tokenizer: PreTrainedTokenizerBase) -> Shown:
    ids, trained = example.input_ids.tolist(), example.trained.tolist()
    return Shown(
        row=example.row, parts=tuple(_parts(ids, trained, tokenizer)), tokens=len(ids), trained=sum(trained)
    )


def _parts(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[Part]:
    """Runs of tokens that are trained, or not; decoded together, for a character may be several tokens."""
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or trained[end] != trained[start]:
            text = tokenizer.decode(
                ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            yield text, bool(trained[start])
            start = end


def _padded(lengths: Sequence[int], config: TrainConfig) -> float:
    order = np.random.default_rng([config.seed, 3]).permutation(len(lengths))
    drawn = np.asarray(lengths)[order]
    size = config.batch_size
    computed = sum(int(part.max()) * len(part) for part in np.split(drawn, range(size, len(drawn), size)))
    return sum(lengths) / computed


def _of_preferences(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, length: int, rows: int
) -> Preview:
    from fewbits.training.preferences.rows import preference_rows

    try:
        from trl.data_utils import maybe_apply_chat_template
    except ImportError as error:
        raise Unsupported(f"method {config.method} needs TRL; pip install 'fewbits[train]'.") from error
    read = preference_rows(config, config.train_data)
    _check_template(config, tokenizer, read[0])
    shown: list[Shown] = []
    for number, row in enumerate(read, 1):
        parts = ("prompt", "chosen", "rejected", "completion")
        texts = maybe_apply_chat_template({k: row[k] for k in parts if k in row}, tokenizer)
        shown += _answers(texts, number, tokenizer)
    lengths = [min(one.tokens, length) for one in shown]
    count = len({one.row for one in shown[: rows * 2]}) if len(shown) > len(read) else rows
    cut = sum(one.tokens > length for one in shown)
    return Preview(
        report=f"{config.train_data}: {len(read):,} rows ({config.method}), {sum(lengths):,} tokens"
        + (f", {cut:,} sequences over {length:,} tokens, which TRL cuts" if cut else ""),
        max_length=length,
        lengths=tuple(lengths),
        trained=sum(one.trained for one in shown),
        shown=tuple(one for one in shown if one.row <= count),
        packed=None,
        padded=_padded(lengths, config),
    )


def _check_template(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> None:
    if any(isinstance(value, list) for value in row.values()) and not tokenizer.chat_template:
        raise BadInput(
            f"the tokenizer of {config.model} has no chat template, which rows of messages need; set"
            " chat_template, as in chat_template: chatml."
        )


def _answers(texts: dict[str, Any], row: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[Shown]:
    """A preference row's sequences: its prompt, which is not trained, before each of its answers."""
    prompt = str(texts.get("prompt", ""))
    head = tokenizer(prompt)["input_ids"] if prompt else []
    names: list[str] = [name for name in ("chosen", "rejected", "completion") if name in texts] or [""]
    for name in names:
        answer = str(texts.get(name, ""))
        tail = tokenizer(answer, add_special_tokens=not prompt)["input_ids"] if answer else []
        parts = ((prompt, False), (answer, True))
        yield Shown(
            row=row,
            name=name,
            parts=tuple(part for part in parts if part[0]),
            tokens=len(head) + len(tail),
            trained=len(tail),
        )
