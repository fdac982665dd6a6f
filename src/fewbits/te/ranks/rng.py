"""`CudaRNGStatesTracker`: named streams of random numbers, on a GPU and, without one, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fewbits.errors import BadInput


class CudaRNGStatesTracker:
    """Keeps several states of torch's generator and swaps one in for a block of code."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """All states by name, each (bytes,) uint8."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take over states by name.

        Each state is (bytes,) uint8, as torch's generators give it.
        """
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Raises:
            BadInput: the name or the seed is taken.
        """
        if seed in self.seeds_ or name in self.states_:
            raise BadInput(f"the stream {name!r} or its seed {seed} exists already: streams must differ.")
        self.seeds_.add(seed)
        before = _state()
        torch.manual_seed(seed)
        self.states_[name] = _state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Random numbers of a block come from this stream, which goes on where it stopped."""
        if name not in self.states_:
            raise BadInput(f"there is no stream {name!r}: begin it with add.")
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


def _state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
