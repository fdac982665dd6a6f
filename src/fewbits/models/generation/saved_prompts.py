"""A prompt's keys and values on disk: read once by the model, continued many times.

    save_prompt("system.safetensors", model, cache, input_ids)
    cache, ids = load_prompt("system.safetensors", model)
    model.generate(torch.cat([ids, more], dim=1), past_key_values=cache)

One safetensors file holds the tensors of every layer of a `PackedCache` or of transformers' `DynamicCache`
(from which ``generate`` goes on through decoding's kernels), the prompt's tokens, and a print of
the model: names and shapes of its weights with a sample of the values of each, adapters included. A file of
another model is refused, because its keys and values would be wrong without looking so. The file is written
beside its place and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch, Unsupported
from fewbits.formats.kv_cache import get_kv_cache, kv_cache_to_config
from fewbits.host.unwrap import unwrap
from fewbits.models.folders.whole_folder import fsync
from fewbits.models.generation.packed_cache import PackedCache, PackedLayer

if TYPE_CHECKING:
    from torch import nn

_KIND = "fewbits saved prompt, 1"
_SAMPLE = 32  # values of each weight
_IDS = "input_ids"


def save_prompt(
    path: str | Path, model: nn.Module, cache: PackedCache | DynamicCache, input_ids: Tensor
) -> None:
    """Write what a model made of a prompt.

    Args:
        path: the file; one that is there is replaced.
        model: the model that read the prompt.
        cache: what it left of it.
        input_ids: (sequences, tokens) the prompt, as many tokens as the cache holds.

    Raises:
        BadInput: tokens and cache are not of one length, or the file cannot be written.
        Unsupported: a cache with padding, or with layers that are neither keys nor values.
    """
    from safetensors.torch import save_file

    if not isinstance(cache, PackedCache) and type(cache) is not DynamicCache:
        raise BadInput(
            f"the cache is a {type(cache).__name__}, and only a PackedCache or a DynamicCache can be saved; "
            "fill one by passing it as past_key_values."
        )
    if cache.get_seq_length() != input_ids.shape[-1] or input_ids.dim() != 2:
        raise BadInput(
            f"the cache holds {cache.get_seq_length()} tokens and the prompt has {input_ids.shape[-1]}; "
            "give the tokens that the model read."
        )
    tensors = {_IDS: input_ids.contiguous().cpu()}
    for i, layer in enumerate(cache.layers):
        for name, tensor in _tensors(layer, i).items():
            tensors[name] = tensor.detach().contiguous().cpu().clone()
    kind = kv_cache_to_config(cache.kind) if isinstance(cache, PackedCache) else None
    layers = [type(layer).__name__ for layer in cache.layers]
    facts = {
        "kind": _KIND,
        "model": model_print(model),
        "cache": json.dumps(kind),
        "layers": json.dumps(layers),
    }
    path = Path(path)
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file(tensors, beside, metadata=facts)
            fsync(Path(beside))
            Path(beside).replace(path)
        finally:
            Path(beside).unlink(missing_ok=True)
        fsync(path.parent)
    except OSError as error:
        raise BadInput(
            f"the prompt cannot be written to {path} ({error.strerror}); choose another place."
        ) from error


def load_prompt(path: str | Path, model: nn.Module) -> tuple[PackedCache | DynamicCache, Tensor]:
    """The cache of a saved prompt, as it was, and its tokens (sequences, tokens), on the model's device.

    Raises:
        BadCheckpoint: no file, a damaged one, or one that is no saved prompt.
        SpecMismatch: another model, or other adapters, read the prompt.
    """
    from safetensors import SafetensorError, safe_open

    device = str(model.device)
    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise BadCheckpoint(
            f"{path} cannot be read as a saved prompt ({reason}); save the prompt again."
        ) from error
    if facts.get("kind") != _KIND or _IDS not in tensors:
        raise BadCheckpoint(f"{path} is no saved prompt of this version; save the prompt again.")
    if facts["model"] != model_print(model):
        raise SpecMismatch(
            f"the prompt in {path} was read by another model, or with other adapters; save it with this one."
        )
    ids = tensors[_IDS]
    config, kind = unwrap(model).config, json.loads(facts["cache"])
    cache = _dynamic(config, facts) if kind is None else PackedCache(config, get_kv_cache(kind))
    for i, layer in enumerate(cache.layers):
        _put(layer, i, tensors, ids.shape[1])
    return cache, ids


def _dynamic(config: Any, facts: dict[str, str]) -> DynamicCache:
    """An empty cache with layers of the kinds that were saved: without a config none has a window."""
    cache = DynamicCache(config=config)
    layers = json.loads(facts.get("layers", "null"))
    if layers is not None and all(name == DynamicLayer.__name__ for name in layers):
        cache = DynamicCache()
        cache.layers.extend(DynamicLayer() for _ in layers)
    return cache


@torch.no_grad()
def model_print(model: nn.Module) -> str:
    """A model's print: SHA-256 over names, shapes and a sample of the values of all weights and buffers."""
    digest = hashlib.sha256()
    base = unwrap(model)
    rotation = getattr(base.config.get_text_config(), "rope_parameters", None)
    digest.update(f"{type(base).__name__} {rotation}".encode())
    for name, tensor in sorted((*base.named_parameters(), *base.named_buffers())):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1)
        if values.numel():
            places = torch.linspace(0, values.numel() - 1, min(_SAMPLE, values.numel()), dtype=torch.float64)
            sample = values[places.long().to(values.device)].contiguous().cpu()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(layer: nn.Module, number: int) -> dict[str, Tensor]:
    """The tensors of one layer by their names in the file."""
    if isinstance(layer, PackedLayer):
        if layer.padding is not None:
            raise Unsupported("a prompt with padding is not saved; save each sequence by itself.")
        parts = {
            f"{which}.{name}": t
            for which, heads in layer.heads.items()
            for name, t in heads.tensors().items()
        }
    else:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise Unsupported(
                f"a {type(layer).__name__} keeps more than keys and values, which cannot be saved; read"
                " the prompt"
                " again when it is needed."
            )
        parts = {"keys": keys, "values": values}
    return {f"{number}.{name}": tensor for name, tensor in parts.items()}


def _put(layer: Any, number: int, tensors: dict[str, Tensor], length: int) -> None:
    """One layer's tensors back into it."""
    try:
        if isinstance(layer, PackedLayer):
            newest = {which: tensors[f"{number}.{which}.newest"] for which in ("keys", "values")}
            empty = {which: t[:, :, :0] for which, t in newest.items()}
            layer.lazy_initialization(empty["keys"], empty["values"])
            for which, heads in layer.heads.items():
                for name in heads.tensors():
                    setattr(heads, name, tensors[f"{number}.{which}.{name}"])
        else:
            keys, values = (tensors[f"{number}.{which}"] for which in ("keys", "values"))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    except KeyError as error:
        raise BadCheckpoint(f"the saved prompt lacks {error.args[0]}; save the prompt again.") from error


__all__ = ["load_prompt", "model_print", "save_prompt"]
