"""Stream counts as a matrix product are those of the definition, which looks each product up."""

from __future__ import annotations

import random

import pytest
import torch

from fewbits.formats.stochastic import Stochastic, product_tables
from fewbits.kernels._stochastic_gemm import counts_by_gemm

OPTIONS = [
    Stochastic(halve_bipolar_stoc_len=True),
    Stochastic(halve_bipolar_stoc_len=True, stoc_len=32),
    Stochastic(halve_bipolar_stoc_len=True, stoc_len=17, scramble="random"),
    Stochastic(stoc_len=1),
    Stochastic(stoc_len=100, scramble="counter", n_masks=5),
    Stochastic(mode="unipolar", stoc_len=37),
    Stochastic(sc_prec=2, rng_levels=1),
    Stochastic(sc_prec=4, rng_levels=31, stoc_len=9, scramble_rescale=False),
    Stochastic(scramble="off"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_table_lookups(options):
    seed = random.randrange(2**32)
    generator = torch.Generator().manual_seed(seed)
    low = -options.max_code if options.bipolar else 0
    B, N, M, D = 2, 7, 5, 33

    def codes(rows):
        return torch.randint(low, options.max_code + 1, (B, rows, D), generator=generator, dtype=torch.int16)

    qa, qb, masks = codes(N), codes(M), options.masks(D)
    found = counts_by_gemm(qa, qb, options.streams, masks)
    T = product_tables(options.streams, masks, torch.device("cpu")).long()
    u, w = qa.long()[:, :, None, :], qb.long()[:, None, :, :]
    counts = T[torch.arange(D), u.abs(), w.abs()] * u.sign() * w.sign()
    assert torch.equal(found, counts.sum(-1).int()), f"seed {seed}"


def test_dimensions_and_rows_in_several_blocks():
    options = Stochastic(halve_bipolar_stoc_len=True, stoc_len=128)
    generator = torch.Generator().manual_seed(3)
    qa, qb = (torch.randint(-127, 128, (1, n, 900), generator=generator, dtype=torch.int16) for n in (90, 40))
    masks = options.masks(900)
    whole = counts_by_gemm(qa, qb, options.streams, masks)
    parts = [
        counts_by_gemm(qa[..., s], qb[..., s], options.streams, masks[s])
        for s in (slice(0, 451), slice(451, 900))
    ]
    assert torch.equal(whole, parts[0] + parts[1])


def test_no_rows_and_no_dimensions():
    options = Stochastic(stoc_len=8)
    for N, M, D in ((0, 3, 4), (3, 0, 4), (3, 2, 0)):
        qa, qb = torch.zeros(1, N, D, dtype=torch.int16), torch.zeros(1, M, D, dtype=torch.int16)
        found = counts_by_gemm(qa, qb, options.streams, options.masks(D))
        assert found.shape == (1, N, M)
        assert not found.any()
