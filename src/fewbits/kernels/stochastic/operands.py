"""Checks of what `sc_matmul` is given: operands, options, and stream lengths as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.stochastic import Stochastic, stochastic_options
from fewbits.formats.streams import Seed, default_directions

# What a prepared operand depends on.
PREPARED_FIELDS = ("mode", "granularity", "sc_prec", "chunk_d")


class Arithmetic(TypedDict, total=False):
    """Fields of `Stochastic` that say which arithmetic it is; that class explains them.

    Attributes:
        sequence: family of the sequences.
        seed_a: what a's sequence starts from.
        seed_b: the same for b.
        planned_len: steps that the streams are made for (early termination).
        gate: "enable" or "and".
        signs: "magnitude" or "twos_complement".
        or_group: dimensions that share a counter; it divides the inner dimensions of every chunk.
        flip_rate: share of stream bits that are inverted.
        flip_seed: which ones.
    """

    sequence: str
    seed_a: Seed
    seed_b: Seed
    planned_len: int | None
    gate: str
    signs: str
    or_group: int
    flip_rate: float
    flip_seed: int


class LengthTable(NamedTuple):
    """The stream lengths of a's rows in each chunk: ``levels[which[b, n, c]]``."""

    levels: tuple[int, ...]
    which: Tensor | None  # (B or 1, N or 1, C or 1) int64, on the operands' device; None: all levels[0]


def length_table(stoc_len: Any, a: Tensor, options: Stochastic) -> LengthTable:
    """``sc_matmul``'s ``stoc_len`` for an operand a of two or three dimensions.

    a is (N, D) or (B, N, D); ``stoc_len`` a number, or lengths of the rows (N,), or of rows and chunks.

    Raises:
        BadInput: other than whole numbers in range, or a shape that fits neither rows nor chunks.
    """
    if stoc_len is None or isinstance(stoc_len, int):
        return LengthTable((options.streams.length,), None)
    lengths = _length_tensor(stoc_len)
    lowest, longest = (0 if options.bipolar else 1), options.longest
    if lengths.numel() and not lowest <= int(lengths.min()) <= int(lengths.max()) <= longest:
        wrong = int(lengths.min()) if int(lengths.min()) < lowest else int(lengths.max())
        raise BadInput(
            f"stoc_len holds {wrong}; give stream lengths from {lowest} to {longest}"
            f"{' (0 skips a part)' if options.bipolar else ''}."
        )
    lengths = _by_rows_and_chunks(lengths, a, len(options.chunks(a.shape[-1])))
    levels, index = torch.unique(lengths, return_inverse=True)
    if len(levels) <= 1:
        return LengthTable((int(levels[0]) if len(levels) else options.streams.length,), None)
    return LengthTable(tuple(levels.tolist()), index.to(a.device))


def _length_tensor(stoc_len: Any) -> Tensor:
    try:
        lengths = torch.as_tensor(stoc_len)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"stoc_len={stoc_len!r} is refused: give a whole number or a tensor of them."
        ) from error
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise BadInput(f"stoc_len is refused: its numbers are {lengths.dtype}, give whole ones.")
    return lengths


def _by_rows_and_chunks(lengths: Tensor, a: Tensor, chunks: int) -> Tensor:
    """(B or 1, N or 1, C or 1)."""
    *_, N, _ = a.shape
    if a.dim() == 2:
        need, table = (N, chunks), lengths[:, None] if lengths.dim() == 1 else lengths
    else:
        need, table = (a.shape[0], N), lengths[None] if lengths.dim() == 1 else lengths
    if table.dim() != 2 or any(n not in (1, whole) for n, whole in zip(table.shape, need, strict=True)):
        kind = "rows and chunks" if a.dim() == 2 else "entries and rows"
        raise BadInput(
            f"stoc_len has shape {tuple(lengths.shape)} and a has {need} {kind}; give ({N},) or a shape "
            "that expands to them."
        )
    return table[None] if a.dim() == 2 else table[..., None]


def check_operands(a: Any, b: Any, options: Stochastic) -> None:
    """Refuse operands that do not fit one another or the options.

    Raises:
        BadInput: the reason.
        Unsupported: groups that scmp_kernels has not either.
    """
    for name, x in (("a", a), ("b", b)):
        if name == "b" and isinstance(x, Packed):
            check_prepared(x, options)
        elif not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise BadInput(f"{name} is {kind}, and a product needs floating-point tensors; convert it first.")
    b_shape = tuple(b.shape)
    device = b.codes.device if isinstance(b, Packed) else b.device
    if a.device != device:
        raise BadInput(f"a is on {a.device} and b on {device}; move both to one device.")
    shapes = f"a is {tuple(a.shape)} and b {b_shape}"
    if a.dim() not in (2, 3) or a.dim() != len(b_shape):
        raise BadInput(f"{shapes}; give both two dimensions, or both three.")
    if a.shape[-1] != b_shape[-1]:
        raise BadInput(f"{shapes}; the last dimensions must be equal.")
    if a.shape[:-2] != b_shape[:-2]:
        raise BadInput(f"{shapes}; the leading dimensions must be equal.")
    _check_fit(a, b_shape, options)


def _check_fit(a: Tensor, b_shape: tuple[int, ...], options: Stochastic) -> None:
    """Refuse options that need operands of other dimensions."""
    if options.granularity == "per_head" and a.dim() != 3:
        raise BadInput('granularity "per_head" needs operands of three dimensions; add a leading one.')
    if options.chunk_d and a.dim() != 2:
        raise BadInput(
            f"chunk_d={options.chunk_d} needs operands of two dimensions; give one batch at a time."
        )
    if a.dim() == 3 and options.granularity == "per_row" and options.bipolar:
        for name, group, rows in (
            ("group_a", options.group_a, a.shape[1]),
            ("group_b", options.group_b, b_shape[1]),
        ):
            if 1 < group < rows:
                raise Unsupported(
                    f"{name}={group} with bipolar operands of three dimensions; "
                    f"use 1, or at least {rows} rows."
                )


def prepared_options(b: Packed) -> Stochastic:
    """The options with which an operand (M, D) was prepared.

    Raises:
        BadInput: it is of another format.
    """
    options = stochastic_options(b.format)
    if options is None:
        raise BadInput(
            f"b is packed as {b.format.name!r}, not prepared for stochastic computing; "
            "dequantise it, or quantise it with a Stochastic format."
        )
    return options


def check_prepared(b: Packed, options: Stochastic) -> None:
    """Refuse a prepared operand of another format, or of other codes than the options say.

    Raises:
        BadInput: the reason.
    """
    prepared_options(b)
    for field in PREPARED_FIELDS:
        theirs, ours = getattr(b.format, field), getattr(options, field)
        if theirs != ours and not _same_chunks(field, b, options):
            raise BadInput(
                f"b was prepared with {field}={theirs!r} and the product asks for {field}={ours!r}; "
                "give both the same."
            )
    if not options.prepares:
        raise BadInput(
            f"b was prepared with a scale per row; group_a={options.group_a} and group_b={options.group_b} "
            "must be 1."
        )


def _same_chunks(field: str, b: Packed, options: Stochastic) -> bool:
    D = b.shape[-1]
    return field == "chunk_d" and len(prepared_options(b).chunks(D)) == len(options.chunks(D)) == 1


def check_smooth(smooth_scales: Any, a: Tensor) -> None:
    """Refuse smooth scales that are not one number for each inner dimension, on a's device.

    a is (..., D), and smooth scales are (D,).

    Raises:
        BadInput: the reason.
    """
    if not isinstance(smooth_scales, Tensor) or smooth_scales.shape != a.shape[-1:]:
        shape = tuple(smooth_scales.shape) if isinstance(smooth_scales, Tensor) else smooth_scales
        raise BadInput(f"smooth_scales is {shape}; give a tensor of shape ({a.shape[-1]},).")
    if smooth_scales.device != a.device:
        raise BadInput(
            f"smooth_scales is on {smooth_scales.device} and a on {a.device}; move both to one device."
        )


def check_finite(operands: Mapping[str, Tensor], *, smoothed: bool) -> None:
    """Refuse NaN and infinities, in an operand or in the scales that tell of them.

    Each operand may have any shape.

    Raises:
        BadInput: the operand's name.
    """
    for name, x in operands.items():
        if not x.isfinite().all():
            after = " after smooth_scales" if smoothed else ""
            raise BadInput(f"{name} has NaN or infinite values{after}; a scale needs finite ones.")


def sequences_of(config: Any, sc_prec: int, D: int) -> dict[str, Any]:
    """The fields of `Stochastic` that say what scmp_kernels' ``config`` says.

    Covered: a pool of Sobol generators of which each operand uses one for all of its dimensions, without a
    bit permutation.

    Raises:
        BadInput: not such a mapping, or one for fewer than D dimensions.
        Unsupported: a pool or a permutation that has no equivalent here.
    """
    try:
        pool, sides = config["rng_pool"], config["sng"]
        chosen = {side: {_entry(e) for e in sides[key]} for side, key in (("a", "q"), ("b", "k"))}
        generators = {side: [pool[i] for i, _ in entries] for side, entries in chosen.items()}
        covered = min(len(sides["q"]), len(sides["k"]))
    except (TypeError, KeyError, IndexError) as error:
        raise BadInput(
            'config needs "rng_pool" and "sng" with the lists "q" and "k", as scmp_kernels writes them; or '
            "give sequence, seed_a and seed_b."
        ) from error
    if covered < D:
        raise BadInput(f"config has generators for {covered} inner dimensions and the operands have {D}.")
    for side, entries in chosen.items():
        permuted = any(permutation is not None for _, permutation in entries)
        if len(entries) != 1 or permuted or generators[side][0].get("type") != "sobol":
            raise Unsupported(
                "config is understood with one Sobol generator an operand and no bit permutations; "
                'for others give sequence="lfsr" or "random" with seed_a and seed_b.'
            )
    return {"sequence": "sobol"} | {
        f"seed_{side}": _directions(numbers[0], side, sc_prec) for side, numbers in generators.items()
    }


def _entry(entry: Mapping[str, Any]) -> tuple[int, tuple[int, ...] | None]:
    permutation = entry.get("scramble")
    return int(entry["rng_id"]), None if permutation is None else tuple(permutation)


def _directions(generator: Mapping[str, Any], side: str, sc_prec: int) -> tuple[int, ...] | None:
    seed: Sequence[int] | None = generator.get("seed")
    if seed is not None:
        return tuple(seed)
    kind = generator.get("seed_type", "q")
    if (kind == "q") == (side == "a"):
        return None
    return default_directions(sc_prec, "a" if kind == "q" else "b")
