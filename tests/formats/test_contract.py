"""What every format in the registry promises."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits.formats as formats
from fewbits.errors import BadInput, Unsupported
from fewbits.formats import FORMATS, Format, Packed, get_format
from fewbits.formats.blocks import from_blocks, to_blocks
from fewbits.formats.codebook import dynamic_map
from tests.every_format import every_format

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


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def block_absmax(x: Tensor, format: Format) -> Tensor:
    """The largest magnitude of each value's block, of x's shape."""
    if getattr(format.contract.coding, "through", False):  # blocks begin at any place of a row
        columns = format.contract.block[1]
        rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % columns)).view(-1, columns)
        largest = rows.abs().amax(1, keepdim=True).expand_as(rows).flatten()
        return largest[: x.numel()].view(x.shape)
    blocks = to_blocks(x, format.contract.block)
    largest = blocks.abs().amax((1, 3), keepdim=True).expand_as(blocks)
    return from_blocks(largest.contiguous(), tuple(x.shape), format.contract.block)


def values_of_a_block(format: Format, shape: tuple[int, int]) -> int:
    rows, columns = format.contract.block
    if (rows, columns) == (0, 0):
        return prod(shape)
    return min(rows, shape[0]) * (columns or shape[1])


def another(format: Format) -> Iterator[dict[str, Any]]:
    """Fields with other values than this format has: some of them may be refused."""
    siblings = [f for f in FORMATS.values() if type(f) is type(format)]
    for field in dataclasses.fields(format):
        value = getattr(format, field.name)
        if field.name == "name":
            continue
        others = [getattr(f, field.name) for f in siblings]
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [2 * value, 4, 24]
        elif isinstance(value, tuple) and len(value) == 2:
            others = [(1, 24)]
        yield from ({field.name: other} for other in others if other != value)


@every_format
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
                # a view into more memory holds it all, and safetensors refuses it
                assert all(t.untyped_storage().nbytes() == t.nbytes for t in packed.parts.values())
                decoded = packed.dequantize()
                assert decoded.shape == shape
                assert decoded.dtype == dtype
                assert decoded.is_contiguous()


def test_a_table_without_one_of_its_ends_promises_what_it_keeps() -> None:
    """Of -8/8 ... 7/8 a block's largest magnitude may lose an eighth, and a second scale is another."""
    table = formats.Codebook(name="eighths", values=tuple(i / 8 for i in range(-8, 8)), block=32)
    assert (table.contract.largest_error, table.contract.again) == (1 / 8, "nothing")
    test_error_is_below_half_a_step(table)
    test_stochastic_rounding_is_unbiased(table)
    assert formats.NF4.contract.again == "codes" and not formats.NF4.contract.cuts


@every_format
def test_bytes_are_bits_per_value(format: Format) -> None:
    shape = (256, 512)
    packed = format.quantize(torch.randn(shape))
    assert packed.nbytes == format.bits_per_value(shape) * prod(shape) / 8
    assert format.bits_per_value((0, 64)) == 0


def test_bits_of_a_codebook_are_its_codes_and_its_scales() -> None:
    for format in (formats.NF4, formats.NF4_DQ, formats.FP4, formats.FP4_DQ):
        scale_bits = (8 + 32 / 256) / 64 if format.double else 32 / 64
        offset = 32 / (256 * 512) if format.double else 0
        assert format.bits_per_value((256, 512)) == 4 + scale_bits + offset


@every_format
def test_error_is_below_half_a_step(format: Format) -> None:
    if not format.contract.exact_scale:
        pytest.skip("its scale is rounded too: test_double_scales_are_near")
    x = torch.randn(130, 256)
    error = (format.fake_quantize(x) - x).abs()
    # 2**-20: a few float32 roundings of the scale, its inverse and the products
    bound = (format.contract.largest_error + 2**-20) * block_absmax(x, format)
    assert (error <= bound).all(), "Contract.largest_error: does it include what rounding the scale adds?"


@every_format
def test_requantising_a_decoded_tensor(format: Format) -> None:
    """The same codes; where mathematics forbids that, the true weaker one (each format's docstring)."""
    again, error = format.contract.again, format.contract.largest_error
    shapes: list[tuple[int, ...]] = [(130, 256), (7, 130), (2, 3, 65)]
    # "whole": the zeros that fill up a short block count in its range, and are not decoded
    for shape in shapes[:1] if again == "whole" else shapes:
        first = format.quantize(torch.randn(shape))
        decoded = first.dequantize()
        second = format.quantize(decoded)
        moved = second.dequantize() - decoded
        wrong = f"Contract.again is {again!r}: state what quantising a decoded tensor gives, or mend quantize"
        if again in ("codes", "whole"):
            assert same_bits(second.codes, first.codes), wrong
        elif again == "values":
            assert torch.equal(second.dequantize(), decoded), wrong  # -0 equals 0 here, their codes differ
            assert same_bits(second.scales, first.scales), wrong
        elif again == "moved":
            assert (moved.abs() <= 1.01 * error * block_absmax(decoded, format)).all(), wrong
        elif again == "near":
            assert moved.norm() <= error / 10 * decoded.norm(), wrong
        else:
            assert again == "nothing", wrong


def test_double_scales_move_by_half_a_step_when_requantised() -> None:
    for format in (formats.NF4_DQ, formats.FP4_DQ):
        first = format.quantize(torch.randn(130, 256))
        second = format.quantize(first.dequantize())
        table = torch.tensor(dynamic_map())
        half_gap = (table[1:] - table[:-1]).max() / 2 + 2 / 65535
        moved = (format.block_scales(second) - format.block_scales(first)).abs()
        assert (moved <= half_gap * second.parts["scale_scales"].max() + 1e-6).all()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)], ids=str)
@every_format
def test_requantising_in_sixteen_bits(format: Format, dtype: torch.dtype, bits: int) -> None:
    first = format.quantize(torch.randn(64, 256, dtype=dtype))
    second = format.quantize(first.dequantize())
    if format.contract.again == "codes" and bits >= format.contract.again_bits:
        assert same_bits(second.codes, first.codes)
    elif format.contract.again == "codes" and bits + 1 == format.contract.again_bits:
        moved = second.dequantize(torch.float32) - first.dequantize(torch.float32)
        step = 2 * format.contract.largest_error * block_absmax(first.dequantize(torch.float32), format)
        assert (moved.abs() <= 2.01 * step).all()  # one code, and the change of the scale itself


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


@every_format
def test_zeros_stay_zeros(format: Format) -> None:
    for x in (torch.zeros(3, 130), torch.zeros(70), torch.tensor(0.0)):
        assert torch.equal(format.fake_quantize(x), x)
        assert torch.equal(format.quantize(x, seed=1).dequantize(), x)


@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_never_a_plausible_number(format: Format, bad: float) -> None:
    x = torch.randn(4, 520)
    x[1, 300] = bad
    decoded = format.quantize(x).dequantize()
    assert decoded[1, 300].isnan(), "a block with a value that is not finite decodes to NaN"
    clean = format.quantize(x.nan_to_num(0.0, 0.0, 0.0)).dequantize()
    untouched = ~decoded.isnan()
    if not format.contract.exact_scale:
        return  # the offset of all scales is shared, so other blocks may move in their last bits
    assert torch.equal(decoded[untouched], clean[untouched])
    assert (~untouched).sum() == values_of_a_block(format, (4, 520)), (
        "Contract.block: what becomes NaN together"
    )
    for seed in (None, 3):  # and the codes themselves are the same anywhere
        again = format.quantize(x, seed=seed)
        assert same_bits(again.codes, format.quantize(x.clone(), seed=seed).codes)


@every_format
def test_float64_beyond_float32_is_not_finite(format: Format) -> None:
    x = torch.ones(64, dtype=torch.float64)
    x[3] = 1e300
    assert format.quantize(x).dequantize()[3].isnan()


@every_format
def test_extremes(format: Format) -> None:
    if not format.contract.exact_scale:
        pytest.skip("the mean of such scales says nothing")
    least, most = format.contract.magnitudes
    for magnitude in sorted({least, most} | {m for m in (1e-20, 1e20) if least < m < most}):
        x = torch.randn(2, 128) * magnitude
        decoded = format.fake_quantize(x)
        assert decoded.isfinite().all(), f"{magnitude:.0e} is inside Contract.magnitudes: narrow them?"
        largest = x.abs().max().clamp(min=format.contract.least_range)
        bound = (format.contract.largest_error + 2**-20) * largest
        assert (decoded - x).abs().max() <= bound, f"around {magnitude:.0e}: outside Contract.magnitudes?"


@every_format
def test_non_contiguous_input(format: Format) -> None:
    x = torch.randn(130, 7)
    assert_equal_packed(format.quantize(x.t()), format.quantize(x.t().contiguous()))
    wide = torch.randn(4, 3, 256)
    assert_equal_packed(format.quantize(wide[:, 1, ::2]), format.quantize(wide[:, 1, ::2].contiguous()))


@every_format
def test_input_and_autograd_are_left_alone(format: Format) -> None:
    x = torch.randn(8, 128, requires_grad=True)
    before = x.detach().clone()
    packed = format.quantize(x)
    assert not any(t.requires_grad for t in packed.parts.values())
    kept = {name: part.clone() for name, part in packed.parts.items()}
    packed.dequantize()
    assert torch.equal(x, before)
    assert all(same_bits(part, kept[name]) for name, part in packed.parts.items())


@every_format
def test_decoding_to_another_dtype_rounds_once(format: Format) -> None:
    packed = format.quantize(torch.randn(16, 192))
    assert torch.equal(packed.dequantize(torch.bfloat16), packed.dequantize().to(torch.bfloat16))


@every_format
def test_plain_data_both_ways(format: Format) -> None:
    assert get_format(format.name) is format
    assert formats.format_to_config(format) == format.name
    changed = []
    for other in another(format):
        try:
            changed.append(dataclasses.replace(format, **other))
        except (BadInput, Unsupported):
            continue  # such a value cannot be, or not beside the other fields
    assert changed
    for value in changed:
        plain = json.loads(json.dumps(formats.format_to_config(value)))
        assert get_format(plain) == value
        assert hash(value) != hash(format)


def test_seeds_of_streams_are_plain_data() -> None:
    changed = dataclasses.replace(formats.STOCHASTIC, seed_b=(1, 3, 5, 7, 11, 1, 9, 127), stoc_len=48)
    assert get_format(json.loads(json.dumps(formats.format_to_config(changed)))) == changed


def test_unknown_names_and_fields() -> None:
    with pytest.raises(BadInput, match="no number format named 'nf5'"):
        get_format("nf5")
    with pytest.raises(BadInput, match=r"did you mean 'int8'.*mxfp4"):
        get_format("INT8 ")
    with pytest.raises(BadInput, match="did you mean 'hqq4_g64'"):  # what begins so, not what is as long
        get_format("hqq4")
    with pytest.raises(BadInput, match="'vqx3'; known: "):
        get_format("vqx3")
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


@every_format
def test_stochastic_rounding_depends_on_seed_alone(format: Format) -> None:
    x = torch.randn(16, 256)
    first = format.quantize(x, seed=1)
    assert_equal_packed(first, format.quantize(x, seed=1))
    assert not same_bits(first.codes, format.quantize(x, seed=2).codes), "is the blocks' `uniform` used?"


@every_format
def test_stochastic_rounding_is_unbiased(format: Format) -> None:
    """The mean over n seeds lies within 6 standard errors; a step s makes a deviation of s / 2 at most.

    With a scale that is itself rounded (``double``) the mean is that of the rounded scale's grid.
    """
    if not format.contract.exact_scale:
        pytest.skip("codes are those of the format without double quantisation")
    n = 100
    x = torch.randn(2, 128)
    x[:, 0] = 4.0  # every block of a row begins with its largest magnitude, or a smaller one of its own
    mean = torch.stack([format.quantize(x, seed=s).dequantize() for s in range(n)]).double().mean(0)
    deviation = format.contract.largest_error * x.abs().max()
    if format.contract.cuts:
        inside = x.abs() < 0.7  # ternary's scale, the mean magnitude, is above
        mean, x = mean[inside], x[inside]
    wrong = "rounding with a seed is not unbiased: are ends cut (Contract.cuts), is `uniform` used?"
    assert ((mean - x).abs() <= 6 * deviation / n**0.5).all(), wrong
    assert (mean - x).mean().abs() <= 6 * deviation / (n * x.numel()) ** 0.5, wrong


def assert_equal_packed(a: Packed, b: Packed) -> None:
    assert a.parts.keys() == b.parts.keys()
    for name in a.parts:
        assert same_bits(a.parts[name], b.parts[name]), name


def test_a_pickled_format_takes_its_contract_from_the_code_that_reads_it() -> None:
    saved = pickle.dumps(formats.NF4)
    assert b"largest_error" not in saved and b"contract" not in saved
    read = pickle.loads(saved)
    assert read == formats.NF4 and read.contract == formats.NF4.contract and read.text == formats.NF4.text


def test_a_changed_format_is_not_told_as_the_named_one() -> None:
    assert formats.format_in_words(formats.NF4) == "nf4"
    table = tuple(value / 2 for value in formats.NF4.values)
    changed = dataclasses.replace(formats.NF4, values=table, block=32)
    assert formats.format_in_words(changed) == "nf4 with values, block 32"
    own = dataclasses.replace(formats.NF4, name="mine", block=32)
    assert formats.format_in_words(own) == "mine"
