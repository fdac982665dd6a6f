"""What an output head in few bits costs a model: perplexity and bytes.

    python benchmarks/quality/head_quality.py MODEL --text TEXT --tokens 20000

For linears in 16 bits and in NF4, and for each format of the head: perplexity on the text, its change against
the head in 16 bits, and the head's bits a value with scales.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fewbits
from fewbits.inference.evaluate import perplexity
from fewbits.recipes import recipe_from_config

HEADS = (None, "int8", "int8_g64", "float8_e4m3_row", "int4_g64", "int4_g32", "nf4", "nf4_dq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20000)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text(encoding="utf-8")
    print(f"{options.model.name}, {options.text.name}, {options.tokens} tokens", flush=True)
    for linears in ({"name": "lora_bf16"}, {"name": "qlora_nf4"}):
        plain = math.nan
        for head in HEADS:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
            recipe = recipe_from_config(linears if head is None else {**linears, "head": head})
            fewbits.convert(model, recipe)
            result = perplexity(model, tokenizer, text, max_tokens=options.tokens)
            plain = result.perplexity if head is None else plain
            rule = recipe.head.weight
            shape = (model.lm_head.out_features, model.lm_head.in_features)
            bits = 16.0 if rule is None else rule.bits_per_value(shape)
            change = 100 * (result.perplexity / plain - 1)
            cells = (linears["name"], head or "16 bits", f"{bits:.2f}", f"{result.perplexity:.4f}")
            print("|", " | ".join((*cells, f"{change:+.3f} %")), "|", flush=True)


if __name__ == "__main__":
    main()
