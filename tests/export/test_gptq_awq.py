"""GPTQ's and AWQ's words, bit for bit those that AutoGPTQ 0.7.1 and AutoAWQ 0.2.7 pack of the same codes."""

from __future__ import annotations

import zlib

import pytest
import torch

from fewbits.export.gptq_awq import to_awq, to_gptq
from fewbits.export.whole_numbers import Codes, rounded

# CRC-32 of qweight, qzeros (version 1) and float16 scales after AutoGPTQ's QuantLinear.pack, of `pattern`.
AUTO_GPTQ = {
    2: (1083639158, 2986163389, 2350918429),
    3: (1737618416, 2026310984, 2350918429),
    4: (2383688398, 2734569057, 2350918429),
    8: (3255522330, 3230547806, 2350918429),
}
# The same of qweight and qzeros after AutoAWQ's WQLinear_GEMM.from_linear.
AUTO_AWQ = (3480444921, 220202947)


def pattern(bits: int, N: int = 64, K: int = 128, group: int = 32) -> Codes:
    half = 2 ** (bits - 1)
    n, k, g = torch.arange(N)[:, None], torch.arange(K)[None], torch.arange(K // group)[None]
    values = ((n * 7 + k * 3 + (n * k) % 5) % 2**bits - half).int()
    zeros = ((n + g) % (2**bits - 1) + 1 - half).int()
    return Codes(bits, group, values, zeros, 2.0 ** -((n + 2 * g) % 5).float())


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().numpy().tobytes())


@pytest.mark.parametrize("bits", AUTO_GPTQ)
def test_the_words_are_auto_gptqs(bits: int) -> None:
    parts = to_gptq(pattern(bits), 1)
    assert tuple(checksum(parts[name]) for name in ("qweight", "qzeros", "scales")) == AUTO_GPTQ[bits]
    second = to_gptq(pattern(bits), 2)["qzeros"]
    assert not torch.equal(second, parts["qzeros"]) and parts["g_idx"].dtype == torch.int32


def test_the_words_are_auto_awqs() -> None:
    parts = to_awq(pattern(4))
    assert (checksum(parts["qweight"]), checksum(parts["qzeros"])) == AUTO_AWQ


@pytest.mark.parametrize("zero_point", [False, True])
def test_rounding_takes_the_nearest_code_under_what_the_file_keeps(zero_point: bool) -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)) + 0.3
    codes = rounded(weight, 4, 32, torch.float16, zero_point=zero_point)
    assert torch.equal(codes.scales.half().float(), codes.scales)
    assert int(codes.zeros.min()) > -8 and codes.is_symmetric != zero_point
    step = codes.scales.repeat_interleave(32, 1)
    low, high = (bound - codes.zeros.repeat_interleave(32, 1) for bound in (-8, 7))
    nearest = (weight / step).round().clamp(low, high) * step
    assert (codes.decoded() - nearest).abs().max() <= 1e-6
    wide = rounded(torch.zeros(2, 32), 4, 32, torch.float16, zero_point=zero_point)
    assert torch.equal(wide.decoded(), torch.zeros(2, 32))
