"""Codes, scales and exponents of every quantiser against the second definition in `tests.te.reference`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fewbits.te as te
from fewbits.formats.bits import unpack_bits
from fewbits.formats.minifloat import E2M1
from fewbits.kernels.codec.small_blocks import e2m1_codes
from fewbits.te.arithmetic.float4 import rotate
from tests.te import reference

SHAPES = [(1, 1), (3, 37), (33, 150), (130, 65)]
TYPES = {"e4m3": te.DType.kFloat8E4M3, "e5m2": te.DType.kFloat8E5M2}


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fresh numbers of many sizes; some columns are zero."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, (shape[0], 1)).float())
    x[:, ::7] *= 0
    return x.to(dtype)


def bytes_of(codes: torch.Tensor) -> np.ndarray:
    """Codes as bytes; minus zero counts as zero where a product of zeros has a sign."""
    return codes.contiguous().view(torch.uint8).numpy()


def same(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return bool((bytes_of(ours) == theirs).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling(shape: tuple[int, int], kind: str, power_of_two: bool) -> None:
    x = matrix(shape)
    quantizer = te.Float8CurrentScalingQuantizer(TYPES[kind], force_pow_2_scales=power_of_two)
    operand = quantizer.operand(x, rows=True, columns=True)
    codes, scale = reference.per_tensor(x.numpy(), kind, power_of_two)
    assert same(operand.rows.codes, codes) and float(operand.rows.scales) == scale
    assert same(operand.columns.codes, codes.T) and operand.columns.shape == shape[::-1]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 3e38])
def test_current_scaling_at_the_ends(amax: float) -> None:
    x = torch.tensor([[amax, -amax, 0.0]])
    packed = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn).operand(x, rows=True, columns=False).rows
    multiplier = reference.multiplier(np.float32(amax), "e4m3", False)
    assert float(packed.scales) == np.float32(1) / multiplier
    assert same(packed.codes, reference.float8((x.numpy() * multiplier).astype(np.float32), "e4m3"))


@pytest.mark.parametrize("shape", [(2, 129), (130, 300)])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_128(shape: tuple[int, int], dims: int, power_of_two: bool) -> None:
    x = matrix(shape)
    quantizer = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, block_scaling_dim=dims, force_pow_2_scales=power_of_two
    )
    operand = quantizer.operand(x, rows=True, columns=True)
    for packed, real in ((operand.rows, x), (operand.columns, x.t())):
        codes, scales = reference.by_block(real.numpy(), "e4m3", 1 if dims == 1 else 128, 128, power_of_two)
        assert same(packed.codes, codes) and (packed.scales.numpy() == scales).all()
        if power_of_two:
            assert (torch.frexp(packed.scales).mantissa == 0.5).all()


@pytest.mark.parametrize("shape", [(1, 31), (5, 97), (70, 64)])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tile", [False, True])
def test_mxfp8(shape: tuple[int, int], kind: str, tile: bool) -> None:
    x = matrix(shape, torch.bfloat16)
    operand = te.MXFP8Quantizer(TYPES[kind], with_2d_quantization=tile).operand(x, rows=True, columns=True)
    for packed, real in ((operand.rows, x), (operand.columns, x.t())):
        codes, exponents = reference.microscaled(real.float().numpy(), kind, 32 if tile else 1)
        assert same(packed.codes, codes) and (packed.scales.numpy() == exponents).all()
        back = (
            codes_to_values(codes, kind)
            * np.exp2(np.repeat(exponents, 32, 1)[:, : real.shape[1]] - 127.0)[
                np.arange(len(real)) // (32 if tile else 1)
            ]
        )
        assert (packed.dequantize(torch.float32).numpy() == back.astype(np.float32)).all()


def codes_to_values(codes: np.ndarray, kind: str) -> np.ndarray:
    values = np.array(reference.magnitudes(kind))
    return values[codes & 127] * np.where(codes & 128, -1.0, 1.0)


@pytest.mark.parametrize("exponent", [-140, -127, -126, -40, 0, 60, 118])
@pytest.mark.parametrize("factor", [1.0, 1.0 + 2**-20, 1.5])
def test_mxfp8_exponents(exponent: int, factor: float) -> None:
    amax = np.float32(448.0 * factor * 2.0**exponent)
    packed = te.MXFP8Quantizer(torch.float8_e4m3fn).operand(
        torch.tensor([[float(amax)]]), rows=True, columns=False
    )
    assert int(packed.rows.scales) == reference.e8m0(float(amax), "e4m3")


@pytest.mark.parametrize("shape", [(1, 15), (5, 33), (40, 48)])
@pytest.mark.parametrize("tile", [False, True])
def test_nvfp4(shape: tuple[int, int], tile: bool) -> None:
    x = torch.randn(shape) * torch.exp2(torch.randint(-6, 6, (shape[0], 1)).float())
    operand = te.NVFP4Quantizer(with_2d_quantization=tile).operand(x, rows=True, columns=True)
    for packed, real in ((operand.rows, x), (operand.columns, x.t())):
        codes, scales, amax = reference.float4(real.numpy(), 16 if tile else 1)
        width = packed.codes.shape[1] * 2
        ours = unpack_bits(packed.codes, 4, width)[:, : real.shape[1]]
        assert (ours.numpy() == codes).all() and same(packed.scales, scales)
        assert float(packed.parts["amax"]) == amax
        values = np.array(E2M1.values)[codes]
        back = (
            values
            * np.array(reference.magnitudes("e4m3"))[
                np.repeat(np.repeat(scales, 16, 1), 16 if tile else 1, 0)[: len(real), : real.shape[1]]
            ]
            * (amax / 2688)
        )
        torch.testing.assert_close(packed.dequantize().double().numpy(), back, rtol=3e-7, atol=0)


def test_nvfp4_stochastic_rounding_is_unbiased_and_seeded() -> None:
    x = torch.full((4096,), 2.3)
    uniform = torch.rand(4096)
    codes = e2m1_codes(x, uniform)
    assert set(codes.tolist()) == {4, 5} and ((codes == 5) == (uniform < x - 2)).all()
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    big = torch.randn(64, 256)
    torch.manual_seed(5)
    first, second = (quantizer.operand(big, rows=True, columns=False).rows.dequantize() for _ in range(2))
    torch.manual_seed(5)
    again = quantizer.operand(big, rows=True, columns=False).rows.dequantize()
    assert torch.equal(first, again) and not torch.equal(first, second)
    mean = torch.stack(
        [quantizer.operand(big, rows=True, columns=False).rows.dequantize() for _ in range(200)]
    )
    nearest = te.NVFP4Quantizer().operand(big, rows=True, columns=False).rows.dequantize()
    # the mean of 200 roundings errs by the deviation of one over sqrt(200)
    assert (mean.mean(0) - big).abs().mean() < 0.3 * (nearest - big).abs().mean()


def test_hadamard_rotation() -> None:
    x = torch.randn(5, 48)
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    # entry (i, j) of Sylvester's matrix has the sign of the parity of the common bits of i and j
    parity = np.array([[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    expected = (x.double().numpy().reshape(-1, 16) @ (signs[:, None] * parity) / 4).reshape(5, 48)
    torch.testing.assert_close(rotate(x).double().numpy(), expected, rtol=0, atol=2e-6)
    y = torch.randn(7, 48)
    torch.testing.assert_close(rotate(x) @ rotate(y).t(), x @ y.t(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["MAE", "MSE"])
@pytest.mark.parametrize("tile", [False, True])
def test_four_over_six_takes_the_smaller_error(mode: str, tile: bool) -> None:
    x = torch.randn(32, 64)
    words = {"with_2d_quantization": tile, "nvfp4_4over6_err_mode": mode, "nvfp4_e4m3_max": 256}
    chosen = te.NVFP4Quantizer(nvfp4_use_4over6=True, **words).operand(x, rows=True, columns=False).rows
    rows, e4m3 = 16 if tile else 1, reference.magnitudes("e4m3")
    amax = np.float32(np.abs(x.numpy()).max())
    encode = np.float32(256 * 6) / amax
    for _, where in reference.blocks(x.numpy(), rows, 16):
        block = x.numpy()[where]
        base = (np.float32(np.abs(block).max()) / np.float32(6)) * encode
        errors, values = [], []
        for factor in (np.float32(1.5), np.float32(1)):
            scale = np.float32(e4m3[reference.codes_of(base * factor, e4m3)])
            inverse = np.float32(1) / (scale * (np.float32(1) / encode))
            codes = reference.codes_of((block * inverse).ravel(), reference.E2M1)
            back = (
                np.sign(block.ravel())
                * np.array(reference.E2M1)[codes]
                * float(scale)
                * float(amax)
                / (6 * 256)
            )
            error = back - block.ravel()
            errors.append(np.abs(error).sum() if mode == "MAE" else (error**2).sum())
            values.append(back.reshape(block.shape))
        if abs(errors[0] - errors[1]) > 1e-5 * errors[1]:
            ours = chosen.dequantize()[where].double().numpy()
            np.testing.assert_allclose(ours, values[int(errors[1] <= errors[0])], rtol=1e-6)


def test_row_scaled_activations_have_an_amax_a_row() -> None:
    x = torch.randn(6, 32) * torch.exp2(torch.arange(6.0))[:, None]
    packed = te.NVFP4Quantizer(row_scaled_nvfp4=True).operand(x, rows=True, columns=False).rows
    for row in range(6):
        alone = te.NVFP4Quantizer().operand(x[row : row + 1], rows=True, columns=False).rows
        assert torch.equal(packed.dequantize()[row : row + 1], alone.dequantize())


def test_a_nan_is_not_turned_into_a_number() -> None:
    x = torch.randn(4, 64)
    x[1, 3] = torch.nan
    for quantizer in (
        te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
        te.Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1),
        te.MXFP8Quantizer(torch.float8_e4m3fn),
        te.NVFP4Quantizer(),
    ):
        packed = quantizer.operand(x, rows=True, columns=False).rows
        assert packed.dequantize()[1, 3].isnan(), type(quantizer).__name__
