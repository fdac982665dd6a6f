"""Write an adapter and its base as one ordinary model: 16-bit or packed, checked before it is called done.

``W_merged = W + scaling * B @ A``, summed in float32 tensor by tensor, then rounded once to the 16-bit
dtype. W is the original checkpoint's weight where that is still on disk (so the error of the 4-bit base
does not enter), read shard by shard; otherwise the dequantised weight. The receipt says which.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.host.conversion import conversion_of
from fewbits.host.unwrap import unwrap
from fewbits.models.folders.original import files_read
from fewbits.models.folders.records import Replaced, replaces_own, write_record
from fewbits.models.folders.whole_folder import ADAPTER, check_destination, whole_folder
from fewbits.models.merging.experts import WholeMerger, has_experts
from fewbits.models.merging.merger import TOKENIZER_FILES, Merger, MergeReceipt
from fewbits.models.packing.packed import recipe_of
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import Recipe, Rule, get_recipe

if TYPE_CHECKING:
    from torch import nn

RECEIPT = "merge.json"  # in every folder that a merge has written
SAVE_METHODS = ("merged_16bit", "merged_4bit", "lora")
_SHARD_BYTES = 5_000_000_000
# Names that Unsloth's method takes; these choose nothing here.
IGNORED_OPTIONS = {
    "token",
    "is_main_process",
    "safe_serialization",
    "temporary_location",
    "maximum_memory_usage",
    "tags",
}


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = _SHARD_BYTES,
    overwrite: bool | None = None,
    **options: Any,
) -> MergeReceipt | None:
    """Save base and adapter as one model, whole or not at all.

    Args:
        model: a PeftModel over a model of ours (or of transformers), or the model inside it.
        save_directory: the folder to write; never the one that the model was loaded from.
        tokenizer: saved beside the weights; None copies the original's files where they exist.
        save_method: "merged_16bit", "merged_4bit" (packed again, by the model's own recipe) or "lora"
            (adapter only).
        dtype: of the 16-bit weights; None is float16 for a float16 model and bfloat16 for any other, but for
            "merged_4bit" of a model that trained through rounding its own, so that no code is another.
        max_shard_size: bytes of one file, where the original's shards do not decide it.
        overwrite: None: the files that an earlier call wrote (its merge.json names them) are replaced, by one
            rename, and others stay; any other folder that is not empty is refused. True: replace any model
            (for "lora": an adapter) that is in the folder. False: refuse a folder that is not empty.
        options: names that Unsloth's method takes; ``push_to_hub`` is refused, the rest choose nothing here.

    Returns:
        What was done; None for "lora".

    Raises:
        BadInput, Unsupported: a folder that is taken or was read, an unknown method or option, an adapter
            that is not a sum of low-rank products.
        BadCheckpoint: the reloaded model's logits are not the expected ones; nothing was written.
    """
    method = {"merged_16bits": "merged_16bit", "merged_4bit_forced": "merged_4bit"}.get(
        save_method, save_method
    )
    _check_options(method, options)
    place = replaces_own(save_directory, RECEIPT, overwrite)
    if method == "lora":
        _save_adapter(model, save_directory, tokenizer, place)
        return None
    base = unwrap(model)
    read = files_read(base)
    check_destination(save_directory, overwrite=place.overwrite, protected=read)
    merger = _merger_of(base, dtype or _dtype_of(base, method))
    published = partial(
        whole_folder, save_directory, overwrite=place.overwrite, protected=read, written=place.written
    )
    if method == "merged_16bit":
        with published() as folder:
            error, tolerance = merger.write(folder, tokenizer, _as_bytes(max_shard_size))
            write_record(folder, RECEIPT, {"save_method": method})
        return merger.receipt(save_directory, method, error, tolerance)
    with published() as folder:
        error, tolerance = merger.write(folder / "16bit", tokenizer, _as_bytes(max_shard_size))
        _pack(base, folder / "16bit", folder)
        shutil.rmtree(folder / "16bit")
        write_record(folder, RECEIPT, {"save_method": method})
    return merger.receipt(save_directory, method, error, tolerance)


def _dtype_of(base: Any, method: str) -> torch.dtype:
    """The 16 bits; where weights trained through the rounding that comes next, what they trained in."""
    trained_rounded = any(isinstance(module, FakeQuantizedLinear) for module in base.modules())
    if base.dtype == torch.float16 or (method == "merged_4bit" and trained_rounded):
        return base.dtype  # type: ignore[no-any-return]
    return torch.bfloat16


def _merger_of(base: nn.Module, dtype: torch.dtype) -> Merger:
    return WholeMerger(base, dtype) if has_experts(base) else Merger(base, dtype)


def _check_options(method: str, options: dict[str, Any]) -> None:
    if method not in SAVE_METHODS:
        raise BadInput(f"save_method is {method!r}; it is one of {', '.join(SAVE_METHODS)}.")
    if options.pop("push_to_hub", False):
        raise Unsupported(
            "save_pretrained_merged writes to a folder only; push_to_hub_merged(name, ...) uploads."
        )
    unknown = sorted(set(options) - IGNORED_OPTIONS - {k for k, v in options.items() if v is None})
    if unknown:
        raise BadInput(f"save_pretrained_merged knows no option {', '.join(unknown)}; leave it out.")


def _save_adapter(model: nn.Module, save_directory: str | Path, tokenizer: Any, place: Replaced) -> None:
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise BadInput("save_method='lora' needs the PeftModel; call it on what get_peft_model returned.")
    with whole_folder(
        save_directory, overwrite=place.overwrite, marker=ADAPTER, written=place.written
    ) as folder:
        type(model).save_pretrained(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_record(folder, RECEIPT, {"save_method": "lora"})


def _as_bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    text = size.strip().upper()
    for unit, factor in sorted(units.items(), key=lambda u: -len(u[0])):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise BadInput(f"max_shard_size is {size!r}; write bytes as a number, or a size such as '5GB'.")


def _recipe_to_pack(base: Any) -> Recipe:
    """The model's own recipe; NF4 for a model that has none. One trained through rounding is packed so."""
    from fewbits.models.loading.hf_quantizer import FewbitsConfig

    config, conversion = getattr(base.config, "quantization_config", None), conversion_of(base)
    if isinstance(config, FewbitsConfig):
        recipe = config.recipe
    elif any(isinstance(m, QuantizedLinear) for m in base.modules()):
        recipe = recipe_of(base, name="merged_4bit")
    elif conversion is not None and conversion.recipe.qat is not None:
        recipe = conversion.recipe
    else:
        recipe = get_recipe("qlora_nf4")
    if recipe.qat is not None:
        recipe = replace(
            recipe, linear=Rule(weight=recipe.qat.weight, activation=recipe.qat.activation), qat=None
        )
    return recipe


def _pack(base: Any, source: Path, target: Path) -> None:
    """Load the merged 16-bit model in the base's own recipe and save it packed."""
    from fewbits.models.loading.hf_quantizer import FewbitsConfig, write_packed

    packed = type(base).from_pretrained(
        source,
        quantization_config=FewbitsConfig(_recipe_to_pack(base)),
        dtype=base.dtype,
        local_files_only=True,
    )
    write_packed(packed, target)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
