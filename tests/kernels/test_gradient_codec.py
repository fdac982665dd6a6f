"""Gradients to messages and back: error feedback, bad numbers, bytes; the kernels against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats import E4M3, E5M2, INT4, INT4_G32, INT8, INT8_G128, INT8_ZP, NF4, get_format
from fewbits.kernels.codec import gradient_codec as module
from fewbits.kernels.codec.gradient_codec import (
    Wire,
    dequantize_gradient,
    dequantize_gradient_ref,
    quantize_gradient,
    quantize_gradient_ref,
    reduce_gradients,
    reduce_gradients_ref,
    sum_gradients,
    sum_gradients_ref,
    wire_format,
    wire_of,
)
from fewbits.kernels.codec.gradient_codec_triton import launch_dequantize, launch_quantize, launch_sum

FORMATS = ("int8", "int4", "float8_e4m3")
# values, rows, and values of a row: None cuts into whole blocks, as DDP does; FSDP's rows end anywhere
SHAPES = ((1000, 2, None), (257, 3, None), (5, 4, None), (300, 3, 100), (130, 2, 65))


def wires(format: str, count: int, rows: int, row: int | None) -> Wire:
    made = wire_of(get_format(format), count, rows)
    return made if row is None else Wire(made.format, row)


def gradients(count: int, seed: int = 0) -> Tensor:
    """Blocks of unlike size, zeros and denormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.rand(count, generator=generator).mul(4).exp()
    x[::7] = 0.0
    x[count // 2 :] *= 1e-6
    x[-1:] = 1e-41
    return x


def sent(x: Tensor, wire: Wire, rows: int, **how) -> tuple[Tensor, Tensor]:
    """What arrives of x, and the message."""
    message, out = wire.empty(rows, "cpu"), torch.full_like(x, torch.nan)
    quantize_gradient(x, how.pop("residual", None), message, wire, **how)
    dequantize_gradient(message, out, wire)
    return out, message


# The definition.


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("count", "rows", "row"), SHAPES)
def test_what_was_sent_and_what_is_left_are_the_gradient_exactly(
    format: str, count: int, rows: int, row: int | None
) -> None:
    wire = wires(format, count, rows, row)
    x, residual = gradients(count), gradients(count, 1) * 0.01
    whole = x + residual
    arrived, _ = sent(x, wire, rows, residual=residual)
    assert torch.equal(arrived.double() + residual.double(), whole.double())
    assert not torch.equal(arrived, whole)


@pytest.mark.parametrize("format", FORMATS)
def test_over_many_steps_nothing_is_lost(format: str) -> None:
    """All that arrived, and what is left, are all gradients: the error does not grow with the steps."""
    wire, residual = wires(format, 512, 2, None), torch.zeros(512)
    total, arrived = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for step in range(50):
        x = gradients(512, step)
        total += x.double()
        arrived += sent(x, wire, 2, residual=residual)[0].double()
    left = residual.double()
    # each of 50 additions x + residual rounds once, to 2**-24 of numbers below 300
    assert (arrived + left - total).abs().max() < 50 * 300 * 2**-24
    assert left.abs().max() > 100 * 50 * 300 * 2**-24  # so it is the residual that closes the sum


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_has_the_right_mean(format: str) -> None:
    wire, x = wires(format, 256, 2, None), gradients(256)
    runs = torch.stack([sent(x, wire, 2, seed=seed + 2**40)[0].double() for seed in range(400)])
    nearest = sent(x, wire, 2)[0].double()
    spread = runs.std(0)
    moved = spread > 0
    assert moved.float().mean() > 0.5
    # a mean over 400 runs is off by 5 of its standard errors in one of 3 million
    assert ((runs.mean(0) - x).abs()[moved] < 5 * spread[moved] / 400**0.5).all()
    assert ((nearest - x).abs()[moved] > 5 * spread[moved] / 400**0.5).any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_arrive_as_nan_and_leave_no_residual(format: str, bad: float) -> None:
    wire, x = wires(format, 600, 2, None), gradients(600)
    x[3] = bad
    residual = torch.full((600,), 1e-3)
    arrived, _ = sent(x, wire, 2, residual=residual)
    assert arrived[: wire.block].isnan().all() and arrived[wire.block :].isfinite().all()
    assert (residual[: wire.block] == 0).all() and residual.isfinite().all()

    received = wire.empty(2, "cpu")
    quantize_gradient(x[: wire.row], None, received[:1], wire)
    quantize_gradient(gradients(wire.row), None, received[1:], wire)
    out = torch.zeros(wire.row)
    reduce_gradients(received, out, wire)
    assert out[3].isnan() and out[wire.block :].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_the_sum_is_that_of_the_ranks_in_their_order(format: str) -> None:
    wire = wires(format, 256, 1, None)
    parts = [gradients(256, seed) for seed in range(3)]
    received, decoded = wire.empty(3, "cpu"), []
    for i, part in enumerate(parts):
        arrived, message = sent(part, wire, 1)
        received[i] = message[0]
        decoded.append(arrived)
    exact = (decoded[0] + decoded[1] + decoded[2]) * torch.tensor(1 / 3)
    out = torch.full((256,), torch.nan)
    reduce_gradients(received, out, wire, factor=1 / 3)
    assert torch.equal(out, exact)

    message, again, residual = wire.empty(1, "cpu"), torch.empty(256), torch.zeros(256)
    sum_gradients(received, residual, message, wire, factor=1 / 3)
    dequantize_gradient(message, again, wire)
    assert torch.equal(again.double() + residual.double(), exact.double())


def test_plain_values_travel_as_they_are() -> None:
    wire = wire_of(INT8, 100, 2, plain=5)
    received = wire.empty(2, "cpu").zero_()
    wire.plain_values(received).copy_(torch.tensor([[1e-9, 2.0, 3.0], [1.0, 5.0, 1e9]]))
    message = wire.empty(1, "cpu")
    sum_gradients(received, None, message, wire, factor=0.5)
    assert wire.plain_values(message).tolist() == [[0.5, 3.5, 5e8]]


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_at_all(format: str) -> None:
    wire = wire_of(get_format(format), 0, 2)
    arrived, message = sent(torch.empty(0), wire, 2, residual=torch.empty(0))
    assert arrived.numel() == 0 and message.shape == (2, 0)
    sum_gradients(message, None, wire.empty(1, "cpu"), wire)
    reduce_gradients(message, torch.empty(0), wire)


def test_bytes_of_a_message() -> None:
    """Of a million values, against two bytes each: what the promise of the wire is."""
    for format, most in (("int8", 0.53), ("int4", 0.29), ("float8_e4m3", 0.53)):
        wire = wire_of(get_format(format), 10**6, 8)
        assert 8 * wire.row_bytes / (2 * 10**6) < most


def test_formats_of_the_wire() -> None:
    assert wire_format(INT8) == INT8_G128 and wire_format(INT4).block == (1, 64)
    assert wire_format(INT4_G32) == INT4_G32 and wire_format(E4M3).block == (1, 128)
    for other in (NF4, E5M2, INT8_ZP):
        with pytest.raises(Unsupported, match="choose int8, int4 or float8_e4m3"):
            wire_format(other)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("count", "rows", "row"), SHAPES)
def test_a_part_at_a_time_is_the_definition(
    format: str, count: int, rows: int, row: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART", 128)
    wire = wires(format, count, rows, row)
    x = gradients(count)
    x[count // 3] = torch.inf
    (left, need), (residual, message) = ((gradients(count, 1) * 0.01, wire.empty(rows, "cpu")) for _ in "ab")
    quantize_gradient_ref(x, left, need, wire)
    quantize_gradient(x, residual, message, wire)
    assert _same_messages(message, need, wire) and torch.equal(residual, left)

    (left, need), (residual, again) = ((gradients(wire.row, 2), wire.empty(1, "cpu")) for _ in "ab")
    sum_gradients_ref(message, left, need, wire, 1 / rows)
    sum_gradients(message, residual, again, wire, factor=1 / rows)
    assert _same_messages(again, need, wire) and torch.equal(residual, left)


@pytest.mark.parametrize("format", FORMATS)
def test_opcheck(format: str) -> None:
    wire = wires(format, 300, 2, None)
    text = module.text_of_format(wire.format)
    message, received = wire.empty(2, "cpu").zero_(), wire.empty(2, "cpu").zero_()
    check = torch.library.opcheck
    check(module._quantize, (gradients(300), torch.zeros(300), message, wire.row, text, 2**40))
    check(
        module._sum_again, (received, torch.zeros(wire.row), wire.empty(1, "cpu"), wire.row, text, 0.5, None)
    )
    check(module._reduce, (received, torch.empty(wire.row), wire.row, text, 0.5))
    check(module._dequantize, (received, torch.empty(300), wire.row, text))


# The kernels: the same bits.


@pytest.mark.interpret
@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("count", "rows", "row"), SHAPES)
@pytest.mark.parametrize("seed", [None, 2**62 + 12345, -(2**61) + 7])
def test_kernels_are_the_definition(
    format: str, count: int, rows: int, row: int | None, seed: int | None, kernel_device: str, poisoned_memory
) -> None:
    wire = wires(format, count, rows, row)
    x = gradients(count)
    x[count // 3] = torch.nan
    # Triton's interpreter cuts where a GPU rounds to bfloat16
    feedback = torch.bfloat16 if rows == 3 and kernel_device == "cuda" else torch.float32
    old = torch.empty(0) if rows == 4 else (gradients(count, 1) * 0.01).to(feedback)
    x = x.bfloat16() if rows == 2 else x

    need, left = wire.empty(rows, "cpu"), old.clone()
    quantize_gradient_ref(x, left, need, wire, seed)
    message, residual = wire.empty(rows, kernel_device), old.to(kernel_device)
    launch_quantize(x.to(kernel_device), residual, message, wire, seed)
    assert torch.equal(message.cpu(), need) or _same_messages(message.cpu(), need, wire)
    assert torch.equal(residual.cpu(), left)

    out, wanted = torch.empty(count, device=kernel_device), torch.empty(count)
    launch_dequantize(message, out, wire)
    dequantize_gradient_ref(need, wanted, wire)
    torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=0, equal_nan=True)

    shard, wanted = torch.empty(wire.row, device=kernel_device), torch.empty(wire.row)
    launch_sum(message, shard, wire, 1 / rows)
    reduce_gradients_ref(need, wanted, wire, 1 / rows)
    torch.testing.assert_close(shard.cpu(), wanted, rtol=0, atol=0, equal_nan=True)

    old = gradients(wire.row, 2) * 0.01 if rows != 4 else torch.empty(0)
    again, residual = wire.empty(1, kernel_device), old.to(kernel_device)
    need_again, left = wire.empty(1, "cpu"), old.clone()
    launch_sum(message, again, wire, 1 / rows, residual=residual, seed=seed)
    sum_gradients_ref(need, left, need_again, wire, 1 / rows, seed)
    assert _same_messages(again.cpu(), need_again, wire)
    assert torch.equal(residual.cpu(), left)


def _same_messages(found: Tensor, need: Tensor, wire: Wire) -> bool:
    """Equal codes and scales, whatever bits a NaN has."""
    torch.testing.assert_close(
        wire.scales(found), wire.scales(need), rtol=0, atol=0, equal_nan=True, msg=lambda m: "scales: " + m
    )
    codes = slice(0, wire.code_bytes)
    return torch.equal(found[:, codes], need[:, codes])
