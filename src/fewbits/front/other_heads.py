"""Unsloth's ``auto_model=``: classifiers and other classes than language models, through transformers' own.

The layers are packed as a language model's are, or all of the model trains (``full_finetuning``); the head is
a plain linear, which PEFT trains whole beside adapters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from fewbits.errors import BadInput
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.adapting.trains_whole import train_whole, trains_whole
from fewbits.models.fast import with_merges

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fewbits")
_OF_CONFIG = ("num_labels", "id2label", "label2id", "problem_type", "classifier_dropout")
_TO_TRANSFORMERS = ("token", "revision", "cache_dir", "device_map", "local_files_only", "trust_remote_code")
_CHOOSES_NOTHING = ("use_gradient_checkpointing", "fast_inference", "random_state", "use_exact_model_name")
TEXT = (None, "CAUSAL_LM")


def load_as(
    auto_model: Any,
    model_name: str,
    max_seq_length: int | None = None,
    dtype: torch.dtype | None = None,
    load_in_4bit: bool = True,
    full_finetuning: bool = False,
    recipe: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a model by one of transformers' auto classes, and its tokenizer.

    Args:
        auto_model: such as ``AutoModelForSequenceClassification``.
        model_name: a folder, or a name on the hub.
        max_seq_length: the tokenizer's longest row.
        dtype: of what is not packed; None: bfloat16 or float16 on a GPU, else the checkpoint's.
        load_in_4bit: pack the layers in NF4.
        full_finetuning: pack nothing, train everything.
        recipe: in place of NF4.
        options: labels (num_labels, id2label, ...), and transformers' own for loading.

    Raises:
        BadInput: an option that nobody knows.
    """
    from transformers import AutoTokenizer

    from fewbits.models.loading.hf_quantizer import FewbitsConfig, register

    unknown = set(options) - {*_OF_CONFIG, *_TO_TRANSFORMERS, *_CHOOSES_NOTHING}
    if unknown:
        raise BadInput(
            f"from_pretrained with auto_model knows no option {sorted(unknown)[0]!r}; leave it out."
        )
    words = {name: value for name, value in options.items() if name not in _CHOOSES_NOTHING}
    of_tokenizer = {name: words[name] for name in ("token", "revision", "cache_dir") if name in words}
    tokenizer = AutoTokenizer.from_pretrained(model_name, **of_tokenizer)
    if max_seq_length is not None:
        tokenizer.model_max_length = max_seq_length
    packed = recipe or ("qlora_nf4" if load_in_4bit else None)
    if packed is not None and not full_finetuning:
        register()
        words["quantization_config"] = FewbitsConfig(packed)
    if torch.cuda.is_available():
        words.setdefault("device_map", {"": torch.cuda.current_device()})
        dtype = dtype or (torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)
    model = auto_model.from_pretrained(model_name, **({} if dtype is None else {"dtype": dtype}), **words)
    if full_finetuning:
        train_whole(model)
    if model.config.pad_token_id is None and tokenizer.pad_token_id is not None:
        model.config.pad_token_id = tokenizer.pad_token_id  # a classifier's batch needs one
    return with_merges(model), tokenizer


def adapt_as(model: nn.Module, r: int = 16, *, task_type: str, **options: Any) -> Any:
    """Add LoRA adapters to such a model, and train its head whole.

    One that was loaded with ``full_finetuning=True`` trains wholly, and stays as it is.

    Args:
        model: what `load_as` gave.
        r: rank of the adapters.
        task_type: PEFT's word, such as "SEQ_CLS".
        options: of ``get_peft_model``.
    """
    checkpointing = options.pop("use_gradient_checkpointing", False)
    seed = options.pop("random_state", 3407)
    options = {name: value for name, value in options.items() if value is not None}
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if trains_whole(model):
        logger.warning("get_peft_model: all weights train (full_finetuning), so there are no adapters.")
        return model
    return with_merges(get_peft_model(model, r=r, seed=seed, task_type=task_type, **options))
