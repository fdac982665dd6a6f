"""Rows of data files: JSONL, JSON, CSV, Parquet, plain text, and folders saved by ``datasets``."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput, Unsupported


@dataclass(frozen=True)
class Row:
    """One row: where it stands (a line, or a row counted from 1) and its columns."""

    number: int
    values: dict[str, Any]


@dataclass
class BadRows:
    """What to do with a row that cannot be used: stop with a sentence, or count it and go on."""

    skip: bool = False
    messages: list[str] = field(default_factory=list)

    def refuse(self, message: str, cause: Exception | None = None) -> None:
        """Raise the sentence, or remember it."""
        if not self.skip:
            raise BadInput(
                f"{message}; correct it, or count and skip such rows with skip_bad_rows."
            ) from cause
        self.messages.append(message)

    @property
    def count(self) -> int:
        """How many rows were skipped."""
        return len(self.messages)


def read_rows(path: str | Path, bad: BadRows, *, splits: tuple[str, ...] = ("train",)) -> Iterator[Row]:
    """All rows, in order; ``splits``: names to look for in a saved ``DatasetDict``, the first wins."""
    path = Path(path)
    if path.is_dir():
        yield from _read_folder(path, splits)
        return
    if not path.is_file():
        raise BadInput(f"there is no data file {path}; check the path.")
    readers = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
        ".txt": _read_text,
        ".md": _read_text,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise BadInput(
            f"the kind of {path} is not known; its name must end with one of {', '.join(readers)}."
        )
    yield from reader(path, bad)


def _read_jsonl(path: Path, bad: BadRows) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number in itertools.count(1):
            line: bytes | str = lines.readline()
            if not line:
                return
            if line.isspace():
                continue
            try:
                # One name for bytes, text and nothing: a row of 100 MB lies in memory twice, no more.
                line = str(line, "utf-8-sig" if number == 1 else "utf-8")  # type: ignore[arg-type]
                values = json.loads(line)
                line = ""
            except (ValueError, RecursionError) as error:  # the latter: nested too deeply
                bad.refuse(f"{path}, line {number} is not valid JSON ({_short(error)})", error)
                continue
            if isinstance(values, dict):
                yield Row(number, values)
            else:
                bad.refuse(f"{path}, line {number} is not a JSON object with named columns")


def _read_json(path: Path, bad: BadRows) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if len(_first_lines(path)) > 1 and _is_object(_first_lines(path)[0]):
            yield from _read_jsonl(path, bad)  # JSON lines under the name .json
            return
        line = getattr(error, "lineno", "?")
        raise BadInput(
            f"{path}, line {line} is not valid JSON ({_short(error)}); correct the file."
        ) from error
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else [rows]
    for number, values in enumerate(rows, 1):
        if isinstance(values, dict):
            yield Row(number, values)
        else:
            bad.refuse(f"{path}, row {number} is not a JSON object with named columns")


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let cells have more than 131,072 characters; the csv module's one limit is put back."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_csv(path: Path, bad: BadRows) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        while True:
            try:
                with _long_cells():
                    values = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                bad.refuse(f"{path}, line {reader.line_num} is not valid CSV ({_short(error)})", error)
                return
            if values is None:
                return
            if None in values or None in values.values():
                bad.refuse(f"{path}, line {reader.line_num} has not as many cells as the header has columns")
                continue
            yield Row(reader.line_num, values)


def _read_parquet(path: Path, bad: BadRows) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise Unsupported(
            "reading Parquet needs pyarrow; install it with pip install 'fewbits[train]'."
        ) from error
    try:
        file = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise BadInput(f"{path} is not a readable Parquet file ({_short(error)}); write it again.") from error
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        for values in batch.to_pylist():
            number += 1
            yield Row(number, values)


def _read_text(path: Path, bad: BadRows) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text ({_short(error)}); convert it to UTF-8.") from error
    if text.strip():
        yield Row(1, {"document": text})


def _read_folder(path: Path, splits: tuple[str, ...]) -> Iterator[Row]:
    try:
        from datasets import DatasetDict, load_from_disk
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"reading the folder {path} needs datasets; install it with pip install 'fewbits[train]'."
        ) from error
    try:
        data = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(
            f"the folder {path} was not saved by datasets (save_to_disk); give a file, or save it so."
        ) from error
    if isinstance(data, DatasetDict):
        names = [name for name in splits if name in data]
        if not names:
            raise BadInput(
                f"{path} has the splits {', '.join(data)}; one must be named {' or '.join(splits)}."
            )
        data = data[names[0]]
    for number, values in enumerate(data, 1):
        yield Row(number, values)


def _first_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig") as lines:
        return [line for _, line in zip(range(2), lines, strict=False)]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _short(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
