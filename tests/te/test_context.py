"""Attention over sequences that are cut over ranks gives what one rank gives: outputs and gradients."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import fewbits.te as te
from fewbits.errors import BadInput, Unsupported
from fewbits.te.context import shares
from fewbits.te.context.blocks import (
    Block,
    add_block,
    block_attention,
    block_attention_ref,
    block_gradients,
    block_gradients_ref,
)

CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32: some 300 terms in another order


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def compare(rank: int, ranks: int, port: int) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        for kind in ("p2p", "a2a"):
            for causal in (True, False):
                compare_batch(kind, causal)
                compare_packed(kind, causal)
            compare_layer(kind)
        compare_batch("a2a", True, window_size=(5, 0))
        refuse_what_is_not_computed()
    finally:
        torch.distributed.destroy_process_group()


def attention(layout: str, mask: str, kind: str | None, **words: Any) -> te.DotProductAttention:
    heads = 2 * torch.distributed.get_world_size()
    module = te.DotProductAttention(
        2 * heads, (8, 12), num_gqa_groups=heads, qkv_format=layout, attn_mask_type=mask, **words
    )
    if kind is not None:
        module.set_context_parallel_group(torch.distributed.group.WORLD, cp_comm_type=kind)
    return module


def tensors(*lead: int) -> list[Tensor]:
    """Queries, keys and values, and the gradient of what comes out."""
    heads = 2 * torch.distributed.get_world_size()
    shapes = ((2 * heads, 8), (heads, 8), (heads, 12), (2 * heads * 12,))
    return [torch.randn(*lead, *shape) for shape in shapes]


def check(whole: Any, part: Any, values: list[Tensor], rows: Tensor, axis: int, **words: Any) -> None:
    """One rank's module on its rows beside that on all of them."""
    full = [t.clone().requires_grad_() for t in values[:3]]
    own = [t.index_select(axis, rows).requires_grad_() for t in values[:3]]
    y, z = whole(*full, **words), part(*own, **words)
    y.backward(values[3])
    z.backward(values[3].index_select(axis, rows))
    torch.testing.assert_close(z, y.index_select(axis, rows), **CLOSE)
    for ours, theirs in zip(own, full, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.index_select(axis, rows), **CLOSE)


def compare_batch(kind: str, causal: bool, **words: Any) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    length, mask = 12 * ranks, "causal" if causal else "no_mask"
    rows = shares.rows_of_rank([0, length], rank, ranks)
    for layout in ("bshd", "sbhd"):
        lead = (3, length) if layout == "bshd" else (length, 3)
        modules = [attention(layout, mask, k, **words) for k in (None, kind)]
        check(*modules, tensors(*lead), rows, lead.index(length))


def compare_packed(kind: str, causal: bool) -> None:
    """With padding that ends within a first piece, within a second one, and a sequence of nothing."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    lengths, rooms = [5, 4 * ranks - 1, 0, 6 * ranks, 1], [4, 4, 2, 6, 2]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = (torch.tensor([0, *rooms]) * ranks).cumsum(0).int()
    lengths[0] = min(lengths[0], 4 * ranks)
    modules = [attention("thd", "padding_causal" if causal else "padding", k) for k in (None, kind)]
    words = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    words |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    rows = shares.rows_of_rank(padded.tolist(), rank, ranks)
    check(*modules, tensors(int(padded[-1])), rows, 0, **words)


def compare_layer(kind: str) -> None:
    """A whole layer, with positions, of which each rank has its own tokens."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    words = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    whole, part = (te.TransformerLayer(8 * ranks, 16, 2 * ranks, **words) for _ in range(2))
    for p in whole.parameters():
        torch.nn.init.normal_(p, std=0.3)
    part.load_state_dict(whole.state_dict())
    part.set_context_parallel_group(torch.distributed.group.WORLD, cp_comm_type=kind)
    length = 4 * ranks
    x, dy = torch.randn(length, 2, 8 * ranks), torch.randn(length, 2, 8 * ranks)
    angles = te.RotaryPositionEmbedding(4)(length)
    rows = shares.rows_of_rank([0, length], rank, ranks)
    a, b = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
    y, z = whole(a, rotary_pos_emb=angles), part(b, rotary_pos_emb=angles)
    y.backward(dy), z.backward(dy[rows])
    torch.testing.assert_close(z, y[rows], **CLOSE)
    torch.testing.assert_close(b.grad, a.grad[rows], rtol=1e-3, atol=1e-4)
    for name, p in part.named_parameters():
        assert p.grad is not None
        torch.distributed.all_reduce(p.grad)  # each rank has its tokens' share
        torch.testing.assert_close(p.grad, whole.get_parameter(name).grad, rtol=1e-3, atol=1e-3)


def refuse_what_is_not_computed() -> None:
    x = torch.randn(2, 8, 4 * torch.distributed.get_world_size(), 8)

    def call(kind: str = "p2p", mask: str = "causal", **words: Any) -> None:
        module = te.DotProductAttention(x.shape[2], 8, qkv_format="bshd", attn_mask_type=mask, **words)
        module.set_context_parallel_group(torch.distributed.group.WORLD, cp_comm_type=kind)
        module(x[:, :7] if "odd" in kind else x, x, x)

    for words, message in (
        ({"window_size": (2, 0)}, "'a2a'"),
        ({"attention_dropout": 0.1}, "'a2a'"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"return_max_logit": True}, "return_max_logit"),
        ({"mask": "causal_bottom_right"}, "bottom-right"),
        ({"kind": "all_gather"}, "all_gather"),
    ):
        with pytest.raises(Unsupported, match=message):
            call(**words)
    with pytest.raises(BadInput, match="own"):
        call(mask="arbitrary")
    module = te.DotProductAttention(3, 8, qkv_format="bshd")
    module.set_context_parallel_group(torch.distributed.group.WORLD, cp_comm_type="a2a")
    for rows, heads, message in ((7, 4, "two pieces"), (8, 3, "cannot be shared")):
        if message == "two pieces" or 3 % torch.distributed.get_world_size():
            part = torch.randn(1, rows, heads, 8)
            with pytest.raises(BadInput, match=message):
                module(part, part, part)


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_ranks_that_share_sequences_are_one(ranks: int) -> None:
    mp.spawn(compare, args=(ranks, free_port()), nprocs=ranks)


# Pieces, in one process.


def block(m: int, n: int, causal: bool, device: str = "cpu", kind: torch.dtype = torch.float32) -> Block:
    q, k, v = (torch.randn(2, h, rows, 16, device=device, dtype=kind) for h, rows in ((4, m), (2, n), (2, n)))
    return Block(q, k, v, 0.3, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_add_up_to_attention(causal: bool) -> None:
    whole = block(12, 12, causal)
    leaves = [t.clone().requires_grad_() for t in whole[:3]]
    k, v = (t.repeat_interleave(2, 1) for t in leaves[1:])
    need = F.scaled_dot_product_attention(leaves[0], k, v, scale=0.3, is_causal=causal)
    dy = torch.randn_like(need)
    need.backward(dy)
    y, log = torch.zeros(2, 4, 12, 16), torch.full((2, 4, 12), -torch.inf)
    pieces = []
    for first in (6, 0):  # the later queries see both halves of the keys
        for keys in (0, 6):
            if not causal or keys <= first:
                rows, of_k = slice(first, first + 6), slice(keys, keys + 6)
                one = Block(
                    whole.q[:, :, rows],
                    whole.k[:, :, of_k],
                    whole.v[:, :, of_k],
                    0.3,
                    causal and keys == first,
                )
                add_block(y[:, :, rows], log[:, :, rows], *block_attention(one))
                pieces.append((rows, of_k, one))
    torch.testing.assert_close(y, need.detach(), **CLOSE)
    sums = [torch.zeros_like(t) for t in whole[:3]]
    for rows, of_k, one in pieces:
        parts = block_gradients(one, dy[:, :, rows], y[:, :, rows], log[:, :, rows])
        for total, part, at in zip(sums, parts, (rows, of_k, of_k), strict=True):
            total[:, :, at] += part
    for total, leaf in zip(sums, leaves, strict=True):
        torch.testing.assert_close(total, leaf.grad, **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_flash_blocks_are_the_definition(causal: bool) -> None:
    """Of 16-bit operands: torch's own kernels round probabilities and partial outputs to 16 bits."""
    one = block(384, 384 if causal else 200, causal, "cuda", torch.bfloat16)
    y, log = block_attention(one)
    need, need_log = block_attention_ref(one)
    torch.testing.assert_close(log, need_log, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(y, need, rtol=2.0**-6, atol=2.0**-7)
    dy, more = torch.randn_like(y), need_log + 0.7  # as where other blocks have keys too
    for ours, theirs in zip(
        block_gradients(one, dy, need, more), block_gradients_ref(one, dy, need, more), strict=True
    ):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2.0**-4, atol=float(theirs.abs().max()) * 2.0**-6)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_token_belongs_to_one_rank(ranks: int) -> None:
    bounds = [0, 4 * ranks, 10 * ranks]
    rows = [shares.rows_of_rank(bounds, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(rows).tolist()) == list(range(10 * ranks))
    parts = shares.shares_of_packed([0, 3, 3 + 5 * ranks], bounds, ranks)
    order = shares.rows_in_order(parts, ranks, 10)
    assert torch.equal(torch.cat(rows)[order], torch.arange(10 * ranks))
    for rank, own in enumerate(rows):
        for share, begin in zip(parts, bounds, strict=False):
            local = own[share.start : share.start + 2 * share.piece] - begin
            assert share.valid(rank, ranks) == (local < share.length).sum()
            assert (local[: share.valid(rank, ranks)] < share.length).all()
    with pytest.raises(BadInput, match="twice the ranks"):
        shares.shares_of_packed([0, 3], [0, 2 * ranks + 1], ranks)


def test_packed_batches_are_padded_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, labels, cu = torch.arange(1, 10), torch.arange(11, 20), torch.tensor([0, 3, 4, 9])
    tokens, targets, padded = shares.pad_thd_sequences_for_cp(ids[None], labels[None], cu, 4, 0, -100)
    assert padded.tolist() == [0, 4, 8, 16]
    assert tokens.tolist() == [1, 2, 3, 0, 4, 0, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0]
    assert targets.tolist() == [11, 12, 13, -100, 14, *[-100] * 3, 15, 16, 17, 18, 19, *[-100] * 3]
    positions = shares.generate_positional_ids_for_cp(cu, 4)
    assert positions.tolist() == [*range(4), *range(4), *range(8)]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    assert shares.get_batch_on_this_cp_rank(padded, tokens, None, positions)[0] is tokens
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    cut = shares.get_batch_on_this_cp_rank(padded, tokens[None], targets, positions)
    assert cut[0].tolist() == [[2, 3, 0, 0, 7, 8, 9, 0]] and cut[2].tolist() == [1, 2, 1, 2, 2, 3, 4, 5]
    with pytest.raises(BadInput, match="no axis of 16"):
        shares.get_batch_on_this_cp_rank(padded, tokens[:9], None, None)
    with pytest.raises(BadInput, match="thd"):
        shares.get_batch_on_this_cp_rank(padded, tokens, None, None, qvk_format="bshd")
