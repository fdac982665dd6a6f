"""Line charts as inline SVG: no library, no request; colours come from the page's style sheet.

A chart is drawn in a fixed coordinate system and scales with its container. What it shows is also carried
along as data, which the page's script reads to show values under the pointer; without it nothing is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
MAX_POINTS = 600  # more than the picture has pixels to show
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 12.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve.

    Attributes:
        label: its name in the legend.
        points: (x, y) with ascending x.
        kind: "line", "faint" (a thin line behind another), "dots" (a line with a dot at each point).
        colour: number of a colour of the style sheet, 1 to 4.
    """

    label: str
    points: Sequence[Point]
    kind: str = "line"
    colour: int = 1


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Size of the picture and the range of values it shows."""

    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, x: float) -> float:
        """Horizontal position of a value."""
        low, high = self.x
        return _LEFT + (x - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        """Vertical position of a value."""
        low, high = self.y
        return self.height - _BOTTOM - (y - low) / (high - low) * (self.height - _TOP - _BOTTOM)


def line_chart(
    name: str,
    series: Sequence[Series],
    show: Callable[[float], str],
    *,
    size: tuple[int, int] = (480, 240),
    last_step: float | None = None,
    from_zero: bool = False,
) -> str:
    """The SVG of a chart over training steps.

    Args:
        name: what a screen reader says.
        series: the curves, the hindmost first; those without points are left out.
        show: writes a value of the vertical axis.
        size: width and height of the coordinate system.
        last_step: end of the horizontal axis, which begins at 0; None: the last point.
        from_zero: let the vertical axis begin at 0.
    """
    series = [s for s in series if s.points]
    ys = [y for s in series for _, y in s.points]
    last = max(x for s in series for x, _ in s.points) if last_step is None else last_step
    ticks = nice_ticks(0.0 if from_zero else min(ys), max(ys), 5)
    frame = Frame(width=size[0], height=size[1], x=_spread(0.0, last), y=(ticks[0], ticks[-1]))
    drawn = [s if len(s.points) <= MAX_POINTS else _thinned(s) for s in series]
    parts = [
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{escape(name, quote=True)}" data-chart="{_data(drawn, frame, show)}">',
        *_grid(frame, ticks, show),
        *(_curve(s, frame) for s in drawn),
        f'<line class="cursor" y1="{_TOP}" y2="{size[1] - _BOTTOM}" x1="0" x2="0"/>',
        "</svg>",
    ]
    return "".join(parts)


def smoothed(points: Sequence[Point], span: int) -> list[Point]:
    """At each point the mean of about ``span`` neighbours, half of them before it and half behind."""
    half, sums = span // 2, [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    out = []
    for i, (x, _) in enumerate(points):
        low, high = max(i - half, 0), min(i + half + 1, len(points))
        out.append((x, (sums[high] - sums[low]) / (high - low)))
    return out


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points: the mean of each run of neighbours; the first and last x stay."""
    if len(points) <= limit:
        return list(points)
    out = []
    for i in range(limit):
        run = points[i * len(points) // limit : (i + 1) * len(points) // limit]
        out.append((run[len(run) // 2][0], sum(y for _, y in run) / len(run)))
    out[0] = (points[0][0], out[0][1])
    out[-1] = (points[-1][0], out[-1][1])
    return out


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers, the first at most ``low`` and the last at least ``high``."""
    low, high = _spread(low, high)
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _spread(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    around = abs(low) * 0.5 or 0.5
    return (max(low - around, 0.0) if low >= 0 else low - around), high + around


def _thinned(series: Series) -> Series:
    return Series(label=series.label, points=thin(series.points), kind=series.kind, colour=series.colour)


def _grid(frame: Frame, ticks: Sequence[float], show: Callable[[float], str]) -> list[str]:
    parts = []
    left, right, bottom = _LEFT, frame.width - _RIGHT, frame.height - _BOTTOM
    for tick in ticks:
        y = frame.py(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 9}" y="{y + 4:.1f}" text-anchor="end">{escape(show(tick))}</text>')
    y, end = bottom + 20, f"step {round(frame.x[1]):,}"
    room = right - 6.5 * len(end) - 34  # what the label at the end leaves to the ticks' own
    for tick in nice_ticks(*frame.x, 7 if frame.width > 600 else 5):
        if tick <= frame.x[1] and tick == round(tick) and frame.px(tick) < room:
            parts.append(
                f'<text x="{frame.px(tick):.1f}" y="{y}" text-anchor="middle">{round(tick):,}</text>'
            )
    parts.append(f'<text x="{right}" y="{y}" text-anchor="end">{end}</text>')
    return parts


def _curve(series: Series, frame: Frame) -> str:
    at = [(frame.px(x), frame.py(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    kind = "faint" if series.kind == "faint" else "line"
    drawn = f'<path class="{kind} c{series.colour}" d="{path}"/>'
    if series.kind == "dots" or len(at) == 1:
        radius = 3.5 if len(at) <= 40 else 2
        drawn += "".join(
            f'<circle class="c{series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in at
        )
    return drawn


def _data(series: Sequence[Series], frame: Frame, show: Callable[[float], str]) -> str:
    """What the script needs: for each visible curve its label, colour, positions and written values."""
    curves = [
        {
            "label": s.label,
            "colour": s.colour,
            "points": [
                [round(frame.px(x), 1), round(frame.py(y), 1), round(x), show(y)] for x, y in s.points
            ],
        }
        for s in series
        if s.kind != "faint"
    ]
    return escape(json.dumps({"width": frame.width, "height": frame.height, "curves": curves}), quote=True)
