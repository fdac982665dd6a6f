"""A whole evaluation, a screen and a swap table of an 8B shape, by the rates of parts that are measured.

    PYTHONPATH=src:. python benchmarks/stochastic/whole_evaluation.py        # about a minute on an H200

The protocol of scmp_llm: 141 blocks of 2,048 tokens (Llama's WikiText-2, 288,627 of them scored), one at a
time; halved streams of 128, 64, 32 or 16 steps by a row's place among those of its call; blocks of products
in INT7; both products of attention in streams, without chunks. Weights and tokens are random, so the loss
means nothing. Each linear's thresholds send 2, 8, 50 and 40 % of the rows of a first window to the four
lengths.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from benchmarks.random_model import FIELDS, config_of, empty_model, fill
from torch import nn

from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.evaluate import TextWindows, Window, batch_tokens, evaluating, window_nlls
from fewbits.inference.part_times import part_times
from fewbits.inference.stochastic.evaluation import EvalSetting, Ledger, evaluate_setting, under_setting
from fewbits.inference.stochastic.screen import Candidate, Screening, screen
from fewbits.inference.stochastic.swap import operators, swap_table
from fewbits.inference.stochastic.work import count_work
from fewbits.models.stochastic.switch import linear_names
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig

LENGTHS = (128, 64, 32, 16)
QUANTILES = (0.98, 0.90, 0.40)
BLOCKS, CANDIDATES, SCREENED = 141, 100, 16
TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200}


def thresholds_of(model: nn.Module, names: list[str], ids: torch.Tensor) -> dict[str, tuple[float, ...]]:
    """By linear, where a first window's rows lie between the least and the greatest magnitude."""
    thresholds: dict[str, tuple[float, ...]] = {}

    def note(name: str) -> Any:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            largest = args[0].float().abs().amax(-1).flatten()
            place = (largest - largest.min()) / (largest.max() - largest.min())
            limits = place.quantile(torch.tensor(QUANTILES, device=place.device)).tolist()
            thresholds[name] = tuple(limits)

        return hook

    handles = [model.get_submodule(n).register_forward_pre_hook(note(n)) for n in names]
    with evaluating(model):
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return thresholds


def protocol(model: nn.Module, ids: torch.Tensor) -> StochasticConfig:
    """The configuration; every fourth layer's o and down, and its QK^T, are in INT7."""
    options = replace(STOCHASTIC.with_length(LENGTHS[0]), rng_levels=None)
    names = linear_names(model, options)
    linears = []
    for name, limits in thresholds_of(model, names, ids).items():
        layer, op = int(name.split(".")[2]), name.rpartition(".")[2]
        streams = LinearSetting(lengths=tuple((n,) for n in LENGTHS), thresholds=limits, classify="call")
        masked = layer % 4 == 0 and op in ("o_proj", "down_proj")
        linears.append((name, LinearSetting(runs="int8", bits=7) if masked else streams))
    attention = []
    for layer in range(model.config.num_hidden_layers):
        values: dict[str, Any] = {"values": (64, 32), "values_thresholds": (0.5,), "chunk_d": 0}
        scores: dict[str, Any] = {"scores": (64, 32), "scores_thresholds": (0.5,)}
        scores = {"scores_bits": 7} if layer % 4 == 0 else scores
        attention.append((f"*.layers.{layer}.*", AttentionSetting(**values, **scores)))
    return StochasticConfig(options=options, linears=tuple(linears), attention=tuple(attention))


def whole_text(model: nn.Module, text: TextWindows, config: StochasticConfig, device: torch.device) -> float:
    """Seconds of a window; prints what the whole takes, and the parts of one window."""
    moments: list[float] = []

    def progress(scored: int, total: int) -> None:
        moments.append(time.perf_counter())

    setting, began = EvalSetting("protocol", config), time.perf_counter()
    evaluate_setting(model, text, setting, Ledger(None), facts={}, batch_size=1, progress=progress)
    windows = [b - a for a, b in pairwise(moments[:-1])]  # the last call adds nothing
    first, each = moments[0] - began, sum(windows) / len(windows)
    print(
        f"preparing and the first window {first:.2f} s; then", *(f"{w:.3f}" for w in windows), "s", flush=True
    )
    print(f"{BLOCKS} windows by this rate: {first + (BLOCKS - 1) * each:.1f} s", flush=True)
    with under_setting(model, setting), evaluating(model):
        mean = count_work(model, batch_tokens(text, text.windows[:1])[0]).mean_cycles
        window_nlls(model, text, text.windows[:1])
        parts = part_times(model, lambda: window_nlls(model, text, text.windows[:1]))
    print(f"{mean:.1f} cycles a stochastic product; ms of a window by parts, each waited for:", flush=True)
    print(
        "  ",
        ", ".join(f"{name} {1e3 * s:.1f}" for name, s in parts.items()),
        f"(sum {1e3 * sum(parts.values()):.1f})",
    )
    if device.type == "cuda":
        print(f"   peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB", flush=True)
    return each


def with_one_changed(base: StochasticConfig, at: int) -> StochasticConfig:
    """Another length for one linear of the table."""
    name, setting = base.linears[at]
    other = LinearSetting(lengths=((48,),)) if setting.runs == "int8" else LinearSetting(runs="int8", bits=7)
    return replace(base, linears=(*base.linears[:at], (name, other), *base.linears[at + 1 :]))


def searches(model: nn.Module, text: TextWindows, base: StochasticConfig, windows: int) -> None:
    """A screen of some candidates, each changed at another place of the model, and a swap table."""
    few = text._replace(windows=text.windows[:windows])
    settings = Screening(stop=False)
    places = [len(base.linears) * k // 4 for k in range(4)]  # the first changes all layers
    candidates = [Candidate(str(at), with_one_changed(base, at)) for at in places]
    took = []
    for count in (windows, 2 * windows):
        began = time.perf_counter()
        screen(model, text._replace(windows=text.windows[:count]), base, candidates, settings)
        took.append(time.perf_counter() - began)
    each = (took[1] - took[0]) / windows / (len(candidates) + 1)
    whole = took[0] + each * CANDIDATES * SCREENED
    print(
        f"screen, {len(candidates)} candidates changed at even distances: {took[0]:.2f} s for {windows} "
        f"windows, {took[1]:.2f} for {2 * windows}: {each:.3f} s a candidate and window; {CANDIDATES} on "
        f"{SCREENED} by this rate {whole:.0f} s",
        flush=True,
    )
    chosen, to = operators(model, base), (48,)
    began = time.perf_counter()
    table = swap_table(model, few, base, to, chosen, settings=settings)
    took = time.perf_counter() - began
    swaps = len(table.swaps)
    print(
        f"swap table: {swaps} swaps of {len(chosen)} operators on {windows} windows {took:.1f} s; "
        f"on {SCREENED} by this rate {took * SCREENED / windows:.0f} s",
        flush=True,
    )


def main() -> None:
    """Make the model, measure, print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=(*FIELDS, "tiny"))
    parser.add_argument("--layers", type=int, help="decoder layers (default: all)")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=6, help="measured of the evaluation")
    parser.add_argument("--screened", type=int, default=1, help="windows measured of a screen")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    FIELDS["tiny"] = TINY
    device, began = torch.device(args.device), time.perf_counter()
    torch.manual_seed(0)
    model = fill(empty_model(config_of(args.shape, args.layers)), lambda _: device)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (max(args.windows, 2 * args.screened) * args.window,))
    cut = [Window(at, at + 1, at + args.window) for at in range(0, len(ids), args.window)]
    text = TextWindows(ids, cut, None, len(ids), args.window, args.window)
    print(f"model {time.perf_counter() - began:.1f} s", flush=True)
    config = protocol(model, ids[None, : args.window].to(device))
    whole_text(model, text._replace(windows=cut[: args.windows]), config, device)
    searches(model, text, config, args.screened)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
