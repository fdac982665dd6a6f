"""What the host needs to begin a training step, beside what the whole step takes.

    python benchmarks/training/host_time.py qlora_nf4 [--layers 32] [--tokens 4x16 2x1024] [--keep-weights]

The Llama-3.1-8B shape with random weights, LoRA r=16 on all seven linears through FastLanguageModel, fused,
nothing recomputed, torch's fused AdamW. With 4 x 16 tokens the GPU has next to nothing to do: the step is the
host's time alone, which every shorter step is held up by. Printed for each number of tokens: the step's
median of ten, measured until the device is idle, and the host's time in the forward and in the backward pass.
On a CPU the tiny shape runs, to see that the script does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_model import config_of, empty_model, fill

CUDA = torch.cuda.is_available()
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted_model(recipe: str, layers: int | None, keep_weights: bool) -> Any:
    """A packed model with adapters, fused, in training mode."""
    from fewbits import FastLanguageModel, fuse, get_recipe
    from fewbits.decoder.fuse import fused_layers, fusion_of

    config = config_of("llama-3.1-8b" if CUDA else "tiny", layers)
    model = fill(empty_model(config, get_recipe(recipe)), lambda _: "cuda" if CUDA else "cpu")
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=TARGETS, use_gradient_checkpointing=False
    )
    if fusion_of(model) is None:
        fuse(model)
        FastLanguageModel.for_training(model, False)
    for layer in fused_layers(model):
        layer.keep = replace(layer.keep, weights=keep_weights)
    return model.train()


def wait() -> float:
    """The time when the device is idle."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(model: Any, rows: int, length: int) -> str:
    """The line of figures for steps of rows x length tokens."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=CUDA)
    ids = torch.randint(4, model.config.vocab_size, (rows, length), device=model.device)
    marks = []
    for _ in range(14):
        began = wait()
        loss = model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append([1e3 * (t - began) for t in (forward, backward, wait())])
    forward, backward, step = (statistics.median(of) for of in zip(*marks[4:], strict=True))
    low, high = min(mark[2] for mark in marks[4:]), max(mark[2] for mark in marks[4:])
    return (
        f"{rows} x {length}: step {step:.1f} ms ({low:.1f} to {high:.1f}), the host's forward {forward:.1f}, "
        f"backward {backward - forward:.1f}"
    )


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", nargs="+", default=["4x16", "2x1024", "4x2048"])
    parser.add_argument("--keep-weights", action="store_true", help="keep decoded weights from step to step")
    args = parser.parse_args()
    model = adapted_model(args.recipe, args.layers, args.keep_weights)
    for tokens in args.tokens if CUDA else ["2x16"]:
        rows, length = map(int, tokens.split("x"))
        print(
            f"{args.recipe}, {model.config.num_hidden_layers} layers, {measure(model, rows, length)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
