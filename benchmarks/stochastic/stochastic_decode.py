"""Decoding under stochastic computing beside bfloat16: one loop, one CUDA graph a step, random weights.

    python benchmarks/stochastic/stochastic_decode.py [--out rows.csv --commit HASH]   # on an H200, 2 min
    python benchmarks/stochastic/stochastic_decode.py --shape tiny --contexts 8,16 --batches 1 --steps 2 \
        --prefill 16

Every model is made on the GPU and runs alone there: transformers' in bfloat16; the same with our norms, which
the stochastic one has as well; all decoder linears stochastic (recipe "stochastic": halved streams, prepared
weights), each apart; the same with q, k, v and gate, up multiplied as one (`share_inputs`); that, with both
attention products besides. `fewbits.inference.decode.Decoding` runs all of them. Checked first: linears
against the definition on the CPU, bit for bit, and a graph against launches one by one, by tokens and by the
last layer's keys. A context is the tokens of the prompt; steps that are timed come on top.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fewbits.bench.record import Row, append, conditions
from fewbits.formats.base import Packed
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.decode import Decoding
from fewbits.kernels.stochastic.matmul import product_of_codes
from fewbits.kernels.stochastic.quantize import quantize_stochastic
from fewbits.models.loading.in_memory import convert
from fewbits.models.stochastic.attention import use_stochastic_attention
from fewbits.models.stochastic.sharing import share_inputs
from fewbits.nn.stochastic.attention import AttentionProducts
from fewbits.nn.stochastic.linear import StochasticLinear
from fewbits.recipes import get_recipe
from fewbits.recipes.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_model import config_of, empty_model, fill

GIB = 2**30
START = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, flush=True)


class Bench:
    """The device, and what was measured on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.config = config_of(args.shape, args.layers)

    def model(self, recipe: Recipe | None) -> Any:
        """A new one, alone on the device; its peak counts from here."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return fill(empty_model(self.config, recipe), lambda _: self.device)

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() / GIB if self.cuda else 0.0

    def prompt(self, batch: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(length)
        shape = (batch, length)
        return torch.randint(3, self.config.vocab_size, shape, generator=generator).to(self.device)

    def times(self, run: Callable[[], Any], repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` runs, sorted."""
        found = []
        for _ in range(repeats):
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end))
            else:
                begin_s = time.perf_counter()
                run()
                found.append(1e3 * (time.perf_counter() - begin_s))
        return sorted(found)

    def note(self, variant: str, part: str, metric: str, unit: str, found: list[float]) -> None:
        low, high = found[len(found) // 5], found[len(found) - 1 - len(found) // 5]
        value = statistics.median(found)
        self.rows.append(
            Row(
                op="stochastic_decode", part=f"{self.args.shape}, {part}", variant=variant,
                format="bfloat16" if variant.startswith("bf16") else "stochastic",
                metric=metric, unit=unit, low=round(low, 4), value=round(value, 4), high=round(high, 4),
            )
        )  # fmt: skip
        say(f"{variant:30s} {part:28s} {metric:12s} {value:9.3f} {unit}  ({low:.3f} to {high:.3f})")


def check_linears(bench: Bench, model: Any) -> None:
    """A layer's products against the definition on the CPU; nothing is timed after a difference."""
    for path in ("self_attn.q_proj", "mlp.down_proj"):
        layer: StochasticLinear = model.model.layers[0].get_submodule(path)
        outputs = min(256, layer.out_features)
        parts = {name: part[:outputs].cpu() for name, part in layer.packed.parts.items()}
        few = Packed(layer.format, (outputs, layer.in_features), layer.dtype, parts)
        for rows in (1, 4, 33):
            x = torch.randn(rows, layer.in_features, dtype=torch.bfloat16, device=bench.device)
            expected = product_of_codes(*quantize_stochastic(x.cpu(), layer.format), few, layer.format)
            if not torch.equal(layer.product(x)[:, :outputs].cpu(), expected):
                raise SystemExit(f"{path}, {rows} rows: not the definition's bits; nothing is timed.")
    say("exact: linears of 1, 4 and 33 rows")


def check_graph(bench: Bench, model: Any, variant: str) -> None:
    """Steps from the graph and launched one by one, of one prompt."""
    found = []
    for graph in (True, False):
        decoding = Decoding(model, batch_size=2, max_tokens=48, cuda_graph=graph)
        decoding.prefill(bench.prompt(2, 24))
        ids = decoding.decode(16)
        if graph and bench.cuda and decoding.without_graph:
            raise SystemExit(f"{variant}: no CUDA graph, {decoding.without_graph}")
        found.append((ids, decoding.cache.layers[-1].keys.clone()))
    if all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        say(f"exact: {variant}: the graph's tokens and keys are those of single launches")
    else:
        bench.wrong.append(f"{variant}: a graph and single launches differ")
        say("WRONG:", bench.wrong[-1])


def measure(bench: Bench, model: Any, variant: str, *, few: bool = False) -> None:
    """All of a variant; ``few``: without the larger batches and without prefill and single launches."""
    args = bench.args
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    check_graph(bench, model, variant)
    for batch in args.batches[:1] if few else args.batches:
        for context in args.contexts:
            room = -(-(context + args.steps * (args.repeats + 1) + 1) // 16) * 16
            decoding = Decoding(model, batch_size=batch, max_tokens=room)
            decoding.prefill(bench.prompt(batch, context))
            run = lambda d=decoding: [d.step() for _ in range(args.steps)]  # noqa: E731
            run()
            found = [t / args.steps for t in bench.times(run, args.repeats)]
            bench.note(variant, f"batch {batch}, context {context}", "time", "ms per token", found)
            del decoding, run
    if few:
        return
    once = Decoding(model, batch_size=1, max_tokens=args.prefill + 16, cuda_graph=False)
    run = lambda: once.prefill(bench.prompt(1, args.prefill))  # noqa: E731
    run()
    bench.note(variant, f"prefill {args.prefill}", "time", "ms", bench.times(run, 3))
    run = lambda: [once.step() for _ in range(4)]  # noqa: E731
    run()
    found = [t / 4 for t in bench.times(run, 2)]
    bench.note(variant, "batch 1, without a graph", "time", "ms per token", found)
    if bench.cuda:
        bench.note(variant, "all of the above", "peak memory", "GiB", [bench.peak()])


def first_logits(bench: Bench, model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=bench.prompt(1, 32)).logits[0, -1].float().cpu()


def table(bench: Bench) -> None:
    """Every part beside bf16's with our norms."""
    values = {(r.part, r.metric, r.variant): (r.value, r.unit) for r in bench.rows}
    print(f"\n{'':44s} {'variant':30s} {'value':>10s}  {'x bf16':>7s}  {'x bf16 + our norms':>18s}")
    for (part, metric, variant), (value, unit) in values.items():
        base = [values.get((part, metric, name), (value, ""))[0] or 1 for name in ("bf16", "bf16, our norms")]
        ratios = f"{value / base[0]:7.3f}  {value / base[1]:18.3f}"
        print(f"{part:44s} {variant:30s} {value:10.3f}  {ratios}  {metric}, {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, for a trial")
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--batches", type=numbers, default=[1, 4])
    parser.add_argument("--steps", type=int, default=16, help="of one repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="leave out two variants")
    parser.add_argument("--out", type=Path, default=None, help="CSV file to add rows to")
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args)
    say(torch.cuda.get_device_name() if bench.cuda else "CPU", torch.__version__)

    model = bench.model(get_recipe("stochastic"))
    made = bench.peak()
    check_linears(bench, model)
    counted = first_logits(bench, model)
    if not args.quick:
        measure(bench, model, "stochastic, each apart", few=True)
    say(*share_inputs(model).notes)
    measure(bench, model, "stochastic")
    use_stochastic_attention(model, AttentionProducts(STOCHASTIC, STOCHASTIC))
    measure(bench, model, "stochastic, attention too", few=True)
    del model
    say(f"making the stochastic model took {made:.2f} GiB at most")

    model = bench.model(None)
    exact = first_logits(bench, model)
    if not args.quick:
        measure(bench, model, "bf16")
    convert(model, Recipe(name="as it is"))
    measure(bench, model, "bf16, our norms")
    likeness = float(torch.nn.functional.cosine_similarity(counted, exact, dim=0))
    say(f"logits after 32 tokens, stochastic and bf16: cosine {likeness:.4f} (random weights)")
    del model
    table(bench)
    if bench.wrong:
        raise SystemExit("; ".join(bench.wrong))
    if args.out is not None:
        command = f"python benchmarks/stochastic/stochastic_decode.py --shape {args.shape}"
        append(
            args.out,
            bench.rows,
            conditions(bench.device, command=command, commit=args.commit, packages=("transformers",)),
        )


if __name__ == "__main__":
    main()
