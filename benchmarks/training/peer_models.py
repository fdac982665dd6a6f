"""One model in few bits as each library loads it, for benchmarks that stand beside peers.

`make_folder` writes what is loaded, `import_first` what a library wants first, `base` loads, `load` adds the
adapters or says how a trainer is to, `same_beginnings` gives all adapters the same first values. WHO is
``fewbits`` (NF4), ``fp8`` (NF4, products and head in FP8), ``packed`` (from a packed folder), ``plain``
(transformers + PEFT + bitsandbytes), ``float32`` (the same in float32, products in TF32, whose operands have
three more bits than bfloat16's) or ``unsloth``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import torch

CUDA = torch.cuda.is_available()
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES = {  # of packed folders
    "train_nf4": "qlora_nf4", "train_fp8": "qlora_nf4_fp8_head", "load_packed": "qlora_nf4"
}  # fmt: skip


def shape_name(stage: str, tiny: bool) -> str:
    """Whose weights a stage loads: a shape, with the recipe behind an @ where they are packed."""
    what = stage.split("_")[0]
    shape = "tiny" if tiny else "qwen3-1.7b" if what in ("dpo", "grpo") else "llama-3.1-8b"
    return f"{shape}@{RECIPES[stage]}" if stage in RECIPES else shape


def make_folder(folder: Path, shape: str) -> Path:
    """A folder of random weights, in bfloat16 or packed, and a tokenizer of bytes, written once."""
    from benchmarks.random_model import config_of, empty_model, fill

    from fewbits import get_recipe
    from fewbits.bench.train.shapes import random_model, shape_of
    from fewbits.bench.train.tokenizer import write_tokenizer

    path = folder / shape
    if (path / "done").exists():
        return path
    device = torch.device("cuda" if CUDA else "cpu")
    shape, _, recipe = shape.partition("@")
    if recipe:
        model = fill(empty_model(config_of(shape), get_recipe(recipe)), lambda name: device)
    else:
        config = shape_of(shape).config()
        config.use_cache = True
        model = random_model(config, device, torch.bfloat16)
    model.save_pretrained(path, max_shard_size="4GB")
    write_tokenizer(str(path))
    (path / "done").write_text("")
    return path


def import_first(who: str) -> None:
    """Unsloth wants to be imported before all else."""
    if who == "unsloth":
        import unsloth  # noqa: F401
    if who in ("plain", "float32"):
        import bitsandbytes  # noqa: F401
    if who in ("fewbits", "packed", "fp8", "nf4"):
        import fewbits.models.fast  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import trl  # noqa: F401


def load(who: str, folder: str, length: int) -> tuple[Any, Any, dict[str, Any]]:
    """A model with adapters, its tokenizer, a trainer's words (plain: the adapters, which TRL adds)."""
    adapter = {"r": 16, "lora_alpha": 16, "lora_dropout": 0, "bias": "none", "target_modules": TARGETS}
    model, tokenizer = base(who, folder, length)
    if who in ("fewbits", "fp8"):
        from fewbits import FastLanguageModel

        words = {"use_gradient_checkpointing": False, "random_state": 3407}
        return FastLanguageModel.get_peft_model(model, **adapter, **words), tokenizer, {}
    if who == "unsloth":
        from unsloth import FastLanguageModel as Unsloth

        words = {"use_gradient_checkpointing": False, "random_state": 3407}
        return Unsloth.get_peft_model(model, **adapter, **words), tokenizer, {}
    from peft import LoraConfig

    return model, tokenizer, {"peft_config": LoraConfig(task_type="CAUSAL_LM", **adapter)}


def base(who: str, folder: str, length: int) -> tuple[Any, Any]:
    """A model in few bits without adapters, and its tokenizer."""
    if who in ("fewbits", "packed", "fp8"):
        from fewbits import FastLanguageModel

        named = {"fewbits": {"load_in_4bit": True}, "fp8": {"recipe": "qlora_nf4_fp8_head"}}.get(who, {})
        return FastLanguageModel.from_pretrained(folder, max_seq_length=length, **named)
    if who == "unsloth":
        from unsloth import FastLanguageModel as Unsloth

        return Unsloth.from_pretrained(
            folder, max_seq_length=length, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    dtype = torch.bfloat16 if CUDA and who == "plain" else torch.float32
    if who == "float32":
        torch.set_float32_matmul_precision("high")
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=packed,
        dtype=dtype,
        device_map={"": 0 if CUDA else "cpu"},
    )
    return model, AutoTokenizer.from_pretrained(folder)


def same_beginnings(model: Any, b: float = 0.0) -> int:
    """A of every adapter follows from its layer's name, so that all begin alike; B too, of spread ``b``.

    TRL's copy of an adapter that it was given ("ref") stays, and its B is zero.
    """
    count = 0
    for name, value in model.named_parameters():
        if ".ref." in name or ("lora_A" not in name and not (b and "lora_B" in name)):
            continue
        short = name[name.index("layers.") :].replace(".default", "").removesuffix(".weight")
        generator = torch.Generator().manual_seed(crc32(short.encode()))
        if "lora_A" in name:
            bound = value.shape[1] ** -0.5
            fresh = torch.empty(value.shape).uniform_(-bound, bound, generator=generator)
        else:
            fresh = b * torch.randn(value.shape, generator=generator)
        with torch.no_grad():
            value.copy_(fresh.to(value.device, value.dtype))
        count += 1
    return count
