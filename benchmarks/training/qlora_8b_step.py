"""One QLoRA step of the Llama-3.1-8B shape: fewbits beside bitsandbytes + PEFT, in one process on one GPU.

    python benchmarks/training/qlora_8b_step.py [NUM_LAYERS]

Random weights, random tokens, 4 x 2048 a step, LoRA r=16 on all seven linears in bfloat16, torch's fused
AdamW, no recomputation. 3 steps warm up, 6 are timed by CUDA events; printed are the median, the peak of
allocated memory, and the loss of the first and the last step, in which the two should agree.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE, VOCAB, WARMUP, STEPS = (4, 2048), 128256, 3, 6


def random_model(layers: int) -> Any:
    """The 8B shape in bfloat16 on the GPU."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCAB,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def fewbits(layers: int) -> Any:
    """NF4 with double-quantised scales, LoRA."""
    from fewbits import LoRA, convert, get_peft_model, get_recipe

    model = random_model(layers)
    convert(model, get_recipe("qlora_nf4"))
    model.requires_grad_(False)
    return get_peft_model(model, LoRA(r=16, alpha=16))


def bitsandbytes_peft(layers: int) -> Any:
    """The same by bitsandbytes and PEFT."""
    import bitsandbytes
    import peft

    model = random_model(layers)
    for name, linear in list(model.named_modules()):
        if name.rpartition(".")[2] in TARGETS:
            new = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                compress_statistics=True,
                device="meta",
            )
            weight = bitsandbytes.nn.Params4bit(
                linear.weight.data,
                requires_grad=False,
                quant_type="nf4",
                compress_statistics=True,
                module=new,
            )
            new.weight = weight._quantize("cuda")
            model.set_submodule(name, new)
    model.is_loaded_in_4bit = True
    model.requires_grad_(False)
    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def measure(make: Callable[[int], Any], layers: int) -> str:
    """Train a few steps; the line of figures."""
    model = make(layers)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.to(torch.bfloat16)
    model.train()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(1234)
    losses, marks = [], []
    gc.collect()
    torch.cuda.empty_cache()
    for step in range(WARMUP + STEPS):
        ids = torch.randint(0, VOCAB, SHAPE, device="cuda", generator=generator)
        if step == WARMUP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            marks.append(mark())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step >= WARMUP:
            marks.append(mark())
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    median = statistics.median(times)
    return (
        f"{median:.1f} ms ({min(times):.1f}-{max(times):.1f}), "
        f"{SHAPE[0] * SHAPE[1] / median * 1e3:.0f} tokens/s, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
        f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}"
    )


def mark() -> torch.cuda.Event:
    """An event, recorded."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="?", type=int, default=32)
    layers = parser.parse_args().layers
    for variant in (fewbits, bitsandbytes_peft):
        began = time.time()
        print(f"{variant.__name__}: {measure(variant, layers)}", flush=True)
        print(f"  ({time.time() - began:.0f} s in all)", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
