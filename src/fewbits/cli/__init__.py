"""The command line: ``fewbits COMMAND``. Imports all rooms but `te` and `front`, when a command needs them.

`parser.py` has the flags, `texts.py` what ``--help`` says, `actions.py` one function for each command,
which calls the library. The names ``sc_...`` belong to ``fewbits sc``. Begin with `actions.py`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 and 138 stopped by SIGTERM and SIGUSR1
(128 and the signal's number). A failure is one sentence on the error stream; ``--debug`` adds the
traceback.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from fewbits.cli.parser import build_parser, command_of
from fewbits.errors import FewbitsError, StoppedBySignal
from fewjobs.errors import JobsError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    ours = argv[: argv.index("--") if "--" in argv else None]
    boundary = _Boundary(debug="--debug" in ours, launched="--launched" in ours)
    with boundary:
        boundary.code = _run(argv)
    return boundary.code


def _run(argv: list[str]) -> int:
    command = command_of(argv)
    if command == "bench":  # it has a parser of its own
        from fewbits.cli.actions import bench

        return bench([a for a in argv[argv.index("bench") + 1 :] if a != "--debug"])
    behind: list[str] = []
    if command == "build":  # what stands behind -- is a command line of somebody else's
        from fewjobs.flags import split_command

        argv, behind = split_command(argv)
    parser = build_parser(with_train_flags=command == "train")
    args, rest = parser.parse_known_args(argv)
    args.argv = argv
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if args.command == "train":
        rest = _collect_overrides(args, rest)
    if args.command == "build":
        if (rest or not behind) and args.plan is None:
            args.parser.error("write the command that builds behind --, as in fewbits build -- ninja -j8")
        args.run = behind
    if rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}{_called_here(args.command, rest)}")

    from fewbits.cli import actions
    from fewbits.cli.quiet import quiet

    action = getattr(actions, args.command.replace("-", "_"))
    if not args.loads_models:
        return int(action(args))
    with quiet(enabled=not args.debug):
        return int(action(args))


def _called_here(command: str, rest: list[str]) -> str:
    """The flags of ``train`` for words of other libraries, in brackets; "" where none is one."""
    from fewbits.training.other_words import OTHER_WORDS

    words = [word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
    flags = [f"--{OTHER_WORDS[word].replace('_', '-')}" for word in words if word in OTHER_WORDS]
    return f" (here {' '.join(flags)})" if flags and command == "train" else ""


def _collect_overrides(args: Namespace, rest: list[str]) -> list[str]:
    """Find key=value in CONFIG's place and behind flags, where argparse does not look; returns the rest."""
    if args.config is not None and "=" in args.config and not Path(args.config).exists():
        args.overrides.insert(0, args.config)
        args.config = None
    args.overrides += [a for a in rest if "=" in a and not a.startswith("-")]
    return [a for a in rest if a not in args.overrides]


class _Boundary:
    """Turns what a command raises into an exit code and one sentence."""

    def __init__(self, *, debug: bool, launched: bool = False) -> None:
        self.debug = debug
        self.launched = launched
        self.code = OK

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return True
        if isinstance(error, SystemExit):
            self.code = error.code if isinstance(error.code, int) else FAILED
            return True
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has left: nobody to tell
            self.code = FAILED
            _discard_stdout()
            return True
        unforeseen = self.launched and not isinstance(error, (FewbitsError, JobsError))
        if (self.debug or unforeseen) and not isinstance(error, KeyboardInterrupt):
            import traceback

            traceback.print_exception(kind, error, trace)
        self.code, sentence = describe(error)
        if not self.launched:  # who has started this process tells it
            sys.stderr.write(f"{sentence}\n")
        return True


def describe(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence for an exception."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted."
    if isinstance(error, StoppedBySignal):
        return 128 + error.number, text
    if isinstance(error, (FewbitsError, JobsError)):
        return FAILED, f"error: {text}"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename is not None else ""
        return FAILED, f"error: {(error.strerror or text).lower()}{where}."
    kind = type(error).__name__
    if kind == "OutOfMemoryError" or isinstance(error, MemoryError):
        return (
            FAILED,
            "error: the memory is full; use a smaller batch or window, or a recipe with fewer bits.",
        )
    reason = f"{kind}: {text}" if text else kind
    if len(reason) > 300:
        reason = f"{reason[:297]}..."
    return FAILED, f"internal error: {reason}; run again with --debug for the traceback."


def _discard_stdout() -> None:
    """Point standard output at nothing, so that Python's own flush at exit does not fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
