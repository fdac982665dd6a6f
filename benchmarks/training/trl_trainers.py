"""A step of TRL's trainers and of `fewbits train`, beside the bare step of the same model.

    python benchmarks/training/trl_trainers.py sft_nf4

Modes: sft_nf4 and sft_fp8 (TRL's SFTTrainer, SFTConfig's defaults, nothing recomputed; 4 rows of 2,048 tokens
of the Llama-3.1-8B shape), sft_nf4_unsloth (the same, recomputing), dpo (TRL's DPOTrainer, 4 pairs of at most
1,024 tokens of the Qwen3-1.7B shape), train_nf4 and train_fp8 (`fewbits train`, with one save in the middle).

Weights are random. One JSON line tells: step_ms, the median of the steps after the first seven, each measured
until the device is idle; running_ms, a step of the nine behind them, measured as a user's run goes, with the
device idle only before the first and behind the last; bare_ms and bare_running_ms, the same model's step in a
plain loop, both ways; where the host waited for the device in three steps; what fell back. With --gaps the
modes sft_* also print when the device was idle, in a step of the trainer and of the plain loop, and which
kernels the trainer's steps have more of. Several modes, with commas between, share a process. On a CPU:
--shape tiny --steps 24.
"""

import argparse
import collections
import gc
import importlib.metadata
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_model import config_of, empty_model, fill
from benchmarks.training.idle_gaps import (
    begin_recording,
    end_recording,
    gaps_of,
    recorded,
    tell,
    tell_difference,
)

CUDA = torch.cuda.is_available()
LETTERS = "abcdefghijklmnopqrstuvwxyz "
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def now():
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def base(shape, recipe):
    """A packed model of random weights, and a tokenizer of 400 tokens."""
    from transformers import AutoTokenizer

    from fewbits import get_recipe
    from fewbits.bench.train.tokenizer import write_tokenizer

    config = config_of(shape)
    model = fill(empty_model(config, get_recipe(recipe)), lambda name: "cuda" if CUDA else "cpu")
    model.generation_config.eos_token_id = None
    folder = tempfile.mkdtemp()
    write_tokenizer(folder)
    return model, AutoTokenizer.from_pretrained(folder)


def adapted(model, choice):
    from fewbits import FastLanguageModel, fuse
    from fewbits.decoder.fuse import fusion_of

    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing=choice,
        random_state=3407,
    )
    if fusion_of(model) is None:
        fuse(model)
        FastLanguageModel.for_training(model, choice)
    return model


class SyncCounter:
    """Where the host waits, of three steps in the middle, by file and line."""

    def __init__(self):
        self.found, self.filters = collections.Counter(), None

    def start(self):
        if CUDA:
            self.catch = warnings.catch_warnings(record=True)
            self.log = self.catch.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def stop(self):
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
            self.catch.__exit__(None, None, None)
            for entry in self.log:
                if "synchroniz" in str(entry.message):
                    self.found["/".join(entry.filename.split("/")[-3:]) + f":{entry.lineno}"] += 1


RUNNING = 9  # steps between two waits


class StepTimes:
    """Of single steps, of three whose waits are counted, of RUNNING together, and two that are recorded."""

    def __init__(self, steps, gaps=False):
        self.steps, self.gaps, self.counted = steps, gaps, steps - RUNNING - 5
        self.marks, self.syncs, self.running = [], SyncCounter(), []
        self.profiler = self.events = None

    def see(self, step):
        """A step has ended."""
        if step <= self.counted:
            self.marks.append(now())
        if step == self.counted:
            self.syncs.start()
        if step == self.counted + 3:
            self.syncs.stop()
        if step in (self.counted + 3, self.counted + 3 + RUNNING):
            self.running.append(now())
        if step == 8 and CUDA:
            torch.cuda.reset_peak_memory_stats()
        if self.gaps and step == self.steps - 2:
            self.profiler = begin_recording()
        if self.gaps and step == self.steps:
            self.events = end_recording(self.profiler)

    def figures(self):
        marks = self.marks[min(7, self.counted // 2) :]
        ms = [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        return {
            "step_ms": round(statistics.median(ms), 1),
            "fastest": round(min(ms), 1),
            "slowest": round(max(ms), 1),
            "running_ms": round(1e3 * (self.running[1] - self.running[0]) / RUNNING, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None,
            "syncs_in_3_steps": dict(self.syncs.found.most_common(12)),
        }


def clock(times):
    """The callback that tells `StepTimes`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kw):
            times.see(state.global_step)

    return Clock()


def state_of(model):
    from fewbits.decoder.fuse import fused_layers, fusion_of

    fusion = fusion_of(model)
    return {
        "fallbacks": dict(fusion.fallbacks),
        "trl_head": dict(fusion.trl_head.taken),
        "layers": len(fusion.layers),
        "keeps": dict(collections.Counter(str(layer.keep) for layer in fused_layers(model))),
    }


def bare_step(model, ids):
    """A function that does one step without a trainer: the model's own loss, torch's fused AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=CUDA)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare(model, ids, steps=12):
    """Milliseconds of `bare_step`: the median of single ones, and of one among as many without a wait."""
    step, marks = bare_step(model, ids), [now()]
    for _ in range(steps):
        step()
        marks.append(now())
    single = statistics.median(1e3 * (b - a) for a, b in itertools.pairwise(marks))
    began = now()
    for _ in range(steps):
        step()
    return round(single, 1), round(1e3 * (now() - began) / steps, 1)


def losses(trainer):
    values = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return values[0], values[-1]


def sft(args, recipe, choice=False):
    import datasets
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = base(args.shape, recipe)
    model = adapted(model, choice)
    top = model.config.vocab_size
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(4, top, (4 * args.steps, args.length), generator=g)
    timer = StepTimes(args.steps, gaps=args.gaps)
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=args.steps,
        learning_rate=2e-4,
        optim="adamw_torch_fused",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        max_length=args.length,
        warmup_steps=2,
        seed=3407,
        disable_tqdm=True,
        use_cpu=not CUDA,
        bf16=CUDA,
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids.tolist()}),
        args=config,
        callbacks=[clock(timer)],
    )
    trainer.train()
    found = (
        timer.figures()
        | state_of(model)
        | {"losses": losses(trainer), "gc_asked_of_trainer": config.gradient_checkpointing}
    )
    batch = ids[:4].to(model.device)
    found["bare_ms"], found["bare_running_ms"] = bare(model, batch, steps=7)
    if args.gaps:
        step = bare_step(model, batch)
        step()
        alone, within = gaps_of(recorded(lambda: (step(), step()))), gaps_of(timer.events)
        tell(f"{recipe}, bare", alone, 2)
        tell(f"{recipe}, in the trainer", within, 2)
        tell_difference(alone, within, (2, 2))
    return found


def dpo(args):
    import datasets
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = base(args.shape, "qlora_nf4")
    model = adapted(model, False)
    random.seed(1)

    def word(n):
        return "".join(random.choices(LETTERS, k=n))

    half = args.length // 2
    rows = [
        {"prompt": word(half), "chosen": word(half - 4), "rejected": word(half - 4)}
        for _ in range(4 * args.steps)
    ]
    timer = StepTimes(args.steps)
    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=args.steps,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        max_length=args.length,
        disable_tqdm=True,
        use_cpu=not CUDA,
        bf16=CUDA,
        seed=3407,
    )
    trainer = DPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        args=config,
        callbacks=[clock(timer)],
    )
    trainer.train()
    return (
        timer.figures()
        | state_of(model)
        | {"losses": losses(trainer), "rows": "4 pairs", "length": args.length}
    )


def train(args, recipe):
    from fewbits import TrainConfig
    from fewbits.bench.train.tokenizer import write_tokenizer
    from fewbits.training.run import train as run

    folder = Path(tempfile.mkdtemp())
    model, _ = base(args.shape, recipe)
    model.save_pretrained(folder / "model", max_shard_size="2GB")
    write_tokenizer(folder / "model")
    del model
    if CUDA:
        torch.cuda.empty_cache()
    texts = ("".join(random.choices(LETTERS, k=3 * args.length)) for _ in range(4 * args.steps))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(
        TrainConfig(
            model=str(folder / "model"),
            train_data=str(folder / "rows.jsonl"),
            output_dir=str(folder / "run"),
            max_steps=args.steps,
            batch_size=4,
            max_seq_length=args.length,
            save_steps=max(args.steps // 2, 1),
            samples=0,
            report=False,
            device="cuda" if CUDA else "cpu",
        )
    )
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    memory = str(json.loads((folder / "run/run.json").read_text()).get("memory"))
    return {"first_loss": rows[0]["loss"], "last": rows[-1], "memory_plan": memory} | sustained(rows)


def sustained(rows):
    """Milliseconds a step from the tenth on, saving included; a row has its seconds since the run began."""
    clock = [row["seconds"] for row in rows]
    each = [1e3 * (b - a) for a, b in itertools.pairwise(clock)]
    begin = min(9, len(clock) // 2)
    return {
        "sustained_ms": round(1e3 * (clock[-1] - clock[begin]) / (len(clock) - 1 - begin), 1),
        "median_ms": round(statistics.median(each[begin:]), 1),
        "slowest_ms": sorted(round(e, 1) for e in each[begin:])[-4:],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    modes = {
        "sft_nf4": lambda args: sft(args, "qlora_nf4"),
        "sft_fp8": lambda args: sft(args, "qlora_nf4_fp8_head"),
        "sft_nf4_unsloth": lambda args: sft(args, "qlora_nf4", "unsloth"),
        "dpo": dpo,
        "train_nf4": lambda args: train(args, "qlora_nf4"),
        "train_fp8": lambda args: train(args, "qlora_nf4_fp8_head"),
    }
    parser.add_argument("modes", help="with commas between: " + ", ".join(modes))
    parser.add_argument("--shape", help="a name, or tiny; default: Llama-3.1-8B's, for dpo Qwen3-1.7B's")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--length", type=int, help="tokens of a row")
    parser.add_argument("--gaps", action="store_true", help="print when the device was idle")
    args = parser.parse_args()
    shape, length = args.shape, args.length
    for mode in args.modes.split(","):
        if mode not in modes:
            parser.error(f"{mode} is no mode; modes are {', '.join(modes)}")
        args.shape = shape or ("qwen3-1.7b" if mode == "dpo" else "llama-3.1-8b")
        args.length = length or (64 if args.shape == "tiny" else 1024 if mode == "dpo" else 2048)
        figures = modes[mode](args)
        gc.collect()
        versions = {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "peft")
        }
        told = {"mode": mode, "shape": args.shape, "steps": args.steps, **figures, **versions}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
