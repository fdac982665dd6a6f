"""``save_pretrained_merged(..., save_method="compressed_tensors_w4a16")``: a folder that vLLM opens."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.export.compressed import import_compressed_tensors
from fewbits.export.compressed_schemes import Codec, scheme_named
from fewbits.formats.compressed_tensors import PARTS
from fewbits.host.transposed import is_conv1d
from fewbits.models.checkpoint import INDEX, WEIGHTS
from fewbits.models.export_proof import ExportReceipt
from fewbits.models.exporting import ExportedWeights, check_options
from fewbits.models.merge import MergeReceipt
from fewbits.models.merge import save_pretrained_merged as save_merged
from fewbits.models.original import source_folder
from fewbits.models.whole_folder import check_destination, whole_folder

_SHARD_BYTES = 1_000_000_000


def save_pretrained_merged(
    model: Any,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    **options: Any,
) -> MergeReceipt | ExportReceipt | None:
    """Save base and adapter as one model; see `fewbits.models.merge.save_pretrained_merged`.

    Args:
        model: a PeftModel over a model of ours (or of transformers), or the model inside it.
        save_directory: the folder to write; never the one that the model was loaded from.
        tokenizer: saved beside the weights.
        save_method: one of that function, or "compressed_tensors_" and a scheme, such as
            "compressed_tensors_w4a16" (`fewbits.export.compressed_schemes.SCHEMES`), for vLLM, SGLang and
            transformers.
        options: of that function.

    Returns:
        What was done; None for "lora".

    Raises:
        BadInput, Unsupported, BadCheckpoint: as that function does; the package is missing.
    """
    scheme = scheme_named(save_method)
    if scheme is None:
        return save_merged(model, save_directory, tokenizer, save_method, **options)
    import_compressed_tensors()
    overwrite = bool(options.pop("overwrite", False))
    check_options("save_pretrained_merged", options)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    source = source_folder(base)
    read = [] if source is None else [source]
    check_destination(save_directory, overwrite=overwrite, protected=read)
    weights = ExportedWeights(base, tokenizer)
    with whole_folder(save_directory, overwrite=overwrite, protected=read) as folder:
        return _write(weights, folder, Path(save_directory), scheme)


def _write(weights: ExportedWeights, folder: Path, published: Path, scheme: str) -> ExportReceipt:
    # In the model's own dtype: transformers decodes in the dtype of the scales, whatever it loads into.
    dtype = weights.base.dtype
    linears = _linears(weights)
    codec = Codec(scheme, list(linears.values()), dtype)
    files: dict[str, Path] = {}
    for number, tensors in enumerate(_shards(weights, linears, codec, dtype)):
        file = folder / f"{number}.partial"
        save_file(tensors, file, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, file))
    files = _name_shards(folder, files)
    _write_config(weights, folder, codec.config(), dtype)

    def tensor(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as stream:
            found: Tensor = stream.get_tensor(name)
        return found

    def written(name: str) -> Tensor:
        if name.removesuffix(".weight") not in linears or not name.endswith(".weight"):
            return tensor(name).float()
        stem = name.removesuffix("weight")
        return codec.read({part: tensor(stem + part) for part in PARTS if stem + part in files})

    measured = weights.proved(written)
    kinds = Counter(
        codec.scheme.preset if n.removesuffix(".weight") in linears else "plain" for n in weights.shapes
    )
    return ExportReceipt(
        path=published,
        method=f"compressed-tensors {codec.scheme.preset}",
        weights_from=weights.merger.weights_from,
        num_bytes=sum(file.stat().st_size for file in set(files.values())),
        num_tensors=dict(kinds),
        fallbacks=(),
        worst=measured.worst,
        logits_error=measured.logits_error,
        tolerance=measured.tolerance,
        kl=measured.kl,
        top1=measured.top1,
        checks=("tied head",),
    )


def _linears(weights: ExportedWeights) -> dict[str, int]:
    """Row lengths of the linears that are packed: all but the head."""
    named = dict(weights.skeleton().named_modules())
    turned = next((name for name, module in named.items() if is_conv1d(module)), None)
    if turned is not None:
        raise Unsupported(
            f"{turned} is a Conv1D, as GPT-2 has them, and compressed-tensors packs linears alone; write"
            " merged_16bit or merged_4bit."
        )
    return {n: m.in_features for n, m in named.items() if isinstance(m, nn.Linear) and n != "lm_head"}


def _shards(
    weights: ExportedWeights, linears: dict[str, int], codec: Codec, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    pending: dict[str, Tensor] = {}
    for name in weights.shapes:
        weight = weights.weight(name)
        if name.removesuffix(".weight") in linears and name.endswith(".weight"):
            stem = name.removesuffix("weight")
            others = [n for n in codec.absmax_counts(stem[:-1]) if f"{n}.weight" in weights.shapes]
            largest = max((float(weights.weight(f"{n}.weight").abs().max()) for n in others), default=None)
            parts = codec.write(weight, largest)
            pending.update({stem + part: t.contiguous() for part, t in parts.items()})
        else:
            pending[name] = weight.to(dtype).contiguous()
        if sum(t.nbytes for t in pending.values()) > _SHARD_BYTES:
            yield pending
            pending = {}
    if pending:
        yield pending


def _name_shards(folder: Path, files: dict[str, Path]) -> dict[str, Path]:
    """Give the files their names in the end, and write their index if there are several."""
    shards = sorted(set(files.values()), key=lambda file: int(file.stem))
    count = len(shards)
    names = (
        [WEIGHTS]
        if count == 1
        else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    )
    places = {shard: folder / name for shard, name in zip(shards, names, strict=True)}
    for shard, place in places.items():
        shard.replace(place)
    if count > 1:
        total = sum(place.stat().st_size for place in places.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: places[f].name for n, f in files.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return {name: places[file] for name, file in files.items()}


def _write_config(
    weights: ExportedWeights, folder: Path, described: dict[str, Any], dtype: torch.dtype
) -> None:
    config = copy.deepcopy(weights.base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [type(weights.base).__name__]
    config.tie_word_embeddings = weights.head_is_tied
    config.save_pretrained(folder)
    file = folder / "config.json"
    text = {**json.loads(file.read_text(encoding="utf-8")), "quantization_config": described}
    file.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if getattr(weights.base, "generation_config", None) is not None:
        weights.base.generation_config.save_pretrained(folder)
    weights.tokenizer.save_pretrained(folder)
