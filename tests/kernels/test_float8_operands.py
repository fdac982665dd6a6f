"""float8_operands.py: codes of a matrix and of its transpose, by the definition, the ops and the kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.kernels.codec import float8_operands as module
from fewbits.kernels.codec import float8_operands_cuda as by_hand
from fewbits.kernels.codec.float8_operands import (
    BlockArguments,
    OnTheWay,
    amax_of,
    amax_ref,
    block_multipliers,
    block_multipliers_ref,
    column_sums_ref,
    multiplier_and_scale,
    multiplier_of_amax,
    one_multiplier,
    one_multiplier_ref,
    record_amax,
    through_ref,
)
from fewbits.kernels.codec.float8_operands_cuda import SmoothActivation
from fewbits.kernels.codec.float8_operands_triton import (
    launch_amax,
    launch_blocks,
    launch_multiplier,
    launch_one,
)
from fewbits.kernels.launch import nvrtc
from tests.kernels import emulated
from tests.kernels.test_quantize_float8 import assert_codes, operand, same

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
NOTHING = SmoothActivation(0.0, 0.0, torch.empty(0))
needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SHAPES = [(1, 1), (3, 7), (130, 260), (256, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_multiplier(dtype: torch.dtype) -> None:
    x, largest = operand((9, 33), dtype), torch.tensor([2.0])
    multiplier = torch.tensor([1.7])
    rows, columns = one_multiplier(x, multiplier, E5, rows=True, columns=True, largest=largest)
    assert rows is not None and columns is not None
    expected = (x.float() * 1.7).clamp(-57344, 57344).to(E5)
    assert same(rows, expected) and same(columns, expected.t())
    assert largest.isnan().all()  # as a NaN is in x
    finite = x[4:]
    largest = torch.tensor([2.0])
    one_multiplier(finite, multiplier, E4, rows=True, columns=False, largest=largest)
    assert largest == max(2.0, finite.abs().max().float()) and amax_of(finite) == finite.abs().max().float()
    assert one_multiplier(x, multiplier, E4, rows=False, columns=False) == (None, None)
    assert amax_of(x[:0]) == 0


AMAXES = (0.0, 1e-45, 1.2e-38, 1e-30, 3.7, 448.0, 449.0, 7e4, 3.4e38, float("inf"), float("nan"))


def check_multipliers(device: str) -> None:
    # the interpreter divides by subnormal numbers as a processor does: none is left out
    for dtype in (E4, E5):
        for power_of_two in (False, True):
            for value in AMAXES:
                for epsilon in (0.0, 1e-3):
                    amax = torch.tensor([value], device=device)
                    pair = torch.empty(1, device=device), torch.empty(1, device=device)
                    launch_multiplier(amax, dtype, power_of_two, epsilon, *pair)
                    need = multiplier_of_amax(
                        amax, module.LARGEST[dtype], power_of_two=power_of_two, epsilon=epsilon
                    )
                    assert same(pair[0], need) and same(pair[1], 1.0 / need)
                    ours = multiplier_and_scale(amax, dtype, power_of_two=power_of_two, epsilon=epsilon)
                    assert same(ours[0], need) and same(ours[1], 1.0 / need)


@pytest.mark.gpu
@pytest.mark.interpret
def test_one_multiplier_from_one_amax(kernel_device: str) -> None:
    check_multipliers(kernel_device)


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_block_multipliers_one_block_at_a_time(tile: bool, power_of_two: bool) -> None:
    x = torch.randn(150, 270) * torch.randn(150, 1).exp()
    x[0, :130] = 0
    both = block_multipliers(x, E4, rows=True, columns=True, tile=tile, power_of_two=power_of_two)
    for (codes, scales), matrix in zip(both, (x, x.t()), strict=True):
        tall = 128 if tile else 1
        for i in range(0, matrix.shape[0], tall):
            for j in range(0, matrix.shape[1], 128):
                block = matrix[i : i + tall, j : j + 128]
                multiplier = torch.tensor(448.0) / block.abs().max() if block.any() else torch.tensor(1.0)
                if power_of_two:
                    multiplier = torch.exp2(torch.floor(torch.log2(multiplier)))
                assert scales[i // tall, j // 128] == 1 / multiplier
                assert same(codes[i : i + tall, j : j + 128], (block * multiplier).to(E4))
        line = scales if tile else scales.t()  # as torch's products take them
        assert line.is_contiguous() and codes.is_contiguous()


def test_the_ops_are_the_definition() -> None:
    x, multiplier = torch.randn(20, 36), torch.tensor([0.7])
    rows, columns, largest = torch.empty(20, 36).to(E4), torch.empty(36, 20).to(E4), torch.zeros(1)
    nothing, sums = torch.empty(0, 0), torch.empty(36)
    one = (x, multiplier, rows, columns, largest, sums, *NOTHING)
    module._one(*one)
    assert torch.equal(sums, column_sums_ref(x))
    assert same(rows, one_multiplier_ref(x, multiplier, E4)) and same(columns, rows.t())
    assert largest == amax_ref(x)
    largest.zero_()
    module._amax(x, largest)
    assert largest == amax_ref(x)
    pair = torch.empty(1), torch.empty(1)
    module._one_scale(largest, E4, False, 0.0, *pair)
    assert pair[0] == multiplier_of_amax(largest, 448.0, power_of_two=False) and pair[1] == 1 / pair[0]
    arguments = BlockArguments(
        x,
        False,
        True,
        0.0,
        nothing.to(E4),
        nothing,
        torch.empty(36, 20).to(E4),
        torch.empty(36, 1),
        sums,
        NOTHING,
    )
    module._blocks(*arguments[:-1], *NOTHING)
    need = block_multipliers_ref(x.t().contiguous(), E4, tile=False, power_of_two=True, epsilon=0.0)
    assert same(arguments.columns, need[0]) and same(arguments.column_scales, need[1])
    tests = ("test_faketensor",)
    torch.library.opcheck(module._one, one, test_utils=tests)
    torch.library.opcheck(module._amax, (x, largest), test_utils=tests)
    torch.library.opcheck(module._one_scale, (largest, E4, False, 0.0, *pair), test_utils=tests)
    torch.library.opcheck(module._blocks, (*arguments[:-1], *NOTHING), test_utils=tests)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="two axes"):
        one_multiplier(torch.ones(3), torch.ones(1), E4, rows=True, columns=False)
    with pytest.raises(BadInput, match="e5m2"):
        block_multipliers(
            torch.ones(3, 4), torch.int8, rows=True, columns=True, tile=True, power_of_two=False
        )


def _outputs(x: Tensor, dtype: torch.dtype, side: int, wanted: bool) -> Tensor:
    shape = (x.shape[side], x.shape[1 - side]) if wanted else (0, 0)
    return torch.full(shape, torch.nan, device=x.device).to(dtype)


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_definition(shape: tuple[int, int], kernel_device: str) -> None:
    for kind in (torch.bfloat16, torch.float32):
        x = operand(shape, kind, kernel_device)
        for dtype in (E4, E5) if kernel_device == "cuda" else (E4,):
            for wants in ((True, True), (True, False), (False, True)):
                check_one(x, dtype, wants)
                for tile in (False, True):
                    check_blocks(x, dtype, wants, tile, power_of_two=True)
                    check_blocks(x, dtype, wants, tile, power_of_two=False)
        line = x.contiguous()
        largest = torch.zeros(1, device=x.device)
        launch_amax(line, largest)
        assert same(largest, amax_ref(x))


def check_one(x: Tensor, dtype: torch.dtype, wants: tuple[bool, bool]) -> None:
    multiplier, largest = torch.full((1,), 3.7, device=x.device), torch.zeros(1, device=x.device)
    rows, columns = _outputs(x, dtype, 0, wants[0]), _outputs(x, dtype, 1, wants[1])
    launch_one(x, multiplier, rows, columns, largest)
    need = one_multiplier_ref(x, multiplier, dtype)
    assert same(largest, amax_ref(x))
    if wants[0]:
        assert_codes(rows, need)
    if wants[1]:
        assert_codes(columns, need.t())


def check_blocks(
    x: Tensor, dtype: torch.dtype, wants: tuple[bool, bool], tile: bool, power_of_two: bool
) -> None:
    sides = []
    for side in (0, 1):
        outer, inner = x.shape[side], -(-x.shape[1 - side] // 128)
        shape = (-(-outer // 128), inner) if tile else (inner, outer)
        scales = torch.full(shape if wants[side] else (0, 0), -1.0, device=x.device)
        sides.append((_outputs(x, dtype, side, wants[side]), scales if tile else scales.t()))
    launch_blocks(x, tile, power_of_two, 0.0, *sides[0], *sides[1])
    for (codes, scales), matrix, wanted in zip(sides, (x, x.t().contiguous()), wants, strict=True):
        if wanted:
            need = block_multipliers_ref(matrix, dtype, tile=tile, power_of_two=power_of_two, epsilon=0.0)
            assert same(scales, need[1])
            assert_codes(codes, need[0])


@pytest.mark.gpu
def test_cuda_operands_and_the_compiler() -> None:
    x = torch.randn(512, 384, device="cuda", dtype=torch.bfloat16)
    multiplier = torch.full((1,), 2.5, device="cuda")

    def both(x: Tensor) -> tuple[Tensor, ...]:
        largest = torch.zeros(1, device="cuda")
        record_amax(x, largest)
        sums = torch.empty(2, 384, device="cuda")
        rows, columns = one_multiplier(x, multiplier, E4, rows=True, columns=True, beside=OnTheWay(sums[0]))
        blocks, _ = block_multipliers(
            x, E4, rows=True, columns=False, tile=False, power_of_two=True, beside=OnTheWay(sums[1])
        )
        assert_sums(x, sums[0]) if not torch.compiler.is_compiling() else None
        assert rows is not None and columns is not None and blocks is not None
        return rows, columns, largest, sums, *blocks

    for a, b in zip(torch.compile(both, fullgraph=True)(x), both(x), strict=True):
        assert same(a, b)
    assert same(both(x)[1], one_multiplier_ref(x, multiplier, E4).t())


ACTIVATIONS = {
    "silu": (1.0, 0.0, F.silu),
    "gelu": (1.5957691216057308, 0.07135481627362448, lambda x: F.gelu(x, approximate="tanh")),
    "qgelu": (1.702, 0.0, lambda x: x * torch.sigmoid(1.702 * x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name: str) -> None:
    linear, cubic, function = ACTIVATIONS[name]
    x = (torch.randn(40, 48) * 4).requires_grad_()
    dy = torch.randn(40, 48)
    y = function(x)
    y.backward(dy)
    forward, backward = SmoothActivation(linear, cubic, x[:0]), SmoothActivation(linear, cubic, dy)
    torch.testing.assert_close(through_ref(x.detach(), forward), y.detach())
    torch.testing.assert_close(through_ref(x.detach(), backward), x.grad, rtol=1e-4, atol=1e-5)
    far = torch.tensor([[-1e18, 1e18, -200.0, 200.0]])
    assert through_ref(far, SmoothActivation(linear, cubic, torch.ones(1, 4))).tolist() == [
        [0.0, 1.0, 0.0, 1.0]
    ]
    largest, sums = torch.zeros(1), torch.empty(48)
    words = {"rows": True, "columns": True, "largest": largest}
    rows, columns = one_multiplier(x, torch.tensor([2.0]), E4, beside=OnTheWay(sums, forward), **words)
    plain = one_multiplier(y, torch.tensor([2.0]), E4, rows=True, columns=True)
    assert rows is not None and columns is not None and plain[0] is not None
    assert_near(rows, plain[0]) and assert_near(columns.t(), plain[0])
    torch.testing.assert_close(largest, y.detach().abs().max().view(1))
    torch.testing.assert_close(sums, y.detach().sum(0), rtol=1e-4, atol=1e-4)
    alone = torch.zeros(1)
    record_amax(x, alone, forward)
    assert alone == largest
    blocks, _ = block_multipliers(
        x, E4, rows=True, columns=False, tile=False, power_of_two=True, beside=OnTheWay(None, forward)
    )
    need, _ = block_multipliers(y, E4, rows=True, columns=False, tile=False, power_of_two=True)
    assert blocks is not None and need is not None
    assert_near(blocks[0], need[0])


def assert_near(codes: Tensor, need: Tensor) -> None:
    """Equal, but for few that lay so near to the middle between two codes that other exponentials decide."""
    a, b = codes.float(), need.float()
    assert ((a != b).float().mean() < 0.01) and ((a - b).abs() <= b.abs() * 2.0**-2 + 2.0**-9).all()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def assert_sums(x: Tensor, sums: Tensor) -> None:
    """Sums of columns in another order: each addition of float32 errs by 2**-24 of the sum of magnitudes."""
    need, room = x.double().sum(0), x.double().abs().sum(0) * 2.0**-24 * 32
    finite = need.isfinite()
    assert (((sums.double() - need).abs() <= room) | ~finite).all()
    assert torch.equal(sums.isfinite(), finite)


def run_source(libraries: Path, call: by_hand.Call, x: Tensor) -> None:
    """A call by the CUDA kernel's source on a CPU, or on a GPU."""
    if x.is_cuda:
        by_hand.launch(call, x)
        return
    library = emulated.build(libraries, by_hand.SOURCE, "float8_operands_emulation.cpp", call.defines)
    library.run(ctypes.byref(call.argument), call.grid[0])


CUDA_CASES = [
    ((16, 8), torch.bfloat16, E4, (True, True)),
    ((144, 264), torch.bfloat16, E5, (True, True)),
    ((160, 136), torch.float16, E4, (True, True)),
    ((133, 256), torch.bfloat16, E4, (True, False)),
    ((128, 392), torch.float16, E5, (False, True)),
]


def check_source(libraries: Path, case: tuple, way: str, device: str) -> None:
    (M, K), kind, dtype, wants = case
    x = operand((M, K + 8), kind, device).contiguous()[:, :K]
    codes = [_outputs(x, dtype, side, wants[side]) for side in (0, 1)]
    assert by_hand.fits(x, *codes)
    if way == "one":
        multiplier, largest = torch.full((1,), 3.7, device=device), torch.zeros(1, device=device)
        results, sums = by_hand.Results(codes[0], None, codes[1], None), by_hand.sums_of_tiles(x)
        others = by_hand.Others(multiplier, largest, sums, NOTHING)
        run_source(libraries, by_hand.call_of_one(x, results, others), x)
        assert_sums(x, sums.sum(0))
        assert same(largest, amax_ref(x))
        need = one_multiplier_ref(x, multiplier, dtype)
        for have, expected, wanted in zip(codes, (need, need.t()), wants, strict=True):
            assert not wanted or same(have, expected)
        return
    tile = way == "tile"
    for power_of_two in (False, True):
        scales = []
        for side in (0, 1):
            outer, inner = x.shape[side], -(-x.shape[1 - side] // 128)
            shape = (-(-outer // 128), inner) if tile else (inner, outer)
            empty = torch.full(shape, -1.0, device=device)
            scales.append(empty if tile else empty.t())
        results = by_hand.Results(codes[0], scales[0], codes[1], scales[1])
        words = {"tile": tile, "power_of_two": power_of_two, "epsilon": 0.0}
        sums = by_hand.sums_of_tiles(x) if power_of_two else None
        others = by_hand.Others(None, codes[0][:0], sums, NOTHING)
        run_source(libraries, by_hand.call_of_blocks(x, results, others, **words), x)
        if sums is not None:
            assert_sums(x, sums.sum(0))
        for have, scale, matrix, wanted in zip(codes, scales, (x, x.t()), wants, strict=True):
            need = block_multipliers_ref(
                matrix.contiguous(), dtype, tile=tile, power_of_two=power_of_two, epsilon=0.0
            )
            assert not wanted or (same(have, need[0]) and same(scale, need[1]))


@needs_compiler
@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
@pytest.mark.parametrize("way", ["values", "tile", "one"])
def test_the_cuda_source_gives_the_definition(libraries: Path, case: tuple, way: str) -> None:
    check_source(libraries, case, way, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
@pytest.mark.parametrize("way", ["values", "tile", "one"])
def test_the_cuda_kernel_gives_the_definition(libraries: Path, case: tuple, way: str) -> None:
    check_source(libraries, case, way, "cuda")


def check_through(libraries: Path, way: str, backward: bool, device: str) -> None:
    """The activation's codes, amax and sums; of blocks of 128 values each has its own scale."""
    linear, cubic, _ = ACTIVATIONS["gelu"]
    kind = torch.float16 if way == "one" else torch.bfloat16
    x = (torch.randn(144, 264, device=device) * 3).to(kind)
    x[3, 5:9] = torch.tensor([300.0, -300.0, 0.0, -9.0])
    dy = torch.randn(144, 264, device=device).to(kind) if backward else x[:0]
    through = SmoothActivation(linear, cubic, dy)
    need = through_ref(x, through)
    codes = [_outputs(x, E4, side, True) for side in (0, 1)]
    largest, sums = torch.zeros(1, device=device), by_hand.sums_of_tiles(x)
    if way == "one":
        multiplier = torch.full((1,), 3.7, device=device)
        results = by_hand.Results(codes[0], None, codes[1], None)
        others = by_hand.Others(multiplier, largest, sums, through)
        run_source(libraries, by_hand.call_of_one(x, results, others), x)
        torch.testing.assert_close(largest, amax_ref(need), rtol=2.0**-7, atol=0.0)
        expected = one_multiplier_ref(need, multiplier, E4)
        for have, wanted in zip(codes, (expected, expected.t()), strict=True):
            assert_near(have, wanted)
        nothing = by_hand.Results(codes[0][:0], None, codes[1][:0], None)
        again = by_hand.Others(multiplier, torch.zeros(1, device=device), None, through)
        run_source(libraries, by_hand.call_of_one(x, nothing, again), x)
        assert again.largest == largest
    else:
        scales = [torch.empty(3, 144, device=device).t(), torch.empty(2, 264, device=device).t()]
        results = by_hand.Results(codes[0], scales[0], codes[1], scales[1])
        others = by_hand.Others(None, codes[0][:0], sums, through)
        words = {"tile": False, "power_of_two": True, "epsilon": 0.0}
        run_source(libraries, by_hand.call_of_blocks(x, results, others, **words), x)
        for have, scale, matrix in zip(codes, scales, (need, need.t().contiguous()), strict=True):
            expected, of_blocks = block_multipliers_ref(
                matrix, E4, tile=False, power_of_two=True, epsilon=0.0
            )
            same_scale = (scale == of_blocks).repeat_interleave(128, 1)[:, : matrix.shape[1]]
            assert same_scale.float().mean() > 0.9
            assert_near(have.float().where(same_scale, 0), expected.float().where(same_scale, 0))
    room = need.double().abs().sum(0) * 2.0**-7
    assert ((sums.double().sum(0) - need.double().sum(0)).abs() <= room + 1e-6).all()


@needs_compiler
@pytest.mark.parametrize("backward", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["one", pytest.param("values", marks=pytest.mark.slow)])
def test_the_cuda_source_rounds_activations(libraries: Path, way: str, backward: bool) -> None:
    check_through(libraries, way, backward, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("way", ["values", "one"])
def test_the_cuda_kernel_rounds_activations(libraries: Path, way: str, backward: bool) -> None:
    check_through(libraries, way, backward, "cuda")


def test_what_the_cuda_kernel_does_not_take() -> None:
    x, rows, columns = torch.ones(16, 16).bfloat16(), torch.empty(16, 16).to(E4), torch.empty(16, 16).to(E4)
    assert by_hand.fits(x, rows, columns)
    assert not by_hand.fits(x.float(), rows, columns)
    assert not by_hand.fits(x[:8], rows[:8], columns)  # 16 codes of a column at once
    assert by_hand.fits(x[:8], rows[:8], columns[:0])
    assert not by_hand.fits(x[:, :12], rows, columns) and not by_hand.fits(x.t()[::2], rows, columns)
    assert not by_hand.fits(x[:0], rows, columns)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
def test_the_cuda_kernel_compiles() -> None:
    x, rows = torch.ones(16, 16).bfloat16(), torch.empty(16, 16).to(E4)
    results = by_hand.Results(rows, torch.empty(16, 1), rows, torch.empty(16, 1))
    for capability in (89, 90):
        for tile in (False, True):
            others = by_hand.Others(None, torch.empty(0), None, NOTHING)
            call = by_hand.call_of_blocks(x, results, others, tile=tile, power_of_two=True, epsilon=0.0)
            assert nvrtc.cubin(by_hand.SOURCE, call.defines, capability)[:4] == b"\x7fELF"
        for through in (NOTHING, SmoothActivation(1.0, 0.1, x)):
            others = by_hand.Others(torch.ones(1), torch.zeros(1), by_hand.sums_of_tiles(x), through)
            call = by_hand.call_of_one(x, results, others)
            assert nvrtc.cubin(by_hand.SOURCE, call.defines, capability)[:4] == b"\x7fELF"
