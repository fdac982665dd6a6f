"""TRL's trainers and configurations with the words of notebooks that were written for a patched TRL.

`fewbits.trl` is TRL with these differences, each made in a subclass of ours; TRL itself stays as it is:

* a trainer takes ``tokenizer`` for ``processing_class``, and fields of its configuration (``beta``,
  ``dataset_text_field``, ``max_seq_length``, ``packing``, ...) beside it, as older versions did;
* a configuration takes ``max_seq_length`` for ``max_length``, ``warmup_ratio`` for a fraction of
  ``warmup_steps``, and words that TRL has dropped, which choose nothing and are said;
* ``optim="adamw_8bit"`` (bitsandbytes, which runs it on a GPU alone) is AdamW in full where there is none;
* rows with images may be a list, as `fewbits.trainer.UnslothVisionDataCollator` takes them.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from functools import cache
from importlib import import_module
from typing import Any

from fewbits.errors import BadInput, Unsupported
from fewbits.front.vision_rows import UnslothVisionDataCollator, beside

logger = logging.getLogger("fewbits")
_HOMES = ("trl", "trl.experimental.orpo", "trl.experimental.cpo")
_DROPPED = {  # TRL had them once
    "max_prompt_length": "TRL cuts whole rows to max_length; shorten prompts in the data",
    "dataset_batch_size": "TRL maps in batches of its own size",
    "num_of_sequences": "packing fills max_length",
    "chars_per_token": "packing counts tokens",
    "neftune_noise_alpha_for_embeddings": "NEFTune is neftune_noise_alpha",
    "group_by_length": "rows come in the sampler's order",
    "overwrite_output_dir": "checkpoints are written over",
    "logging_dir": "each reporter has a place of its own",
    "save_safetensors": "weights are always saved as safetensors",
    "use_liger_kernel_loss": "the fused loss needs no switch",
}
_OF_VLLM = ("use_vllm", "vllm_sampling_params", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_device")
_RENAMED = {"max_seq_length": "max_length", "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = of_trl(name)
    if isinstance(value, type) and name.endswith(("Trainer", "Config")):
        value = _trainer(name) if name.endswith("Trainer") else _config(name)
    globals()[name] = value  # made once: pickle asks whether a class is the one found here
    return value


def of_trl(name: str) -> Any:
    """What TRL calls so, also among its experimental parts.

    Raises:
        Unsupported: TRL is not installed.
        AttributeError: it has no such thing.
    """
    for home in _HOMES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an experimental part may change
                return getattr(import_module(home), name)
        except ImportError as error:
            if home == "trl":
                raise Unsupported(
                    "fewbits.trl is TRL, which is not installed; pip install 'fewbits[train]'."
                ) from error
        except AttributeError:
            continue
    raise AttributeError(f"TRL has no {name}")


def _config(name: str) -> type:
    base = of_trl(name)
    return with_words(type(name, (base,), _like(base, name)))


def with_words(kind: type) -> type:
    """A configuration's class, of ours, that takes the words of the notebooks from now on."""
    init, words = kind.__init__, frozenset(inspect.signature(kind.__init__).parameters) - {"self"}  # type: ignore[misc]

    def begin(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **_fields(kind.__name__, words, options))

    kind.__init__ = begin  # type: ignore[misc]
    return kind


def _trainer(name: str) -> type:
    base = of_trl(name)
    config = f"{name.removesuffix('Trainer')}Config"
    of_config = frozenset(inspect.signature(of_trl(config).__init__).parameters) - {"self"}

    def begin(self: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, *args, **_trainer_options(base, config, of_config, options))

    return type(name, (base,), {**_like(base, name), "__init__": begin})


def _like(base: type, name: str) -> dict[str, Any]:
    """The attributes by which pickle and help find a class of this module."""
    return {"__doc__": base.__doc__, "__module__": __name__, "__qualname__": name}


def _trainer_options(
    base: type, config: str, of_config: frozenset[str], options: dict[str, Any]
) -> dict[str, Any]:
    """A trainer's options in TRL's own words.

    Raises:
        BadInput: one that neither the trainer nor its configuration has.
    """
    name, make = base.__name__, _own(config)
    words = set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    if "tokenizer" in options:
        options.setdefault("processing_class", options.pop("tokenizer"))
    beside = {key: options.pop(key) for key in list(options) if key not in words}
    args = options.get("args")
    if args is not None and not isinstance(args, of_trl(config)):  # transformers' own, of older notebooks
        args = options["args"] = make(**{k: v for k, v in args.to_dict().items() if k in of_config})
    for key, value in beside.items():
        field = _RENAMED.get(key, key)
        if field in of_config and args is not None:
            setattr(args, field, value)
        elif field in of_config:
            options["args"] = args = make(**{field: value})
        elif key in _DROPPED:
            _say(name, key)
        else:
            raise BadInput(
                f"{name} knows no option {key!r}, and neither does its configuration; leave it out."
            )
    _take_data(config, options, args)
    return options


def _take_data(config: str, options: dict[str, Any], args: Any) -> None:
    """Data sets and what they are read by, as TRL wants them."""
    collator = options.get("data_collator")
    if isinstance(collator, UnslothVisionDataCollator):
        options["processing_class"] = collator.processor  # by which TRL knows rows with images
    if "train_dataset" in options:
        options["train_dataset"] = as_dataset(options["train_dataset"])
    if config == "SFTConfig":
        for key in ("train_dataset", "eval_dataset"):
            options[key] = _texts_alone(options.get(key), args)


def _texts_alone(dataset: Any, args: Any) -> Any:
    """A data set whose column of texts was written from conversations, without these.

    TRL would take the conversations and write them again by a template, which may call roles otherwise.
    """
    columns = list(getattr(dataset, "column_names", None) or ())
    field = getattr(args, "dataset_text_field", "text") or "text"
    if field not in columns or getattr(args, "assistant_only_loss", False):
        return dataset
    talks = [name for name in ("conversations", "messages") if name in columns]
    return dataset.remove_columns(talks) if talks else dataset


def _own(name: str) -> Any:
    return globals().get(name) or __getattr__(name)


def _fields(name: str, words: frozenset[str], options: dict[str, Any]) -> dict[str, Any]:
    """A configuration's fields in TRL's own words."""
    import torch

    fields: dict[str, Any] = {}
    for key, value in options.items():
        field = key if key in words else _RENAMED.get(key, key)
        if field in words:
            fields[field] = value
        elif key == "warmup_ratio":
            fields["warmup_steps"] = (
                options.get("warmup_steps") or value
            )  # a fraction, as transformers takes it
        elif key in _DROPPED:
            _say(name, key)
        else:
            fields[key] = value  # TRL refuses it by its name
    if fields.get("use_vllm"):
        for key in _OF_VLLM:
            fields.pop(key, None)
        logger.warning("%s: use_vllm chooses nothing here: model.generate writes completions.", name)
    if name == "GRPOConfig":
        _whole_groups(fields)
    if fields.get("optim") in ("adamw_8bit", "paged_adamw_8bit") and not torch.cuda.is_available():
        fields["optim"] = "adamw_torch"
        logger.warning("%s: optim=adamw_8bit needs a GPU; without one it is adamw_torch.", name)
    return fields


def _whole_groups(fields: dict[str, Any]) -> None:
    """A step of GRPO has whole groups of completions, as a patched TRL sees to by itself."""
    each = fields.get("num_generations", 8)
    rows, passes = fields.get("per_device_train_batch_size", 8), fields.get("gradient_accumulation_steps", 1)
    if "generation_batch_size" in fields or "steps_per_generation" in fields or rows * passes % each == 0:
        return
    fields["per_device_train_batch_size"] = each
    logger.warning(
        "GRPOConfig: per_device_train_batch_size is %d and becomes %d: a step needs whole groups.", rows, each
    )


@cache
def _say(name: str, key: str) -> None:
    logger.warning("%s: %s chooses nothing here: %s.", name, key, _DROPPED[key])


def as_dataset(rows: Any) -> Any:
    """A data set of TRL's kind; a list of rows becomes one, images within messages a column beside them."""
    if not isinstance(rows, list) or not rows:
        return rows
    from datasets import Dataset

    return Dataset.from_list([beside(row) for row in rows] if _has_parts(rows[0]) else rows)


def _has_parts(row: Any) -> bool:
    messages = row.get("messages") if isinstance(row, dict) else None
    return any(isinstance(message.get("content"), list) for message in messages or ())
