"""How each configuration makes its model: ours by the public names, peers as their own documents say.

A builder gets the `Job` and gives a model in training mode on the job's device whose forward with
``input_ids`` and ``labels`` has a loss, and notes for the log. Weights are those of `shapes.random_model`;
Unsloth, which only loads from a folder, reads the checkpoint that was written from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from fewbits.bench.train.configurations import Configuration
from fewbits.bench.train.shapes import ALPHA, RANK, TARGETS, Shape, random_model
from fewbits.errors import Unsupported
from fewbits.host.unwrap import unwrap
from fewbits.recipes import LoRA

_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process' work.

    Attributes:
        configuration: who trains.
        shape: what.
        batch: sequences, and tokens in each.
        device: where.
        checkpoint: a folder with the shape's weights, for who can only load.
        warm_up, steps: optimizer steps before the clock runs, and on it.
        layers: how many layers the parity check takes.
        lengths: for the search of the longest sequence: first tokens and grain; None: time steps.
        profiled: also say which kernels a step runs.
    """

    configuration: Configuration
    shape: Shape
    batch: tuple[int, int]
    device: str
    checkpoint: str
    warm_up: int = 3
    steps: int = 8
    layers: int = 2
    lengths: tuple[int, int] | None = None
    profiled: bool = False


class Built(NamedTuple):
    """A model that can train, what its maker has to say of it, and its memory budget, where it has one."""

    model: Any
    notes: list[str]
    memory: Any = None


def build(job: Job) -> Built:
    """The model of a job."""
    return _BUILDERS[job.configuration.side](job)


def imports(side: str) -> None:
    """Import what a side needs, before its turn at the GPU; Unsloth wants to be first."""
    names = {
        "unsloth": ["unsloth"],
        "torchao": ["peft", "torchao.float8"],
        "bnb": ["peft", "bitsandbytes"],
        "liger": ["peft", "bitsandbytes", "liger_kernel.transformers"],
        "hf": ["peft"],
        "ours": ["peft", "fewbits.models.adapting.adapters", "fewbits.models.loading.in_memory"],
    }
    for name in [
        *names[side],
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
    ]:
        import_module(name)


# Ours.


def _ours(job: Job) -> Built:
    from fewbits.models.adapting.adapters import get_peft_model
    from fewbits.models.loading.in_memory import convert

    config, notes = job.configuration, []
    model = random_model(job.shape.config(), torch.device(job.device), _DTYPE)
    recipe = _recipe(config)
    if recipe is not None:
        notes += [str(note) for note in convert(model, recipe).notes]
    model.requires_grad_(config.trains_all)
    if not config.trains_all:
        model = get_peft_model(model, LoRA(r=RANK, alpha=ALPHA))
    _cast_adapters(model, config)
    fused, memory = _fuse(model, job, recipe)
    return Built(model.train(), notes + fused, memory)


def _recipe(config: Configuration) -> Any:
    """Ours from the catalogue; FP8 over other weights is the rule of "qlora_nf4_fp8" with those."""
    from fewbits.formats import E4M3_128X128
    from fewbits.recipes import Recipe, get_recipe

    is_float8, head = config.compute == "float8", "_head" if config.float8_head else ""
    if config.trains_all:
        return get_recipe(f"float8_full{head}") if is_float8 else None
    if config.weights == "nf4_dq":
        return get_recipe(f"qlora_nf4_fp8{head}" if is_float8 else "qlora_nf4")
    if not is_float8:
        return None
    weight = E4M3_128X128 if config.weights == "e4m3_128x128" else None
    like = get_recipe(f"qlora_nf4_fp8{head}")
    rule = replace(like.linear, weight=weight)
    return Recipe(name=f"lora_{config.weights}_fp8{head}", linear=rule, head=like.head)


def _fuse(model: nn.Module, job: Job, recipe: Any) -> tuple[list[str], Any]:
    """The fused decoder and its memory budget, where this fewbits has them.

    Raises:
        Unsupported: a budget was asked for and nothing here keeps to one.
    """
    from fewbits.decoder.keep import KEEP_ACTIVATIONS, KEEP_PRODUCTS
    from fewbits.models.plan.memory_budget import budget_for

    config = job.configuration
    fused = import_module("fewbits.decoder.fuse")
    fusion = fused.fusion_of(model)
    # Beside gradients and states of all weights the norms' outputs are little; LoRA's memory is compared.
    keep = KEEP_ACTIVATIONS if config.trains_all else KEEP_PRODUCTS
    fuses_now = fusion is None
    receipt = fused.fuse(model, keep=keep, delayed_scaling=config.delayed) if fuses_now else fusion.receipt
    notes = [f"{len(fused.fused_layers(model))} layers fused", *map(str, receipt.notes)]
    if config.delayed:
        notes.append("FP8 scales of the MLP's inner tensors are those of earlier steps (delayed scaling)")
    if config.budget is None:
        return notes, None
    lora = None if config.trains_all else LoRA(r=RANK, alpha=ALPHA)
    memory = budget_for(
        model, config.budget, recipe=recipe, lora=lora, batch=job.batch, optimizer_bytes=_state_bytes(config)
    )
    if memory is None and not isinstance(config.budget, str):
        raise Unsupported(
            f"the shapes of this model's layers are not known, so no plan keeps to {config.budget:g} GiB;"
            " leave the budget out of the configuration's name."
        )
    return notes, memory


def _state_bytes(config: Configuration) -> int:
    """AdamW's two states have the dtype of what they belong to."""
    return 8 if config.adapters == "float32" else 4


# Peers.


def _hf(job: Job) -> Built:
    config = job.configuration
    model = random_model(job.shape.config(), torch.device(job.device), _DTYPE)
    return _finish(_with_adapters(model, config), config)


def _bnb(job: Job) -> Built:
    model = random_model(job.shape.config(), torch.device(job.device), _DTYPE)
    _pack_nf4(model, job.device)
    return _finish(_with_adapters(model, job.configuration), job.configuration)


def _liger(job: Job) -> Built:
    model = random_model(job.shape.config(), torch.device(job.device), _DTYPE)
    _pack_nf4(model, job.device)
    model = _with_adapters(model, job.configuration)
    _apply_liger(unwrap(model), everything=True)
    return _finish(model, job.configuration)


def _torchao(job: Job) -> Built:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = job.configuration
    model = random_model(job.shape.config(), torch.device(job.device), _DTYPE)
    model.requires_grad_(config.trains_all)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("tensorwise"),
        module_filter_fn=lambda module, name: "lm_head" not in name,
    )
    return _finish(_with_adapters(model, config), config)


def _unsloth(job: Job) -> Built:
    config, recompute = job.configuration, "unsloth" if job.configuration.recompute == "unsloth" else False
    fast = import_module("unsloth").FastLanguageModel
    model, _ = fast.from_pretrained(
        job.checkpoint,
        max_seq_length=job.shape.fields["max_position_embeddings"]
        if job.lengths
        else max(job.batch[1], 8192),
        dtype=_DTYPE,
        load_in_4bit=config.weights == "nf4_dq",
        local_files_only=True,
    )
    model = fast.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing=recompute,
        random_state=3407,
    )
    fast.for_training(model, use_gradient_checkpointing=recompute)
    return Built(model, [])


_BUILDERS: dict[str, Callable[[Job], Built]] = {
    "ours": _ours,
    "hf": _hf,
    "bnb": _bnb,
    "liger": _liger,
    "torchao": _torchao,
    "unsloth": _unsloth,
}


def _with_adapters(model: nn.Module, config: Configuration) -> Any:
    if config.trains_all:
        return model.requires_grad_(True)
    import peft

    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model.requires_grad_(False)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=config.adapters == "float32")
    _cast_adapters(model, config)
    return model


def _cast_adapters(model: nn.Module, config: Configuration) -> None:
    if config.trains_all:
        return
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(getattr(torch, str(config.adapters)))


def _finish(model: nn.Module, config: Configuration) -> Built:
    """Liger's loss, compilation and gradient checkpointing, as the configuration says."""
    base, notes = unwrap(model), []
    if config.liger_loss:
        _apply_liger(base, everything=False)
    if config.recompute == "layers":
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        base.enable_input_require_grads()
    if config.compiled and next(model.parameters()).is_cuda:
        for layer in base.model.layers:
            layer.compile()
        notes.append("each decoder layer compiled")
    return Built(model.train(), notes)


def _apply_liger(model: Any, *, everything: bool) -> None:
    from liger_kernel import transformers as liger

    apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    rest = {} if everything else {"rope": False, "rms_norm": False, "swiglu": False}
    apply(model=model, **rest)


def _pack_nf4(model: Any, device: str) -> None:
    """bitsandbytes' NF4 with double quantisation in place of the layers' linears."""
    import bitsandbytes

    for name, linear in list(model.named_modules()):
        if name.rpartition(".")[2] not in TARGETS or not isinstance(linear, nn.Linear):
            continue
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=_DTYPE,
            quant_type="nf4",
            compress_statistics=True,
            device="meta",
        )
        weight = bitsandbytes.nn.Params4bit(
            linear.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
            module=layer,
        )
        layer.weight = weight._quantize(device)
        layer.bias = linear.bias
        model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True
