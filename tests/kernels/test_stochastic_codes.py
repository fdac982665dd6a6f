"""`stochastic_codes`: the definition against `sc_matmul`, lengths of rows and chunks, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic.codes import stochastic_codes, stochastic_codes_ref, stochastic_path

HALVE = replace(STOCHASTIC, chunk_d=16)
FULL = Stochastic(chunk_d=16)
WHOLE = Stochastic(halve_bipolar_stoc_len=True)


def prepared(x: Tensor, options: Stochastic) -> tuple[Tensor, Tensor]:
    packed = options.quantize(x)
    return packed.parts["codes"], packed.parts["scales"]


def of_options(options: Stochastic) -> dict:
    names = ("chunk_d", "halve_bipolar_stoc_len", "n_masks", "stoc_len", "rng_levels")
    return {name: getattr(options, name) for name in names}


@pytest.mark.parametrize(
    "options", [HALVE, FULL, WHOLE, replace(HALVE, stoc_len=37), replace(FULL, stoc_len=3)]
)
def test_prepared_operands_give_what_sc_matmul_gives(options: Stochastic) -> None:
    a, b = torch.randn(5, 43), torch.randn(7, 43)
    y = stochastic_codes(*prepared(a, options), *prepared(b, options), options)
    assert torch.equal(y, sc_matmul(a, b, **of_options(options)))


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 1, 3), (1, 5, 1), (2, 5, 3), (1, 1, 1)])
def test_each_row_and_chunk_has_its_own_length(shape: tuple[int, ...]) -> None:
    """A row's chunk counts as in a product of its own with that length; the parts are added in order."""
    levels = (128, 64, 17, 0)
    index = torch.randint(0, 4, shape, dtype=torch.uint8)
    a, b = torch.randn(2, 5, 43), torch.randn(7, 43)
    qa, sa = prepared(a, HALVE)
    qb, sb = prepared(b, HALVE)
    y = stochastic_codes(qa, sa, qb, sb, HALVE, levels, index)
    full = index.expand(2, 5, 3)
    for i in range(2):
        for n in range(5):
            expected = torch.zeros(7)
            for c in range(3):
                part = slice(16 * c, min(16 * c + 16, 43))
                length = levels[int(full[i, n, c])]
                if length:
                    one = replace(HALVE, stoc_len=length, rng_levels=128, chunk_d=0)
                    x = (qa[i, n, part][None], sa[i, n, c].view(1, 1), qb[:, part], sb[:, c, None])
                    expected = expected + stochastic_codes(*x, one)[0]
            assert torch.equal(y[i, n], expected)


def test_entries_of_a_batch_are_products_of_their_own() -> None:
    a, b = torch.randn(3, 4, 40), torch.randn(3, 6, 40)
    qa, sa = prepared(a, WHOLE)
    qb, sb = prepared(b, WHOLE)
    y = stochastic_codes(qa, sa, qb, sb, WHOLE)
    assert torch.equal(
        y, torch.stack([stochastic_codes(*x, WHOLE) for x in zip(qa, sa, qb, sb, strict=True)])
    )
    assert torch.equal(y, sc_matmul(a, b, halve_bipolar_stoc_len=True))


def test_a_scale_that_is_not_a_number_marks_its_row_or_column() -> None:
    qa, sa = prepared(torch.randn(4, 40), HALVE)
    qb, sb = prepared(torch.randn(6, 40), HALVE)
    sa[1, 2] = sb[3, 0] = torch.nan
    y = stochastic_codes(qa, sa, qb, sb, HALVE)
    marked = torch.zeros(4, 6, dtype=torch.bool)
    marked[1], marked[:, 3] = True, True
    assert torch.equal(y.isnan(), marked)


@pytest.mark.parametrize(("N", "M", "D"), [(0, 3, 40), (3, 0, 40), (0, 0, 40)])
def test_nothing_gives_nothing(N: int, M: int, D: int) -> None:
    y = stochastic_codes(*prepared(torch.ones(N, D), HALVE), *prepared(torch.ones(M, D), HALVE), HALVE)
    assert y.shape == (N, M)


def test_op_is_what_torch_expects() -> None:
    from fewbits.kernels.codec.dequantize import text_of_format

    qa, sa = prepared(torch.randn(1, 3, 20), HALVE)
    index = torch.zeros(1, 1, 2, dtype=torch.uint8)
    for levels, of_rows in (([128], None), ([128, 5], index)):
        torch.library.opcheck(
            torch.ops.fewbits.stochastic_codes.default,
            (qa, sa, qa, sa, text_of_format(HALVE), levels, of_rows),
        )


def test_what_does_not_fit_is_refused() -> None:
    qa, sa = prepared(torch.randn(3, 40), HALVE)
    with pytest.raises(BadInput, match=r"a has codes torch\.int16"):
        stochastic_codes(qa.short(), sa, qa, sa, HALVE)
    with pytest.raises(BadInput, match=r"have \(1, 3, 5\); quantise it with the same options"):
        stochastic_codes(qa, sa, qa, sa, replace(HALVE, chunk_d=8))
    with pytest.raises(BadInput, match="the last dimensions must be equal"):
        stochastic_codes(qa, sa, *prepared(torch.randn(3, 41), HALVE), HALVE)
    with pytest.raises(BadInput, match="give 1 to 256 lengths from 0 to 256"):
        stochastic_codes(qa, sa, qa, sa, HALVE, (257,))
    with pytest.raises(BadInput, match=r"give uint8 that broadcasts to \(1, 3, 3\)"):
        stochastic_codes(qa, sa, qa, sa, HALVE, (5, 6), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(BadInput, match="level_index is on meta and a on cpu; move both to one device"):
        stochastic_codes(qa, sa, qa, sa, HALVE, (5, 6), torch.zeros(1, 1, dtype=torch.uint8, device="meta"))
    with pytest.raises(Unsupported, match="make two products"):
        stochastic_codes(qa, sa, qa, sa, FULL, (256, 64))
    with pytest.raises(Unsupported, match="operands are prepared for bipolar streams"):
        stochastic_codes(qa, sa, qa, sa, Stochastic(mode="unipolar"))


def test_the_reference_alone() -> None:
    """One dimension, codes at their ends: the table's corner, over the counts' factor."""
    one = torch.tensor([[[127]]], dtype=torch.int8)
    scale = torch.full((1, 1, 1), 1 / 127)
    y = stochastic_codes_ref(one, scale, -one, scale, WHOLE, (128,))
    assert torch.equal(y, -(torch.tensor(128.0) * (127**2 / 128)) * (scale * scale))


def test_masks_are_those_of_the_longest_streams() -> None:
    """A grid of 256 has masks for streams below 256 steps, whatever length the options name."""
    a, b = torch.randn(3, 40), torch.randn(5, 40)
    y = stochastic_codes(*prepared(a, FULL), *prepared(b, FULL), FULL, (64,))
    assert torch.equal(y, sc_matmul(a, b, stoc_len=64, chunk_d=16))


def test_a_cpu_takes_the_definition() -> None:
    assert stochastic_path(torch.device("cpu"), 40, HALVE) == ("definition", "")


# On GPUs.

SHAPES_70B = [(14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)]


def on_gpu(x: Tensor, options: Stochastic, device: str = "cuda") -> tuple[Tensor, Tensor]:
    codes, scales = prepared(x.to(device), options)
    return codes, scales


def compared_outputs(x, w, options: Stochastic, y: Tensor, columns: Tensor, **of_rows) -> None:
    """Some outputs of y against the definition on the CPU."""
    qa, sa = (part.cpu() for part in x)
    qb, sb = (part.cpu()[columns] for part in w)
    assert torch.equal(y.cpu()[:, columns], stochastic_codes(qa, sa, qb, sb, options, **of_rows))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 16, 17, 128])
@pytest.mark.parametrize("options", [STOCHASTIC, Stochastic(chunk_d=128), STOCHASTIC.with_length(32)])
def test_gpu_is_exact_at_odd_shapes(N: int, options: Stochastic) -> None:
    assert stochastic_path(torch.device("cuda", 0), 1000, options).name == "lookup"
    for M, D in ((1, 128), (77, 1000), (1030, 91), (130, 3000)):
        x, w = on_gpu(torch.randn(N, D), options), on_gpu(torch.randn(M, D), options)
        compared_outputs(x, w, options, stochastic_codes(*x, *w, options), torch.arange(M))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 4, 16, 2048])
@pytest.mark.parametrize(("M", "D"), SHAPES_70B)
def test_gpu_is_exact_at_llama_shapes(N: int, M: int, D: int) -> None:
    """Every row of 24 outputs; the same bits twice."""
    for options in (STOCHASTIC, Stochastic(chunk_d=128)):
        x, w = (on_gpu(torch.randn(rows, D, device="cuda"), options) for rows in (N, M))
        y = stochastic_codes(*x, *w, options)
        compared_outputs(x, w, options, y, torch.randperm(M)[:24])
        assert torch.equal(y, stochastic_codes(*x, *w, options))


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [STOCHASTIC, replace(STOCHASTIC, chunk_d=0)])
def test_gpu_batches_of_attention(whole: Stochastic) -> None:
    for shape_a, shape_b in (((8, 33, 128), (8, 515, 128)), ((8, 4, 1000), (8, 128, 1000))):
        a, b = torch.randn(shape_a), torch.randn(shape_b)
        y = stochastic_codes(*on_gpu(a, whole), *on_gpu(b, whole), whole)
        assert torch.equal(y.cpu(), stochastic_codes(*prepared(a, whole), *prepared(b, whole), whole))


@pytest.mark.gpu
def test_gpu_lengths_of_rows_and_chunks() -> None:
    levels = (128, 96, 33, 0)
    index = torch.randint(0, 4, (9, 24), dtype=torch.uint8)
    x, w = on_gpu(torch.randn(9, 3000), STOCHASTIC), on_gpu(torch.randn(70, 3000), STOCHASTIC)
    y = stochastic_codes(*x, *w, STOCHASTIC, levels, index.cuda())
    compared_outputs(x, w, STOCHASTIC, y, torch.arange(70), levels=levels, level_index=index)


@pytest.mark.gpu
def test_gpu_streams_and_graphs() -> None:
    """Launches go to the current stream, and into a graph."""
    x, w = on_gpu(torch.randn(2, 512), STOCHASTIC), on_gpu(torch.randn(300, 512), STOCHASTIC)
    expected = stochastic_codes(*x, *w, STOCHASTIC)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = stochastic_codes(*x, *w, STOCHASTIC)
    stream.synchronize()
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = stochastic_codes(*x, *w, STOCHASTIC)
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_gpu_launches_of_a_new_thread() -> None:
    """A thread that has launched nothing yet, and a kernel that is compiled already."""
    x, w = on_gpu(torch.randn(2, 512), STOCHASTIC), on_gpu(torch.randn(300, 512), STOCHASTIC)
    expected = stochastic_codes(*x, *w, STOCHASTIC)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(stochastic_codes, *x, *w, STOCHASTIC).result()
    assert torch.equal(y, expected)


@pytest.mark.multi
def test_second_gpu_while_the_first_is_current() -> None:
    torch.cuda.set_device(0)
    a, b = torch.randn(5, 600), torch.randn(40, 600)
    for options in (STOCHASTIC, replace(STOCHASTIC, chunk_d=0)):
        y = stochastic_codes(*on_gpu(a, options, "cuda:1"), *on_gpu(b, options, "cuda:1"), options)
        assert y.device == torch.device("cuda", 1) and torch.cuda.current_device() == 0
        assert torch.equal(y.cpu(), stochastic_codes(*prepared(a, options), *prepared(b, options), options))
