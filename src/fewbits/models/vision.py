"""A class that sees: its processor, and which of its linears get adapters (the decoder's, the towers')."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fewbits.errors import Unsupported
from fewbits.host.spec import spec_for
from fewbits.host.unwrap import unwrap
from fewbits.models.adapting.files import linears_of

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def language_names(model: nn.Module, *, attention: bool, mlp: bool) -> list[str]:
    """Full names of the decoder's linears that are asked for."""
    spec = spec_for(model)
    if not (attention and mlp) and (spec.attention is None or spec.mlp is None):
        raise Unsupported(
            f"{spec.without_spec}, so which of its linears are attention's is not known; name them in "
            "target_modules."
        )
    endings = set(spec.linears)
    if spec.attention is not None and not attention:
        endings -= set(spec.attention.linears)
    if spec.mlp is not None and not mlp:
        endings -= set(spec.mlp.linears)
    inside = f"{spec.layers}."
    linears = [name for name in linears_of(model) if name.startswith(inside)]
    return [name for name in linears if name.removeprefix(inside).partition(".")[2] in endings]


def vision_names(model: nn.Module) -> list[str]:
    """Full names of the linears in the towers."""
    towers = tuple(f"{path}." for path in spec_for(model).towers)
    return [name for name in linears_of(model) if name.startswith(towers)] if towers else []


def processor_of(model: nn.Module, tokenizer: Any) -> Any:
    """The processor of text and images beside a model's weights, with this tokenizer; else the tokenizer."""
    from transformers import AutoProcessor

    base = unwrap(model)
    folder = Path(str(getattr(base.config, "name_or_path", "") or ""))
    if folder.is_dir() and not any((folder / name).is_file() for name in _PROCESSORS):
        notes = getattr(base, "fewbits_notes", None)
        if isinstance(notes, list):
            notes.append(f"{folder} has no processor of images; the tokenizer alone is returned")
        return tokenizer
    processor = AutoProcessor.from_pretrained(str(folder))
    processor.tokenizer = tokenizer
    return processor


__all__ = ["language_names", "processor_of", "vision_names"]
