"""Perplexity of a model under many stochastic settings, written down so that a killed run goes on.

A `Ledger` is a JSONL file. Each setting of each text has an identity, made from everything that its figure
depends on; a line holds the figures of one batch of windows, and a last one the result. Reading the file
again finds what is done. Windows are added up by `math.fsum`, so a result has the same bits in whatever
order, and by however many processes, its windows came: each process takes a `Share` of the batches and writes
a file of its own beside the ledger's, and whoever finds all of them done has the result.

While a setting is measured every product that it makes stochastic is counted (`stochastic_receipt`): one that
was computed elsewhere is an error, not a figure.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.inference.evaluate import TextWindows, Window, evaluating, window_nlls
from fewbits.inference.json_lines import append_line, drop_last_line, parsed_line
from fewbits.inference.stochastic.receipt import products_counted
from fewbits.models.loading.in_memory import apply_stochastic, convert, restore
from fewbits.recipes import get_recipe
from fewbits.recipes.stochastic_config import StochasticConfig, config_to_plain

if TYPE_CHECKING:
    from torch import nn


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


@dataclass(frozen=True)
class Share:
    """What one of several processes takes: every ``of``-th batch of windows, from number ``number`` on.

    Attributes:
        number: 1 to ``of``.
        of: processes in all.
    """

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise BadInput(f"share {self.number} of {self.of} is refused; give 1 of 4, for one.")

    def takes(self, batch: int) -> bool:
        """Whether a batch is this process's."""
        return batch % self.of == self.number - 1


@dataclass
class _Progress:
    batches: dict[int, list[float]] = field(default_factory=dict)
    tokens: int = 0
    result: dict[str, Any] | None = None


class Ledger:
    """The file of an evaluation; see the module's text.

    Attributes:
        path: where this process writes, or None.
        share: what it takes.
    """

    def __init__(self, path: Path | str | None, share: Share | None = None) -> None:
        """Read what is there.

        Args:
            path: the ledger; None: nothing is kept.
            share: of several processes; each then writes ``path.1-of-4``, for one.

        Raises:
            BadInput: the file is something else, or a share without a file.
        """
        self.share = share or Share()
        if path is None and self.share.of > 1:
            raise BadInput("several processes need a file to meet in; name one.")
        self._main = None if path is None else Path(path)
        named = f".{self.share.number}-of-{self.share.of}" if self.share.of > 1 else ""
        self.path = None if self._main is None else self._main.with_name(self._main.name + named)
        self.found: dict[str, _Progress] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what is there by now, that of other processes included."""
        if self._main is None:
            return
        others = sorted(self._main.parent.glob(f"{glob.escape(self._main.name)}.*-of-*"))
        for file in dict.fromkeys((self._main, *others)):
            if file.exists():
                self._read(file)

    def _read(self, file: Path) -> None:
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            entry = parsed_line(line, needs=("id", "tokens"))
            if entry is not None:
                self._take(entry)
            elif number < len(lines):
                raise BadInput(f"{file}, line {number}, is no line of an evaluation; name another file.")
            elif file == self.path:  # cut short by a kill; another process's may be a line in the making
                drop_last_line(file, lines)

    def _take(self, entry: dict[str, Any]) -> None:
        state = self.found.setdefault(entry["id"], _Progress())
        if "result" in entry:
            state.result, state.tokens = entry["result"], entry["tokens"]
        elif "batch" in entry:  # not so in files of older versions, whose results still count
            state.batches[entry["batch"]] = entry["nlls"]

    def state(self, identity: str) -> _Progress:
        """How far a setting is."""
        return self.found.setdefault(identity, _Progress())

    def note_batch(self, identity: str, batch: int, nlls: list[float], tokens: int) -> None:
        """Keep the figures of a batch of windows."""
        self.state(identity).batches[batch] = nlls
        append_line(self.path, {"id": identity, "batch": batch, "nlls": nlls, "tokens": tokens})

    def note_result(self, identity: str, result: dict[str, Any], tokens: int) -> None:
        """Keep a setting's result."""
        state = self.state(identity)
        state.result, state.tokens = result, tokens
        append_line(self.path, {"id": identity, "tokens": tokens, "result": result})


def identity_of(setting: EvalSetting, text: TextWindows, facts: Mapping[str, Any], batch_size: int) -> str:
    """A name that two evaluations share if and only if their figures must be equal."""
    content = hashlib.sha256(text.ids.numpy().tobytes()).hexdigest()
    what = [setting.plain(), content, text.window, text.stride, batch_size, dict(facts)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def evaluate_setting(
    model: nn.Module,
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
        ledger: where results are kept, and which share of the windows is this process's.
        facts: what else names this evaluation: the model, the text.
        batch_size: windows at once.
        progress: called as ``progress(tokens scored, tokens in all)``.

    Returns:
        The row of a table; "nll" and "perplexity" are None while other processes' windows are missing. With
        "empty_groups", where thresholds sent no row of the text to some (`Counted.empty_groups`).

    Raises:
        Unsupported: a product that was to be stochastic was computed elsewhere.
    """
    identity = identity_of(setting, text, facts, batch_size)
    state = ledger.state(identity)
    batches = [text.windows[at : at + batch_size] for at in range(0, len(text.windows), batch_size)]
    mine = [k for k in range(len(batches)) if ledger.share.takes(k) and k not in state.batches]
    empty: list[str] = []
    if state.result is None and mine:
        with under_setting(model, setting), evaluating(model), products_counted(model) as counted:
            for k in mine:
                nlls = window_nlls(model, text, batches[k])
                ledger.note_batch(identity, k, nlls, _tokens(batches[k]))
                if progress is not None:
                    progress(sum(_tokens(batches[done]) for done in state.batches), text.num_tokens)
        empty = counted.empty_groups() if len(mine) == len(batches) else []  # of the whole text
    if state.result is None and len(state.batches) < len(batches):
        ledger.refresh()
    if state.result is None and len(state.batches) == len(batches):
        nll = math.fsum(x for nlls in state.batches.values() for x in nlls) / text.num_tokens
        perplexity = math.exp(nll) if nll < 700 else None
        result = {"setting": setting.name, **facts, "nll": nll, "perplexity": perplexity}
        result |= {"empty_groups": empty} if empty else {}
        ledger.note_result(identity, result, text.num_tokens)
    if state.result is None:
        tokens = sum(_tokens(batches[k]) for k in state.batches)
        return {"setting": setting.name, **facts, "nll": None, "perplexity": None, "tokens": tokens}
    if progress is not None:
        progress(text.num_tokens, text.num_tokens)
    return {**state.result, "setting": setting.name, "tokens": state.tokens}


def _tokens(batch: list[Window]) -> int:
    return sum(w.end - w.first for w in batch)


@contextmanager
def under_setting(model: nn.Module, setting: EvalSetting) -> Iterator[None]:
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
