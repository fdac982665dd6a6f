"""Where rows come from: a file, a folder, a data set of the hub, or several of these with weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput, Unsupported
from fewbits.training.config import TrainConfig
from fewbits.training.data.rows import BadRows, Row, read_rows

EVAL_SPLITS = ("validation", "test", "eval", "train")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place of rows, with what holds for it alone.

    Attributes:
        path: a file, a folder that ``datasets`` saved, or the name of a data set on the hub.
        name: which configuration of that data set; None: its only one.
        split: which split; None: by the role that the rows have in the run. The hub's own words do, as in
            "train[:10%]".
        weight: rows that an epoch takes from here, as a multiple of those that there are.
        fields: columns of other names, beside the run's own ``fields``.
        format: what a row is; None: as the run says.
    """

    path: str
    name: str | None = None
    split: str | None = None
    weight: float = 1.0
    fields: Mapping[str, str] = field(default_factory=dict)
    format: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether there is such a file or folder here."""
        return Path(self.path).exists()

    @property
    def folder(self) -> Path:
        """Where files that its rows name are looked for first; of the hub, the working directory."""
        path = Path(self.path)
        if not path.exists():
            return Path()
        return path if path.is_dir() else path.parent

    def __str__(self) -> str:
        more = [part for part in (self.name, self.split) if part]
        return ":".join([self.path, *more])

    def settings(self, config: TrainConfig) -> TrainConfig:
        """The run's settings as they hold for these rows."""
        own = {**config.fields, **self.fields}
        return replace(config, fields=own, format=self.format or config.format)


def sources_of(value: Any, key: str = "train_data") -> list[Source]:
    """The places that a setting names: a text, or a list of texts and mappings.

    Raises:
        BadInput: an entry is neither, has an unknown key, or a weight that is no positive number.
    """
    entries = [value] if isinstance(value, (str, Path, Source)) else list(value)
    if not entries:
        raise BadInput(f"{key} is an empty list; name at least one file or data set.")
    return [_source(entry, key) for entry in entries]


def _source(entry: Any, key: str) -> Source:
    if isinstance(entry, Source):
        return entry
    if isinstance(entry, (str, Path)):
        return Source(path=str(entry))
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise BadInput(f"{key} has the entry {entry!r}; write a path, or a mapping with a path and a weight.")
    keys = [item.name for item in dataclasses.fields(Source)]
    for name in entry:
        if name not in keys:
            raise BadInput(f"{key} has an entry with the key {name!r}; the keys are {', '.join(keys)}.")
    source = Source(**{name: value for name, value in entry.items() if value is not None})
    weight: Any = source.weight
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < 1000:
        raise BadInput(f"{key} has {source.path} with the weight {weight!r}; it must be a number above 0.")
    if not isinstance(source.fields, Mapping):
        raise BadInput(f"{key} has {source.path} with fields that are no mapping of names to columns.")
    return source


def check_sources(config: TrainConfig) -> None:
    """Refuse files that are not there, before anything is loaded; names of the hub are asked for later.

    Raises:
        BadInput: there is no such file, and the name is none that a data set of the hub could have.
    """
    for key in ("train_data", "eval_data"):
        value = getattr(config, key)
        for source in sources_of(value, key) if value is not None else ():
            looks_remote = _HUB_NAME.fullmatch(source.path) and not source.path.endswith(_FILES)
            if not source.is_local and not looks_remote:
                raise BadInput(f"there is no data file {source.path}; check the path.")


def read_source(
    source: Source, bad: BadRows, *, splits: Sequence[str] = ("train",), stream: bool = False
) -> Iterator[Row]:
    """All rows of one place, in order.

    Args:
        source: the place.
        bad: what becomes of rows that cannot be read.
        splits: names to look for where the source names none; the first that there is.
        stream: take rows of the hub as they come, without keeping the data set on the disk.

    Raises:
        BadInput: there is neither such a file nor such a data set, or it has no such split.
        Unsupported: the package `datasets` is missing.
    """
    names = (source.split,) if source.split else tuple(splits)
    if source.is_local:
        if source.name is not None:
            raise BadInput(
                f"{source.path} is here, and has no configuration {source.name!r}; leave name out."
            )
        if source.split and Path(source.path).is_file():
            raise BadInput(f"{source.path} is a file, which has no split {source.split!r}; leave split out.")
        yield from read_rows(source.path, bad, splits=names)
        return
    for number, values in enumerate(_hub_rows(source, names, stream), 1):
        yield Row(number, dict(values))


def _hub_rows(source: Source, splits: tuple[str, ...], stream: bool) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"there is no data file {source.path}, and a data set of the hub needs datasets; install it with"
            " pip install 'fewbits[train]'."
        ) from error
    errors = (OSError, ValueError, RuntimeError, LookupError)
    try:
        if source.split:
            return datasets.load_dataset(source.path, source.name, split=source.split, streaming=stream)
        every = datasets.load_dataset(source.path, source.name, streaming=stream)
    except errors as error:
        raise BadInput(_no_data_set(source, error)) from error
    split = next((name for name in splits if name in every), None)
    if split is None:
        raise BadInput(
            f"{source.path} has the splits {', '.join(every)}; name one, as in {{path: {source.path}, split:"
            f" {next(iter(every), 'train')}}}."
        )
    return every[split]


def _no_data_set(source: Source, error: Exception) -> str:
    import datasets

    text = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
    if datasets.config.HF_HUB_OFFLINE:
        return (
            f"there is no data file {source.path}, and the hub is not asked for a data set of that name, for"
            " HF_HUB_OFFLINE is set; check the path, or unset it."
        )
    return (
        f"there is no data file {source.path}, and no data set of that name could be had from the hub"
        f" ({text}); check the path, the name, or the network."
    )
