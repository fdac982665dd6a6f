"""The model of low rank: its definition, its error by rank, and that it is an approximation of the counts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.stochastic import features as kernel
from fewbits.kernels.stochastic.codes import stochastic_codes
from fewbits.kernels.stochastic.emulated import (
    emulated_product,
    emulated_weight,
    features_of,
    prepare_emulated,
    stochastic_emulated,
    stochastic_emulated_ref,
)
from tests.kernels.emulated import COMPILER, build

FULL = Stochastic(chunk_d=128)


def operands_of(options: Stochastic, N: int, M: int, D: int, device: str = "cpu"):
    made = (options.quantize(torch.randn(rows, D, device=device)) for rows in (N, M))
    return [part for packed in made for part in packed.parts.values()]


@pytest.mark.parametrize("options", [STOCHASTIC, FULL, replace(STOCHASTIC, chunk_d=0), Stochastic(sc_prec=5)])
@pytest.mark.parametrize("rank", [0, 1, 8])
def test_equals_its_definition(options: Stochastic, rank: int) -> None:
    """Features are rounded to 8 bits, 2**-4 each at most: a share of the error, not of the product."""
    operands = operands_of(options, 6, 20, 300)
    y, exact = (
        stochastic_emulated(*operands, options, rank),
        stochastic_emulated_ref(*operands, options, rank),
    )
    plain = stochastic_emulated_ref(*operands, options, 0)
    bound = 1e-6 * exact.norm() + 2**-3 * (exact - plain).norm() + 1e-3 * exact.norm()
    assert (y - exact).norm() <= bound
    if rank == 0:
        assert (y - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("rank", [0, 8])
def test_a_prepared_weight_gives_the_same(rank: int) -> None:
    """For any number of rows, twice, and in the dtype asked for."""
    qa, sa, qb, sb = operands_of(STOCHASTIC, 6, 20, 300)
    weight = prepare_emulated(qb, sb, STOCHASTIC, rank)
    for rows in (6, 1, 0):
        y = emulated_product(qa[:rows], sa[:rows], weight)
        assert y.dtype == torch.float32 and y.shape == (rows, 20)
        torch.testing.assert_close(y, stochastic_emulated(qa[:rows], sa[:rows], qb, sb, STOCHASTIC, rank))
    assert torch.equal(
        emulated_product(qa, sa, weight, torch.bfloat16), emulated_product(qa, sa, weight).bfloat16()
    )
    with pytest.raises(BadInput, match=r"codes \(6, 200\), and b is prepared for \(N, 300\)"):
        emulated_product(qa[:, :200], sa[:, :2], weight)
    with pytest.raises(BadInput, match=r"are no \(M, D\)"):
        prepare_emulated(qb[None], sb[None], STOCHASTIC)


def test_features_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where they do not fit the memory that is set apart for them."""
    operands = operands_of(STOCHASTIC, 6, 20, 700)
    whole = stochastic_emulated(*operands, STOCHASTIC, 8)
    monkeypatch.setattr("fewbits.kernels.stochastic.emulated._FEATURE_BYTES", 2 * 20 * 8 * 128)
    weight = emulated_weight(*operands[2:], STOCHASTIC, 8, 2 * 20 * 8 * 128)
    assert [x.shape[1] for x in weight.features] == [2048, 2048, 1504]
    assert [x.shape[1] for x in prepare_emulated(*operands[2:], STOCHASTIC, 8).features] == [5600]
    torch.testing.assert_close(stochastic_emulated(*operands, STOCHASTIC, 8), whole)


def test_full_rank_is_what_is_counted() -> None:
    operands = operands_of(STOCHASTIC, 5, 9, 200)
    counted = stochastic_codes(*operands, STOCHASTIC).double()
    assert (stochastic_emulated_ref(*operands, STOCHASTIC, 128) - counted).norm() < 1e-5 * counted.norm()


@pytest.mark.parametrize(
    ("options", "errors"),
    [
        (STOCHASTIC, (0.0349, 0.0204, 0.0158, 0.0099, 0.0054, 0.0029)),
        (FULL, (0.0195, 0.0111, 0.0090, 0.0060, 0.0033, 0.0018)),
        (STOCHASTIC.with_length(32), (0.1285, 0.0624, 0.0416, 0.0217, 0.0105, 0.0049)),
    ],
)
def test_errors_are_those_of_the_text(options: Stochastic, errors: tuple[float, ...]) -> None:
    """A quarter of the published size's rows and outputs; within a tenth."""
    operands = operands_of(options, 32, 128, 2048)
    counted = stochastic_codes(*operands, options)
    for rank, error in zip((0, 2, 4, 8, 16, 32), errors, strict=True):
        y = stochastic_emulated(*operands, options, rank)
        measured = float((y - counted).norm() / counted.norm())
        assert measured == pytest.approx(error, rel=0.1), rank


def test_through_sc_matmul() -> None:
    """Close to the counts, and closer than their error; a prepared b gives the same."""
    a, b = torch.randn(8, 512), torch.randn(40, 512)
    options = {"chunk_d": 128, "halve_bipolar_stoc_len": True, "n_masks": 64}
    counted, y = sc_matmul(a, b, **options), sc_matmul(a, b, **options, emulate_rank=16)
    off = (counted - sc_matmul(a, b, **options, emulate_rank=0)).norm()
    assert 0 < (counted - y).norm() < 0.25 * off
    assert torch.equal(y, sc_matmul(a, STOCHASTIC.quantize(b), **options, emulate_rank=16))
    for other in ({"mode": "unipolar"}, {"stoc_len": torch.full((8,), 64)}, {"granularity": "per_tensor"}):
        with pytest.raises(Unsupported, match="leave it None for the exact counts"):
            sc_matmul(a, b, **other, emulate_rank=4)
    with pytest.raises(Unsupported, match="in two dimensions"):
        sc_matmul(a[None], b[None], emulate_rank=4)


def test_nothing_and_what_is_refused() -> None:
    assert stochastic_emulated(*operands_of(STOCHASTIC, 0, 4, 128), STOCHASTIC).shape == (0, 4)
    operands = operands_of(STOCHASTIC, 2, 4, 128)
    with pytest.raises(BadInput, match="emulate_rank=129 is refused"):
        stochastic_emulated(*operands, STOCHASTIC, 129)
    with pytest.raises(BadInput, match=r"are no \(N, D\) and \(M, D\)"):
        stochastic_emulated(*operands[:2], operands[2][:, 1:], operands[3], STOCHASTIC)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs g++, to run the CUDA source on a CPU")
    return tmp_path_factory.mktemp("features")


@pytest.mark.parametrize(
    ("rows", "D", "chunk", "rank", "part", "shared"),
    [
        (3, 40, 40, 16, range(0, 1), 2**18),
        (150, 70, 20, 8, range(1, 4), 2**15),
        (2, 33, 16, 24, range(1, 3), 2**18),
        (70, 36, 16, 13, range(0, 2), 2**16),
    ],
)
def test_the_source_makes_values_and_features(libraries, rows, D, chunk, rank, part, shared) -> None:
    """To the step of E4M3, exactly but for the rounding to 16 bits between; poisoned outputs."""
    options = replace(STOCHASTIC, chunk_d=chunk)
    codes, scales, _, _ = operands_of(options, rows, 2, D)
    codes[0, 0], codes[-1, -1] = 127, -127
    made, padded = features_of(options, rank, chunk, torch.device("cpu")), kernel.padded(rank)
    first, width = part.start * chunk, min(D, part.stop * chunk) - part.start * chunk
    out = torch.full((rows, width * padded), 0x7F, dtype=torch.uint8)
    values = torch.full((rows, D), torch.nan, dtype=torch.bfloat16)
    top = scales.amax(1, keepdim=True)
    inverse = (1 / top).contiguous()
    how = kernel.plan(rows, width, padded, multiprocessors=2, shared=shared)
    assert how.shared_bytes <= shared and how.grid[1] * how.per_block >= rows
    argument = kernel.operand_of(codes, scales, inverse, made.a16, made.masks, (out, values))
    argument.chunk, argument.first, argument.width, argument.per_block = chunk, first, width, how.per_block
    library = build(libraries, kernel.SOURCE, "features_emulation.cpp", how.defines(padded))
    library.run(ctypes.byref(argument), (ctypes.c_int * 3)(*how.grid), how.shared_bytes)

    got = out.view(torch.float8_e4m3fn).float().view(rows, width, padded)
    table = F.pad(made.a, (0, padded - rank))
    which = made.masks[(first + torch.arange(width)) % chunk]
    q = codes[:, first : first + width].long()
    share = (scales * inverse).repeat_interleave(chunk, 1)[:, first : first + width]
    exact = table[which, q.abs()] * (q.sign() * share)[..., None]
    want = (table.half()[which, q.abs()] * (q.sign() * share).half()[..., None]).to(torch.float8_e4m3fn)
    assert torch.equal(got, want.float())
    assert ((got - exact).abs() <= 2**-4 * 1.01 * exact.abs() + 2**-10).all()
    dequantised = (codes * scales.repeat_interleave(chunk, 1)[:, :D]).bfloat16()
    inside = slice(first, first + width)
    assert torch.equal(values[:, inside], dequantised[:, inside])
    assert values[:, :first].isnan().all() and values[:, first + width :].isnan().all()


@pytest.mark.gpu
@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("based", [True, False])
def test_the_sum_of_both_products(kernel_device: str, dtype: torch.dtype, based: bool) -> None:
    """Poisoned where it is not added to; M is no multiple of a block."""
    from fewbits.kernels.stochastic.add_triton import add

    base, error = (torch.randn(3, 50, dtype=torch.bfloat16, device=kernel_device) for _ in range(2))
    a, b = (torch.rand(n, 1, device=kernel_device) for n in (3, 50))
    y = torch.full((3, 50), torch.nan, device=kernel_device, dtype=dtype)
    add(y, base if based else None, error, a, b, onto=False)
    want = error.float() * (a * b.t()) + (base.float() if based else 0.0)
    # The interpreter cuts to bfloat16 where a GPU rounds.
    rtol, atol = (2**-7, 0.05) if dtype == torch.bfloat16 else (1e-6, 1e-6)
    torch.testing.assert_close(y.float(), want, rtol=rtol, atol=1e-6)
    add(y, None, error, a, b, onto=True)
    torch.testing.assert_close(y.float(), want + error.float() * (a * b.t()), rtol=rtol, atol=atol)


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_it_compiles(capability: int) -> None:
    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()))
    for rank, shared in ((16, 232448), (24, 101376)):
        how = kernel.plan(2048, 4096, rank, multiprocessors=132, shared=shared)
        assert nvrtc.cubin(kernel.SOURCE, how.defines(rank), capability)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("M", [256, 250])
@pytest.mark.parametrize("parts", [1, 4])
def test_on_a_gpu(M: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit sums: 2**-8 of the product more. Rows of very different sizes; prepared, in one part."""
    qa, sa, qb, sb = operands_of(STOCHASTIC, 64, M, 2048, "cuda")
    sa, sb = (s * torch.logspace(-3, 3, len(s), device="cuda")[:, None] for s in (sa, sb))
    monkeypatch.setattr("fewbits.kernels.stochastic.emulated._FEATURE_BYTES", M * 16 * 2048 // parts)
    y, exact = (
        stochastic_emulated(qa, sa, qb, sb, STOCHASTIC),
        stochastic_emulated_ref(qa, sa, qb, sb, STOCHASTIC, 16),
    )
    each = (y - exact).norm(dim=1) / exact.norm(dim=1)
    assert each.max() < 1.5e-2 and ((y - exact).norm(dim=0) / exact.norm(dim=0)).max() < 3e-2
    weight = prepare_emulated(qb, sb, STOCHASTIC)
    prepared = emulated_product(qa, sa, weight)
    assert (prepared - y).norm() <= 2**-7 * y.norm()
    assert parts > 1 or torch.equal(prepared, y)
    assert torch.equal(emulated_product(qa, sa, weight, torch.bfloat16), prepared.bfloat16())
