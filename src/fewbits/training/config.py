"""The choices of one training run: a flat, frozen value read from YAML and from ``key=value`` overrides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fewbits.errors import BadInput
from fewbits.text_files import read_text
from fewbits.training.config_help import HELP
from fewbits.training.config_values import (
    check_combinations,
    coerce,
    parse_memory_budget,
    parse_overrides,
    shown,
)
from fewbits.training.other_words import unknown_key
from fewbits.yaml_text import mapping_in, parse_yaml

FORMATS = ("auto", "text", "completion", "instruction", "chat")
METHODS = ("sft", "dpo", "kto", "orpo", "cpo", "simpo", "grpo", "rloo", "reward")
REWARDED = ("grpo", "rloo")  # the model writes answers to prompts, and functions reward them
REPORTERS = ("tensorboard", "wandb", "trackio", "mlflow")
LONG_ROWS = ("truncate", "drop", "refuse")
OPTIMIZERS = {  # by the host's names; adamw_8bit and muon are made by `optimizer_class`
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_torch",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "muon": "adamw_torch",
    "adamw_4bit": "adamw_torch_4bit",  # torchao's
    "paged_adamw": "paged_adamw_32bit",  # bitsandbytes'
    "paged_adamw_8bit": "paged_adamw_8bit",
    "schedule_free": "schedule_free_adamw",  # of schedulefree
}
SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup", "polynomial", "cosine_with_min_lr")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CUDA_GRAPH = ("auto", "true", "false")
PARALLEL = ("auto", "ddp", "fsdp", "tensor")
COMMUNICATION = ("auto", "none", "int8", "int4", "fp8")
ALIASES = {
    "lr": "learning_rate",
    "max_seq_len": "max_seq_length",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "data": "train_data",
    "output": "output_dir",
    "neftune_noise_alpha": "neftune_alpha",
    "loraplus_lr_ratio": "lora_plus_ratio",
    "skip-bad-rows": "skip_bad_rows",
}
_NESTED = (
    "fields",
    "lora_ranks",
    "lora_module_alphas",
)  # mappings whose entries have keys of their own, as in fields.prompt=x
# What may differ between a run and its continuation: nothing here changes the weights.
NOT_COMPARED = frozenset(
    {
        "output_dir",
        "resume",
        "data_on_disk",
        "take_over",
        "report",
        "keep_checkpoints",
        "merge",
        "sample_prompts",
        "samples",
        "memory_budget",
        "cuda_graph",
        "parallel",
        "tensor_size",
        "shard_size",
        "keep_gathered",
        "meeting_seconds",
        "wait_seconds",
        "report_to",
        "title",
        "sample_tokens",
    }
)


def _option(default: Any, group: str, choices: Iterable[str] = ()) -> Any:
    return field(default=default, metadata={"group": group, "choices": tuple(choices)})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. What each field means is in `fewbits.training.config_help`.

    The command line makes a flag of every field, and ``fewbits train --help`` lists them with these texts.
    """

    model: str = field(metadata={"group": "model", "choices": ()})
    dtype: str = _option("auto", "model", DTYPES)
    device: str = _option("auto", "model", ("auto", "cpu", "cuda"))
    recipe: str | dict[str, Any] | None = field(default=None, metadata={"group": "model", "choices": ()})
    load_in_4bit: bool = _option(True, "model")
    memory_budget: str = _option("auto", "model")
    cuda_graph: str = _option("auto", "model", CUDA_GRAPH)

    lora_r: int | None = _option(None, "lora")
    lora_alpha: float | None = _option(None, "lora")
    lora_dropout: float | None = _option(None, "lora")
    lora_targets: tuple[str, ...] = _option((), "lora")
    lora_bias: str | None = _option(None, "lora", ("none", "all", "lora_only"))
    lora_rslora: bool = _option(False, "lora")
    lora_dora: bool = _option(False, "lora")
    lora_init: str | None = _option(None, "lora", ("gaussian", "orthogonal", "loftq", "pissa", "olora"))
    lora_ranks: dict[str, int] = field(default_factory=dict, metadata={"group": "lora", "choices": ()})
    lora_module_alphas: dict[str, int] = field(
        default_factory=dict, metadata={"group": "lora", "choices": ()}
    )
    lora_plus_ratio: float | None = _option(None, "lora")
    modules_to_save: tuple[str, ...] = _option((), "lora")
    trainable_tokens: tuple[int, ...] = _option((), "lora")

    train_data: str | list[Any] = field(default="", metadata={"group": "data", "choices": ()})
    eval_data: str | list[Any] | None = field(default=None, metadata={"group": "data", "choices": ()})
    eval_fraction: float = _option(0.0, "data")
    data_on_disk: str | None = _option(None, "data")
    format: str = _option("auto", "data", FORMATS)
    fields: dict[str, str] = field(default_factory=dict, metadata={"group": "data", "choices": ()})
    prompt_template: str = _option("alpaca", "data")
    chat_template: str | None = _option(None, "data")
    template_tokens: str = _option("text", "data", ("text", "add"))
    max_seq_length: int | None = _option(None, "data")
    long_rows: str = _option("truncate", "data", LONG_ROWS)
    packing: bool = _option(False, "data")
    responses_only: bool = _option(True, "data")
    skip_bad_rows: bool = _option(False, "data")

    batch_size: int = _option(8, "training")
    gradient_accumulation: int = _option(1, "training")
    epochs: float = _option(1.0, "training")
    max_steps: int | None = _option(None, "training")
    learning_rate: float = _option(2e-4, "training")
    scheduler: str = _option("cosine", "training", SCHEDULERS)
    warmup: float = _option(0.03, "training")
    weight_decay: float = _option(0.0, "training")
    max_grad_norm: float = _option(1.0, "training")
    optimizer: str = _option("adamw", "training", OPTIMIZERS)
    embedding_learning_rate: float | None = _option(None, "training")
    neftune_alpha: float | None = _option(None, "training")
    seed: int = _option(42, "training")

    method: str = _option("sft", "method", METHODS)
    beta: float | None = _option(None, "method")
    rewards: tuple[str, ...] = _option((), "method")
    num_generations: int | None = _option(None, "method")
    max_completion_length: int | None = _option(None, "method")

    parallel: str = _option("auto", "several GPUs", PARALLEL)
    tensor_size: int | None = _option(None, "several GPUs")
    shard_size: int | None = _option(None, "several GPUs")
    keep_gathered: bool = _option(False, "several GPUs")
    communication: str = _option("auto", "several GPUs", COMMUNICATION)
    meeting_seconds: int = _option(90, "several GPUs")
    wait_seconds: int = _option(1800, "several GPUs")

    logging_steps: int = _option(1, "output")
    eval_steps: int | None = _option(None, "output")
    save_steps: int | None = _option(None, "output")
    keep_checkpoints: int = _option(2, "output")
    early_stopping_patience: int | None = _option(None, "output")
    keep_best: bool = _option(True, "output")
    output_dir: str = _option("outputs", "output")
    resume: bool = _option(False, "output")
    take_over: bool = _option(False, "output")
    merge: bool = _option(False, "output")
    report: bool = _option(True, "output")
    title: str | None = _option(None, "output")
    report_to: tuple[str, ...] = _option((), "output")
    samples: int = _option(3, "output")
    sample_prompts: tuple[str, ...] = _option((), "output")
    sample_tokens: int = _option(64, "output")

    def __post_init__(self) -> None:
        """Refuse values that no run can use; a recipe that is a value, or in a file, becomes plain data."""
        self._take_types()
        object.__setattr__(self, "recipe", _plain_recipe(self.recipe))
        self._check_reporters()
        check_combinations(self)
        for item in dataclasses.fields(self):
            choices, value = item.metadata["choices"], getattr(self, item.name)
            if choices and value is not None and value not in choices:
                raise BadInput(f"{item.name} is {value!r}; it must be one of {', '.join(choices)}.")
        parse_memory_budget(self.memory_budget)
        positive = (
            "batch_size",
            "gradient_accumulation",
            "logging_steps",
            "epochs",
            "learning_rate",
            "keep_checkpoints",
            "meeting_seconds",
            "wait_seconds",
        )
        optional = (
            "tensor_size",
            "shard_size",
            "max_steps",
            "eval_steps",
            "save_steps",
            "max_seq_length",
            "early_stopping_patience",
            "beta",
            "num_generations",
            "max_completion_length",
            "lora_plus_ratio",
            "embedding_learning_rate",
            "neftune_alpha",
        )
        for name in (*positive, *(name for name in optional if getattr(self, name) is not None)):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be greater than 0.")
        for name in (
            "weight_decay",
            "max_grad_norm",
            "warmup",
            "lora_r",
            "lora_dropout",
            "samples",
            "eval_fraction",
        ):
            if (getattr(self, name) or 0) < 0:
                raise BadInput(f"{name} is {getattr(self, name)}; it must not be negative.")
        for name in ("eval_fraction", "lora_dropout"):
            if (getattr(self, name) or 0) >= 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be below 1.")

    def _take_types(self) -> None:
        """Values of the types that the fields have, as from a file; a text for a list is one entry of it."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not item.default:
                _, value = _as_written_before(item.name, value)
                object.__setattr__(self, item.name, coerce(item.name, value, str(item.type)))

    def _check_reporters(self) -> None:
        object.__setattr__(self, "report_to", tuple(n for n in self.report_to if n.lower() != "none"))
        for name in self.report_to:
            if name not in REPORTERS:
                raise BadInput(f"report_to is {name!r}; it must be some of {', '.join(REPORTERS)}, or none.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainConfig:
        """A configuration from plain values; unknown keys are refused with the nearest name."""
        fields = {item.name: str(item.type) for item in dataclasses.fields(cls)}
        plain: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            if not isinstance(key, str):
                raise BadInput(f"the configuration has the key {shown(key)}, which is no name; check it.")
            name = ALIASES.get(key, key).replace("-", "_")
            name, value = _as_written_before(ALIASES.get(name, name), value)
            outer, dot, inner = name.partition(".")
            if dot and outer in _NESTED:
                nested.setdefault(outer, {})[inner] = value
            elif name not in fields:
                raise BadInput(unknown_key(key, [*fields, *ALIASES]))
            else:
                plain[name] = coerce(name, value, fields[name])
        for name, pairs in nested.items():
            plain[name] = {**plain.get(name, {}), **coerce(name, pairs, fields[name])}
        for required in ("model", "train_data"):
            if not plain.get(required):
                raise BadInput(
                    f"the configuration has no {required}; set it, as in {required}=PATH, or let `fewbits"
                    " init` write a configuration."
                )
        return cls(**plain)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> TrainConfig:
        """Read a YAML file of ``name: value`` lines; overrides (a mapping, or "name=value" texts) win."""
        path = Path(path)
        try:
            values = parse_yaml(read_text(path), str(path))
        except FileNotFoundError as error:
            raise BadInput(
                f"there is no configuration file {path}; check the path, or write one with `fewbits init"
                f" {path}`."
            ) from error
        except IsADirectoryError as error:
            raise BadInput(f"{path} is a folder; give the YAML file of the run.") from error
        if not isinstance(values, dict):
            raise BadInput(f"{path} holds no settings; write one `name: value` a line.")
        return cls.from_mapping({**values, **parse_overrides(overrides)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def to_yaml(self) -> str:
        """The text that ``from_yaml`` reads back to an equal value."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def differences(self, other: TrainConfig) -> list[str]:
        """The fields in which two runs differ and that change the weights."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [name for name in mine if mine[name] != theirs[name] and name not in NOT_COMPARED]


def _with_known_words(init: Any) -> Any:
    """A constructor that takes other names of settings, and names the nearest of one that is none."""

    @functools.wraps(init)
    def begin(self: TrainConfig, *args: Any, **values: Any) -> None:
        names = [item.name for item in dataclasses.fields(self)]
        for key in [key for key in values if key not in names]:
            if key not in ALIASES:
                raise BadInput(unknown_key(key, [*names, *ALIASES]))
            values[ALIASES[key]] = values.pop(key)
        init(self, *args, **values)

    return begin


TrainConfig.__init__ = _with_known_words(TrainConfig.__init__)  # type: ignore[method-assign]


def prolongs(config: TrainConfig, earlier: TrainConfig) -> bool:
    """Whether a run is an earlier one with more steps, or more epochs, and nothing else of weight."""
    changed = config.differences(earlier)
    if changed not in (["max_steps"], ["epochs"]):
        return False
    before, now = (getattr(c, changed[0]) for c in (earlier, config))
    return before is not None and now is not None and now > before


def help_of(name: str) -> str:
    """What the setting means, as `fewbits train --help` and `fewbits init` print it."""
    return HELP[name]


def _as_written_before(name: str, value: Any) -> tuple[str, Any]:
    """A field that had another name, and YAML's booleans where a text is meant."""
    if name == "gradient_checkpointing":
        return "memory_budget", "recompute" if coerce(name, value, "bool") else "auto"
    if name == "cuda_graph" and isinstance(value, bool):
        return name, str(value).lower()
    return name, value


def _plain_recipe(recipe: Any) -> str | dict[str, Any] | None:
    """A recipe as a name or a mapping: a run goes on as it began, whatever becomes of a file or a value."""
    if isinstance(recipe, str):
        written = mapping_in(recipe, "the recipe")
        return recipe if written is None else written
    if recipe is None or isinstance(recipe, dict):
        return recipe
    from fewbits.recipes import get_recipe, recipe_to_config

    return recipe_to_config(get_recipe(recipe))
