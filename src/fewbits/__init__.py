"""fewbits: fine-tune and run large language models in few bits.

    model, tokenizer = FastLanguageModel.from_pretrained("path/to/model", load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(model, r=16)  # LoRA adapters; train with TRL or transformers
    print(explain(model))  # what was quantised and replaced, and what was not and why

Here live the public names, which are resolved on first use: importing fewbits imports nothing else, not
even torch, and changes nothing in other libraries. Begin with `models/fast.py`, which has the class
above; docs/guide/where-is-what.md says which folder does what.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewbits.decoder.fuse import fuse, unfuse
    from fewbits.families.registry import register_family
    from fewbits.families.spec import ModelSpec
    from fewbits.formats import FORMATS, get_format
    from fewbits.formats.kv_cache import KVCache
    from fewbits.front.unsloth import (
        FastModel,
        FastSentenceTransformer,
        PatchDPOTrainer,
        PatchFastRL,
        PatchKTOTrainer,
        is_bfloat16_supported,
    )
    from fewbits.front.vision import FastVisionModel
    from fewbits.inference.answer_file import answer_file
    from fewbits.inference.generate import Sampling, generate, stream
    from fewbits.inference.many import generate_many
    from fewbits.kernels.stochastic.matmul import sc_matmul
    from fewbits.models.adapting.adapters import get_peft_model, load_adapter, lora_config
    from fewbits.models.fast import FastLanguageModel
    from fewbits.models.loading.hf_quantizer import FewbitsConfig, register
    from fewbits.models.loading.in_memory import convert, restore
    from fewbits.models.packing.cache_choice import choose_cache
    from fewbits.models.packing.convert import explain
    from fewbits.recipes import CATALOG, QAT, LoRA, Recipe, Rule, get_recipe
    from fewbits.training.ahead.warming import warm
    from fewbits.training.calibration.qat import convert_qat, prepare_qat
    from fewbits.training.config import TrainConfig
    from fewbits.training.ranks.shared_model import load_shared_model
    from fewbits.training.run import train

__version__ = "0.1.0"

# Where each public name is defined. By task:
#   load, adapt, undo      FastLanguageModel, get_peft_model, load_adapter, convert, fuse, explain, restore
#   over several GPUs      load_shared_model
#   train from settings    TrainConfig, train; on the command line ``fewbits init`` and ``fewbits train``
#   generate               ``model.generate``, generate, stream, generate_many, answer_file, choose_cache
#   choose formats         Recipe, Rule, LoRA, QAT, get_recipe, get_format, CATALOG, FORMATS
#   train, and round later prepare_qat, convert_qat
#   other libraries' names FewbitsConfig and register (transformers), FastModel and others (Unsloth)
_HOMES = {
    "FORMATS": "fewbits.formats",
    "sc_matmul": "fewbits.kernels.stochastic.matmul",
    "get_format": "fewbits.formats",
    "CATALOG": "fewbits.recipes",
    "KVCache": "fewbits.formats.kv_cache",
    "choose_cache": "fewbits.models.packing.cache_choice",
    "LoRA": "fewbits.recipes",
    "QAT": "fewbits.recipes",
    "Recipe": "fewbits.recipes",
    "Rule": "fewbits.recipes",
    "get_recipe": "fewbits.recipes",
    "convert": "fewbits.models.loading.in_memory",
    "explain": "fewbits.models.packing.convert",
    "fuse": "fewbits.decoder.fuse",
    "unfuse": "fewbits.decoder.fuse",
    "restore": "fewbits.models.loading.in_memory",
    "get_peft_model": "fewbits.models.adapting.adapters",
    "load_adapter": "fewbits.models.adapting.adapters",
    "load_shared_model": "fewbits.training.ranks.shared_model",
    "lora_config": "fewbits.models.adapting.adapters",
    "FastLanguageModel": "fewbits.models.fast",
    "FastModel": "fewbits.front.unsloth",
    "FastVisionModel": "fewbits.front.vision",
    "FastSentenceTransformer": "fewbits.front.unsloth",
    "PatchDPOTrainer": "fewbits.front.unsloth",
    "PatchFastRL": "fewbits.front.unsloth",
    "PatchKTOTrainer": "fewbits.front.unsloth",
    "is_bfloat16_supported": "fewbits.front.unsloth",
    "UnslothTrainer": "fewbits.front.unsloth_trainer",
    "UnslothTrainingArguments": "fewbits.front.unsloth_trainer",
    "ModelSpec": "fewbits.families.spec",
    "register_family": "fewbits.families.registry",
    "FewbitsConfig": "fewbits.models.loading.hf_quantizer",
    "register": "fewbits.models.loading.hf_quantizer",
    "TrainConfig": "fewbits.training.config",
    "train": "fewbits.training.run",
    "generate_many": "fewbits.inference.many",
    "answer_file": "fewbits.inference.answer_file",
    "Sampling": "fewbits.inference.generate",
    "generate": "fewbits.inference.generate",
    "stream": "fewbits.inference.generate",
    "prepare_qat": "fewbits.training.calibration.qat",
    "convert_qat": "fewbits.training.calibration.qat",
    "warm": "fewbits.training.ahead.warming",
}

# Further names of Unsloth's notebooks: the same things again, and what is refused with the way.
_HOMES |= dict.fromkeys(
    (
        "apply_chat_template",
        "get_chat_template",
        "standardize_data_formats",
        "standardize_sharegpt",
        "to_sharegpt",
    ),
    "fewbits.chat_templates",
)
_HOMES |= {"train_on_responses_only": "fewbits.chat_templates", "is_bf16_supported": "fewbits.front.unsloth"}
_HOMES |= dict.fromkeys(
    ("FastLlamaModel", "FastMistralModel", "FastQwen2Model", "FastQwen3Model", "FastGemmaModel"),
    "fewbits.front.unsloth",
)
_RUNS_CODE = "runs what a model wrote; take a sandbox of your own, such as a container without network"
_REFUSED = {
    "check_python_modules": _RUNS_CODE,
    "create_locked_down_function": _RUNS_CODE,
    "execute_with_time_limit": _RUNS_CODE,
}

# Not among them: UnslothTrainer and UnslothTrainingArguments, which stand on TRL, an extra.
__all__ = [
    "CATALOG",
    "FORMATS",
    "QAT",
    "FastLanguageModel",
    "FastModel",
    "FastSentenceTransformer",
    "FastVisionModel",
    "FewbitsConfig",
    "KVCache",
    "LoRA",
    "ModelSpec",
    "PatchDPOTrainer",
    "PatchFastRL",
    "PatchKTOTrainer",
    "Recipe",
    "Rule",
    "Sampling",
    "TrainConfig",
    "__version__",
    "answer_file",
    "choose_cache",
    "convert",
    "convert_qat",
    "explain",
    "fuse",
    "generate",
    "generate_many",
    "get_format",
    "get_peft_model",
    "get_recipe",
    "is_bfloat16_supported",
    "load_adapter",
    "load_shared_model",
    "lora_config",
    "prepare_qat",
    "register",
    "register_family",
    "restore",
    "sc_matmul",
    "stream",
    "train",
    "unfuse",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _REFUSED:
        from fewbits.errors import Unsupported

        raise Unsupported(f"fewbits has no {name}, which {_REFUSED[name]}.")
    raise AttributeError(f"module 'fewbits' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
