"""TRL's trainers for the preference methods: their arguments, their models, their reward functions.

TRL is an extra, and imported when a run needs it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput, Unsupported
from fewbits.training.config import REWARDED, TrainConfig
from fewbits.training.data.step_sampler import passes_of
from fewbits.training.setup.model_and_trainer import (
    Built,
    dtype_of,
    load_model,
    recipe_of_config,
    sequences_per_step,
    uses_gpu,
    variant_of,
    with_template,
)

_HOMES = {
    "dpo": ("trl", "DPO"),
    "kto": ("trl", "KTO"),
    "grpo": ("trl", "GRPO"),
    "rloo": ("trl", "RLOO"),
    "reward": ("trl", "Reward"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
    "cpo": ("trl.experimental.cpo", "CPO"),
    "simpo": ("trl.experimental.cpo", "CPO"),
}
_REFUSED = {  # key: (the value that means nothing, the way out)
    "lora_plus_ratio": (None, "leave lora_plus_ratio out"),
    "embedding_learning_rate": (None, "leave embedding_learning_rate out"),
    "packing": (False, "leave packing out"),
    "data_on_disk": (None, "leave data_on_disk out"),
    "communication": ("auto", "leave communication out"),
    "early_stopping_patience": (None, "leave early_stopping_patience out"),
    "sample_prompts": ((), "ask the model afterwards with fewbits generate"),
    "long_rows": ("truncate", "leave long_rows out, or leave such rows out of the data"),
}


def check_method(config: TrainConfig, processes: int) -> None:
    """Refuse what the method's trainer does not do.

    Raises:
        BadInput, Unsupported: with the way out.
    """
    method = config.method
    for name, (nothing, way) in _REFUSED.items():
        if getattr(config, name) != nothing:
            raise Unsupported(f"{name} is for method sft, and this run has method {method}; {way}.")
    wrong = (
        (
            config.parallel not in ("auto", "ddp"),
            "has all weights on each process; set parallel to auto or ddp",
        ),
        (
            config.optimizer in ("adamw_8bit", "muon"),
            f"has no {config.optimizer}; choose adamw, adafactor or sgd",
        ),
        (config.cuda_graph == "true", "replays no CUDA graph; leave cuda_graph out"),
        (
            config.memory_budget not in ("auto", "keep", "recompute"),
            "keeps or recomputes; set memory_budget to auto, keep or recompute",
        ),
    )
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise Unsupported(f"method {method} {sentence}.")
    recipe, lora = recipe_of_config(config)
    if recipe is not None and recipe.qat is not None:
        raise Unsupported(f"method {method} does not train through a QAT recipe; choose one without.")
    _check_rows_of_a_step(config, processes)
    if method == "reward" and config.template_tokens == "add":
        raise Unsupported(
            "method reward adds no tokens; leave template_tokens out, or train sft with them first."
        )
    if method == "reward" and config.merge:
        raise Unsupported(
            "merge is for methods that end in a language model, and method reward ends in a score; leave"
            " merge out."
        )
    if method == "reward" and lora is None:
        raise Unsupported("method reward trains adapters and the score alone; leave lora_r out.")
    if (method in REWARDED) != bool(config.rewards):
        raise BadInput(
            f"method {method} needs reward functions; name them, as in rewards: my_rewards:length."
            if method in REWARDED
            else f"rewards are for methods grpo and rloo, and this run has method {method}; leave them out."
        )


def _check_rows_of_a_step(config: TrainConfig, processes: int) -> None:
    rows = rows_of_a_pass(config, processes)
    if config.method == "kto" and rows < 2:
        raise BadInput(
            f"method kto compares rows of a batch, and {processes} processes have {rows} in a pass; set"
            f" batch_size to at least {2 * processes}."
            if processes > 1
            else "method kto compares rows of a batch; set batch_size to at least 2."
        )
    if config.method in REWARDED:
        step, each = sequences_per_step(config), config.num_generations or 8
        if each < 2 or step % each:
            raise BadInput(
                f"a step has {step} rows (batch_size x gradient_accumulation), and num_generations is {each};"
                " it must be at least 2 and divide them."
            )


def rows_of_a_pass(config: TrainConfig, processes: int) -> int:
    """Rows of one forward pass on each process, so that a step has the same rows on any number of them.

    Raises:
        BadInput: they cannot be shared evenly.
    """
    rows = sequences_per_step(config)
    passes = passes_of(rows, config.batch_size, processes)
    if rows % (processes * passes):
        raise BadInput(
            f"a step has {rows} rows (batch_size x gradient_accumulation), which {processes} processes cannot"
            " share evenly; make it a multiple of them."
        )
    return rows // (processes * passes)


def classes_of(method: str) -> tuple[Any, Any]:
    """TRL's trainer and its arguments' class.

    Raises:
        Unsupported: TRL is not installed, or has no such trainer.
    """
    home, name = _HOMES[method]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that an experimental part may change: constraints name TRL's version
            module = import_module(home)
            return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    except (ImportError, AttributeError) as error:
        raise Unsupported(
            f"method {method} needs TRL with {home}.{name}Trainer; pip install 'fewbits[train]'."
        ) from error


def method_arguments(config: TrainConfig, length: int) -> dict[str, Any]:
    """The arguments of TRL's trainer beside the host's."""
    recomputes = config.memory_budget == "recompute" or (config.memory_budget == "auto" and uses_gpu(config))
    more: dict[str, Any] = {
        "remove_unused_columns": config.method not in REWARDED,
        "gradient_checkpointing": recomputes,
        "eval_on_start": False,
        "save_total_limit": config.keep_checkpoints,
        "metric_for_best_model": None,
    }
    if config.beta is not None and config.method != "reward":
        more["beta"] = config.beta
    if config.method in REWARDED:
        more["num_generations"] = config.num_generations or 8
        more["max_completion_length"] = config.max_completion_length or min(256, max(1, length // 2))
    else:
        more["max_length"] = length
    if config.method == "simpo":
        more |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    if config.method in ("orpo", "cpo", "simpo"):
        more["remove_unused_columns"] = False  # as their collators ask
    return more


def rows_left_out(trainer: Any, data: Any, length: int) -> str:
    """What TRL's trainer did with rows that are too long, in a sentence; "" if it kept them all.

    Args:
        trainer: of a method, with its data prepared.
        data: the rows that it was given.
        length: the longest row in tokens.

    Raises:
        BadInput: no row is left.
    """
    left: Any = trainer.train_dataset
    teaching = len(left)
    for name in (
        "chosen_labels",
        "rejected_labels",
    ):  # kept, with an empty answer
        if name in left.column_names:
            teaching = min(teaching, sum(any(label != -100 for label in row) for row in left[name]))
    if teaching == len(data):
        return ""
    if not teaching:
        raise BadInput(
            f"no row has room for its answers in {length} tokens; raise max_seq_length, or shorten the"
            " prompts."
        )
    return (
        f"{len(data) - teaching} of {len(data)} rows have no room for their answers in {length} tokens and"
        " teach nothing; raise max_seq_length, or shorten their prompts."
    )


def reward_functions(config: TrainConfig) -> list[Callable[..., list[float]]]:
    """The functions that ``rewards`` names; modules of the working directory are found, too.

    Raises:
        BadInput: one cannot be imported, or is no function.
    """
    functions = []
    for name in config.rewards:
        module, colon, function = name.partition(":")
        if not (module and colon and function):
            raise BadInput(f"rewards has {name!r}; write module:function, as in my_rewards:length.")
        here = str(Path.cwd())
        added = here not in sys.path
        if added:
            sys.path.insert(0, here)
        try:
            reward = getattr(import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise BadInput(
                f"rewards has {name!r}, which cannot be imported ({error}); run where the module is, or"
                " install it."
            ) from error
        finally:
            if added:
                sys.path.remove(here)
        if not callable(reward):
            raise BadInput(
                f"rewards has {name!r}, which is a {type(reward).__name__}; name a function in that module."
            )
        functions.append(reward)
    return functions


def load_for(config: TrainConfig) -> Built:
    """The model, its tokenizer and its adapters; of a reward model with a score in place of the head."""
    return load_model(config) if config.method != "reward" else _reward_model(config)


def _reward_model(config: TrainConfig) -> Built:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from fewbits.host.conversion import conversion_of
    from fewbits.models.adapting.adapters import get_peft_model
    from fewbits.models.loading.hf_quantizer import FewbitsConfig, register
    from fewbits.models.loading.longer_positions import stretch

    register()
    recipe, lora = recipe_of_config(config)
    on_gpu, local = uses_gpu(config), Path(config.model).is_dir()
    tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=local)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    shapes = AutoConfig.from_pretrained(config.model, local_files_only=local, num_labels=1)
    note = stretch(shapes, config.max_seq_length, config.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        config.model,
        config=shapes,
        dtype=dtype_of(config, on_gpu, trains_all=lora is None),
        device_map={"": "cuda" if on_gpu else "cpu"},
        local_files_only=local,
        **({} if recipe is None else {"quantization_config": FewbitsConfig(recipe)}),
    )
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    conversion = conversion_of(model)
    adapted = get_peft_model(
        model, lora, seed=config.seed, task_type="SEQ_CLS", modules_to_save=["score"], **variant_of(config)
    )
    lines = ["" if conversion is None else str(conversion.receipt), note or ""]
    receipt = "\n".join(line for line in lines if line)
    return Built(adapted, with_template(tokenizer, config), recipe, lora, receipt)
