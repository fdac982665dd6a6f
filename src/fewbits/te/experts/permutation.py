"""Tokens to their experts and back: permutations with probabilities and padding, by index and not by kernel.

A *route* is a token that goes to an expert; routes are ordered by expert, then by token. The map that
`moe_permute` returns says for each token (row) in columns ``0 ... n - 1`` the rows its routes went to, in
columns ``experts ... experts + n - 1`` to which experts, and in the last column n; the rest is -1.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.formats.base import Packed
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.te.tensors.quantized_tensor import QuantizedTensor


def _routes(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Token and expert of every route, by expert and then by token."""
    expert, token = routing_map.t().nonzero(as_tuple=True)
    return token, expert


def _row_id_map(token: Tensor, expert: Tensor, shape: tuple[int, int]) -> Tensor:
    tokens, experts = shape
    destination = torch.full((tokens, experts), -1, dtype=torch.int32, device=token.device)
    destination[token, expert] = torch.arange(len(token), dtype=torch.int32, device=token.device)
    chosen = destination >= 0
    order = (~chosen).to(torch.int8).argsort(dim=1, stable=True)  # chosen experts first, in their order
    rows = destination.gather(1, order)
    which = torch.where(chosen.gather(1, order), order, -1).to(torch.int32)
    return torch.cat([rows, which, chosen.sum(1, keepdim=True, dtype=torch.int32)], 1)


def _from_map(row_id_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token, expert and row of every route that a map holds."""
    experts = (row_id_map.shape[1] - 1) // 2
    rows = row_id_map[:, :experts].long()
    token, place = (rows >= 0).nonzero(as_tuple=True)
    return token, row_id_map[:, experts : 2 * experts].long()[token, place], rows[token, place]


def _permuted(values: Tensor, row: Tensor, size: int) -> Tensor:
    """``values`` (n, ...) put into rows ``row`` of zeros (size, ...); rows past the end are dropped."""
    is_row = row < size
    out = values.new_zeros(size, *values.shape[1:])
    return out.index_copy(0, row[is_row], values[is_row])


class _PermutedCodes(torch.autograd.Function):
    """Rows of a quantised tensor, with their scales, as they are; the gradient is a plain tensor."""

    @staticmethod
    def forward(ctx: Any, inp: QuantizedTensor, token: Tensor, size: int) -> Tensor:
        rows = inp.operand().rows
        if not isinstance(rows, Packed):
            raise BadInput(
                "the tokens' rows were not quantised: call set_usage(rowwise=True) before quantising."
            )
        tall, _ = rows.format.contract.block
        if tall > 1:
            raise BadInput(
                f"tokens with scales for {tall} rows cannot be reordered: quantise them with a scale for "
                "each row's blocks, or for the tensor."
            )
        ctx.save_for_backward(token[:size])
        ctx.tokens = inp.shape[0]
        of_rows = {"codes"} if tall == 0 else {"codes", "scales"}
        parts = {n: _rows_first(p, token[:size], size) if n in of_rows else p for n, p in rows.parts.items()}
        return inp.with_rows(Packed(rows.format, (size, rows.shape[1]), rows.dtype, parts))

    @staticmethod
    @once_differentiable("a permutation of quantised tokens")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.tokens, dy.shape[1])
        return dx.index_add_(0, token, dy[: len(token)]), None, None


def _rows_first(part: Tensor, token: Tensor, size: int) -> Tensor:
    """Rows ``token`` of codes or scales (tokens, ...), then zeros up to ``size``."""
    as_bytes = part.view(torch.uint8) if part.element_size() == 1 else part
    rows = as_bytes.new_zeros(size, part.shape[1])
    rows[: len(token)] = as_bytes[token]
    return rows.view(part.dtype)


def _gathered(inp: Tensor, token: Tensor, size: int) -> Tensor:
    """Rows ``token`` of inp (tokens, K), and zeros up to ``size`` or fewer; a quantised tensor stays one."""
    if isinstance(inp, QuantizedTensor):
        codes: Tensor = _PermutedCodes.apply(inp, token, size)
        return codes
    return _permuted(inp[token], torch.arange(len(token), device=inp.device), size)


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Order tokens by their experts.

    Args:
        inp: (tokens, K); a quantised tensor stays one, its codes by rows.
        routing_map: for "mask" (tokens, experts), not 0 where a token goes to an expert; for "index"
            (tokens, top_k) numbers of experts.
        num_out_tokens: rows of the result; routes past it are dropped. For "index" 0 is all.
        max_token_num: not needed.
        map_type: "mask" or "index".

    Returns:
        (num_out_tokens, K), and the map for `moe_unpermute`.
    """
    if map_type == "mask":
        token, expert = _routes(routing_map)
        ids = _row_id_map(token, expert, (routing_map.shape[0], routing_map.shape[1]))
        return _gathered(inp, token, num_out_tokens), ids
    if map_type != "index":
        raise BadInput(f"map_type is 'mask' or 'index', not {map_type!r}.")
    tokens, top_k = routing_map.shape
    order = routing_map.reshape(-1).argsort(stable=True)
    size = num_out_tokens or tokens * top_k
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    ids = torch.where(row < size, row, -1).view(tokens, top_k).t().reshape(-1).to(torch.int32)
    return _gathered(inp, order // top_k, size), ids


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe_permute` by a mask, and the probabilities with the tokens.

    Args:
        inp: (tokens, K).
        probs: (tokens, experts).
        routing_map: (tokens, experts).
        num_out_tokens: rows of the result.

    Returns:
        Tokens (num_out_tokens, K), their probabilities (num_out_tokens,), and the map.
    """
    token, expert = _routes(routing_map)
    row = torch.arange(len(token), device=inp.device)
    ids = _row_id_map(token, expert, (routing_map.shape[0], routing_map.shape[1]))
    return (
        _gathered(inp, token, num_out_tokens),
        _permuted(probs[token, expert], row, num_out_tokens),
        ids,
    )


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """As `moe_permute_with_probs`, each expert's rows filled up with zeros.

    Args:
        inp: (tokens, K).
        probs: (tokens, experts).
        routing_map: (tokens, experts).
        tokens_per_expert: (experts,) counts.
        align_size: of which each expert's rows become a multiple.

    Returns:
        Tokens, probabilities, the map, where padding has moved each expert's rows (experts,) or None if there
        is none, and the padded counts (experts,).
    """
    if align_size <= 0:
        raise BadInput(f"align_size is {align_size}: it is at least 1.")
    counts = tokens_per_expert.to(inp.device).long()
    padded = -(-counts // align_size) * align_size
    token, expert = _routes(routing_map)
    offsets = (padded - counts).cumsum(0) - (padded - counts)
    row = torch.arange(len(token), device=inp.device) + offsets[expert]
    size = int(padded.sum())
    ids = _row_id_map(token, expert, (routing_map.shape[0], routing_map.shape[1]))
    moved = None if torch.equal(padded, counts) else offsets
    return _permuted(inp[token], row, size), _permuted(probs[token, expert], row, size), ids, moved, padded


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Bring tokens back and add up what came of each.

    Args:
        inp: (rows, K), ordered by expert.
        row_id_map: what the permutation returned.
        merging_probs: for "mask" (tokens, experts), for "index" (tokens, top_k): what each is multiplied by.
        restore_shape: (tokens, K); by default ``inp``'s.
        map_type: "mask" or "index".
        probs: the older name of ``merging_probs``.
        pad_offsets: what `moe_permute_and_pad_with_probs` returned.

    Returns:
        (tokens, K) in ``inp``'s dtype; sums are in float32.
    """
    if probs is not None:
        if merging_probs is not None:
            raise BadInput("probs is the older name of merging_probs: give one of them.")
        warnings.warn("probs is the older name of merging_probs.", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    if map_type == "index":
        tokens, top_k = (row_id_map.shape[0], 1) if merging_probs is None else merging_probs.shape
        place = row_id_map.view(top_k, tokens).t().long()
        token, choice = (place >= 0).nonzero(as_tuple=True)
        row, weight = place[token, choice], None if merging_probs is None else merging_probs[token, choice]
    elif map_type == "mask":
        tokens = inp.shape[0] if restore_shape is None else restore_shape[0]
        token, expert, row = _from_map(row_id_map)
        row = row if pad_offsets is None else row + pad_offsets.to(row.device)[expert]
        weight = None if merging_probs is None else merging_probs[token, expert]
    else:
        raise BadInput(f"map_type is 'mask' or 'index', not {map_type!r}.")
    is_row = row < inp.shape[0]
    parts = inp[row[is_row]].float()
    parts = parts if weight is None else parts * weight[is_row].float()[:, None]
    out = torch.zeros(tokens, inp.shape[1], device=inp.device, dtype=torch.float32).index_add(
        0, token[is_row], parts
    )
    return out.to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Pieces of ``inp`` (rows, K) of the sizes given, in another order.

    Args:
        inp: (rows, K).
        split_sizes: (n,) rows of each piece.
        sorted_index: (n,) which piece comes first, second and so on.
    """
    pieces = inp.split(split_sizes.tolist())
    return torch.cat([pieces[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """As `moe_sort_chunks_by_index`, and the probabilities (rows,) with the rows."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )
