"""`load_shared_model`: a model for several GPUs that share its layers, ready to generate.

    # text.py, started by: torchrun --nproc-per-node 2 text.py
    model, tokenizer = fewbits.load_shared_model("path/to/model")
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids.to(model.device)
    text = model.generate(ids, max_new_tokens=100)  # the same on every rank

For models that do not fit on one GPU, or to be faster. Each process reads the files once and never holds more
than its share of the layers and one linear (`fewbits.training.ranks.tensor_loading`); decoding is
`fewbits.models.generation.step_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fewbits.errors import BadInput
from fewbits.models.chat.named_templates import stop_at_turns
from fewbits.models.fast import FastLanguageModel, with_methods
from fewbits.recipes import Recipe, get_recipe
from fewbits.training.ranks.processes import join
from fewbits.training.ranks.tensor_loading import load_tensor_parallel_model


def load_shared_model(
    folder: str | Path,
    *,
    recipe: str | Recipe | None = "qlora_nf4",
    dtype: torch.dtype = torch.bfloat16,
    on_gpu: bool | None = None,
) -> tuple[Any, Any]:
    """A model whose layers all processes of this run share, and its tokenizer; every process calls.

    Args:
        folder: with safetensors, unquantised or packed by fewbits.
        recipe: which linears are packed how; None: as the folder has it.
        dtype: of what is not packed.
        on_gpu: whether it goes to the GPUs, one for each process; None: where there are any.

    Returns:
        The model, on which `generate` is called with the same inputs in every process, and the tokenizer.

    Raises:
        BadInput: this is one process alone, or the folder holds no model.
        Unsupported: the family, the number of heads or a packed weight cannot be shared by so many.
    """
    folder = _of_a_model(Path(folder))
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    if not distributed.is_initialized():  # the caller's own group stays
        join(on_gpu=on_gpu)
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    if size == 1:
        raise BadInput(
            "this is one process, which has nobody to share a model's layers with; start several, as by"
            " torchrun --nproc-per-node 2 script.py, or load it with FastLanguageModel.from_pretrained."
        )
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoTokenizer, GenerationConfig

    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (size,), mesh_dim_names=("tensor",))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chosen = get_recipe(recipe) if isinstance(recipe, str) else recipe
    model, _ = load_tensor_parallel_model(str(folder), mesh, recipe=chosen, dtype=dtype, trains=False)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    stop_at_turns(model, tokenizer)
    model.fewbits_tokenizer = tokenizer
    FastLanguageModel.for_inference(with_methods(model))
    return model, tokenizer


def _of_a_model(folder: Path) -> Path:
    """The folder, if it is one and holds a whole model."""
    if not folder.is_dir():
        raise BadInput(
            f"there is no folder {folder}; each process reads its part of the files itself, so download the"
            " model first and give its folder."
        )
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise BadInput(
            f"{folder} holds an adapter; merge it into its base (fewbits merge, or save_pretrained_merged),"
            " and give the merged folder."
        )
    return folder
