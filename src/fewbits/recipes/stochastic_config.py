"""How a model runs under stochastic computing, layer by layer: one value, one YAML or JSON file.

    fewbits_stochastic: 1
    model: {model_type: llama, num_hidden_layers: 6, hidden_size: 192}
    options: {halve_bipolar_stoc_len: true, chunk_d: 128, n_masks: 64, stoc_len: 32}
    linears:
      model.layers.5.*: {runs: int8}
      "*.mlp.down_proj": {lengths: [[64, 48, 32, 32]], protected: [17]}
      "*": {lengths: 32}
    attention: {"*": {scores: 64, values: 64}}

Names are globs over full names, and the first that matches decides; a linear that none matches takes the
options as they are, an attention that none matches stays exact. ``options`` are the fields of `Stochastic`
that differ from `STOCHASTIC`. Pure data: what fits a model is checked by
`fewbits.models.stochastic.in_model`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.recipes.plain_files import read_plain, write_plain

VERSION = 1
RUNS = ("stochastic", "int8", "exact")
CLASSIFY = ("row", "chunk", "call")
Lengths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LinearSetting:
    """How one linear runs.

    Attributes:
        runs: "stochastic", "int8" (the same codes, multiplied as integers) or "exact".
        bits: of the codes where it runs "int8", from 2 to 8; None: the options' sc_prec.
        lengths: stream lengths by (group of input rows, chunk of the inner dimension); either axis may have
            one entry for all. None: the options'.
        thresholds: descending; an input row belongs to the group whose number is how many of these exceed
            its largest magnitude (after smoothing). One fewer than there are groups.
        classify: whether that magnitude is of the whole "row" or of each "chunk" of it; or, with "call", what
            is compared is where the row's magnitude (before smoothing) lies between the least, 0, and the
            greatest, 1, of all rows of the call.
        smooth_scales: one per input channel; None: ones.
        protected: input channels whose products are exact.
    """

    runs: str = "stochastic"
    bits: int | None = None
    lengths: Lengths | None = None
    thresholds: tuple[float, ...] = ()
    classify: str = "row"
    smooth_scales: tuple[float, ...] | None = None
    protected: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, choices in (("runs", self.runs, RUNS), ("classify", self.classify, CLASSIFY)):
            if value not in choices:
                raise BadInput(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}.")
        groups = 1 if self.lengths is None else len(self.lengths)
        if self.lengths is not None and len({len(row) for row in self.lengths}) != 1:
            raise BadInput(
                "lengths has rows of different sizes; give each group of rows every chunk's length."
            )
        if len(self.thresholds) != groups - 1:
            raise BadInput(
                f"{groups} groups of rows need {groups - 1} thresholds, not {len(self.thresholds)}; give one "
                "between each two groups."
            )
        _check_thresholds("thresholds", self.thresholds, by_place=self.classify == "call")
        if self.bits is not None and self.runs != "int8":
            raise BadInput(
                f"bits={self.bits} are those of whole numbers; leave them out, or let it run int8."
            )
        _check_bits("bits", self.bits)
        if self.runs != "stochastic" and self.lengths is not None:
            raise BadInput(f"a linear that runs {self.runs} has no streams; leave its lengths out.")
        if self.runs == "exact" and (self.smooth_scales or self.protected):
            raise BadInput("a linear that runs exact has no smooth_scales or protected; leave them out.")


@dataclass(frozen=True, kw_only=True)
class AttentionSetting:
    """Stream lengths of the two products of one layer's attention; None: that product stays exact.

    Attributes:
        scores: of queries times keys; or several, by group of rows.
        values: of weights times values; the same.
        scores_thresholds: descending, one fewer than lengths: a row's group is how many of them exceed where
            its largest magnitude lies between the least, 0, and the greatest, 1, of all heads' rows.
        values_thresholds: the same of the weights' rows.
        scores_bits: codes of so many bits, 2 to 8, multiplied as integers in place of streams.
        values_bits: the same.
        chunk_d: inner dimensions that are quantised and counted together in streams, 0 for all; None: the
            options'.
    """

    scores: int | tuple[int, ...] | None = None
    values: int | tuple[int, ...] | None = None
    scores_thresholds: tuple[float, ...] = ()
    values_thresholds: tuple[float, ...] = ()
    scores_bits: int | None = None
    values_bits: int | None = None
    chunk_d: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_d is not None and self.chunk_d < 0:
            raise BadInput(f"chunk_d={self.chunk_d} is refused; give 0 for no chunks, or their size.")
        for name in ("scores", "values"):
            lengths, bits = getattr(self, name), getattr(self, f"{name}_bits")
            thresholds = getattr(self, f"{name}_thresholds")
            groups = len(lengths) if isinstance(lengths, tuple) else 1
            if len(thresholds) != groups - 1:
                raise BadInput(
                    f"{name} of {groups} groups of rows need {groups - 1} {name}_thresholds, not "
                    f"{len(thresholds)}; give one between each two groups."
                )
            _check_thresholds(f"{name}_thresholds", thresholds, by_place=True)
            _check_bits(f"{name}_bits", bits)
            if bits is not None and lengths is not None:
                raise BadInput(f"{name} has stream lengths and {name}_bits; give one of them.")

    def lengths(self, op: str) -> tuple[int, ...]:
        """The stream lengths of "scores" or "values", by group; empty where it has no streams."""
        value = getattr(self, op)
        return () if value is None else value if isinstance(value, tuple) else (value,)

    def is_exact(self, op: str) -> bool:
        """Whether "scores" or "values" is computed exactly."""
        return getattr(self, op) is None and getattr(self, f"{op}_bits") is None


@dataclass(frozen=True, kw_only=True)
class StochasticConfig:
    """How a model runs under stochastic computing.

    Attributes:
        options: of every product; ``stoc_len`` is the length where nothing else is said.
        linears: (glob over the full name, setting) pairs; the first that matches decides.
        attention: (glob over the full name of an attention module, setting) pairs.
        model: fields of the model's config.json that this was made for; what is named must agree.
        calibration: where the numbers come from; not read by anything.
    """

    options: Stochastic = STOCHASTIC
    linears: tuple[tuple[str, LinearSetting], ...] = ()
    attention: tuple[tuple[str, AttentionSetting], ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_by_call(self) -> bool:
        """Whether lengths of rows depend on the other rows of their call, so on the windows of a batch."""
        linears = any(s.classify == "call" and s.thresholds for _, s in self.linears)
        return linears or any(s.scores_thresholds or s.values_thresholds for _, s in self.attention)

    def linear(self, name: str) -> LinearSetting:
        """The setting of the linear with this full name."""
        return next((s for pattern, s in self.linears if fnmatchcase(name, pattern)), LinearSetting())

    def attention_of(self, name: str) -> AttentionSetting:
        """The setting of the attention module with this full name."""
        return next((s for pattern, s in self.attention if fnmatchcase(name, pattern)), AttentionSetting())


def config_to_plain(config: StochasticConfig) -> dict[str, Any]:
    """The configuration as plain data, without what has its default."""
    return {
        "fewbits_stochastic": VERSION,
        "model": dict(config.model),
        "options": _changed(config.options, STOCHASTIC),
        "linears": _by_pattern(config.linears, LinearSetting()),
        "attention": _by_pattern(config.attention, AttentionSetting()),
        "calibration": dict(config.calibration),
    }


def _is_of_bundle(plain: Any) -> bool:
    """Whether a file's value is a wrapper, a table or a schedule of scmp_llm."""
    fields = {"threshold_table_path", "operator_defaults", "stoc_len_levels", "schedule"}
    return isinstance(plain, Mapping) and not fields.isdisjoint(plain)


def config_from_plain(plain: Any) -> StochasticConfig:
    """The inverse of `config_to_plain`.

    Raises:
        BadInput: an unknown field or a value that cannot be, with the place where it stands.
    """
    if not isinstance(plain, Mapping) or "fewbits_stochastic" not in plain:
        raise BadInput(
            "this is no stochastic configuration: it lacks the field fewbits_stochastic; "
            + (
                "it is scmp_llm's: convert the wrapper with fewbits sc bundle."
                if _is_of_bundle(plain)
                else "write one with fewbits sc calibrate."
            )
        )
    if plain["fewbits_stochastic"] != VERSION:
        raise BadInput(
            f"the stochastic configuration has version {plain['fewbits_stochastic']!r} and this fewbits "
            f"reads {VERSION}; install the fewbits that wrote it."
        )
    fields = ["fewbits_stochastic", *(f.name for f in dataclasses.fields(StochasticConfig))]
    _check_known("the configuration", plain, fields)
    parts = {name: _mapping(name, plain.get(name) or {}) for name in fields[1:]}
    return StochasticConfig(
        options=_make("options", parts["options"], STOCHASTIC),
        linears=tuple(
            (name, _make(f"linears, {name}", value, LinearSetting()))
            for name, value in parts["linears"].items()
        ),
        attention=tuple(
            (name, _make(f"attention, {name}", value, AttentionSetting()))
            for name, value in parts["attention"].items()
        ),
        model=parts["model"],
        calibration=parts["calibration"],
    )


def read_config(path: Path | str) -> StochasticConfig:
    """Read a configuration from a .yaml, .yml or .json file.

    Raises:
        BadInput: not YAML or JSON, or not a configuration.
    """
    return read_plain(Path(path), config_from_plain)


def write_config(config: StochasticConfig, path: Path | str) -> None:
    """Write a configuration as YAML, or as JSON where the name ends so."""
    write_plain(Path(path), config_to_plain(config), flow=None)


def _by_pattern(pairs: Sequence[tuple[str, Any]], default: Any) -> dict[str, Any]:
    """By pattern, in order; where one stands twice the first decides, as in the configuration itself."""
    settings: dict[str, Any] = {}
    for pattern, setting in pairs:
        settings.setdefault(pattern, _changed(setting, default))
    return settings


def _changed(value: Any, default: Any) -> dict[str, Any]:
    pairs = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: _plain(v) for name, v in pairs.items() if v != getattr(default, name)}


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _make(where: str, plain: Any, default: Any) -> Any:
    """``default`` with the fields that ``plain`` names; errors say where they are."""
    plain = _mapping(where, plain)
    _check_known(where, plain, [f.name for f in dataclasses.fields(default)])
    try:
        return dataclasses.replace(default, **{name: _value(name, v) for name, v in plain.items()})
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error


def _value(name: str, value: Any) -> Any:
    if name == "lengths" and value is not None:
        rows = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        rows = rows if rows and isinstance(rows[0], Sequence) else [rows]
        return tuple(tuple(_whole(name, v) for v in row) for row in rows)
    if name in ("scores", "values") and value is not None:
        several = isinstance(value, Sequence) and not isinstance(value, str)
        return tuple(_whole(name, v) for v in value) if several else _whole(name, value)
    if (name.endswith("bits") or name == "chunk_d") and value is not None:
        return _whole(name, value)
    if name == "protected":
        return tuple(_whole(name, v) for v in _list(name, value))
    if (name == "smooth_scales" or name.endswith("thresholds")) and value is not None:
        return tuple(_number(name, v) for v in _list(name, value))
    return tuple(value) if isinstance(value, list) else value


def _check_thresholds(name: str, thresholds: tuple[float, ...], *, by_place: bool) -> None:
    """``by_place``: compared with a row's place among those of its call, from 0 to 1."""
    if list(thresholds) != sorted(thresholds, reverse=True):
        raise BadInput(f"{name} {list(thresholds)} are not descending; sort them.")
    for before, after in itertools.pairwise(thresholds):
        if before == after:
            raise BadInput(
                f"{name} hold {after:g} twice, so the group of rows between is empty; leave out one of "
                "them, and that group's lengths."
            )
    if thresholds and not (math.isfinite(thresholds[0]) and thresholds[-1] > 0):
        wrong = thresholds[-1] if math.isfinite(thresholds[0]) else thresholds[0]
        raise BadInput(
            f"{name} hold {wrong:g}, beyond which no magnitude lies, so a group of rows is empty; give "
            "finite numbers above 0."
        )
    if by_place and thresholds and thresholds[0] > 1:
        raise BadInput(
            f"{name} hold {thresholds[0]:g}, and a row's place among those of its call is from 0 to 1, so a "
            "group of rows is empty; give numbers up to 1, or classify by row."
        )


def _check_bits(name: str, bits: int | None) -> None:
    if bits is not None and not 2 <= bits <= 8:
        raise BadInput(f"{name}={bits} is out of range; choose from 2 to 8.")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadInput(f"{name} must be a list, not {value!r}.")
    return list(value)


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadInput(f"{name} holds {value!r}; give whole numbers.")
    return value


def _as_number(value: Any) -> str:
    """What to write in the place of a value: YAML takes 1e3 for a text, and nothing in it says so."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "give numbers"
    if "e" not in str(value).lower() or not math.isfinite(number):
        return "give numbers, without quotes"
    digits = repr(number)
    return f"YAML reads that as a text, so write {digits if '.' in digits else digits.replace('e', '.0e')}"


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise BadInput(f"{name} holds {value!r}; {_as_number(value)}.")
    return float(value)


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} must be a mapping, not {value!r}.")
    return {str(k): v for k, v in value.items()}


def _check_known(where: str, plain: Mapping[str, Any], fields: list[str]) -> None:
    unknown = sorted(set(map(str, plain)) - set(fields))
    if unknown:
        raise BadInput(f"{where}: unknown field {', '.join(unknown)}; known: {', '.join(fields)}.")
