"""The model, its tokenizer and the host Trainer of one run, from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.errors import BadInput, SpecMismatch, Unsupported
from fewbits.host.attention import attention_receipt, use_attention
from fewbits.host.conversion import conversion_of
from fewbits.models.adapting.learning_rates import set_embeddings_apart, set_lora_plus
from fewbits.models.chat.named_templates import set_template, stop_at_turns
from fewbits.models.chat.template_tokens import add_template_tokens, add_tokens, modules_to_train
from fewbits.models.fast import FastLanguageModel
from fewbits.models.loading.longer_positions import exceeds, stretch, stretched
from fewbits.models.packing.packed import is_packed
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import LoRA, Recipe, get_recipe
from fewbits.training.config import OPTIMIZERS, TrainConfig
from fewbits.training.config_values import shown
from fewbits.training.data.packing import SequenceDataset, pack
from fewbits.training.data.step_sampler import passes_of
from fewbits.training.data.token_data import TokenData
from fewbits.training.plan.parallel import Layout
from fewbits.training.setup.rows_apart import check_rows_apart

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import PreTrainedTokenizerBase

DEFAULT_LENGTH = 1024
# Whose optimizers the host makes, and names by an error of its own where they are missing.
_PACKAGES = {
    "adamw_4bit": "torchao",
    "paged_adamw": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "schedule_free": "schedulefree",
}


@dataclass
class Built:
    """A model ready to train."""

    model: Any
    tokenizer: Any
    recipe: Recipe | None
    lora: LoRA | None
    receipt: str


def uses_gpu(config: TrainConfig) -> bool:
    """Whether the run is on a GPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("device is cuda, but torch sees no GPU here; use device=cpu or auto.")
    return config.device != "cpu" and torch.cuda.is_available()


def recipe_of_config(config: TrainConfig) -> tuple[Recipe | None, LoRA | None]:
    """The recipe that the configuration names, and the adapters with its own settings in."""
    name = config.recipe or ("qlora_nf4" if config.load_in_4bit else None)
    recipe = None if name is None else get_recipe(name)
    lora = LoRA() if recipe is None else recipe.lora
    if lora is None and config.lora_r:
        lora = LoRA()
    if lora is None or config.lora_r == 0:
        return recipe, None
    fields: dict[str, Any] = {
        "r": config.lora_r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "targets": config.lora_targets or None,
        "bias": config.lora_bias,
        "rslora": config.lora_rslora or None,
    }
    if fields["targets"] == ("all-linear",):
        fields["targets"] = "all-linear"
    return recipe, replace(lora, **{key: value for key, value in fields.items() if value is not None})


def load_tokenizer(config: TrainConfig) -> tuple[Any, Any] | None:
    """Tokenizer and the model's configuration, so that bad data is found before the weights are read.

    None where only loading the whole model tells what is wrong.
    """
    from transformers import AutoConfig, AutoTokenizer

    local = Path(config.model).is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=local)
        shapes = AutoConfig.from_pretrained(config.model, local_files_only=local)
    except (OSError, ValueError, KeyError):
        return None
    stretch(shapes, config.max_seq_length, config.model)
    return with_template(tokenizer, config), shapes


def stretched_length(config: TrainConfig) -> int | None:
    """The length of rows, where it is more than the model was made for; else None."""
    from transformers import AutoConfig

    try:
        shapes = AutoConfig.from_pretrained(config.model, local_files_only=Path(config.model).is_dir())
    except (OSError, ValueError, KeyError):  # an adapter, which knows its base's length; or told when loaded
        return None
    return config.max_seq_length if exceeds(shapes, config.max_seq_length) else None


def with_template(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> Any:
    """The tokenizer, with the chat template that the run asks for."""
    if config.chat_template is not None:
        if config.template_tokens == "add":
            add_tokens(tokenizer, config.chat_template)
        set_template(tokenizer, config.chat_template, begins=True)
    return tokenizer


def _tokens_added(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: TrainConfig
) -> tuple[str, dict[str, Any]]:
    """Give the template's new tokens rows, if the run asks for them; a sentence, and what trains them."""
    if config.template_tokens != "add":
        return "", {}
    _check_tokens(model, config)
    added = add_template_tokens(model, tokenizer, str(config.chat_template))
    if not added:
        return f"template_tokens: the tokenizer has all that {config.chat_template} needs.", {}
    fields = modules_to_train(model)
    names = " and ".join(fields["modules_to_save"])
    return f"template_tokens: {', '.join(added)} added; {names} train as a whole.", fields


def _check_tokens(model: nn.Module, config: TrainConfig) -> None:
    if config.chat_template is None:
        raise BadInput("template_tokens is add, and no chat_template says which; set it, as in chatml.")
    if hasattr(model, "peft_config"):
        raise BadInput(
            f"template_tokens is add, but {config.model} is an adapter, whose tokens are fixed; begin from a"
            " base model, or leave template_tokens out."
        )


def max_positions(model_config: Any) -> int | None:
    """The longest sequence the model was made for, where its configuration says so."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def sequence_length(config: TrainConfig, limit: int | None) -> int:
    """The longest row in tokens."""
    if config.max_seq_length is None:
        return min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if limit is not None and config.max_seq_length > limit:
        raise BadInput(
            f"max_seq_length is {config.max_seq_length:,}, but {config.model} allows sequences of at most"
            f" {limit:,} tokens (max_position_embeddings); lower it."
        )
    return config.max_seq_length


def variant_of(config: TrainConfig) -> dict[str, Any]:
    """Further fields of PEFT's configuration that the run asks for."""
    flags = {
        "use_dora": config.lora_dora or None,
        "init_lora_weights": config.lora_init,
        "rank_pattern": config.lora_ranks or None,
        "alpha_pattern": config.lora_module_alphas or None,
        "modules_to_save": list(config.modules_to_save) or None,
        "trainable_token_indices": list(config.trainable_tokens) or None,
    }
    return {name: value for name, value in flags.items() if value is not None}


def load_model(config: TrainConfig, *, spread: Callable[[Any], str] | None = None) -> Built:
    """Load, convert and adapt the model.

    Args:
        config: the run.
        spread: shards the model, which then comes from host memory, in place; gives its receipt.
    """
    recipe, lora = recipe_of_config(config)
    on_gpu = uses_gpu(config)
    qat = recipe if recipe is not None and recipe.qat is not None else None
    model, tokenizer = FastLanguageModel.from_pretrained(
        config.model,
        max_seq_length=stretched_length(config),
        dtype=dtype_of(config, on_gpu, trains_all=lora is None),
        load_in_4bit=False,
        recipe=None if qat else recipe,
        device_map=None if on_gpu and spread is None else "cpu",
    )
    told, whole = _tokens_added(model, tokenizer, config)
    if config.chat_template is not None:
        stop_at_turns(model, with_template(tokenizer, config))
    if qat is not None:
        from fewbits.training.calibration.qat import prepare_qat

        model = prepare_qat(model, replace(qat, lora=None))  # adapters follow below, with their seed
    conversion = conversion_of(model)
    if hasattr(model, "peft_config"):
        lora = _adapters_own(config, model.active_peft_config)
    elif lora is not None:
        model = FastLanguageModel.get_peft_model(
            model,
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.targets,
            bias=lora.bias,
            use_rslora=lora.rslora,
            random_state=config.seed,
            adapt_embeddings=True,
            **variant_of(config),
            **whole,
            use_gradient_checkpointing=False,  # the memory budget decides, once the batches are known
        )
    if is_packed(model) and not hasattr(model, "peft_config"):
        raise Unsupported(
            f"the weights of {config.model} are packed and cannot train, and there are no adapters; set"
            " lora_r for adapters, or load_in_4bit=false without a recipe to train all weights."
        )
    lines = ["" if conversion is None else str(conversion.receipt), told, *use_attention(model).notes]
    lines.append("" if conversion is not None else stretched(model.config) or "")  # else the receipt has it
    autocast = torch.bfloat16 if on_gpu and lora is None and config.dtype == "auto" else None
    lines += attention_receipt(
        model,
        seq_len=config.max_seq_length,
        packed=config.packing,
        dtype=autocast,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,  # where it will be
    )
    if config.packing:
        check_rows_apart(model)
    if on_gpu:
        lines.append(fused_decoder(model))
    if spread is not None:
        lines.append(spread(model))
    return Built(model, tokenizer, recipe, lora, "\n".join(line for line in lines if line))


def _adapters_own(config: TrainConfig, saved: Any) -> LoRA:
    """The settings of an adapter that is trained on; the run may not ask for others.

    Raises:
        BadInput: it does.
    """
    targets = saved.target_modules
    of_adapter = {
        "lora_r": saved.r,
        "lora_alpha": saved.lora_alpha,
        "lora_dropout": saved.lora_dropout,
        "lora_bias": saved.bias,
        "lora_rslora": saved.use_rslora,
        "lora_targets": tuple(sorted(targets)) if isinstance(targets, (set, list, tuple)) else (targets,),
    }
    for name, own in of_adapter.items():
        value = getattr(config, name)
        value = tuple(sorted(value)) if name == "lora_targets" else value
        if not (value is None or value is False or value in ((), own)):
            raise BadInput(
                f"{name} is {shown(value)}, but {config.model} is an adapter with {shown(own)}, which is"
                f" trained on; leave {name} out, or merge the adapter first (fewbits merge)."
            )
    names = of_adapter["lora_targets"]
    return LoRA(
        r=saved.r,
        alpha=saved.lora_alpha,
        dropout=saved.lora_dropout,
        targets=names if isinstance(targets, (set, list, tuple)) else targets,
        bias=saved.bias,
        rslora=saved.use_rslora,
    )


def fused_decoder(model: nn.Module) -> str:
    """Let the decoder layers compute as fused nodes, unless they do; what was replaced, or why not."""
    fusion = fusion_of(model)
    if fusion is not None:
        return str(fusion.receipt)
    try:
        return str(fuse(model, delayed_scaling=True))
    except (Unsupported, SpecMismatch) as error:
        return f"the decoder is not fused: {error}"


def dtype_of(config: TrainConfig, on_gpu: bool, *, trains_all: bool) -> torch.dtype:
    """The dtype of what is not packed."""
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    # Weights that train stay in float32: in bfloat16 a usual step is lost in the rounding.
    return torch.bfloat16 if on_gpu and not trains_all else torch.float32


def count_weights(model: nn.Module) -> dict[str, int]:
    """Weights in all and trained, and the bytes they take; a packed weight counts as what it stands for.

    Bytes of the packed layers stand alone too, beside what these layers' weights would take in 16 bits.
    """
    parameters = list(model.parameters())
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    codes = {id(p) for module in packed for p in module.parameters(recurse=False)}
    total = sum(module.in_features * module.out_features for module in packed)
    return {
        "total": total + sum(p.numel() for p in parameters if id(p) not in codes),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "packed_bytes": sum(p.numel() * p.element_size() for p in parameters if id(p) in codes),
        "packed_bytes_in_16_bits": 2 * total,
    }


def check_vocabulary(model: Any, data: TokenData) -> None:
    """Every token id of the data needs a row of the embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(int(example.input_ids.max()) for example in data.examples)
    if largest >= rows:
        raise SpecMismatch(
            f"{data.report.path} has the token id {largest:,}, but the model's embedding has {rows:,} rows;"
            " use the tokenizer that belongs to the model."
        )


def sequences(data: TokenData, config: TrainConfig, length: int) -> SequenceDataset:
    """The rows one by one, or packed."""
    if not config.packing:
        return SequenceDataset(data.examples)
    return SequenceDataset(data.examples, pack([len(e) for e in data.examples], length, seed=config.seed))


def total_steps(config: TrainConfig, num_sequences: int) -> int:
    """Optimizer steps of the run, on any number of processes."""
    per_epoch = max(1, math.ceil(num_sequences / sequences_per_step(config)))
    return config.max_steps or math.ceil(config.epochs * per_epoch)


def sequences_per_step(config: TrainConfig) -> int:
    """The global batch."""
    return config.batch_size * config.gradient_accumulation


def optimizer_class(config: TrainConfig) -> tuple[type, dict[str, Any]] | None:
    """Our own optimizer and its settings, if the configuration asks for one; None: the host makes its own.

    Parameters in bfloat16 are rounded stochastically: with few bits for moments there is no point in
    parameters that stand still.
    """
    needs = _PACKAGES.get(config.optimizer)
    if needs is not None and not find_spec(needs):
        raise Unsupported(f"optimizer is {config.optimizer}, which needs {needs}; pip install {needs}.")
    if config.optimizer == "muon":
        from fewbits.training.optimizer import MuonAdamW

        return MuonAdamW, {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer != "adamw_8bit":
        return None
    from fewbits.training.optimizer import AdamW8bit

    return AdamW8bit, {"lr": config.learning_rate, "stochastic_rounding": True, "seed": config.seed}


def set_rates(config: TrainConfig, optimizer: Optimizer, model: nn.Module) -> None:
    """Give parameters the learning rates that the configuration has for them.

    Raises:
        BadInput: it has one for parameters of which none trains.
    """
    if config.lora_plus_ratio is not None:
        set_lora_plus(optimizer, model, config.lora_plus_ratio)
    if config.embedding_learning_rate is not None:
        set_embeddings_apart(optimizer, model, config.embedding_learning_rate)


def training_arguments(
    config: TrainConfig,
    folder: Path,
    steps: int,
    *,
    evaluates: bool,
    resumed: bool,
    layout: Layout,
    kind: Any = None,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """The host's arguments; of another ``kind`` than its own (TRL's), with ``more`` of them.

    Raises:
        BadInput: a step has fewer sequences than there are ranks.
        Unsupported: the host counts other processes than the run does.
    """
    from transformers import TrainingArguments

    on_gpu = uses_gpu(config)
    _, lora = recipe_of_config(config)
    tenth = max(1, steps // 10)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": config.batch_size,
        "gradient_accumulation_steps": passes_of(
            sequences_per_step(config), config.batch_size, layout.data_size
        ),
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps or -1,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.scheduler,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1} if config.scheduler == "cosine_with_min_lr" else None,
        "warmup_steps": config.warmup,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "neftune_noise_alpha": config.neftune_alpha,
        "optim": OPTIMIZERS[config.optimizer],
        "seed": config.seed,
        "logging_steps": config.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a bad loss is shown and stops the run
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": config.eval_steps or tenth,
        "eval_on_start": evaluates and not resumed,
        "save_strategy": "steps",
        "save_steps": config.save_steps or tenth,
        "metric_for_best_model": "eval_loss" if evaluates else None,
        "greater_is_better": False,
        "report_to": reporters(config),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": not on_gpu,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,  # the same on all ranks, or a rank's own
        "ddp_timeout": config.wait_seconds,
        "bf16": on_gpu
        and lora is None
        and config.dtype == "auto"
        and not layout.is_sharded,  # which casts itself
        "fp16": on_gpu and lora is None and config.dtype == "float16",
        "dataloader_pin_memory": on_gpu,
        "accelerator_config": {
            "non_blocking": on_gpu
        },  # batches come from pinned memory: nobody waits for a copy
    }
    args = (kind or TrainingArguments)(**{**settings, **(more or {})})
    if args.n_gpu > 1:
        args._n_gpu = 1  # otherwise the host would wrap the model in DataParallel
    if args.world_size != layout.ranks.size:
        raise Unsupported(
            f"the environment names {args.world_size} processes, but not this one's number on its machine"
            " (LOCAL_RANK); start the run with fewbits train --nproc-per-node N, or with torchrun."
        )
    return args


def reporters(config: TrainConfig) -> list[str]:
    """Where the host's callbacks report to.

    Raises:
        Unsupported: the package of one is not installed.
    """
    for name in config.report_to:
        names = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if not any(find_spec(package) for package in names):
            raise Unsupported(f"report_to is {name}, which is not installed; pip install {name}.")
    return list(config.report_to) or ["none"]
