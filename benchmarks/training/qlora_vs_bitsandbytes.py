"""QLoRA through fewbits beside PEFT + bitsandbytes NF4, on a CPU: evaluation loss over seeds, time per step.

Both sides train the same model on the same rows in the same order, from the same initial adapters, with one
kind of optimiser; steps are interleaved (ours, theirs, ours, ...) so that a noisy machine slows both.

    python benchmarks/training/qlora_vs_bitsandbytes.py --model ../shared/data/models/stories3m \
        --train ../shared/data/instruct/dolly_train.jsonl --eval ../shared/data/instruct/dolly_eval.jsonl \
        --record benchmarks/results.csv
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fewbits import FastLanguageModel
from fewbits.bench.record import Row, append, conditions

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Batch = dict[str, torch.Tensor]


def rows(path: Path, tokenizer: object, max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(token ids, labels) of each row, the loss on the response only."""
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        context = f"{row['context']}\n" if row["context"] else ""
        prompt = tokenizer(f"{context}Question: {row['instruction']}\nAnswer:")["input_ids"]
        answer = tokenizer(f" {row['response']}", add_special_tokens=False)["input_ids"]
        ids = (prompt + answer)[:max_tokens]
        labels = ([-100] * len(prompt) + answer)[:max_tokens]
        if any(label != -100 for label in labels):
            out.append((ids, labels))
    return out


def collate(items: list[tuple[list[int], list[int]]]) -> Batch:
    """Pads on the right; every batch is as long as its longest row."""
    width = max(len(ids) for ids, _ in items)
    return {
        "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in items]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in items]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in items]),
    }


def load_theirs(path: str, rank: int) -> PeftModel:
    """The usual QLoRA: bitsandbytes NF4 with double quantisation, float32 compute, PEFT."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))


def load_ours(path: str, rank: int) -> PeftModel:
    """The same through fewbits."""
    model, _ = FastLanguageModel.from_pretrained(path, dtype=torch.float32, load_in_4bit=True)
    return FastLanguageModel.get_peft_model(
        model, r=rank, lora_alpha=rank, target_modules=TARGETS, use_gradient_checkpointing=False
    )


def copy_adapters(source: PeftModel, target: PeftModel) -> None:
    """Same initial A and B on both sides."""
    values = {name: p for name, p in source.named_parameters() if p.requires_grad}
    names = {name for name, p in target.named_parameters() if p.requires_grad}
    if names != set(values):
        raise SystemExit(f"adapters differ in name: {sorted(names ^ set(values))[:4]}")
    with torch.no_grad():
        for name, p in target.named_parameters():
            if name in values:
                p.copy_(values[name])


@torch.no_grad()
def evaluate(model: PeftModel, batches: list[Batch]) -> float:
    """Mean loss per trainable token."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        n = int((batch["labels"][:, 1:] != -100).sum())
        total += float(model(**batch).loss) * n
        count += n
    model.train()
    return total / count


class Side:
    """One of the two: a model, its optimiser and its step times."""

    def __init__(self, model: PeftModel, lr: float) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, batch: Batch) -> None:
        start = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss.detach()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--eval-rows", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", type=Path, help="append rows to this CSV file")
    parser.add_argument("--commit", help="the commit, outside of a git checkout")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train = rows(args.train, tokenizer, args.max_tokens)
    held_out = rows(args.eval, tokenizer, args.max_tokens)[: args.eval_rows]
    eval_batches = [collate(held_out[i : i + 20]) for i in range(0, len(held_out), 20)]
    print(f"{'seed':>4} {'before':>8} {'ours':>8} {'theirs':>8} {'ms ours':>8} {'ms theirs':>9} {'ratio':>6}")
    results = []
    for seed in range(args.seeds):
        results.append(one_seed(seed, args, train, eval_batches))
        r = results[-1]
        print(
            f"{seed:>4} {r.before:>8.4f} {r.loss[0]:>8.4f} {r.loss[1]:>8.4f} "
            f"{r.ms[0]:>8.1f} {r.ms[1]:>9.1f} {r.ratio:>6.3f}",
            flush=True,
        )
    ratios = [r.ratio for r in results]
    ours, theirs = ([r.loss[i] for r in results] for i in (0, 1))
    mean = statistics.mean
    print(
        f"mean evaluation loss {mean(ours):.4f} against {mean(theirs):.4f}; "
        f"step time {mean(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    if args.record:
        here = conditions(
            torch.device("cpu"),
            command="python " + " ".join(sys.argv),
            commit=args.commit,
            packages=("transformers", "peft", "bitsandbytes"),
        )
        append(args.record, table(results), here)


class Result(NamedTuple):
    """One seed: evaluation loss before, then ours and theirs; median ms a step; ratio step by step."""

    before: float
    loss: tuple[float, float]
    ms: tuple[float, float]
    ratio: float


def one_seed(
    seed: int, args: argparse.Namespace, train: list[tuple[list[int], list[int]]], held_out: list[Batch]
) -> Result:
    """Train both sides side by side."""
    torch.manual_seed(seed)
    theirs = Side(load_theirs(args.model, args.rank), args.lr)
    ours = Side(load_ours(args.model, args.rank), args.lr)
    copy_adapters(theirs.model, ours.model)
    before = evaluate(ours.model, held_out)
    order = random.Random(seed).sample(range(len(train)), args.steps * args.batch)
    for i in range(args.steps):
        batch = collate([train[k] for k in order[i * args.batch : (i + 1) * args.batch]])
        for side in (ours, theirs) if i % 2 else (theirs, ours):
            side.step(batch)
    pairs = zip(ours.seconds[5:], theirs.seconds[5:], strict=True)  # the first steps warm up
    return Result(
        before,
        (evaluate(ours.model, held_out), evaluate(theirs.model, held_out)),
        (1e3 * statistics.median(ours.seconds[5:]), 1e3 * statistics.median(theirs.seconds[5:])),
        statistics.median(x / y for x, y in pairs),
    )


def table(results: list[Result]) -> list[Row]:
    """Rows of the results: least, mean and largest over the seeds."""
    rows = []
    for i, variant in enumerate(("fewbits", "bitsandbytes_peft")):
        for metric, unit, values in (
            ("evaluation loss", "nats", [r.loss[i] for r in results]),
            ("time", "ms", [r.ms[i] for r in results]),
        ):
            ratio = statistics.mean(1 / r.ratio for r in results) if i and metric == "time" else None
            rows.append(
                Row(
                    op="qlora_stories3m", part="step" if metric == "time" else "dolly_eval", variant=variant,
                    format="nf4_dq", metric=metric, unit=unit, low=round(min(values), 4),
                    value=round(statistics.mean(values), 4), high=round(max(values), 4),
                    ratio=None if ratio is None else round(ratio, 3),
                )
            )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
