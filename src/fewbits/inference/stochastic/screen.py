"""Many configurations of one model on one text, against a base: which are better, and how sure that is.

Window by window the base runs once, and what its decoder layers give is kept; a candidate computes only from
the first layer on where it differs. Every candidate sees the same windows, so differences are paired
(`fewbits.inference.paired`). After each round a candidate is given up if it is worse than the best one with
confidence: with m candidates, round k decides each pair at the level

    (1 - confidence) / (m (m - 1) / 2) / (k (k + 1)),

whose sum over all pairs and rounds is at most 1 - confidence: so, windows being independent, the best
candidate is lost with at most that probability, however often one looks. Nothing is decided before ``least``
windows.

The figures are those of whole evaluations, to the bit, and are kept in a file (`.screen_board`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.inference.evaluate import TextWindows, Window, evaluating, window_nlls
from fewbits.inference.kept_layers import KeptLayers
from fewbits.inference.paired import Interval, paired_interval
from fewbits.inference.stochastic.board import Board, config_identity, text_facts
from fewbits.inference.stochastic.trace import Trace, has_stochastic_products
from fewbits.models.stochastic.in_model import check_config, facts_of
from fewbits.models.stochastic.switch import Switched, changed_names
from fewbits.recipes.stochastic_config import StochasticConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Candidate:
    """A configuration to compare.

    Attributes:
        name: for readers.
        config: how the model runs.
    """

    name: str
    config: StochasticConfig


@dataclass(frozen=True, kw_only=True)
class Screening:
    """How to screen.

    Attributes:
        batch_size: windows of one round.
        stop: whether candidates are given up early.
        confidence: of intervals, and that the best is not given up.
        least: windows before anything is given up.
        reuse: whether what comes before a candidate's first changed layer is computed once and kept.
    """

    batch_size: int = 1
    stop: bool = True
    confidence: float = 0.95
    least: int = 4
    reuse: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.least < 2:
            raise BadInput(
                f"batch_size={self.batch_size}, least={self.least} are refused: a round has at least "
                "one window, and nothing is decided before two."
            )
        if not 0 < self.confidence < 1:
            raise BadInput(f"confidence={self.confidence:g} is refused: give a number between 0 and 1.")


@dataclass(frozen=True)
class Standing:
    """What is known of one candidate.

    Attributes:
        candidate: which.
        against_base: its negative log-likelihood minus the base's, on the windows that it saw.
        differences: the same of each of these windows, summed over its tokens.
        steps: stream steps of its stochastic products in the first round.
        macs: the number of these products.
        first_layer: the first decoder layer where it differs from the base.
        given_up: whether it was, before the text ended.
    """

    candidate: Candidate
    against_base: Interval
    differences: tuple[float, ...]
    steps: int
    macs: int
    first_layer: int
    given_up: bool

    @property
    def cycles(self) -> float:
        """Stream steps of a stochastic product, on average."""
        return self.steps / self.macs if self.macs else 0.0


@dataclass(frozen=True)
class Standings:
    """The result of a screen.

    Attributes:
        rows: the best first: those that saw all windows by their difference, then those given up.
        base_nll: of the base, nats for a token, over all windows that it saw.
        base_steps: stream steps of the base's stochastic products in the first round.
        base_macs: the number of these products.
        tokens: scored in each window.
    """

    rows: tuple[Standing, ...]
    base_nll: float
    base_steps: int
    base_macs: int
    tokens: tuple[int, ...]


def screen(
    model: nn.Module,
    text: TextWindows,
    base: StochasticConfig,
    candidates: Sequence[Candidate],
    settings: Screening | None = None,
    *,
    board: str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Standings:
    """Compare candidates with a base and with each other.

    Args:
        model: a Hugging Face model of a known family, in its original form, and so again afterwards.
        text: the windows.
        base: what the candidates are compared with.
        candidates: configurations, each different from the base and from the others.
        settings: how.
        board: a file that keeps every figure; a screen goes on where the file ends.
        facts: what else names the model: its folder, for one.
        progress: called as ``progress(windows done, windows in all)``, candidates' windows added up.

    Raises:
        BadInput: candidates that differ in nothing, or a file of another text, base or model.
        SpecMismatch: a configuration that does not fit the model.
    """
    settings = settings or Screening()
    for config in (base, *(candidate.config for candidate in candidates)):
        check_config(model, config)
    with Switched(model, base) as switched, evaluating(model):
        run = _Screen(switched, text, base, candidates, settings)
        about = {"model": facts_of(model), "dtype": str(model.dtype), **(facts or {})}
        about |= {**text_facts(text), "base": config_identity(base), "batch_size": settings.batch_size}
        run.board = Board(board, about)
        return run.all_rounds(progress)


class _Screen:
    def __init__(
        self,
        switched: Switched,
        text: TextWindows,
        base: StochasticConfig,
        candidates: Sequence[Candidate],
        settings: Screening,
    ) -> None:
        self.switched, self.text, self.base = switched, text, base
        self.candidates, self.settings = list(candidates), settings
        self.board = Board(None, {})
        self.kept = KeptLayers(switched.model)
        self.ids = [config_identity(c.config) for c in self.candidates]
        self.base_id = config_identity(base)
        self.starts = self._first_layers()
        self.live = list(range(len(self.candidates)))
        self.tokens = [w.end - w.first for w in text.windows]
        self.base_products: dict[tuple[str, str], tuple[int, int]] = {}

    def _first_layers(self) -> list[int]:
        if not self.candidates:
            raise BadInput("there are no candidates to compare; give at least one.")
        names = {(): "the base"}
        starts: list[int] = []
        for candidate in self.candidates:
            changed = changed_names(self.switched, self.base, candidate.config)
            for other in self.candidates[: len(starts)]:
                if not changed_names(self.switched, other.config, candidate.config):
                    raise BadInput(f"{_pair(other.name, candidate.name)} differ in nothing; leave one out.")
            if not changed:
                raise BadInput(f"{candidate.name} differs in nothing from {names[()]}; leave it out.")
            starts.append(min(self.kept.layer_of(name) for name in changed))
        return starts

    def all_rounds(self, progress: Callable[[int, int], None] | None) -> Standings:
        size, windows = self.settings.batch_size, self.text.windows
        if self.settings.reuse and max(self.starts) > 0:
            self.kept.check(lambda: window_nlls(self.switched.model, self.text, windows[:1]))
        done = 0
        for look, at in enumerate(range(0, len(windows), size), 1):
            batch = windows[at : at + size]
            left = (len(windows) - at) * len(self.live)
            self._round(at, batch, progress, done, done + left)
            done += len(batch) * len(self.live)
            num_windows = at + len(batch)
            if self.settings.stop and num_windows >= self.settings.least and num_windows < len(windows):
                self._give_up(num_windows, look)
        return self._standings()

    def _round(
        self,
        at: int,
        batch: list[Window],
        progress: Callable[[int, int], None] | None,
        done: int,
        total: int,
    ) -> None:
        missing = [i for i in self.live if self._lacks(self.ids[i], at, len(batch))]
        if missing or self._lacks(self.base_id, at, len(batch)):
            self.switched.to(self.base)
            starts = {self.starts[i] for i in missing} if self.settings.reuse else set[int]()
            with self.kept.record(starts):
                self._run(self.base_id, at, batch, 0)
        for number, i in enumerate(sorted(self.live, key=lambda i: self.starts[i])):
            if i in missing:
                self.switched.to(self.candidates[i].config)
                start = self.starts[i] if self.settings.reuse else 0
                with self.kept.skipping(start):
                    self._run(self.ids[i], at, batch, start)
            if progress is not None:
                progress(done + (number + 1) * len(batch), total)

    def _lacks(self, identity: str, at: int, count: int) -> bool:
        have = self.board.nlls.get(identity, {})
        return identity not in self.board.steps or any(w not in have for w in range(at, at + count))

    def _run(self, identity: str, at: int, batch: list[Window], start: int) -> None:
        model, events = self.switched.model, list[dict[str, Any]]()
        counted = identity in self.board.steps and (identity != self.base_id or bool(self.base_products))
        if not counted and not has_stochastic_products(model):
            nlls = window_nlls(model, self.text, batch)
            self._note_steps(identity, events, start)
        elif not counted:
            with Trace(model, events.append):
                nlls = window_nlls(model, self.text, batch)
            self._note_steps(identity, events, start)
        else:
            nlls = window_nlls(model, self.text, batch)
        for i, nll in enumerate(nlls):
            if at + i not in self.board.nlls.get(identity, {}):
                self.board.note_nll(identity, at + i, nll, self.tokens[at + i])

    def _note_steps(self, identity: str, events: list[dict[str, Any]], start: int) -> None:
        """From what this pass computed, and before it what the base did."""
        mine = {(e["layer"], e["op"]): (e["macs"], e["cycles"]) for e in events if e["runs"] == "stochastic"}
        if identity == self.base_id:
            self.base_products = mine
        before = {
            key: value
            for key, value in self.base_products.items()
            if self.kept.layer_of(f"{key[0]}.") < start
        }
        products = [*before.values(), *mine.values()]
        macs = sum(macs for macs, _ in products)
        if identity not in self.board.steps:
            self.board.note_steps(identity, sum(steps for _, steps in products), macs)

    def _differences(self, i: int, j: int | None = None) -> list[float]:
        """Of candidate ``i`` against ``j``, or the base, on the windows that both saw, from the first."""
        mine = self.board.nlls.get(self.ids[i], {})
        other = self.board.nlls.get(self.base_id if j is None else self.ids[j], {})
        differences: list[float] = []
        while len(differences) in mine and len(differences) in other:
            differences.append(mine[len(differences)] - other[len(differences)])
        return differences

    def _give_up(self, num_windows: int, look: int) -> None:
        m = len(self.candidates)
        if m < 2 or len(self.live) < 2:
            return
        level = (1 - self.settings.confidence) / (m * (m - 1) / 2) / (look * (look + 1))
        totals = {i: sum(self._differences(i)[:num_windows]) for i in self.live}
        best = min(self.live, key=lambda i: totals[i])
        staying = []
        for i in self.live:
            against = paired_interval(
                self._differences(i, best)[:num_windows], self.tokens[:num_windows], 1 - level
            )
            if i == best or against.low <= 0:
                staying.append(i)
        self.live = staying

    def _standings(self) -> Standings:
        rows = []
        for i, candidate in enumerate(self.candidates):
            differences = self._differences(i)
            if i in self.live:
                differences = differences[: len(self.text.windows)]
            n = len(differences)
            rows.append(
                Standing(
                    candidate,
                    paired_interval(differences, self.tokens[:n], self.settings.confidence),
                    tuple(differences),
                    *self.board.steps[self.ids[i]],
                    self.starts[i],
                    i not in self.live,
                )
            )
        rows.sort(key=lambda row: (row.given_up, -row.against_base.windows, row.against_base.mean))
        base = self.board.nlls[self.base_id]
        windows = sorted(base)
        nll = sum(base[w] for w in windows) / sum(self.tokens[w] for w in windows)
        return Standings(tuple(rows), nll, *self.board.steps[self.base_id], tuple(self.tokens))


def _pair(one: str, other: str) -> str:
    return f"{one} and {other}" if one != other else f"two candidates called {one}"
