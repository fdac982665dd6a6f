"""What fewjobs refuses, in the words of fewbits: one sentence with the fact, the need and the way out."""

from __future__ import annotations


class JobsError(Exception):
    """Base of every error that fewjobs raises on purpose; a command line prints it without a traceback."""


class BadInput(JobsError, ValueError):
    """A size, a file or a command is wrong."""


class Unsupported(JobsError):
    """The request is well formed, but this machine cannot do it."""
