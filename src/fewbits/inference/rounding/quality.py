"""How far a rounded model is from the plain one: KL on a text, of whole models and of one linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats import FORMATS
from fewbits.formats.base import Format
from fewbits.host.transposed import as_linear, transposed_like
from fewbits.models.fast import FastLanguageModel
from fewbits.models.packing.convert import linears_to_replace
from fewbits.models.packing.packed import is_packed
from fewbits.models.writing.calibration_rows import read_windows
from fewbits.recipes import Recipe, Rule

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

WINDOWS, LENGTH = 8, 256  # on which KL is measured


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A model whose decoder's linears all have one format.

    Attributes:
        format: its name.
        bits: stored bits of a value, scales included.
        kl: KL(plain || rounded) in nats a token, each weight rounded by the format itself.
    """

    format: str
    bits: float
    kl: float


@torch.no_grad()
def log_probabilities(model: nn.Module, windows: Tensor) -> Tensor:
    """(windows, length, vocabulary) float32 of a model at ``windows`` (windows, length) of tokens."""
    return torch.cat(
        [model(input_ids=w[None], use_cache=False).logits.float().log_softmax(-1) for w in windows]
    )


def divergence(model: nn.Module, plain: Tensor, windows: Tensor) -> float:
    """KL(plain || model) in nats a token, for ``plain`` from `log_probabilities`."""
    log_probs = log_probabilities(model, windows)
    return max(float((plain.exp() * (plain - log_probs)).sum(-1).mean()), 0.0)


@contextmanager
def rounded(model: Any, formats: Mapping[str, Format]) -> Iterator[None]:
    """While it lasts, the named plain linears, or experts' 3-D parameters, compute with rounded weights."""
    parameters = {name: parameter_of(model, name) for name in formats}
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, format in formats.items():
            weight = weight_of(model, name)
            decoded = format.quantize(weight).dequantize(weight.dtype)
            if decoded.dim() == 2:
                decoded = transposed_like(decoded, model.get_submodule(name)).contiguous()
            parameters[name].data = decoded
        yield
    finally:
        for name, weight in originals.items():
            parameters[name].data = weight


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """The weight of the linear of this name, or the experts' 3-D parameter (E, N, K) of this name."""
    path, _, leaf = name.rpartition(".")
    own = model.get_submodule(path)._parameters.get(leaf)
    parameter: nn.Parameter = model.get_submodule(name).weight if own is None else own  # type: ignore[assignment]
    return parameter


def weight_of(model: nn.Module, name: str) -> Tensor:
    """`parameter_of` as formats take it: a linear's (N, K), or experts' (E, N, K)."""
    parameter = parameter_of(model, name).detach()
    if parameter.dim() == 3:
        return parameter
    weight: Tensor = as_linear(model.get_submodule(name)).weight.detach()
    return weight


def neighbours(format: Format) -> list[Format]:
    """Whole numbers of 2 to 8 bits in the groups of a format, the last two with zero points beside."""
    columns = format.contract.block[1]
    group = f"_g{columns}" if f"int4_g{columns}" in FORMATS else "_g32" if columns else ""
    names = [f"int{bits}{group}{zero}" for bits in (2, 3, 4, 5, 6, 8) for zero in ("", "_zp")]
    return [
        FORMATS[name] for name in names if name in FORMATS and (name[3] in "23" or not name.endswith("_zp"))
    ]


def bits_against_quality(
    source: str | Path,
    rows: str | Path,
    formats: Sequence[Format],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """What each format alone would cost, in bits and in KL: the curve a calibrated model is held against.

    Args:
        source: a model folder with plain weights; it is held in memory whole, on the CPU.
        rows: JSON Lines with "text" or "messages"; 8 windows of 256 tokens at most are used.
        formats: for all linears of the decoder; those that the rows do not fill are left out.
        progress: called as ``progress(formats done, formats in all)``.

    Raises:
        BadInput: too little text.
        Unsupported: a packed source.
    """
    model, tokenizer = FastLanguageModel.from_pretrained(source, load_in_4bit=False, device_map="cpu")
    if is_packed(model):
        raise Unsupported(f"{source} is packed already; measure the original model.")
    windows = measuring_windows(model, tokenizer, rows)
    plain = log_probabilities(model.eval(), windows)
    qualities = []
    for number, format in enumerate(formats, 1):
        rules = linears_to_replace(model, Recipe(name="measured", linear=Rule(weight=format)))
        weights = {name: as_linear(model.get_submodule(name)).weight for name in rules}
        columns = format.contract.block[1]
        if all(weight.shape[1] % columns == 0 for weight in weights.values() if columns):
            with rounded(model, dict.fromkeys(rules, format)):
                kl = divergence(model, plain, windows)
            count = sum(weight.numel() for weight in weights.values())
            bits = sum(8 * format.nbytes(tuple(weight.shape)) for weight in weights.values()) / max(count, 1)
            qualities.append(Quality(format=format.name, bits=bits, kl=kl))
        if progress is not None:
            progress(number, len(formats))
    return qualities


def measuring_windows(model: Any, tokenizer: PreTrainedTokenizerBase, rows: str | Path) -> Tensor:
    """(windows, length) of tokens on which KL is measured."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    return read_windows(rows, tokenizer, length=min(LENGTH, positions), count=WINDOWS, least=1)
