"""The choices of one training run: a flat, frozen value read from YAML and from ``key=value`` overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fewbits.errors import BadInput
from fewbits.text_files import read_text
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
METHODS = ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "reward")
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
        "wait_seconds",
        "report_to",
        "title",
        "sample_tokens",
    }
)


def _option(default: Any, group: str, help_text: str, choices: Iterable[str] = ()) -> Any:
    metadata = {"group": group, "help": help_text, "choices": tuple(choices)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. ``help_of`` tells what each field means; the command line makes its flags from it."""

    model: str = field(
        metadata={"group": "model", "help": "folder or hub name of the base model", "choices": ()}
    )
    dtype: str = _option(
        "auto", "model", "dtype of what is not quantised; auto: bfloat16 on a GPU, float32 on a CPU", DTYPES
    )
    device: str = _option("auto", "model", "auto, cpu or cuda", ("auto", "cpu", "cuda"))
    recipe: str | dict[str, Any] | None = field(
        default=None,
        metadata={
            "group": "model",
            "choices": (),
            "help": "which format where, by its name in the catalog (qlora_nf4, int8, ...), or as a mapping:"
            " {name: qlora_nf4, linear: {weight: int8}}",
        },
    )
    load_in_4bit: bool = _option(True, "model", "without a recipe: keep the base weights in NF4 (QLoRA)")
    memory_budget: str = _option(
        "auto",
        "model",
        "GiB that training may take, or auto: all that is free; layers keep for the backward pass what fits."
        " The same for all layers: keep (fastest), recompute, offload (smallest)",
    )
    cuda_graph: str = _option(
        "auto",
        "model",
        "replay each training step as one CUDA graph; auto: for small models on packed data; true pads every"
        " batch to max_seq_length",
        CUDA_GRAPH,
    )

    lora_r: int | None = _option(
        None, "lora", "rank of the adapters; none: as the recipe says (16 without); 0: no adapters"
    )
    lora_alpha: float | None = _option(
        None, "lora", "the adapter's product is scaled by alpha / r; none: as the recipe says"
    )
    lora_dropout: float | None = _option(
        None, "lora", "probability of dropping an adapter's input; none: as the recipe says"
    )
    lora_targets: tuple[str, ...] = _option(
        (), "lora", "names of the adapted linears; empty: as the recipe says"
    )
    lora_bias: str | None = _option(
        None, "lora", "which biases train: none, all or lora_only", ("none", "all", "lora_only")
    )
    lora_rslora: bool = _option(False, "lora", "scale by alpha / sqrt(r)")
    lora_dora: bool = _option(
        False, "lora", "DoRA: directions and lengths of the weights apart; PEFT's layers"
    )
    lora_init: str | None = _option(
        None,
        "lora",
        "how adapters begin: gaussian or orthogonal; loftq: as the error of packed weights; pissa or olora:"
        " from weights that are not packed; none: as LoRA does, with a product of zero",
        ("gaussian", "orthogonal", "loftq", "pissa", "olora"),
    )
    lora_ranks: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "group": "lora",
            "choices": (),
            "help": "other ranks for some linears, by the end of their name, as in lora_ranks.q_proj=32",
        },
    )
    lora_module_alphas: dict[str, int] = field(
        default_factory=dict,
        metadata={"group": "lora", "choices": (), "help": "other values of lora_alpha, as lora_ranks"},
    )
    lora_plus_ratio: float | None = _option(
        None, "lora", "LoRA+: B learns so many times as fast as A (alias: loraplus_lr_ratio); none: as fast"
    )
    modules_to_save: tuple[str, ...] = _option(
        (), "lora", "modules that train whole beside the adapters, such as embed_tokens, lm_head"
    )
    trainable_tokens: tuple[int, ...] = _option(
        (), "lora", "numbers of tokens whose rows of the embedding train beside the adapters"
    )

    train_data: str | list[Any] = field(
        default="",
        metadata={
            "group": "data",
            "choices": (),
            "help": "JSONL, JSON, CSV, Parquet or text file, a folder saved by `datasets`, or a set's name on"
            " the hub; several as a list, of mappings where one has a weight, a split or its own fields:"
            " [a.jsonl, {path: b.jsonl, weight: 0.5}]",
        },
    )
    eval_data: str | list[Any] | None = field(
        default=None, metadata={"group": "data", "choices": (), "help": "the same, for evaluation"}
    )
    eval_fraction: float = _option(
        0.0, "data", "share of the training rows held out for evaluation, without eval_data"
    )
    data_on_disk: str | None = _option(
        None,
        "data",
        "a folder: tokens wait in a nameless file there instead of in memory, and rows of the hub are taken"
        " as they come; for data larger than memory",
    )
    format: str = _option("auto", "data", "what a row is; auto: by its columns", FORMATS)
    fields: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "group": "data",
            "choices": (),
            "help": "columns of other names, as in fields.prompt=question",
        },
    )
    prompt_template: str = _option(
        "alpaca",
        "data",
        "how an instruction row is written: alpaca, question, chat (the tokenizer's template), or a text with"
        " {instruction} and {input}",
    )
    chat_template: str | None = _option(
        None,
        "data",
        "how chats are written: chatml, llama-3, mistral, gemma, qwen, phi, zephyr, alpaca, vicuna, a file of"
        " a Jinja template, or tokenizer; none: the tokenizer's own; preference rows of texts are no chats",
    )
    template_tokens: str = _option(
        "text",
        "data",
        "markers that the tokenizer lacks: text, or add them as tokens, which train",
        ("text", "add"),
    )
    max_seq_length: int | None = _option(
        None, "data", "longest row in tokens; none: what the model allows, at most 1024"
    )
    long_rows: str = _option(
        "truncate", "data", "rows over max_seq_length are truncated at the end, dropped or refused", LONG_ROWS
    )
    packing: bool = _option(False, "data", "several rows in one sequence, which do not see each other")
    responses_only: bool = _option(True, "data", "the loss counts only responses, not prompts")
    skip_bad_rows: bool = _option(
        False, "data", "count and skip rows that cannot be used, where otherwise the run stops"
    )

    batch_size: int = _option(8, "training", "the most rows (packed: sequences) in one forward pass")
    gradient_accumulation: int = _option(
        1,
        "training",
        "forward passes for one optimizer step, by all processes together: a step has batch_size x"
        " gradient_accumulation rows on any number of them",
    )
    epochs: float = _option(1.0, "training", "passes over the data")
    max_steps: int | None = _option(None, "training", "optimizer steps; overrides epochs")
    learning_rate: float = _option(2e-4, "training", "largest learning rate (alias: lr)")
    scheduler: str = _option("cosine", "training", "how the learning rate falls", SCHEDULERS)
    warmup: float = _option(
        0.03, "training", "warm-up: below 1 a share of the steps, from 1 on a number of steps"
    )
    weight_decay: float = _option(0.0, "training", "decay of matrices; biases and norms have none")
    max_grad_norm: float = _option(1.0, "training", "gradients are scaled down to this norm; 0: never")
    optimizer: str = _option(
        "adamw",
        "training",
        "adamw, adamw_8bit (moments of 8 bits), adafactor, sgd, muon (matrices; the rest by AdamW);"
        " adamw_4bit of torchao, paged_adamw and paged_adamw_8bit of bitsandbytes, schedule_free of"
        " schedulefree",
        OPTIMIZERS,
    )
    embedding_learning_rate: float | None = _option(
        None, "training", "learning rate of embeddings and head, where they train; none: as the rest"
    )
    neftune_alpha: float | None = _option(
        None, "training", "NEFTune: noise on the embeddings of training rows, so strong; none: none"
    )
    seed: int = _option(42, "training", "of adapters, dropout, the split and the order of the data")

    method: str = _option(
        "sft",
        "method",
        "what is learnt: sft (rows as they are), dpo, orpo, simpo and reward (prompt, chosen, rejected), kto"
        " (prompt, completion, label), grpo (prompt, and rewards)",
        METHODS,
    )
    beta: float | None = _option(
        None, "method", "how strongly the preference methods hold to their beginning; none: TRL's own value"
    )
    rewards: tuple[str, ...] = _option(
        (), "method", "of grpo: functions that judge completions, as module:function"
    )
    num_generations: int | None = _option(
        None, "method", "of grpo: completions for each prompt, which must divide a step's rows; none: 8"
    )
    max_completion_length: int | None = _option(
        None, "method", "of grpo: longest completion in tokens; none: half of max_seq_length, at most 256"
    )

    parallel: str = _option(
        "auto",
        "several GPUs",
        "how processes share the model: ddp (each holds all of it), fsdp (each a share), tensor (each a part"
        " of every layer); auto: ddp if that fits, else fsdp",
        PARALLEL,
    )
    tensor_size: int | None = _option(
        None,
        "several GPUs",
        "processes that share one layer, with tensor or fsdp; none: all with tensor, 1 with fsdp",
    )
    shard_size: int | None = _option(
        None,
        "several GPUs",
        "with fsdp: neighbouring processes that share one copy of the weights, as the GPUs of a machine; each"
        " such group has a copy; none: all share one",
    )
    keep_gathered: bool = _option(
        False,
        "several GPUs",
        "with fsdp: layers stay gathered from the forward to the backward pass, for which each GPU needs room"
        " for all weights; faster",
    )
    communication: str = _option(
        "auto",
        "several GPUs",
        "format in which gradients travel between processes; auto: the one that the recipe names, if any;"
        " none: as they are",
        COMMUNICATION,
    )
    wait_seconds: int = _option(
        1800, "several GPUs", "the longest that a process waits for another before the run stops"
    )

    logging_steps: int = _option(1, "output", "steps between two lines of metrics.jsonl")
    eval_steps: int | None = _option(None, "output", "steps between evaluations; none: ten in a run")
    save_steps: int | None = _option(None, "output", "steps between checkpoints; none: ten in a run")
    keep_checkpoints: int = _option(2, "output", "newest checkpoints kept beside the best one")
    early_stopping_patience: int | None = _option(
        None, "output", "stop after so many evaluations without a better loss; none: never"
    )
    keep_best: bool = _option(
        True, "output", "with evaluation: keep the best checkpoint and end with its weights"
    )
    output_dir: str = _option("outputs", "output", "the run folder")
    resume: bool = _option(False, "output", "go on from the last checkpoint in output_dir, if there is one")
    take_over: bool = _option(
        False,
        "output",
        "take the run folder from a process of another machine that ended without giving it back",
    )
    merge: bool = _option(
        False, "output", "at the end also write the model with its adapters merged, in 16 bits"
    )
    report: bool = _option(True, "output", "at the end write report.html")
    title: str | None = _option(None, "output", "heading of the report; none: the model's name")
    report_to: tuple[str, ...] = _option(
        (), "output", "where the figures go besides metrics.jsonl: tensorboard, wandb, trackio, mlflow"
    )
    samples: int = _option(3, "output", "evaluation rows answered before and after, for the report")
    sample_prompts: tuple[str, ...] = _option(
        (), "output", "prompts answered before and after, for the report"
    )
    sample_tokens: int = _option(64, "output", "longest sample answer, in tokens")

    def __post_init__(self) -> None:
        """Refuse values that no run can use; a recipe that is a value, or in a file, becomes plain data."""
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
                raise BadInput(f"the configuration has no {required}; give one, as in {required}=PATH.")
        return cls(**plain)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> TrainConfig:
        """Read a YAML file of ``name: value`` lines; overrides (a mapping, or "name=value" texts) win."""
        path = Path(path)
        try:
            values = parse_yaml(read_text(path), str(path))
        except FileNotFoundError as error:
            raise BadInput(f"there is no configuration file {path}; check the path.") from error
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


def prolongs(config: TrainConfig, earlier: TrainConfig) -> bool:
    """Whether a run is an earlier one with more steps, or more epochs, and nothing else of weight."""
    changed = config.differences(earlier)
    if changed not in (["max_steps"], ["epochs"]):
        return False
    before, now = (getattr(c, changed[0]) for c in (earlier, config))
    return before is not None and now is not None and now > before


def help_of(name: str) -> str:
    """What the field means, in one line."""
    return str(next(item for item in dataclasses.fields(TrainConfig) if item.name == name).metadata["help"])


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
