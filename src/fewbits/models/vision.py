"""A class that sees: its processor, and which of its linears get adapters (the decoder's, the towers')."""

from __future__ import annotations

from importlib.util import find_spec
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


def sees(config: Any) -> bool:
    """Whether a model of this configuration reads images beside text."""
    return getattr(config, "vision_config", None) is not None


def processor_of(model: nn.Module, tokenizer: Any) -> Any:
    """The processor of text and images beside a model's weights, with this tokenizer; else the tokenizer."""
    base = unwrap(model)
    name = str(getattr(base.config, "name_or_path", "") or "")
    if _has_none(Path(name)):
        notes = getattr(base, "fewbits_notes", None)
        if isinstance(notes, list):
            notes.append(f"{name} has no processor of images; the tokenizer alone is returned")
        return tokenizer
    return read_processor(name, tokenizer)


def read_processor(name: str, tokenizer: Any) -> Any:
    """The processor of text and images of a model folder or hub id, with this tokenizer in it.

    Raises:
        Unsupported: there is none, or a package that it needs is missing.
    """
    from transformers import AutoProcessor

    if _has_none(Path(name)):
        raise Unsupported(
            f"{name} has no processor of images ({' or '.join(_PROCESSORS)}), so images cannot be read; copy"
            " these files from the model that this one was made of."
        )
    try:
        processor = AutoProcessor.from_pretrained(name, local_files_only=Path(name).is_dir())
    except (ImportError, AttributeError) as error:
        missing = [package for package in ("PIL", "torchvision") if not find_spec(package)]
        if not missing:
            raise
        packages = " and ".join("pillow" if package == "PIL" else package for package in missing)
        raise Unsupported(
            f"the processor of images of {name} needs {packages}, which is not installed; pip install"
            f" {packages.replace(' and ', ' ')}."
        ) from error
    if not hasattr(processor, "tokenizer"):
        raise Unsupported(f"{name} has no processor of images ({type(processor).__name__} is what it has).")
    processor.tokenizer = tokenizer
    return processor


def _has_none(folder: Path) -> bool:
    return folder.is_dir() and not any((folder / name).is_file() for name in _PROCESSORS)


__all__ = ["language_names", "processor_of", "read_processor", "sees", "vision_names"]
