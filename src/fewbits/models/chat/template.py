"""A chat template is a program that came with the model: it is tried in a process that can be stopped.

``check_template`` renders messages once in a child process with limits on time, memory and length; only then
does the tokenizer render them here. The child (this file, run as a module) has jinja2 and nothing of torch or
transformers, in the sandbox that transformers uses. What a template refuses or gets wrong is not judged
there: the tokenizer says it better.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5
CHARACTERS = 10_000_000
_MEMORY_BYTES = 2**30
_TOO_LONG, _TOO_LARGE = 3, 4  # exit codes of the child


def check_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a chat template that does not come to an end on these messages.

    Args:
        tokenizer: of transformers; without a template nothing is done.
        messages: with roles and contents, as the template will get them.

    Raises:
        BadCheckpoint: more than `SECONDS` of work, 1 GiB of memory or `CHARACTERS` of text.
    """
    templates = getattr(tokenizer, "chat_template", None)
    for template in templates.values() if isinstance(templates, dict) else (templates,):
        if isinstance(template, str):
            _check(str(getattr(tokenizer, "name_or_path", "") or "the model"), template, messages)


def _check(name: str, template: str, messages: Sequence[Mapping[str, Any]]) -> None:
    work = json.dumps({"template": template, "messages": list(messages)}, default=str)
    try:
        code = subprocess.run(
            [sys.executable, "-m", "fewbits.models.chat.template", str(SECONDS)],
            input=work.encode(errors="replace"),
            capture_output=True,
            timeout=4 * SECONDS,  # its own limit counts the work alone, on a busy machine too
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        code = _TOO_LONG
    if code == _TOO_LARGE:
        limit = f"more than {CHARACTERS:,} characters or {_MEMORY_BYTES // 2**20:,} MiB of memory"
    elif code == _TOO_LONG or code < 0:  # stopped by a signal: the limit on its time
        limit = f"more than {SECONDS} s"
    else:
        return
    raise BadCheckpoint(
        f"the chat template of {name} takes {limit} for {len(messages)} messages; correct chat_template in "
        "the model's folder, or give a plain prompt."
    )


def _render(work: Mapping[str, Any]) -> int:
    """Exit code of the child: 0 for a text of a bearable length, or for an error that is not ours to tell."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks responses: here, what stands in it."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: form
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, default=str)
    length = 0
    try:
        template = environment.from_string(work["template"])
        for piece in template.generate(messages=work["messages"], add_generation_prompt=True, tools=None):
            length += len(piece)
            if length > CHARACTERS:
                return _TOO_LARGE
    except MemoryError:
        return _TOO_LARGE
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ):
        return 0
    return 0


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _limit(seconds: int) -> None:
    """Limits of this process, where the system has them."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


if __name__ == "__main__":
    _limit(int(sys.argv[1]))
    sys.exit(_render(json.loads(sys.stdin.buffer.read())))
