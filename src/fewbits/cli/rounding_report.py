"""The plot of ``fewbits quantize --report FILE``: where a rounded model loses, and for what bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fewbits.cli.sc.plots import axes_for, save_plot
from fewbits.formats import get_format
from fewbits.inference.rounding.pipeline import CalibrationResult
from fewbits.inference.rounding.quality import (
    Quality,
    bits_against_quality,
    divergence,
    log_probabilities,
    measuring_windows,
    neighbours,
)
from fewbits.models.fast import FastLanguageModel


def check_report(path: Path) -> None:
    """Refuse a name that no plot can have, or a missing matplotlib, before anything is computed.

    Raises:
        BadInput, Unsupported: one of the two.
    """
    axes_for(path)


def write_report(
    result: CalibrationResult,
    source: str,
    rows: str,
    path: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Quality], Quality]:
    """Draw each linear's error, the drift from layer to layer, and bits against KL.

    Args:
        result: of the calibration.
        source: the plain model.
        rows: the calibration text, on whose first 2,048 tokens KL is measured.
        path: .svg or .png.
        progress: called as ``progress(formats done, formats in all)``.

    Returns:
        The formats beside it, each rounded by itself without calibration; the calibrated model.
    """
    beside = bits_against_quality(
        source, rows, neighbours(get_format(result.layers[0].format)), progress=progress
    )
    own = _of_result(result, source, rows)
    figure = axes_for(path)[0]
    figure.clear()
    figure.set_size_inches(11, 8)
    _draw_errors(figure.add_subplot(2, 1, 1), result)
    _draw_drift(figure.add_subplot(2, 2, 3), result)
    _draw_bits(figure.add_subplot(2, 2, 4), result, beside, own)
    figure.tight_layout()
    save_plot(figure, path)
    return beside, own


def _of_result(result: CalibrationResult, source: str, rows: str) -> Quality:
    """The calibrated model's bits and KL, on the text on which the formats beside it are measured."""
    plain, tokenizer = FastLanguageModel.from_pretrained(source, load_in_4bit=False, device_map="cpu")
    windows = measuring_windows(plain, tokenizer, rows)
    log_probs = log_probabilities(plain.eval(), windows)
    del plain
    chosen, _ = FastLanguageModel.from_pretrained(result.folder, device_map="cpu")
    kl = divergence(chosen.eval(), log_probs, windows)
    counts = [layer.shape[0] * layer.shape[1] for layer in result.layers]
    bits = sum(8.0 * layer.bytes_after for layer in result.layers) / max(sum(counts), 1)
    return Quality(format=result.recipe, bits=bits, kl=kl)


def _draw_errors(axes: Any, result: CalibrationResult) -> None:
    formats = {layer.name: layer.format for layer in result.layers}
    colors = {name: f"C{number % 10}" for number, name in enumerate(sorted(set(formats.values())))}
    for format, color in colors.items():
        places = [i for i, name in enumerate(result.output_errors) if formats[name] == format]
        values = [list(result.output_errors.values())[i] for i in places]
        axes.bar(places, values, color=color, label=format)
    worst = max(result.output_errors, key=lambda name: result.output_errors[name])
    axes.set_title(f"error of each linear's outputs; largest: {worst}", fontsize=9)
    axes.set_ylabel("||x (Q - W)||² / ||x W||²")
    axes.set_xlabel("linear, in the model's order")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_drift(axes: Any, result: CalibrationResult) -> None:
    axes.plot(range(1, len(result.drift) + 1), result.drift, marker="o", markersize=4)
    axes.set_title("where loss starts: activations after each layer", fontsize=9)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("||h - plain|| / ||plain||")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_bits(axes: Any, result: CalibrationResult, beside: list[Quality], own: Quality) -> None:
    axes.scatter([one.bits for one in beside], [one.kl for one in beside], s=20, label="rounded alone")
    for one in beside:
        axes.annotate(one.format, (one.bits, one.kl), fontsize=7, xytext=(4, 3), textcoords="offset points")
    if result.steps:
        axes.plot(
            [step.bits for step in result.steps],
            [step.loss for step in result.steps],
            color="0.5",
            label="best choice for a budget (sum of losses)",
        )
    axes.scatter([own.bits], [own.kl], marker="*", s=120, color="C3", label=result.recipe)
    axes.set_title("bits against quality, on calibration text", fontsize=9)
    axes.set_xlabel("bits of a value, scales included")
    axes.set_ylabel("KL from the plain model, nats a token")
    axes.set_yscale("log")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
