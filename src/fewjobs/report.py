"""The report of a build: one HTML file, with its pictures and without anything from elsewhere."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fewjobs.advice import advise, architecture_seconds
from fewjobs.plan import MEMORIES
from fewjobs.replay import items_of, recommend_each, units_of
from fewjobs.whole_files import write_whole
from fewjobs.words import size

Profile = dict[str, Any]
WIDTH, HEIGHT, LEFT, BOTTOM = 960, 300, 70, 24
COLUMNS, BANDS = 320, 24
COLORS = {
    "cicc": "#d95f02",
    "ptxas": "#7570b3",
    "cudafe++": "#e7298a",
    "c++": "#1b9e77",
    "c": "#66a61e",
    "link": "#a6761d",
}
OTHER_COLOR = "#9aa0a6"
MOST_ROWS = 400
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px;margin:.6em 0}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
h2{margin-top:1.8em}
.bad{color:#b00020}
svg{width:100%;height:auto}
.key span{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}td,th{border-color:#333}}
"""


def write_report(profile: Profile, path: Path) -> None:
    """Write the report; a kill leaves the old file or the new one."""
    write_whole(path, report(profile).encode(errors="replace"))


def report(profile: Profile) -> str:
    """The whole page."""
    parts = [*_summary(profile), *_advice(profile), *_memory(profile), *_settings(profile)]
    parts += [*_architectures(profile), *_measures(profile), *_stages(profile)]
    title = html.escape(" ".join(map(str, profile["command"]))[:120])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>fewbits build: {title}</title>'
        f"<style>{STYLE}</style><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; every cell is escaped."""
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _summary(p: Profile) -> Iterator[str]:
    done = sum(s["code"] == 0 for s in p["stages"])
    end = "finished" if p["exit_code"] == 0 else f"ended with code {p['exit_code']}"
    yield "<h1>fewbits build</h1>"
    yield f"<p><code>{html.escape(' '.join(map(str, p['command'])))}</code></p>"
    yield (
        f"<p>{end} after {p['seconds']:.1f} s: {done} stages compiled, {len(p['kept'])} kept from before. "
        f"Peak {size(p['peak_bytes'])} of {size(p['budget_bytes'])} "
        f"({html.escape(str(p['facts'].get('binding', '')))}), {p['slots']} at once at most, "
        f"{html.escape(p['machine']['architecture'])}, "
        f"CUDA {html.escape(p['machine']['toolkit'] or 'none')}.</p>"
    )
    for note in p.get("notes", ()):
        yield f"<p>Note: {html.escape(note)}.</p>"
    for verdict in p["verdicts"]:
        yield f'<p class="bad">{html.escape(verdict["sentence"])}</p>'


def _advice(p: Profile) -> Iterator[str]:
    advice = advise(p)
    if advice:
        items = "".join(
            f"<li><b>{html.escape(a.rule)}.</b> {html.escape(a.what)} {html.escape(a.fix)}</li>"
            for a in advice
        )
        yield f"<h2>Advice</h2><ul>{items}</ul>"


def _memory(p: Profile) -> Iterator[str]:
    yield "<h2>Memory over time</h2>"
    yield memory_picture(p)
    named = {s["stage"] for s in p["stages"]}
    key = "".join(
        f'<span style="background:{c}"></span>{html.escape(n)}' for n, c in COLORS.items() if n in named
    )
    yield (
        f'<p class="key">{key}<span style="background:{OTHER_COLOR}"></span>everything else'
        '<span style="background:#b00020"></span>budget</p>'
    )


def memory_picture(p: Profile) -> str:
    """Memory stacked by process, and the budget as a line."""
    seconds = max(p["seconds"], 0.001)
    total = _columns(p["memory"], seconds)
    largest = sorted(p["stages"], key=lambda s: -s["peak_bytes"])[:BANDS]
    shown = sorted((s for s in largest if len(s["curve"]) > 1), key=lambda s: (s["stage"], s["started_s"]))
    bands = [(s, _columns([*s["curve"], [s["ended_s"] or seconds, 0]], seconds)) for s in shown]
    rest = [max(0.0, t - sum(b[i] for _, b in bands)) for i, t in enumerate(total)]
    sums = [rest[i] + sum(b[i] for _, b in bands) for i in range(COLUMNS)]
    budgets = [b for _, b in p["budget"] if b < 2**60] or [p["budget_bytes"]]
    top = float(max(*sums, *budgets, 1.0)) * 1.05

    def x(i: float) -> float:
        return LEFT + i / COLUMNS * (WIDTH - LEFT)

    def y(held: float) -> float:
        return HEIGHT - BOTTOM - float(held) / top * (HEIGHT - BOTTOM - 8)

    drawn, base = [], [0.0] * COLUMNS
    for stage, band in [(None, rest), *bands]:
        if not any(band):
            continue
        upper = [b + h for b, h in zip(base, band, strict=True)]
        there = " ".join(f"{x(i):.1f},{y(u):.1f}" for i, u in enumerate(upper))
        back = " ".join(f"{x(i):.1f},{y(base[i]):.1f}" for i in reversed(range(COLUMNS)))
        color = OTHER_COLOR if stage is None else COLORS.get(stage["stage"], OTHER_COLOR)
        name = "everything else" if stage is None else _label(stage)
        drawn.append(
            f'<polygon points="{there} {back}" fill="{color}" fill-opacity=".75" stroke="#fff" '
            f'stroke-width=".4">'
            f"<title>{html.escape(name)}</title></polygon>"
        )
        base = upper
    line = " ".join(
        f"{x(min(t / seconds, 1) * COLUMNS):.1f},{y(min(b, top)):.1f}"
        for t, b in [*p["budget"], [seconds, budgets[-1]]]
    )
    ticks = "".join(
        f'<text x="{LEFT - 6}" y="{y(top * k / 4) + 4:.0f}" text-anchor="end" font-size="11" '
        f'fill="currentColor">{size(top * k / 4)}</text>'
        for k in range(5)
    )
    ends = (
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end" font-size="11" fill="currentColor">'
        f"{seconds:.0f} s</text>"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time">{"".join(drawn)}'
        f'<polyline points="{line}" fill="none" stroke="#b00020" stroke-width="1.5"/>{ticks}{ends}</svg>'
    )


def _columns(curve: Sequence[Sequence[float]], seconds: float) -> list[float]:
    """A curve in columns: in each the highest point, else the last one before it."""
    columns = [-1.0] * COLUMNS
    for at, held in curve:
        i = min(COLUMNS - 1, max(0, int(at / seconds * COLUMNS)))
        columns[i] = max(columns[i], held)
    last, out = 0.0, []
    ends = {min(COLUMNS - 1, max(0, int(curve[-1][0] / seconds * COLUMNS)))} if curve else set()
    for i, held in enumerate(columns):
        last = held if held >= 0 else last
        out.append(last)
        if i in ends:
            last = curve[-1][1]
    return out


def _settings(p: Profile) -> Iterator[str]:
    units = units_of(items_of(p))
    if not units:
        return
    rows: list[list[object]] = []
    advice = recommend_each(units, MEMORIES, cpus=p["machine"]["cpus"])
    for memory, setting in zip(MEMORIES, advice, strict=True):
        if setting is None:
            rows.append([f"{memory // 2**30} GiB", "does not fit", "", "", ""])
        else:
            jobs = f"{setting.jobs}{' (all)' if setting.jobs == len(units) else ''}"
            rows.append(
                [
                    f"{memory // 2**30} GiB",
                    jobs,
                    setting.threads,
                    f"{setting.seconds:.0f} s",
                    size(setting.peak_bytes),
                ]
            )
    yield "<h2>Without fewbits build</h2>"
    yield (
        f"<p>Found by replaying this build on {p['machine']['cpus']} processors: the trace stays within the "
        "memory, and with one job more it does not.</p>"
    )
    yield table(["memory", "MAX_JOBS", "NVCC_THREADS", "time", "peak"], rows)


def _architectures(p: Profile) -> Iterator[str]:
    cost = architecture_seconds(p)
    if not cost:
        return
    peak: dict[str, int] = defaultdict(int)
    for stage in p["stages"]:
        peak[stage["arch"]] = max(peak[stage["arch"]], stage["peak_bytes"])
    total = sum(cost.values()) or 1.0
    rows = [
        [f"sm_{arch}", f"{seconds:.1f} s", f"{100 * seconds / total:.0f} %", size(peak[arch])]
        for arch, seconds in sorted(cost.items(), key=lambda pair: -pair[1])
    ]
    yield "<h2>What each architecture costs</h2>"
    yield table(["architecture", "processor time", "share", "largest stage"], rows)


def _measures(p: Profile) -> Iterator[str]:
    shown = [[f"{at:.1f} s", what, label] for at, what, label in p["events"] if what != "kept result"]
    if shown:
        counts = ", ".join(f"{html.escape(what)} {count}" for what, count in p["counts"].items())
        yield f"<h2>Measures</h2><p>{counts}</p>"
        rows = table(["time", "what", "stage"], shown[:MOST_ROWS])
        yield f"<details><summary>all of them</summary>{rows}</details>"


def _stages(p: Profile) -> Iterator[str]:
    rows = [
        [
            s["unit"],
            f"sm_{s['arch']}" if s["arch"] else "host",
            s["stage"],
            size(s["peak_bytes"]),
            f"{size(s['predicted_bytes'])} ({s['predicted_from']})",
            f"{s['cpu_s']:.1f} s",
            f"{max(0.0, s['ended_s'] - s['started_s']):.1f} s",
            f"{s['waited_s']:.1f} s",
            " ".join(
                f"{s[k]} {k}" for k in ("pauses", "hibernations", "pageouts", "requeues", "kills") if s[k]
            ),
            "" if s["code"] == 0 else f"code {s['code']}",
        ]
        for s in sorted(p["stages"], key=lambda s: -s["peak_bytes"])[:MOST_ROWS]
    ]
    yield f"<h2>Stages</h2><p>The largest {len(rows)} of {len(p['stages'])}.</p>"
    head = ["unit", "for", "stage", "peak", "supposed", "processor", "time", "waited", "", ""]
    yield table(head, rows)


def _label(stage: Profile) -> str:
    return f"{stage['unit']} {stage['stage']} {stage['arch']}, {size(stage['peak_bytes'])}"
