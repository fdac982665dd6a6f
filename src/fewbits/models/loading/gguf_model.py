"""A GGUF file as a model: its blocks stay as llama.cpp reads them, the rest comes from its metadata.

transformers makes configuration and tokenizer from the metadata. The linears keep the file's bytes
(`fewbits.formats.gguf_blocks`); the rows of query and key projections, which llama.cpp's architecture "llama"
interleaves, change places, as whole rows of bytes. Embedding and norms are decoded.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadCheckpoint, BadInput, NotFinite, Unsupported
from fewbits.export.gguf_file import (
    PlannedTensor,
    architecture_of,
    plan_tensors,
    rope_factors,
    rope_of,
    separate_halves,
)
from fewbits.export.gguf_types import import_gguf
from fewbits.formats import FORMATS
from fewbits.formats.base import Packed
from fewbits.formats.gguf_layouts import LAYOUTS, blocks_not_finite
from fewbits.models.loading.in_memory import mark_loaded
from fewbits.models.loading.longer_positions import check_stretched, stretch
from fewbits.models.loading.options import Loading
from fewbits.models.loading.placing import device_map_of, dtype_of
from fewbits.models.packing.packed import put
from fewbits.nn.finite import check_finite
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Rule

GGUF_ENDING = ".gguf"
_FACTORS = "rope_freqs.weight"
_PLAIN = ("F32", "F16", "BF16")


def load_gguf(file: Path, dtype: Any, loading: Loading) -> tuple[Any, Any]:
    """The model in a GGUF file, and its tokenizer.

    Args:
        file: the file; of one that is cut into several, none is read.
        dtype: of what is not packed; None is float32 on a CPU, 16 bits on a GPU.
        loading: where to; a note goes there.

    Raises:
        BadInput: there is no such file, or its positions cannot be stretched to ``loading.length``.
        BadCheckpoint: it is damaged, or lacks a tensor.
        NotFinite: a tensor holds a NaN or an infinity.
        Unsupported: a family, a type of block or a stretching of positions that is not read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not file.is_file():
        raise BadInput(f"there is no GGUF file {file}; check the path.")
    reader = _read(file)
    if any(tensor.name.endswith("_exps.weight") for tensor in reader.tensors):
        raise Unsupported(
            f"{file} holds a mixture of experts, and GGUF files of dense models are read; start from the"
            " original model."
        )
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**where, local_files_only=True)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _restore_positions(config, reader, tensors)
    loading.notes += filter(None, [stretch(config, loading.length, str(file))])
    architecture_of(config)
    device_map = device_map_of(loading.device_map)
    place = next(iter(device_map.values())) if isinstance(device_map, dict) else "cpu"
    chosen = dtype_of(dtype, device_map)
    chosen = torch.float32 if chosen == "auto" else chosen
    chosen = getattr(torch, chosen) if isinstance(chosen, str) else chosen
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=chosen)
    check_stretched(config, model, str(file))
    tied = "output.weight" not in tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for tensor in plan_tensors(config, shapes, "f16", head_is_tied=tied):
        if tensor.place not in tensors:
            raise BadCheckpoint(f"{file} lacks the tensor {tensor.place}; copy or download it again.")
        _place(model, tensor, tensors[tensor.place], chosen, place)
    _fill_buffers(model, place)
    model.tie_weights()
    # The model's own name too, which an adapter's configuration takes for that of its base.
    model.name_or_path = model.config.name_or_path = str(file)
    mark_loaded(model.eval(), "gguf")
    loading.notes.append(f"{file} is a GGUF file; its blocks are used as they are.")
    tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    return model, tokenizer


def _read(file: Path) -> Any:
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadCheckpoint(f"{file} is no whole GGUF file ({reason}); copy or download it again.") from error
    count = reader.get_field("split.count")
    if count is not None and int(count.contents()) > 1:
        raise Unsupported(
            f"{file} is one of {count.contents()} parts; join them with llama-gguf-split first."
        )
    return reader


def _place(model: nn.Module, tensor: PlannedTensor, stored: Any, dtype: torch.dtype, place: Any) -> None:
    """Put one tensor of the file into the model: packed if it is a linear's weight, else decoded."""
    kind = stored.tensor_type.name
    name, leaf = tensor.name.rpartition(".")[::2]
    if kind not in (*_PLAIN, *LAYOUTS):
        raise Unsupported(
            f"{stored.name} is stored as {kind}, which is not read here; "
            f"{', '.join((*_PLAIN, *LAYOUTS))} are."
        )
    shape = tuple(int(size) for size in reversed(stored.shape))
    if shape != tensor.shape:
        raise BadCheckpoint(
            f"{stored.name} has shape {shape}, but the file's metadata make it {tensor.shape}; "
            "download it again."
        )
    module = model.get_submodule(name)
    if kind in LAYOUTS:
        codes = torch.from_numpy(stored.data.copy()).reshape(*shape[:-1], -1)
        _check_blocks(codes, stored.name, kind)
        codes = _in_our_order(codes, tensor).to(place)
        packed = Packed(FORMATS[f"gguf_{kind.lower()}"], shape, dtype, {"codes": codes})
        if isinstance(module, nn.Linear) and leaf == "weight":
            layer = QuantizedLinear.from_linear(module, Rule(weight=packed.format))
            layer.dtype = dtype
            layer.load_packed(packed)
            put(model, name, layer)
            return
        value = packed.dequantize(dtype)
    else:
        values = torch.from_numpy(import_gguf().quants.dequantize(stored.data, stored.tensor_type).copy())
        _check_values(values.reshape(shape), stored.name)
        value = _in_our_order(values.reshape(shape), tensor).to(place, dtype)
    parameter = nn.Parameter(value, requires_grad=leaf != "weight" or not isinstance(module, nn.Linear))
    setattr(module, leaf, parameter)


_TAKE = "copy or download the file again."


def _check_blocks(codes: Tensor, name: str, kind: str) -> None:
    """Refuse rows of blocks (..., bytes of a row) uint8 of which one holds a NaN or an infinity."""
    wrong = blocks_not_finite(kind, codes)
    if wrong.numel():
        row = int(wrong[0]) * LAYOUTS[kind].nbytes // codes.shape[-1]
        what = f"holds a NaN or an infinity in {wrong.numel():,} of its {kind} blocks, first in row {row}"
        raise NotFinite(f"{name} {what}; {_TAKE}")


def _check_values(values: Tensor, name: str) -> None:
    """Refuse values of any shape with a NaN or an infinity among them."""
    try:
        check_finite(values, name)
    except NotFinite as error:
        raise NotFinite(f"{str(error).partition(';')[0]}; {_TAKE}") from error


def _in_our_order(rows: Tensor, tensor: PlannedTensor) -> Tensor:
    return separate_halves(rows, tensor.turned_heads) if tensor.turned_heads else rows


def _fill_buffers(model: nn.Module, place: Any) -> None:
    """Rotary frequencies are made, not loaded."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            put(model, name, type(module)(model.config).to(place))


def _restore_positions(config: Any, reader: Any, tensors: dict[str, Any]) -> None:
    """Set what transformers does not read of the metadata: a head's size, how positions are stretched.

    Raises:
        Unsupported: the file stretches positions by a method that fewbits does not read.
    """
    arch = reader.get_field("general.architecture").contents()

    def value(key: str) -> Any:
        field = reader.get_field(f"{arch}.rope.scaling.{key}")
        return None if field is None else field.contents()

    length = reader.get_field(f"{arch}.attention.key_length")
    if length is not None and hasattr(config, "head_dim"):
        config.head_dim = int(length.contents())
    rope, kind = dict(rope_of(config)), value("type")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(value("factor"))}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": float(value("factor"))}
        rope |= {"original_max_position_embeddings": int(value("original_context_length"))}
    elif kind not in (None, "none"):
        raise Unsupported(
            f"the file uses the rope scaling {kind!r}, which fewbits does not read; use the original model."
        )
    if _FACTORS in tensors:
        rope = _llama3(config, rope, torch.from_numpy(tensors[_FACTORS].data.copy()).float())
    config.rope_parameters = rope


def _llama3(config: Any, rope: dict[str, Any], factors: Tensor) -> dict[str, Any]:
    """Llama 3's parameters from the divisors that they make: the file holds these only."""
    candidate = copy.deepcopy(config)
    partial = {
        **rope,
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),
        "low_freq_factor": 1.0,
    }
    for high in (4.0, 2.0, 8.0):
        for length in (8192, 4096, 16384, 32768):
            parameters = {**partial, "high_freq_factor": high, "original_max_position_embeddings": length}
            candidate.rope_parameters = parameters
            if torch.allclose(torch.from_numpy(rope_factors(candidate)), factors, rtol=1e-4):
                return parameters
    raise Unsupported(
        "the file's rope scaling factors do not follow Llama 3's formula; use the original model."
    )
