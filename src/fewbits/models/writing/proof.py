"""What proves an export: the file read back, tensor by tensor and by logits, beside the model in memory."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint
from fewbits.models.merging.checks import operands_as_they_are
from fewbits.models.writing.streamed_logits import skeleton, streamed_logits
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.words import counted, size

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_TEXT = (
    "Once upon a time there was a little girl who lived near a forest. Every morning she took a basket and "
    "went to look for berries, and every evening her mother asked what she had seen. One day she found a "
    "small bird that could not fly, and she carried it home with great care."
)
RECEIPT = "export.json"  # the file beside an export that has its receipt
_TOKENS = 64
_MISPLACED = 0.9  # a tensor in a wrong place or order is off by about the square root of two
_ROUNDINGS = 4.0


@dataclass(frozen=True)
class Measured:
    """What reading an export back shows.

    Attributes:
        worst: the tensor with the largest relative error ||w - decoded|| / ||w||, and that error.
        logits_error: relative distance of the file's logits from those of the merged weights.
        tolerance: what was allowed: four times what random errors of the same size in each weight do.
        kl: mean over 64 tokens of KL(model in memory || file), in nats.
        top1: the share of these tokens with the same likeliest next one.
    """

    worst: tuple[str, float]
    logits_error: float
    tolerance: float
    kl: float
    top1: float


UNMEASURED = Measured(("", math.nan), math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True, kw_only=True)
class ExportReceipt:
    """What was written, from what, and what reading it back shows.

    Attributes:
        path: the file (GGUF) or the folder.
        method: the number format or mix.
        weights_from: where the weights come from, in words.
        num_bytes: of all files with weights.
        num_tensors: tensors by type.
        fallbacks: for each tensor that could not have the mix's type, a sentence.
        measured: what reading back shows; None if it was left out.
        reader: who read it back.
        kept: linears whose codes are those that the model computes with.
        rounded_again: linears that were packed and were rounded a second time, by name.
        calibrated_on: tokens that an importance matrix or scales of activations come from.
        checks: what else was compared, in words.
    """

    path: Path
    method: str
    weights_from: str
    num_bytes: int
    num_tensors: Mapping[str, int]
    fallbacks: tuple[str, ...]
    measured: Measured | None
    reader: str
    kept: int = 0
    rounded_again: tuple[str, ...] = ()
    calibrated_on: int = 0
    checks: tuple[str, ...] = field(default=())

    @property
    def worst(self) -> tuple[str, float]:
        """See `Measured`; NaN if nothing was read back, and so for the others."""
        return self._found.worst

    @property
    def logits_error(self) -> float:
        """See `Measured`."""
        return self._found.logits_error

    @property
    def tolerance(self) -> float:
        """See `Measured`."""
        return self._found.tolerance

    @property
    def kl(self) -> float:
        """See `Measured`."""
        return self._found.kl

    @property
    def top1(self) -> float:
        """See `Measured`."""
        return self._found.top1

    @property
    def _found(self) -> Measured:
        return UNMEASURED if self.measured is None else self.measured

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.num_tensors.items())
        lines = [
            f"{self.path}: {self.method}, {size(self.num_bytes)}, tensors: {kinds}; from {self.weights_from}"
        ]
        if self.measured is None:
            lines.append(
                "NOT CHECKED: it was not read back, and nothing of it was compared (--no-check, check=False)"
            )
        else:
            lines += [
                f"read back by {self.reader}: logits differ by {self.logits_error:.2e} (allowed "
                f"{self.tolerance:.2e}), relative; against the model in memory KL {self.kl:.2e} nats, same "
                f"likeliest token {self.top1:.0%}",
                f"largest error of a tensor: {self.worst[1]:.4f} ({self.worst[0]}); same as in the tokenizer "
                f"and the model: {', '.join(self.checks)}",
            ]
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        lines = []
        if self.kept:
            lines.append(f"{counted(self.kept, 'linear')} with the codes that the model computes with")
        if self.rounded_again:
            lines.append(
                f"{counted(len(self.rounded_again), 'packed linear')} rounded a second time, to another "
                f"format or other groups than before: {_first(self.rounded_again)}"
            )
        if self.calibrated_on:
            lines.append(f"calibrated on {self.calibrated_on:,} tokens")
        if self.fallbacks:
            lines.append(
                f"{counted(len(self.fallbacks), 'tensor')} with another type than the mix's: "
                f"{_first(self.fallbacks)}"
            )
        return lines


def _first(names: tuple[str, ...]) -> str:
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def measure(
    base: Any,
    tokenizer: PreTrainedTokenizerBase,
    expected: Callable[[str], Tensor],
    written: Callable[[str], Tensor],
    *,
    head_is_tied: bool,
    from_memory: bool,
) -> Measured:
    """Compare what was written with what should have been, one tensor in memory at a time.

    Args:
        base: the model in memory, without PEFT around it, its adapters active.
        tokenizer: makes the 64 tokens.
        expected: the merged weights by transformers' names.
        written: the weights as the other side's library decodes them.
        head_is_tied: the embedding is the output head too.
        from_memory: the expected weights are the model's own, so its logits must be met too.

    Raises:
        BadCheckpoint: a tensor is not the one it should be, or the logits differ by more than such errors
            explain.
    """
    ids = _ids(tokenizer, base)
    empty = skeleton(base, head_is_tied=head_is_tied)
    embedding = empty.get_input_embeddings()
    source = next(f"{name}.weight" for name, module in empty.named_modules() if module is embedding)
    weight_of = _tied(expected, source) if head_is_tied else expected
    weight_in_file = _tied(written, source) if head_is_tied else written
    errors: dict[str, float] = {}

    def compared(name: str) -> Tensor:
        weight = weight_of(name).float()
        errors[name] = _distance(weight_in_file(name), weight)
        return weight

    exact = streamed_logits(empty, compared, ids)
    worst = max(errors.items(), key=lambda item: item[1])
    if not worst[1] <= _MISPLACED:
        raise BadCheckpoint(
            f"{worst[0]} reads back as another tensor (relative difference {worst[1]:.2f}); nothing was "
            "written, please report this."
        )
    there = streamed_logits(empty, weight_in_file, ids)
    step = torch.finfo(base.dtype).eps if from_memory else 0.0
    noisy = streamed_logits(empty, lambda name: _noisy(weight_of(name), errors[name], step, name), ids)
    here = _in_memory(base, ids)
    tolerance = _ROUNDINGS * _distance(noisy, exact) + 1e-5
    pairs = [(there, exact), (there, here)] if from_memory and _is_exact(base) else [(there, exact)]
    error = max(_distance(a, b) for a, b in pairs)
    if not error <= tolerance:
        raise BadCheckpoint(
            f"the exported model's logits differ by {error:.2e} relative, and the rounding of its weights "
            f"explains no more than {tolerance:.2e}; nothing was written, please report this."
        )
    log_here, log_there = here.log_softmax(-1), there.log_softmax(-1)
    kl = (log_here.exp() * (log_here - log_there)).sum(-1).mean()
    same = (here.argmax(-1) == there.argmax(-1)).float().mean()
    return Measured(worst, error, tolerance, max(float(kl), 0.0), float(same))


def _tied(weight: Callable[[str], Tensor], source: str) -> Callable[[str], Tensor]:
    return lambda name: weight(source if name == "lm_head.weight" else name)


def _ids(tokenizer: PreTrainedTokenizerBase, base: Any) -> Tensor:
    config = base.config.get_text_config()
    count = min(_TOKENS, int(getattr(config, "max_position_embeddings", None) or _TOKENS))
    ids = list(tokenizer(_TEXT, truncation=True, max_length=count)["input_ids"])
    while len(ids) < count:
        ids += ids
    return torch.tensor([ids[:count]]).clamp_max(config.vocab_size - 1)


def _noisy(weight: Tensor, error: float, step: float, name: str) -> Tensor:
    """The weight with a random error of the relative size that writing made, and rounded at random."""
    weight = weight.float()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    rms = torch.linalg.vector_norm(weight) / max(weight.numel(), 1) ** 0.5
    moved = noise * (error * rms)
    noisy: Tensor = (
        weight + moved + weight * step * torch.rand(weight.shape, generator=generator, dtype=torch.float32)
    )
    return noisy


@torch.no_grad()
def _in_memory(base: Any, ids: Tensor) -> Tensor:
    training = base.training
    with operands_as_they_are(base):
        logits: Tensor = base.eval()(input_ids=ids.to(base.device)).logits
    base.train(training)
    return logits.float().cpu()


def _is_exact(base: nn.Module) -> bool:
    """True if the model computes with its weights as they are, without fake quantisation."""
    return not any(isinstance(module, FakeQuantizedLinear) for module in base.modules())


def _distance(weight: Tensor, expected: Tensor) -> float:
    return float((weight.float() - expected).norm() / expected.norm().clamp_min(1e-30))
