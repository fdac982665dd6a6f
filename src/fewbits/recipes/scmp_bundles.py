"""Configurations of scmp_llm, read and written: a wrapper, its table, and a schedule of INT blocks.

    wrapper   {"type": "AdaptiveMPConfig", "stoc_len_levels": [96, 64, 32],
               "threshold_table_path": "table.json", "escape_gate_k": 2.0, "escape_stoc_len": 128}
    table     {"stoc_len_levels": [...], "layer_buckets": 4, "operator_defaults": {...}, "buckets":
               {"q_proj:t0:l1": {"thresholds": [0.8, 0.3], "metric_mean": 0.2, "metric_std": 0.1}}}
    hybrid    {"format": "scmp_llm_hybrid_v1", "int_bits": 7, "schedule": {"qk": ["sc", "int7"]}}

Operators are the linears by the last part of their names, and "qk" and "av". Block i of n lies in layer
bucket min(b - 1, int(i / (n - 1) * b)), which may have a ladder ``stoc_len_levels`` of its own. In a call, a
row is sent to a length by where its largest magnitude lies between the least and the greatest of the call's
rows: ``classify: call`` of a `LinearSetting`. The gate sends rows strictly above
``metric_mean + k * metric_std`` to ``escape_stoc_len``; here it is one more group at the top. One thing
differs: where all rows of a call have the same magnitude (a call of one row has), they take the ladder's
first length, and here the gate's if there is one that can be reached.

Linears' streams are counted in chunks of 128 inputs; attention's are not cut, its INT codes are. The rows of
a call of attention are those of all heads. Lengths are those of the kernels, after halving. What this format
cannot say, or we cannot run, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig

HYBRID = "scmp_llm_hybrid_v1"
ATTENTION = {"qk": "scores", "av": "values"}
Groups = tuple[tuple[int, ...], tuple[float, ...]]  # lengths and the thresholds between them


def read_bundle(
    wrapper: Path | str, *, hybrid: Path | str | None = None, num_layers: int | None = None
) -> StochasticConfig:
    """The configuration that a bundle stands for.

    Args:
        wrapper: the wrapper's file; the table's path in it is relative to its folder.
        hybrid: the schedule's file, if there is one.
        num_layers: of the model; None: as many as the schedule has blocks.

    Raises:
        BadInput: a file that is none of this format, or files that do not fit each other.
        Unsupported: what we do not run.
    """
    wrapper = Path(wrapper)
    spec = _json(wrapper)
    if "type" not in spec and ("buckets" in spec or "operator_defaults" in spec):
        raise BadInput(f"{wrapper} is a table of thresholds; give the wrapper that names it.")
    if spec.get("type") != "AdaptiveMPConfig":
        raise Unsupported(
            f"{wrapper} has type {spec.get('type')!r}; only AdaptiveMPConfig with a table is read, because "
            "shares of rows have no thresholds: calibrate a table."
        )
    levels = _levels(wrapper, spec.get("stoc_len_levels"))
    path = wrapper.parent / str(spec.get("threshold_table_path"))
    table = _json(path)
    if _levels(path, table.get("stoc_len_levels")) != levels:
        raise BadInput(f"{path} has other stoc_len_levels than {wrapper}; give the table of this wrapper.")
    _check_table(path, table)
    schedule = {} if hybrid is None else _schedule(Path(hybrid))
    blocks = num_layers or max((len(row) for row in schedule.values()), default=0)
    if blocks < 1:
        raise BadInput(
            "without a schedule the number of the model's layers is not known; give num_layers (--layers)."
        )
    wrong = [op for op, row in schedule.items() if len(row) != blocks]
    if wrong:
        raise BadInput(
            f"{hybrid} has {len(schedule[wrong[0]])} blocks for {wrong[0]} and the model {blocks}; give this "
            "model's schedule."
        )
    gate = None if spec.get("escape_gate_k") is None else float(spec["escape_gate_k"])
    gated = (gate, int(spec.get("escape_stoc_len", 128)))
    groups = _all_groups(path, table, levels, gated, blocks)
    options = replace(
        STOCHASTIC,
        sc_prec=int(table.get("sc_prec", 8)),
        halve_bipolar_stoc_len=bool(table.get("halve_bipolar_stoc_len", True)),
    ).with_length(levels[0])
    linears, attention = _settings(groups, schedule, blocks)
    return StochasticConfig(
        options=options,
        linears=linears,
        attention=attention,
        model={"num_hidden_layers": blocks},
        calibration={"wrapper": str(wrapper), "table": str(path), "method": str(table.get("method", ""))},
    )


def _settings(
    groups: Mapping[tuple[str, int], Groups], schedule: Mapping[str, Sequence[str]], blocks: int
) -> tuple[tuple[tuple[str, LinearSetting], ...], tuple[tuple[str, AttentionSetting], ...]]:
    linears, attention = [], []
    ops = list(dict.fromkeys([*(op for op, _ in groups), *schedule]))
    for block in range(blocks):
        fields: dict[str, Any] = {"chunk_d": 0}
        for op in ops:
            runs = schedule[op][block] if op in schedule else "sc"
            if runs == "sc" and (op, block) not in groups:
                raise BadInput(
                    f"the table has nothing for {op} in block {block}, nor a default; calibrate it."
                )
            group = groups.get((op, block), ((), ()))
            if op in ATTENTION:
                fields |= _attention_fields(ATTENTION[op], runs, group)
            else:
                linears.append((f"*.layers.{block}.*.{op}", _linear(runs, group)))
        setting = AttentionSetting(**fields)
        if not (setting.is_exact("scores") and setting.is_exact("values")):
            attention.append((f"*.layers.{block}.*", setting))
    return tuple(linears), tuple(attention)


def _linear(runs: str, groups: Groups) -> LinearSetting:
    if runs == "fp":
        return LinearSetting(runs="exact")
    if runs != "sc":
        return LinearSetting(runs="int8", bits=int(runs[3:]))
    lengths, thresholds = groups
    several = {"thresholds": thresholds, "classify": "call"} if thresholds else {}
    return LinearSetting(lengths=tuple((length,) for length in lengths), **several)  # type: ignore[arg-type]


def _attention_fields(op: str, runs: str, groups: Groups) -> dict[str, Any]:
    if runs == "fp":
        return {}
    if runs != "sc":
        return {f"{op}_bits": int(runs[3:])}
    lengths, thresholds = groups
    return {op: lengths if thresholds else lengths[0], f"{op}_thresholds": thresholds}


def _all_groups(
    path: Path, table: Mapping[str, Any], levels: list[int], gate: tuple[float | None, int], blocks: int
) -> dict[tuple[str, int], Groups]:
    """Of every operator and block that the table has something for."""
    defaults, buckets = table.get("operator_defaults") or {}, table.get("buckets") or {}
    count = int(table.get("layer_buckets", 1))
    ops = dict.fromkeys([*(key.split(":")[0] for key in buckets), *defaults])
    by_op_and_block = {}
    for op in ops:
        for block in range(blocks):
            bucket = min(count - 1, int(block / max(blocks - 1, 1) * count)) if blocks > 1 else 0
            key = f"{op}:t0:l{bucket}"
            payload = buckets.get(key, defaults.get(op))
            if payload is not None:
                where = f"{path}, {key if key in buckets else op}"
                by_op_and_block[op, block] = _groups(where, payload, levels, gate)
    return by_op_and_block


def _groups(where: str, payload: Any, levels: list[int], gate: tuple[float | None, int]) -> Groups:
    payload = payload if isinstance(payload, Mapping) else {"thresholds": payload}
    own = payload.get("stoc_len_levels")
    ladder = levels if own is None else _levels(where, own)
    thresholds = [float(t) for t in payload.get("thresholds") or ()]
    if len(thresholds) != len(ladder) - 1 or not all(0 <= t <= 1 for t in thresholds):
        raise BadInput(
            f"{where}: {len(ladder)} levels need {len(ladder) - 1} thresholds from 0 to 1, not {thresholds}; "
            "write the table again."
        )
    steps = [*zip(thresholds, ladder[:-1], strict=True)]
    k, escaped = gate
    if k is not None and payload.get("metric_mean") is not None and payload.get("metric_std") is not None:
        bound = float(payload["metric_mean"]) + k * float(payload["metric_std"])
        if bound < 1:  # strictly above it, as the next float32 and above
            least = float(np.nextafter(np.float32(bound), np.float32(2)))
            steps = [(least, escaped), *((t, n) for t, n in steps if np.float32(t) < least)]
    return _reachable(steps, ladder[-1])


def _reachable(steps: list[tuple[float, int]], last: int) -> Groups:
    """Without groups that no row can be in, and with neighbours of one length joined."""
    reachable: list[tuple[float, int]] = []
    for threshold, length in [*steps, (0.0, last)]:
        if threshold > 1 or (reachable and threshold >= reachable[-1][0]):
            continue
        if reachable and reachable[-1][1] == length:
            reachable[-1] = (threshold, length)
        else:
            reachable.append((threshold, length))
        if threshold <= 0:
            break
    return tuple(length for _, length in reachable), tuple(threshold for threshold, _ in reachable[:-1])


def _check_table(path: Path, table: Mapping[str, Any]) -> None:
    other = [op for op, spec in (table.get("dispatch_metrics") or {}).items() if not _is_amax(spec)]
    if other:
        raise Unsupported(
            f"{path} chooses stream lengths of {other[0]} by another metric than amax, the largest magnitude "
            "of a row, which is the only one that fewbits reads; calibrate with amax."
        )
    if (table.get("protected_channels") or {}).get("indices"):
        raise Unsupported(
            f"{path} gives protected channels streams of another length, which is not run here (protected "
            "channels are exact); calibrate without them."
        )
    if int(table.get("timestep_buckets", 1)) != 1:
        raise Unsupported(f"{path} has buckets of time steps, which a language model has not.")
    if table.get("k_bands") or table.get("per_row_chunk"):
        raise Unsupported(
            f"{path} has lengths by bands of channels, which are not read; give the plain table."
        )


def _is_amax(spec: Any) -> bool:
    if not isinstance(spec, Mapping):
        return bool(spec == "amax")
    return spec.get("metric", "amax") == "amax" and float(spec.get("sign", 1.0)) == 1.0


def _schedule(path: Path) -> dict[str, list[str]]:
    plain = _json(path)
    if plain.get("format") != HYBRID:
        raise BadInput(f"{path} has format {plain.get('format')!r}, not {HYBRID!r}; give a schedule.")
    if plain.get("default", "sc") != "sc":
        raise Unsupported(f"{path} has the default {plain['default']!r}; write out its schedule.")
    if not plain.get("int_sym", True) or int(plain.get("chunk_size", 128)) != 128:
        raise Unsupported(f"{path} asks for INT codes other than symmetric ones in chunks of 128.")
    bits = int(plain.get("int_bits", 8))
    return {op: [_entry(path, word, bits) for word in row] for op, row in (plain["schedule"] or {}).items()}


def _entry(path: Path, word: Any, bits: int) -> str:
    text = {"0": "fp", "1": "sc", "2": f"int{bits}"}.get(str(word), str(word))
    if text in ("sc", "fp") or re.fullmatch(r"int[2-8]", text):
        return text
    raise BadInput(f"{path}: the entry {word!r} is unknown; known: sc, fp, int2 to int8.")


def _levels(where: Path | str, plain: Any) -> list[int]:
    levels = [int(v) for v in plain or ()]
    if len(levels) < 2 or levels != sorted(set(levels), reverse=True) or levels[-1] < 0:
        raise BadInput(f"{where}: stoc_len_levels {levels} are not two or more descending lengths.")
    return levels


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; give a bundle with all its files.")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not JSON; give a file of a bundle.") from error
    if not isinstance(plain, dict):
        raise BadInput(f"{path} holds no mapping; give a file of a bundle.")
    return plain


def write_bundle(
    config: StochasticConfig, folder: Path | str, linears: Sequence[str], attentions: Sequence[str]
) -> list[Path]:
    """Write wrapper.json, table.json and, where something runs INT or exactly, hybrid.json.

    Args:
        config: the configuration.
        folder: where; made if it is not there.
        linears: full names of the model's linears that a configuration decides on, in order.
        attentions: full names of its attention modules, one for each layer.

    Returns:
        The files.

    Raises:
        Unsupported: what this format cannot say.
    """
    blocks = len(attentions)
    names: dict[tuple[str, int], str] = {}
    for name in linears:  # of a block's experts the first stands for all
        first = names.setdefault((name.rpartition(".")[2], _block(name)), name)
        if config.linear(first) != config.linear(name):
            raise Unsupported(
                f"{first} and {name} run otherwise, and their table has one entry for all "
                f"{name.rpartition('.')[2]} of a block; write a configuration in which they are alike."
            )
    names |= {(op, _block(name)): name for name in attentions for op in ATTENTION}
    buckets: dict[str, Any] = {}
    schedule: dict[str, list[str]] = {}
    for (op, block), name in names.items():
        runs, groups = _said(config, op, name)
        schedule.setdefault(op, ["sc"] * blocks)[block] = runs
        if runs == "sc":
            lengths, thresholds = groups
            if len(lengths) == 1:  # a ladder has two rungs; every row reaches the first
                lengths, thresholds = (lengths[0], lengths[0] - 1), (0.0,)
            buckets[f"{op}:t0:l{block}"] = {"thresholds": list(thresholds), "stoc_len_levels": list(lengths)}
    used = sorted({n for b in buckets.values() for n in b["stoc_len_levels"]}, reverse=True) or [1, 0]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = config.options
    table = {
        "stoc_len_levels": used,
        "timestep_buckets": 1,
        "layer_buckets": blocks,
        "method": "fewbits",
        "sc_prec": options.sc_prec,
        "halve_bipolar_stoc_len": options.halve_bipolar_stoc_len,
        "operator_defaults": {},
        "buckets": buckets,
    }
    wrapper = {"type": "AdaptiveMPConfig", "stoc_len_levels": used, "threshold_table_path": "table.json"}
    files = {"wrapper.json": wrapper, "table.json": table}
    masked = {op: row for op, row in schedule.items() if set(row) != {"sc"}}
    if masked:
        bits = max((int(w[3:]) for row in masked.values() for w in row if w.startswith("int")), default=8)
        files["hybrid.json"] = {
            "format": HYBRID,
            "default": "sc",
            "int_bits": bits,
            "int_sym": True,
            "chunk_size": 128,
            "schedule": masked,
        }
    for name, plain in files.items():
        (folder / name).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return [folder / name for name in files]


def _block(name: str) -> int:
    match = re.search(r"\.(\d+)\.", name)
    if match is None:
        raise Unsupported(f"{name} lies in no numbered layer, which their tables go by.")
    return int(match.group(1))


def _said(config: StochasticConfig, op: str, name: str) -> tuple[str, Groups]:
    """What their format says of a product: "sc" with its groups, "fp" or "int7"."""
    own = config.options.streams.length
    if config.options.arithmetic:
        raise Unsupported(
            f"the configuration's options have {', '.join(config.options.arithmetic)}, an arithmetic for "
            "which their files have no place; write a configuration without."
        )
    if op in ATTENTION:
        kind, setting = ATTENTION[op], config.attention_of(name)
        cut = config.options.chunk_d if setting.chunk_d is None else setting.chunk_d
        if setting.lengths(kind) and cut:
            raise Unsupported(
                f"{name} counts its streams in chunks of {cut}, and theirs are not cut in attention; give it "
                "chunk_d: 0."
            )
        bits = getattr(setting, f"{kind}_bits")
        if bits is not None:
            return f"int{bits}", ((), ())
        lengths = setting.lengths(kind)
        thresholds = getattr(setting, f"{kind}_thresholds")
        return ("sc", _checked(name, lengths, thresholds)) if lengths else ("fp", ((), ()))
    linear = config.linear(name)
    if linear.smooth_scales is not None or linear.protected:
        raise Unsupported(
            f"{name} has smooth_scales or protected channels, for which their table has no place (their "
            "scales follow from a file of activations); write a configuration without them."
        )
    if linear.runs != "stochastic":
        return ("fp" if linear.runs == "exact" else f"int{linear.bits or config.options.sc_prec}"), ((), ())
    rows = linear.lengths or ((own,),)
    if any(len(set(row)) > 1 for row in rows) or (linear.thresholds and linear.classify != "call"):
        raise Unsupported(
            f"{name} has lengths by chunk, or thresholds that are magnitudes, and their table has lengths by "
            "a row's place in its call alone; write a configuration with classify: call and one column."
        )
    return "sc", _checked(name, tuple(row[0] for row in rows), linear.thresholds)


def _checked(name: str, lengths: tuple[int, ...], thresholds: tuple[float, ...]) -> Groups:
    if list(lengths) != sorted(set(lengths), reverse=True) or any(t > 1 for t in thresholds):
        raise Unsupported(
            f"{name} has lengths {list(lengths)} by thresholds {list(thresholds)}; theirs descend, and "
            "thresholds are at most 1."
        )
    return lengths, thresholds
