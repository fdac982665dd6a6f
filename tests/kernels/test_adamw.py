"""AdamW with moments of 8 bits: the definition against torch's AdamW, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.tables import midpoints
from fewbits.kernels.optimizer import adamw as module
from fewbits.kernels.optimizer.adamw import (
    AdamWOptions,
    Moments,
    Prepared,
    adamw,
    adamw_ref,
    dequantize_moment,
    guess_index,
    quantize_moment,
    scalars_on_device,
    stochastic_bfloat16,
)

TABLES = {True: module._M_VALUES, False: module._V_VALUES}


def problem(
    shape: tuple[int, ...], packed: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Moments]:
    """A parameter, a gradient, and moments of two earlier steps."""
    generator = torch.Generator().manual_seed(sum(shape))

    def draw() -> Tensor:
        x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        return x.to(dtype)

    param, moments = draw(), None
    moments = Moments.zeros(param, packed=packed)
    for step in (1, 2):
        adamw_ref(param, draw(), moments, AdamWOptions(lr=0.01, step=step))
    tensors = (
        t if t is None else t.to(device) for t in (moments.m, moments.v, moments.m_scales, moments.v_scales)
    )
    return param.to(device), draw().to(device), Moments(*tensors)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("step", ["adamw", "Prepared"])
def test_what_lies_elsewhere_is_refused_by_name(packed: bool, step: str) -> None:
    """A kernel takes addresses: those of another device lead to nothing, or to what is another's."""
    param, grad, kept = problem((300,), packed)
    kept_tensors = {name: getattr(kept, name) for name in ("m", "v", "m_scales", "v_scales")}

    def run(
        params: list[Tensor], grads: list[Tensor], moments: list[Moments], seeds: list[int] | None
    ) -> None:
        if step == "adamw":
            adamw(params, grads, moments, AdamWOptions(lr=0.1, step=3), seeds=seeds)
        else:
            Prepared(params, grads, moments, seeds)

    def refused(said: str, grad: Tensor = grad, **changed: Tensor | None) -> None:
        moments = Moments(**{**kept_tensors, **changed})
        before = param.clone()
        with pytest.raises(BadInput, match=said):
            run([param, param], [grad, grad], [kept, moments], None)
        assert torch.equal(param, before)

    with pytest.raises(BadInput, match="gradient of parameter 0"):
        run([param], [grad.to("meta")], [kept], None)
    with pytest.raises(BadInput, match="gradient of parameter 0"):
        run([param], [grad[:-1]], [kept], None)
    refused("moment m of parameter 1 .*; it is .* on meta", m=kept.m.to("meta"))
    refused("moment v of parameter 1", v=kept.v[:-1])
    refused("moment v of parameter 1", v=kept.v.double())
    if packed:
        refused("m_scales of parameter 1 .* on meta", m_scales=kept.m_scales.to("meta"))
        refused("v_scales of parameter 1 .*; it is missing", v_scales=None)
        refused("v_scales of parameter 1", v_scales=kept.v_scales[:-1])
    for seeds, said in ([0, 1], "2 seeds"), ([], "0 seeds"):
        with pytest.raises(BadInput, match=said):
            run([param], [grad], [kept], seeds)
    run([param], [grad], [kept], None)


def on_device(options: AdamWOptions, device: str) -> Tensor:
    return torch.tensor(options.scalars, dtype=torch.float32, device=device)


def copied(moments: Moments) -> Moments:
    tensors = (moments.m, moments.v, moments.m_scales, moments.v_scales)
    return Moments(*(None if t is None else t.clone() for t in tensors))


def assert_same(found: tuple[Tensor, Moments], need: tuple[Tensor, Moments]) -> None:
    parts = [(p, k.m, k.v, k.m_scales, k.v_scales) for p, k in (found, need)]
    for one, other in zip(*parts, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# The definition.


def test_maps_are_those_of_the_paper() -> None:
    """Dettmers 2015: 1 + 7 exponents' fractions either way, with 0 and 1."""
    for signed, values in TABLES.items():
        assert len(values) == 256 == len(set(values)) and values[-1] == 1.0 and 0.0 in values
        assert (min(values) < 0) == signed
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed, values in TABLES.items():
        torch.testing.assert_close(
            torch.tensor(values), functional.create_dynamic_map(signed=signed), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("signed", [True, False])
def test_moment_takes_the_nearest_value(signed: bool) -> None:
    x = torch.randn(3, 300) ** 3
    x = x if signed else x.abs()
    codes, scales = quantize_moment(x, signed=signed)
    assert codes.shape == x.shape and scales.shape == (4,)
    back = dequantize_moment(codes, scales, signed=signed)
    scaled = (x / scales.repeat_interleave(256)[:900].view(3, 300)).view(-1, 1)
    values = torch.tensor(TABLES[signed])
    nearest = (scaled - values).abs().amin(-1).view(3, 300)
    found = (scaled.view(3, 300) - values[codes.long()]).abs()
    torch.testing.assert_close(found, nearest, rtol=1e-5, atol=1e-7)
    blocks = torch.nn.functional.pad(back.view(-1), (0, 124)).view(4, 256)
    assert torch.equal(blocks.abs().amax(-1), scales)
    zero = quantize_moment(torch.zeros(5), signed=signed)
    assert dequantize_moment(*zero, signed=signed).eq(0).all()


def test_moment_that_is_not_finite_is_nan() -> None:
    for bad in (torch.inf, torch.nan):
        codes, scales = quantize_moment(torch.tensor([1.0] * 256 + [bad, 2.0]), signed=True)
        back = dequantize_moment(codes, scales, signed=True)
        assert back[:256].eq(1).all() and back[256:].isnan().all()


def test_guesses_are_never_more_than_one_off() -> None:
    """Every float32 from -1 to 1, by the ends and the middles of the ranges of its first 16 bits."""
    for signed, values in TABLES.items():
        thresholds = midpoints(values, torch.device("cpu"))
        guess = module._guesses(values, torch.device("cpu")).long()
        for low in (0, 0x7FFF, 0xFFFF):
            x = ((torch.arange(2**16) << 16) | low).to(torch.int32).view(torch.float32)
            x = x[(x.abs() <= 1) & (signed | (x >= 0))]
            found = guess[guess_index(x, signed=signed).long()]
            padded = torch.cat([thresholds, torch.tensor([torch.inf])])
            assert torch.equal(found + ~(padded[found] >= x), torch.bucketize(x, thresholds))


def test_float32_moments_are_torchs_adamw() -> None:
    param = torch.randn(40, 30)
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    moments = Moments.zeros(param, packed=False)
    for step in range(1, 6):
        theirs.grad = torch.randn(40, 30)
        optimizer.step()
        adamw_ref(param, theirs.grad, moments, AdamWOptions(lr=0.01, beta2=0.99, weight_decay=0.1, step=step))
    torch.testing.assert_close(param, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = torch.full((4096,), 1.0 + 2.0**-10)  # an eighth of the way to the next bfloat16
    rounded = stochastic_bfloat16(x, 7).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(rounded.mean().item() - x[0].item()) < 4 * 2.0**-7 * (1 / 8 * 7 / 8 / 4096) ** 0.5
    exact = torch.randn(64).bfloat16()
    assert torch.equal(stochastic_bfloat16(exact.float(), 1), exact)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    torch.testing.assert_close(stochastic_bfloat16(odd, 3).float(), odd, equal_nan=True, rtol=0, atol=0)
    tiny = torch.tensor([-1.0 - 2.0**-9] * 999)
    assert set(stochastic_bfloat16(tiny, 5).float().tolist()) == {-1.0, -1.0 - 2.0**-7}


def test_numbers_that_only_the_device_knows() -> None:
    for step in (1, 7, 5000):
        options = AdamWOptions(lr=3e-4, beta2=0.95, weight_decay=0.1, step=step)
        lr, count = torch.tensor(options.lr, dtype=torch.float64), torch.tensor(float(step))
        found = scalars_on_device(lr, count, options)
        torch.testing.assert_close(found, on_device(options, "cpu"), rtol=2.0**-23, atol=0)


def test_lists_take_the_definition_on_a_cpu() -> None:
    options = AdamWOptions(lr=0.1, step=3)
    made = [problem((5, 100), True), problem((7,), False)]
    params, grads, moments = (list(column) for column in zip(*made, strict=True))
    need = [(p.clone(), copied(k)) for p, k in zip(params, moments, strict=True)]
    for (p, k), g in zip(need, grads, strict=True):
        adamw_ref(p, g, k, options)
    before = [p.clone() for p in params]
    one = torch.ones(())
    adamw(params, grads, moments, options, guard=(one, one))
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    adamw(params, [g * 4 for g in grads], moments, options, guard=(one * 0, one * 4))
    for found, wanted in zip(zip(params, moments, strict=True), need, strict=True):
        assert_same(found, wanted)


# The kernel, on a GPU or under the interpreter.


def check_kernel(
    cases: list[tuple[tuple[int, ...], bool, torch.dtype]], device: str, seeds: bool = False
) -> None:
    made = [problem(shape, packed, dtype, device) for shape, packed, dtype in cases]
    params, grads, moments = (list(column) for column in zip(*made, strict=True))
    options = AdamWOptions(lr=0.02, weight_decay=0.1, step=3)
    need = [(p.clone(), copied(k)) for p, k in zip(params, moments, strict=True)]
    numbers = [11 * i + 2**40 for i in range(len(params))]
    for (p, k), g, seed in zip(need, grads, numbers, strict=True):
        adamw_ref(p, g, k, options, seed if seeds and p.dtype == torch.bfloat16 else None)
    Prepared(params, grads, moments, numbers if seeds else None).step(on_device(options, device))
    for found, wanted in zip(zip(params, moments, strict=True), need, strict=True):
        assert_same(found, wanted)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(kernel_device: str) -> None:
    shapes = [(3, 700), (16, 16), (1,), (2049,), (4, 0), (2, 16, 70)]
    check_kernel([(shape, i % 3 < 2, torch.float32) for i, shape in enumerate(shapes)], kernel_device)
    check_kernel([((2, 160), True, torch.float16), ((33,), False, torch.float32)], kernel_device)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_rounds_stochastically(kernel_device: str) -> None:
    """Its bits are exact: no rounding of bfloat16 by the interpreter is left."""
    check_kernel(
        [((4, 600), True, torch.bfloat16), ((77,), False, torch.bfloat16)], kernel_device, seeds=True
    )


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_heeds_a_gradient_scaler_and_nan(kernel_device: str) -> None:
    options, one = AdamWOptions(lr=0.1, step=3), torch.ones((), device=kernel_device)
    param, grad, moments = problem((3, 200), True, device=kernel_device)
    scalars = on_device(options, kernel_device)
    before = (param.clone(), copied(moments))
    Prepared([param], [grad], [moments]).step(scalars, (one, one))
    assert_same((param, moments), before)
    adamw_ref(before[0], grad, before[1], options)
    Prepared([param], [grad * 8], [moments]).step(scalars, (one * 0, one * 8))
    assert_same((param, moments), before)
    grad[1, 3] = torch.nan
    adamw_ref(before[0], grad, before[1], options)
    Prepared([param], [grad], [moments]).step(scalars)
    assert_same((param, moments), before)
    assert param.isnan().sum() == 1 and moments.m_scales.isnan().sum() == 1


# On a GPU.


@pytest.mark.gpu
def test_cuda_many_tensors_in_bfloat16() -> None:
    cases = [((16, 4096), True, torch.bfloat16), ((4096, 16), True, torch.bfloat16)]
    cases += [((1000, 37), True, torch.bfloat16), ((4095,), False, torch.float32)]
    check_kernel(cases * 5, "cuda", seeds=True)
    check_kernel(cases, "cuda")


@pytest.mark.multi
def test_cuda_second_device() -> None:
    check_kernel([((16, 512), True, torch.float32)], "cuda:1")
