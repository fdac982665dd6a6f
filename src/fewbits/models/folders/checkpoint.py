"""Checkpoint folders, looked at before they are loaded.

`inspect_folder` reads config.json, the index and the safetensors headers (a few kilobytes) and refuses, in
one sentence, what could not be loaded or would load wrongly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from fewbits.errors import BadCheckpoint, BadInput, NotFinite, Unsupported
from fewbits.models.folders.config_check import check_config
from fewbits.models.folders.folder_manifest import check_folder
from fewbits.models.folders.reading import first_line
from fewbits.nn.finite import check_finite

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
_PEFT_LAYER = re.compile(r"\.(base_layer|original_module)\.")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# A tensor with one of these in its name is there if any weight is packed by that library.
FOREIGN_MARKS = {
    "bitsandbytes": (".quant_state.bitsandbytes__", ".SCB"),
    "gptq": (".qweight",),
    "awq": (".qweight",),
    "compressed-tensors": (".weight_scale",),
    "fp8": (".weight_scale",),
    "torchao": ("._weight_qdata",),
    "hqq": (".W_q",),
    "mxfp4": ("_proj_blocks",),
}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint, as its header describes it: bytes ``begin`` to ``end`` of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """What a model folder holds, known without reading a weight.

    Attributes:
        folder: the folder.
        config: config.json as it stands.
        files: the weight files, in the index's order.
        tensors: every tensor by name; empty for a pickle.
    """

    folder: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry] = field(repr=False)

    @property
    def quant_method(self) -> str | None:
        """The quantisation that config.json declares, such as "fewbits" or "bitsandbytes", or None."""
        quantization = self.config.get("quantization_config") or {}
        return str(quantization.get("quant_method") or "unnamed") if quantization else None

    @property
    def is_pickle(self) -> bool:
        """True if the weights are a pickle."""
        return any(f.suffix == ".bin" for f in self.files)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, after checking that the file is as long as its header says.

    Raises:
        BadCheckpoint: the file is truncated, or is not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
            raise BadCheckpoint(
                f"{file} is not a safetensors file (or is corrupt); copy or download it again."
            )
        text = stream.read(length)
    if len(text) < length:
        raise BadCheckpoint(f"{file} is truncated in its header; copy or download it again.")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        entries = {k: _entry(file, e, 8 + length) for k, e in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{file} has a corrupt header; copy or download it again.") from error
    if size != 8 + length + end:
        raise BadCheckpoint(
            f"{file} has {size:,} bytes where its header needs {8 + length + end:,}: it is "
            f"{'truncated' if size < 8 + length + end else 'corrupt'}; copy or download it again."
        )
    return entries


def _entry(file: Path, written: Mapping[str, Any], start: int) -> TensorEntry:
    """One entry of a header; ValueError, TypeError or KeyError where it is none."""
    dtype, shape, (begin, end) = written["dtype"], written["shape"], written["data_offsets"]
    bits = next((int(n) for n in re.findall(r"\d+", str(dtype))), 8)  # BOOL has a byte
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or not isinstance(dtype, str):
        raise ValueError("sizes are whole numbers")
    if 8 * (end - begin) != math.prod(shape) * bits:
        raise ValueError("another number of bytes than the shape needs")
    return TensorEntry(file, dtype, tuple(shape), start + begin, start + end)


def read_headers(files: tuple[Path, ...]) -> dict[str, TensorEntry]:
    """`read_header` over all shards."""
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        tensors.update(read_header(file))
    return tensors


def told_of(name: str, files: tuple[Path, ...]) -> NotFinite:
    """What is to be said of a weight that proved not to be finite once it was packed and gone.

    Args:
        name: of the weight.
        files: the safetensors files it came from, where the place of its first bad value is looked up.
    """
    entry = read_headers(files).get(name)
    try:
        if entry is not None:
            with safe_open(entry.file, "pt") as opened:
                check_finite(opened.get_tensor(name), name)
    except NotFinite as error:
        return error
    return NotFinite(
        f"{name} holds a NaN or an infinity; it cannot be packed, so take an undamaged checkpoint."
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        BadInput: the file is not a JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BadInput(
            f"{file} cannot be read as JSON ({first_line(error)}); restore it from the original model."
        ) from error
    if not isinstance(value, dict):
        raise BadInput(f"{file} holds no JSON object; restore it from the original model.")
    return value


def is_adapter_folder(path: Path) -> bool:
    """True for a folder that PEFT wrote: an adapter without its base model."""
    return (path / ADAPTER_CONFIG).is_file()


def inspect_folder(path: Path | str, *, allow_pickle: bool = False, remote_code: bool = False) -> Checkpoint:
    """Look at a model folder and refuse early what could not be loaded.

    Args:
        path: the folder.
        allow_pickle: accept pytorch_model.bin.
        remote_code: accept a model_type that transformers does not know, if the folder brings its own code.

    Raises:
        BadInput: there is no such folder, or its config.json is missing or unreadable.
        Unsupported: unknown model_type, or a quantisation that fewbits does not read.
        BadCheckpoint: weights are missing, truncated, corrupt, a pickle, or do not fit config.json.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(_no_folder(folder))
    if not (folder / "config.json").is_file() and (folder / "run.json").is_file():
        raise BadInput(f"{folder} is a training run; give the model or adapter in it, {folder / 'final'}.")
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        way = f"name the GGUF file in it, {ggufs[0]}" if ggufs else "check the path"
        raise BadInput(f"{folder} has no config.json, so it is not a model folder; {way}.")
    check_folder(folder)
    config = read_json(folder / "config.json")
    _check_model_type(folder, config, remote_code)
    files = _weight_files(folder, allow_pickle)
    tensors = read_headers(files) if files[0].suffix == ".safetensors" else {}
    checkpoint = Checkpoint(folder, config, files, tensors)
    _check_index(folder, checkpoint)
    _refuse_adapter_layers(checkpoint)
    check_config(checkpoint)
    _check_quantization(checkpoint)
    return checkpoint


def _no_folder(path: Path) -> str:
    """Why a path is no model folder, and what to do."""
    if path.suffix == ".gguf" and path.is_file():
        return (
            f"{path} is a GGUF file, whose weights are quantised already; give the original model's folder, "
            f"or write one in 16 bits first (fewbits export {path} FOLDER --to 16bit)."
        )
    if path.is_file():
        return f"{path} is a file; give the folder that holds config.json and the weights."
    return f"there is no model folder {path}; check the path."


def _check_model_type(folder: Path, config: Mapping[str, Any], remote_code: bool) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if is_known or (remote_code and "auto_map" in config):
        return
    raise Unsupported(
        f"{folder / 'config.json'} has model_type {model_type!r}, which this version of transformers does "
        "not know; correct it, or install a transformers version that has it."
    )


def _weight_files(folder: Path, allow_pickle: bool) -> tuple[Path, ...]:
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BadCheckpoint(f"{folder / INDEX} lists no weights; copy or download it again.")
        files = tuple(folder / name for name in sorted({_shard(folder, v) for v in weight_map.values()}))
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise BadCheckpoint(
                f"{folder} lacks {', '.join(missing)} ({len(missing)} of {len(files)} shards that {INDEX} "
                "lists); copy or download the missing files."
            )
        return files
    pickles = [folder / name for name in PICKLES if (folder / name).is_file()]
    if not pickles:
        raise BadCheckpoint(f"{folder} has a config.json but no {WEIGHTS}; copy or download the weights.")
    if not allow_pickle:
        raise BadCheckpoint(
            f"{pickles[0]} is a pickle, which can run code while it is read; convert it to safetensors, or "
            "pass allow_pickle=True if you trust where it comes from."
        )
    return (pickles[0],)


def _shard(folder: Path, name: Any) -> str:
    """A file that the index names, if it may be read: a safetensors file inside of the folder."""
    shown = repr(name) if len(repr(name)) < 100 else f"{repr(name)[:97]}..."
    if not isinstance(name, str) or not name.isprintable() or not name.endswith(".safetensors"):
        raise BadCheckpoint(
            f"{folder / INDEX} names {shown}, which is no safetensors file (a pickle can run code while it "
            "is read); copy or download the original index and shards."
        )
    if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or len(name) > 250:
        raise BadCheckpoint(
            f"{folder / INDEX} names {shown}, which is not in the folder; shards lie beside their index."
        )
    return name


def _check_index(folder: Path, checkpoint: Checkpoint) -> None:
    if checkpoint.is_pickle or checkpoint.files[0].name == WEIGHTS:
        return
    weight_map = read_json(folder / INDEX)["weight_map"]
    absent = sorted(set(weight_map) - set(checkpoint.tensors))
    if absent:
        raise BadCheckpoint(
            f"{folder / INDEX} lists {absent[0]} (and {len(absent) - 1} more) in {weight_map[absent[0]]}, "
            "but the shard does not hold it; copy or download the shards again."
        )


def _refuse_adapter_layers(checkpoint: Checkpoint) -> None:
    """What ``save_pretrained`` of the model inside a PeftModel writes."""
    name = next((name for name in checkpoint.tensors if _PEFT_LAYER.search(name)), None)
    if name is not None:
        raise BadCheckpoint(
            f"{checkpoint.folder} holds {name}: it was saved from a model with an adapter's layers in it, "
            "under names that no model has; save the adapter with the PeftModel's save_pretrained, or both "
            "as one model with save_pretrained_merged."
        )


def _check_quantization(checkpoint: Checkpoint) -> None:
    method = checkpoint.quant_method
    if method in (None, "fewbits"):
        return
    marks = FOREIGN_MARKS.get(method or "")
    if marks is None:
        raise Unsupported(
            f"{checkpoint.folder} is quantised with {method!r}; fewbits reads unquantised, bitsandbytes, "
            "GPTQ, AWQ, compressed-tensors, FP8, torchao, HQQ, MXFP4 and its own checkpoints, so start from "
            "the original model."
        )
    if not any(mark in name for name in checkpoint.tensors for mark in marks):
        raise BadCheckpoint(
            f"{checkpoint.folder} declares {method} weights, but none of its tensors is one; copy or "
            "download it again."
        )
