"""`warm`: compile what a recipe runs on this GPU before it is needed, as when a container's image is made.

A kernel is compiled when it is first launched, and its machine code kept in a folder: Triton's
(~/.triton/cache, or TRITON_CACHE_DIR), which keeps what NVRTC compiles here, too. What is found there
depends on the kernel's source, the versions of Triton and its compiler, the GPU's compute capability, the
values that are constants to the kernel (widths, formats, tiles), and on which sizes are divisible by 16. So
a model of the same widths is run: two layers of it, with weights of zeros from a file without contents,
loaded, trained for some steps with and without recomputation, and made to write a few tokens.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.models.fast import FastLanguageModel
from fewbits.models.loading.packed_folder import MARK
from fewbits.models.packing.model_shapes import built_without_memory, numbers_of
from fewbits.recipes import Recipe, get_recipe, recipe_from_config
from fewbits.training.optimizer import AdamW8bit

_LAYERS = 2
_STEPS = 2  # the second finds what the first has only measured
_PROMPT, _ANSWER = 32, 4  # tokens
_USUAL_RECIPE = "qlora_nf4"


@dataclass(frozen=True)
class Warmed:
    """What `warm` has done.

    Attributes:
        gpu: the GPU's name and compute capability.
        folder: the cache, which later processes read.
        kernels: names of the kernels that were compiled now; none if all were there.
        nbytes: bytes that came into the folder.
        seconds: how long it took.
    """

    gpu: str
    folder: Path
    kernels: tuple[str, ...]
    nbytes: int
    seconds: float


def warm(
    model: str | Path,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    *,
    batch: tuple[int, int] = (1, 2048),
    rank: int = 16,
) -> Warmed:
    """Compile for this GPU what loading, training and generating take, so that later processes find it.

    Args:
        model: a model's folder, its config.json or its name on the hub; its weights are not read.
        recipe: as for `FastLanguageModel.from_pretrained`; None: a packed folder's own, else "qlora_nf4".
        batch: sequences and tokens of a training step. Other sizes mostly find the same kernels: what counts
            is which sizes are divisible by 16, and the tiles that suit them.
        rank: of the adapters, where the recipe has any.

    Raises:
        Unsupported: there is no GPU of CUDA here, or no Triton.
        BadInput: the model's configuration cannot be read, or has no such model.
    """
    gpu, folder = _gpu(), _cache_folder()
    config = _config_of(model)
    written = config.get("quantization_config") or {}
    if recipe is None:
        recipe = _USUAL_RECIPE
        if written.get("quant_method") == "fewbits":
            recipe = recipe_from_config(written["recipe"])
    chosen = get_recipe(recipe)
    longest = numbers_of(config).get("max_position_embeddings")
    if longest and batch[1] > int(longest):
        raise BadInput(f"the model allows sequences of {int(longest):,} tokens, not of {batch[1]:,}.")
    before, began = _files(folder), time.perf_counter()
    with TemporaryDirectory(prefix="fewbits-warm-") as temporary:
        write_small(config, Path(temporary))
        run_small(Path(temporary), chosen, batch=batch, rank=rank)
    new = {file: size for file, size in _files(folder).items() if file not in before}
    kernels = sorted({file.stem for file in new if file.suffix == ".cubin"})
    return Warmed(gpu, folder, tuple(kernels), sum(new.values()), time.perf_counter() - began)


def _gpu() -> str:
    if not torch.cuda.is_available():
        raise Unsupported(
            "fewbits.warm compiles by running, and there is no GPU of CUDA here; run it where there is one "
            "of the kind, and take the folder that it names along."
        )
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


def _cache_folder() -> Path:
    try:
        from triton import knobs
    except ImportError as error:
        raise Unsupported(
            "fewbits.warm compiles Triton's kernels, and Triton is not installed; pip install triton."
        ) from error
    return Path(knobs.cache.dir)


def _files(folder: Path) -> dict[Path, int]:
    """Sizes of the files below a folder; other processes may write there."""
    sizes = {}
    for file in folder.rglob("*"):
        try:
            if file.is_file():
                sizes[file] = file.stat().st_size
        except OSError:  # a temporary file, gone
            continue
    return sizes


def _config_of(model: str | Path) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(str(model), local_files_only=Path(model).exists())
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or ["nothing said"])[0]
        raise BadInput(
            f"{model} has no configuration that can be read ({said}); give a model's folder, its config.json "
            "or its name on the hub."
        ) from error
    return dict(config)


def write_small(config: Mapping[str, Any], folder: Path) -> None:
    """A model of two layers of a config.json's widths into a folder, its weights zeros that take no disk.

    Raises:
        BadInput: transformers can build none.
    """
    small = {key: value for key, value in config.items() if key not in ("quantization_config", MARK)}
    texts = [part for part in (small.get("text_config"), small) if isinstance(part, dict)]
    for text in texts:
        layers = int(text.get("num_hidden_layers") or _LAYERS)
        text.update({k: v[:_LAYERS] for k, v in text.items() if k == "layer_types" and isinstance(v, list)})
        text["num_hidden_layers"] = min(layers, _LAYERS)
    model = built_without_memory(small)
    model.config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text_of_header = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text_of_header).to_bytes(8, "little") + text_of_header)
        stream.truncate(8 + len(text_of_header) + end)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """One of a single word: nothing here is text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>").save_pretrained(
        folder
    )


def run_small(folder: Path, recipe: Recipe, *, batch: tuple[int, int], rank: int) -> None:
    """Load a model, train it some steps, let it write: whatever compiles on the way is then compiled."""
    trains_all = recipe.lora is None and recipe.linear.weight is None
    model, _ = FastLanguageModel.from_pretrained(
        folder, recipe=recipe, full_finetuning=trains_all, local_files_only=True
    )
    if not trains_all:
        model = FastLanguageModel.get_peft_model(model, r=rank)
    device = next(model.parameters()).device
    ids = torch.zeros(batch, dtype=torch.long, device=device)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.AdamW(weights, fused=device.type == "cuda"), AdamW8bit(weights)]
    for recomputes in ("unsloth", False):
        FastLanguageModel.for_training(model, recomputes)
        for _ in range(_STEPS):
            model(input_ids=ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    FastLanguageModel.for_inference(model)
    prompt = torch.zeros((1, min(_PROMPT, batch[1])), dtype=torch.long, device=device)
    for rows in (prompt, prompt.expand(2, -1)):
        model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            min_new_tokens=_ANSWER,
            max_new_tokens=_ANSWER,
            do_sample=False,
        )
    del model, weights, optimizers
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


__all__ = ["Warmed", "run_small", "warm", "write_small"]
