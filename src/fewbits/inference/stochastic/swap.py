"""The swap table of a model: one operator at a time at another stream length, and what that does to the loss.

Operators are the linears by the last part of their names (q_proj ... down_proj) and both attention products
(scores, values), each over all decoder layers or over a bucket of them; products that have one input may be
taken together, since hardware makes that input's streams once. Every swap is a `Candidate` of
`fewbits.inference.stochastic.screen`, so its loss is paired with the base's, window by window.

    loss per freed cycle = (loss of the swap - loss of the base) / (cycles of the base - cycles of the swap)

with cycles as stream steps over all products that a configuration decides on (so freed cycles of different
operators are comparable: a budget of them is a budget of MACs times lengths). A longer stream frees a
negative number of cycles, and the quotient is what each cycle spent gains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.host.attention import attention_modules
from fewbits.host.spec import layer_names, spec_for
from fewbits.inference.evaluate import TextWindows, batch_tokens
from fewbits.inference.paired import Interval, paired_interval
from fewbits.inference.stochastic.evaluation import EvalSetting, under_setting
from fewbits.inference.stochastic.screen import Candidate, Screening, screen
from fewbits.inference.stochastic.work import Work, count_work
from fewbits.models.stochastic.in_model import check_config, facts_of
from fewbits.models.stochastic.switch import linear_names
from fewbits.recipes.stochastic_config import (
    AttentionSetting,
    LinearSetting,
    StochasticConfig,
    config_from_plain,
    config_to_plain,
)

if TYPE_CHECKING:
    from torch import nn

VERSION = 1
ATTENTION = ("scores", "values")


@dataclass(frozen=True)
class Operator:
    """Products that are swapped together.

    Attributes:
        name: for readers, as in "down_proj, layers 0 to 7".
        op: the last part of the linears' names, several with "+" between, or "scores" or "values".
        names: full names of the linears, or of the attention modules.
    """

    name: str
    op: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Swap:
    """One operator at another setting.

    Attributes:
        operator: which.
        to: the stream length, or another setting as `swapped` has them.
        differences: of the summed negative log-likelihood of each window against the base's.
        freed: cycles that it frees, over all products that a configuration decides on.
    """

    operator: Operator
    to: int | str
    differences: tuple[float, ...]
    freed: float


@dataclass(frozen=True)
class SwapTable:
    """All swaps of a model.

    Attributes:
        base: what was swapped against.
        base_nll: its loss, nats for a token.
        tokens: scored in each window.
        macs: of each operator, by its name, as a share of all products that a configuration decides on.
        cycles: of each operator in the base, by its name; 0 where it runs in whole numbers or exactly.
        swaps: the table.
    """

    base: StochasticConfig
    base_nll: float
    tokens: tuple[int, ...]
    macs: Mapping[str, float]
    cycles: Mapping[str, float]
    swaps: tuple[Swap, ...]

    def loss(self, swap: Swap, confidence: float = 0.95) -> Interval:
        """The loss of a swap against the base, nats for a token."""
        return paired_interval(swap.differences, self.tokens, confidence)


def operators(
    model: nn.Module, base: StochasticConfig, *, buckets: int = 1, tied: bool = False
) -> list[Operator]:
    """The operators of a model: what a swap table has rows for.

    Args:
        model: in its original form.
        base: the configuration; its attention products count where they are stochastic.
        buckets: of consecutive decoder layers, as even as can be; 1: all layers together.
        tied: whether q, k and v, and gate and up, are one operator each.

    Raises:
        BadInput: more buckets than layers, or none.
    """
    spec = spec_for(model)
    layers = list(layer_names(model, spec))
    if not 1 <= buckets <= len(layers):
        raise BadInput(f"{buckets} buckets of {len(layers)} layers; choose from 1 to {len(layers)}.")
    groups = [[path.rpartition(".")[2] for path in paths] for paths in spec.products] if tied else []
    ends = {end: "+".join(group) for group in groups for end in group}
    linears = linear_names(model, base.options)
    result = []
    for number in range(buckets):
        inside = range(number * len(layers) // buckets, (number + 1) * len(layers) // buckets)
        places = tuple(f"{layers[i]}." for i in inside)
        where = f", layers {inside[0]} to {inside[-1]}" if len(inside) > 1 else f", layer {inside[0]}"
        by_op: dict[str, list[str]] = {}
        for name in linears:
            if name.startswith(places):
                last = name.rpartition(".")[2]
                by_op.setdefault(ends.get(last, last), []).append(name)
        for name, _ in attention_modules(model):
            for op in ATTENTION:
                if name.startswith(places) and not base.attention_of(name).is_exact(op):
                    by_op.setdefault(op, []).append(name)
        result += [Operator(op + (where if buckets > 1 else ""), op, tuple(n)) for op, n in by_op.items()]
    return result


def swapped(base: StochasticConfig, operator: Operator, to: int | str) -> StochasticConfig:
    """The base with one operator at another setting.

    Args:
        base: the configuration.
        operator: what is set.
        to: a stream length; "int4" ... "int8", whole numbers; or "x0.5" and the like: the lengths that it
            has, by chunk and group of rows, times so much.

    Raises:
        BadInput: another word.
    """
    if times_of(to) is not None:
        return _scaled(base, operator, times_of(to) or 1.0)
    if operator.op in ATTENTION:
        attentions = tuple((n, _attention(base.attention_of(n), operator.op, to)) for n in operator.names)
        return replace(base, attention=(*attentions, *base.attention))
    linears = []
    for name in operator.names:
        plain = replace(
            base.linear(name), runs="stochastic", bits=None, lengths=None, thresholds=(), classify="row"
        )
        bits = bits_of(to)
        runs = (
            replace(plain, lengths=((int(to),),)) if bits is None else replace(plain, runs="int8", bits=bits)
        )
        linears.append((name, runs))
    return replace(base, linears=(*linears, *base.linears))


def _scaled(base: StochasticConfig, operator: Operator, times: float) -> StochasticConfig:
    longest, own = base.options.streams.levels, base.options.streams.length

    def scaled(length: int) -> int:
        return min(max(round(length * times), 1), max(longest, length)) if length else 0

    if operator.op in ATTENTION:
        attentions = []
        for name in operator.names:
            lengths = tuple(scaled(length) for length in base.attention_of(name).lengths(operator.op))
            one: Any = lengths[0] if len(lengths) == 1 else lengths or None
            attentions.append((name, replace(base.attention_of(name), **{operator.op: one})))
        return replace(base, attention=(*attentions, *base.attention))
    linears = []
    for name in operator.names:
        setting = base.linear(name)
        if setting.runs == "stochastic":
            rows = setting.lengths or ((own,),)
            linears.append((name, replace(setting, lengths=tuple(tuple(map(scaled, row)) for row in rows))))
    return replace(base, linears=(*linears, *base.linears))


def times_of(to: int | str) -> float | None:
    """The factor of a swap like "x1.5"; None for another.

    Raises:
        BadInput: no number above zero after the x.
    """
    if not isinstance(to, str) or not to.startswith("x"):
        return None
    try:
        times = float(to[1:])
    except ValueError:
        times = 0.0
    if not 0 < times < 1000:
        raise BadInput(f"a swap to {to!r} is unknown; give a factor above 0, as in x1.5.")
    return times


def _attention(before: AttentionSetting, op: str, to: int | str) -> AttentionSetting:
    bits = bits_of(to)
    changed: dict[str, Any] = {
        op: None if bits is not None else int(to),
        f"{op}_thresholds": (),
        f"{op}_bits": bits,
    }
    return replace(before, **changed)


def bits_of(to: int | str) -> int | None:
    """The bits of a swap to whole numbers; None for a stream length.

    Raises:
        BadInput: a word that is neither.
    """
    if isinstance(to, int):
        return None
    if to.startswith("int") and to[3:].isdigit() and 2 <= int(to[3:]) <= 8:
        return int(to[3:])
    raise BadInput(
        f"a swap to {to!r} is unknown; give a stream length, int2 to int8, or a factor as in x0.5."
    )


def swap_table(
    model: nn.Module,
    text: TextWindows,
    base: StochasticConfig,
    to: Sequence[int | str],
    chosen: Sequence[Operator],
    *,
    settings: Screening | None = None,
    board: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SwapTable:
    """Measure every operator at every setting that differs from its own.

    Args:
        model: in its original form, and so again afterwards.
        text: the windows.
        base: what is swapped against.
        to: stream lengths and what else `swapped` takes.
        chosen: the operators, as `operators` gives them.
        settings: how; nothing is given up early.
        board: a file that keeps every figure.
        progress: as of `screen`.

    Raises:
        BadInput: nothing to swap.
        SpecMismatch: the base does not fit the model.
    """
    settings = replace(settings or Screening(), stop=False)
    check_config(model, base)
    pairs = [(operator, one) for operator in chosen for one in to if not _is_base(base, operator, one)]
    if not pairs:
        raise BadInput(
            f"every operator runs in the base at {', '.join(map(str, to))} already, so there is nothing to "
            "swap; give other settings."
        )
    base = replace(base, model={**facts_of(model), **base.model})
    with under_setting(model, EvalSetting("base", base)):
        work = count_work(model, batch_tokens(text, text.windows[: settings.batch_size])[0])
    macs, steps = _by_operator(work, chosen)
    everything = sum(p.macs for p in work.products if not p.layer.endswith("lm_head"))
    candidates = [Candidate(f"{o.name} at {one}", swapped(base, o, one)) for o, one in pairs]
    standings = screen(model, text, base, candidates, settings, board=board, progress=progress)
    rows = {row.candidate.name: row for row in standings.rows}
    swaps = []
    for (operator, one), candidate in zip(pairs, candidates, strict=True):
        row = rows[candidate.name]
        freed = (standings.base_steps - row.steps) / everything
        swaps.append(Swap(operator, one, row.differences, freed))
    cycles = {name: steps[name] / macs[name] if macs[name] else 0.0 for name in macs}
    shares = {name: value / everything for name, value in macs.items()}
    return SwapTable(base, standings.base_nll, standings.tokens, shares, cycles, tuple(swaps))


def _is_base(base: StochasticConfig, operator: Operator, to: int | str) -> bool:
    """Whether every product of an operator runs so already."""
    other = swapped(base, operator, to)
    if operator.op in ATTENTION:
        return all(base.attention_of(name) == other.attention_of(name) for name in operator.names)
    length = base.options.streams.length

    def runs(config: StochasticConfig, name: str) -> LinearSetting:
        setting = config.linear(name)
        if setting.runs == "int8":
            return replace(setting, bits=setting.bits or base.options.sc_prec)
        filled = setting.runs == "stochastic" and setting.lengths is None
        return replace(setting, lengths=((length,),)) if filled else setting

    return all(runs(base, name) == runs(other, name) for name in operator.names)


def _by_operator(work: Work, chosen: Sequence[Operator]) -> tuple[dict[str, int], dict[str, int]]:
    """MACs and stream steps of each operator; protected channels aside."""
    macs, steps = dict.fromkeys((o.name for o in chosen), 0), dict.fromkeys((o.name for o in chosen), 0)
    for operator in chosen:
        names = set(operator.names)
        for product in work.products:
            op = product.op if operator.op in ATTENTION else "linear"
            if product.layer in names and product.op == (operator.op if op != "linear" else "linear"):
                macs[operator.name] += product.macs
                steps[operator.name] += product.cycles
    return macs, steps


def write_swaps(table: SwapTable, path: Path | str) -> None:
    """Write a swap table as JSON."""
    plain = {
        "fewbits_swaps": VERSION,
        "base": config_to_plain(table.base),
        "base_nll": table.base_nll,
        "tokens": list(table.tokens),
        "macs": dict(table.macs),
        "cycles": dict(table.cycles),
        "swaps": [asdict(swap) for swap in table.swaps],
    }
    Path(path).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def read_swaps(path: Path | str) -> SwapTable:
    """The inverse of `write_swaps`.

    Raises:
        BadInput: there is no such file, or it holds no swap table.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no file {path}; write one with fewbits sc swap.")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not JSON; give what fewbits sc swap wrote.") from error
    if not isinstance(plain, dict) or plain.get("fewbits_swaps") != VERSION:
        raise BadInput(f"{path} is no swap table of version {VERSION}; give what fewbits sc swap wrote.")
    try:
        return SwapTable(
            config_from_plain(plain["base"]),
            float(plain["base_nll"]),
            tuple(int(t) for t in plain["tokens"]),
            plain["macs"],
            plain["cycles"],
            tuple(_swap(entry) for entry in plain["swaps"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is a damaged swap table ({error!r}); write it again.") from error


def _swap(entry: Mapping[str, Any]) -> Swap:
    operator = entry["operator"]
    return Swap(
        Operator(operator["name"], operator["op"], tuple(operator["names"])),
        entry["to"],
        tuple(entry["differences"]),
        float(entry["freed"]),
    )
