"""``fewbits generate --chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from fewbits.cli.actions import write
from fewbits.errors import BadInput
from fewbits.inference.generate import Sampling, encode_prompt

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it."


def chat(
    model: Any, tokenizer: Any, sampling: Sampling, *, system: str | None = None, quiet: bool = False
) -> int:
    """Read a line, answer it, until the input ends."""
    start = [] if system is None else [{"role": "system", "content": system}]
    encode_prompt(
        tokenizer, [*start, {"role": "user", "content": "?"}]
    )  # no template: say so before the first line
    console = Console(stderr=True)
    if not quiet:
        console.print(f"[dim]{HELP}[/]", highlight=False)
    messages = list(start)
    while True:
        line = _read_line(console)
        if line is None or line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            console.print(HELP, highlight=False)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(model, tokenizer, messages, sampling, console, quiet)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line(console: Console) -> str | None:
    """The next line, or None at the end of the input."""
    if sys.stdin.isatty():
        console.print("[bold]> [/]", end="")
    line = sys.stdin.readline()
    return line.strip() if line else None


def _answer(
    model: Any,
    tokenizer: Any,
    messages: list[dict[str, str]],
    sampling: Sampling,
    console: Console,
    quiet: bool,
) -> str | None:
    """One answer; None if the user stopped it or the conversation no longer fits."""
    try:
        return write(model, tokenizer, messages, sampling, quiet=quiet)
    except KeyboardInterrupt:
        console.print("\n[dim]stopped; the question is forgotten.[/]", highlight=False)
    except BadInput as error:
        console.print(f"{error} /reset starts anew.", highlight=False, markup=False)
    return None
