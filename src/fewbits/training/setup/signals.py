"""SIGTERM and SIGUSR1, by which schedulers announce an end: a checkpoint, a sentence, and a status.

While the run trains, a signal is noted, and the step under way is ended: then comes a checkpoint, and the
end. With several ranks any of them may have got it; `fewbits.training.step.bad_numbers` carries the wish to
all with the sum that they make in each step anyway, so that all stop behind the same step. Before the
training and behind it nothing is lost that a checkpoint would keep, and the process ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fewbits.errors import StoppedBySignal
from fewbits.training.ranks.processes import Ranks

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """A context in which these signals ask for the end; in a thread, or where others handle them, not.

    Attributes:
        number: of the first signal that this process got; None: none came.
        answer: who got which signal, in words, once all ranks have agreed to stop for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.number: int | None = None
        self.answer: str | None = None
        self._ranks, self._told = ranks, 0
        self._noting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def __call__(self) -> bool:
        """Whether this process was asked to stop."""
        return self.number is not None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Signals are noted here; at the end all ranks agree on whether one came, in ``answer``.

        After an error they are noted on: a launcher sends them to ranks that lost another one.
        """
        self._noting = True
        yield
        self._noting = False
        for rank, number in enumerate(self._ranks.exchange("signals", self.number)):
            if number is not None:
                who = "" if self._ranks.size == 1 else f" to rank {rank} of {self._ranks.size}"
                self.answer, self._told = f"{signal.Signals(number).name} came{who}", number
                return

    def end(self, step: int, steps: int) -> None:
        """Raise what the answer asks for.

        Raises:
            StoppedBySignal: with the step that the newest checkpoint is of, and that of the run's end.
        """
        if self.answer is not None:
            raise StoppedBySignal(
                f"{self.answer}: the checkpoint of step {step} of {steps} is written; go on with --resume.",
                self._told,
            )

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            return  # a scheduler and a launcher may both send it
        self.number = number
        name = signal.Signals(number).name
        if not self._noting:
            raise StoppedBySignal(
                f"{name} came to {self._ranks}, which was not training at that moment; all checkpoints are"
                " whole: go on with --resume.",
                number,
            )
        if self._ranks.leads:  # not by way of Python's files, into which this may have broken
            os.write(
                2, f"\n{name}: this step is ended, a checkpoint is written, then the run ends.\n".encode()
            )


__all__ = ["StopRequest"]
