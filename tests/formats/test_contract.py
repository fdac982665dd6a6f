"""What every format in the registry promises."""

from __future__ import annotations

import dataclasses
import json
from functools import singledispatch
from itertools import pairwise
from math import prod

import pytest
import torch
from torch import Tensor

import fewbits.formats as formats
from fewbits.errors import BadInput
from fewbits.formats import (
    FORMATS,
    Codebook,
    Float8,
    Format,
    GGUFBlocks,
    IndexedInteger,
    Integer,
    Microscaling,
    NarrowInteger,
    NVFP4Blocks,
    Packed,
    Ternary,
    WholeNumbers,
    get_format,
)
from fewbits.formats.codebook import dynamic_map
from fewbits.formats.k_quants import SEARCHED
from fewbits.formats.stochastic import Stochastic

SHAPES = [
    (),
    (1,),
    (5,),
    (64,),
    (0,),
    (0, 64),
    (3, 0),
    (4, 128),
    (7, 130),
    (130, 257),
    (2, 3, 65),
    (2, 130, 64),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _is_like_another(format: Format) -> bool:
    """One format of a class and width stands for those that differ little: they are slow tests."""
    if isinstance(format, GGUFBlocks):
        return format.kind not in ("Q4_0", "Q4_1", "Q8_0", "TQ1_0", "MXFP4")
    if isinstance(format, IndexedInteger):
        return format.bits != 4
    return isinstance(format, NarrowInteger) and (format.bits in (2, 6, 7) or format.block[1] != 128)


each = pytest.mark.parametrize(
    "format",
    [pytest.param(f, marks=[pytest.mark.slow] if _is_like_another(f) else []) for f in FORMATS.values()],
    ids=list(FORMATS),
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


@singledispatch
def largest_error(format: Format) -> float:
    """Half the widest gap between neighbouring decoded values, as a share of the block's largest magnitude.

    Where a format cuts its largest values, that share of the magnitude which it may take away, if that is
    more. Double quantisation moves the scale besides: checked apart, in `test_double_scales_are_near`.
    """
    raise TypeError(type(format))


@largest_error.register
def _(format: Codebook) -> float:
    table = sorted(format.values)
    return max(b - a for a, b in pairwise(table)) / 2


@largest_error.register
def _(format: Float8) -> float:
    return 2.0**-4 if format.kind == "e4m3" else 2.0**-3


@largest_error.register
def _(format: Stochastic) -> float:
    return 1 / format.max_code / 2


@largest_error.register
def _(format: WholeNumbers) -> float:
    step = 2 / (2 * format.max_code + 1) if format.zero_point else 1 / format.max_code
    # with a zero point the interval is moved to whole steps, so its ends lose up to one more half
    return step if format.zero_point else step / 2


@largest_error.register
def _(format: IndexedInteger) -> float:
    return largest_error(format.ordered)


@largest_error.register
def _(format: Microscaling) -> float:
    """The largest element is 2 - u times its power of two, and what would be above it is cut: u / 2."""
    return {"e4m3": 2.0**-3, "e5m2": 2.0**-3, "e2m3": 2.0**-4, "e3m2": 2.0**-3, "e2m1": 2.0**-2}.get(
        format.element, 2.0**-7
    )


@largest_error.register
def _(format: NVFP4Blocks) -> float:
    """Half the step from 4 to 6, under a scale that its own rounding made up to 2**-4 larger."""
    return (1 + 2.0**-4) / 6


@largest_error.register
def _(format: Ternary) -> float:
    return 1.0


@largest_error.register
def _(format: GGUFBlocks) -> float:
    plain = {"Q4_0": 1 / 8, "Q5_0": 1 / 16, "Q4_1": 1 / 15, "Q5_1": 1 / 31, "Q8_0": 1 / 254, "MXFP4": 1 / 4}
    # The searched types may cut a value where that serves the others of its block: twice the usual share.
    searched = {"Q2_K": 2 / 3, "Q3_K": 1 / 4, "Q4_K": 2 / 15, "Q5_K": 2 / 31, "Q6_K": 1 / 32}
    usual = {**plain, **searched}.get(format.kind, 1 / 5 if format.kind.startswith("IQ4") else 1 / 2)
    return usual + 2.0**-10  # the float16 of scale and minimum


def cuts(format: Format) -> bool:
    """Whether values near a block's largest may be cut, and stochastic rounding is unbiased below only."""
    return isinstance(format, Microscaling | NVFP4Blocks | Ternary | GGUFBlocks)


def has_small_range(format: Format) -> bool:
    """Whether scales are float16, which underflow and overflow early."""
    return isinstance(format, GGUFBlocks) and format.kind != "MXFP4"


@each
def test_parts_are_as_laid_out(format: Format) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            x = torch.randn(shape).to(dtype)
            for seed in (None, 5):
                packed = format.quantize(x, seed=seed)
                assert packed.format == format
                assert packed.shape == shape
                assert packed.dtype == dtype
                made = {name: (tuple(t.shape), t.dtype) for name, t in packed.parts.items()}
                assert made == {name: tuple(spec) for name, spec in format.layout(shape).items()}
                assert list(packed.parts) == list(format.layout(shape))
                assert packed.nbytes == format.nbytes(shape)
                assert all(t.is_contiguous() for t in packed.parts.values())
                decoded = packed.dequantize()
                assert decoded.shape == shape
                assert decoded.dtype == dtype
                assert decoded.is_contiguous()


@each
def test_bytes_are_bits_per_value(format: Format) -> None:
    shape = (256, 512)
    packed = format.quantize(torch.randn(shape))
    assert packed.nbytes == format.bits_per_value(shape) * prod(shape) / 8
    assert format.bits_per_value((0, 64)) == 0
    if isinstance(format, Codebook):
        scale_bits = (8 + 32 / 256) / 64 if format.double else 32 / 64
        offset = 32 / prod(shape) if format.double else 0
        assert format.bits_per_value(shape) == 4 + scale_bits + offset


@each
def test_error_is_below_half_a_step(format: Format) -> None:
    if isinstance(format, Codebook) and format.double:
        pytest.skip("its scale is rounded too: test_double_scales_are_near")
    x = torch.randn(130, 256)
    error = (format.fake_quantize(x) - x).abs().max()
    # 2**-20: a few float32 roundings of the scale, its inverse and the products
    assert error <= (largest_error(format) + 2**-20) * x.abs().max()


@each
def test_requantising_a_decoded_tensor(format: Format) -> None:
    """The same codes; where mathematics forbids that, the true weaker one (each format's docstring)."""
    shapes: list[tuple[int, ...]] = [(130, 256), (7, 130), (2, 3, 65)]
    if isinstance(format, GGUFBlocks) and format.kind in ("Q4_1", "Q5_1"):
        shapes = shapes[:1]  # the zeros that fill up a short block count in its range, and are not decoded
    for shape in shapes:
        first = format.quantize(torch.randn(shape))
        decoded = first.dequantize()
        second = format.quantize(decoded)
        if isinstance(format, IndexedInteger):
            ordered = format.ordered.quantize(first.dequantize())  # held to its own promise: the same parts
            assert all(same_bits(second.parts[name], part) for name, part in ordered.parts.items())
        elif isinstance(format, WholeNumbers) and format.zero_point:
            # the range, and with it the scale, may change: each value moves by about half a new step at most
            blocks = formats.blocks.to_blocks(torch.ones(shape), format.block)
            scales = (blocks * first.scales.view(blocks.shape[0], 1, blocks.shape[2], 1)).expand_as(blocks)
            steps = formats.blocks.from_blocks(scales.contiguous(), shape, format.block)
            assert ((second.dequantize() - decoded).abs() <= 1.01 * steps).all()
        elif isinstance(format, Codebook) and format.double:
            second_scales, scales = format.block_scales(second), format.block_scales(first)
            table = torch.tensor(dynamic_map())
            half_gap = (table[1:] - table[:-1]).max() / 2 + 2 / 65535
            assert (
                (second_scales - scales).abs() <= half_gap * second.parts["scale_scales"].max() + 1e-6
            ).all()
        elif isinstance(format, Codebook) and format.values != formats.NF4_VALUES:
            assert torch.equal(second.dequantize(), decoded)  # -0 equals 0 here, their codes differ
            assert same_bits(second.scales, first.scales)
        elif isinstance(format, GGUFBlocks) and format.kind in SEARCHED:
            moved = (second.dequantize() - decoded).norm() / decoded.norm()
            assert moved <= largest_error(format) / 10
        else:
            assert same_bits(second.codes, first.codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each
def test_requantising_in_sixteen_bits(format: Format, dtype: torch.dtype) -> None:
    first = format.quantize(torch.randn(64, 256, dtype=dtype))
    second = format.quantize(first.dequantize())
    if isinstance(format, Integer) and not format.zero_point:
        moved = (second.dequantize(torch.float32) - first.dequantize(torch.float32)).abs().max()
        if format.bits == 8 and dtype == torch.bfloat16:
            assert moved <= 2 * first.scales.max()  # one code, and the change of the scale itself
        else:
            assert same_bits(second.codes, first.codes)
    if isinstance(format, Float8):
        assert same_bits(second.codes, first.codes)


def test_double_scales_are_near() -> None:
    x = torch.randn(256, 512)
    for format in (formats.NF4_DQ, formats.FP4_DQ):
        single = dataclasses.replace(format, double=False).quantize(x)
        double = format.quantize(x)
        assert same_bits(single.codes, double.codes)
        table = torch.tensor(dynamic_map())
        gap = (table[1:] - table[:-1]).max() / 2 + 1 / 65535
        error = (format.block_scales(double) - single.scales.flatten()).abs().max()
        assert error <= gap * double.parts["scale_scales"].max() + 1e-6


@each
def test_zeros_stay_zeros(format: Format) -> None:
    for x in (torch.zeros(3, 130), torch.zeros(70), torch.tensor(0.0)):
        assert torch.equal(format.fake_quantize(x), x)
        if not isinstance(format, Codebook):
            assert torch.equal(format.quantize(x, seed=1).dequantize(), x)


@each
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_never_a_plausible_number(format: Format, bad: float) -> None:
    x = torch.randn(4, 520)
    x[1, 300] = bad
    decoded = format.quantize(x).dequantize()
    assert decoded[1, 300].isnan()
    clean = format.quantize(x.nan_to_num(0.0, 0.0, 0.0)).dequantize()
    untouched = ~decoded.isnan()
    if isinstance(format, Codebook) and format.double:
        return  # the offset of all scales is shared, so other blocks may move in their last bits
    assert torch.equal(decoded[untouched], clean[untouched])
    if isinstance(format, Codebook):
        assert (~untouched).sum() == format.block
    elif isinstance(format, Stochastic):
        assert (~untouched).sum() == format.chunk_d
    elif isinstance(format, Microscaling | GGUFBlocks | NVFP4Blocks) and format.block[0] == 1:
        assert (~untouched).sum() == format.block[1]
    elif isinstance(format, IndexedInteger):
        assert (~untouched).sum() == format.group
    elif format.block == (1, 0):
        assert (~untouched).sum() == 520
    for seed in (None, 3):  # and the codes themselves are the same anywhere
        again = format.quantize(x, seed=seed)
        assert same_bits(again.codes, format.quantize(x.clone(), seed=seed).codes)


@each
def test_float64_beyond_float32_is_not_finite(format: Format) -> None:
    x = torch.ones(64, dtype=torch.float64)
    x[3] = 1e300
    assert format.quantize(x).dequantize()[3].isnan()


@each
def test_extremes(format: Format) -> None:
    if isinstance(format, Codebook) and format.double:
        pytest.skip("the mean of such scales says nothing")
    for magnitude in (1e-2, 1e3) if has_small_range(format) else (1e-30, 1e-20, 1e20, 1e37):
        x = torch.randn(2, 128) * magnitude
        decoded = format.fake_quantize(x)
        assert decoded.isfinite().all()
        smallest_range = 1e-5 if isinstance(format, Stochastic) else 0.0
        largest = x.abs().max().clamp(min=smallest_range)
        assert (decoded - x).abs().max() <= (largest_error(format) + 2**-20) * largest


@each
def test_non_contiguous_input(format: Format) -> None:
    x = torch.randn(130, 7)
    assert_equal_packed(format.quantize(x.t()), format.quantize(x.t().contiguous()))
    wide = torch.randn(4, 3, 256)
    assert_equal_packed(format.quantize(wide[:, 1, ::2]), format.quantize(wide[:, 1, ::2].contiguous()))


@each
def test_input_and_autograd_are_left_alone(format: Format) -> None:
    x = torch.randn(8, 128, requires_grad=True)
    before = x.detach().clone()
    packed = format.quantize(x)
    assert not any(t.requires_grad for t in packed.parts.values())
    kept = {name: part.clone() for name, part in packed.parts.items()}
    packed.dequantize()
    assert torch.equal(x, before)
    assert all(same_bits(part, kept[name]) for name, part in packed.parts.items())


@each
def test_decoding_to_another_dtype_rounds_once(format: Format) -> None:
    packed = format.quantize(torch.randn(16, 192))
    assert torch.equal(packed.dequantize(torch.bfloat16), packed.dequantize().to(torch.bfloat16))


@each
def test_plain_data_both_ways(format: Format) -> None:
    assert get_format(format.name) is format
    assert formats.format_to_config(format) == format.name
    other = {"block": 128 if isinstance(format, Codebook) else (1, 24)}
    if isinstance(format, Stochastic):
        other = {"seed_b": (1, 3, 5, 7, 11, 1, 9, 127), "stoc_len": 48}
    if isinstance(format, IndexedInteger):
        other = {"group": 64}
    if isinstance(format, GGUFBlocks):
        other = {"kind": "Q4_1" if format.kind == "Q4_0" else "Q4_0"}
    changed = dataclasses.replace(format, **other)
    plain = json.loads(json.dumps(formats.format_to_config(changed)))
    assert get_format(plain) == changed
    assert hash(changed) != hash(format)


def test_unknown_names_and_fields() -> None:
    with pytest.raises(BadInput, match="no number format named 'nf5'"):
        get_format("nf5")
    with pytest.raises(BadInput, match="no field"):
        get_format({"name": "nf4", "blok": 3})
    with pytest.raises(BadInput, match="floating-point"):
        formats.NF4.quantize(torch.arange(4))


def test_large_tensors_go_in_chunks_without_a_trace() -> None:
    """More values than one chunk: the same as block by block, and stochastic bits keep their positions."""
    x = torch.randn(1100, 1024)
    for format in (formats.NF4, formats.FP4):
        for seed in (None, 9):
            whole = format.quantize(x, seed=seed)
            if seed is None:
                rows = format.quantize(x[1050:])
                assert same_bits(whole.codes[1050:], rows.codes)
                assert torch.equal(whole.dequantize()[1050:], rows.dequantize())
            assert whole.dequantize().isfinite().all()


@each
def test_stochastic_rounding_depends_on_seed_alone(format: Format) -> None:
    x = torch.randn(16, 256)
    first = format.quantize(x, seed=1)
    assert_equal_packed(first, format.quantize(x, seed=1))
    assert not same_bits(first.codes, format.quantize(x, seed=2).codes)


@each
def test_stochastic_rounding_is_unbiased(format: Format) -> None:
    """The mean over n seeds lies within 6 standard errors; a step s makes a deviation of s / 2 at most.

    With a scale that is itself rounded (``double``) the mean is that of the rounded scale's grid.
    """
    if isinstance(format, Codebook) and format.double:
        pytest.skip("codes are those of the format without double quantisation")
    n = 100
    x = torch.randn(2, 128)
    x[:, 0] = 4.0  # every block of a row begins with its largest magnitude, or a smaller one of its own
    mean = torch.stack([format.quantize(x, seed=s).dequantize() for s in range(n)]).double().mean(0)
    deviation = largest_error(format) * x.abs().max()
    if cuts(format):
        inside = x.abs() < 0.7  # ternary's scale, the mean magnitude, is above
        mean, x = mean[inside], x[inside]
    assert ((mean - x).abs() <= 6 * deviation / n**0.5).all()
    assert (mean - x).mean().abs() <= 6 * deviation / (n * x.numel()) ** 0.5


def assert_equal_packed(a: Packed, b: Packed) -> None:
    assert a.parts.keys() == b.parts.keys()
    for name in a.parts:
        assert same_bits(a.parts[name], b.parts[name]), name
