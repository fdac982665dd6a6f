"""The file of a screen: one JSON line for what it belongs to, one for each candidate's figure on each window.

    {"fewbits_screen": 1, "text": "...", "windows": 40, "base": "...", "model": {...}, ...}
    {"candidate": "9a3f...", "window": 0, "nll": 512.25, "tokens": 255}
    {"candidate": "9a3f...", "steps": 1056768, "macs": 33554432}

A screen that was stopped goes on where it was: what stands here is not computed again. The numbers are whole
double-precision values, so everything that follows from them follows again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.inference.evaluate import TextWindows
from fewbits.inference.json_lines import append_line, drop_last_line, parsed_line
from fewbits.recipes.stochastic_config import StochasticConfig, config_to_plain

VERSION = 1


def config_identity(config: StochasticConfig) -> str:
    """A name that two configurations share if and only if they say the same; provenance aside."""
    plain = config_to_plain(config)
    plain.pop("calibration")
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:24]


def text_facts(text: TextWindows) -> dict[str, Any]:
    """What names a text and its windows."""
    content = hashlib.sha256(text.ids.numpy().tobytes()).hexdigest()[:24]
    cut = {"window": text.window, "stride": text.stride, "bos": text.bos}
    return {"text": content, "windows": len(text.windows), **cut}


class Board:
    """Figures by candidate and window, kept in a file as they come.

    Attributes:
        nlls: by candidate and window, the summed negative log-likelihood.
        steps: by candidate, the stream steps of its stochastic products in the first round, and their number.
    """

    def __init__(self, path: Path | str | None, facts: Mapping[str, Any]) -> None:
        """Begin a file, or go on with one.

        Args:
            path: the file; None: nothing is written.
            facts: what all of its figures depend on.

        Raises:
            BadInput: the file is something else, or was begun with other facts.
        """
        self.path = None if path is None else Path(path)
        self.nlls: dict[str, dict[int, float]] = {}
        self.steps: dict[str, tuple[int, int]] = {}
        header = {"fewbits_screen": VERSION, **facts}
        if self.path is None:
            return
        if not self.path.exists():
            append_line(self.path, header)
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        entries = [parsed_line(line) for line in lines]
        if entries and entries[-1] is None:
            drop_last_line(self.path, lines)
            entries = entries[:-1]
        if not entries:
            append_line(self.path, header)
            return
        self._check_header(entries[0], json.loads(json.dumps(header)))
        for number, entry in enumerate(entries[1:], 2):
            self._take(entry, number)

    def _check_header(self, header: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> None:
        if header is None or "fewbits_screen" not in header:
            raise BadInput(f"{self.path} is no file of a screen; name another file.")
        other = [key for key in {**header, **expected} if header.get(key) != expected.get(key)]
        if other:
            said = ", ".join(f"{key} {header.get(key)!r}, not {expected.get(key)!r}" for key in other)
            raise BadInput(
                f"{self.path} was begun with another {other[0]} ({said}); go on with the same, or name "
                "another file."
            )

    def _take(self, entry: Mapping[str, Any] | None, number: int) -> None:
        if entry is None or "candidate" not in entry:
            raise BadInput(f"{self.path}, line {number}, is no line of a screen; name another file.")
        if "steps" in entry:
            self.steps[entry["candidate"]] = int(entry["steps"]), int(entry["macs"])
        else:
            self.nlls.setdefault(entry["candidate"], {})[int(entry["window"])] = float(entry["nll"])

    def note_nll(self, candidate: str, window: int, nll: float, tokens: int) -> None:
        """Keep a figure."""
        self.nlls.setdefault(candidate, {})[window] = nll
        append_line(self.path, {"candidate": candidate, "window": window, "nll": nll, "tokens": tokens})

    def note_steps(self, candidate: str, steps: int, macs: int) -> None:
        """Keep the stream steps of a candidate's stochastic products, and the number of these products."""
        self.steps[candidate] = steps, macs
        append_line(self.path, {"candidate": candidate, "steps": steps, "macs": macs})
