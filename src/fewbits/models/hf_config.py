"""`FewbitsConfig`: what ``from_pretrained`` is told about a packed model, and what its config.json holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.formats.base import Format
from fewbits.recipes import Recipe, get_recipe, recipe_from_config, recipe_to_config

METHOD = "fewbits"
LAYOUT_VERSION = 1


class FewbitsConfig(QuantizationConfigMixin):
    """Which recipe a model is loaded with; what config.json of a packed model holds.

    Args:
        recipe: a name from the catalog, a `Recipe`, or its plain-data form.
        allow_pickle: accept checkpoints that are not safetensors.
        source: the layout of the checkpoint's packed tensors: "fewbits", or "bitsandbytes".
        layout_version: the version of the packed layout that a checkpoint was written in.
        formats: the formats a checkpoint was written in, every field spelled out; compared with this
            version's own.
    """

    def __init__(
        self,
        recipe: str | Recipe | Mapping[str, Any] = "qlora_nf4",
        *,
        allow_pickle: bool = False,
        source: str = METHOD,
        layout_version: int = LAYOUT_VERSION,
        formats: list[dict[str, Any]] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        from fewbits.models.hf_quantizer import register

        register()
        if quant_method != METHOD:
            raise SpecMismatch(
                f"this is a {quant_method!r} configuration; FewbitsConfig reads only {METHOD!r}."
            )
        if layout_version > LAYOUT_VERSION:
            raise Unsupported(
                f"the checkpoint has packed layout {layout_version}, this version of fewbits reads up to "
                f"{LAYOUT_VERSION}; install a newer fewbits."
            )
        self.quant_method = METHOD
        self.recipe = recipe_from_config(recipe) if isinstance(recipe, Mapping) else get_recipe(recipe)
        self.allow_pickle = allow_pickle
        self.source = source
        _check_formats(self.recipe, formats)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for config.json: the recipe, and every format it uses with all fields."""
        return {
            "quant_method": METHOD,
            "layout_version": LAYOUT_VERSION,
            "source": self.source,
            "recipe": recipe_to_config(self.recipe),
            "formats": [_spell_out(f) for f in formats_of(self.recipe)],
        }

    def __iter__(self) -> Any:
        """``dict(config)``, as transformers' own configurations allow."""
        yield from self.to_dict().items()


def formats_of(recipe: Recipe) -> list[Format]:
    """Every format that a recipe names, once."""
    found: dict[Format, None] = {}

    def walk(value: object) -> None:
        if isinstance(value, Format):
            found[value] = None
        elif isinstance(value, tuple):
            for item in value:
                walk(item)
        elif dataclasses.is_dataclass(value):
            for f in dataclasses.fields(value):
                walk(getattr(value, f.name))

    walk(recipe)
    return list(found)


def _spell_out(format: Format) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Format):
            return _spell_out(value)
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)

    return {f.name: plain(getattr(format, f.name)) for f in dataclasses.fields(format)}


def _check_formats(recipe: Recipe, written: list[dict[str, Any]] | None) -> None:
    ours = [_spell_out(f) for f in formats_of(recipe)]
    for format in written or []:
        if format not in ours:
            raise SpecMismatch(
                f"the checkpoint's format {format.get('name')!r} has other fields than this version's "
                "format of that name, so its codes would decode to other numbers; use the fewbits version "
                "that wrote it."
            )
