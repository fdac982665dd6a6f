"""Float8 codes and scales by rows, whole and by blocks: bit for bit those of the formats, on every device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.float8 import (
    E4M3,
    E4M3_1X128,
    E4M3_128X128,
    E4M3_ROW,
    E5M2,
    E5M2_1X128,
    E5M2_128X128,
    E5M2_ROW,
)
from fewbits.kernels.codec import quantize_float8 as module
from fewbits.kernels.codec.quantize_float8 import (
    quantize_blocks,
    quantize_blocks_ref,
    quantize_rows,
    quantize_rows_ref,
    quantize_tensor,
    quantize_tensor_ref,
)
from fewbits.kernels.codec.quantize_float8_triton import (
    MAX_ROW,
    given_tile,
    launch_blocks,
    launch_rows,
    launch_tensor,
    row_tile,
)

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (3, 7), (5, 128), (33, 257), (2, 5001), (300, 64)]


def operand(shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows of different sizes, zeros, subnormal numbers, a NaN and an infinity; inside a wider buffer."""
    M, N = shape
    x = torch.randn(M, N + 3) * torch.randn(M, 1).mul(3).exp()
    if M > 2:
        x[0], x[1, 0] = 0, torch.nan
        tiny = 1e-39 if device == "cuda" else 1e-37  # the interpreter misreads subnormal bfloat16
        x[2] = 1e-7 if dtype == torch.float16 else tiny
    if M > 4:
        x[3, -4] = -torch.inf
    return x.to(dtype).to(device)[:, :N]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but for a NaN's own bits."""
    a, b = a.contiguous(), b.contiguous()
    if a.dtype in (E4, E5):
        nan = a.float().isnan() & b.float().isnan()
        return a.dtype == b.dtype and bool(((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all())
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))


def assert_codes(q: Tensor, need: Tensor) -> None:
    """Bit for bit; but on the way to float8 Triton's interpreter may lose a carry, and loses NaN."""
    if q.is_cuda:
        assert same(q, need)
    else:
        number = ~need.float().isnan()
        torch.testing.assert_close(q.float()[number], need.float()[number], rtol=0.5, atol=2.0**-6)


def poisoned(shape: tuple[int, int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((shape[0], shape[1] + 5), torch.nan, device=device).to(dtype)[:, : shape[1]]


# The definition.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (6, 300), (130, 260), (0, 4), (4, 0)], ids=str)
def test_equals_the_formats_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = operand(shape, dtype)
    for format, (q, scale) in (
        (E4M3_ROW, quantize_rows(x)),
        (E5M2_ROW, quantize_rows(x, dtype=E5)),
        (E4M3, quantize_tensor(x)),
        (E5M2, quantize_tensor(x, dtype=E5)),
        (E4M3_1X128, quantize_blocks(x)),
        (E5M2_1X128, quantize_blocks(x, dtype=E5)),
        (E4M3_128X128, quantize_blocks(x, block=(128, 128))),
        (E5M2_128X128, quantize_blocks(x, block=(128, 128), dtype=E5)),
    ):
        packed = format.quantize(x)
        assert same(q, packed.codes), format.name
        assert x.numel() == 0 or same(scale, packed.scales), format.name


def test_a_given_amax_or_scale() -> None:
    x = torch.randn(6, 40)
    amax = x.abs().amax(1)
    for (q, scale), (q_own, scale_own) in (
        (quantize_rows(x, amax=amax), quantize_rows(x)),
        (quantize_tensor(x, amax=x.abs().amax().view(1)), quantize_tensor(x)),
        (quantize_tensor(x, scale=quantize_tensor(x)[1]), quantize_tensor(x)),
    ):
        assert same(q, q_own) and torch.equal(scale, scale_own)
    x[0, 0], x[0, 1], x[1, 0], x[2, 0] = 1e4, -1e4, torch.nan, torch.inf
    q = quantize_rows(x, amax=amax)[0].float()
    assert q[0, 0] == 448 and q[0, 1] == -448 and q[1, 0].isnan() and q[2, 0].isnan()
    assert q[:, 2:].isfinite().all()
    bad = quantize_rows(x, amax=torch.full((6,), torch.inf))
    assert bad[0].float().eq(0).all() and bad[1].isnan().all()


def test_into_a_wider_buffer() -> None:
    x = torch.randn(4, 12)
    wide = torch.zeros(4, 32).to(E4)
    q, _ = quantize_rows(x[:, :8], out=wide[:, 16:24])
    assert q.data_ptr() == wide[:, 16:].data_ptr() and same(q, E4M3_ROW.quantize(x[:, :8]).codes)
    assert wide[:, :16].float().eq(0).all() and wide[:, 24:].float().eq(0).all()


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(4, 6)
    with pytest.raises(BadInput, match="of two axes"):
        quantize_rows(x[None])
    with pytest.raises(BadInput, match="rows contiguous"):
        quantize_rows(x, out=torch.empty(4, 5, dtype=E4))
    with pytest.raises(BadInput, match="float8_e4m3fn or float8_e5m2"):
        quantize_rows(x, dtype=torch.int8)
    with pytest.raises(BadInput, match=r"amax must be float32 \(4,\)"):
        quantize_rows(x, amax=torch.ones(5))
    with pytest.raises(BadInput, match="not both"):
        quantize_tensor(x, amax=torch.ones(1), scale=torch.ones(1))
    with pytest.raises(BadInput, match="blocks of"):
        quantize_blocks(x, block=(64, 64))


def test_opcheck_and_compile() -> None:
    x, q = torch.randn(4, 130), torch.empty(4, 130, dtype=E4)
    tests = ("test_faketensor",)  # a CPU cannot compare float8, as the others would
    torch.library.opcheck(module._rows, (x, torch.ones(4), q, torch.empty(4, 1)), test_utils=tests)
    torch.library.opcheck(module._tensor, (x, torch.ones(1), True, q, torch.empty(1)), test_utils=tests)
    torch.library.opcheck(module._blocks, (x, 1, 128, q, torch.empty(4, 2)), test_utils=tests)

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = quantize_rows(x * 2)
        return q.float() * scale, quantize_tensor(x)[1]

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(block(x), compiled(x), strict=True))


# The kernels, on a GPU or under the interpreter.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(shape: tuple[int, int], dtype: torch.dtype, kernel_device: str) -> None:
    x = operand(shape, dtype, kernel_device)
    check_rows(x, E4)
    check_tensor(x, E4)
    check_blocks(x, E4)
    if kernel_device == "cuda":
        check_rows(x, E5)
        check_tensor(x, E5)
        check_blocks(x, E5)


def check_rows(x: Tensor, dtype: torch.dtype) -> None:
    q_ref, scale_ref = quantize_rows_ref(x, dtype)
    for amax in (None, x.abs().amax(1).float()):
        q = poisoned(tuple(x.shape), dtype, x.device.type)
        scale = torch.full((x.shape[0], 1), -1.0, device=x.device)
        launch_rows(x, q, scale, amax=amax)
        assert_codes(q, q_ref)
        assert same(scale, scale_ref)


def check_tensor(x: Tensor, dtype: torch.dtype) -> None:
    for given in (x.abs().amax().float().view(1), torch.full((1,), 0.01, device=x.device)):
        for is_scale in (False, True):
            q_ref, scale_ref = quantize_tensor_ref(x, dtype, *((given, None) if is_scale else (None, given)))
            q, scale = poisoned(tuple(x.shape), dtype, x.device.type), torch.empty(1, device=x.device)
            launch_tensor(x, q, scale, factor=given, is_scale=is_scale)
            assert_codes(q, q_ref)
            assert same(scale, scale_ref)


def check_blocks(x: Tensor, dtype: torch.dtype) -> None:
    for block in ((1, 128), (128, 128)):
        q_ref, scale_ref = quantize_blocks_ref(x, block, dtype)
        q = poisoned(tuple(x.shape), dtype, x.device.type)
        scale = torch.full(scale_ref.shape, -1.0, device=x.device)
        launch_blocks(x, q, scale, block)
        assert_codes(q, q_ref)
        assert same(scale, scale_ref)


def test_tiles() -> None:
    for N in (1, 64, 4096, 5001, 14336, 28672, MAX_ROW):
        assert row_tile(N).block_n >= N and row_tile(N).block_m * row_tile(N).block_n <= max(4096, 2 * N)
        assert given_tile(N).block_m * given_tile(N).block_n == 2048


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("N", [4096, 6144, 14336, 28672, 65536, 70000])
def test_cuda_real_widths(N: int) -> None:
    x = operand((513, N), torch.bfloat16, "cuda")
    for dtype, format in ((E4, E4M3_ROW), (E5, E5M2_ROW)):
        q, scale = quantize_rows(x, dtype=dtype)
        packed = format.quantize(x)
        assert same(q, packed.codes) and same(scale, packed.scales)
        again, scale_again = quantize_rows(x, dtype=dtype, amax=x.abs().amax(1).float())
        assert same(again, q) and same(scale_again, scale)
    assert same(quantize_tensor(x[4:])[0], E4M3.quantize(x[4:]).codes)


@pytest.mark.gpu
def test_cuda_every_bfloat16() -> None:
    """All 65,536 bit patterns, each beside the same largest value."""
    x = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()][:, None].repeat(1, 2)
    x[:, 1] = 1.0
    q, scale = quantize_rows(x)
    packed = E4M3_ROW.quantize(x)
    assert same(q, packed.codes) and same(scale, packed.scales)


@pytest.mark.gpu
def test_cuda_float64_nothing_and_the_compiler() -> None:
    x = torch.randn(5, 40, dtype=torch.float64, device="cuda")
    assert same(quantize_rows(x)[0], quantize_rows_ref(x)[0])
    for shape in ((0, 8), (8, 0)):
        q, scale = quantize_rows(torch.empty(shape, device="cuda"))
        assert q.shape == shape and scale.shape == (shape[0], 1)
    x = torch.randn(64, 256, device="cuda")
    compiled = torch.compile(lambda x: quantize_rows(x * 2), fullgraph=True)
    assert all(same(a, b) for a, b in zip(compiled(x), quantize_rows(x * 2), strict=True))


@pytest.mark.gpu
def test_cuda_more_than_2_31_values() -> None:
    x = torch.ones(2**17 + 3, 2**14, dtype=torch.bfloat16, device="cuda")
    x[-1] = 2
    q, scale = quantize_rows(x)
    assert q[-1].float().eq(448).all() and scale[-1] == scale[-2] * 2


@pytest.mark.multi
def test_cuda_second_device() -> None:
    x = torch.randn(8, 128, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert same(quantize_rows(x)[0], quantize_rows_ref(x)[0])
