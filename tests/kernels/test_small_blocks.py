"""small_blocks.py: MXFP8 and NVFP4 blocks, by the definition, the ops and the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.formats.bits import unpack_bits
from fewbits.kernels.codec import small_blocks as module
from fewbits.kernels.codec.small_blocks import (
    SmallBlocks,
    SmallValues,
    small_blocks,
    small_blocks_ref,
    small_values,
    small_values_ref,
)
from fewbits.kernels.codec.small_blocks_triton import launch_blocks, launch_values
from tests.kernels.test_quantize_float8 import assert_codes, same

E4, E5, E2 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
CASES = [(E4, (1, 32)), (E4, (32, 32)), (E2, (1, 16)), (E2, (16, 16))]


def matrix(shape: tuple[int, int], device: str = "cpu", kind: torch.dtype = torch.bfloat16) -> Tensor:
    """Blocks of very different sizes, some of zeros, and values halfway between codes."""
    x = torch.randn(shape) * torch.randn(shape[0], 1).mul(4).exp()
    x[0, : shape[1] // 2] = 0
    x[shape[0] // 2] = torch.randint(-12, 13, (shape[1],)) / 4
    return x.to(kind).to(device)


def outputs(x: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    codes = torch.zeros(M, -(-K // 2) if dtype == E2 else K, device=x.device).to(dtype)
    scales = torch.zeros(-(-M // block[0]), -(-K // block[1]), device=x.device)
    return codes, scales.to(E4 if dtype == E2 else E2)


def call(x: Tensor, dtype: torch.dtype, block: tuple[int, int], seed: int = -1) -> SmallBlocks:
    amax = x.abs().max().float().view(1) if dtype == E2 else x.new_empty(0, dtype=torch.float32)
    return SmallBlocks(x, *outputs(x, dtype, block), amax, list(block), 448.0, seed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_blocks_one_block_at_a_time(case: tuple[torch.dtype, tuple[int, int]]) -> None:
    dtype, (tall, wide) = case
    x = matrix((50, 72), kind=torch.float32)
    amax = x.abs().max()
    codes, scales = small_blocks(x, dtype, (tall, wide), amax=amax.view(1) if dtype == E2 else None)
    values = small_values(codes, scales, (tall, wide), (50, 72)).double()
    for i in range(0, 50, tall):
        for j in range(0, 72, wide):
            block = x[i : i + tall, j : j + wide].double()
            have = values[i : i + tall, j : j + wide]
            scale = scales[i // tall, j // wide]
            largest = block.abs().max()
            if dtype == E2:
                g = 448 * 6 / amax.double()
                assert scale.double() == pytest.approx(float(largest * g / 6), rel=2**-4, abs=2**-10)
                block, step = block * g, scale.double()
                bound = (block.abs() / 4 + step / 4).clamp(max=step)
            else:
                power = 2.0 ** (int(scale) - 127)
                assert power * 448 >= largest and (largest == 0 or power * 224 < largest)
                bound = (block.abs() * 2**-4).clamp(min=power * 2**-10)
            outside = block.abs() > 6 * scale.double() if dtype == E2 else torch.zeros_like(block).bool()
            assert ((have - block).abs() <= bound * (1 + 1e-6))[~outside].all()


def test_stochastic_codes_are_the_neighbours_and_right_in_the_mean() -> None:
    x = torch.full((64, 64), 1.2)
    x[:, ::16] = 6.0
    codes, scales = small_blocks(x, E2, (1, 16), amax=torch.full((1,), 6.0), seed=3)
    assert (scales.float() == 448).all()
    rest = unpack_bits(codes, 4, 64).view(-1, 16)[:, 1:]
    assert set(rest.unique().tolist()) == {2, 3}  # 1.0 and 1.5
    assert (rest == 3).float().mean() == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ops_are_the_definition(case: tuple[torch.dtype, tuple[int, int]]) -> None:
    dtype, block = case
    x = matrix((40, 64))
    for seed in (-1, 5) if dtype == E2 else (-1,):
        one, other = call(x, dtype, block, seed), call(x, dtype, block, seed)
        module._small_blocks(*one)
        small_blocks_ref(other)
        assert same(one.codes, other.codes) and same(one.scales, other.scales)
        amax = one.amax if dtype == E2 else None
        ours = small_blocks(x, dtype, block, amax=amax, seed=None if seed < 0 else seed)
        assert same(ours[0], one.codes) and same(ours[1], one.scales)
    values = [torch.empty(40, 64).bfloat16() for _ in range(2)]
    module._small_values(one.codes, one.scales, list(block), values[0])
    small_values_ref(SmallValues(one.codes, one.scales, list(block), values[1]))
    assert same(*values)
    tests = ("test_faketensor",)
    torch.library.opcheck(module._small_blocks, tuple(one), test_utils=tests)
    torch.library.opcheck(
        module._small_values, (one.codes, one.scales, list(block), values[0]), test_utils=tests
    )


def check(x: Tensor, dtype: torch.dtype, block: tuple[int, int], seed: int) -> None:
    one, other = call(x, dtype, block, seed), call(x, dtype, block, seed)
    launch_blocks(*one)
    small_blocks_ref(other)
    assert same(one.scales, other.scales)
    if dtype == E2:
        assert same(one.codes, other.codes)
    else:
        assert_codes(one.codes, other.codes)
    values = [torch.zeros_like(x, dtype=torch.bfloat16) for _ in range(2)]
    launch_values(other.codes, other.scales, list(block), values[0])
    small_values_ref(SmallValues(other.codes, other.scales, list(block), values[1]))
    assert same(*values)


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_definition(case: tuple[torch.dtype, tuple[int, int]], kernel_device: str) -> None:
    dtype, block = case
    on_gpu = kernel_device == "cuda"
    for shape in [(1, 16), (37, 144), (64, 256)] + ([(500, 4112)] if on_gpu else []):
        for kind in (torch.bfloat16, torch.float32):
            x = matrix(shape, kernel_device, kind)
            for seed in (-1, 2**40 + 7) if dtype == E2 else (-1,):
                check(x, dtype, block, seed)
            if dtype == E4 and on_gpu:
                check(x, E5, block, -1)
    extreme = torch.tensor([2.0**-140, 2.0**-126, 1e-30, 1e30, 3e38, 0.0, torch.inf, torch.nan])
    if dtype != E2:  # a tensor's amax that is not finite leaves no code that stands for anything
        check(extreme[:, None].expand(8, 32).contiguous().to(kernel_device), dtype, (1, 32), -1)


@pytest.mark.gpu
def test_cuda_blocks_and_the_compiler() -> None:
    x = matrix((96, 128), "cuda")

    def both(x: Tensor) -> tuple[Any, ...]:
        amax = x.abs().max().float().view(1)
        four = small_blocks(x, E2, (1, 16), amax=amax, seed=9)
        eight = small_blocks(x, E4, (1, 32))
        return (
            *four,
            *eight,
            small_values(*four, (1, 16), (96, 128)),
            small_values(*eight, (1, 32), (96, 128)),
        )

    for a, b in zip(torch.compile(both, fullgraph=True)(x), both(x), strict=True):
        assert same(a, b)
    odd = small_blocks(x[:, :50], E4, (1, 32))  # by the definition
    assert same(odd[0], small_blocks(x[:, :50].cpu(), E4, (1, 32))[0].cuda())
