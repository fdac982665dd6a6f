"""Allocations of stream lengths at equal cycles, on held-out text, and whether a screen ranks as a full test.

    python benchmarks/stochastic/sc_allocation.py --model stories260k --text tinystories_val.txt --out a.json

All at ``--budget`` cycles a product on average, weighted by MACs, attention included, by three calibration
texts (16 windows of 256 tokens each), for two front ends (SmoothQuant 0.5, AWQ):

    uniform     one length everywhere
    published   scmp_llm's recipe as its calibration states it: each row's relative error at each length; one
                Lagrange multiplier over all (operator, quarter of the layers), cycles weighted by MACs; rows
                sent to lengths by thresholds of their largest magnitude among those of their call
    calibrate   `fewbits sc calibrate --budget 32 --attention auto`: lengths by layer and chunk of the inner
                dimension, and attention's two lengths by the loss on the calibration text
    equal lengths   the same with --attention 32

Differences are paired by window against the published recipe of the same text and front end. Then the ranks:
``--ranked`` random tables of equal cost, screened on 16 windows and tested on all held-out ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.evaluate import text_windows
from fewbits.inference.paired import paired_interval
from fewbits.inference.stochastic.screen import Candidate, Screening, screen
from fewbits.inference.stochastic.swap import operators, swapped
from fewbits.inference.stochastic.work import count_work
from fewbits.models.stochastic.query_key_scales import captured_queries_and_keys
from fewbits.nn.stochastic.product import stochastic_product
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from fewbits.training.calibration.stochastic import Calibration, calibrate_stochastic

LEVELS = (128, 96, 64, 48, 32, 24, 16)
WINDOW = 256
CALIBRATION_WINDOWS = 16
STARTS = (100_000, 220_000, 340_000)  # characters where the calibration texts begin
HELD_OUT = 450_000
QUARTERS = 4
ROWS_OF_A_CALL = 24


@dataclass
class Rows:
    """Sampled rows of one (operator, quarter): places in their calls (n,), errors (n, levels), and MACs."""

    places: list[Tensor]
    errors: list[Tensor]
    macs: float = 0.0


def place_in_call(x: Tensor) -> Tensor:
    """Where each row's largest magnitude lies between the least, 0, and the greatest, 1; (rows,)."""
    largest = x.float().abs().amax(-1)
    spread = largest.max() - largest.min()
    return torch.ones_like(largest) if spread < 1e-8 else (largest - largest.min()) / spread


def errors_of(a: Tensor, b: Tensor, smooth: Tensor | None) -> Tensor:
    """Relative errors of the rows of a (n, K) against b (M, K) at every level, (n, levels)."""
    exact = a.float() @ b.float().mT
    size = exact.norm(dim=-1).clamp(min=1e-8)
    products = [stochastic_product(a, b, STOCHASTIC.with_length(level), smooth) for level in LEVELS]
    return torch.stack([(y - exact).norm(dim=-1) / size for y in products], -1)


class Published:
    """scmp_llm's recipe, from its definition: measured here, allocated over all operators at once."""

    def __init__(self, model: Any, batches: Sequence[Tensor], scales: Mapping[str, Tensor | None]) -> None:
        self.rows: dict[tuple[str, int], Rows] = {}
        self.names: dict[tuple[str, int], list[str]] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.layers = model.config.num_hidden_layers
        for ids in batches:
            self._linears(model, ids, scales)
            self._attention(model, ids)

    def _add(self, name: str, op: str, a: Tensor, b: Tensor, smooth: Tensor | None) -> None:
        """One call: a (calls' batch, n, K) and b (batch, M, K)."""
        key = op, min(QUARTERS * int(name.split(".")[2]) // self.layers, QUARTERS - 1)
        rows = self.rows.setdefault(key, Rows([], []))
        if name not in self.names.setdefault(key, []):
            self.names[key].append(name)
        places = place_in_call(a.reshape(-1, a.shape[-1]))
        picked = torch.randperm(len(places), generator=self.generator)[:ROWS_OF_A_CALL].sort().values
        for batch in (picked // a.shape[1]).unique().tolist():
            own = picked[picked // a.shape[1] == batch] % a.shape[1]
            rows.errors.append(errors_of(a[batch, own], b[batch], smooth))
        rows.places.append(places[picked])
        rows.macs += a.numel() * b.shape[1]

    def _linears(self, model: Any, ids: Tensor, scales: Mapping[str, Tensor | None]) -> None:
        seen: dict[str, Tensor] = {}
        hooks = [
            model.get_submodule(n).register_forward_pre_hook(
                lambda _, args, n=n: seen.__setitem__(n, args[0].detach()[0])
            )
            for n in scales
        ]
        model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        for name, x in seen.items():
            weight = model.get_submodule(name).weight
            self._add(name, name.rpartition(".")[2], x[None], weight[None], scales[name])

    def _attention(self, model: Any, ids: Tensor) -> None:
        values: dict[str, Tensor] = {}
        hooks = [
            layer.self_attn.v_proj.register_forward_hook(
                lambda _, __, out, i=i: values.__setitem__(f"model.layers.{i}.self_attn", out.detach()[0])
            )
            for i, layer in enumerate(model.model.layers)
        ]
        for name, o in next(iter(captured_queries_and_keys(model, [ids]))).items():
            heads, T = o.q.shape[1:3]
            k = o.k[0].repeat_interleave(heads // o.k.shape[1], 0)
            v = (
                values[name]
                .view(T, o.k.shape[1], -1)
                .transpose(0, 1)
                .repeat_interleave(heads // o.k.shape[1], 0)
            )
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
            weights = (o.factor * o.q[0] @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
            self._add(name, "scores", o.q[0], k, None)
            self._add(name, "values", weights, v.mT, None)
        for hook in hooks:
            hook.remove()

    def config(self, budget: float, scales: Mapping[str, Tensor | None]) -> StochasticConfig:
        """Lengths and thresholds that meet the budget."""
        costs = torch.tensor(LEVELS, dtype=torch.float64)
        errors = {k: torch.cat(r.errors).double() for k, r in self.rows.items()}
        total = sum(r.macs for r in self.rows.values())
        price = {k: r.macs / len(errors[k]) / total for k, r in self.rows.items()}  # of a row's cycle

        def chosen(multiplier: float) -> dict[tuple[str, int], Tensor]:
            return {k: (e + multiplier * price[k] * costs).argmin(1) for k, e in errors.items()}

        low, high = 0.0, 1e9
        for _ in range(100):
            middle = (low * high) ** 0.5 if low else high / 16
            spent = sum(float(price[k] * costs[c].sum()) for k, c in chosen(middle).items())
            low, high = (middle, high) if spent > budget else (low, middle)
        linears, attention = [], dict[str, AttentionSetting]()
        for key, levels in chosen(high).items():
            lengths, thresholds = cut(torch.cat(self.rows[key].places), levels)
            for name in self.names[key]:
                if key[0] in ("scores", "values"):
                    words = {key[0]: lengths, f"{key[0]}_thresholds": thresholds}
                    attention[name] = replace(attention.get(name, AttentionSetting()), **words)
                else:
                    s = scales[name]
                    smooth = None if s is None else tuple(float(f"{x:.6g}") for x in s.tolist())
                    linears.append((name, LinearSetting(
                        lengths=tuple((n,) for n in lengths), thresholds=thresholds, classify="call",
                        smooth_scales=smooth,
                    )))  # fmt: skip
        options = STOCHASTIC.with_length(round(budget))
        return StochasticConfig(options=options, linears=tuple(linears), attention=tuple(attention.items()))


def cut(places: Tensor, levels: Tensor) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Lengths by group and thresholds that send as many rows to each level as chose it."""
    order = places.sort(descending=True).values
    lengths, thresholds, offset = list[int](), list[float](), 0
    for i, count in enumerate(levels.bincount(minlength=len(LEVELS)).tolist()):
        if not count:
            continue
        if lengths:
            limit = float(order[offset - 1] + order[offset]) / 2
            if (
                limit <= 0
            ):  # what is left lies where the smallest row of a call lies, as does what came before
                break
            if thresholds and limit >= thresholds[-1]:  # equal magnitudes: the group between is empty
                lengths.pop()
                thresholds.pop()
            thresholds.append(limit)
        lengths.append(LEVELS[i])
        offset += count
    return tuple(lengths), tuple(thresholds)


def windows_at(model: Any, tokenizer: Any, text: str, start: int, count: int) -> Any:
    """That many whole windows from this character on."""
    words = text[start:]
    return text_windows(model, tokenizer, words, window=WINDOW, max_tokens=count * (WINDOW - 1))


def batches_of(cut_text: Any) -> list[Tensor]:
    """Token ids (1, 256) of each window."""
    lead = [] if cut_text.bos is None else [cut_text.bos]
    return [torch.tensor([*lead, *cut_text.ids[w.begin : w.end].tolist()])[None] for w in cut_text.windows]


def uniform(budget: int) -> StochasticConfig:
    """One length everywhere."""
    attention = (("*", AttentionSetting(scores=budget, values=budget)),)
    return StochasticConfig(options=STOCHASTIC.with_length(budget), attention=attention)


def candidates_of(
    model: Any, cut_text: Any, budget: int, smoothing: str
) -> Iterator[tuple[str, StochasticConfig]]:
    """The three allocations that this text suggests."""
    batches = batches_of(cut_text)
    settings = Calibration(budget=budget, smoothing=smoothing, levels=LEVELS[::-1], attention=budget)
    equal = calibrate_stochastic(model, batches, settings)
    yield "equal lengths", equal
    chosen = calibrate_stochastic(model, batches, replace(settings, attention="auto"))
    print("  attention's shares by", smoothing, chosen.calibration["attention_shares"], flush=True)
    yield "calibrate", chosen
    scales = {
        name: None
        if setting.smooth_scales is None
        else torch.tensor(setting.smooth_scales, dtype=torch.float32)
        for name, setting in equal.linears
    }
    with torch.no_grad():
        yield "published", Published(model, batches, scales).config(budget, scales)


def random_tables(model: Any, budget: int, count: int) -> list[Candidate]:
    """Tables of random lengths for each operator and half of the layers, scaled to the budget."""
    base, draw = uniform(budget), random.Random(0)
    chosen = operators(model, base, buckets=2)
    ids = torch.ones(1, WINDOW, dtype=torch.long)
    macs = {o.name: 0 for o in chosen}
    for p in count_work(model, ids).products:
        for o in chosen:
            if p.layer in o.names and (p.op == o.op or p.op == "linear"):
                macs[o.name] += p.macs
    total, tables = sum(macs.values()), list[Candidate]()
    while len(tables) < count:
        lengths = {o.name: 2 ** draw.uniform(4, 6.5) for o in chosen}
        mean = sum(macs[n] * length for n, length in lengths.items()) / total
        config = base
        for o in chosen:
            config = swapped(config, o, min(max(round(lengths[o.name] * budget / mean), 12), 128))
        tables.append(Candidate(f"random {len(tables)}", config))
    return tables


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, without ties."""
    ranks = [[sorted(v).index(value) for value in v] for v in (x, y)]
    n = len(x)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1))


def compare(model: Any, tokenizer: Any, text: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All allocations on the held-out text."""
    candidates = []
    for number, start in enumerate(STARTS):
        calibration = windows_at(model, tokenizer, text, start, CALIBRATION_WINDOWS)
        for smoothing in ("smoothquant", "awq"):
            for name, config in candidates_of(model, calibration, args.budget, smoothing):
                candidates.append(Candidate(f"{name}, {smoothing}, text {number}", config))
    held_out = windows_at(model, tokenizer, text, HELD_OUT, args.windows)
    result = screen(
        model,
        held_out,
        uniform(args.budget),
        candidates,
        Screening(batch_size=4, stop=False),
        board=args.board,
    )
    rows = {row.candidate.name: row for row in result.rows}
    table = [{"name": "uniform", "perplexity": math.exp(result.base_nll), "cycles": args.budget}]
    for candidate in candidates:
        row = rows[candidate.name]
        other = rows[f"published, {candidate.name.split(', ', 1)[1]}"]
        gaps = [a - b for a, b in zip(row.differences, other.differences, strict=True)]
        against = paired_interval(gaps, result.tokens)
        table.append({
            "name": candidate.name, "perplexity": math.exp(result.base_nll + row.against_base.mean),
            "cycles": row.cycles, "against published": [against.mean, against.low, against.high],
        })  # fmt: skip
    return table


def ranks(model: Any, tokenizer: Any, text: str, args: argparse.Namespace) -> dict[str, Any]:
    """Spearman's correlation of a screen on 16 windows with the whole held-out text."""
    tables, settings = random_tables(model, args.budget, args.ranked), Screening(batch_size=4, stop=False)
    few = windows_at(model, tokenizer, text, STARTS[0], 16)
    many = windows_at(model, tokenizer, text, HELD_OUT, args.windows)
    losses = []
    for cut_text in (few, many):
        rows = screen(model, cut_text, uniform(args.budget), tables, settings).rows
        by_name = {row.candidate.name: row.against_base.mean for row in rows}
        losses.append([by_name[table.name] for table in tables])
    best = sorted(range(len(tables)), key=losses[1].__getitem__)[: len(tables) // 2]
    halves = [[of[i] for i in best] for of in losses]
    return {
        "spearman": rank_correlation(*losses),
        "spearman of the better half": rank_correlation(*halves),
        "screen": losses[0],
        "test": losses[1],
    }


def main() -> None:
    """Parse, measure, print."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--windows", type=int, default=32, help="held-out windows of 256 tokens")
    parser.add_argument("--ranked", type=int, default=24, help="random tables; 0: no ranks")
    parser.add_argument("--board", help="a file that keeps the held-out figures")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = Path(args.text).read_text(encoding="utf-8")
    figures: dict[str, Any] = {"settings": vars(args)}
    if args.ranked:
        figures["ranks"] = ranks(model, tokenizer, text, args)
        print(json.dumps({k: v for k, v in figures["ranks"].items() if k.startswith("spear")}), flush=True)
    figures["table"] = compare(model, tokenizer, text, args)
    for row in figures["table"]:
        print(json.dumps(row), flush=True)
    Path(args.out).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
