"""A QLoRA step of a mixture of experts: Qwen3-30B-A3B's shape, 12 of its 48 layers.

    python benchmarks/training/experts_step.py [--layers 12] [--recipe qlora_nf4] [--keep-weights] [--graph]

Random weights, 4 x 2048 random tokens a step, LoRA r=16 on attention and experts, torch's fused AdamW,
nothing recomputed, autocast to bfloat16 as a trainer has it; with --keep-weights decoded weights stay from
step to step, as a memory plan chooses it where they fit; with --graph the pass is replayed as a CUDA graph,
as `fewbits train` does for a model of this width where all batches have one shape. 3 steps warm up, 8 are
timed, each until the device is idle; printed are median, fastest and slowest, the host's time until all is
launched, the peak of allocated memory, and the first and the last loss. On a CPU a
tiny shape runs, to see that the script does.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from fewbits.decoder.fuse import fused_layers
from fewbits.training.step.graph import GraphedStep

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARMUP, STEPS = 3, 8


def config_of(layers: int) -> Any:
    """The shape, or a tiny one on a CPU."""
    from transformers import Qwen3MoeConfig

    sizes = {
        "hidden_size": 2048 if CUDA else 128,
        "moe_intermediate_size": 768 if CUDA else 64,
        "num_hidden_layers": layers if CUDA else 2,
        "num_attention_heads": 32 if CUDA else 4,
        "num_key_value_heads": 4 if CUDA else 2,
        "head_dim": 128 if CUDA else 32,
        "vocab_size": 151936 if CUDA else 512,
        "num_experts": 128 if CUDA else 8,
        "num_experts_per_tok": 8 if CUDA else 2,
    }
    return Qwen3MoeConfig(
        **sizes,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        use_cache=False,
        router_aux_loss_coef=0.0,
        output_router_logits=False,
    )


def adapted_model(layers: int, recipe: str) -> Any:
    """Random weights, packed, with adapters."""
    from transformers import AutoModelForCausalLM

    from fewbits import FastLanguageModel, convert

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            config_of(layers), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    convert(model, recipe)
    gc.collect()
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=TARGETS, use_gradient_checkpointing=False
    ).train()


def wait() -> float:
    """The time when the device is idle."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--recipe", default="qlora_nf4")
    parser.add_argument("--keep-weights", action="store_true")
    parser.add_argument("--graph", action="store_true")
    args = parser.parse_args()
    model = adapted_model(args.layers, args.recipe)
    if args.keep_weights:
        for layer in fused_layers(model):
            layer.keep = replace(layer.keep, weights=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=CUDA)
    shape = (4, 2048) if CUDA else (2, 32)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    losses, steps, host = [], [], []

    def once(batch: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    one_pass = GraphedStep(once, trained) if args.graph else once
    for step in range(WARMUP + STEPS):
        ids = torch.randint(0, model.config.vocab_size, shape, device=DEVICE, generator=generator)
        if step == WARMUP and CUDA:
            torch.cuda.reset_peak_memory_stats()
        began = wait()
        loss = one_pass({"input_ids": ids, "labels": ids}, None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        host.append(1e3 * (time.perf_counter() - began))
        steps.append(1e3 * (wait() - began))
        losses.append(float(loss))
    kept = steps[WARMUP:]
    how = (", weights kept" if args.keep_weights else "") + (", replayed" if args.graph else "")
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    print(
        f"{args.recipe}{how}, {model.config.num_hidden_layers} layers, {shape[0]} x {shape[1]}: "
        f"step {statistics.median(kept):.1f} ms ({min(kept):.1f} to {max(kept):.1f}), host "
        f"{statistics.median(host[WARMUP:]):.1f}, peak {peak:.2f} GiB, "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
