"""TRL's SFT, DPO and GRPO over fewbits, over plain PEFT + bitsandbytes and over Unsloth; `fewbits train` too.

    python benchmarks/training/trainers_beside_peers.py dpo_fewbits,dpo_plain,dpo_unsloth --limit 150

Each stage is a process of its own; all start at once, import, then take the GPU in turn. A stage is called
WHAT_WHO. WHAT: ``sft`` (4 rows of 2,048 tokens of the Llama-3.1-8B shape, SFTConfig's defaults where the
model was told to recompute nothing), ``dpo`` (4 pairs of at most 1,024 tokens) and ``grpo`` (8 prompts, 8
answers each of 128 tokens) of the Qwen3-1.7B shape; ``dpo8`` and ``grpo8`` of the 8B shape. WHO:
``fewbits`` (NF4), ``fp8`` (NF4, products and head in FP8), ``plain`` (transformers + PEFT + bitsandbytes,
TRL's own dtypes), ``float32`` (the same in float32, products in TF32: what the losses of the others should
be), ``unsloth``. ``train_nf4`` and ``train_fp8``: `fewbits train`, 200 steps of the 8B shape, ``--rows`` rows
each, with one save in the middle, and the same model's bare step in a plain loop afterwards; these load a
packed folder. ``load_fewbits``, ``load_packed``, ``load_plain`` and ``load_unsloth``: the 8B shape from the
bfloat16 folder, or from one that is packed in NF4, onto the GPU, twice; a step is the second time.

The others load one bfloat16 folder of random weights (below ``--folder``, made by the first call) in NF4,
nothing is recomputed, and adapters of rank 16 on seven projections begin with the same values; for DPO B is
not zero, so that policy and reference differ from the first row on. Steps are measured until the device is
idle ("ms a step"), and then some as a user's run goes, with the device idle only before the first and behind
the last ("running"). Losses are those of the first ten steps, for DPO also those of eight batches before any
step, where nothing but rounding differs. A peer that cannot be imported is told as missing. On a CPU: --tiny.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.training.peer_models import (
    CUDA,
    base,
    import_first,
    load,
    make_folder,
    same_beginnings,
    shape_name,
)
from benchmarks.training.train_beside_bare import train_and_bare

LETTERS = "abcdefghijklmnopqrstuvwxyz "
TOLD = "told: "
RUNNING = 4  # steps between two waits
SECONDS = {  # about, on an H200, imports beside others' turns left out
    "sft_fewbits": 35, "sft_fp8": 35, "sft_plain": 45, "sft_unsloth": 75,
    "dpo_fewbits": 25, "dpo_plain": 30, "dpo_unsloth": 60, "dpo_fp8": 25, "dpo_float32": 35,
    "grpo_fewbits": 25, "grpo_plain": 60, "grpo_unsloth": 100, "grpo_fp8": 25,
    "dpo8_fewbits": 40, "dpo8_plain": 50, "dpo8_unsloth": 80, "dpo8_fp8": 40,
    "grpo8_fewbits": 40, "grpo8_plain": 80, "grpo8_unsloth": 130, "grpo8_fp8": 40,
    "load_fewbits": 15, "load_packed": 10, "load_plain": 20, "load_unsloth": 30,
    "train_nf4": 130, "train_fp8": 95,
}  # fmt: skip


# ---- one stage, in its own process


def wait_for_turn() -> None:
    """The process has imported what it needs, and waits until the GPU is its own."""
    print("ready", flush=True)
    sys.stdin.readline()


def now() -> float:
    """Seconds, the device idle."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def clock_of() -> Any:
    """A callback: when each step ended, and the loss of each of the first ten."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []
            self.losses: list[float] = []
            self.rewards: list[float] = []
            self.running: list[float] = []
            self.loaded = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            left = args.max_steps - state.global_step
            if left >= RUNNING or args.max_steps <= 10:
                self.marks.append(now())
            if left in (RUNNING, 0):
                self.running.append(now())
            if state.global_step == 3 and CUDA:
                torch.cuda.reset_peak_memory_stats()
            control.should_log = state.global_step <= 10
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                self.losses.append(float(logs["loss"]))
                if "reward" in logs:
                    self.rewards.append(float(logs["reward"]))

    return Clock()


def words_of_all(steps: int) -> dict[str, Any]:
    """What every configuration is told."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps,
        "learning_rate": 1e-4,
        # said, because Unsloth's configurations begin with values of their own (two passes a step, for one)
        "gradient_accumulation_steps": 1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "warmup_steps": 0,
        "optim": "adamw_torch_fused" if CUDA else "adamw_torch",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "bf16": CUDA,
        "use_cpu": not CUDA,
        "lr_scheduler_type": "constant",
        "seed": 3407,
        "disable_tqdm": True,
    }


def word(chooser: random.Random, count: int) -> str:
    """Random letters: about a token each."""
    return "".join(chooser.choices(LETTERS, k=count))


def trainer_of(what: str, who: str, options: argparse.Namespace, clock: Any) -> Any:
    """One of TRL's trainers over its rows."""
    import datasets

    chooser = random.Random(1)
    length = {"sft": 2048, "dpo": 1024, "grpo": 1024}[what] if not options.tiny else 64
    model, tokenizer, more = load(who, options.model, length)
    clock.loaded = now()
    if what == "sft":
        from trl import SFTConfig, SFTTrainer

        steps, top = 20, 400
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(4, top, (4 * steps, length), generator=generator)
        plain = {"gradient_checkpointing": False} if who == "plain" else {}  # to the others the model said it
        config = SFTConfig(**words_of_all(steps), **plain, per_device_train_batch_size=4, max_length=length)
        rows = datasets.Dataset.from_dict({"input_ids": ids.tolist()})
        kind: Any = SFTTrainer
    elif what == "dpo":
        from trl import DPOConfig, DPOTrainer

        steps, half = 10 if who == "float32" or options.together else 17, length // 2
        config = DPOConfig(
            **(words_of_all(steps) | ({"bf16": False} if who == "float32" else {})),
            gradient_checkpointing=who == "float32",  # the same numbers in less memory
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            max_length=length,
            beta=0.1,
        )
        rows = datasets.Dataset.from_list(
            [
                {
                    "prompt": word(chooser, half),
                    "chosen": word(chooser, half - 4),
                    "rejected": word(chooser, half - 4),
                }
                for _ in range(4 * 17)
            ]
        )
        kind = DPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer

        steps, prompts, answers = 5, (2 if options.tiny else 8), (2 if options.tiny else 8)
        tokenizer.padding_side = "left"
        config = GRPOConfig(
            **words_of_all(steps),
            gradient_checkpointing=False,
            per_device_train_batch_size=prompts * answers,
            num_generations=answers,
            num_iterations=1,
            steps_per_generation=1,
            temperature=1.0,
            top_p=1.0,
            max_completion_length=8 if options.tiny else 128,
            beta=0.0,
        )
        rows = datasets.Dataset.from_list(
            [{"prompt": word(chooser, 60)} for _ in range(prompts * (steps + 1))]
        )
        more |= {"reward_funcs": reward}
        kind = GRPOTrainer
    trainer = kind(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[clock], **more
    )
    count = same_beginnings(trainer.model, b=0.01 if what == "dpo" else 0.0)
    assert count, "no adapter was found"
    return trainer


def reward(completion_ids: Any = None, **_: Any) -> list[float]:
    """Even token ids are good; it costs nothing."""
    return [sum(int(token) % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def trl_stage(what: str, who: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and tell."""
    clock = clock_of()
    began = now()
    trainer = trainer_of(what, who, options, clock)
    before = losses_before(trainer) if what == "dpo" else []
    ready = now()
    trainer.train()
    marks = clock.marks
    first = 2 if what == "grpo" or len(marks) <= 10 else 10  # losses are logged before
    each = [1e3 * (b - a) for a, b in zip(marks[first - 1 :], marks[first:], strict=False)]
    told: dict[str, Any] = {
        "step_ms": round(statistics.median(each), 1),
        "range": f"{min(each):.1f}-{max(each):.1f}",
        "running_ms": round(1e3 * (clock.running[-1] - clock.running[0]) / RUNNING, 1),
        "before": before,
        "first_step_s": round(marks[0] - ready, 1),
        "load_s": round(clock.loaded - began, 1),
        "set_up_s": round(ready - clock.loaded, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else 0,
        "losses": [round(x, 4) for x in clock.losses],
    }
    if clock.rewards:
        told["rewards"] = [round(x, 3) for x in clock.rewards]
    if who in ("fewbits", "fp8"):
        from fewbits.decoder.fuse import fusion_of

        fusion = fusion_of(trainer.model)
        told["fallbacks"] = dict(fusion.fallbacks) if fusion is not None else "not fused"
    return told


def losses_before(trainer: Any) -> list[float]:
    """The loss of each of the first eight batches with the adapters as they begin."""
    model, losses = trainer.model, []
    model.train()  # as in a step
    for _, batch in zip(range(8), trainer.get_train_dataloader(), strict=False):
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, trainer._prepare_inputs(batch))
        losses.append(round(float(loss), 5))
    trainer._metrics["train"].clear()
    return losses


def load_stage(who: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load twice; the second time kernels are there, and the process is at home on the GPU."""
    seconds = []
    for _ in range(2):
        began = now()
        model, _ = base(who, options.model, 2048)
        seconds.append(now() - began)
        peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0
        del model
        gc.collect()
    return {
        "step_ms": round(1e3 * seconds[1], 1),
        "first_step_s": round(seconds[0], 2),
        "peak_gib": round(peak, 2),
        "losses": [],
    }


def stage(name: str, options: argparse.Namespace) -> None:
    """One stage in this process; prints one line that is told."""
    what, who = name.split("_")
    try:
        import_first(who)
    except BaseException as error:  # noqa: BLE001 - a peer that is missing is told, not raised
        print(
            TOLD + json.dumps({"stage": name, "error": f"{type(error).__name__}: {str(error)[:160]}"}),
            flush=True,
        )
        return
    wait_for_turn()
    here = Path.cwd()
    with contextlib.suppress(OSError):
        os.chdir(tempfile.mkdtemp())  # Unsloth writes beside

    def tell(row: dict[str, Any]) -> None:
        print(TOLD + json.dumps({"stage": name, **row}), flush=True)

    try:
        if what == "train":
            told = train_and_bare(options, tell)
        elif what == "load":
            told = load_stage(who, options)
        else:
            told = trl_stage(what.rstrip("8"), who, options)
    except BaseException as error:  # noqa: BLE001 - so that the others run
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    os.chdir(here)
    tell(told)


# ---- all stages


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A stage's process, importing."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), name, "--one"]
    command += ["--folder", str(options.folder), *(["--tiny"] if options.tiny else [])]
    command += ["--steps", str(options.steps), "--rows", str(options.rows)]
    command += ["--together"] if options.together else []
    places = [*options.site, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(Path(place).resolve()) for place in places),
    }
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = (options.folder / f"{name}.log").open("w")
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )


def give_turn(process: subprocess.Popen[str]) -> None:
    """Let a stage begin; one that was let to is not disturbed."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write("go\n")
        process.stdin.flush()


def told_by(
    process: subprocess.Popen[str], name: str, seconds: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Give a process its turn, and what it told; after its seconds it is ended."""
    import threading

    assert process.stdout is not None
    timer = threading.Timer(max(seconds, 1), process.kill)
    timer.start()
    began = time.perf_counter()
    row: dict[str, Any] = {"stage": name, "error": f"ended after {seconds:.0f} s without a word"}
    try:
        give_turn(process)
        for line in process.stdout:
            if line.startswith(TOLD):
                row = json.loads(line.removeprefix(TOLD))
                if row.get("is_last") is False:
                    print(
                        f"{name} so far: {row['range']}, {row['step_ms']} ms a step, bare {row['bare_ms']}",
                        flush=True,
                    )
        process.wait()
    finally:
        timer.cancel()
    if "error" in row:
        log = (options.folder / f"{name}.log").read_text()[-1500:]
        print(f"--- {name}\n{log}", flush=True)
    return row | {"turn_s": round(time.perf_counter() - began, 1)}


def in_memory() -> Path:
    """A folder that is memory, if the machine has one; folders of weights are written faster there."""
    memory = Path("/dev/shm")
    return memory if CUDA and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a stage, and how far each one's DPO losses are from those in float32."""
    title = f"\n{'stage':14} {'ms a step':>10} {'running':>8} {'GiB':>7} {'first s':>8} {'turn s':>7}"
    print(f"{title}  losses, or what else")
    for row in rows:
        if "error" in row:
            print(f"{row['stage']:14} {row['error'][:120]}")
            continue
        words = " ".join(f"{x:g}" for x in row["losses"][:10])
        words = f"rewards {row['rewards']}" if "rewards" in row else words
        words = f"{row['range']}; {words}" if row["stage"].startswith("train_") else words
        words = f"bare {row['bare_ms']}, {row['above_bare']} above" if "bare_ms" in row else words
        print(
            f"{row['stage']:14} {row['step_ms']:10.1f} {row.get('running_ms', 0):8.1f} {row['peak_gib']:7.2f}"
            f" {row['first_step_s']:8.1f} {row['turn_s']:7.1f}  {words}"
        )
    exact = {row["stage"].split("_")[0]: row for row in rows if row["stage"].endswith("_float32")}
    for row in rows:
        true = exact.get(row["stage"].split("_")[0], {})
        for key, title in (("before", "batches before any step"), ("losses", "steps")):
            if row is true or not row.get(key) or not true.get(key):
                continue
            apart = [abs(a - b) for a, b in zip(row[key], true[key], strict=False)]
            print(
                f"{row['stage']:14} from float32, {len(apart)} {title}: mean {statistics.mean(apart):.5f},"
                f" largest {max(apart):.5f}"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stages", help="names with commas between: " + ", ".join(SECONDS))
    parser.add_argument("--folder", type=Path, default=in_memory() / "beside_peers")
    parser.add_argument("--site", action="append", default=[], help="a folder of the peers' packages")
    parser.add_argument("--limit", type=float, default=180, help="seconds for all")
    parser.add_argument("--steps", type=int, default=200, help="of `fewbits train`")
    parser.add_argument("--rows", type=int, default=4, help="a step of `fewbits train`")
    parser.add_argument("--together", action="store_true", help="all stages at once: losses, and no times")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also on a CPU")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.stages.split(",")
    unknown = [name for name in names if name not in SECONDS]
    if unknown:
        parser.error(f"{unknown[0]} is no stage; stages are {', '.join(SECONDS)}")
    if options.one:
        options.model = str(options.folder / shape_name(names[0], options.tiny))
        stage(names[0], options)
        return
    began = time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    processes = {name: start(name, options) for name in names}
    for shape in dict.fromkeys(shape_name(name, options.tiny) for name in names):
        make_folder(options.folder, shape)
    if CUDA:
        torch.cuda.empty_cache()
    print(f"folders written after {time.perf_counter() - began:.0f} s", flush=True)
    if options.together:
        for process in processes.values():
            give_turn(process)
    rows = []
    for name, process in processes.items():
        left = options.limit - (time.perf_counter() - began)
        row = told_by(process, name, left, options)
        print(json.dumps(row), flush=True)
        rows.append(row)
        if os.environ.get("OUT"):
            with (Path(os.environ["OUT"]) / "beside_peers.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    print_table(rows)
    if CUDA:
        print(torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
