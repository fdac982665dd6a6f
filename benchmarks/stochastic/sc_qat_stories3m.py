"""SC-QAT on a real model: how much of what stochastic products lose does training through them bring back?

    python benchmarks/stochastic/sc_qat_stories3m.py [--method lora|full] [--cycles 32] [--seed 0] [--out F]

From a checkout with ../shared beside it (or ``--data``); about ten minutes on one core of a CPU. All 42
linears of the blocks of stories3m and both attention products run at ``--cycles`` cycles (halved bipolar
streams, chunks of 128, 64 masks). The forward pass in training is exactly that of the hardware, the backward
pass straight-through.

Measured: perplexity on the first 4,088 tokens (``--eval-tokens``) of tinystories_val.txt and of
wikitext2_raw_test.txt, windows of 512. Trained on: tokens of tinystories_val.txt after the 20,000th, which no
measurement here sees; ``--train-text`` trains on WikiText's, or on as many of both. Rows: float32; the same
weights under SC; under SC after SC-QAT, prepared as it is stored.
And two controls with the same data and steps, so that nobody takes adaptation to the text for the effect of
SC-QAT: the float32 model trained on, and that one under SC. "recovered" is the share of the loss between
float32 and SC, in nats; "recovered, trained" is the same between the two controls.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.evaluate import perplexity
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.recipes.recipe import LoRA
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig
from fewbits.training.calibration.qat import convert_qat

SHARED = Path(__file__).resolve().parents[3] / "shared/data"
TEXTS = {"tinystories": "text/tinystories_val.txt", "wikitext": "text/wikitext2_raw_test.txt"}
WINDOW, TRAIN_FROM = 512, 20_000


def load(args: argparse.Namespace) -> Any:
    model = AutoModelForCausalLM.from_pretrained(args.data / "models/stories3m", dtype=torch.float32)
    return model.to(args.device)


def windows_of(tokenizer: Any, args: argparse.Namespace) -> torch.Tensor:
    """(rows, 512) token ids for training, each row begun with BOS."""
    names = list(TEXTS) if args.train_text == "both" else [args.train_text]
    rows = []
    for name in names:
        text = (args.data / TEXTS[name]).read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][TRAIN_FROM:]
        ids = ids[: args.train_tokens // len(names)]
        rows.append(torch.tensor(ids[: len(ids) // (WINDOW - 1) * (WINDOW - 1)]).view(-1, WINDOW - 1))
    found = torch.cat(rows)
    return torch.cat([torch.full((len(found), 1), tokenizer.bos_token_id), found], dim=1)


def train(model: Any, windows: torch.Tensor, args: argparse.Namespace) -> None:
    """AdamW on the plain next-token loss; linear warm-up, cosine to zero."""
    steps = args.epochs * len(windows) // args.batch
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95))
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps - warmup, 1)),
        ],
        [warmup],
    )
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(args.epochs)])
    model.train()
    for step in range(steps):
        batch = windows[order[step * args.batch : (step + 1) * args.batch]].to(args.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == steps - 1:
            print(json.dumps({"step": step, "of": steps, "loss": round(float(loss), 4)}), flush=True)
    model.eval()


def adapted(model: Any, args: argparse.Namespace) -> Any:
    """The model with what trains: adapters, or all of the blocks' weights."""
    if args.method == "full":
        return model
    torch.manual_seed(args.seed)
    return get_peft_model(model, LoRA(r=args.rank, alpha=2 * args.rank))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--cycles", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=None, help="default: 2e-3 with adapters, 3e-4 without")
    parser.add_argument("--train-tokens", type=int, default=150_234, help="at most")
    parser.add_argument("--train-text", choices=(*TEXTS, "both"), default="tinystories")
    parser.add_argument("--eval-tokens", type=int, default=4_088)
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of models/stories3m and text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    parser.add_argument("--save", type=Path, default=None, help="write the prepared model after SC-QAT")
    args = parser.parse_args()
    args.lr = args.lr or (2e-3 if args.method == "lora" else 3e-4)

    tokenizer = AutoTokenizer.from_pretrained(args.data / "models/stories3m")
    windows = windows_of(tokenizer, args)
    config = StochasticConfig(
        options=dataclasses.replace(STOCHASTIC, stoc_len=args.cycles),
        attention=(("*", AttentionSetting(scores=args.cycles, values=args.cycles)),),
    )
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    figures: dict[str, Any] = {"train_tokens": len(windows) * (WINDOW - 1), "settings": settings, "rows": []}
    start = time.time()

    def measure(name: str, model: Any) -> dict[str, float]:
        nats = {}
        for text, path in TEXTS.items():
            words = (args.data / path).read_text(encoding="utf-8")[: 12 * args.eval_tokens]
            result = perplexity(model, tokenizer, words, window=WINDOW, max_tokens=args.eval_tokens)
            row = {"row": name, "text": text, "perplexity": round(result.perplexity, 3)}
            row |= {"nats": round(result.nll, 4), "seconds": round(time.time() - start)}
            figures["rows"].append(row)
            print(json.dumps(row), flush=True)
            nats[text] = result.nll
        return nats

    exact = measure("float32", load(args))
    model = load(args)
    apply_stochastic(model, config)
    counted = measure("SC", model)

    model = adapted(load(args), args)
    train(model, windows, args)
    model = model.merge_and_unload(args) if args.method == "lora" else model
    exact_trained = measure("control: float32 trained", model)
    apply_stochastic(model, config)
    counted_trained = measure("control: that one under SC", model)

    model = load(args)
    apply_stochastic(model, config, train=True)
    model = adapted(model, args)
    train(model, windows, args)
    model, _ = convert_qat(model)
    after = measure("SC after SC-QAT, prepared", model)
    if args.save is not None:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
    for text in TEXTS:
        lost = counted[text] - exact[text]
        figures[f"recovered, {text}"] = round((counted[text] - after[text]) / lost, 3)
        lost = counted_trained[text] - exact_trained[text]
        figures[f"recovered, trained, {text}"] = round((counted_trained[text] - after[text]) / lost, 3)
    print(json.dumps({k: v for k, v in figures.items() if k.startswith("recovered")}))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
