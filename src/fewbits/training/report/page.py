"""A training run as one HTML page: figures, curves, samples, settings. It needs no other file or host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from fewbits import errors
from fewbits.errors import BadInput
from fewbits.training.report import figures as show
from fewbits.training.report.chart import Series, line_chart, smoothed
from fewbits.training.report.files import RunData, number, read_run
from fewbits.training.report.style import SCRIPT, STYLE
from fewbits.training.report.tiles import tiles
from fewbits.training.run_folder.killed import KILLED, is_dead, note_if_killed
from fewbits.words import size

NAME = "report.html"


def write_report(output_dir: Path | str) -> Path:
    """Write report.html into a run folder, finished or not, and return its path.

    Raises:
        BadInput: the folder holds no run, or a folder in the report's place.
    """
    note_if_killed(output_dir)
    data = read_run(Path(output_dir))
    path = data.folder / NAME
    if path.is_dir():
        raise BadInput(f"{path} is a folder, where the report belongs; move it away.")
    temporary = data.folder / f".{NAME}.partial"
    temporary.write_text(render(data), encoding="utf-8")
    temporary.replace(path)
    return path


def render(data: RunData) -> str:
    """The page."""
    title = _title(data)
    sections = (
        _header(data, title),
        tiles(data),
        _charts(data),
        _samples(data),
        _details(data),
        _footer(data),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} \u00b7 fewbits</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _title(data: RunData) -> str:
    if isinstance(title := data.config.get("title"), str) and title:
        return title
    model = data.first("model") or data.config.get("model")
    return Path(str(model)).name if isinstance(model, str) and model else data.folder.resolve().name


def _header(data: RunData, title: str) -> str:
    recipe = data.first("recipe.name", "recipe") or data.config.get("recipe")
    device = data.first("device")
    about = [x for x in (recipe, device) if isinstance(x, str)]
    started = _date(data.first("started"))
    about += [started] if started else []
    kind, word, sentence = _status(data)
    spans = "".join(f"<span>{escape(x)}</span>" for x in about)
    notes = "".join(f'<p class="message note">{escape(p)}</p>' for p in data.problems)
    message = f'<p class="message {kind}">{escape(sentence)}</p>' if sentence else ""
    return (
        f'<header><div class="mark">fewbits training report</div><h1>{escape(title)}</h1>'
        f'<p class="about"><b class="pill {kind}">{word}</b>{spans}</p>{message}{notes}</header>\n'
    )


def _status(data: RunData) -> tuple[str, str, str]:
    """Colour, word and, where something is to be told, a sentence."""
    last = data.steps[-1]["step"] if data.steps else 0
    status = data.first("status")
    if status == "finished":
        early = data.first("stopped_early")
        return "good", "finished", "It ended early: the evaluation loss no longer fell." if early else ""
    how = f"It goes on with: fewbits train {data.folder / 'config.yaml'} --resume"
    kind, _, reason = str(data.first("error") or "").partition(": ")
    if status == "stopped" and kind != "KeyboardInterrupt":
        told = reason if hasattr(errors, kind) else f"{kind}: {reason}" if reason else kind
        return "bad", "stopped", told or "The run stopped before its end."
    shown = f"The page shows what was logged up to step {last:,}."
    if status == "stopped":
        return "note", "interrupted", f"This run was interrupted. {shown} {how}"
    if status == KILLED:
        return "bad", "was killed", f"{data.first('error') or ''} {shown} {how}".lstrip()
    return _without_end(data, shown, how)


def _without_end(data: RunData, shown: str, how: str) -> tuple[str, str, str]:
    """A run that has noted no end: it runs, or was killed."""
    holder = data.holder
    if data.first("status") != "running":  # its beginning was not noted either
        return "note", "not finished", f"This run has not ended. {shown} {how}"
    who = "" if holder is None or holder.owner is None else str(holder.owner)
    if is_dead(data.run, holder):  # and the folder cannot be written to
        return "bad", "was killed", f"The run's process was killed before its end. {shown} {how}"
    if holder is None or holder.is_alive:
        return "note", "running", f"This run is being trained by {who or 'another process'}. {shown}"
    last = holder.seen.strftime("%Y-%m-%d %H:%M UTC")
    return (
        "note",
        "not finished",
        f"This run was begun by {who}, whose last sign of life was at {last}: from here it cannot be seen"
        f" whether it still lives. {shown} If it was killed: {how[0].lower()}{how[1:]}",
    )


def _charts(data: RunData) -> str:
    panels = [p for p in (_loss_chart(data), *_small_charts(data), *_preference_charts(data)) if p]
    if not panels:
        return '<p class="message note">No training step was logged.</p>\n'
    return f'<h2>Training</h2>\n<section class="charts">{"".join(panels)}</section>\n'


def _loss_chart(data: RunData) -> str:
    raw, evaluation = data.curve("loss"), data.curve("eval_loss")
    if not raw and not evaluation:
        return ""
    span = max(1, len(raw) // 25)
    shown = Series(label="training", points=smoothed(raw, span))
    curves = [shown, Series(label="evaluation", points=evaluation, kind="dots", colour=2)]
    if span > 1:
        curves.insert(0, Series(label="", points=raw, kind="faint"))
    per = "nats per token" if data.first("method") in (None, "sft") else f"of {data.first('method')}"
    unit = escape(per) + (f"; training smoothed over {span} values" if span > 1 else "")
    legend = "".join(
        f'<span><i class="c{s.colour}"></i>{s.label}</span>' for s in curves if s.points and s.label
    )
    last = _last_step(data)
    broad = line_chart("Loss", curves, show.decimal, size=(980, 330), last_step=last)
    narrow = line_chart("Loss", curves, show.decimal, last_step=last)
    return _panel("Loss", unit, broad, legend, narrow=narrow)


def _small_charts(data: RunData) -> Iterator[str]:
    plots: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("Learning rate", "", "learning_rate", show.small),
        ("Gradient norm", "before clipping", "grad_norm", show.decimal),
        ("Throughput", "tokens per second", "tokens_per_second", show.rate),
        ("Memory", "", "memory_bytes", size),
    )
    for (title, unit, metric, text), colour in zip(plots, (3, 4, 1, 2), strict=True):
        points = data.curve(metric)
        if points:
            series = Series(label=title, points=points, colour=colour)
            yield _panel(
                title, unit, line_chart(title, [series], text, last_step=_last_step(data), from_zero=True)
            )


def _preference_charts(data: RunData) -> Iterator[str]:
    """What a preference method's trainer logs of its rewards, as it names them."""
    names = sorted({name for step in data.steps for name in step})
    for name in names:
        points = data.curve(name)
        if points and name.startswith(("reward", "kl", "entropy", "completions/mean_length")):
            series = Series(label=name, points=points, colour=1)
            yield _panel(
                escape(name), "", line_chart(name, [series], show.decimal, last_step=_last_step(data))
            )


def _last_step(data: RunData) -> float:
    return float(data.steps[-1]["step"])


def _panel(title: str, unit: str, chart: str, legend: str = "", *, narrow: str = "") -> str:
    """A chart under its heading; one with a ``narrow`` version, for telephones, spans the page elsewhere."""
    note = f'<span class="unit">{unit}</span>' if unit else ""
    key = f'<span class="legend">{legend}</span>' if legend else ""
    plots = [("", chart)] if not narrow else [(" broad", chart), (" narrow", narrow)]
    drawn = "".join(f'<div class="plot{kind}">{svg}<div class="tip"></div></div>' for kind, svg in plots)
    return (
        f'<div class="card panel{" wide" if narrow else ""}">'
        f'<div class="head"><h3>{title}</h3>{note}{key}</div>{drawn}</div>'
    )


def _samples(data: RunData) -> str:
    cards = "".join(_sample(s) for s in data.samples)
    return f"<h2>Answers before and after</h2>\n{cards}" if cards else ""


def _sample(sample: Mapping[str, Any]) -> str:
    expected = sample.get("expected")
    columns = []
    for key, name in (("before", "Before"), ("after", "After"), ("expected", "Expected")):
        if sample.get(key) is None:
            continue
        text = str(sample[key]).strip()
        same = key == "after" and text == str(expected).strip() and expected is not None
        pill = '<b class="pill good">as expected</b>' if same else ""
        body = escape(text) if text else '<span class="empty">nothing</span>'
        columns.append(
            f'<div class="{key}"><div class="label">{name}{pill}</div><div class="text">{body}</div></div>'
        )
    prompt = _conversation(sample.get("prompt", ""))
    return (
        f'<article class="card sample"><div class="prompt">{prompt}</div>'
        f'<div class="answers">{"".join(columns)}</div></article>\n'
    )


def _conversation(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return escape(str(prompt).strip())
    lines = [f"{m.get('role', '')}: {m.get('content', '')}" for m in prompt if isinstance(m, Mapping)]
    return escape("\n".join(lines))


def _details(data: RunData) -> str:
    items = [(k, v) for k, v in data.config.items() if v not in (None, "", [], {})]
    half = (len(items) + 1) // 2
    tables = "".join(
        f'<div class="card">{_table(part)}</div>' for part in (items[:half], items[half:]) if part
    )
    settings = f'<h2>Settings</h2>\n<div class="settings">{tables}</div>\n' if items else ""
    folded = []
    if receipt := data.first("receipt"):
        folded.append(
            _fold("What was replaced in the model", f"<pre>{escape(str(receipt))}</pre>", opened=True)
        )
    for name, key in (
        ("Training data", "data.train"),
        ("Evaluation data", "data.eval"),
        ("Versions", "versions"),
    ):
        if isinstance(facts := data.first(key), Mapping):
            folded.append(_fold(name, _table(list(facts.items()))))
    return settings + ("<h2>Model, data and versions</h2>\n" + "".join(folded) if folded else "")


def _fold(title: str, body: str, *, opened: bool = False) -> str:
    state = " open" if opened else ""
    return f'<details class="card"{state}><summary>{title}</summary><div>{body}</div></details>\n'


def _table(rows: list[tuple[str, Any]]) -> str:
    cells = (f"<tr><th>{escape(str(k))}</th><td>{_breakable(_plain(v))}</td></tr>" for k, v in rows)
    return f"<table>{''.join(cells)}</table>"


def _breakable(text: str) -> str:
    """HTML that wraps long paths between folders."""
    return escape(text).replace("/", "/<wbr>")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, Mapping):
        parts = ((k, f"({_plain(v)})" if isinstance(v, Mapping) else _plain(v)) for k, v in value.items())
        return ", ".join(f"{k} = {text}" for k, text in parts)
    return str(value)


def _footer(data: RunData) -> str:
    return (
        "<footer>Made from the files of the run folder; "
        f"<code>fewbits report {escape(str(data.folder))}</code> makes it again.</footer>\n"
    )


def _date(value: Any) -> str:
    if (stamp := number(value)) is not None:
        return datetime.fromtimestamp(stamp).strftime("%Y-%m-%d %H:%M")
    try:
        return datetime.fromisoformat(str(value)).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""
