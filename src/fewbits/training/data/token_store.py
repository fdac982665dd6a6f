"""Rows as tokens: the value `Example`, and rows that stand in a file on the disk instead of in memory."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fewbits.errors import BadInput
from fewbits.training.data.pictures import Picture

_TRAINED = np.uint32(1 << 31)  # beside the token's number, which has 31 bits


@dataclass(frozen=True)
class Example:
    """One row as tokens, and the images that some of them stand for, in their order."""

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]  # the first token is never trained: nothing predicts it
    row: int
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)


class TokenStore:
    """A file without a name, which goes when the process does: 4 bytes a token, 16 a row in memory.

    Of images the names stay in memory; those that came as bytes stay as bytes.
    """

    def __init__(self, folder: str | Path) -> None:
        """Make the file in ``folder``.

        Raises:
            BadInput: nothing can be written there.
        """
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise BadInput(
                f"data_on_disk is {folder}, where nothing can be written ({error.strerror}); give"
                " another folder."
            ) from error
        self._ends, self._rows = array("q", [0]), array("q")
        self._pictures: dict[int, tuple[Picture, ...]] = {}

    def append(self, example: Example) -> int:
        """Write one row; its number here."""
        marked = example.input_ids.astype(np.uint32) | np.where(example.trained, _TRAINED, np.uint32(0))
        self._file.write(marked.tobytes())
        self._ends.append(self._ends[-1] + len(example))
        self._rows.append(example.row)
        if example.pictures:
            self._pictures[len(self._rows) - 1] = example.pictures
        return len(self._rows) - 1

    def read(self, number: int) -> Example:
        """The row of that number."""
        self._file.flush()
        first, end = self._ends[number], self._ends[number + 1]
        data = os.pread(self._file.fileno(), 4 * (end - first), 4 * first)
        marked = np.frombuffer(data, np.uint32)
        ids = (marked & ~_TRAINED).astype(np.int32)
        return Example(ids, (marked & _TRAINED) != 0, self._rows[number], self._pictures.get(number, ()))


class StoredExamples(Sequence[Example]):
    """Rows of a `TokenStore`, in any order and any number of times; each is read when it is asked for."""

    def __init__(self, store: TokenStore, numbers: Iterable[int] = ()) -> None:
        self.store = store
        self.numbers = array("q", numbers)

    def append(self, example: Example) -> None:
        """Write one more row."""
        self.numbers.append(self.store.append(example))

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> StoredExamples: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return StoredExamples(self.store, self.numbers[index])
        return self.store.read(self.numbers[index])


Examples = list[Example] | StoredExamples


def subset(examples: Examples, indices: Sequence[int]) -> Examples:
    """The rows at these places, in their order; those on the disk stay there."""
    if isinstance(examples, StoredExamples):
        return StoredExamples(examples.store, (examples.numbers[i] for i in indices))
    return [examples[i] for i in indices]


def joined(parts: Sequence[Examples]) -> Examples:
    """One after the other; all in memory, or all in the same store."""
    first = parts[0]
    if isinstance(first, StoredExamples):
        stored = [part for part in parts if isinstance(part, StoredExamples)]
        return StoredExamples(first.store, (number for part in stored for number in part.numbers))
    return [example for part in parts for example in part]
