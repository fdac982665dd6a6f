"""The rows of a file as tokens, and what became of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fewbits.training.data.token_store import Examples


@dataclass
class DataReport:
    """What became of the rows of one file."""

    path: str
    format: str = ""
    rows: int = 0  # all, bad ones too
    examples: int = 0
    skipped: int = 0
    truncated: int = 0
    dropped: int = 0
    inexact: int = 0  # rows whose prompt and response were tokenised apart: the tokenizer's offsets are wrong
    tokens: int = 0
    trained_tokens: int = 0

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.rows:,} rows ({self.format}), {self.tokens:,} tokens"]
        parts.append(f"{self.trained_tokens:,} of them trained")
        for count, what in (
            (self.skipped, "bad rows skipped"),
            (self.truncated, "rows truncated"),
            (self.dropped, "rows dropped for their length"),
            (
                self.inexact,
                "rows whose prompt and response were tokenised apart (the tokenizer's offsets lag)",
            ),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        return ", ".join(parts)


@dataclass
class TokenData:
    """The examples of one file, and what became of its rows."""

    examples: Examples
    report: DataReport

    def fingerprint(self) -> str:
        """A hash of all tokens: a run is only continued on the data it began with."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            digest.update(example.input_ids.tobytes())
            digest.update(example.trained.tobytes())
            for picture in example.pictures:
                digest.update(picture.digest)
        return digest.hexdigest()
