"""Which sequences each rank takes in each pass, so that a step's batch is the same on any number of ranks.

The configuration gives the global batch of an optimizer step: ``batch_size * gradient_accumulation``
sequences. The order of an epoch is cut into such steps, and each step into pieces of one forward pass: of
``batch_size`` where the passes can be dealt out evenly, smaller otherwise. Piece k goes to rank k modulo the
number of ranks, so one rank takes all of them in order, and eight ranks take eight at once.

At an epoch's end pieces may be fewer than ranks. Every rank must make the same number of passes, for they
meet in collectives, so a rank without a piece takes a sequence of which no token is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from fewbits.errors import BadInput


class EpochSampler(Sampler[int]):
    """A new order in each epoch, which depends on the seed and the epoch only: a resumed run repeats it."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self.epoch)

    def order(self, epoch: int) -> list[int]:
        """The order of one epoch."""
        order: list[int] = np.random.default_rng([self.seed, 3, epoch]).permutation(self.size).tolist()
        return order

    def set_epoch(self, epoch: int) -> None:
        """Chosen by the Trainer before each epoch."""
        self.epoch = epoch


class StepBatches(Sampler[list[int]]):
    """The passes of one rank in an epoch, as lists of sequences; ``~i``: sequence i, untrained.

    Attributes:
        passes: forward passes of each rank in a full step.
        piece: sequences of a full pass.
        num_steps: optimizer steps of an epoch.
    """

    def __init__(
        self, order: EpochSampler, *, per_step: int, batch_size: int, rank: int = 0, size: int = 1
    ) -> None:
        """Deal the steps of an order out.

        Args:
            order: of the sequences, for each epoch.
            per_step: sequences of an optimizer step, on all ranks together.
            batch_size: the most sequences of one pass.
            rank: of those that take different data, the number of this one.
            size: how many there are of those.
        """
        self.order, self.rank, self.size = order, rank, size
        self.per_step = per_step
        self.passes = passes_of(per_step, batch_size, size)
        self.piece = math.ceil(per_step / (size * self.passes))
        self.num_steps = math.ceil(len(order) / self.per_step)
        self._drawn: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        last = len(self.order) - (self.num_steps - 1) * self.per_step
        return (self.num_steps - 1) * self.passes + self._passes_of(last)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.num_steps):
            sequences = self.of_step(step)
            for number in range(self._passes_of(len(sequences))):
                start = (number * self.size + self.rank) * self.piece
                yield sequences[start : start + self.piece] or [~sequences[0]]

    def of_step(self, step: int) -> list[int]:
        """All ranks' sequences in an optimizer step of the epoch that is set."""
        if self._drawn[0] != self.order.epoch:
            self._drawn = self.order.epoch, self.order.order(self.order.epoch)
        return self._drawn[1][step * self.per_step : (step + 1) * self.per_step]

    def seed_of(self, step: int, number: int) -> int:
        """For the random numbers of this rank's pass: the same wherever its piece of the data is computed."""
        piece = number * self.size + self.rank
        state = np.random.SeedSequence([self.order.seed, 4, step, piece]).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))

    def __str__(self) -> str:
        """How a step is shared."""
        return f"{self.size} x {self.passes} passes of {self.piece} sequences a step"

    def _passes_of(self, num_sequences: int) -> int:
        return math.ceil(math.ceil(num_sequences / self.piece) / self.size)


def passes_of(per_step: int, batch_size: int, size: int) -> int:
    """Forward passes that each of so many ranks makes in a step.

    Raises:
        BadInput: a step has fewer sequences than there are ranks.
    """
    if per_step < size:
        raise BadInput(
            f"one step has {per_step} sequences (batch_size x gradient_accumulation), too few for {size}"
            " ranks with different data; raise one of the two, or start fewer processes."
        )
    return math.ceil(per_step / (size * batch_size))
