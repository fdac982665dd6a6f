"""`fewbits train` over many steps, saving included, beside the same model's bare step under such a plan."""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.training.peer_models import CUDA, TARGETS

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def train_and_bare(options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The bare step; then ``options.steps`` steps of ``options.rows`` rows, told while they go on.

    The sustained time is that from the tenth step on to the last, the save in the middle included.
    """
    from fewbits import TrainConfig
    from fewbits import train as run

    steps, length = (12, 64) if options.tiny else (options.steps, 2048)
    began = time.perf_counter()
    once = bare_step_ms(options.model, options.rows, length)
    print(f"bare {once} ms a step, after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    chooser, folder = random.Random(1), Path(tempfile.mkdtemp())
    texts = ("".join(chooser.choices(LETTERS, k=2 * length)) for _ in range(options.rows * steps))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = {
        "model": options.model,
        "train_data": str(folder / "rows.jsonl"),
        "output_dir": str(folder / "run"),
        "max_steps": steps,
        "batch_size": options.rows,
        "max_seq_length": length,
        "save_steps": steps // 2,
        "samples": 0,
        "report": False,
        "device": "cuda" if CUDA else "cpu",
    }
    ended, began = threading.Event(), time.perf_counter()

    def told(is_last: bool) -> dict[str, Any]:
        row = figures(folder / "run")
        if not row:
            return {}
        row["set_up_s"] = round(time.perf_counter() - began - row["run_s"], 1)
        row |= {
            "bare_ms": once,
            "above_bare": f"{100 * (row['step_ms'] / once - 1):.1f} %",
            "is_last": is_last,
        }
        return row

    def watch() -> None:
        while not ended.wait(5):
            if row := told(False):
                tell(row)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run(TrainConfig(**words))
    ended.set()
    watcher.join()
    return told(True) | {"memory": json.loads((folder / "run/run.json").read_text()).get("memory")}


def bare_step_ms(model_folder: str, rows: int, length: int) -> float:
    """A step of the same model in a plain loop, among twelve without a wait."""
    from benchmarks.training.trl_trainers import bare

    from fewbits import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(model_folder, max_seq_length=length)
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=TARGETS, use_gradient_checkpointing="auto"
    )
    model.train()
    generator = torch.Generator().manual_seed(7)
    _, once = bare(model, torch.randint(4, 400, (rows, length), generator=generator).to(model.device))
    del model
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    return once


def figures(run: Path) -> dict[str, Any]:
    """What a run has written of its steps so far; nothing before the twelfth."""
    from benchmarks.training.trl_trainers import sustained

    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    if len(rows) < 12:
        return {}
    each = sustained(rows)
    return {
        "steps": len(rows),
        "step_ms": each["sustained_ms"],
        "range": f"median {each['median_ms']}, slowest {each['slowest_ms'][-2:]}, {len(rows)} steps",
        "first_step_s": rows[0]["seconds"],
        "run_s": rows[-1]["seconds"],
        "peak_gib": rows[-1].get("memory_gib", 0),
        "losses": [round(row["loss"], 4) for row in rows[:3]],
    }
