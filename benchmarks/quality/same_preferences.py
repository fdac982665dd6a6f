"""Do preference methods move what they are for, on rows not seen? Ours beside plain TRL + PEFT.

    python benchmarks/quality/same_preferences.py --model ../shared/data/models/stories3m \
        --data ../shared/data --out outputs/same_preferences --record benchmarks/results.csv

Ours is `fewbits train` with `method: ...` over NF4; theirs is TRL's trainer and PEFT's LoRA over float32
weights, with the same settings, rows and seeds. Each is opened again from its adapter, as a user would, and
asked about held-out rows before (adapter off) and behind:

* dpo, kto, orpo, cpo, simpo: how far the log-probability of the chosen answer has risen over that of the
  rejected one (nats a row; for orpo and simpo, which compare means, nats a token), and the share of rows
  where it has;
* reward: the share of rows whose chosen answer has the higher score, and how much higher it is;
* grpo, rloo: the mean reward of sampled answers: the share of an answer's words that have at most three
  letters.

The pairs are oasst_pref.jsonl (every fourth is held out), the prompts of grpo and rloo the first words of
stories. TRL has no trainer for process rewards (PRM) any more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fewbits.bench.record import Row, append, conditions

METHODS = ("dpo", "kto", "orpo", "cpo", "simpo", "reward", "grpo", "rloo")
REWARDED = ("grpo", "rloo")
ARMS = {"fewbits": "nf4_dq", "trl_peft": "float32"}
LENGTH, RANK, BATCH, ANSWER = 192, 16, 8, 24
RATES = {**dict.fromkeys(METHODS, 1e-3), "grpo": 2e-3, "rloo": 2e-3}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def short_words(completions: list[str], **columns: Any) -> list[float]:
    """The reward of grpo and rloo: the share of an answer's words that have at most three letters."""
    words = [text.split() for text in completions]
    return [sum(len(w.strip(".,!?\"'")) <= 3 for w in some) / max(len(some), 1) for some in words]


def rows_of(data: Path, method: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, and those held out, in the columns of the method."""
    if method in REWARDED:
        stories = (data / "text" / "tinystories_val.txt").read_text(encoding="utf-8").split("\n\n")
        rows: list[dict[str, Any]] = [
            {"prompt": " ".join(story.split()[:8])} for story in stories if len(story.split()) > 20
        ]
        return rows[:96], rows[96:128]
    pairs = []
    for line in (data / "instruct" / "oasst_pref.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = f"### Question:\n{row['prompt'][-1]['content'][:40]}\n\n### Answer:\n"
        pairs.append({"prompt": prompt, "chosen": row["chosen"][:120], "rejected": row["rejected"][:120]})
    held_out = pairs[::4]
    train = [pair for number, pair in enumerate(pairs) if number % 4]
    if method == "kto":
        train = [
            {"prompt": p["prompt"], "completion": p[name], "label": name == "chosen"}
            for p in train
            for name in ("chosen", "rejected")
        ]
    if method == "reward":
        train = [{name: p["prompt"] + p[name] for name in ("chosen", "rejected")} for p in train]
    return train, held_out


def ours(method: str, rows: Path, seed: int, args: argparse.Namespace, out: Path) -> Path:
    """A run of `fewbits train`; where its adapter is."""
    from fewbits import TrainConfig, train

    more: dict[str, Any] = {}
    if method in REWARDED:
        more = {"rewards": ["same_preferences:short_words"], "num_generations": 4}
        more["max_completion_length"] = ANSWER
    config = TrainConfig.from_mapping(
        {
            "model": str(args.model), "train_data": str(rows), "output_dir": str(out), "method": method,
            "recipe": "qlora_nf4", "lora_r": RANK, "lora_alpha": RANK, "lora_targets": TARGETS,
            "max_steps": args.steps, "batch_size": BATCH, "seed": seed,
            "learning_rate": args.rate or RATES[method],
            "scheduler": "linear", "warmup": 0.0, "max_seq_length": LENGTH, "device": "cpu",
            "report": False, "save_steps": args.steps, **more,
        }
    )  # fmt: skip
    return train(config).final


def theirs(method: str, rows: Path, seed: int, args: argparse.Namespace, out: Path) -> Path:
    """TRL's trainer over float32 weights, with PEFT's adapters; where these are."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from fewbits.training.preferences.trainers import classes_of

    trainer_class, config_class = classes_of(method)
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    scores = method == "reward"
    kind, extra = (
        (AutoModelForSequenceClassification, {"num_labels": 1}) if scores else (AutoModelForCausalLM, {})
    )
    model = kind.from_pretrained(args.model, dtype=torch.float32, **extra)
    model.config.pad_token_id = tokenizer.pad_token_id
    lora = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        modules_to_save=["score"] if scores else None,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": args.steps, "per_device_train_batch_size": BATCH,
        "learning_rate": args.rate or RATES[method], "seed": seed, "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": args.steps,
        "remove_unused_columns": method not in ("orpo", "cpo", "simpo", *REWARDED),
    }  # fmt: skip
    if method in REWARDED:
        settings |= {"num_generations": 4, "max_completion_length": ANSWER}
    else:
        settings["max_length"] = LENGTH
    if method == "simpo":
        settings |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    trainer = trainer_class(
        model=model, args=config_class(**settings), processing_class=tokenizer, peft_config=lora,
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        **({"reward_funcs": [short_words]} if method in REWARDED else {}),
    )  # fmt: skip
    trainer.train()
    trainer.model.save_pretrained(str(out / "final"), selected_adapters=["default"])
    return out / "final"


def opened(method: str, arm: str, adapter: Path, model: Path) -> tuple[Any, Any]:
    """The model with its adapter, and the tokenizer, as a user of the host and PEFT opens them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from fewbits import FewbitsConfig, register

    register()
    packed = {"quantization_config": FewbitsConfig("qlora_nf4")} if arm == "fewbits" else {}
    kind, extra = (
        (AutoModelForSequenceClassification, {"num_labels": 1})
        if method == "reward"
        else (AutoModelForCausalLM, {})
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = kind.from_pretrained(model, dtype=torch.float32, **extra, **packed)
    base.config.pad_token_id = tokenizer.pad_token_id
    return PeftModel.from_pretrained(base, adapter).eval(), tokenizer


@torch.no_grad()
def log_prob(model: Any, tokenizer: Any, prompt: str, answer: str, *, mean: bool) -> float:
    """Of an answer behind its prompt, in nats: the sum over its tokens, or their mean."""
    begin = tokenizer(prompt)["input_ids"]
    ids = (begin + tokenizer(answer, add_special_tokens=False)["input_ids"])[:LENGTH]
    logits = model(input_ids=torch.tensor([ids])).logits[0, len(begin) - 1 : -1].float()
    found = logits.log_softmax(-1).gather(1, torch.tensor(ids[len(begin) :])[:, None])
    return float(found.mean() if mean else found.sum())


def margins(method: str, model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[float]:
    """How far each row's chosen answer is above the rejected one, by probability or by score."""

    def value(row: dict[str, Any], name: str) -> float:
        if method == "reward":
            with torch.no_grad():
                ids = tokenizer(row["prompt"] + row[name], return_tensors="pt")["input_ids"][:, :LENGTH]
                return float(model(input_ids=ids).logits[0, 0])
        return log_prob(model, tokenizer, row["prompt"], row[name], mean=method in ("orpo", "simpo"))

    return [value(row, "chosen") - value(row, "rejected") for row in rows]


@torch.no_grad()
def mean_reward(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Of answers sampled with one seed."""
    torch.manual_seed(0)
    texts = []
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"].repeat(4, 1)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=True,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        texts += tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    return statistics.mean(short_words(texts))


def measured(
    method: str, arm: str, adapter: Path, model: Path, rows: list[dict[str, Any]]
) -> dict[str, float]:
    """The metrics of one adapter on held-out rows; each is to rise (or, a share, to exceed a half)."""
    adapted, tokenizer = opened(method, arm, adapter, model)
    if method in REWARDED:
        with adapted.disable_adapter():
            before = mean_reward(adapted, tokenizer, rows)
        return {"gain of mean reward": mean_reward(adapted, tokenizer, rows) - before}
    after = margins(method, adapted, tokenizer, rows)
    if method == "reward":
        share = statistics.mean(m > 0 for m in after)
        return {"share of rows told right": share, "margin of scores": statistics.mean(after)}
    with adapted.disable_adapter():
        before_each = margins(method, adapted, tokenizer, rows)
    gains = [a - b for a, b in zip(after, before_each, strict=True)]
    return {
        "share of rows moved right": statistics.mean(g > 0 for g in gains),
        "gain of margin": statistics.mean(gains),
    }


TRAIN: dict[str, Callable[..., Path]] = {"fewbits": ours, "trl_peft": theirs}
UNITS = {"gain of margin": "nats", "margin of scores": "logits"}


def main(argv: list[str] | None = None) -> None:
    """Train, measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, help="the learning rate of all methods, in place of RATES")
    parser.add_argument("--record", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).parent))  # where the reward is found by its name
    for method in args.methods:
        train, held_out = rows_of(args.data, method)
        args.out.mkdir(parents=True, exist_ok=True)
        rows = args.out / f"{method}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in train), encoding="utf-8")
        found: list[Row] = []
        for arm, form in ARMS.items():
            values: dict[str, list[float]] = {}
            for seed in args.seeds:
                begun = time.perf_counter()
                adapter = TRAIN[arm](method, rows, seed, args, args.out / f"{method}-{arm}-{seed}")
                for name, value in measured(method, arm, adapter, args.model, held_out).items():
                    values.setdefault(name, []).append(value)
                told = {name: round(each[-1], 4) for name, each in values.items()}
                print(method, arm, seed, told, f"{time.perf_counter() - begun:.0f} s", flush=True)
            found += [
                Row(
                    op="same_preferences", part=f"{args.model.name}, {method}, {len(args.seeds)} seeds",
                    variant=arm, format=form, metric=name, unit=UNITS.get(name, "1"), low=round(min(each), 4),
                    value=round(statistics.mean(each), 4), high=round(max(each), 4),
                )
                for name, each in values.items()
            ]  # fmt: skip
        if args.record:
            told = conditions(
                torch.device("cpu"),
                command=f"python benchmarks/quality/same_preferences.py --steps {args.steps}"
                + (f" --rate {args.rate:g}" if args.rate else ""),
                packages=("transformers", "trl", "peft"),
            )
            append(args.record, found, told)


if __name__ == "__main__":
    main()
