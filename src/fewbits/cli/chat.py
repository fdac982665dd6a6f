"""``fewbits generate`` in the terminal: one answer, or a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fewbits.cli.console import console
from fewbits.errors import BadInput
from fewbits.inference.generate import Guessing, Prompt, Sampling, encode_prompt
from fewbits.inference.generate import generate as run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it."


def write(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    sampling: Sampling,
    *,
    guessing: Guessing | None = None,
    quiet: bool = False,
    words: Mapping[str, Any] | None = None,
) -> str:
    """Stream one answer to standard output and a line of figures to the error stream; returns the answer.

    ``words`` are more words of transformers' ``generate``.
    """

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    result = run(model, tokenizer, prompt, sampling, on_text=show, guessing=guessing, **(words or {}))
    show("\n")
    if not quiet:
        stopped = {
            "end": "",
            "stop": "",
            "length": ", stopped at --max-new-tokens",
            "context": ", the context is full",
        }
        rate = result.tokens / max(result.seconds, 1e-9)
        note = f"{result.tokens} tokens, {rate:.1f} tokens/s{stopped[result.stopped_by]}"
        console(stderr=True).print(f"[dim]{note}[/]", highlight=False)
    return result.text


def chat(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    system: str | None = None,
    guessing: Guessing | None = None,
    quiet: bool = False,
    words: Mapping[str, Any] | None = None,
) -> int:
    """Read a line, answer it, until the input ends."""
    start = [] if system is None else [{"role": "system", "content": system}]
    question = {"role": "user", "content": "?"}
    encode_prompt(tokenizer, [*start, question])  # without a template, say so before the first line
    screen = console(stderr=True)
    how: dict[str, Any] = {"guessing": guessing, "quiet": quiet, "words": words}
    if not quiet:
        screen.print(f"[dim]{HELP}[/]", highlight=False)
    messages = list(start)
    while True:
        line = _read_line(screen)
        if line is None or line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            screen.print(HELP, highlight=False)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(partial(write, model, tokenizer, messages, sampling, **how), screen)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line(screen: Console) -> str | None:
    """The next line, or None at the end of the input."""
    if sys.stdin.isatty():
        screen.print("[bold]> [/]", end="")
    line = sys.stdin.readline()
    return line.strip() if line else None


def _answer(write_one: Callable[[], str], screen: Console) -> str | None:
    """One answer; None if the user stopped it or the conversation no longer fits."""
    try:
        return write_one()
    except KeyboardInterrupt:
        screen.print("\n[dim]stopped; the question is forgotten.[/]", highlight=False)
    except BadInput as error:
        screen.print(f"{error} /reset starts anew.", highlight=False, markup=False)
    return None
