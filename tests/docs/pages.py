"""The fenced blocks of documentation pages, and what runs them.

A block that another machine is needed for begins with a comment that says so: ``# Needs a GPU.`` A YAML
block whose first line names a file (``# qlora.yaml``) is that file for the whole page.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
LANGUAGES = ("python", "sh", "yaml", "json", "text")
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"# (Needs [^\n]*)\n")
_FILE = re.compile(r"# ([\w./-]+\.ya?ml)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text without the page's indentation."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs(self) -> str:
        """What the block needs that a test machine lacks, or nothing."""
        match = _NEEDS.match(self.text)
        return match[1] if match else ""

    @property
    def file(self) -> str:
        """The name of the file that a YAML block is, or nothing."""
        match = _FILE.match(self.text) if self.language == "yaml" else None
        return match[1] if match else ""

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = _FENCE.finditer(text)
    return [Block(path.name, text.count("\n", 0, m.start()) + 1, m[2].strip(), dedent(m[3])) for m in found]


def fewbits_commands(block: Block) -> Iterator[list[str]]:
    """What stands behind ``fewbits`` in a shell block, without a redirection."""
    for words in block.commands if block.language == "sh" else []:
        if words[0] == "fewbits":
            yield words[1 : words.index(">")] if ">" in words else words[1:]


def run_page(path: Path, names: dict[str, Any], first: int | None = None) -> int:
    """Execute a page's blocks in order in the current folder, or the ``first`` of them; how many ran."""
    blocks = blocks_of(path)
    for block in blocks:
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
    runnable = [b for b in blocks if b.language in ("python", "sh") and not b.needs][:first]
    for block in runnable:
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)  # noqa: S102 - the page is the test
        else:
            for words in block.commands:
                run_command(words, block)
    return len(runnable)


def with_few_steps(words: list[str]) -> list[str]:
    """A page's run may be as long as a reader's would be; eight steps or a second show what it says."""
    few = words.copy()
    for option, most in (("--max-steps", "8"), ("--recover", "0.02"), ("--recover-text", "1000")):
        if option in few:
            place = few.index(option) + 1
            few[place] = min(few[place], most, key=float)
    return few


def run_command(words: list[str], block: Block) -> None:
    from fewbits.cli import main

    assert words[0] == "fewbits", f"{block} runs {words[0]}: mark the block with what it needs"
    words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, "")
    words = with_few_steps(words[1:])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if target else contextlib.nullcontext():
        code = main(words)
    assert code == 0, f"{block}: fewbits {shlex.join(words)} ended with {code}"
    if target:
        place = Path(target).expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(printed.getvalue(), encoding="utf-8")
