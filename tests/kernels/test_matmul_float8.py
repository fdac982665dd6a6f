"""Float8 products: the weight's codes from every format, the definition, and both products on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.decoder.weight_scales import scale_of, scales_of
from fewbits.errors import BadInput, Unsupported
from fewbits.formats import get_format
from fewbits.formats.base import Format
from fewbits.kernels.codec.quantize_float8 import quantize_rows
from fewbits.kernels.product import matmul_float8 as module
from fewbits.kernels.product.matmul_float8 import (
    float8_linear,
    float8_linear_ref,
    float8_weight,
    float8_weight_pair,
    float8_weight_ref,
    launch_weight,
    scale_row,
    weight_scale,
    weight_scales,
)
from tests.every_format import every_format

E4 = torch.float8_e4m3fn
# See matmul_float8.py: rounding of both operands; on top, the sum in float32, or in Hopper's 14 bits, cut off
# at each of K / 32 steps: at worst that many times 2^-14 of a running sum, 0.03 for K = 16384.
ROUNDING, SHORT_SUM = 0.0375, 0.03


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


# The weight.


@every_format
def test_codes_of_a_packed_weight(format: Format) -> None:
    w = torch.randn(32, 256) * torch.rand(32, 1).exp()
    packed = format.quantize(w)
    decoded = packed.dequantize(torch.float32)
    scale = weight_scale(packed)
    assert scale.shape == (1, 1)
    torch.testing.assert_close(scale[0, 0] * 448, decoded.abs().max(), rtol=2.0**-23, atol=0)
    w8 = float8_weight(packed, inverse_scale=1 / scale)
    assert same(w8, (decoded * (1 / scale)).clamp(-448, 448).to(E4))
    assert same(float8_weight(packed, transposed=True, inverse_scale=1 / scale), w8.t())
    close = {"rtol": 2.0**-4 * 1.001, "atol": float(scale) * 2.0**-10 * 1.001}
    torch.testing.assert_close(w8.float() * scale, decoded, **close)


def test_codes_of_a_dense_weight() -> None:
    w = torch.randn(48, 32, dtype=torch.bfloat16)
    scale = weight_scale(w)
    w8 = float8_weight(w, inverse_scale=1 / scale)
    assert same(w8, (w.float() * (1 / scale)).to(E4)) and float(w8.float().abs().max()) == 448
    wide = torch.zeros(32, 100).to(E4)
    out = float8_weight(w, transposed=True, inverse_scale=(1 / scale).view(1), out=wide[:, 10:58])
    assert out.data_ptr() == wide[:, 10:].data_ptr() and same(out, w8.t())
    assert wide[:, :10].float().eq(0).all() and wide[:, 58:].float().eq(0).all()
    both = weight_scale(w, 3 * w)
    assert torch.equal(both, weight_scale(3 * w))


@pytest.mark.parametrize(
    "name", ["nf4_dq", "nf4", "int8", "int4_g64_zp", "float8_e4m3", "float8_e4m3_128x128"]
)
def test_slabs_decode_to_their_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLAB_VALUES", 2**14)
    packed = get_format(name).quantize(torch.randn(256, 512))
    slabs = module._slabs(packed)
    assert len(slabs) > 1
    assert torch.equal(torch.cat([s.dequantize() for s in slabs]), packed.dequantize())
    odd = get_format(name).quantize(torch.randn(24, 200 if name != "int4_g64_zp" else 256))
    monkeypatch.setattr(module, "_SLAB_VALUES", 256)
    slabs = module._slabs(odd)
    assert torch.equal(torch.cat([s.dequantize() for s in slabs]), odd.dequantize())


def test_a_weight_of_zeros_or_nan() -> None:
    zeros = torch.zeros(16, 16)
    assert float8_weight(zeros, inverse_scale=1 / weight_scale(zeros)).float().eq(0).all()
    zeros[3, 3] = torch.inf
    assert weight_scale(zeros).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "beside"),
    [((16, 16), 8), ((130, 70), 8), ((48, 33), 8), ((48, 32), 16), ((256, 192), 16), ((64, 128), 0)],
    ids=str,
)
@pytest.mark.gpu
@pytest.mark.interpret
def test_a_weight_and_its_transpose_in_one_pass(
    shape: tuple[int, int], beside: int, dtype: torch.dtype, kernel_device: str, poisoned_memory: None
) -> None:
    # Where all sides and all that lies beside are multiples of 16, a GPU stores 16 values at once.
    N, K = shape
    wide = torch.randn(N, K + beside, device=kernel_device).to(dtype)
    wide[1, 2] = torch.nan
    w = wide[:, :K]
    inverse = torch.tensor([[100.0]], device=kernel_device)  # some are cut
    out = torch.empty(N, K, dtype=E4, device=kernel_device)
    buffer = torch.zeros(K, N + 2 * beside, dtype=torch.uint8, device=kernel_device).view(E4)
    turned = buffer[:, beside : beside + N]
    module.launch_weight_pair(w, inverse, out, turned)
    alone = torch.empty_like(out)
    module.launch_weight(w, inverse, alone, False)  # has its own comparison with the definition
    assert same(out, alone) and same(turned, out.t())
    assert buffer[:, :beside].float().eq(0).all() and buffer[:, beside + N :].float().eq(0).all()


def test_the_op_of_a_weight_and_its_transpose() -> None:
    w = torch.randn(32, 48, dtype=torch.bfloat16)
    inverse = 1 / weight_scale(w)
    out, turned = torch.zeros(32, 48).to(E4), torch.zeros(48, 40).to(E4)
    float8_weight_pair(w.t().contiguous().t(), inverse_scale=inverse, out=out, transposed=turned[:, :32])
    assert same(out, float8_weight(w, inverse_scale=inverse)) and same(turned[:, :32], out.t())
    assert turned[:, 32:].float().eq(0).all()
    with pytest.raises(BadInput, match="float8_weight_pair writes"):
        float8_weight_pair(w, inverse_scale=inverse, out=out, transposed=turned)


def groups_of_weights(dtype: torch.dtype, device: str = "cpu") -> list[list[Tensor]]:
    made = [[torch.randn(n, 40, device=device) * torch.rand(()).exp() for n in rows] for rows in SIZES]
    made[1][0][3, 3], made[2][1][0, 39], made[4][0][7] = -1e4, torch.inf, torch.nan
    made[5][0].zero_()
    return [[w.to(dtype) for w in group] for group in made]


SIZES = ((48, 16, 16), (48,), (80, 80), (1,), (33,), (16,), (70000,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_scales_of_many_weights_at_once(dtype: torch.dtype) -> None:
    groups = groups_of_weights(dtype)
    found = weight_scales(groups)
    for scale, group in zip(found, groups, strict=True):
        torch.testing.assert_close(scale, weight_scale(*group)[0, 0], rtol=0, atol=0, equal_nan=True)
    assert found.isnan().tolist() == [False, False, True, False, True, False, False]
    for made, group in zip(scales_of(groups), groups, strict=True):
        alone = scale_of(group)
        for a, b in zip(made, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert a.is_contiguous() and a.data_ptr() % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_of_many_weights_at_once_on_a_gpu(dtype: torch.dtype) -> None:
    """In a CUDA graph too, whose replays see the weights as they are then."""
    groups = groups_of_weights(dtype, "cuda")
    weight_scales(groups)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = weight_scales(groups)
    for _ in range(2):
        graph.replay()
        alone = torch.stack([weight_scale(*group)[0, 0] for group in groups])
        torch.testing.assert_close(found, alone, rtol=0, atol=0, equal_nan=True)
        groups[3][0].mul_(3)


# The product.


def operands(M: int, N: int, K: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(M, K, device=device) * torch.randn(M, 1, device=device).exp()
    return x.bfloat16(), (torch.randn(N, K, device=device) * 0.02).bfloat16()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_cpu_it_is_the_definition(out_dtype: torch.dtype) -> None:
    x, w = operands(5, 32, 48)
    w_scale, bias = weight_scale(w), torch.randn(32)
    (q, scale), w8 = quantize_rows(x), float8_weight(w, inverse_scale=1 / w_scale)
    y = float8_linear(q, scale, w8, w_scale, bias=bias, out_dtype=out_dtype)
    exact = (q.double() * scale.double()) @ (w8.double() * w_scale.double()).t() + bias.double()
    torch.testing.assert_close(
        y.double(), exact, rtol=2.0**-8 if out_dtype != torch.float32 else 1e-5, atol=1e-5
    )
    out = torch.empty(5, 32, dtype=out_dtype)
    assert float8_linear(q, scale, w8, scale_row(w_scale, 32), bias=bias, out_dtype=out_dtype, out=out) is out
    assert torch.equal(out, y)


def test_both_products_are_within_the_rounding_of_their_operands() -> None:
    x, w = operands(64, 256, 512)
    dy = torch.randn(64, 256)
    w_scale = weight_scale(w)
    w8, w8t = (float8_weight(w, transposed=t, inverse_scale=1 / w_scale) for t in (False, True))
    y = float8_linear(*quantize_rows(x), w8, w_scale)
    dx = float8_linear(*quantize_rows(dy), w8t, w_scale)
    assert 0.025 < error(y, x.double() @ w.double().t()) < ROUNDING
    assert 0.025 < error(dx, dy.double() @ w.double()) < ROUNDING


def test_what_does_not_fit_is_refused() -> None:
    x, w = operands(4, 32, 32)
    (q, scale), w8, one = quantize_rows(x), torch.zeros(32, 32).to(E4), torch.ones(1)
    with pytest.raises(Unsupported, match=r"multiples of 16, not \(24, 32\)"):
        float8_linear(q, scale, w8[:24], one)
    with pytest.raises(BadInput, match="float8_linear takes"):
        float8_linear(q, scale.view(4), w8, one)
    with pytest.raises(BadInput, match="float8_linear takes"):
        float8_linear(x, scale, w8, one)
    with pytest.raises(BadInput, match="float8_weight writes"):
        float8_weight(w, inverse_scale=one, out=torch.empty(32, 31, dtype=E4))


def test_opcheck_and_compile() -> None:
    w, out = torch.randn(16, 32), torch.empty(16, 32, dtype=E4)
    args = (w, torch.ones(1), out, False)
    torch.library.opcheck(module._float8_weight, args, test_utils=("test_faketensor",))
    packed = get_format("nf4_dq").quantize(torch.randn(32, 64))
    scale = weight_scale(packed)

    def block(x: Tensor) -> Tensor:
        w8 = float8_weight(packed, inverse_scale=1 / scale)
        return float8_linear(*quantize_rows(x * 2), w8, scale)

    x = torch.randn(4, 64)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))


# The kernel of a dense weight, on a GPU or under the interpreter.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (130, 70), (64, 1100)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(shape: tuple[int, int], dtype: torch.dtype, kernel_device: str) -> None:
    N, K = shape
    w = torch.randn(N, K + 3).to(dtype).to(kernel_device)[:, :K]
    inverse = torch.full((1, 1), 170.0, device=kernel_device)  # some are cut
    for transposed in (False, True):
        need = float8_weight_ref(w, transposed, inverse)
        out = torch.full((need.shape[0], need.shape[1] + 5), torch.nan, device=kernel_device).to(E4)
        launch_weight(w, inverse, out[:, : need.shape[1]], transposed)
        if kernel_device == "cuda":
            assert same(out[:, : need.shape[1]], need)
        else:  # the interpreter may lose a carry on the way to float8
            made = out[:, : need.shape[1]].float()
            torch.testing.assert_close(made, need.float(), rtol=0.5, atol=2.0**-6)
        assert out[:, need.shape[1] :].float().isnan().all()


# On a GPU.

LAYERS = [
    (8192, 6144, 4096),
    (8192, 4096, 4096),
    (8192, 28672, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
]


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nf4_dq", "bfloat16"])
@pytest.mark.parametrize(("M", "N", "K"), LAYERS)
def test_cuda_both_products_of_real_layers(M: int, N: int, K: int, format: str) -> None:
    """Against float64 of the unrounded operands, a part of the rows at a time."""
    x, weight = operands(M, N, K, "cuda")
    dy = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    stored = weight if format == "bfloat16" else get_format(format).quantize(weight)
    w = weight if format == "bfloat16" else stored.dequantize(torch.float32)
    w_scale = weight_scale(stored)
    w8 = float8_weight(stored, inverse_scale=1 / w_scale)
    w8t = float8_weight(stored, transposed=True, inverse_scale=1 / w_scale)
    assert same(w8t, w8.t()) and same(w8, float8_weight_ref(stored, False, 1 / w_scale))
    for fast in (False, True):
        y = float8_linear(*quantize_rows(x), w8, w_scale, fast=fast)
        dx = float8_linear(*quantize_rows(dy), w8t, w_scale, fast=fast)
        bound = ROUNDING + (SHORT_SUM if fast else 2.0**-8)
        for rows in (slice(0, 256), slice(M // 2, M // 2 + 256), slice(M - 256, M)):
            assert error(y[rows], x[rows].double() @ w.double().t()) < bound
            assert error(dx[rows], dy[rows].double() @ w.double()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("M", [1, 7, 300])
def test_cuda_product_equals_the_definition(M: int, out_dtype: torch.dtype) -> None:
    x, w = operands(M, 256, 512, "cuda")
    w_scale, bias = weight_scale(w), torch.randn(256, device="cuda")
    (q, scale), w8 = quantize_rows(x), float8_weight(w, inverse_scale=1 / w_scale)
    need = float8_linear_ref(q, scale, w8, w_scale, bias, torch.float32)
    y = float8_linear(q, scale, w8, w_scale, bias=bias, out_dtype=out_dtype, fast=False)
    assert y.dtype == out_dtype
    assert error(y, need.double()) < 2.0**-8
    out = torch.full((M, 256), torch.nan, dtype=out_dtype, device="cuda")
    row = scale_row(w_scale, 256)
    assert torch.equal(
        float8_linear(q, scale, w8, row, bias=bias, out_dtype=out_dtype, fast=False, out=out), y
    )
    assert torch.equal(out, y)


@pytest.mark.gpu
def test_cuda_compiles_without_a_break() -> None:
    x, w = operands(32, 64, 128, "cuda")
    w_scale = weight_scale(w)

    def block(x: Tensor) -> Tensor:
        return float8_linear(*quantize_rows(x * 2), float8_weight(w, inverse_scale=1 / w_scale), w_scale)

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x), rtol=0.2, atol=0.02)
