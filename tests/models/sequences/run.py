"""Draw sequences of calls from seeds, run them, shrink those that fail and print them as Python.

    python -m tests.models.sequences.run 0 2000          these seeds
    python -m tests.models.sequences.run 17 --calls 20   one, longer
    python -m tests.models.sequences.run 0 9 --device cuda --seconds 50   on a GPU, by its kernels

prints each seed that fails, shrunk to the calls that it takes, then counts: sequences, calls, comparisons by
how they ended, layer calls by how they ran. Ends with status 1 if one failed. Two equal models get the same
calls, and one of them is fused. A sequence fails if

* they differ by more than rounding explains (`exact`),
* a layer ran fused that must not, or unfused that must be fused, or was not counted (`expected`),
* something is raised that is not one of the library's own refusals by both models alike.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch

from tests.models.sequences.pair import Pair
from tests.models.sequences.setup import Setup

CALLS = 9
SECONDS_TO_SHRINK = 60
COMPUTING = (
    "train", "train", "train", "accumulate", "evaluate", "evaluate_as_it_is", "forward_alone",
    "train_from_embeddings", "train_around_an_evaluation",
)  # fmt: skip
OTHERS = (
    "train_cast", "train_on_nothing", "train_with_a_cache", "train_in_a_thread", "stop_in_a_pass",
    "evaluate_in_threads", "read_logits_late", "ask_for_weights", "without_adapters",
    "hook", "hook", "number", "unhook", "hook_everywhere", "keep", "keep", "checkpointing", "for_training",
    "for_inference_and_back", "generate", "fuse_again", "copy", "attention", "mode", "trained",
    "add_adapter", "add_adapter", "switch_adapter", "delete_adapter", "merge", "merge", "save_and_load",
    "back_to_a_state", "state",
    "generate_in_few_bits", "read_into_packed_cache", "generate_by_guesses", "generate_many_texts",
    "generate_as_it_is", "decode_step", "dequantize", "restore", "convert", "cast", "through_a_file",
    "resize", "weigh_adapters", "inside_disabled", "words_of_forward", "export", "save_base",
)  # fmt: skip


class Call(NamedTuple):
    """One call: a method of `Pair`, and the seed of what it chooses."""

    name: str
    seed: int


@dataclass
class Outcome:
    """What a sequence came to.

    Attributes:
        problem: what was wrong, "" for nothing.
        where: the last lines of the program, of an error that is not `Differs`.
        said: for each call that ran, what it chose.
        layer_calls: how layers ran.
        compared: comparisons by how they ended.
    """

    problem: str = ""
    where: str = ""
    said: list[str] = field(default_factory=list)
    layer_calls: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)


def drawn(seed: int, calls: int = CALLS) -> list[Call]:
    """The sequence of this seed: calls that change something and calls that compute take turns."""
    source = random.Random(seed + 10**9)
    names = [source.choice(COMPUTING if i % 2 else OTHERS) for i in range(calls)]
    return [Call(name, source.randrange(10**6)) for name in (*names, "state")]


def run(setup: Setup, calls: Sequence[Call]) -> Outcome:
    """Run a sequence until it ends or fails."""
    outcome, pair = Outcome(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pair = Pair(setup)
            for call in calls:
                outcome.said.append("")
                try:
                    pair.call(*call)
                finally:
                    outcome.said[-1] = ", ".join(pair.said)
        except Exception as error:  # noqa: BLE001 (whatever a sequence meets is what it found)
            outcome.problem = f"{type(error).__name__}: {str(error)[:400]}"
            frames = traceback.extract_tb(error.__traceback__)
            outcome.where = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[:-7:-1])
    if pair is not None:
        outcome.layer_calls, outcome.compared = pair.watch.counted, pair.counts
    return outcome


def shrunk(setup: Setup, calls: list[Call], problem: str) -> tuple[list[Call], Outcome]:
    """The calls without those that the failure does not need, and what they come to."""
    kind, until = problem.partition(":")[0], time.time() + SECONDS_TO_SHRINK
    best = run(setup, calls)
    calls = calls[: len(best.said)]
    i = len(calls) - 2
    while i >= 0 and time.time() < until:
        fewer = calls[:i] + calls[i + 1 :]
        outcome = run(setup, fewer)
        if outcome.problem.partition(":")[0] == kind:
            calls, best = fewer[: len(outcome.said)], outcome
        i = min(i, len(calls)) - 1
    return calls, best


def as_python(setup: Setup, calls: Sequence[Call], outcome: Outcome) -> str:
    """A program that fails as the sequence does, from the top of the repository."""
    words = [
        f"{f.name}={getattr(setup, f.name)!r}" for f in fields(setup) if getattr(setup, f.name) != f.default
    ]
    lines = [
        "from tests.models.sequences.pair import Pair",
        "from tests.models.sequences.setup import Setup",
        "",
        f"pair = Pair(Setup({', '.join(words)}))",
    ]
    for i, call in enumerate(calls):
        said = outcome.said[i] if i < len(outcome.said) else ""
        lines.append(f'pair.call("{call.name}", {call.seed})' + (f"  # {said}" if said else ""))
    lines.append(f"# {outcome.problem}")
    if outcome.where:
        lines.append(f"# {outcome.where}")
    return "\n".join(lines)


def run_seed(seed: int, calls: int = CALLS, device: str = "cpu") -> Outcome:
    """The sequence of this seed."""
    return run(replace(Setup.of(seed), device=device), drawn(seed, calls))


def told(seed: int, calls: int = CALLS, device: str = "cpu") -> str:
    """The failure of this seed, as small as it comes, as Python."""
    setup, sequence = replace(Setup.of(seed), device=device), drawn(seed, calls)
    problem = run(setup, sequence).problem
    return as_python(setup, *shrunk(setup, sequence, problem))


def main(words: Sequence[str] | None = None) -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description="Fused beside plain, over random sequences of calls.")
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("last", type=int, nargs="?", help="the seed after the last; without it: one seed")
    parser.add_argument("--calls", type=int, default=CALLS, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no sequence after these")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the models are")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    last = args.first + 1 if args.last is None else args.last
    began, bad, count, calls = time.time(), 0, 0, 0
    layer_calls, compared = Counter[str](), Counter[str]()
    for seed in range(args.first, last):
        if time.time() - began > args.seconds:
            break
        outcome = run_seed(seed, args.calls, args.device)
        count, calls = count + 1, calls + len(outcome.said)
        layer_calls.update(outcome.layer_calls)
        compared.update(outcome.compared)
        if outcome.problem:
            bad += 1
            print(f"seed {seed}: {outcome.problem}", flush=True)
            print("    " + told(seed, args.calls, args.device).replace("\n", "\n    "), flush=True)
        if count % 100 == 0:
            print(f"{count} sequences so far, {bad} failed", file=sys.stderr, flush=True)
    print(f"{count} sequences of {calls} calls, {bad} failed, {time.time() - began:.0f} s", flush=True)
    for title, counts in (("compared", compared), ("layer calls", layer_calls)):
        for how, number in counts.most_common():
            print(f"  {title}: {number:7d} {how}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
