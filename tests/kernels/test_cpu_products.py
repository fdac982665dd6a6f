"""Few rows times INT8 and INT4 weights on a CPU: torch's kernels beside the definition."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from fewbits.formats import get_format
from fewbits.kernels.product.cpu_products import cpu_product
from fewbits.kernels.product.matmul_packed import packed_linear, packed_linear_ref

BF16 = torch.bfloat16
needs_vectors = pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="torch has these kernels for AVX"
)


@needs_vectors
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g32", "int4_g64", "int4_g128"])
def test_against_the_definition(name: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 256, generator=generator).to(BF16)
    x = torch.randn(rows, 256, generator=generator).to(BF16)
    bias = torch.randn(48, generator=generator).to(BF16)
    packed = get_format(name).quantize(weight)
    exact = packed_linear_ref(x.double(), packed, bias.double())
    assert cpu_product(x, packed) is not None
    with torch.no_grad():
        y = packed_linear(x[None], packed, bias)
    assert y.shape == (1, rows, 48) and y.dtype == BF16
    # Scales, the product and the sum with the bias are rounded to 8 bits each.
    assert float((y[0].double() - exact).norm() / exact.norm()) < 3 * 2**-9


@needs_vectors
@pytest.mark.parametrize("name", ["int8", "int4_g64"])
def test_codes_and_rows_may_begin_anywhere(name: str) -> None:
    """As those of a file that is mapped into memory do: torch's kernel for INT8 ends the process there."""
    packed = get_format(name).quantize(torch.randn(48, 256, dtype=torch.float32))
    codes = packed.codes.view(torch.uint8).reshape(-1)
    elsewhere = torch.empty(codes.numel() + 8, dtype=torch.uint8)[8:].copy_(codes)
    moved = replace(
        packed, parts={**packed.parts, "codes": elsewhere.view_as(packed.codes.view(torch.uint8))}
    )
    moved.parts["codes"] = moved.parts["codes"].view(packed.codes.dtype)
    x = torch.randn(5, 257, dtype=torch.float32).to(BF16)[:, :256].reshape(-1)
    rows = torch.empty(x.numel() + 1, dtype=BF16)[1:].copy_(x).view(5, 256)
    assert moved.codes.data_ptr() % 16 and rows.data_ptr() % 16
    y, need = cpu_product(rows, moved), cpu_product(rows.clone(), packed)
    assert y is not None and need is not None and torch.equal(y, need)


@pytest.mark.parametrize(
    "name", ["int8_zp", "int8_tensor", "int8_g64", "int4_zp", "int4_tensor", "nf4", "fp4"]
)
def test_other_formats_keep_the_definition(name: str) -> None:
    packed = get_format(name).quantize(torch.randn(32, 64, dtype=torch.float32))
    assert cpu_product(torch.randn(1, 64, dtype=torch.float32).to(BF16), packed) is None


def test_other_sides_dtypes_and_row_counts_keep_it() -> None:
    """torch reads beyond the end of such sides."""

    def product(rows: int, shape: tuple[int, int], name: str, dtype: torch.dtype = BF16) -> object:
        packed = get_format(name).quantize(torch.randn(shape, dtype=torch.float32))
        return cpu_product(torch.randn(rows, shape[1], dtype=torch.float32).to(dtype), packed)

    assert product(1, (40, 72), "int8") is None and product(1, (40, 64), "int4_g64") is None
    assert product(1, (32, 64), "int8", torch.float32) is None
    assert product(129, (32, 64), "int8") is None and product(0, (32, 64), "int8") is None


@needs_vectors
def test_a_weight_that_was_changed_is_read_anew() -> None:
    packed = get_format("int4_g64").quantize(torch.randn(16, 64, dtype=torch.float32))
    x = torch.randn(1, 64, dtype=torch.float32).to(BF16)
    before = cpu_product(x, packed)
    packed.codes.zero_()
    after = cpu_product(x, packed)
    assert before is not None and bool(before.any()) and after is not None and not bool(after.any())


@needs_vectors
@needs_vectors
@pytest.mark.parametrize("name", ["int8", "int4_g64"])
def test_scales_that_were_changed_are_read_anew(name: str) -> None:
    packed, x = (
        get_format(name).quantize(torch.randn(32, 64, dtype=torch.float32)),
        torch.ones(2, 64, dtype=BF16),
    )
    before = cpu_product(x, packed)
    packed.parts["scales"].mul_(2)
    after = cpu_product(x, packed)
    assert before is not None and after is not None and torch.equal(after, 2 * before)


def test_gradients_take_the_definition() -> None:
    packed = get_format("int8").quantize(torch.randn(16, 64, dtype=torch.float32))
    x = torch.randn(2, 64, dtype=torch.float32).to(BF16).requires_grad_()
    packed_linear(x, packed).sum().backward()
    assert x.grad is not None and bool(x.grad.any())


@needs_vectors
@pytest.mark.parametrize("name", ["int8", "int4_g64"])
def test_it_is_faster(name: str) -> None:
    """A row in less than half of the time that decoding takes; measured, a thirtieth and less."""
    packed = get_format(name).quantize(torch.randn(1024, 1024, dtype=torch.float32))
    x = torch.randn(1, 1024, dtype=torch.float32).to(BF16)

    def seconds(run: object) -> float:
        run()  # type: ignore[operator]
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run()  # type: ignore[operator]
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds(lambda: cpu_product(x, packed)) < 0.5 * seconds(lambda: packed_linear_ref(x, packed))
