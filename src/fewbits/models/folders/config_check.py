"""What config.json says, compared with itself and with the weights before a model is built from it.

A wrong number there would otherwise be met by chance: a million layers are built for minutes, one layer less
than the weights have is a model that computes something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fewbits.errors import BadCheckpoint
from fewbits.families.registry import written_spec

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LARGEST = 2**31 - 1
_MOST_LAYERS = 10_000  # where no weights say how many there are
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_REAL = ("F16", "BF16", "F32", "F64")  # float8 values mean nothing without scales


class _Checkpoint(Protocol):
    @property
    def folder(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


def check_config(checkpoint: _Checkpoint) -> None:
    """Refuse what config.json cannot mean, or what the weights contradict.

    Raises:
        BadCheckpoint: a section that is no section, a size that is no size, another number of layers or rows
            of the embedding than the weights have, weights that are no real numbers.
    """
    file, config = checkpoint.folder / "config.json", checkpoint.config
    for section in ("quantization_config", "text_config"):
        if not isinstance(config.get(section) or {}, dict):
            raise _wrong(file, section, config[section], "an object or nothing")
    text = {**config, **(config.get("text_config") or {})}
    for name in _SIZES if written_spec(config) is not None else ():
        value = text.get(name, 1)
        optional = value is None and name in ("num_key_value_heads", "head_dim")
        if not optional and not _is_size(value):
            raise _wrong(file, name, value, f"a whole number from 1 to {_LARGEST:,}")
    _check_layers(checkpoint, text)
    _check_vocabulary(checkpoint, text)
    if written_spec(config) is not None and config.get("quantization_config") is None:
        _check_dtypes(checkpoint)


def check_shapes(checkpoint: _Checkpoint, model: nn.Module) -> None:
    """Refuse weights of other shapes than config.json makes them, before memory is taken for either.

    Args:
        checkpoint: the folder; tensors that the model does not know by their names are not looked at.
        model: what config.json describes, on the meta device.

    Raises:
        BadCheckpoint: the first that differs.
    """
    for name, parameter in model.state_dict().items():
        entry = checkpoint.tensors.get(name)
        if entry is not None and not entry.dtype.startswith(_REAL):
            continue  # codes of experts carry the parameter's name; their formats know their shapes
        if entry is not None and tuple(entry.shape) != tuple(parameter.shape):
            raise BadCheckpoint(
                f"{checkpoint.folder}: {name} has shape {tuple(entry.shape)}, but config.json makes it "
                f"{tuple(parameter.shape)}; the two files belong to different models."
            )


def _wrong(file: Path, name: str, value: Any, need: str) -> BadCheckpoint:
    shown = repr(value)
    shown = shown if len(shown) < 60 else f"{shown[:57]}..."
    return BadCheckpoint(f"{file} says {name} {shown}, which is not {need}; restore the file.")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST


def _check_layers(checkpoint: _Checkpoint, config: Mapping[str, Any]) -> None:
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return
    numbers = {int(match[1]) for name in checkpoint.tensors if (match := _LAYER.search(name))}
    layers = max(numbers) + 1 if numbers else None
    file = checkpoint.folder / "config.json"
    if layers is None and num_layers > _MOST_LAYERS:
        raise _wrong(file, "num_hidden_layers", num_layers, f"a number up to {_MOST_LAYERS:,}")
    # other families may keep more there than the decoder, such as layers that predict further tokens
    too_few = written_spec(config) is not None and layers is not None and num_layers < layers
    if layers is not None and (num_layers > layers or too_few):
        raise BadCheckpoint(
            f"{file} says num_hidden_layers {num_layers:,}, but the weights beside it have {layers:,}; "
            "one of the two belongs to another model, restore it."
        )


def _check_vocabulary(checkpoint: _Checkpoint, config: Mapping[str, Any]) -> None:
    vocab_size = config.get("vocab_size")
    for name in ("model.embed_tokens.weight", "embed_tokens.weight", "lm_head.weight"):
        entry = checkpoint.tensors.get(name)
        if not _is_size(vocab_size) or entry is None or len(entry.shape) != 2:
            continue
        if entry.dtype.startswith(_REAL) and entry.shape[0] != vocab_size:
            raise BadCheckpoint(
                f"{checkpoint.folder}: {name} has {entry.shape[0]:,} rows but config.json says vocab_size "
                f"{vocab_size:,}; one of the two files belongs to another model, restore it."
            )


def _check_dtypes(checkpoint: _Checkpoint) -> None:
    for name, entry in checkpoint.tensors.items():
        if name.endswith(".weight") and not entry.dtype.startswith(_REAL):
            raise BadCheckpoint(
                f"{checkpoint.folder}: {name} holds {entry.dtype}, no plain floating-point numbers, and "
                "config.json names no quantisation; copy or download the folder again."
            )
