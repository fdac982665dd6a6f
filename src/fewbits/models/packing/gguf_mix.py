"""GGUF's mixes as recipes: the type that a method of llama.cpp's gives each linear of a model."""

from __future__ import annotations

from pathlib import Path

from fewbits.errors import BadInput
from fewbits.export.gguf_file import plan_tensors
from fewbits.export.gguf_types import method_named
from fewbits.formats import FORMATS
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.folders.reading import Reading
from fewbits.recipes import Recipe, Rule, get_recipe

_PREFIX = "gguf:"


def recipe_of_format(source: str | Path, name: str) -> Recipe:
    """The recipe of one format for all linears, or of ``gguf:METHOD`` the mix for the model in ``source``."""
    if name.startswith(_PREFIX):
        return gguf_mix(source, name.removeprefix(_PREFIX))
    return get_recipe({"name": name, "linear": {"weight": name}})


def gguf_mix(source: str | Path, method: str) -> Recipe:
    """The recipe that packs a model's linears as a GGUF file of a method has them.

    Tensors that the file keeps in 16 bits (rows that no type divides) are left as they are, and so are head
    and embedding, which an export rounds.

    Args:
        source: the model's folder.
        method: such as "q4_k_m".

    Raises:
        BadInput: there is no such method, or it packs nothing.
        Unsupported: a family that is not written to GGUF, or the package gguf is missing.
    """
    from transformers import AutoConfig

    name, checkpoint = method_named(method), inspect_folder(source)
    with Reading(checkpoint.folder):
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True).get_text_config()
    shapes = {key: tuple(entry.shape) for key, entry in checkpoint.tensors.items()}
    is_tied = "lm_head.weight" not in shapes
    rules = {}
    for tensor in plan_tensors(config, shapes, name, head_is_tied=is_tied):
        format = FORMATS.get(f"gguf_{tensor.kind.lower()}")
        if format is not None and ".layers." in tensor.name:
            rules[tensor.name.removesuffix(".weight")] = Rule(weight=format)
    if not rules:
        raise BadInput(f"GGUF's {name} packs no linear of {checkpoint.folder}; choose another method.")
    return Recipe(name=f"gguf_{name}", overrides=tuple(rules.items()))
