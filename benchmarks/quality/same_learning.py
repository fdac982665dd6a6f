"""Do we learn the same? LoRA fine-tunes over NF4: bitsandbytes + PEFT, ours in bfloat16, in FP8, head too.

    python benchmarks/quality/same_learning.py --model stories3m=../shared/data/models/stories3m \
        --model llama-100m=/tmp/llama100m --data ../shared/data --out outputs/same_learning

The text is tiny_shakespeare.txt, which neither model has seen: windows of the first nine tenths to train on,
of the last tenth to evaluate. For each seed all start from the same adapters and see the same windows
in the same order. Evaluation loss every few steps goes to curves*.csv in --out; the summary says how far ours
ends from bitsandbytes + PEFT, beside how far seeds are from each other. Models and seeds may run in processes
of their own, with one --out; `--finish SVG` then draws all curves there and `--record FILE` appends rows.

What was trained with FP8 products is evaluated twice: with bfloat16 products over the same NF4 weights, which
is what was learnt and what one deploys, and with the FP8 products of its training ("fewbits_nf4_fp8_own"),
which adds what FP8 itself costs a forward pass, before training too. A head that multiplies in FP8 does so
in training only; `--variants` runs some of them alone.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.bench.record import Row, append, conditions

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, LENGTH = 16, 256
RECIPES = {
    "fewbits_nf4": "qlora_nf4",
    "fewbits_nf4_fp8": "qlora_nf4_fp8",
    "fewbits_nf4_fp8_head": "qlora_nf4_fp8_head",
}
VARIANTS = ("bitsandbytes_peft", *RECIPES)
OWN = "fewbits_nf4_fp8_own"
SHOWN = ("bitsandbytes_peft", "fewbits_nf4", "fewbits_nf4_fp8", OWN, "fewbits_nf4_fp8_head")
FORMATS = {
    "bitsandbytes_peft": "nf4_dq",
    "fewbits_nf4": "nf4_dq",
    "fewbits_nf4_fp8": "nf4_dq, trained with float8",
    OWN: "nf4_dq, trained and evaluated with float8",
    "fewbits_nf4_fp8_head": "nf4_dq, trained with float8, the head too",
}
LABELS = {
    "bitsandbytes_peft": "bitsandbytes + PEFT",
    "fewbits_nf4": "fewbits NF4, bf16",
    "fewbits_nf4_fp8": "fewbits NF4, trained in FP8",
    OWN: "the same, evaluated in FP8",
    "fewbits_nf4_fp8_head": "trained in FP8, the head too",
}
INK = "#7f7f7f"
COLOURS = {
    "bitsandbytes_peft": "#c76a2b",
    "fewbits_nf4": "#3b6fd4",
    "fewbits_nf4_fp8": "#2e9e6b",
    OWN: "#9a9a9a",
    "fewbits_nf4_fp8_head": "#a0529f",
}


class Point(NamedTuple):
    """One evaluation."""

    model: str
    variant: str
    seed: int
    step: int
    loss: float


def windows_of(path: str, text: Path) -> tuple[Tensor, Tensor]:
    """Windows to train on and to evaluate on (windows, LENGTH), each begun with BOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    everything = text.read_text(encoding="utf-8")
    split = len(everything) * 9 // 10
    made = []
    for part in (everything[:split], everything[split:]):
        ids = torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"])
        ids = ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)].view(-1, LENGTH - 1)
        made.append(torch.cat((torch.full((len(ids), 1), tokenizer.bos_token_id), ids), 1))
    return made[0], made[1]


def theirs(path: str, device: str) -> Any:
    """QLoRA as PEFT's documents have it: NF4 with double quantisation, bfloat16 compute, float32 adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16, device_map={"": device}
    )
    model.requires_grad_(False)
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def ours(path: str, device: str, recipe: str) -> Any:
    """The same through fewbits, fused."""
    from transformers import AutoModelForCausalLM

    from fewbits import LoRA, convert, get_peft_model, get_recipe
    from fewbits.decoder.fuse import fuse, fusion_of

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    convert(model, get_recipe(recipe))
    model.requires_grad_(False)
    model = get_peft_model(model, LoRA(r=RANK, alpha=RANK))
    if fusion_of(model) is None:
        fuse(model, delayed_scaling="fp8" in recipe)
    return model


def build(variant: str, path: str, device: str) -> Any:
    if variant == "bitsandbytes_peft":
        return theirs(path, device)
    return ours(path, device, RECIPES[variant])


def same_adapters(model: Any, seed: int) -> None:
    """A is random by the seed and the parameter's place in order of names, B zero; float32."""
    named = sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)
    generator = torch.Generator().manual_seed(seed)
    for name, p in named:
        p.data = p.data.float()
        bound = p.shape[1] ** -0.5 if "lora_A" in name else 0.0
        p.data.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * bound)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


@contextmanager
def plain_products(model: Any) -> Iterator[None]:
    """Products in bfloat16 over the same packed weights, for an evaluation."""
    from fewbits.kernels.product.matmul_packed import PLAIN
    from fewbits.nn.linear import QuantizedLinear

    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    before = [linear.operands for linear in linears]
    for linear in linears:
        linear.operands = PLAIN
    try:
        yield
    finally:
        for linear, operands in zip(linears, before, strict=True):
            linear.operands = operands


def measured(model: Any, windows: Tensor, name: str, variant: str, seed: int, step: int) -> list[Point]:
    """The evaluations at a step."""
    with plain_products(model):
        points = [Point(name, variant, seed, step, evaluate(model, windows))]
    if variant == "fewbits_nf4_fp8":
        points.append(Point(name, OWN, seed, step, evaluate(model, windows)))
    return points


@torch.no_grad()
def evaluate(model: Any, windows: Tensor) -> float:
    """Mean loss in nats per token."""
    model.eval()
    losses = [float(loss_of(model, ids)) * len(ids) for ids in windows.split(32)]
    model.train()
    return sum(losses) / len(windows)


def fine_tune(
    name: str, path: str, variant: str, seed: int, args: argparse.Namespace, data: Any
) -> Iterator[list[Point]]:
    """One run; the evaluations at each step that has some, as they come."""
    train, held_out = data
    model = build(variant, path, args.device)
    same_adapters(model, seed)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=True)
    warm_up = max(args.steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm_up, max(1 - i / args.steps, 0.05))
    )
    generator = torch.Generator().manual_seed(seed)
    epochs = 1 + args.steps * args.batch // len(train)
    order = torch.cat([torch.randperm(len(train), generator=generator) for _ in range(epochs)]).to(
        train.device
    )
    yield measured(model, held_out, name, variant, seed, 0)
    for step in range(args.steps):
        loss_of(model, train[order[step * args.batch : (step + 1) * args.batch]]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            yield measured(model, held_out, name, variant, seed, step + 1)
    report_unfused(model)


def report_unfused(model: Any) -> None:
    """What fell back in training is said."""
    from fewbits.decoder.fuse import fusion_of

    fusion = fusion_of(model)
    for reason, count in ({} if fusion is None else fusion.fallbacks).items():
        print(f"  {count} layer calls ran unfused: {reason}")


def final(points: list[Point]) -> dict[str, dict[str, list[float]]]:
    """The last losses by model and variant: of the variants that ended, those seeds that all of these did."""
    last: dict[tuple[str, str, int], Point] = {}
    for p in points:
        last[p.model, p.variant, p.seed] = p
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for model in dict.fromkeys(p.model for p in points):
        mine = [p for p in last.values() if p.model == model]
        mine = [p for p in mine if p.step == max(p.step for p in mine)]
        variants = {p.variant for p in mine}
        for p in mine:
            if {q.variant for q in mine if q.seed == p.seed} == variants:
                found[model][p.variant].append(p.loss)
    return found


def summary(points: list[Point]) -> None:
    """Who ends where, and the two claims."""
    for model, by_variant in final(points).items():
        base = by_variant[VARIANTS[0]]
        noise = statistics.stdev(base) if len(base) > 1 else 0.0
        start = statistics.mean(p.loss for p in points if p.model == model and p.step == 0)
        print(
            f"{model}: {start:.4f} before; seeds of bitsandbytes + PEFT differ by {noise:.4f} (one deviation)"
        )
        for variant in (v for v in SHOWN if v in by_variant):
            values = by_variant[variant]
            pairs = [a - b for a, b in zip(values, base, strict=True)]
            mean = statistics.mean(values)
            print(
                f"  {variant:<20} {mean:.4f} ({min(values):.4f} to {max(values):.4f}), "
                f"{100 * (mean / statistics.mean(base) - 1):+.3f} %, "
                f"seed by seed {', '.join(f'{d:+.4f}' for d in pairs)}"
            )
        mean = statistics.mean(base)
        above = {v: statistics.mean(values) / mean - 1 for v, values in by_variant.items()}
        claims = []
        if "fewbits_nf4" in above:
            claims.append(f"NF4 + bf16 within seed noise: {abs(above['fewbits_nf4']) * mean <= noise}")
        if OWN in above:
            near, own = (above[v] <= 0.005 for v in ("fewbits_nf4_fp8", OWN))
            claims.append(f"NF4 + FP8 within 0.5 %: {near}, in its own products: {own}")
        if "fewbits_nf4_fp8_head" in above:
            claims.append(f"with an FP8 head: {above['fewbits_nf4_fp8_head'] <= 0.005}")
        print(f"  {'; '.join(claims)}")


def table(points: list[Point]) -> list[Row]:
    """Rows: least, mean and largest over the seeds."""
    made = []
    for model, by_variant in final(points).items():
        reference = statistics.mean(by_variant.get("fewbits_nf4", by_variant[VARIANTS[0]]))
        for variant, values in by_variant.items():
            mean = statistics.mean(values)
            made.append(
                Row(
                    op=f"same_learning_{model}", part="tiny_shakespeare", variant=variant,
                    format=FORMATS[variant], metric="evaluation loss", unit="nats",
                    low=round(min(values), 4), value=round(mean, 4),
                    high=round(max(values), 4), ratio=round(mean / reference, 5),
                )
            )  # fmt: skip
    return made


def plot(points: list[Point], path: Path) -> None:
    """The curves, a panel for each model: means over seeds, and the span of the seeds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(p.model for p in points))
    settings = {
        "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
        "xtick.color": INK, "ytick.color": INK, "font.size": 9,
    }  # fmt: skip
    with plt.rc_context(settings):
        figure, axes = plt.subplots(1, len(names), figsize=(4.8 * len(names), 3.4), squeeze=False)
        for name, panel in zip(names, axes[0], strict=True):
            shown = set(final(points)[name])
            styles = dict(zip(SHOWN, ("-", "--", "-.", ":", (0, (3, 1, 1, 1))), strict=True))
            for variant, style in ((v, s) for v, s in styles.items() if v in shown):
                at: dict[int, list[float]] = defaultdict(list)
                for p in points:
                    if (p.model, p.variant) == (name, variant):
                        at[p.step].append(p.loss)
                steps, label = sorted(at), LABELS[variant]
                means = [statistics.mean(at[s]) for s in steps]
                panel.plot(steps, means, linestyle=style, color=COLOURS[variant], label=label, linewidth=1.8)
                panel.fill_between(
                    steps, [min(at[s]) for s in steps], [max(at[s]) for s in steps],
                    color=COLOURS[variant], alpha=0.15, linewidth=0,
                )  # fmt: skip
            panel.set_title(name, fontsize=10)
            panel.set_xlabel("step")
            panel.set_ylabel("evaluation loss, nats per token")
            panel.grid(color=INK, alpha=0.25, linewidth=0.6)
            panel.legend(frameon=False)
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})


def read(path: Path) -> list[Point]:
    """All curves in a folder."""
    found = []
    for part in sorted(path.glob("curves*.csv")):
        with part.open(newline="") as file:
            found += [
                Point(r["model"], r["variant"], int(r["seed"]), int(r["step"]), float(r["loss"]))
                for r in csv.DictReader(file)
            ]
    return sorted(
        found, key=lambda p: (p.model != "stories3m", p.model, p.seed, SHOWN.index(p.variant), p.step)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--data", type=Path, help="the folder shared/data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas between")
    parser.add_argument("--eval-windows", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", type=Path, help="append rows to this CSV file")
    parser.add_argument("--commit", help="the commit, outside of a git checkout")
    parser.add_argument("--finish", type=Path, metavar="SVG", help="only draw and sum up the curves in --out")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.finish:
        points = read(args.out)
        summary(points)
        plot(points, args.finish)
        if args.record:
            record(points, args)
        return
    names = "_".join(entry.split("=", 1)[0] for entry in args.model)
    chosen = [v for v in args.variants.split(",") if v in VARIANTS]
    part = "" if len(chosen) == len(VARIANTS) else f"_{len(chosen)}_{chosen[-1]}"
    curves = args.out / f"curves_{names}_{args.seeds.replace(',', '')}{part}.csv"
    points = []
    with curves.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        for name, path in (entry.split("=", 1) for entry in args.model):
            train, held_out = windows_of(path, args.data / "text/tiny_shakespeare.txt")
            data = (train.to(args.device), held_out[: args.eval_windows].to(args.device))
            for seed in map(int, args.seeds.split(",")):
                for variant in chosen:
                    began = time.perf_counter()
                    run: list[Point] = []
                    for found in fine_tune(name, path, variant, seed, args, data):
                        writer.writerows(found)
                        file.flush()  # a time limit loses what is under way only
                        run += found
                    points += run
                    print(
                        f"{name} seed {seed} {variant}: {run[0].loss:.4f} -> "
                        f"{next(p for p in reversed(run) if p.variant == variant).loss:.4f}, "
                        f"{time.perf_counter() - began:.1f} s", flush=True,
                    )  # fmt: skip
    if VARIANTS[0] in chosen:
        summary(points)
    plot(points, args.out / "same-learning.svg")
    if args.record:
        record(points, args)


def record(points: list[Point], args: argparse.Namespace) -> None:
    """Append the rows."""
    settings = f"--steps {args.steps} --batch {args.batch} --lr {args.lr:g}"
    here = conditions(
        torch.device(args.device),
        command=f"python benchmarks/quality/same_learning.py {settings}",
        commit=args.commit,
        packages=("transformers", "peft", "bitsandbytes"),
    )  # fmt: skip
    append(args.record, table(points), here)


if __name__ == "__main__":
    main()
