"""Make rules in which compilers list what they read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fewjobs.command import Command


def read_depfile(path: Path) -> list[str]:
    """The prerequisites in a make rule as compilers write it."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape").replace("\\\n", " ")
    except OSError:
        return []
    names: list[str] = []
    for line in text.splitlines():
        match = re.match(r"(?:[^\s\\:]|\\.|:(?=\S))+(?:\s+(?:[^\s\\:]|\\.|:(?=\S))+)*\s*:(?:\s|$)", line)
        if match is None:
            continue
        for word in re.findall(r"(?:[^\s\\]|\\.)+", line[match.end() :]):
            names.append(re.sub(r"\\(.)", r"\1", word).replace("$$", "$"))
    return names


def write_depfile(command: Command, place: Path, names: Sequence[str]) -> None:
    """Write the rule that the command asked for: without system headers after -MMD."""
    target = command.output
    for i, word in enumerate(command.args[:-1]):
        if word in ("-MT", "-MQ"):
            target = command.args[i + 1]
    if "-MMD" in command.args:
        system = ["/usr/include/", "/usr/lib/", "/usr/local/include/", "/opt/rh/"]
        system += [
            f"{command.args[i + 1].rstrip('/')}/" for i, a in enumerate(command.args[:-1]) if a == "-isystem"
        ]
        names = [n for n in names if not n.startswith(tuple(system))]
    shown = [re.sub(r"([ #\\])", r"\\\1", n).replace("$", "$$") for n in names]
    text = f"{target}: " + " \\\n ".join(shown) + "\n"
    if "-MP" in command.args:
        text += "".join(f"\n{n}:\n" for n in shown[1:])
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="surrogateescape")
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
