"""The doctor's findings on the terminal. Imports nothing that needs torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fewbits.doctor import Finding

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def findings_report(findings: Sequence[Finding]) -> Group:
    """All findings in a table, then why and what to do, the worst first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for item in findings:
        table.add_row(Text(item.status, style=_STYLES[item.status]), Text(item.name), Text(item.what))
    lines = [Text()]
    for status in ("problem", "warning", "note"):
        for item in findings:
            if item.status == status and (item.why or item.fix):
                lines.append(Text(f"{status}: ", style=_STYLES[status]).append(f"{item.name}: {item.what}"))
                lines += [Text(f"  {text}") for text in (item.why, item.fix and f"-> {item.fix}") if text]
    counts: Counter[str] = Counter(item.status for item in findings)
    total = ", ".join(
        f"{counts[s]} {s}{'' if s == 'ok' or counts[s] == 1 else 's'}" for s in reversed(_STYLES)
    )
    return Group(table, *lines, Text(total, style="bold"))
