"""QLoRA of a model larger than one GPU by Hugging Face, PEFT and bitsandbytes: the peer of `multi_gpu`.

As their own documents say (PEFT's page on FSDP, bitsandbytes' on FSDP-QLoRA): NF4 with double quantisation,
stored as bfloat16 so that FSDP can flatten or slice it, adapters of the same dtype. Two engines:

    fsdp1   `FullyShardedDataParallel`, use_orig_params=False, PEFT's `fsdp_auto_wrap_policy`
    fsdp2   `fully_shard`, each decoder layer a group, as `fewbits.training.ranks.fsdp` does

Weights are random and packed on each GPU, layer by layer, before they are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fewbits.bench.train.shapes import ALPHA, RANK, TARGETS

_DTYPE = torch.bfloat16


def sharded(config: Any, device: torch.device, engine: str) -> tuple[Any, Callable[[bool], None]]:
    """The model under the engine, training; and what switches recomputation of its layers on and off."""
    import peft

    model = _packed(config, device)
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(_DTYPE)
    model.train()
    wrapped = {"fsdp1": _fsdp1, "fsdp2": _fsdp2}[engine](model, device)
    base = model.get_base_model()

    def recompute(on: bool) -> None:
        if on:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            base.gradient_checkpointing_disable()

    return wrapped, recompute


@torch.no_grad()
def _packed(config: Any, device: torch.device) -> Any:
    """The model on the device with random weights, the layers' linears in bitsandbytes' NF4."""
    import bitsandbytes
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE, attn_implementation="sdpa")
    generator = torch.Generator(device).manual_seed(0)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            how = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": _DTYPE}
            made = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=_DTYPE,
                device="meta",
                **how,
            )
            dense = torch.empty(made.weight.shape, dtype=_DTYPE, device=device).normal_(
                0, 0.02, generator=generator
            )
            weight = bitsandbytes.nn.Params4bit(dense, requires_grad=False, module=made, **how)
            made.weight = weight._quantize(device)
            model.set_submodule(name, made)
    for name, p in list(model.named_parameters()):
        if p.is_meta:
            real = torch.ones(p.shape, dtype=_DTYPE, device=device)
            if p.dim() > 1:
                real.normal_(0, 0.02, generator=generator)
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(real, requires_grad=False))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.config.use_cache = False
    model.is_loaded_in_4bit = True
    return model.requires_grad_(False)


def _fsdp1(model: Any, device: torch.device) -> Any:
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp_auto_wrap_policy(model),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
        limit_all_gathers=True,
        use_orig_params=False,
    )


def _fsdp2(model: Any, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)
