"""Stream counts as one matrix product of an inner dimension that is longer: exact, and fast on a CPU.

The table of a dimension, ``T_d(u, w)``, changes from u - 1 to u in at most ``R = min(L, Q)`` places, because
a stream of L steps has at most L + 1 enabled lengths. With ``rank_d(u)`` the number of changes up to u:

    T_d(u, w) = sum over r < R of [rank_d(u) > r] * step_d(r, w)

so a code of a becomes a thermometer of R values 0 or 1, a code of b its R steps, both times their signs, and
``acc = X Y^T`` over D * R columns. All sums are whole numbers below 2**24, exact in float32 in any order. One
core of an AMD EPYC took 0.4 ns for each product of two codes at R = 16, 0.8 at 32 and 2.9 at 127, where
looking each up takes 4.8.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.formats.stochastic import Streams, product_tables

_EXACT_FLOAT32 = 2**24
_OPERAND_VALUES = 2**21  # of one operand at a time: 8 MB


class Factors(NamedTuple):
    """The signed thermometers and steps of each table, (tables, 2 Q + 1, R) float32; code q is row q + Q."""

    thermometers: Tensor
    steps: Tensor


@lru_cache(maxsize=16)
def factors(streams: Streams, masks: tuple[int, ...], device: torch.device) -> Factors:
    """Both factors of the product tables under these masks."""
    T = product_tables(streams, masks, device).float()
    delta = T.diff(dim=1)  # (tables, Q, Q + 1): delta[u - 1] = T(u) - T(u - 1)
    changes = delta.ne(0).any(-1)
    columns = max(1, int(changes.sum(1).max()))
    rank = torch.nn.functional.pad(changes.cumsum(1), (1, 0))  # (tables, Q + 1)
    thermometers = (rank[..., None] > torch.arange(columns, device=device)).float()
    steps = torch.zeros(len(masks), columns, T.shape[-1], device=device)
    table, row = changes.nonzero(as_tuple=True)
    steps[table, rank[table, row + 1] - 1] = delta[table, row]
    return Factors(_signed(thermometers), _signed(steps.mT.contiguous()))


def _signed(magnitudes: Tensor) -> Tensor:
    """Rows for the codes 0 ... Q as rows for -Q ... Q."""
    return torch.cat([-magnitudes[:, 1:].flip(1), magnitudes], 1)


def counts_by_gemm(qa_BND: Tensor, qb_BMD: Tensor, streams: Streams, masks: tuple[int, ...]) -> Tensor:
    """The signed sums of stream counts, (B, N, M) int32, of int16 codes (B, N, D) and (B, M, D).

    ``masks`` are those of the D dimensions.
    """
    B, N, D = qa_BND.shape
    M, Q = qb_BMD.shape[1], streams.max_code
    device = qa_BND.device
    if not D:
        return torch.zeros(B, N, M, dtype=torch.int32, device=device)
    distinct = tuple(sorted(set(masks)))
    position = {mask: i for i, mask in enumerate(distinct)}
    X, Y = factors(streams, distinct, device)
    R = X.shape[-1]
    table = torch.tensor([position[mask] for mask in masks], device=device) * X.shape[1] + Q
    X, Y = X.flatten(0, 1), Y.flatten(0, 1)
    few = max(1, min((_EXACT_FLOAT32 - 1) // streams.length, _OPERAND_VALUES // (R * max(1, min(N, M)))))
    rows = max(1, _OPERAND_VALUES // (R * min(few, D)))
    acc = torch.zeros(B, N, M, dtype=torch.int32, device=device)
    for i in range(B):
        for dims in (slice(start, start + few) for start in range(0, D, few)):
            steps = Y[qb_BMD[i, :, dims] + table[dims]].flatten(1)
            for start in range(0, N, rows):
                block = slice(start, start + rows)
                thermometers = X[qa_BND[i, block, dims] + table[dims]].flatten(1)
                acc[i, block] += (thermometers @ steps.mT).int()
    return acc
