"""One vocabulary of refusal: each message is one sentence with the fact, the need and the way out."""

from __future__ import annotations


class FewbitsError(Exception):
    """Base of every error that fewbits raises on purpose; the command line prints it without a traceback."""


class Unsupported(FewbitsError):
    """The request is well formed, but this device, model or installation cannot do it."""


class SpecMismatch(FewbitsError):
    """Two things that must fit do not: spec and model, adapter and base, checkpoint and configuration."""


class BadInput(FewbitsError, ValueError):
    """A file, a row, an option or an argument is wrong."""


class BadCheckpoint(FewbitsError):
    """A checkpoint is missing, truncated, corrupt, or in a form that is refused (a pickle, for one)."""


class NotFinite(BadCheckpoint):
    """A weight that is to be packed, or what a model computes, is NaN or infinite."""


class TrainingStopped(FewbitsError):
    """Training stopped itself: NaN loss, all-zero gradients, a full disk."""


class PeerLost(TrainingStopped):
    """Another process of the same run was killed, has stopped, or does not answer."""


class StoppedBySignal(TrainingStopped):
    """A signal asked the run to end; what is lost is nothing before the checkpoint that the message names.

    Attributes:
        number: of the signal; a process ends with 128 and it.
    """

    def __init__(self, text: str, number: int = 15) -> None:
        super().__init__(text)
        self.number = number


class NotFused(Exception):
    """A reason, in words, why a decoder layer's own forward is taken; it never leaves the layer."""
