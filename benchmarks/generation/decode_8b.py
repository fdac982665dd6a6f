"""Decoding of a shape (Llama-3.1-8B's) with random weights: a step alone, and through ``model.generate``.

    python benchmarks/generation/decode_8b.py --recipes qlora_nf4,lora_bf16 --contexts 128,2048 --batches 1

For each recipe (or format of the weights, as int4_g64), context and batch: milliseconds of a step replayed
from its CUDA graph (the median of three rounds of 64), and of a token through ``model.generate`` (greedy; the
difference of 264 and 8 new tokens over 256). Other engines on the same shape are timed by their own scripts;
docs/guide/generation.md has them side by side.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from transformers import logging as transformers_logging

import fewbits
from fewbits.bench.train.shapes import random_model, shape_of
from fewbits.formats import FORMATS
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop as decode_generate


def build(shape: str, recipe: str, rank: int, head: str | None) -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(shape_of(shape).config(), device, torch.bfloat16).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    weights = {"name": "qlora_nf4", "linear": {"weight": recipe}} if recipe in FORMATS else {"name": recipe}
    fewbits.convert(model, weights if head is None else {**weights, "head": head})
    with_methods(model)
    if rank:
        adapted = fewbits.get_peft_model(model, r=rank, target_modules="all-linear")
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return model


def times_ms(run: Any, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def measure(model: Any, batch: int, context: int) -> tuple[list[float], float, int]:
    ids = torch.randint(5, 1000, (batch, context), device="cuda")
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "use_cache": True,
    }

    def generate(count: int) -> None:
        model.generate(ids, max_new_tokens=count, **options)

    generate(264)  # kernels are compiled, the graph is recorded
    state = decode_generate.decoding_of(model)
    if state.step is None:
        raise SystemExit(f"no step: {state.refused}")
    few, many = times_ms(lambda: generate(8), 3)[1], times_ms(lambda: generate(264), 3)[1]
    step = state.step
    step.position.fill_(context)

    def steps() -> None:
        for _ in range(64):
            step.advance()

    return [ms / 64 for ms in times_ms(steps, 3)], (many - few) / 256, step.launches


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a name, or a config.json")
    parser.add_argument("--recipes", default="qlora_nf4,lora_bf16")
    parser.add_argument("--contexts", default="128,2048")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--rank", type=int, default=0, help="of an adapter, which stays unmerged")
    parser.add_argument("--head", help="the format of the output head's weight; 16 bits without")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for recipe in options.recipes.split(","):
        model = build(options.shape, recipe, options.rank, options.head)
        for batch in map(int, options.batches.split(",")):
            for context in map(int, options.contexts.split(",")):
                step, token, launches = measure(model, batch, context)
                print(
                    f"{recipe} head {options.head} rank {options.rank} batch {batch} context {context}: "
                    f"step {step[1]:.3f} ms ({step[0]:.3f} to {step[2]:.3f}), "
                    f"through generate {token:.3f} ms, {launches} kernels",
                    flush=True,
                )
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
