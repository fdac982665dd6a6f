"""Gradients in few bits over DDP: what is learnt, what is on the wire, how long a step takes.

    python benchmarks/several_gpus/gradient_communication.py PART, which is one of

    learn   [--ranks 2] [--seeds 3] [--variants none,int8,int4]
    bytes   [--ranks 2]
    network [--rate 200mbit] [--delay 0ms] [--steps 6]
    check     # the cost model against the records of network
    record    # the records as rows of results.csv
    plot      # and as docs/gradient-communication*.svg

From a checkout with ../shared beside it; processes meet over gloo on this machine's CPU. ``bytes`` and
``network`` make a network namespace of their own (`unshare -n`, `tc`), which needs root; the loopback device
there carries nothing else. Each result is a line of JSON in --out.

learn: all weights of stories3m, trained on tiny_shakespeare with AdamW; every variant of a seed sees the same
windows in the same order. The figure is the loss on text that was held out.

bytes: three steps of the same model: the bytes counted at the collective calls, and the loopback device's own
counter (with TCP's headers and acknowledgements, both directions).

network: full fine-tuning of a Llama shape of 10.8 million values whose compute is small (one row of 16 tokens
a rank), over a loopback device that is limited to --rate in all, both directions together; "compute" is a
step of the same processes without any exchange (`no_sync`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fewbits.bench.record import Row, append, conditions
from fewbits.formats import get_format
from fewbits.training.ranks.communication import Travel
from fewbits.training.ranks.ddp import quantize_gradients
from fewbits.training.ranks.scaling import ETHERNET, Cluster, Link, Work, plan, step_time

HERE = Path(__file__).resolve()
SHARED = HERE.parents[3] / "shared"
MODEL = SHARED / "data/models/stories3m"
TEXT = SHARED / "data/text/tiny_shakespeare.txt"
DOCS = HERE.parents[2] / "docs" / "pictures"
RESULTS = HERE.parents[1] / "results.csv"
# name: format, error feedback, stochastic rounding
VARIANTS = {
    "int8": ("int8", True, False),
    "int4": ("int4", True, False),
    "float8_e4m3": ("float8_e4m3", True, False),
    "int8_stochastic": ("int8", True, True),
    "int4_stochastic": ("int4", True, True),
    "int8_kept_in_bfloat16": ("int8", True, False),
    "int4_kept_in_bfloat16": ("int4", True, False),
    "int4_no_feedback": ("int4", False, False),
    "int4_stochastic_no_feedback": ("int4", False, True),
}
WINDOW, BATCH, EVAL_WINDOWS = 128, 4, 64


# The exchange of a variant.


def plain_hook(state: tuple[Travel, torch.dtype], bucket: Any) -> Any:
    """The mean by an all-reduce in a dtype, as torch's bf16_compress_hook (which refuses a CPU), counted."""
    travel, dtype = state
    buffer = bucket.buffer()
    sent = buffer.to(dtype) if dtype != buffer.dtype else buffer
    sent.div_(travel.size)
    work = travel.all_reduce(sent)
    return work.get_future().then(lambda _: buffer.copy_(sent) if sent is not buffer else buffer)


plain_hook.__annotations__.clear()  # DDP refuses annotations that are texts


def exchange_of(model: DistributedDataParallel, variant: str, seed: int = 0) -> Travel:
    if variant in ("none", "float32", "bfloat16"):
        travel = Travel(distributed.new_group())
        dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32
        model.register_comm_hook((travel, dtype), plain_hook)
        return travel
    format, feedback, stochastic = VARIANTS[variant]
    kept = torch.bfloat16 if variant.endswith("_kept_in_bfloat16") else torch.float32
    return quantize_gradients(
        model,
        get_format(format),
        seed=seed,
        error_feedback=feedback,
        stochastic=stochastic,
        residual_dtype=kept,
    ).travel


# The work of a rank.


def rank_main(rank: int, ranks: int, store: str, work: str, args: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    result = {"learn": learn, "bytes": count_bytes, "network": time_steps}[work](rank, ranks, args)
    if rank == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def on_ranks(work: str, ranks: int, args: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        multiprocessing.spawn(rank_main, (ranks, f"{folder}/store", work, args, out), nprocs=ranks)
        found: dict[str, Any] = json.loads(Path(out).read_text(encoding="utf-8"))
        return found


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Training windows and those held out, each of WINDOW tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return rows[:-EVAL_WINDOWS], rows[-EVAL_WINDOWS:]


def learn(rank: int, ranks: int, args: dict[str, Any]) -> dict[str, Any]:
    train, held_out = windows()
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = DistributedDataParallel(base, bucket_cap_mb=4)
    travel = exchange_of(model, args["variant"], args["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"], weight_decay=0.0, betas=(0.9, 0.95))
    steps, warmup = args["steps"], max(args["steps"] // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.02, 1 - (s - warmup) / (steps - warmup)))
    )
    generator = torch.Generator().manual_seed(args["seed"])
    order = torch.randperm(len(train), generator=generator)
    curve = []
    for step in range(steps):
        first = (step * ranks + rank) * BATCH
        batch = train[order[torch.arange(first, first + BATCH) % len(order)]]
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach() / ranks
        distributed.all_reduce(mean)
        curve.append(round(float(mean), 4))
    base.eval()
    with torch.no_grad():
        part = held_out[rank::ranks]
        total = torch.stack([base(row[None], labels=row[None], use_cache=False).loss for row in part]).sum()
    distributed.all_reduce(total)
    return {"loss": float(total) / len(held_out), "curve": curve, "sent_bytes": travel.sent_bytes}


def loopback_bytes() -> int:
    """Bytes that this namespace's loopback device has carried."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("there is no loopback device")


def count_bytes(rank: int, ranks: int, args: dict[str, Any]) -> dict[str, Any]:
    train, _ = windows()
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = DistributedDataParallel(base, bucket_cap_mb=4)
    travel = exchange_of(model, args["variant"])

    def step(number: int) -> None:
        batch = train[number : number + 1, :16]
        model(batch, labels=batch, use_cache=False).loss.backward()
        base.zero_grad()

    for number in range(2):  # DDP makes its buckets anew in the second
        step(number)
    distributed.barrier()
    before, sent = loopback_bytes(), travel.sent_bytes
    for number in range(3):
        step(number)
    distributed.barrier()
    values = sum(p.numel() for p in base.parameters())
    return {
        "values": values,
        "counted": (travel.sent_bytes - sent) / 3,
        "loopback": (loopback_bytes() - before) / 3 / ranks,
    }


def time_steps(rank: int, ranks: int, args: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    model = DistributedDataParallel(base)
    travel = exchange_of(model, args["variant"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    batch = torch.randint(1024, (1, 16), generator=torch.Generator().manual_seed(rank))

    def step() -> float:
        distributed.barrier()
        start = time.perf_counter()
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    for _ in range(2):
        step()
    sent = travel.sent_bytes
    times = [step() for _ in range(args["steps"])]
    sent = (travel.sent_bytes - sent) // args["steps"]
    with model.no_sync():
        compute = [step() for _ in range(args["steps"])][1:]
    return {
        "values": sum(p.numel() for p in base.parameters()), "times": times, "compute": compute,
        "sent_bytes": sent, "seconds": statistics.median(times),
        "compute_seconds": statistics.median(compute),
    }  # fmt: skip


# The commands.


def run_learn(args: argparse.Namespace) -> None:
    for seed in range(args.seeds):
        for variant in args.variants.split(","):
            start = time.time()
            how = {"variant": variant, "seed": seed, "steps": args.steps, "lr": args.lr}
            result = on_ranks("learn", args.ranks, how)
            write(args, {"what": "learn", "ranks": args.ranks, **how, **result, "took": time.time() - start})


def run_bytes(args: argparse.Namespace) -> None:
    for variant in args.variants.split(","):
        result = on_ranks("bytes", args.ranks, {"variant": variant})
        write(args, {"what": "bytes", "ranks": args.ranks, "variant": variant, **result})


def run_network(args: argparse.Namespace) -> None:
    for variant in args.variants.split(","):
        result = on_ranks("network", args.ranks, {"variant": variant, "steps": args.steps})
        write(
            args,
            {
                "what": "network", "ranks": args.ranks, "variant": variant, "rate": args.rate,
                "delay": args.delay, **result,
            },
        )  # fmt: skip


def records(args: argparse.Namespace, what: str) -> list[dict[str, Any]]:
    lines = args.out.read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["what"] == what]


def losses(args: argparse.Namespace) -> dict[tuple[int, str], dict[int, float]]:
    """Held-out loss by ranks and variant, then seed."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for r in records(args, "learn"):
        found.setdefault((r["ranks"], r["variant"]), {})[r["seed"]] = r["loss"]
    return found


def checks(args: argparse.Namespace) -> list[tuple[dict[str, Any], float]]:
    """Each measured step on a limited network, and what the model says of it.

    Told to the model: the line's rate, compute as measured there, and the codec's time from the step without
    a limit. Two ranks share the line with each other's answers, so each has half of 0.935 of it.
    """
    measured = records(args, "network")
    free = {r["variant"]: r for r in measured if r["rate"] == "none"}
    found = []
    for r in measured:
        if r["rate"] == "none":
            continue
        unit = {"mbit": 1e6, "gbit": 1e9}[r["rate"].lstrip("0123456789.")]
        rate = float(r["rate"].rstrip("mbitg")) * unit / 8 * 0.935 / r["ranks"]
        base = free[r["variant"]]
        codec = max(base["seconds"] - base["compute_seconds"], 0.0) / base["values"]
        cluster = Cluster(
            gpus=r["ranks"], node_size=1, between=Link(rate=rate, latency=2e-4),
            codec_seconds_per_value=codec, slowdown=0.0,  # compute was measured beside the other rank's
        )  # fmt: skip
        step = step_time(Work(values=r["values"], compute=r["compute_seconds"]), cluster, r["variant"])
        found.append((r, step.seconds))
    return found


def run_check(args: argparse.Namespace) -> None:
    for r, said in checks(args):
        error = said / r["seconds"] - 1
        print(f"{r['rate']:>8} {r['variant']:>9} {r['seconds']:7.3f} s, the model {said:7.3f} s {error:+.1%}")


def run_record(args: argparse.Namespace) -> None:
    command = "python benchmarks/several_gpus/gradient_communication.py"
    made: dict[str, list[Row]] = {"learn": [], "bytes": [], "network": []}
    found = losses(args)
    for (ranks, variant), by_seed in found.items():
        values, plain = list(by_seed.values()), found[ranks, "none"]
        mean, base = statistics.mean(values), statistics.mean(plain[seed] for seed in by_seed)
        made["learn"].append(
            Row(
                op="gradient_communication", part=f"learn {ranks} ranks stories3m", variant=variant,
                format=variant.split("_s")[0].split("_n")[0], metric="held-out loss", unit="nats",
                low=round(min(values), 4), value=round(mean, 4), high=round(max(values), 4),
                ratio=round(mean / base, 4),
            )
        )  # fmt: skip
    for kind in ("counted", "loopback"):
        by_variant = {r["variant"]: r[kind] for r in records(args, "bytes")}
        for variant, value in by_variant.items():
            made["bytes"].append(
                Row(
                    op="gradient_communication", part=f"bytes {kind} 2 ranks stories3m", variant=variant,
                    format=variant, metric="sent by a rank in a step", unit="bytes", low=round(value),
                    value=round(value), high=round(value), ratio=round(value / by_variant["bfloat16"], 4),
                )
            )  # fmt: skip
    for r in records(args, "network"):
        ours = next(x for x in records(args, "network") if x["rate"] == r["rate"] and x["variant"] == "int8")
        low, _, _, high = statistics.quantiles(r["times"], n=5, method="inclusive")
        made["network"].append(
            Row(
                op="gradient_communication", part=f"step 2 ranks {r['values']} values {r['rate']}",
                variant=r["variant"], format=r["variant"], metric="time", unit="ms",
                low=round(low * 1e3, 1), value=round(r["seconds"] * 1e3, 1), high=round(high * 1e3, 1),
                bytes_moved=r["sent_bytes"], ratio=round(r["seconds"] / ours["seconds"], 3),
            )
        )  # fmt: skip
    for what, rows in made.items():
        commit = ", ".join(dict.fromkeys(record["commit"] for record in records(args, what)))
        append(RESULTS, rows, conditions(torch.device("cpu"), command=f"{command} {what}", commit=commit))


def run_plot(args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fewbits"
    from matplotlib import pyplot

    names = ("float32", "bfloat16", "int8", "int4")
    colours = dict(zip(names, ("#8c8c8c", "#4c78a8", "#f58518", "#54a24b"), strict=True))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    curves = {(r["variant"], r["seed"]): r["curve"] for r in records(args, "learn") if r["ranks"] == 2}
    for variant, colour in (("none", "#8c8c8c"), ("int8", colours["int8"]), ("int4", colours["int4"])):
        seeds = [curve for (name, _), curve in curves.items() if name == variant]
        mean = torch.tensor(seeds).mean(0)
        smooth = mean.unfold(0, 8, 1).mean(1)
        left.plot(range(8, 8 + len(smooth)), smooth, color=colour, label=variant.replace("none", "float32"))
    left.set(xlabel="step", ylabel="training loss, mean of 3 seeds", title="stories3m on two ranks")
    left.legend(frameon=False)
    rates = list(dict.fromkeys(r["rate"] for r in records(args, "network")))
    rates = sorted((r for r in rates if r != "none"), key=lambda r: float(r[:-4]) * (1000 if "g" in r else 1))
    said = {(r["rate"], r["variant"]): (r["seconds"], value) for r, value in checks(args)}
    for i, name in enumerate(names):
        points = [
            (j + 0.2 * i - 0.3, *said[rate, name]) for j, rate in enumerate(rates) if (rate, name) in said
        ]
        right.bar([p[0] for p in points], [p[1] for p in points], 0.18, color=colours[name], label=name)
        right.plot([p[0] for p in points], [p[2] for p in points], "k_", markersize=9)
    right.plot([], [], "k_", label="the model")
    right.set_yscale("log")
    right.set_yticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
    right.minorticks_off()
    right.set_xticks(
        range(len(rates)), [r.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s") for r in rates]
    )
    right.set(ylabel="seconds a step", title="10.8 million gradients, two ranks")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(DOCS / "gradient-communication.svg", metadata={"Date": None})

    figure, axes = pyplot.subplots(1, 3, figsize=(9.5, 3.2), sharey=True, layout="constrained")
    for axis, (title, gbit) in zip(
        axes,
        (("100 Gbit/s a node", 100), ("400 Gbit/s a node", 400), ("8 x 400 Gbit/s a node", 3200)),
        strict=True,
    ):
        cluster = Cluster(gpus=1, between=Link(rate=gbit / 8 * 1e9 * ETHERNET, latency=15e-6))
        work = Work(values=8.03e9, compute=0.98)
        counts = (8, 16, 32, 64, 128, 256, 512, 1024)
        for name in names:
            steps = plan(work, cluster, counts, [name])
            axis.plot(counts, [s.efficiency for s in steps], color=colours[name], label=name, marker=".")
        axis.set_xscale("log", base=2)
        axis.set_xticks([8, 64, 1024], ["8", "64", "1,024"])
        axis.set(xlabel="GPUs", title=title, ylim=(0, 1.05))
    axes[0].set_ylabel("share of linear speed, on paper")
    axes[2].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(DOCS / "gradient-communication-plan.svg", metadata={"Date": None})


def in_namespace(rate: str | None, delay: str) -> int:
    """This very command once more, in a network namespace of its own; its exit code."""
    setup = "ip link set lo up"
    if rate and rate != "none":
        setup += f" mtu 1500 && tc qdisc add dev lo root handle 1: tbf rate {rate} burst 64kb latency 2s"
        if not delay.startswith("0"):
            setup += f" && tc qdisc add dev lo parent 1:1 handle 10: netem delay {delay} limit 100000"
    again = [sys.executable, str(HERE), *sys.argv[1:], "--inside"]
    return subprocess.run(["unshare", "-n", "sh", "-c", f'{setup} && exec "$@"', "sh", *again]).returncode


def write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    shown = {key: value for key, value in record.items() if key not in ("curve", "times", "compute")}
    print(json.dumps(shown), flush=True)
    commit = args.commit or conditions(torch.device("cpu"), command="").commit
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**record, "commit": commit}) + "\n")


COMMANDS = {
    "learn": run_learn, "bytes": run_bytes, "network": run_network, "check": run_check, "record": run_record,
    "plot": run_plot,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rate", default="200mbit", help="what the loopback device carries in all; none")
    parser.add_argument("--delay", default="0ms", help="of each packet, one way")
    parser.add_argument("--out", type=Path, default=HERE.parent / "gradient_communication.jsonl")
    parser.add_argument(
        "--commit", default=None, help="the commit that runs, where there is no git checkout to ask"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what in ("bytes", "network") and not args.inside:
        raise SystemExit(in_namespace(args.rate if args.what == "network" else None, args.delay))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    defaults = {"learn": "none,int8,int4", "bytes": "float32,bfloat16,int8,float8_e4m3,int4"}
    args.variants = args.variants or defaults.get(args.what, "float32,bfloat16,int8,int4")
    args.steps = args.steps or {"learn": 120}.get(args.what, 6)
    COMMANDS[args.what](args)


if __name__ == "__main__":
    main()
