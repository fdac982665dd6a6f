"""Perplexity of a model under many stochastic settings, written down so that a killed run goes on.

A `Ledger` is a JSONL file. Each setting of each text has an identity, made from everything that its figure
depends on; after every batch of windows a line says how far it is, and a last one holds the result. Reading
the file again finds what is done, and where the unfinished one stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.inference.evaluate import TextWindows, batch_nll, evaluating
from fewbits.models.in_memory import apply_stochastic, convert, restore
from fewbits.recipes import get_recipe
from fewbits.recipes.stochastic_config import StochasticConfig, config_to_plain


@dataclass(frozen=True)
class EvalSetting:
    """One row of the table.

    Attributes:
        name: for readers.
        config: how the model runs; None with no recipe: as it is.
        recipe: a recipe to convert by in its place.
    """

    name: str
    config: StochasticConfig | None = None
    recipe: str | None = None

    def plain(self) -> dict[str, Any]:
        """What its figure depends on."""
        config = None if self.config is None else config_to_plain(self.config)
        if config is not None:
            config.pop("calibration")
        return {"config": config, "recipe": self.recipe}


@dataclass
class _Progress:
    windows: int = 0
    nll: float = 0.0
    tokens: int = 0
    result: dict[str, Any] | None = None


class Ledger:
    """The file of an evaluation; see the module's text."""

    def __init__(self, path: Path | str | None) -> None:
        """Read what is there.

        Raises:
            BadInput: the file is something else.
        """
        self.path = None if path is None else Path(path)
        self.found: dict[str, _Progress] = {}
        if self.path is None or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            entry = _parsed(line)
            if entry is None and number == len(lines):  # cut short by a kill
                self.path.write_text("".join(f"{x}\n" for x in lines[:-1]), encoding="utf-8")
            elif entry is None:
                raise BadInput(f"{self.path}, line {number}, is no line of an evaluation; name another file.")
            else:
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        state = self.found.setdefault(entry["id"], _Progress())
        state.windows, state.nll, state.tokens = entry["windows"], entry["nll_sum"], entry["tokens"]
        state.result = entry.get("result")

    def state(self, identity: str) -> _Progress:
        """How far a setting is."""
        return self.found.get(identity, _Progress())

    def write(self, identity: str, state: _Progress) -> None:
        """Note how far a setting is."""
        self.found[identity] = state
        if self.path is None:
            return
        entry: dict[str, Any] = {"id": identity, "windows": state.windows}
        entry |= {"nll_sum": state.nll, "tokens": state.tokens}
        if state.result is not None:
            entry["result"] = state.result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    needed = {"id", "windows", "nll_sum", "tokens"}
    return entry if isinstance(entry, dict) and needed <= set(entry) else None


def identity_of(setting: EvalSetting, text: TextWindows, facts: Mapping[str, Any], batch_size: int) -> str:
    """A name that two evaluations share if and only if their figures must be equal."""
    content = hashlib.sha256(text.ids.numpy().tobytes()).hexdigest()
    what = [setting.plain(), content, text.window, text.stride, batch_size, dict(facts)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def evaluate_setting(
    model: Any,
    text: TextWindows,
    setting: EvalSetting,
    ledger: Ledger,
    *,
    facts: Mapping[str, Any],
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Perplexity of a model under one setting; from the ledger if it is there.

    Args:
        model: in its original form, and so again afterwards.
        text: the windows.
        setting: how the model runs.
        ledger: where results are kept.
        facts: what else names this evaluation: the model, the text.
        batch_size: windows at once.
        progress: called as ``progress(tokens scored, tokens in all)``.
    """
    identity = identity_of(setting, text, facts, batch_size)
    state = ledger.state(identity)
    if state.result is None:
        with under_setting(model, setting), evaluating(model):
            _run(model, text, identity, state, ledger, batch_size=batch_size, progress=progress)
        nll = state.nll / state.tokens
        perplexity = math.exp(nll) if nll < 700 else None
        state.result = {"setting": setting.name, **facts, "nll": nll, "perplexity": perplexity}
        ledger.write(identity, state)
    if progress is not None:
        progress(text.num_tokens, text.num_tokens)
    return {**state.result, "setting": setting.name, "tokens": state.tokens}


def _run(
    model: Any,
    text: TextWindows,
    identity: str,
    state: _Progress,
    ledger: Ledger,
    *,
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    while state.windows < len(text.windows):
        batch = text.windows[state.windows : state.windows + batch_size]
        state.nll += batch_nll(model, text, batch)
        state.windows += len(batch)
        state.tokens += sum(w.end - w.first for w in batch)
        ledger.write(identity, state)
        if progress is not None:
            progress(state.tokens, text.num_tokens)


@contextmanager
def under_setting(model: Any, setting: EvalSetting) -> Iterator[None]:
    """Inside the block the model runs as the setting says; its original form before and afterwards."""
    if setting.config is not None:
        apply_stochastic(model, setting.config, keep_original=True, fuse_norms=False)
    elif setting.recipe is not None:
        convert(model, get_recipe(setting.recipe), keep_original=True, fuse_norms=False)
    try:
        yield
    finally:
        if setting.config is not None or setting.recipe is not None:
            restore(model)
