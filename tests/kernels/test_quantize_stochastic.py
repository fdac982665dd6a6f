"""Rows to signs and magnitudes: against numpy's own float32 operations, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic.quantize import quantize_stochastic, quantize_stochastic_ref
from fewbits.kernels.stochastic.quantize_triton import launch

f32 = np.float32


def by_hand(x: np.ndarray, options: Stochastic) -> tuple[np.ndarray, np.ndarray]:
    """One value after the other, x (N, D) float32."""
    chunks, Q = options.chunks(x.shape[1]), f32(options.max_code)
    codes, scales = np.zeros(x.shape, np.int8), np.zeros((len(x), len(chunks)), f32)
    for n in range(len(x)):
        for c, chunk in enumerate(chunks):
            s = scales[n, c] = f32(max(f32(np.abs(x[n, chunk]).max()), f32(1e-5))) / Q
            inverse = f32(1) / s
            values = [f32(v * inverse) if len(chunks) > 1 else f32(v / s) for v in x[n, chunk]]
            codes[n, chunk] = [int(min(max(np.rint(v), -Q), Q)) for v in values]
    return codes, scales


@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (5, 129), (2, 300), (7, 40)])
@pytest.mark.parametrize("options", [STOCHASTIC, Stochastic(), Stochastic(sc_prec=5, chunk_d=16)])
def test_codes_and_scales_by_hand(shape: tuple[int, int], options: Stochastic) -> None:
    x = torch.randn(shape) * torch.logspace(-7, 3, shape[0])[:, None]
    codes, scales = quantize_stochastic(x, options)
    expected_codes, expected_scales = by_hand(x.numpy(), options)
    assert torch.equal(codes, torch.from_numpy(expected_codes)) and codes.dtype == torch.int8
    assert torch.equal(scales, torch.from_numpy(expected_scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smooth_scales_come_first_in_the_dtype_of_x(dtype: torch.dtype) -> None:
    x, s = torch.randn(2, 5, 200).to(dtype), torch.rand(200) + 0.5
    for is_b, smoothed in ((False, x / s.to(dtype)), (True, x * s.to(dtype))):
        got = quantize_stochastic(x, STOCHASTIC, s, is_b=is_b)
        assert all(
            torch.equal(a, b) for a, b in zip(got, quantize_stochastic(smoothed, STOCHASTIC), strict=True)
        )
        again = quantize_stochastic(smoothed.float(), STOCHASTIC)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_marks_its_chunk_alone(bad: float) -> None:
    x = torch.randn(3, 300)
    clean = quantize_stochastic(x, STOCHASTIC)
    x[1, 140] = bad
    codes, scales = quantize_stochastic(x, STOCHASTIC)
    assert scales[1, 1].isnan() and scales.isnan().sum() == 1 and not codes[1, 128:256].any()
    scales[1, 1], codes[1, 128:256] = clean[1][1, 1], clean[0][1, 128:256]
    assert torch.equal(scales, clean[1]) and torch.equal(codes, clean[0])


def test_layouts_and_empty_tensors() -> None:
    x = torch.randn(300, 4, 2).permute(2, 1, 0)
    got, expected = quantize_stochastic(x, STOCHASTIC), quantize_stochastic(x.contiguous(), STOCHASTIC)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, expected, strict=True))
    codes, scales = quantize_stochastic(torch.zeros(0, 300), STOCHASTIC)
    assert codes.shape == (0, 300) and scales.shape == (0, 3)


def test_the_op_is_the_definition() -> None:
    x, s = torch.randn(3, 200), torch.rand(200) + 0.5
    got, expected = quantize_stochastic(x, STOCHASTIC, s), quantize_stochastic_ref(x, STOCHASTIC, s)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    def check(smooth: Tensor | None) -> None:
        torch.library.opcheck(
            torch.ops.fewbits.quantize_stochastic, (x, smooth, '"stochastic"', False), raise_exception=True
        )

    check(None)
    check(s)


def test_refusals() -> None:
    with pytest.raises(BadInput, match=r"x is torch.int64, and its quantiser needs a floating-point tensor"):
        quantize_stochastic(torch.ones(2, 2, dtype=torch.int64), STOCHASTIC)
    with pytest.raises(Unsupported, match='not for mode "unipolar"'):
        quantize_stochastic(torch.ones(2, 2), Stochastic(mode="unipolar"))
    with pytest.raises(Unsupported, match="sc_prec=9"):
        quantize_stochastic(torch.ones(2, 2), Stochastic(sc_prec=9))


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        ((2, 3, 300), STOCHASTIC, torch.float32),
        ((2, 3, 300), STOCHASTIC, torch.float16),
        ((3, 260), STOCHASTIC, torch.bfloat16),
        ((5, 130), Stochastic(), torch.bfloat16),
        ((3, 4100), Stochastic(sc_prec=6), torch.float32),
        ((4, 45), Stochastic(chunk_d=20), torch.bfloat16),
    ],
)
def test_kernel_is_the_definition(kernel_device: str, poisoned_memory, shape, options, dtype) -> None:
    x = (torch.randn(shape) * 3).to(kernel_device, dtype)
    x[..., 0, :] *= 1e-6
    x.view(-1, shape[-1])[1, 7] = torch.nan
    x.view(-1, shape[-1])[2, 3] = torch.inf
    smooth = (torch.rand(shape[-1]) + 0.5).to(kernel_device)
    for scales, is_b in ((None, False), (smooth, False), (smooth, True)):
        codes, of_rows = launch(x, scales, options, is_b=is_b)
        expected, expected_scales = quantize_stochastic_ref(x, options, scales, is_b=is_b)
        assert torch.equal(codes, expected)
        assert torch.equal(of_rows.nan_to_num(-1), expected_scales.nan_to_num(-1))


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_reads_strided_rows(kernel_device: str) -> None:
    x = torch.randn(40, 6, device=kernel_device)
    for view in (x.t(), x[::2], x[:, 1:5]):
        expected = quantize_stochastic_ref(view, Stochastic(chunk_d=16))
        got = launch(view, None, Stochastic(chunk_d=16), is_b=False)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096), (2048, 4096), (1, 28672), (300, 28672)])
def test_kernel_on_shapes_of_llama(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    for options in (STOCHASTIC, Stochastic()):
        got, expected = quantize_stochastic(x, options), quantize_stochastic_ref(x.cpu(), options)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
