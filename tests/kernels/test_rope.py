"""Rotary positions: the definition against transformers, the gradient, the kernel in any layout, the ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder import rope as module
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.rope import apply_rope, rope, rope_into, rope_ref, split_heads
from fewbits.kernels.decoder.rope_triton import RopeTile, Tables, launch

# Each side rounds once; before it two products and a sum in float32, perhaps fused, and r products' order.
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2 * HALF_UNIT[dtype] + 2.0**-20, "atol": 2.0**-16}


def tables_of(length: int, d: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    angle = torch.outer(torch.arange(length).double(), 10000.0 ** -(torch.arange(0, d, 2).double() / d))
    angle = torch.cat([angle, angle], -1)
    return [angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


# The definition.


@pytest.mark.parametrize("partial", [False, True])
def test_equals_transformers_in_float32(partial: bool) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3

    q, k = randn(2, 4, 7, 16), randn(2, 2, 7, 16)
    cos, sin = (t[None] for t in tables_of(7, 8 if partial else 16))
    need = (phi3 if partial else llama)(q, k, cos, sin)
    for out, want in zip(apply_rope(q, k, cos, sin), need, strict=True):
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    if not partial:
        need = llama(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        for out, want in zip(
            apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2), need, strict=True
        ):
            torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


def test_16_bits_round_once() -> None:
    q, k = randn(1, 2, 5, 8, dtype=torch.bfloat16), randn(1, 1, 5, 8, dtype=torch.bfloat16)
    cos, sin = tables_of(5, 8)
    exact = rope(q.double(), k.double(), cos, sin)[0]
    torch.testing.assert_close(rope(q, k, cos, sin)[0].double(), exact, rtol=2.0**-8 * 1.001, atol=1e-6)


def test_positions_tables_and_halves() -> None:
    q, k = randn(2, 2, 5, 8), randn(2, 1, 5, 8)
    cos, sin = tables_of(11, 8)
    ids = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 10, 6, 7]])
    need = rope(q, k, cos[ids], sin[ids])
    assert all(torch.equal(a, b) for a, b in zip(rope(q, k, cos, sin, position_ids=ids), need, strict=True))
    short = rope(q, k, cos[:, :4], sin[:, :4], position_ids=ids, rotary_dim=8)
    assert all(torch.equal(a, b) for a, b in zip(short, need, strict=True))
    back = rope(*need, cos, sin, position_ids=ids, inverse=True)
    torch.testing.assert_close(back[0], q)


@pytest.mark.parametrize("d", [4, 8])
def test_gradients_by_finite_differences(d: int) -> None:
    q, k = (randn(2, h, 3, 8, dtype=torch.float64).requires_grad_() for h in (2, 1))
    cos, sin = tables_of(3, d, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: rope(a, b, 1.3 * cos, 1.3 * sin), (q, k))


def test_fused_buffer_forward_and_backward() -> None:
    B, S, H, Hk, D, r = 2, 5, 4, 2, 8, 3
    qkv = randn(B * S, (H + 2 * Hk) * D + 3)
    cos, sin = tables_of(S, D)
    branch = [LowRank(randn(B * S, r), randn(h * D, r)) for h in (H, Hk, Hk)]
    parts = [p.clone() for p in split_heads(qkv, B, H, Hk, D)]
    assert torch.equal(parts[1][1, 1], qkv[S:, (H + 1) * D : (H + 2) * D])
    added = [
        p + (x @ w.t()).view(B, S, -1, D).transpose(1, 2) for p, (x, w) in zip(parts, branch, strict=True)
    ]
    need = *rope(added[0], added[1], cos, sin), added[2]
    views = split_heads(qkv, B, H, Hk, D)
    rope_into(views, views, cos, sin, low_rank=branch)
    for out, want in zip(views, need, strict=True):
        torch.testing.assert_close(out, want)
    back = torch.zeros(B * S, (H + 2 * Hk) * D + 7)
    rope_into(views, split_heads(back, B, H, Hk, D), cos, sin, inverse=True)
    for out, want in zip(split_heads(back, B, H, Hk, D), added, strict=True):
        torch.testing.assert_close(out, want)
    assert back[:, (H + 2 * Hk) * D :].eq(0).all()


def test_what_does_not_fit_is_refused() -> None:
    q, k = randn(2, 2, 5, 8), randn(2, 1, 5, 8)
    cos, sin = tables_of(5, 8)
    with pytest.raises(BadInput, match="d = 12 even and at most 8"):
        rope(q, k, *tables_of(5, 12))
    with pytest.raises(BadInput, match="do not fit a batch of 2 x 5"):
        rope(q, k, cos[:4], sin[:4])
    with pytest.raises(BadInput, match="do not fit a batch of 2 x 5"):
        rope(q, k, cos, sin, position_ids=torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(BadInput, match="differ in H only"):
        rope(q, k[:, :, :, :4], cos, sin)
    with pytest.raises(BadInput, match="q, k and perhaps v"):
        rope_into((q,), (q,), cos, sin)
    with pytest.raises(BadInput, match="the output is"):
        rope_into((q, k), (q, k.double()), cos, sin)
    with pytest.raises(BadInput, match=r"x \(10, r\) and w \(16, r\)"):
        rope_into((q, k), (q, k), cos, sin, low_rank=(LowRank(randn(10, 2), randn(2, 16)), None, None))
    with pytest.raises(Unsupported, match="rank 128 at most"):
        rope_into((q, k), (q, k), cos, sin, low_rank=(LowRank(randn(10, 129), randn(16, 129)), None, None))


# The ops.


def test_opcheck() -> None:
    q, k = randn(2, 4, 5, 8).transpose(1, 2).requires_grad_(), randn(2, 5, 4, 8).requires_grad_()
    cos, sin = (t[None] for t in tables_of(4, 8))
    torch.library.opcheck(module._rope, (q, k, cos, sin, None, 8, False))
    x = [randn(2, 2, 4, 8) for _ in range(6)]
    none = [randn(8, 0)] * 3, [randn(16, 0)] * 3
    ids = torch.arange(4)[None]
    torch.library.opcheck(module._rope_into, (x[:3], x[3:], *none, cos, sin, ids, 8, True))


def test_compiles_without_a_break() -> None:
    q, k = randn(2, 2, 5, 8), randn(2, 1, 5, 8)
    cos, sin = tables_of(5, 8)

    def run(f) -> list[Tensor]:
        a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
        y, z = f(a, b)
        (y.sum() + (z * z).sum()).backward()
        return [y.detach(), z.detach(), a.grad, b.grad]

    def block(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rope(a * 2, b + 1, cos[None], sin[None])

    eager, compiled = run(block), run(torch.compile(block, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


# The kernel, on a GPU or under the interpreter.


def check_kernel(
    shape: tuple[int, int, int, int, int],
    d: int,
    rank: int,
    dtype: torch.dtype,
    device: str,
    tile: RopeTile | None = None,
    positions: bool = False,
) -> None:
    """From a fused buffer to separate tensors and in place, both directions, against the definition."""
    B, S, H, Hk, D = shape
    width = (H + 2 * Hk) * D
    qkv = randn(B * S, width + 5, dtype=dtype, device=device)
    sources = split_heads(qkv, B, H, Hk, D)
    cos, sin = (t[None] for t in tables_of(S + 3, d, torch.float32, device))
    ids = torch.randint(0, S + 3, (B, S), device=device) if positions else None
    tables = Tables(cos, sin, ids, d)
    ranks = (rank, 0, rank)
    branch = [
        (randn(B * S, r, dtype=dtype, device=device), randn(h * D, r, dtype=dtype, device=device))
        for h, r in zip((H, Hk, Hk), ranks, strict=True)
    ]
    close = tolerance(dtype) | {"atol": tolerance(dtype)["atol"] * max(1, rank)}
    for inverse in (False, True):
        need = [rope_ref(x, tables, inverse, low) for x, low in zip(sources[:2], branch[:2], strict=True)]
        need.append(module._widened(sources[2], branch[2]).to(dtype))
        out = [torch.full_like(x.transpose(1, 2), torch.nan).transpose(1, 2) for x in sources]
        launch(sources, out, branch, tables, inverse, tile)
        for y, want in zip(out, need, strict=True):
            torch.testing.assert_close(y, want, **close)
    before = qkv.clone()
    launch(sources, sources, branch, tables, True, tile)
    for y, want in zip(sources, out, strict=True):
        assert torch.equal(y, want)
    assert torch.equal(qkv[:, width:], before[:, width:])


@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_equals_the_definition(dtype: torch.dtype, kernel_device: str) -> None:
    for shape, d in [((2, 33, 3, 2, 16), 16), ((1, 7, 3, 1, 80), 32), ((3, 5, 1, 1, 96), 96)]:
        check_kernel(shape, d, 0, dtype, kernel_device)


@pytest.mark.parametrize(("shape", "d"), [((2, 17, 5, 2, 32), 32), ((1, 9, 2, 1, 80), 32)], ids=str)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_adds_low_rank_branches(
    shape: tuple[int, int, int, int, int], d: int, kernel_device: str
) -> None:
    for rank, dtype in ((16, torch.float32), (3, torch.float16), (40, torch.float32)):
        check_kernel(shape, d, rank, dtype, kernel_device)


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_positions_and_tiles(kernel_device: str) -> None:
    check_kernel((2, 9, 5, 3, 16), 16, 0, torch.float32, kernel_device, RopeTile(16, 2, 4), positions=True)
    check_kernel((2, 21, 9, 1, 16), 16, 8, torch.float32, kernel_device, RopeTile(32, 8, 4))


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernel_takes_expanded_gradients_and_nothing(kernel_device: str) -> None:
    q = torch.ones((), device=kernel_device).expand(2, 3, 4, 8)
    tables = Tables(*(t[None] for t in tables_of(4, 8, device=kernel_device)), None, 8)
    base = torch.empty(2, 3, 4, 8, device=kernel_device)
    x = [base, base.clone()]
    none = [(torch.empty(0, 0, device=kernel_device),) * 2] * 2
    launch([q.contiguous(), q.contiguous()], x, none, tables, False)
    torch.testing.assert_close(x[0], rope_ref(q, tables))
    empty = [torch.empty(2, 3, 0, 8, device=kernel_device)] * 2
    launch(empty, empty, none, tables, False)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
def test_cuda_op_and_autograd(dtype: torch.dtype) -> None:
    B, S, H, Hk, D = 2, 130, 32, 8, 128
    q = randn(B, S, H, D, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_()
    k = randn(B, S, Hk, D, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_()
    cos, sin = (t[None] for t in tables_of(S, D, dtype, "cuda"))
    out = apply_rope(q, k, cos, sin)
    dy = [torch.randn_like(y) for y in out]
    grads = torch.autograd.grad(out, (q, k), dy)
    tables = Tables(cos, sin, None, D)
    for x, y, g, dx in zip((q, k), out, dy, grads, strict=True):
        torch.testing.assert_close(y, rope_ref(x, tables), **tolerance(dtype))
        torch.testing.assert_close(dx, rope_ref(g, tables, True), **tolerance(dtype))
    torch.library.opcheck(module._rope, (q, k, cos, sin, None, D, False))
    expanded = torch.autograd.grad([y.sum() for y in apply_rope(q, k, cos, sin)], (q, k))
    torch.testing.assert_close(expanded[0], rope_ref(torch.ones_like(q), tables, True), **tolerance(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 16, 64])
def test_cuda_real_shapes(rank: int) -> None:
    check_kernel((2, 513, 32, 8, 128), 128, rank, torch.bfloat16, "cuda", positions=rank == 16)
    check_kernel((1, 300, 24, 8, 128), 96, rank, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_cuda_more_than_2_31_values() -> None:
    x = torch.ones(1, 2**17 + 1, 130, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    cos, sin = (torch.full((2**17 + 1, 128), v, device="cuda") for v in (2.0, 0.0))
    rope_into((x, x[:, :1]), (x, x[:, :1]), cos, sin)
    assert x[0, 1:, -1].eq(2).all() and x[0, 1:, 0].eq(2).all()


@pytest.mark.multi
def test_cuda_second_device() -> None:
    q, k = randn(1, 2, 5, 8, device="cuda:1"), randn(1, 1, 5, 8, device="cuda:1")
    cos, sin = tables_of(5, 8, device="cuda:1")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(rope(q, k, cos, sin)[0], rope_ref(q, Tables(cos[None], sin[None], None, 8)))
