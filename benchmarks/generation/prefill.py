"""Reading a prompt: tokens/s of 2,048 tokens at batch 1, and one of 128k tokens by chunks, with its memory.

    python benchmarks/generation/prefill.py --shape llama-3.1-8b --recipes qlora_nf4,qlora_nf4_fp8,lora_bf16

Random weights. Numbers first: a prompt in chunks gives the logits of the whole one up to rounding, and
products in FP8 those of 16 bits up to theirs. Then, for each recipe, over transformers' own layers and over
fused ones (``fewbits.fuse``, then ``for_inference``): the forward alone (the last token's logits), launch by
launch and recorded as a graph (with how many layers' keys and values are equal to the bit), and
``model.generate`` for one token, which takes the prompt into the step's cache as well. The long prompt goes
through ``model.generate`` as any other.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from decode_8b import build
from stages import Stages, device, seconds_of
from torch import Tensor
from transformers import DynamicCache
from transformers import logging as transformers_logging

import fewbits
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.prompt import WHOLE, read_prompt


@torch.no_grad()
def read(model: Any, ids: Tensor, chunk: int | None = None) -> Tensor:
    """Logits (1, vocabulary) behind a prompt (1, tokens), read whole or in chunks."""
    cache, logits = DynamicCache(), None
    for part in ids.split(chunk or ids.shape[1], dim=1):
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    assert logits is not None
    return logits[:, -1].float()


def generate(model: Any, ids: Tensor, count: int = 1) -> Tensor:
    """The prompt (1, tokens) and ``count`` greedy tokens."""
    words = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=count, eos_token_id=None, use_cache=True, **words)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def measure(stages: Stages, recipe: str, options: argparse.Namespace) -> None:
    model = build(options.shape, recipe, 0, None)
    ids = torch.randint(5, model.config.vocab_size, (1, options.tokens), device=device())

    def numbers() -> None:
        whole, parts = read(model, ids), read(model, ids, options.tokens // 4 + 1)
        stages.tell(f"{recipe}: logits of chunks beside the whole", f"{apart(parts, whole):.2g} relative")

    def times(way: str) -> None:
        read(model, ids)
        forward = seconds_of(lambda: read(model, ids), 5)
        stages.tell(
            f"{recipe}, {way}: forward of {options.tokens} tokens",
            f"{1e3 * forward:.1f} ms, {options.tokens / forward:,.0f} tokens/s",
        )
        generate(model, ids)
        recorded(way)
        token = seconds_of(lambda: generate(model, ids), 5)
        stages.tell(
            f"{recipe}, {way}: generate() of one token",
            f"{1e3 * token:.1f} ms, {options.tokens / token:,.0f} tokens/s",
        )

    @torch.no_grad()
    def recorded(way: str) -> None:
        prompts, padding = decoding_of(model).prompts, torch.zeros(1, dtype=torch.long, device=device())
        for _ in range(2):
            prompts.read(model, ids, padding, WHOLE)
        ours = prompts.read(model, ids, padding, WHOLE)
        if ours is None:
            stages.tell(f"{recipe}, {way}: recorded", prompts.refused or "not at all")
            return
        need = read_prompt(model, ids, None, padding)
        pairs = zip(ours.cache.layers, need.cache.layers, strict=True)
        same = sum(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)
        seconds = seconds_of(lambda: prompts.read(model, ids, padding, WHOLE), 5)
        stages.tell(
            f"{recipe}, {way}: recorded forward of {options.tokens} tokens",
            f"{1e3 * seconds:.1f} ms, {options.tokens / seconds:,.0f} tokens/s; {same} of "
            f"{len(need.cache.layers)} layers equal to the bit",
        )

    def fused() -> None:
        before = read(model, ids)
        fewbits.fuse(model)
        fewbits.FastLanguageModel.for_inference(model)  # float8 values of weights may stay
        stages.tell(
            f"{recipe}: logits of fused layers beside the plain ones",
            f"{apart(read(model, ids), before):.2g}",
        )
        times("fused layers")

    def long() -> None:
        many = torch.randint(5, model.config.vocab_size, (1, options.long), device=device())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        weights = torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        seconds = seconds_of(lambda: generate(model, many, 4))
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        stages.tell(
            f"{recipe}: generate() of 4 tokens behind {options.long:,}",
            f"{seconds:.2f} s, {options.long / seconds:,.0f} tokens/s; {weights:.1f} GB before, "
            f"peak {peak:.1f}",
        )

    stages.run(f"{recipe}: numbers", 20, numbers)
    stages.run(f"{recipe}: times", 20, lambda: times("plain layers"))
    stages.run(f"{recipe}: fused", 20, fused)
    if options.long and recipe == options.recipes.split(",")[0]:
        stages.run(f"{recipe}: long prompt", 45, long)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a name, or a config.json")
    parser.add_argument("--recipes", default="qlora_nf4,qlora_nf4_fp8,lora_bf16")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--long", type=int, default=131072 - 64, help="tokens of the long prompt; 0: none")
    parser.add_argument("--seconds", type=float, default=88)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    stages = Stages(options.seconds)
    for recipe in options.recipes.split(","):
        if stages.left > 5:
            measure(stages, recipe, options)
            gc.collect()
            torch.cuda.empty_cache()
    stages.table()


if __name__ == "__main__":
    main()
