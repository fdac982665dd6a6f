"""How long the first step of a fused model takes: with an empty cache of kernels, with a warm one, later on.

    python benchmarks/training/first_step.py [--layers 2] [--float8] [--tiny]

Each line is a process of its own over the Llama-3.1-8B shape (few layers: all layers share their kernels),
NF4 weights, LoRA r=16. Printed are the seconds from the import to the model, those of the first step, of the
second, and of a step whose length was not seen before. The cold process has a folder of its own for Triton's
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The seconds of one process."""
    began = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from fewbits import convert, get_peft_model
    from fewbits.decoder.fuse import fuse, fusion_of
    from fewbits.formats import E4M3, E4M3_ROW, NF4_DQ
    from fewbits.recipes.recipe import LoRA, Recipe, Rule

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128256}
    lengths = (8192, 8192, 7777)
    if options.tiny:
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "vocab_size": 512}
        lengths = (64, 64, 50)
    config = LlamaConfig(**shape, num_hidden_layers=options.layers, max_position_embeddings=16384)
    torch.manual_seed(0)
    with torch.device(options.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    float8 = {"weight_operand": E4M3, "activation": E4M3_ROW, "gradient": E4M3_ROW} if options.float8 else {}
    convert(model.requires_grad_(False), Recipe(name="nf4", linear=Rule(weight=NF4_DQ, **float8)))
    model = get_peft_model(model, LoRA(r=16)).train()
    fuse(model, delayed_scaling=options.float8)

    def synchronize() -> None:
        if options.device != "cpu":
            torch.cuda.synchronize()

    synchronize()
    found = {"model_s": time.perf_counter() - began}
    for name, length in zip(("first_s", "second_s", "other_length_s"), lengths, strict=True):
        ids = torch.randint(3, 500, (1, length), device=options.device)
        began = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        synchronize()
        found[name] = time.perf_counter() - began
    fusion = fusion_of(model)
    assert fusion is not None and not fusion.fallbacks, "layers ran unfused"
    return {name: round(seconds, 2) for name, seconds in found.items()}


def main() -> None:
    """Run both processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", action="store_true", help="this process alone, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            run = subprocess.run(
                [sys.executable, __file__, "--one", *sys.argv[1:]],
                env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            said = run.stdout.strip().splitlines()
            print(f"first step, {name}: {said[-1] if run.returncode == 0 and said else run.stderr[-800:]}")


if __name__ == "__main__":
    main()
