"""Tables for the terminal."""

from __future__ import annotations

from itertools import takewhile

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fewbits.inference.export import QuantizeResult
from fewbits.words import size


def quantization_table(result: QuantizeResult) -> Group:
    """One row for each packed weight, and what it adds up to."""
    prefix = _common_path([layer.name for layer in result.layers])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column(f"{prefix}*" if prefix else "layer", no_wrap=True)
    for heading in ("format", "shape", "rel. error", "SNR dB", "bits/value", "bytes"):
        table.add_column(heading, justify="left" if heading == "format" else "right", no_wrap=True)
    for layer in result.layers:
        table.add_row(
            layer.name.removeprefix(prefix),
            layer.format,
            "x".join(map(str, layer.shape)),
            f"{layer.relative_error:.5f}",
            "exact" if layer.snr_db is None else f"{layer.snr_db:.1f}",
            f"{layer.bits_per_value:.3f}",
            f"{layer.bytes_after:,}",
        )
    before, after = sum(x.bytes_before for x in result.layers), sum(x.bytes_after for x in result.layers)
    worst = max(result.layers, key=lambda layer: layer.relative_error)
    return Group(
        table,
        Text(),
        Text(f"{len(result.layers)} weights {size(before)} -> {size(after)}, checkpoint ")
        .append(f"{size(result.bytes_before)} -> {size(result.bytes_after)}", style="bold")
        .append(
            f"; relative error {result.relative_error:.4f}, largest {worst.relative_error:.4f} ({worst.name})"
        ),
        Text(str(result.folder), style="bold"),
    )


def _common_path(names: list[str]) -> str:
    """What all names begin with, up to a dot."""
    parts = [name.split(".") for name in names]
    same = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return "".join(f"{column[0]}." for column in same)
