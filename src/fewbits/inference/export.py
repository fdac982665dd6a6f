"""A checkpoint becomes a packed one, tensor by tensor: no model is built and no layer runs.

What is written has the layout that ``save_pretrained`` of a packed model gives (``<linear>.weight_<part>`` in
safetensors, the recipe in config.json), so `FastLanguageModel.from_pretrained` loads it. Memory holds one
weight of the source and the packed tensors of one shard. The new folder appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.formats import Format
from fewbits.host.transposed import is_transposed
from fewbits.models.folders.checkpoint import INDEX, WEIGHTS, Checkpoint, inspect_folder
from fewbits.models.folders.config_check import check_shapes
from fewbits.models.folders.reading import Reading
from fewbits.models.folders.whole_folder import check_destination, whole_folder
from fewbits.models.loading.packed_folder import close_folder
from fewbits.nn.finite import check_finite
from fewbits.recipes import Recipe, Rule, get_recipe

SHARD_BYTES = 2_000_000_000
# What else belongs to a model: configurations, tokenizers, chat templates, licences.
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*")


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """How far one packed weight is from the weight it was.

    Attributes:
        name: the linear's full name.
        format: the name of its format.
        shape: shape of the weight.
        bits_per_value: stored bits per value, scales included.
        bytes_before: bytes of the weight in the source.
        bytes_after: bytes of its packed parts.
        relative_error: ||w - decoded|| / ||w||, Frobenius.
        snr_db: 20 log10 of the inverse; None for an exact weight.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    bits_per_value: float
    bytes_before: int
    bytes_after: int
    relative_error: float
    snr_db: float | None


@dataclass(frozen=True, kw_only=True)
class QuantizeResult:
    """What `quantize_checkpoint` wrote.

    Attributes:
        folder: the packed checkpoint.
        recipe: the recipe's name.
        layers: one entry for each packed weight, in the model's order.
        bytes_before: bytes of all tensors of the source.
        bytes_after: bytes of all tensors written.
        relative_error: over all packed weights together.
    """

    folder: Path
    recipe: str
    layers: tuple[LayerError, ...]
    bytes_before: int
    bytes_after: int
    relative_error: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    recipe: str | Recipe | Mapping[str, Any],
    *,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizeResult:
    """Write a packed copy of a checkpoint.

    Args:
        source: a model folder with safetensors.
        destination: the folder to write; never the source.
        recipe: which linears get which format, by name, value or plain data. Of one for quantisation-aware
            training the weight format is used.
        device: where the arithmetic is done.
        overwrite: replace a model that is in the destination, by one rename; False refuses a folder that is
            not empty.
        progress: called as ``progress(tensors done, tensors in all)``.

    Raises:
        BadInput: the destination is taken or is the source, or the recipe packs no weight.
        BadCheckpoint: the source is damaged, a pickle, or lacks a weight.
        NotFinite: a weight holds a NaN or an infinity, packed or not.
        Unsupported: the source is quantised already, or its architecture is unknown.
    """
    chosen = for_storage(get_recipe(recipe))
    target = Path(destination)
    check_destination(target, overwrite=overwrite, protected=[source])
    checkpoint = inspect_folder(source)
    if checkpoint.quant_method is not None:
        raise Unsupported(
            f"{checkpoint.folder} is quantised already ({checkpoint.quant_method}); use the original model."
        )
    names, rules, transposed = _plan(checkpoint, chosen)
    order = {name: i for i, name in enumerate(rules)}
    with whole_folder(target, overwrite=overwrite, protected=[source]) as folder:
        writer = _ShardWriter(folder)
        layers: list[LayerError] = []
        squared_error = squared_norm = 0.0
        for number, item in enumerate(_packed(checkpoint, names, rules, transposed, torch.device(device)), 1):
            writer.add(item.tensors)
            layers += [] if item.error is None else [item.error]
            squared_error, squared_norm = squared_error + item.squared_error, squared_norm + item.squared_norm
            if progress is not None:
                progress(number, len(names))
        bytes_after = writer.close()
        _write_config(checkpoint, chosen, folder)
        close_folder(folder)
        inspect_folder(folder)  # what was written reads back
    return QuantizeResult(
        folder=target,
        recipe=chosen.name,
        layers=tuple(sorted(layers, key=lambda layer: order[layer.name])),
        bytes_before=sum(_entry_bytes(checkpoint, key) for key in names),
        bytes_after=bytes_after,
        relative_error=math.sqrt(squared_error / squared_norm) if squared_norm else 0.0,
    )


class _Item(NamedTuple):
    """What one tensor of the source becomes; for a packed one also its error and the squares in it."""

    tensors: dict[str, Tensor]
    error: LayerError | None = None
    squared_error: float = 0.0
    squared_norm: float = 0.0


def for_storage(recipe: Recipe) -> Recipe:
    """The recipe that stores in packed form what one for quantisation-aware training aims at."""
    if recipe.qat is None:
        return recipe
    return replace(recipe, linear=Rule(weight=recipe.qat.weight, activation=recipe.qat.activation), qat=None)


def _plan(checkpoint: Checkpoint, recipe: Recipe) -> tuple[dict[str, str], dict[str, Format], frozenset[str]]:
    """The model's name of each tensor of the source, each linear's format, and those stored as (K, N)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fewbits.host.spec import spec_for
    from fewbits.models.packing.convert import linears_to_replace
    from fewbits.models.packing.recipe_patterns import unmatched_patterns

    with Reading(checkpoint.folder):
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        check_shapes(checkpoint, model)
    unmatched_patterns(model, spec_for(model), recipe)
    rules = {n: r.weight for n, r in linears_to_replace(model, recipe).items() if r.weight is not None}
    if not rules:
        raise BadInput(
            f"the recipe {recipe.name!r} packs no weight of this model; choose one such as qlora_nf4."
        )
    prefix, keys = f"{model.base_model_prefix}.", set(model.state_dict())
    names = {}
    for key in checkpoint.tensors:
        spellings = (key, prefix + key, key.removeprefix(prefix))
        names[key] = next((name for name in spellings if name in keys), key)
    absent = [name for name in rules if f"{name}.weight" not in names.values()]
    if absent:
        raise BadCheckpoint(
            f"{checkpoint.folder} lacks {absent[0]}.weight; copy or download its files again."
        )
    return names, rules, frozenset(name for name in rules if is_transposed(model.get_submodule(name)))


def _packed(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    rules: Mapping[str, Format],
    transposed: Collection[str],
    device: torch.device,
) -> Iterator[_Item]:
    for file in checkpoint.files:
        with safe_open(file, framework="pt") as stream:
            for key in stream.keys():  # noqa: SIM118 (safe_open is no mapping)
                name = names[key]
                format = rules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
                tensor = stream.get_tensor(key)
                if name.removesuffix(".weight") in transposed:
                    tensor = tensor.t().contiguous()
                if format is not None:
                    tensor = tensor.to(device)
                check_finite(tensor, name)
                yield _Item({name: tensor}) if format is None else _pack(name, tensor, format)


def _pack(name: str, weight: Tensor, format: Format) -> _Item:
    linear = name.removesuffix(".weight")
    packed = format.quantize(weight)
    exact = weight.float()
    difference = torch.linalg.vector_norm(exact - packed.dequantize(torch.float32)).item()
    norm = torch.linalg.vector_norm(exact).item()
    relative = difference / norm if norm else 0.0
    error = LayerError(
        name=linear,
        format=format.name,
        shape=tuple(weight.shape),
        bits_per_value=8.0 * packed.nbytes / max(weight.numel(), 1),
        bytes_before=weight.nbytes,
        bytes_after=packed.nbytes,
        relative_error=relative,
        snr_db=-20 * math.log10(relative) if relative else None,
    )
    tensors = {f"{linear}.weight_{part}": t.cpu().contiguous() for part, t in packed.parts.items()}
    return _Item(tensors, error, difference**2, norm**2)


class _ShardWriter:
    """Collects tensors and writes a safetensors file whenever enough have come together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some tensors; those already taken are written first if the shard would grow too large."""
        size = sum(t.nbytes for t in tensors.values())
        if self.pending and size + sum(t.nbytes for t in self.pending.values()) > SHARD_BYTES:
            self._flush()
        self.pending.update(tensors)
        self.total += size

    def close(self) -> int:
        """Write the rest, name the files, write their index; returns the bytes of all tensors."""
        self._flush()
        count = len(self.shards)
        weight_map = {}
        for number, names in enumerate(self.shards, 1):
            name = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self.folder / f"{number}.partial").replace(self.folder / name)
            weight_map.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        return self.total

    def _flush(self) -> None:
        self.shards.append(list(self.pending))
        save_file(self.pending, self.folder / f"{len(self.shards)}.partial", metadata={"format": "pt"})
        self.pending = {}


def _write_config(checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> None:
    from fewbits.models.loading.hf_quantizer import FewbitsConfig

    for pattern in _COMPANIONS:
        for file in checkpoint.folder.glob(pattern):
            if file.is_file() and file.name not in ("config.json", INDEX):
                shutil.copyfile(file, folder / file.name)
    config = {**checkpoint.config, "quantization_config": FewbitsConfig(recipe).to_dict()}
    if "dtype" not in config and "torch_dtype" not in config:  # packed, the weights no longer tell it
        config["dtype"] = _dtype(checkpoint)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _dtype(checkpoint: Checkpoint) -> str:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return next((names[t.dtype] for t in checkpoint.tensors.values() if t.dtype in names), "float32")


def _entry_bytes(checkpoint: Checkpoint, key: str) -> int:
    entry = checkpoint.tensors[key]
    bits = int("".join(c for c in entry.dtype.partition("_")[0] if c.isdigit()) or 8)
    return math.prod(entry.shape) * bits // 8
