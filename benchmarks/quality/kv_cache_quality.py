"""What keys and values in few bits cost a model: perplexity, a fact told early, bytes.

    python benchmarks/quality/kv_cache_quality.py MODEL --text TEXT --tokens 20000 --window 512

For each cache: perplexity on the text (windows that go through the model 16 tokens at a time, as `fewbits
eval --cache` does), its change against 16 bits, bits a value at the window's end, all included, how many
times as many tokens fit. Needles: a story names a girl, goes on without the name, and is to say it again: how
often the right one of twelve names is the likeliest, and its mean loss.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fewbits.formats.kv_cache import KVCache, get_kv_cache
from fewbits.inference.evaluate import cached_logits, evaluating, perplexity
from fewbits.models.packing.cache_choice import choose_cache

NAMES = ["Lily", "Tom", "Ben", "Sam", "Max", "Sue", "Tim", "Anna", "Mia", "Jack", "Lucy", "Bob"]
STORY = (
    "Once upon a time, there was a little girl named {name}. She loved to play outside in the park with her "
    "friends. The sun was warm and the grass was green. She had a big red ball and a small yellow boat. One "
    "day,"
)
CACHES: tuple[Any, ...] = (
    "bfloat16",
    "int8",
    "fp8",
    "int8/int4",
    "fp8/int4",
    "int4/int8",
    "int4",
    {"name": "int4", "group": 32},
    {"name": "int4", "rotated": False},
    {"name": "int4", "newest": 16},
    {"name": "int8", "newest": 16},
    {"name": "int4", "newest": 16, "first": 0},
)


def described(kind: KVCache) -> str:
    usual = KVCache(keys=kind.keys, values=kind.values)
    changed = [
        f"{field} {getattr(kind, field)}"
        for field in ("group", "newest", "first", "rotated")
        if getattr(kind, field) != getattr(usual, field)
    ]
    return ", ".join([kind.name, *changed])


def needles(model: Any, tokenizer: Any, kind: KVCache) -> tuple[float, float]:
    """Share of stories whose girl's name is the likeliest of all names, and the mean loss of the name.

    No more than 16 tokens are in 16 bits, so that the name is packed.
    """
    kind = replace(kind, newest=min(kind.newest, 16), first=min(kind.first, 4))
    candidates = [tokenizer(name, add_special_tokens=False).input_ids[0] for name in NAMES]
    right, loss = 0, 0.0
    for number, name in enumerate(NAMES):
        ids = tokenizer(STORY.format(name=name), return_tensors="pt").input_ids
        logits = cached_logits(model, ids, torch.ones_like(ids), kind, at_once=4)[0, -1].log_softmax(-1)
        right += int(logits[candidates].argmax() == number)
        loss -= float(logits[candidates[number]])
    return right / len(NAMES), loss / len(NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text(encoding="utf-8")
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    print(f"{options.model.name}, {options.text.name}, {options.tokens} tokens, heads of {size}", flush=True)
    plain = math.nan
    for said in CACHES:
        kind = get_kv_cache(said)
        choose_cache(model, kind)
        result = perplexity(model, tokenizer, text, window=options.window, max_tokens=options.tokens)
        plain = result.perplexity if kind.is_plain else plain
        taken = kind.nbytes(options.window, size)
        bits = 8 * taken / (2 * size * options.window)
        with evaluating(model):
            share, loss = needles(model, tokenizer, kind)
        change = 100 * (result.perplexity / plain - 1)
        cells = (described(kind), f"{result.perplexity:.4f}", f"{change:+.3f} %", f"{bits:.2f}")
        print("|", " | ".join((*cells, f"{16 / bits:.2f}", f"{share:.0%}", f"{loss:.4f}")), "|", flush=True)


if __name__ == "__main__":
    main()
