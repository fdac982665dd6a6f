"""Grouped products against a loop over pairs; few rows decode only the experts that they hit."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor

from fewbits.formats import FORMATS
from fewbits.kernels.product.pair_sums import pair_sums
from fewbits.nn import experts as packed_experts
from fewbits.nn.expert_products import NO_BRANCH, Branch, Weights, into_experts, out_of_experts
from fewbits.nn.experts import decode_some, decode_with_room
from fewbits.nn.grouped import Table, grouped

E, T, k, H, I, R = 5, 7, 2, 8, 6, 3
ROUTINGS = {
    "some": torch.tensor([[0, 3], [3, 4], [1, 0], [0, 1], [4, 3], [3, 0], [1, 4]]),  # none on 2
    "one": torch.full((T, k), 2),
    "row": torch.tensor([[4, 1]]),
    "none": torch.zeros(0, k, dtype=torch.long),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_pairs(
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    weights: tuple[Tensor, Tensor],
    bias: Tensor,
    branches: tuple[Branch, Branch],
) -> Tensor:
    """One pair after the other, as a layer of experts is defined."""
    (up, down), (first, last) = weights, branches
    out = []
    for t in range(len(x)):
        y = x.new_zeros(down.shape[1])
        for j, e in enumerate(chosen[t].tolist()):
            z = (up[e] + first.scaling * first.b[e] @ first.a[e]) @ x[t]
            z = torch.tanh(z)
            y = y + routing[t, j] * ((down[e] + last.scaling * last.b[e] @ last.a[e]) @ z + bias[e])
        out.append(y)
    return torch.stack(out) if out else x * 1


def with_room(weight: Tensor, columns: int) -> Tensor:
    """The weight in the first columns of a buffer whose last ones hold what nobody wrote."""
    return torch.cat([weight, torch.full((*weight.shape[:2], columns), torch.nan, dtype=weight.dtype)], 2)


@pytest.mark.parametrize("room", [False, True], ids=["apart", "beside"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_both_products_and_all_their_gradients(name: str, room: bool) -> None:
    chosen = ROUTINGS[name]
    x, routing = numbers(len(chosen), H), numbers(len(chosen), k)
    up, down, bias = numbers(E, I, H), numbers(E, H, I), numbers(E, H)
    first = Branch(numbers(E, R, H), numbers(E, I, R), 0.7)
    last = Branch(numbers(E, R, I), numbers(E, H, R), 1.3)
    table = Table.of(chosen, E)
    of_up, of_down = (
        Weights(w.detach, partial(with_room, w.detach())) if room else Weights(w.detach) for w in (up, down)
    )
    z = torch.tanh(into_experts(x, table, of_up, first))
    y = out_of_experts(z, routing, bias, table, of_down, last)
    expected = by_pairs(x, chosen, routing, (up.detach(), down.detach()), bias, (first, last))
    torch.testing.assert_close(y, expected)
    leaves = (x, routing, bias, first.a, first.b, last.a, last.b)
    ours = torch.autograd.grad(y.square().sum(), leaves)
    theirs = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rank", [0, 3, 130])
def test_products_in_8_bits_and_all_their_gradients(name: str, rank: int) -> None:
    """Those of rows and weights that E4M3 holds to the bit, where both operands lose nothing.

    Powers of two, and in each row one largest value of 448: scales are powers of two as well.
    """
    chosen, H, I = ROUTINGS[name], 16, 32
    generator = torch.Generator().manual_seed(len(chosen) + rank)

    def exact(*shape: int) -> Tensor:
        values = torch.randint(-3, 4, shape, generator=generator).float()
        values[..., 0] = 448.0
        return values

    def float8(w: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
        q = (w.transpose(1, 2).contiguous() if turned else w).to(torch.float8_e4m3fn)
        return q, torch.ones(1, 1, dtype=torch.float32)

    def branch(inputs: int, outputs: int) -> Branch:
        if not rank:
            return NO_BRANCH
        pair = numbers(E, rank, inputs).float().detach(), numbers(E, outputs, rank).float().detach()
        return Branch(pair[0].requires_grad_(), pair[1].requires_grad_(), 0.7)

    table = Table.of(chosen, E)
    up, down = exact(E, I, H), exact(E, H, I)
    x, z = exact(len(chosen), H).requires_grad_(), exact(chosen.numel(), I).requires_grad_()
    routing, bias = numbers(len(chosen), k).float().detach().requires_grad_(), numbers(E, H).float()
    bias = bias.detach().requires_grad_()
    first, last = branch(H, I), branch(I, H)
    dy, dout = exact(chosen.numel(), I), exact(len(chosen), H)

    def computed(in_8_bits: bool) -> list[Tensor]:
        of_up, of_down = (
            Weights(lambda w=w: w, float8=partial(float8, w) if in_8_bits else None) for w in (up, down)
        )
        y = into_experts(x, table, of_up, first)
        out = out_of_experts(z, routing, bias, table, of_down, last)
        leaves = [x, z, routing, bias, *(t for b in (first, last) for t in (b.a, b.b) if t is not None)]
        return [y, out, *torch.autograd.grad((y, out), leaves, (dy, dout))]

    for got, want in zip(computed(True), computed(False), strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max() if want.numel() else 1)
        )


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_table_puts_every_pair_with_its_expert(name: str) -> None:
    chosen = ROUTINGS[name]
    table = Table.of(chosen, E)
    assert table.ends.dtype == torch.int32 and table.ends[-1] == chosen.numel()
    assert torch.equal(table.experts[table.inverse], chosen)
    numbered = torch.arange(len(chosen))[:, None].expand_as(chosen)
    assert torch.equal(table.rows[table.inverse], numbered)


def test_grouped_takes_turned_matrices_and_sums_in_the_wider_dtype() -> None:
    table, w = Table.of(ROUTINGS["some"], E), numbers(E, I, H)
    x = numbers(T * k, H)
    want = torch.stack([w[e] @ row for e, row in zip(table.experts.tolist(), x, strict=True)])
    torch.testing.assert_close(grouped(x, w, table.ends), want)
    torch.testing.assert_close(
        grouped(x, w.detach().transpose(1, 2).contiguous().transpose(1, 2), table.ends), want
    )
    half = x.detach().bfloat16()
    weights = torch.rand(T, k, dtype=torch.float32)
    wide = (half[table.inverse].float() * weights[..., None]).sum(1)
    assert torch.equal(pair_sums(half, table.inverse, weights), wide.bfloat16())


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if n != "stochastic"])
def test_some_matrices_of_a_packed_tensor_decode_as_in_the_whole(name: str) -> None:
    weight = numbers(3, 16, 256).detach().float()
    packed = FORMATS[name].quantize(weight)
    chosen = torch.tensor([2, 0, 2])
    got = decode_some(packed, chosen, torch.float32)
    assert torch.equal(got, packed.dequantize(torch.float32)[chosen])


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if n != "stochastic"])
def test_a_decoded_weight_with_room_is_the_weight(name: str) -> None:
    weight = numbers(3, 16, 256).detach().float()
    packed = FORMATS[name].quantize(weight)
    wide = decode_with_room(packed, torch.float32, 8)
    if name in ("nf4", "nf4_dq", "int8", "int4_g64"):
        assert wide is not None
    if wide is not None:
        assert wide.shape == (3, 16, 264)
        assert torch.equal(wide[..., :256], packed.dequantize(torch.float32))


def test_few_rows_decode_only_what_they_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.models.test_experts import host_and_packed

    host, packed = host_and_packed(FORMATS["nf4"])
    seen: list[tuple[int, ...]] = []
    whole = packed_experts.dequantize

    def watched(stored: object, *args: object) -> Tensor:
        seen.append(stored.shape)
        return whole(stored, *args)

    monkeypatch.setattr(packed_experts, "dequantize", watched)
    x, weights = torch.randn(1, 64), torch.rand(1, 2)
    run = partial(packed, x, torch.tensor([[6, 1]]), weights)
    with torch.no_grad():
        few = run()
    assert [shape[0] for shape in seen] == [2, 2]
    torch.testing.assert_close(run(), few, rtol=1e-5, atol=1e-6)
    assert [shape[0] for shape in seen[2:]] == [8, 8]
    torch.testing.assert_close(host(x, torch.tensor([[6, 1]]), weights), few, rtol=1e-5, atol=1e-6)


def test_kept_values_are_decoded_once_and_go_when_asked() -> None:
    from tests.models.test_experts import host_and_packed

    _, packed = host_and_packed(FORMATS["nf4"])
    x, chosen, weights = torch.randn(9, 64), torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    expected = packed(x, chosen, weights)
    packed.keep_values(True)
    assert torch.equal(packed(x, chosen, weights), expected)
    kept = [tensor for _, tensor in packed.kept.values()]
    assert len(kept) == 2 and torch.equal(packed(x, chosen, weights), expected)
    assert all(a is b for (_, a), b in zip(packed.kept.values(), kept, strict=True))
    assert not copy.deepcopy(packed).kept and not pickle.loads(pickle.dumps(packed)).kept
    with torch.no_grad():  # as load_state_dict writes
        packed.down_proj.zero_()
    assert not torch.equal(packed(x, chosen, weights), expected)
    packed.pack("down_proj", torch.zeros(packed.shapes["down_proj"]))
    assert packed(x, chosen, weights).abs().max() == 0
    packed.keep_values(False)
    assert not packed.kept


def test_kept_values_have_room_for_branches_that_come_and_go() -> None:
    from tests.models.test_experts import host_and_packed

    _, packed = host_and_packed(FORMATS["nf4"])
    x, chosen, weights = torch.randn(9, 64), torch.randint(0, 8, (9, 2)), torch.rand(9, 2)

    def results() -> list[torch.Tensor]:
        outputs = []
        for rank in (0, 4, 0, 12, 4, 0):
            generator = torch.Generator().manual_seed(rank)
            ab = [torch.randn(s, generator=generator) for s in ((8 * rank, 64), (128, 8 * rank))]
            packed.branches = {"gate_up_proj": ((*(t.requires_grad_() for t in ab), 0.5),)} if rank else {}
            outputs.append(packed(x.requires_grad_(), chosen, weights))
            gradients = torch.autograd.grad(outputs[-1].sum(), [x, *ab] if rank else [x])
            outputs.extend(gradients)
        return outputs

    expected = results()
    packed.keep_values(True)
    torch.testing.assert_close(results(), expected, rtol=0, atol=0)
    assert packed.kept["gate_up_proj", torch.float32][1].shape == (8, 128, 64 + 16)


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "nvfp4"])  # the last two have no room for branches
def test_what_an_evaluation_keeps_serves_a_training_step(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models.test_experts import host_and_packed

    _, packed = host_and_packed(FORMATS[format])
    x, chosen, weights = torch.randn(9, 64), torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    b = torch.randn(128, 8 * 4, requires_grad=True)
    packed.branches = {"gate_up_proj": ((torch.randn(8 * 4, 64), b, 0.5),)}
    expected = torch.autograd.grad(packed(x, chosen, weights).sum(), b)
    packed.keep_values(True)
    with torch.inference_mode():
        packed(x, chosen, weights)
        packed.branches, branches = {}, packed.branches
        packed(x, chosen, weights)
    monkeypatch.setattr(packed_experts, "dequantize", None)  # nothing is decoded again
    packed.branches = branches
    gradient = torch.autograd.grad(packed(x, chosen, weights).sum(), b)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
