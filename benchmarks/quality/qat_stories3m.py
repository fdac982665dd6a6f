"""QAT on a real model: how much of what rounding to INT4 loses does quantisation-aware training bring back?

    python benchmarks/quality/qat_stories3m.py [--seeds 3] [--out FILE]

From a checkout with ../shared beside it. Measured: perplexity of stories3m on the first 20,000 tokens of
tinystories_val.txt, in windows of 512 tokens that each begin with BOS. Trained on: the rest of that file,
which the measurement never sees. All 42 linears of the blocks are INT4, symmetric, groups of 64, stored
packed when measured.

Rows: the model in float32; rounded to nearest; rounded after QAT (each seed has its own order of windows).
And two controls with the same data and steps, so that nobody takes adaptation to the text for the effect of
QAT: the float32 model trained on, and that one rounded to nearest. "recovered" is the share of the loss
between float32 and round-to-nearest, in nats; "recovered, trained" is the same against the float32 model that
saw the same text, with round-to-nearest of that model as the start.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fewbits.formats import INT4_G64
from fewbits.inference.evaluate import perplexity
from fewbits.models.packing.convert import convert
from fewbits.recipes.recipe import QAT, Recipe, Rule
from fewbits.training.calibration.qat import convert_qat, prepare_qat

SHARED = Path(__file__).resolve().parents[3] / "shared"
MODEL = SHARED / "data/models/stories3m"
TEXT = SHARED / "data/text/tinystories_val.txt"
EVAL_TOKENS, WINDOW = 20_000, 512
RTN = Recipe(name="int4_g64", linear=Rule(weight=INT4_G64))
PREPARE = Recipe(name="int4_g64_qat", qat=QAT(weight=INT4_G64))


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def train(model: Any, windows: torch.Tensor, args: argparse.Namespace, seed: int) -> None:
    """AdamW on the plain next-token loss; linear warm-up, cosine to zero."""
    steps = args.epochs * len(windows) // args.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95))
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup),
        ],
        [warmup],
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(args.epochs)])
    model.train()
    for step in range(steps):
        batch = windows[order[step * args.batch : (step + 1) * args.batch]]
        model(batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--train-tokens", type=int, default=None, help="default: all that are left")
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][EVAL_TOKENS:][: args.train_tokens]
    rows = torch.tensor(ids[: len(ids) // (WINDOW - 1) * (WINDOW - 1)]).view(-1, WINDOW - 1)
    windows = torch.cat([torch.full((len(rows), 1), tokenizer.bos_token_id), rows], dim=1)
    start, figures = (
        time.time(),
        {"train_tokens": rows.numel(), "settings": {**vars(args), "out": None}, "rows": []},
    )

    def measure(name: str, model: Any) -> float:
        result = perplexity(model, tokenizer, text, window=WINDOW, max_tokens=EVAL_TOKENS)
        row = {"row": name, "perplexity": round(result.perplexity, 3), "nats": round(result.nll, 4)}
        figures["rows"].append({**row, "seconds": round(time.time() - start)})
        print(json.dumps(figures["rows"][-1]), flush=True)
        return result.nll

    fp32 = measure("float32", load())
    model = load()
    convert(model, RTN)
    rounded = measure("int4_g64 rounded to nearest", model)

    model = load()
    train(model, windows, args, seed=0)
    fp32_trained = measure("control: float32 trained, seed 0", model)
    convert(model, RTN)
    rounded_trained = measure("control: that one rounded to nearest", model)

    recovered, against_trained = [], []
    for seed in range(args.seeds):
        model = prepare_qat(load(), PREPARE)
        train(model, windows, args, seed)
        packed, _ = convert_qat(model)
        nats = measure(f"int4_g64 after QAT, packed, seed {seed}", packed)
        recovered.append(round((rounded - nats) / (rounded - fp32), 3))
        against_trained.append(round((rounded_trained - nats) / (rounded_trained - fp32_trained), 3))
    figures["recovered"], figures["recovered, trained"] = recovered, against_trained
    print(json.dumps({"recovered": recovered, "recovered, trained": against_trained}))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
