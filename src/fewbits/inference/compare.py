"""How far models are from a reference, on one text: divergence, likeliest tokens, perplexity, bytes, speed.

    KL = mean over positions of sum_v p(v) (log p(v) - log q(v)), nats; p: the reference, q: the other model
    top 1 = share of positions where both have the same likeliest token

Log-probabilities are float32, whatever the models compute in. The reference and one other model are in memory
at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import NotFinite
from fewbits.inference.evaluate import TextWindows, Window, evaluating, text_windows
from fewbits.nn.finite import why_not_finite

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One model beside the reference.

    Attributes:
        name: as it was given.
        num_bytes: of its parameters and buffers, each counted once.
        perplexity: on the text, each token scored once.
        tokens: that were scored.
        tokens_per_second: of the forward passes, head included.
        kl: nats a token; None where the vocabularies differ, 0 for the reference.
        top1: share of equal likeliest tokens; None where the vocabularies differ.
        seconds: of the forward passes.
    """

    name: str
    num_bytes: int
    perplexity: float
    tokens: int
    tokens_per_second: float
    kl: float | None
    top1: float | None
    seconds: float


def compare(
    load: Callable[[str], tuple[Any, Any]],
    names: Sequence[str],
    text: str,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Compared]:
    """Compare models with the first of them.

    Args:
        load: gives a model and its tokenizer by a name.
        names: the reference first; the others are loaded one after the other.
        text: on which they are compared.
        window: tokens in a window, BOS included; None: what every one of two models allows, at most 2048.
        max_tokens: only the first so many tokens of the text.
        batch_size: windows per forward pass.
        progress: called as ``progress(models done, models in all)``.

    Raises:
        BadInput: an empty text, or a window that cannot be.
        NotFinite: a model's logits are NaN or infinite.
    """
    reference, tokenizer = load(names[0])
    results = [_alone(names[0], reference, tokenizer, text, window, max_tokens, batch_size)]
    for name in names[1:]:
        if progress is not None:
            progress(len(results), len(names))
        model, own = load(name)
        if own.get_vocab() == tokenizer.get_vocab():
            cut = _cut((reference, model), tokenizer, text, window, max_tokens)
            results.append(_pair(name, reference, model, cut, batch_size))
        else:
            results.append(_alone(name, model, own, text, window, max_tokens, batch_size))
        del model
    return results


def bytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, each counted once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.numel()}
    return sum(tensors.values())


def _cut(
    models: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    window: int | None,
    max_tokens: int | None,
) -> TextWindows:
    """Windows that every one of the models allows."""
    limits = [getattr(m.config.get_text_config(), "max_position_embeddings", None) for m in models]
    shortest = min(range(len(models)), key=lambda i: limits[i] or 1 << 30)
    return text_windows(models[shortest], tokenizer, text, window=window, max_tokens=max_tokens)


def _alone(
    name: str,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    window: int | None,
    max_tokens: int | None,
    batch: int,
) -> Compared:
    """The reference with itself, or a model whose tokens are others."""
    cut = _cut((model,), tokenizer, text, window, max_tokens)
    nll, seconds = 0.0, 0.0
    with evaluating(model):
        for windows in _batches(cut, batch):
            begun = time.perf_counter()
            rows = _log_probs(model, cut, windows)
            seconds += time.perf_counter() - begun
            nll -= sum(float(p.gather(1, t[:, None]).sum()) for p, t in rows)
    return _result(name, model, cut, nll, seconds)


def _pair(name: str, reference: Any, model: nn.Module, cut: TextWindows, batch: int) -> Compared:
    nll, seconds, divergence, same = 0.0, 0.0, 0.0, 0
    with evaluating(reference), evaluating(model):
        for windows in _batches(cut, batch):
            begun = time.perf_counter()
            others = _log_probs(model, cut, windows)
            seconds += time.perf_counter() - begun
            for (p, targets), (q, _) in zip(_log_probs(reference, cut, windows), others, strict=True):
                q = q.to(p.device)
                divergence += float((p.exp() * (p - q)).sum())
                same += int((p.argmax(-1) == q.argmax(-1)).sum())
                nll -= float(q.gather(1, targets[:, None].to(q.device)).sum())
    result = _result(name, model, cut, nll, seconds)
    return Compared(
        **{**result.__dict__, "kl": max(0.0, divergence / cut.num_tokens), "top1": same / cut.num_tokens}
    )


def _result(name: str, model: nn.Module, cut: TextWindows, nll: float, seconds: float) -> Compared:
    mean = nll / cut.num_tokens
    return Compared(
        name=name,
        num_bytes=bytes_of(model),
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        tokens=cut.num_tokens,
        tokens_per_second=cut.num_tokens / max(seconds, 1e-9),
        kl=None,
        top1=None,
        seconds=seconds,
    )


def _batches(cut: TextWindows, batch: int) -> Iterator[list[Window]]:
    for at in range(0, len(cut.windows), batch):
        yield cut.windows[at : at + batch]


def _log_probs(model: Any, cut: TextWindows, windows: list[Window]) -> list[tuple[Tensor, Tensor]]:
    """Of each window (scored tokens, vocabulary) float32 log-probabilities, and the tokens (scored tokens).

    Raises:
        NotFinite: a log-probability is NaN, or that of a token of the text infinite.
    """
    lead = 0 if cut.bos is None else 1
    width = max(w.end - w.begin for w in windows) + lead
    ids = torch.zeros(len(windows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, w in enumerate(windows):
        ids[row, lead : lead + w.end - w.begin] = cut.ids[w.begin : w.end]
        mask[row, : lead + w.end - w.begin] = 1
    if cut.bos is not None:
        ids[:, 0] = cut.bos
    device = model.device
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    rows = []
    for row, w in enumerate(windows):
        at = slice(w.first - w.begin + lead - 1, w.end - w.begin + lead - 1)
        values = logits[row, at].float().log_softmax(-1)
        targets = cut.ids[w.first : w.end].to(values.device)
        if not bool(values.gather(1, targets[:, None]).isfinite().all()):
            raise NotFinite(
                f"logits on tokens {w.first:,} to {w.end - 1:,} are not finite{why_not_finite(model)}"
            )
        rows.append((values, targets))
    return rows
