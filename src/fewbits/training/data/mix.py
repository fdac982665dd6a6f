"""The data of a run, from all its places: rows are held out before weights repeat any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from fewbits.errors import BadInput
from fewbits.training.data.examples import (
    RowEncoder,
    Sample,
    load_data,
    read_samples,
    split_rows,
)
from fewbits.training.data.sources import EVAL_SPLITS, Source, sources_of
from fewbits.training.data.token_data import DataReport, TokenData
from fewbits.training.data.token_store import TokenStore, joined, subset


@dataclass(frozen=True)
class Place:
    """A source, and how its rows are numbered in the run: from ``offset`` on."""

    source: Source
    offset: int
    format: str


@dataclass
class RunData:
    """What a run trains and evaluates on.

    Attributes:
        train: the rows of an epoch, repeated or thinned out by the weights.
        eval: the rows held out, or those of eval_data; None without.
        places: where the evaluation rows come from.
        reports: what became of the rows of each place.
    """

    train: TokenData
    eval: TokenData | None
    places: list[Place]
    reports: list[DataReport]


def load_run_data(encoder: RowEncoder) -> RunData:
    """Read and tokenise all that the encoder's configuration names.

    Raises:
        BadInput: a place or a row cannot be used.
    """
    config = encoder.config
    store = None if config.data_on_disk is None else TokenStore(config.data_on_disk)
    parts, places = _load_all("train_data", encoder, ("train",), store)
    reports = [part.report for part in parts]
    held: TokenData | None = None
    if config.eval_data is not None:
        evals, places = _load_all("eval_data", encoder, EVAL_SPLITS, store)
        reports += [part.report for part in evals]
        held = _joined(evals)
    elif config.eval_fraction:
        pairs = [split_rows(part, config.eval_fraction, config.seed) for part in parts]
        parts = [train for train, _ in pairs]
        held = _joined([out for _, out in pairs])
        reports = [data.report for pair in pairs for data in pair]
    weights = [source.weight for source in sources_of(config.train_data)]
    weighted = [
        _weighted(part, weight, [config.seed, 5, i])
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True))
    ]
    return RunData(_joined(weighted), held, places, reports)


def read_run_samples(encoder: RowEncoder, data: RunData, rows: Sequence[int]) -> list[Sample]:
    """Evaluation rows by their numbers in the run, as prompts with the answers that the data give."""
    splits = EVAL_SPLITS if encoder.config.eval_data is not None else ("train",)
    ends = [place.offset for place in data.places[1:]] + [max([*rows, 0]) + 1]
    samples: list[Sample] = []
    for place, end in zip(data.places, ends, strict=True):
        own = [row - place.offset for row in rows if place.offset <= row < max(end, place.offset + 1)]
        if own:
            part = encoder.with_config(place.source.settings(encoder.config))
            samples += read_samples(place.source, part, own, place.format, splits=splits)
    return samples


def _load_all(
    key: str, encoder: RowEncoder, splits: tuple[str, ...], store: TokenStore | None
) -> tuple[list[TokenData], list[Place]]:
    parts: list[TokenData] = []
    places: list[Place] = []
    offset = 0
    for source in sources_of(getattr(encoder.config, key), key):
        own = encoder.with_config(source.settings(encoder.config))
        part = load_data(source, own, splits=splits, first=offset, store=store)
        places.append(Place(source, offset, part.report.format))
        parts.append(part)
        offset = max(example.row for example in part.examples) + 1
    return parts, places


def _weighted(data: TokenData, weight: float, seed: list[int]) -> TokenData:
    """The rows as often as the weight says; of a fraction, rows that the seed draws."""
    if weight == 1:
        return data
    count = len(data.examples)
    total = max(1, round(count * weight))
    indices = list(range(count)) * (total // count)
    if rest := total % count:
        indices += sorted(np.random.default_rng(seed).permutation(count)[:rest].tolist())
    examples = subset(data.examples, indices)
    report = replace(
        data.report,
        path=f"{data.report.path} x {weight:g}",
        examples=len(examples),
        tokens=sum(map(len, examples)),
        trained_tokens=sum(int(e.trained.sum()) for e in examples),
    )
    return TokenData(examples, report)


def _joined(parts: Sequence[TokenData]) -> TokenData:
    if len(parts) == 1:
        return parts[0]
    reports = [part.report for part in parts]
    counts = {
        item.name: sum(getattr(report, item.name) for report in reports)
        for item in fields(DataReport)
        if item.name not in ("path", "format")
    }
    path = " + ".join(report.path for report in reports)
    report = DataReport(path, reports[0].format, **counts)
    if not counts["examples"]:
        raise BadInput(f"{path} has no usable row; check format, columns and length.")
    return TokenData(joined([part.examples for part in parts]), report)
