"""A model that no device holds whole: each rank reads, packs and keeps its own slices.

The model is built without values (meta), converted, given adapters, fused and sharded as it is; then every
rank makes room for its slices and fills them, one weight at a time:

* a packed checkpoint's parts, and weights that stay as they are: the slice alone is read from the file;
* a weight to be packed in a format whose rows stand for themselves (NF4, INT4 in groups, ...): its rows;
* in another format (double-quantised: one mean over all scales): the whole weight, packed, then the slice.

So what a device holds at most is its slices and one weight with what packing it takes. Without a checkpoint
the weights are random, the same for any number of ranks: for measurements at sizes nobody wants to download.

Random weights of a 70B shape were made so on two H200s, and files of a small model read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fewbits.decoder.fuse import fuse
from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Format
from fewbits.host.receipt import Receipt
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.folders.checkpoint import Checkpoint, inspect_folder
from fewbits.models.merging.branches import base_name
from fewbits.models.packing.convert import convert
from fewbits.models.packing.packed import quantize_by_rows
from fewbits.nn.finite import check_finite
from fewbits.nn.first_values import first_values, generator_of
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import LoRA, Recipe
from fewbits.training.ranks.fsdp import data_mesh, local, place_of, shard

Index = tuple[slice, ...]


def load_sharded_model(
    where: Any,
    *,
    recipe: Recipe | None = None,
    lora: LoRA | None = None,
    mesh: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    fused: bool = True,
    **options: Any,
) -> tuple[Any, Receipt]:
    """A model spread over the ranks of ``mesh`` from the beginning; every rank calls.

    Args:
        where: a folder with safetensors, unquantised or packed by fewbits; or a transformers configuration,
            which gets random weights.
        recipe: which linears are packed how; None: as the folder has it.
        lora: adapters; None: all weights train.
        mesh: as for `shard`.
        dtype: of what is not packed.
        seed: of adapters, and of random weights.
        fused: let the decoder compute as fused nodes (`fewbits.fuse`).
        options: further ones of `shard`.

    Returns:
        The model, a PeftModel with ``lora``, and the receipt of all that was done.

    Raises:
        BadCheckpoint: the folder lacks a tensor, or one has another shape.
        Unsupported: packed weights without adapters, or what `shard` refuses.
    """
    mesh = data_mesh() if mesh is None else mesh
    device = mesh_device(mesh)
    source, model, receipt = open_empty(where, seed, device, recipe, lora, dtype)
    check_trains(model, lora)
    if fused:
        receipt.notes.extend(str(fuse(model)).splitlines())
    float8 = options.pop("float8_all_gather", False)
    sharded = shard(model, mesh, **options)
    _make_room(model, device)
    with source:
        fill(model, source, seed)
    if float8:  # it is asked of the tensors that now are
        from fewbits.training.ranks.float8_gather import gather_in_float8

        sharded.notes.append(gather_in_float8(model))
    receipt.notes.extend(str(sharded).splitlines())
    return model, receipt


# 1. A model without values.


def mesh_device(mesh: Any) -> torch.device:
    """This rank's device."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def open_empty(
    where: Any, seed: int, device: torch.device, recipe: Recipe | None, lora: LoRA | None, dtype: torch.dtype
) -> tuple[_Folder | _Random, Any, Receipt]:
    """Where values come from, and the model that waits for them on the meta device.

    A packed folder is taken as its own recipe has it, whose patterns were looked at when it was packed: one
    that names nothing is told in the receipt, as where such a folder is loaded whole.
    """
    source, config = _open(where, seed, device)
    written = _written_recipe(config)
    return source, *_empty_model(config, written or recipe, lora, dtype, loaded=written is not None)


def _open(where: Any, seed: int, device: torch.device) -> tuple[_Folder | _Random, Any]:
    from transformers import AutoConfig

    if not isinstance(where, (str, Path)):
        return _Random(seed, device), copy.deepcopy(where)
    checkpoint = inspect_folder(where)
    if checkpoint.quant_method not in (None, "fewbits"):
        raise Unsupported(
            f"{where} is quantised with {checkpoint.quant_method!r}, which is not read by slices; start from"
            " the unquantised model."
        )
    return _Folder(checkpoint), AutoConfig.from_pretrained(str(where), local_files_only=True)


def _written_recipe(config: Any) -> Recipe | None:
    from fewbits.models.loading.hf_quantizer import FewbitsConfig

    written = getattr(config, "quantization_config", None)
    if written is None:
        return None
    del config.quantization_config  # the model is built plain, and converted
    return FewbitsConfig(**dict(written)).recipe


def _empty_model(
    config: Any, recipe: Recipe | None, lora: LoRA | None, dtype: torch.dtype, *, loaded: bool
) -> tuple[Any, Receipt]:
    """The model on the meta device; its buffers (rotary frequencies) are real, for nobody stores them."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # an empty parameter took the place of each
    receipt = Receipt(f"{config.model_type}, loaded by slices")
    if recipe is not None:
        receipt = convert(model, recipe, loaded=loaded)
    if lora is None:
        return model.train(), receipt
    model.requires_grad_(False)
    return get_peft_model(model, lora).train(), receipt


def check_trains(model: nn.Module, lora: LoRA | None) -> None:
    """Raise `Unsupported` for a model to be trained in which nothing can be."""
    if lora is None and any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise Unsupported(
            "packed weights cannot train, and there are no adapters; pass lora, or no recipe to train all"
            " weights."
        )


def _make_room(model: nn.Module, device: torch.device) -> None:
    """Memory for this rank's slices; buffers and tied weights come through it."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for name, original in tied.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._parameters[leaf] = model.get_parameter(original)


# 2. Where values come from.


class _Folder:
    """Tensors of a checkpoint, by the model's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._stack = ExitStack()
        self._streams: dict[Path, Any] = {}

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return self._key(name) is not None

    def read(self, name: str, shape: Sequence[int], index: Index) -> Tensor:
        """A slice of the tensor (shape), in host memory."""
        key = self._key(name)
        if key is None:
            raise BadCheckpoint(f"{self.checkpoint.folder} lacks {name}; copy or download its files again.")
        entry = self.checkpoint.tensors[key]
        if entry.shape != tuple(shape):
            raise BadCheckpoint(
                f"{self.checkpoint.folder}: {name} has shape {entry.shape}, but config.json makes it"
                f" {tuple(shape)}; the two files belong to different models."
            )
        if entry.file not in self._streams:
            self._streams[entry.file] = self._stack.enter_context(safe_open(entry.file, framework="pt"))
        tensor: Tensor = self._streams[entry.file].get_slice(key)[index]
        return tensor

    def _key(self, name: str) -> str | None:
        """As the checkpoint spells it: perhaps without the base model's prefix."""
        spellings = (name, name.removeprefix("model."), f"model.{name}")
        return next((key for key in spellings if key in self.checkpoint.tensors), None)


class _Random:
    """Random weights by name: matrices are normal with deviation 0.02, norms one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    def __enter__(self) -> _Random:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return not _is_part(name)  # dense weights, which are packed here

    def read(self, name: str, shape: Sequence[int], index: Index) -> Tensor:
        """A slice of the tensor (shape), on the device."""
        whole = torch.ones(tuple(shape), dtype=torch.bfloat16, device=self.device)
        if len(shape) > 1:
            whole.normal_(0, 0.02, generator=generator_of(self.seed, name, self.device))
        return whole[index]


# 3. Filling the slices.


@torch.no_grad()
def fill(
    model: nn.Module,
    source: _Folder | _Random,
    seed: int,
    begin: str = "",
    without: tuple[str, ...] = (),
) -> None:
    """Give parameters their values: those whose names begin so, and not so."""
    for full_name, parameter in model.named_parameters():  # a tied weight is there once
        if not full_name.startswith(begin) or (without and full_name.startswith(without)):
            continue
        name = base_name(full_name)
        path, _, leaf = full_name.rpartition(".")
        module = model.get_submodule(path)
        if ".lora_" in name:
            _put(parameter, first_values(name, parameter.shape, seed=seed)[_index(*place_of(parameter))])
        elif not isinstance(module, QuantizedLinear) or not _is_part(name) or name in source:
            offsets, sizes = place_of(parameter)
            if math.prod(sizes):
                _put(parameter, source.read(name, parameter.shape, _index(offsets, sizes)))
        elif leaf == "weight_codes":
            _pack(module, name.removesuffix("_codes"), source)


def _pack(layer: QuantizedLinear, name: str, source: _Folder | _Random) -> None:
    """Read a dense weight and keep this rank's slices of it packed."""
    shape = (layer.out_features, layer.in_features)
    parts = {part: getattr(layer, f"weight_{part}") for part in layer.part_names}
    device, rows = local(parts["codes"]).device, slice(0, shape[0])
    alone = _rows_stand_alone(layer.format, shape)
    if alone:
        offsets, sizes = place_of(parts["codes"])
        rows = slice(offsets[0], offsets[0] + sizes[0])
        if not math.prod(sizes):
            return
    dense = source.read(name, shape, (rows, slice(0, shape[1]))).to(device, layer.dtype)
    check_finite(dense, name)
    packed = quantize_by_rows(layer.format, dense)
    del dense
    for part, parameter in parts.items():
        whole = packed.parts[part]
        _put(parameter, whole if alone else whole[_index(*place_of(parameter))])


def _rows_stand_alone(format: Format, shape: tuple[int, int]) -> bool:
    """True if the parts of some rows are those rows of the parts."""
    (N, K), whole = shape, format.layout(shape)
    return all(
        format.layout((n, K))[part].shape == (n, *spec.shape[1:])
        for part, spec in whole.items()
        for n in (1, N)
    )


def _put(parameter: Tensor, values: Tensor) -> None:
    local(parameter).copy_(values)


def _index(offsets: Sequence[int], sizes: Sequence[int]) -> Index:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def _is_part(name: str) -> bool:
    return name.rpartition(".")[2].startswith("weight_")


__all__ = ["load_sharded_model"]
