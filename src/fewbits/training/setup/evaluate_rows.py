"""A model on rows, written as a run writes them: loss on trained tokens, exact match of greedy answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits.errors import BadInput
from fewbits.training.config import TrainConfig
from fewbits.training.data.collator import IGNORED, Collator
from fewbits.training.data.examples import RowEncoder
from fewbits.training.data.mix import load_run_data, read_run_samples
from fewbits.training.data.packing import SequenceDataset
from fewbits.training.data.sources import check_sources
from fewbits.training.setup.images import check_texts, look_of
from fewbits.training.setup.model_and_trainer import max_positions, sequence_length, with_template
from fewbits.training.setup.samples import answer_all

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """What `evaluate_rows` measured.

    Attributes:
        loss: mean over the tokens that a run would train, nats.
        perplexity: exp(loss).
        tokens: those tokens.
        rows: that were read.
        exact_match: share of greedy answers that are the row's own, spaces at both ends aside; None where no
            answer was asked for, or rows have none (plain text).
        answered: how many rows were answered.
        answers: prompt, expected and answer of each of them.
    """

    loss: float
    perplexity: float
    tokens: int
    rows: int
    exact_match: float | None
    answered: int
    answers: tuple[dict[str, Any], ...]


def config_for(model: str, rows: str, settings: dict[str, Any] | None = None) -> TrainConfig:
    """How rows are written: as the run in the folder ``model`` wrote its own, else by the defaults.

    Args:
        model: a model's folder, or a run's, whose config.yaml then tells template, columns and format.
        rows: the file to evaluate on.
        settings: fields that win.
    """
    own = {**(settings or {}), "train_data": rows}
    recorded = Path(model) / "config.yaml"
    if not recorded.is_file():
        return TrainConfig.from_mapping({"model": model, **own})
    run = TrainConfig.from_yaml(recorded)
    plain = replace(run, eval_data=None, eval_fraction=0.0, data_on_disk=None, method="sft", rewards=())
    return TrainConfig.from_mapping({**plain.to_dict(), **own})


def evaluate_rows(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    *,
    answers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RowResult:
    """Evaluate on the rows that ``config.train_data`` names.

    Args:
        model: in any mode, which is restored.
        tokenizer: its own.
        config: how rows are written, and how long they and their sample answers may be.
        answers: rows, the first ones, that the model answers.
        progress: called as ``progress(batches done, batches in all)``.

    Raises:
        BadInput: the rows cannot be used.
    """
    check_sources(config)
    limit = max_positions(model.config)
    words = with_template(tokenizer, config)
    look = look_of(model.config, words, config.model)
    encoder = RowEncoder(words, config, sequence_length(config, limit), look)
    data = load_run_data(encoder)
    check_texts([data.train], encoder.chat.sight)
    loss, tokens = _loss(model, encoder, SequenceDataset(data.train.examples), config.batch_size, progress)
    rows = list(dict.fromkeys(e.row for e in data.train.examples))[:answers]
    samples = read_run_samples(encoder, data, rows) if rows else []
    samples = [sample for sample in samples if "expected" in sample]
    texts = answer_all(model, encoder, samples, tokens=config.sample_tokens, limit=limit)
    told = [{**sample, "answer": text} for sample, text in zip(samples, texts, strict=True)]
    hits = sum(one["answer"].strip() == one["expected"].strip() for one in told)
    return RowResult(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        tokens=tokens,
        rows=data.train.report.rows,
        exact_match=hits / len(told) if told else None,
        answered=len(told),
        answers=tuple(told),
    )


def _loss(
    model: Any, encoder: RowEncoder, dataset: SequenceDataset, batch_size: int, progress: Any
) -> tuple[float, int]:
    """Mean negative log-likelihood of the trained tokens, and how many they are."""
    collate = Collator(encoder.eos or 0, sight=encoder.chat.sight)
    was_training, total, count = model.training, 0.0, 0
    device = model.get_input_embeddings().weight.device
    batches = range(0, len(dataset), batch_size)
    model.eval()
    try:
        for done, at in enumerate(batches, 1):
            batch = collate([dataset[i] for i in range(at, min(at + batch_size, len(dataset)))])
            left_out = ("labels", "rows", "num_tokens", "valid_rows")
            inputs = {name: value.to(device) for name, value in batch.items() if name not in left_out}
            labels = batch["labels"].to(device)[:, 1:]
            with torch.inference_mode():
                logits = model(**inputs, use_cache=False).logits[:, :-1]
            counts = labels != IGNORED
            total += float(
                torch.nn.functional.cross_entropy(logits[counts].float(), labels[counts], reduction="sum")
            )
            count += int(counts.sum())
            if progress is not None:
                progress(done, len(batches))
    finally:
        model.train(was_training)
    if not count:
        raise BadInput(f"{encoder.config.train_data} has no token that is predicted; give longer rows.")
    return total / count, count
