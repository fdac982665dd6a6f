"""Packed to dense: the kernel against the formats' own definitions, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Format, Packed
from fewbits.formats.blocks import scale_shape
from fewbits.formats.codebook import FP4_DQ, NF4, NF4_DQ
from fewbits.formats.float8 import E4M3_128X128, E5M2_ROW
from fewbits.formats.integer import (
    INT4,
    INT4_G32,
    INT4_G64,
    INT4_G64_ZP,
    INT8,
    INT8_G32_ZP,
    INT8_TENSOR,
)
from fewbits.kernels.codec import dequantize as module
from fewbits.kernels.codec import dequantize_triton
from fewbits.kernels.codec.dequantize import dequantize, dequantize_ref, launch
from fewbits.kernels.codec.dequantize_triton import launch_kernel, takes
from tests.every_format import every_format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def packed_of(format: Format, shape: tuple[int, ...], device: str = "cpu") -> Packed:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp()
    return format.quantize(x.bfloat16()).to(device)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; float8 has no equality of its own."""
    if a.dtype in FLOAT8:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def assert_kernel_equal(out: Tensor, need: Tensor) -> None:
    """Bit for bit; but Triton's interpreter cuts bfloat16 off, and its float8 may lose a carry."""
    if out.device.type == "cuda" or out.dtype in (torch.float32, torch.float16):
        assert same(out, need)
        return
    assert out.shape == need.shape and out.dtype == need.dtype
    rtol = 0.5 if out.dtype in FLOAT8 else 2.0**-7
    torch.testing.assert_close(out.float(), need.float(), rtol=rtol, atol=0.01, equal_nan=True)


def check_kernel(
    packed: Packed, dtype: torch.dtype, transposed: bool = False, inverse_scale: Tensor | None = None
) -> None:
    """The kernel into the middle of a wider buffer: right, and nothing beside it touched."""
    need = dequantize_ref(packed, dtype, transposed, inverse_scale)
    need = need.reshape(-1, need.shape[-1]) if need.dim() else need.view(1, 1)
    wide = torch.full((need.shape[0], need.shape[1] + 7), 3.0, device=need.device).to(dtype)
    before = wide.clone()
    out = wide[:, : need.shape[1]]
    out.copy_(torch.full(out.shape, torch.nan).to(dtype))
    launch(list(packed.parts.values()), packed.format, packed.shape, inverse_scale, out, transposed)
    assert_kernel_equal(out.contiguous(), need.contiguous())
    assert same(wide[:, need.shape[1] :].contiguous(), before[:, need.shape[1] :].contiguous())


# The definition.


@every_format
def test_on_a_cpu_it_is_the_formats_own(format: Format) -> None:
    packed = packed_of(format, (32, 128))
    for dtype in (None, *DTYPES):
        assert same(dequantize(packed, dtype), packed.dequantize(dtype))


def test_transposed_and_into_a_buffer() -> None:
    packed = packed_of(NF4_DQ, (16, 128))
    assert same(dequantize(packed, transposed=True), packed.dequantize().t().contiguous())
    wide = torch.zeros(16, 160, dtype=torch.float16)
    out = dequantize(packed, out=wide[:, :128])
    assert out.data_ptr() == wide.data_ptr() and same(out, packed.dequantize(torch.float16))
    assert wide[:, 128:].eq(0).all()


def test_float8_is_cut_and_keeps_nan() -> None:
    x = torch.tensor([[1000.0, -2.0, 0.5, 1.0], [float("nan"), 1.0, 1.0, 1.0]])
    packed = INT8.quantize(x)
    w = dequantize(packed, torch.float8_e4m3fn).float()
    assert w[0, 0] == 448 and w[1].isnan().all()
    scaled = dequantize(packed, torch.float8_e4m3fn, inverse_scale=torch.tensor(0.25))
    assert same(scaled, (packed.dequantize(torch.float32) * 0.25).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (1, 8), (4, 2), (16, 8)])
def test_inverse_scale_of_tiles(shape: tuple[int, int]) -> None:
    packed = packed_of(INT8, (16, 8))
    inverse = torch.rand(shape)
    tiles = inverse.repeat_interleave(16 // shape[0], 0).repeat_interleave(8 // shape[1], 1)
    w = dequantize(packed, torch.float32, inverse_scale=inverse)
    assert torch.equal(w, packed.dequantize(torch.float32) * tiles)


def test_what_does_not_fit_is_refused() -> None:
    packed = packed_of(NF4, (4, 64))
    with pytest.raises(BadInput, match="contiguous rows"):
        dequantize(packed, out=torch.empty(4, 65))
    with pytest.raises(BadInput, match="contiguous rows"):
        dequantize(packed, out=torch.empty(64, 4).t())
    with pytest.raises(BadInput, match="out's dtype"):
        dequantize(packed, torch.bfloat16, out=torch.empty(4, 64))
    with pytest.raises(BadInput, match="two axes"):
        dequantize(packed_of(NF4, (2, 4, 64)), transposed=True)
    with pytest.raises(BadInput, match="inverse_scale must be float32"):
        dequantize(packed, inverse_scale=torch.ones(3, 1))
    with pytest.raises(BadInput, match="inverse_scale must be float32"):
        dequantize(packed, inverse_scale=torch.ones(4, 1, dtype=torch.float64))


# The op.


@pytest.mark.parametrize("format", [NF4_DQ, replace(NF4, block=32), INT4_G64_ZP], ids=str)
def test_opcheck(format: Format) -> None:
    packed = packed_of(format, (4, 64))
    parts, text = list(packed.parts.values()), module.text_of_format(format)
    assert module.format_of_text(text) == format
    torch.library.opcheck(module._dequantize, (parts, text, (4, 64), torch.bfloat16, True, None))
    torch.library.opcheck(
        module._dequantize_into, (parts, text, (4, 64), torch.empty(4, 64), False, torch.ones(4, 1))
    )


def test_compiles_without_a_break() -> None:
    packed = packed_of(NF4_DQ, (8, 64))
    x = torch.randn(3, 64)

    def product(x: Tensor, *parts: Tensor) -> Tensor:
        names = packed.format.layout(packed.shape)
        w = dequantize(Packed(NF4_DQ, (8, 64), torch.float32, dict(zip(names, parts, strict=True))))
        return x @ w.t()

    parts = tuple(packed.parts.values())
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, *parts), product(x, *parts))


# The kernel, on a GPU or under the interpreter.

SHAPES = [(3, 128), (18, 192), (2, 3, 64), (5, 33), (7, 1), (130,), (1, 4160)]
KERNEL_FORMATS = [
    replace(NF4, block=32),
    replace(FP4_DQ, block=4096, scale_block=3),
    NF4_DQ,
    INT4,
    INT4_G64_ZP,
    replace(INT4, block=(2, 16)),
    INT8_TENSOR,
    INT8_G32_ZP,
]


def names_of(value: object) -> str:
    """Formats that share a registry name differ in their blocks."""
    if isinstance(value, Format):
        return f"{value.name}-{value.contract.block}"
    return str(value)


@pytest.mark.parametrize("number", range(len(KERNEL_FORMATS)), ids=lambda i: names_of(KERNEL_FORMATS[i]))
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(number: int, kernel_device: str) -> None:
    format = KERNEL_FORMATS[number]
    for i, shape in enumerate(SHAPES):
        if kernel_device == "cpu" and (number + i) % 2:
            continue  # the interpreter takes its time: every other shape, the others with the next format
        packed = packed_of(format, shape, kernel_device)
        check_kernel(packed, DTYPES[i % 3])
        if len(shape) == 2:
            check_kernel(packed, DTYPES[(i + 1) % 3], transposed=True)


@pytest.mark.parametrize("format", [NF4_DQ, INT4_G32, INT8_G32_ZP], ids=names_of)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_to_float8(format: Format, dtype: torch.dtype, kernel_device: str) -> None:
    shape = (24, 192) if kernel_device == "cuda" else (6, 128)
    packed = packed_of(format, shape, kernel_device)
    for tiles in (None, (shape[0], 1), (1, shape[1]), (3, 2)):
        inverse = None if tiles is None else torch.rand(tiles, device=kernel_device) * 300 + 10
        for transposed in (False, True):
            check_kernel(packed, dtype, transposed, inverse)
            if kernel_device == "cuda" or dtype == FLOAT8[0]:
                check_kernel(packed, torch.float32, transposed, inverse)
    odd = packed_of(format, (3, 35), kernel_device)
    check_kernel(odd, dtype, True, torch.full((1, 35), 200.0, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_reads_float8_weights(kernel_device: str) -> None:
    for format in (E4M3_128X128, E5M2_ROW):
        packed = packed_of(format, (130, 192), kernel_device)
        check_kernel(packed, torch.bfloat16)
        check_kernel(packed, torch.float16, transposed=True)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_decodes_all_256_codes_of_float8_by_their_bits(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before compute capability 8.9."""
    monkeypatch.setattr(dequantize_triton, "converts_float8", lambda _: False)
    check_all_codes(kernel_device)


@pytest.mark.gpu
def test_cuda_decodes_all_256_codes_of_float8_by_its_own_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own forgets NaN."""
    monkeypatch.setattr(dequantize_triton, "converts_float8", lambda _: True)
    check_all_codes("cuda")


def check_all_codes(kernel_device: str) -> None:
    """To the bit, NaN included."""
    for format in (E4M3_128X128, E5M2_ROW):
        codes = torch.arange(256, dtype=torch.uint8, device=kernel_device).view(2, 128)
        scales = torch.ones(scale_shape((2, 128), format.block), device=kernel_device)
        parts = {"codes": codes.view(format.torch_dtype), "scales": scales}
        for dtype in DTYPES:
            out = torch.empty(2, 128, dtype=dtype, device=kernel_device)
            launch_kernel(parts, format, (2, 128), None, out, False)
            need = codes.view(format.torch_dtype).to(dtype)
            assert torch.equal(out.isnan(), need.isnan()) and need.isnan().any()
            whole = {torch.float32: torch.int32}.get(dtype, torch.int16)
            both = (
                x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).view(whole) for x in (out, need)
            )
            assert torch.equal(*both)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_nan_and_infinity(kernel_device: str) -> None:
    x = torch.randn(4, 128)
    x[0, 3], x[2, 127] = torch.nan, torch.inf
    for format in (NF4, INT4_G64, INT8):
        packed = format.quantize(x).to(kernel_device)
        exact = (torch.float32, torch.float8_e4m3fn) if kernel_device == "cuda" else (torch.float32,)
        for dtype in exact:  # the interpreter's float8 forgets NaN
            out = torch.empty(4, 128, dtype=dtype, device=kernel_device)
            launch(list(packed.parts.values()), format, (4, 128), None, out, False)
            need = dequantize_ref(packed, dtype).float()
            torch.testing.assert_close(out.float(), need, rtol=0, atol=0, equal_nan=True)
            assert need.isnan().any()


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_no_values_and_falls_back(kernel_device: str) -> None:
    for shape in ((0, 64), (4, 0)):
        packed = packed_of(NF4, shape, kernel_device)
        out = torch.empty(shape, device=kernel_device)
        launch(list(packed.parts.values()), NF4, shape, None, out, False)
    packed = packed_of(NF4, (4, 64), kernel_device)
    out = torch.empty(4, 64, dtype=torch.float64, device=kernel_device)
    launch(list(packed.parts.values()), NF4, (4, 64), None, out, False)
    assert torch.equal(out, packed.dequantize(torch.float64))
    ragged = packed_of(E4M3_128X128, (2, 130, 8), kernel_device)
    assert scale_shape((2, 130, 8), (128, 128)) == (2, 2, 1)
    out = torch.empty(2 * 130, 8, device=kernel_device)
    launch(list(ragged.parts.values()), E4M3_128X128, (2, 130, 8), None, out.view(2, 130, 8), False)
    assert torch.equal(out, ragged.dequantize(torch.float32).view(-1, 8))


def test_float8_is_written_by_the_definition_where_no_kernel_can(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.empty(4, 64, dtype=torch.float8_e4m3fn)
    assert takes(NF4, (4, 64), out)
    monkeypatch.setattr(dequantize_triton, "converts_float8", lambda _: False)  # compute capability 8.0
    assert not takes(NF4, (4, 64), out) and takes(NF4, (4, 64), out.bfloat16())
    packed = packed_of(NF4, (4, 64))
    launch(list(packed.parts.values()), NF4, (4, 64), None, out, False)
    assert same(out, dequantize_ref(packed, torch.float8_e4m3fn))


# On a GPU.


@pytest.mark.gpu
def test_cuda_real_shapes() -> None:
    for format in (NF4_DQ, NF4, INT4_G64, INT8):
        packed = packed_of(format, (4096, 1024), "cuda")
        assert same(dequantize(packed, torch.bfloat16), packed.dequantize(torch.bfloat16))
        assert same(dequantize(packed, torch.bfloat16, transposed=True), packed.dequantize().t().contiguous())
        inverse = torch.full((4096, 1), 100.0, device="cuda")
        w = dequantize(packed, torch.float8_e4m3fn, inverse_scale=inverse)
        assert same(w, dequantize_ref(packed, torch.float8_e4m3fn, False, inverse))


@pytest.mark.gpu
def test_cuda_more_than_2_31_values() -> None:
    N, K = 2**17 + 3, 2**14
    codes = torch.zeros(N, K // 2, dtype=torch.uint8, device="cuda")
    codes[-1] = 0xF7
    scales = torch.ones(N, K // 64, device="cuda")
    packed = Packed(NF4, (N, K), torch.bfloat16, {"codes": codes, "scales": scales})
    w = dequantize(packed)
    assert w[-1, 0::2].eq(0).all() and w[-1, 1::2].eq(1).all() and w[0].eq(-1).all()


@pytest.mark.multi
def test_cuda_second_device() -> None:
    packed = packed_of(NF4_DQ, (8, 128), "cuda:1")
    assert torch.cuda.current_device() == 0
    assert same(dequantize(packed), packed.dequantize())
