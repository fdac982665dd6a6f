"""Perplexity and KL of a model rounded with and without calibration, as docs/guide/calibration.md shows them.

    python scripts/calibration_table.py MODEL TEXT --formats int4_g64,int3_g64_zp --methods nearest,gptq

TEXT is a file of stories between <|endoftext|> marks. The first half of it calibrates (64 windows of 256
tokens), the second is measured (48 windows of 256). KL is that of the model before rounding from the rounded
one, in nats a token.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbits import FastLanguageModel
from fewbits.inference.rounding.budget import Budget
from fewbits.inference.rounding.pipeline import calibrate_checkpoint
from fewbits.training.calibration.recovery import Recovery, recover_checkpoint

WINDOW, MEASURED, CALIBRATING = 256, 48, 64


@torch.no_grad()
def log_probabilities(model: Any, windows: Tensor) -> Tensor:
    """(windows, WINDOW, vocabulary) float32."""
    return torch.cat([model(input_ids=w[None]).logits.float().log_softmax(-1) for w in windows])


def score(found: Tensor, plain: Tensor, windows: Tensor) -> str:
    """Perplexity and KL as two columns."""
    loss = -found[:, :-1].gather(-1, windows[:, 1:, None]).mean()
    kl = (plain.exp() * (plain - found)).sum(-1).mean()
    return f"{math.exp(loss):.3f} | {kl:.4f}"


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--formats", default="int4_g64,int3_g64_zp,int2_g64_zp")
    parser.add_argument("--budgets", default="", help="bits of mixed precision, with commas")
    parser.add_argument("--methods", default="nearest,gptq,awq+gptq")
    parser.add_argument("--recover", type=float, default=0.0, help="minutes of recovery after each method")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    half = len(text) // 2
    model, tokenizer = FastLanguageModel.from_pretrained(args.model, load_in_4bit=False, dtype=torch.float32)
    ids = torch.tensor(tokenizer(text[half : half + 60000]).input_ids)
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[:MEASURED]
    plain = log_probabilities(model, windows)
    print(f"| plain | | | {score(plain, plain, windows)} |")
    with tempfile.TemporaryDirectory() as folder:
        rows, target = Path(folder) / "rows.jsonl", Path(folder) / "out"
        stories = [story for story in text[:half].split("<|endoftext|>") if story.strip()]
        rows.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
        for name in filter(None, args.formats.split(",")):
            recipe = {"name": "mine", "linear": {"weight": name}}
            packed, _ = FastLanguageModel.from_pretrained(args.model, recipe=recipe, dtype=torch.float32)
            print(f"| {name} | | plain | {score(log_probabilities(packed, windows), plain, windows)} |")
        budgets = [Budget(bits=float(bits)) for bits in args.budgets.split(",") if bits]
        names = [name for name in args.formats.split(",") if name]
        for wanted in [*names, *budgets]:
            for method in args.methods.split(","):
                size = (CALIBRATING, WINDOW)
                result = calibrate_checkpoint(
                    args.model, target, wanted, rows, method=method, windows=size, overwrite=True
                )
                counts = [math.prod(layer.shape) for layer in result.layers]
                pairs = zip(result.layers, counts, strict=True)
                bits = sum(layer.bits_per_value * count for layer, count in pairs) / sum(counts)
                name = wanted if isinstance(wanted, str) else f"budget of {wanted.bits:g}"
                folders = {method: target}
                if args.recover:
                    recovered = folders[f"{method}, {args.recover:g} min"] = Path(folder) / "recovered"
                    words = {"length": WINDOW, "overwrite": True}
                    how = Recovery(args.recover)
                    print(recover_checkpoint(args.model, target, recovered, rows, how, **words).sentence)
                for label, place in folders.items():
                    packed, _ = FastLanguageModel.from_pretrained(place, dtype=torch.float32)
                    found = score(log_probabilities(packed, windows), plain, windows)
                    print(f"| {name} | {bits:.3f} | {label} | {found} |", flush=True)


if __name__ == "__main__":
    main()
