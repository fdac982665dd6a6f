"""`sc_matmul`: golden vectors, generated streams, dtypes and layouts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fewbits import sc_matmul
from fewbits.errors import BadInput, Unsupported
from fewbits.formats import FORMATS
from fewbits.formats.stochastic import Stochastic, product_tables
from fewbits.kernels.stochastic import counts
from fewbits.kernels.stochastic.matmul import quantize_operands, sc_matmul_ref, stream_counts
from tests.formats.generated_streams import generated_matmul, random_case

NUM_GOLDEN = 48


@pytest.fixture(scope="module")
def golden(shared: Path):
    return np.load(shared / "data" / "sc_golden.npz")


def _golden_case(golden, i: int):
    case = json.loads(str(golden["cases"]))[i]
    options = {name: case[name] for name in ("scramble", "scramble_rescale", "n_masks")} | case["kwargs"]
    part = {
        k.removeprefix(f"{i:02d}_"): torch.from_numpy(golden[k]) for k in golden if k.startswith(f"{i:02d}_")
    }
    return part, options


def test_all_golden_cases_are_covered(golden) -> None:
    assert len(json.loads(str(golden["cases"]))) == NUM_GOLDEN


@pytest.mark.parametrize("i", range(NUM_GOLDEN))
def test_golden_values(golden, i: int) -> None:
    part, options = _golden_case(golden, i)
    y = sc_matmul(part["a"], part["b"], smooth_scales=part.get("smooth"), **options)
    assert y.dtype == torch.float32 and torch.equal(y, part["y"])


@pytest.mark.parametrize("i", range(NUM_GOLDEN))
def test_golden_codes_counts_and_scales(golden, i: int) -> None:
    part, kwargs = _golden_case(golden, i)
    options = Stochastic(**kwargs)
    a, b = part["a"], part["b"]
    if "smooth" in part:
        a, b = a / part["smooth"], b * part["smooth"]
    a, b = (x if x.dim() == 3 else x[None] for x in (a, b))
    chunks = options.chunks(a.shape[-1])
    codes = [quantize_operands(a[..., c], b[..., c], options, len(chunks) > 1) for c in chunks]
    acc = torch.cat([stream_counts(qa.codes, qb.codes, options) for qa, qb in codes])
    assert torch.equal(acc, part["acc"])
    for side, name in ((0, "a"), (1, "b")):
        assert torch.equal(torch.cat([q[side].codes for q in codes], -1), part[f"q{name}"])
        for ours, theirs in (
            ((q[side].scales for q in codes), "scale"),
            ((q[side].zero_points for q in codes), "zp"),
        ):
            if f"{theirs}_{name}" in part:
                expected = part[f"{theirs}_{name}"]
                got = torch.cat([torch.atleast_2d(x).double() for x in ours])
                assert (got == expected.view(len(expected), -1)).all()


# Generated streams.


def _same_as_generated(seed: int) -> None:
    a, b, options = random_case(seed)
    y = sc_matmul(torch.from_numpy(a), torch.from_numpy(b), **options)
    expected = torch.from_numpy(generated_matmul(a, b, options))
    assert torch.equal(y, expected), (seed, options)


def test_random_configurations_equal_generated_streams() -> None:
    for seed in range(150):
        _same_as_generated(seed)


@pytest.mark.parametrize(
    "count", [pytest.param(300, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)]
)
def test_many_random_configurations_equal_generated_streams(count: int) -> None:
    for seed in range(1000, 1000 + count):
        _same_as_generated(seed)


def test_random_configurations_reach_every_option() -> None:
    seen = [random_case(seed)[2] for seed in range(150)]
    for name, values in {
        "granularity": {"per_row", "per_tensor", "per_head"},
        "mode": {"bipolar", "unipolar"},
        "scramble": {"bitrev", "counter", "random", "off"},
        "scramble_rescale": {True, False},
        "halve_bipolar_stoc_len": {True, False},
        "sequence": {"sobol", "lfsr", "random"},
    }.items():
        assert {o[name] for o in seen} == values
    tables = [o for o in seen if isinstance(o["stoc_len"], list)]
    assert {o["granularity"] for o in tables} == {"per_row", "per_tensor", "per_head"}
    assert any(len(np.shape(o["stoc_len"])) == 2 and np.shape(o["stoc_len"])[1] > 1 for o in tables)
    assert any(o.get("seed_b") is not None and o["sequence"] == "sobol" for o in seen)
    assert any(o["chunk_d"] for o in seen) and any(o["n_masks"] for o in seen)


# The ways the counts are cut do not show.


@pytest.mark.parametrize("shape", [(1, 40, 300), (40, 1, 300), (17, 23, 129), (2, 3, 1)])
@pytest.mark.parametrize("precision", [4, 8])
def test_counts_do_not_depend_on_how_they_are_cut(monkeypatch, shape, precision: int) -> None:
    N, M, D = shape
    options = Stochastic(sc_prec=precision, stoc_len=2**precision * 3 // 4, n_masks=24)
    high = options.max_code
    qa, qb = (torch.randint(-high, high + 1, (1, n, D), dtype=torch.int16) for n in (N, M))
    whole = stream_counts(qa, qb, options)
    T = product_tables(options.streams, options.masks(D), qa.device).long()
    d = torch.arange(D)
    for n in {0, N - 1}:
        for m in {0, M - 1}:
            terms = T[d, qa[0, n].long().abs(), qb[0, m].long().abs()] * qa[0, n].sign() * qb[0, m].sign()
            assert whole[0, n, m] == terms.sum()
    monkeypatch.setattr(counts, "_TABLE_VALUES", 1000)
    assert torch.equal(stream_counts(qa, qb, options), whole)
    monkeypatch.setattr(counts, "KEPT_TABLE_BYTES", 5000)
    assert torch.equal(stream_counts(qa, qb, options), whole)


def test_sums_beyond_float32_stay_whole() -> None:
    D = 70000  # 256 * 70000 > 2**24, in one sum
    a = torch.ones(1, D)
    acc = stream_counts(a[None].short() * 127, a[None].short() * 127, Stochastic(scramble="off"))
    assert acc.item() == 256 * D


def test_a_counter_that_would_overflow_is_refused() -> None:
    codes = torch.zeros(1, 1, 1, dtype=torch.int16).expand(1, 1, 2**20)
    with pytest.raises(Unsupported, match="overflow a 32-bit counter; set chunk_d"):
        stream_counts(codes, codes, Stochastic(sc_prec=11))


# Operands.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor", "per_head"])
def test_dtypes_are_cast_to_float32(dtype: torch.dtype, granularity: str) -> None:
    a, b = torch.randn(2, 3, 20).to(dtype), torch.randn(2, 5, 20).to(dtype)
    y = sc_matmul(a, b, granularity, stoc_len=64)
    assert y.dtype == torch.float32 and torch.equal(
        y, sc_matmul(a.float(), b.float(), granularity, stoc_len=64)
    )


def test_smooth_scales_take_each_operands_dtype() -> None:
    a, b, s = torch.randn(3, 20).bfloat16(), torch.randn(5, 20).half(), torch.rand(20) + 0.5
    y = sc_matmul(a, b, smooth_scales=s)
    assert torch.equal(y, sc_matmul(a / s.bfloat16(), b * s.half()))


@pytest.mark.parametrize("granularity", ["per_row", "per_tensor", "per_head"])
def test_operands_need_not_be_contiguous(granularity: str) -> None:
    a, b = torch.randn(20, 3, 2).permute(2, 1, 0), torch.randn(2, 5, 40)[..., ::2]
    expected = sc_matmul(a.contiguous(), b.contiguous(), granularity)
    assert torch.equal(sc_matmul(a, b, granularity), expected)


@pytest.mark.parametrize("mode", ["bipolar", "unipolar"])
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
@pytest.mark.parametrize("shape", [(0, 3, 8), (3, 0, 8), (3, 2, 0), (0, 0, 0)])
def test_empty_operands_give_an_empty_result(granularity: str, mode: str, shape) -> None:
    N, M, D = shape
    y = sc_matmul(torch.randn(N, D), torch.randn(M, D), granularity, mode=mode)
    assert torch.equal(y, torch.zeros(N, M))
    y = sc_matmul(torch.randn(2, N, D), torch.randn(2, M, D), granularity, mode=mode)
    assert torch.equal(y, torch.zeros(2, N, M))


def test_an_empty_batch_and_an_empty_chunk_loop() -> None:
    assert sc_matmul(torch.ones(0, 2, 4), torch.ones(0, 3, 4), "per_head").shape == (0, 2, 3)
    assert sc_matmul(torch.ones(0, 8), torch.ones(3, 8), chunk_d=4).shape == (0, 3)


def test_operands_stay_as_they_were_and_get_no_gradient() -> None:
    a, b = torch.randn(3, 20, requires_grad=True), torch.randn(5, 20)
    before = a.detach().clone(), b.clone()
    y = sc_matmul(a, b, mode="unipolar")
    assert not y.requires_grad and torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_options_are_not_mixed_up_by_the_tables_that_are_kept() -> None:
    a, b = torch.randn(4, 40), torch.randn(5, 40)
    variants = [{"scramble": s, "stoc_len": 32} for s in ("bitrev", "counter", "off", "random")]
    first = [sc_matmul(a, b, **v) for v in variants]
    again = [sc_matmul(a, b, **v) for v in variants]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert len({tuple(y.flatten().tolist()) for y in first}) == len(variants)


def test_the_published_order_of_scrambles() -> None:
    """Short streams: with masks the error of many dimensions averages out, without it adds up."""
    a, b = torch.randn(32, 128), torch.randn(32, 128)
    exact = a @ b.T

    def error(scramble: str) -> float:
        return float(
            (sc_matmul(a, b, halve_bipolar_stoc_len=True, stoc_len=16, scramble=scramble) - exact).norm()
        )

    assert error("bitrev") < 0.7 * error("off") and error("counter") < 0.7 * error("off")


def test_reference_and_public_function_agree() -> None:
    a, b = torch.randn(3, 20), torch.randn(5, 20)
    assert torch.equal(sc_matmul_ref(a, b, Stochastic()), sc_matmul(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_a_gpu_gives_the_same_bits(seed: int) -> None:
    a, b, options = random_case(seed)
    a, b = torch.from_numpy(a), torch.from_numpy(b)
    assert torch.equal(sc_matmul(a.cuda(), b.cuda(), **options).cpu(), sc_matmul(a, b, **options))


# Prepared operands and tables of lengths.


@pytest.mark.parametrize(
    "options", [{}, {"chunk_d": 16}, {"chunk_d": 128, "halve_bipolar_stoc_len": True, "n_masks": 64}]
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_prepared_operand_gives_the_same_bits(options, batched: bool) -> None:
    if batched and options:
        options = {"stoc_len": 50}
    lead = (2,) if batched else ()
    a, b, s = torch.randn(*lead, 5, 70), torch.randn(*lead, 9, 70).bfloat16(), torch.rand(70) + 0.5
    prepared = Stochastic(**options).quantize(b)
    assert torch.equal(sc_matmul(a, prepared, **options), sc_matmul(a, b, **options))
    smoothed = Stochastic(**options).quantize(b * s.bfloat16())
    expected = sc_matmul(a, b, smooth_scales=s, **options)
    assert torch.equal(sc_matmul(a, smoothed, smooth_scales=s, **options), expected)
    with_length = {**options, "stoc_len": 33}  # streams change nothing in what is prepared
    assert torch.equal(sc_matmul(a, prepared, **with_length), sc_matmul(a, b, **with_length))


def test_a_prepared_operand_of_other_options_is_refused() -> None:
    a, prepared = torch.ones(3, 70), Stochastic(chunk_d=16).quantize(torch.ones(2, 70))
    for options, words in (
        ({}, "b was prepared with chunk_d=16 and the product asks for chunk_d=0; give both the same"),
        ({"chunk_d": 16, "sc_prec": 7}, "b was prepared with sc_prec=8 and the product asks for sc_prec=7"),
        ({"mode": "unipolar"}, "b was prepared with mode='bipolar'"),
    ):
        with pytest.raises(BadInput, match=words):
            sc_matmul(a, prepared, **options)
    with pytest.raises(BadInput, match="group_a=2 and group_b=1 must be 1"):
        sc_matmul(a, Stochastic().quantize(torch.ones(2, 70)), group_a=2)
    with pytest.raises(BadInput, match="b is packed as 'int8', not prepared for stochastic computing"):
        sc_matmul(a, FORMATS["int8"].quantize(torch.ones(2, 70)))
    bad = Stochastic().quantize(torch.full((2, 70), torch.nan))
    with pytest.raises(BadInput, match="b has NaN or infinite values"):
        sc_matmul(a, bad)


def test_chunks_that_are_the_whole_are_the_same_prepared_operand() -> None:
    a, b = torch.randn(3, 70), torch.randn(2, 70)
    prepared = Stochastic(chunk_d=128).quantize(b)
    assert torch.equal(sc_matmul(a, prepared), sc_matmul(a, b))


@pytest.mark.parametrize("options", [{"chunk_d": 16}, {"chunk_d": 16, "halve_bipolar_stoc_len": True}])
def test_every_row_and_chunk_counts_as_alone(options) -> None:
    a, b = torch.randn(4, 40), torch.randn(3, 40)
    lengths = torch.tensor([[256, 100, 3], [0, 256, 17], [64, 64, 64], [0, 0, 0]])
    y = sc_matmul(a, b, stoc_len=lengths, **options)
    expected = torch.zeros(4, 3)
    for n in range(4):
        for c in range(3):
            only = torch.zeros(1, 3, dtype=torch.int64)
            only[0, c] = lengths[n, c]
            expected[n] = expected[n] + sc_matmul(a[n : n + 1], b, stoc_len=only, **options)[0]
    assert torch.equal(y, expected) and not y[3].any()
    rows = sc_matmul(a, b, stoc_len=[256, 100, 3, 17], **options)
    for n, length in enumerate([256, 100, 3, 17]):
        assert torch.equal(rows[n : n + 1], sc_matmul(a[n : n + 1], b, stoc_len=length, **options))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([300, 1, 1], "stoc_len holds 300; give stream lengths from 0 to 256"),
        ([-1, 1, 1], "stoc_len holds -1; give stream lengths from 0 to 256"),
        ([1.5, 1, 1], "its numbers are torch.float32, give whole ones"),
        (
            torch.ones(3, 7, dtype=torch.int64),
            r"stoc_len has shape \(3, 7\) and a has \(3, 5\) rows and chunks",
        ),
        (["x"], "give a whole number or a tensor of them"),
    ],
)
def test_tables_of_lengths_that_are_refused(lengths, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        sc_matmul(torch.ones(3, 40), torch.ones(2, 40), chunk_d=8, stoc_len=lengths)


def test_unipolar_streams_of_no_steps_are_refused() -> None:
    with pytest.raises(BadInput, match="stoc_len holds 0; give stream lengths from 1 to 256"):
        sc_matmul(torch.ones(2, 4), torch.ones(2, 4), mode="unipolar", stoc_len=[0, 3])


def config_of(pool: list[dict], entry: dict | None = None, D: int = 8) -> dict:
    entry = entry or {"rng_id": 1, "scramble": None}
    return {"rng_pool": pool, "sng": {"q": [{"rng_id": 0, "scramble": None}] * D, "k": [entry] * D}}


def test_configs_of_scmp_kernels() -> None:
    a, b = torch.randn(3, 8), torch.randn(2, 8)
    simple = [{"type": "sobol", "seed_type": "q"}, {"type": "sobol", "seed_type": "k"}]
    assert torch.equal(sc_matmul(a, b, stoc_len=64, config=config_of(simple)), sc_matmul(a, b, stoc_len=64))
    seed = [1, 3, 7, 15, 31, 63, 127, 255]
    other = [simple[0], {"type": "sobol", "seed": seed}]
    expected = sc_matmul(a, b, stoc_len=64, seed_b=tuple(seed))
    assert torch.equal(sc_matmul(a, b, stoc_len=64, config=config_of(other)), expected)
    for pool, entry in (
        ([{"type": "lfsr", "seed": 125, "taps": [0, 2]}, simple[1]], None),
        (simple, {"rng_id": 1, "scramble": [7, 6, 5, 4, 3, 2, 1, 0]}),
    ):
        with pytest.raises(Unsupported, match="one Sobol generator an operand and no bit permutations"):
            sc_matmul(a, b, config=config_of(pool, entry))
    with pytest.raises(
        BadInput, match="config has generators for 5 inner dimensions and the operands have 8"
    ):
        sc_matmul(a, b, config=config_of(simple, D=5))


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"granularity": "per_col"}, BadInput, "granularity 'per_col' is unknown; choose one of per_tensor"),
        ({"mode": "tripolar"}, BadInput, "mode 'tripolar' is unknown"),
        ({"scramble": "owen"}, BadInput, "scramble 'owen' is unknown"),
        ({"stoc_len": 257}, BadInput, "stoc_len=257 is refused: give a whole number from 1 to 256"),
        ({"stoc_len": 0}, BadInput, "stoc_len=0 is refused"),
        ({"stoc_len": 64.0}, BadInput, "stoc_len=64.0 is refused"),
        ({"rng_levels": 0}, BadInput, "rng_levels=0 is refused"),
        ({"rng_levels": -4}, BadInput, "rng_levels=-4 is refused"),
        ({"n_masks": 0}, BadInput, "n_masks=0 is refused: give a whole number of at least 1"),
        ({"group_a": 0}, BadInput, "group_a=0 is refused"),
        ({"group_b": 0}, BadInput, "group_b=0 is refused"),
        ({"chunk_d": -1}, BadInput, "chunk_d=-1 is refused"),
        ({"sc_prec": 1}, Unsupported, "sc_prec=1 is out of range for bipolar operands; choose 2 to 12"),
        ({"sc_prec": 13}, Unsupported, "sc_prec=13 is out of range"),
        ({"sc_prec": 12, "mode": "unipolar"}, Unsupported, "for unipolar operands; choose 1 to 11"),
        ({"sc_prec": 0}, BadInput, "sc_prec=0 is refused"),
        ({"scramble_rescale": 1}, BadInput, "scramble_rescale must be True or False, not 1"),
        ({"chunk_d": 4, "granularity": "per_tensor"}, BadInput, 'chunk_d=4 needs granularity "per_row"'),
        ({"chunk_d": 4, "mode": "unipolar"}, BadInput, "chunk_d=4 needs granularity"),
        ({"granularity": "per_head"}, BadInput, "needs operands of three dimensions"),
        ({"granularity": "per_head", "mode": "unipolar"}, BadInput, "is bipolar only"),
        ({"config": {"rng_pool": []}}, BadInput, 'config needs "rng_pool" and "sng"'),
        (
            {"stoc_len": torch.tensor([8, 16])},
            BadInput,
            r"stoc_len has shape \(2,\) and a has \(3, 1\) rows and",
        ),
        (
            {"smooth_scales": torch.ones(7)},
            BadInput,
            r"smooth_scales is \(7,\); give a tensor of shape \(8,\)",
        ),
        ({"smooth_scales": torch.ones(1, 8)}, BadInput, "smooth_scales is"),
        ({"smooth_scales": torch.zeros(8)}, BadInput, "a has NaN or infinite values after smooth_scales"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, error, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        sc_matmul(torch.ones(3, 8), torch.ones(2, 8), **options)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(3, 8), torch.ones(2, 9), "the last dimensions must be equal"),
        (torch.ones(2, 3, 8), torch.ones(2, 8), "give both two dimensions, or both three"),
        (torch.ones(8), torch.ones(8), "give both two dimensions, or both three"),
        (torch.ones(2, 3, 8), torch.ones(4, 3, 8), "the leading dimensions must be equal"),
        (
            torch.ones(3, 8),
            torch.ones(2, 8, device="meta"),
            "a is on cpu and b on meta; move both to one device",
        ),
        (torch.ones(3, 8).int(), torch.ones(2, 8), "a is torch.int32, and a product needs floating-point"),
        (torch.ones(3, 8), [[1.0]], "b is list"),
    ],
)
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_operands_that_do_not_fit_are_refused(a, b, words: str, granularity: str) -> None:
    with pytest.raises(BadInput, match=words):
        sc_matmul(a, b, granularity)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["a", "b"])
def test_values_that_are_not_finite_are_refused(value: float, side: str) -> None:
    operands = {"a": torch.ones(3, 8), "b": torch.ones(2, 8)}
    operands[side][1, 3] = value
    with pytest.raises(BadInput, match=f"{side} has NaN or infinite values; a scale needs finite ones"):
        sc_matmul(**operands)


def test_three_dimensions_refuse_chunks_and_middle_groups() -> None:
    a = torch.ones(2, 4, 8)
    with pytest.raises(BadInput, match="chunk_d=4 needs operands of two dimensions"):
        sc_matmul(a, a, chunk_d=4)
    with pytest.raises(
        Unsupported, match="group_b=3 with bipolar operands of three dimensions; use 1, or at least 4"
    ):
        sc_matmul(a, a, group_b=3)


@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_a_range_beyond_float32(granularity: str) -> None:
    a = torch.tensor([[3e38, -3e38]])
    if granularity == "per_row":
        with pytest.raises(BadInput, match="exceeds float32; scale it down"):
            sc_matmul(a, torch.ones(1, 2), granularity, mode="unipolar")
    else:
        assert sc_matmul(a, torch.ones(1, 2), granularity, mode="unipolar").isfinite().all()


@pytest.mark.multi
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor", "per_head"])
def test_a_second_gpu_gives_the_same_bits_and_the_current_one_stays(granularity: str) -> None:
    """With the current device left at 0."""
    a, b = torch.randn(2, 5, 70), torch.randn(2, 9, 70)
    options = {"stoc_len": [64, 30, 64, 9, 128]}
    expected = sc_matmul(a, b, granularity, **options)
    for device in ("cuda:0", "cuda:1"):
        y = sc_matmul(a.to(device), b.to(device), granularity, **options)
        assert y.device == torch.device(device) and torch.equal(y.cpu(), expected)
        assert torch.cuda.current_device() == 0
    with pytest.raises(BadInput, match="a is on cuda:0 and b on cuda:1; move both to one device"):
        sc_matmul(a.cuda(0), b.cuda(1), granularity)
