"""Links that leave the documentation's folder, and the table of settings, for the site (see mkdocs.yml).

On a page that is read in the repository, ``[results](../../benchmarks/results.csv)`` opens the file. The site
has no such file: there the link becomes the file's path as text. A link to a file that does not exist
fails here. A line that is ``SETTINGS`` becomes the table of all settings of a training run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]*)(?:#[^)]*)?\)")
SETTINGS = "[All settings with their meaning](../../src/fewbits/training/config_help.py)"


def settings_table() -> str:
    """A row for each setting and its help, read from the source, so that fewbits need not be installed."""
    source = (ROOT / "src/fewbits/training/config_help.py").read_text(encoding="utf-8")
    literal = next(node.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    rows = [
        f"| `{name}` | {text.replace('|', chr(92) + '|')} |"
        for name, text in ast.literal_eval(literal).items()
    ]
    return "\n".join(["| setting | meaning |", "| --- | --- |", *rows])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text, in which links out of docs/ are paths."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {match[2]}, which does not exist")
        path = f"`{target.relative_to(ROOT)}`"
        return path if match[1].strip("`") in path else f"{match[1]} ({path})"

    return LINK.sub(shown, markdown.replace(SETTINGS, settings_table()))
