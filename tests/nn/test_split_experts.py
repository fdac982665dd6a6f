"""Experts as linears of their own: the host's sums, its memory, and back again."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fewbits.errors import Unsupported
from fewbits.nn.split_experts import SplitExperts, hit_experts


@pytest.fixture
def host():
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.eval()


def routed(rows):
    chosen = torch.tensor([[0, 3], [3, 1], [0, 1]]).repeat(rows // 3, 1)  # nobody takes expert 2
    return torch.randn(rows, 16), chosen, torch.rand(rows, 2, dtype=torch.float32)


def test_the_same_sums_and_no_memory(host):
    call = routed(9)
    expected = host(*call)
    storage = {p.untyped_storage().data_ptr() for p in host.parameters()}
    split = SplitExperts(host)
    torch.testing.assert_close(split(*call), expected, rtol=1e-5, atol=1e-6)
    assert {p.untyped_storage().data_ptr() for p in split.parameters()} == storage
    assert sorted(n for n, _ in split.named_parameters() if n.startswith("3.")) == [
        "3.down_proj.weight",
        "3.gate_proj.weight",
        "3.up_proj.weight",
    ]


def test_back_again_with_what_the_linears_hold_now(host):
    before = {n: p.detach().clone() for n, p in host.named_parameters()}
    split = SplitExperts(host)
    plain = split.host()
    assert type(plain) is MixtralExperts
    assert all(torch.equal(p, before[n]) for n, p in plain.named_parameters())
    with torch.no_grad():
        split.get_submodule("2.up_proj").weight.fill_(7.0)
    assert split.host().gate_up_proj[2, 24:].eq(7.0).all()
    split.get_submodule("2").up_proj = torch.nn.Identity()
    with pytest.raises(Unsupported, match="expert 2's up_proj is converted"):
        split.host()


def test_numbers_behind_the_last_expert_stand_for_none(host):
    assert hit_experts(torch.tensor([[4, 1], [1, 0]]), 4) == [0, 1]
    split, call = SplitExperts(host), routed(3)
    nobody = torch.full_like(call[1], 4)
    assert split(call[0], nobody, call[2]).eq(0).all()


def test_what_cannot_be_split_is_refused(host):
    host.is_transposed = True
    with pytest.raises(Unsupported, match="stored turned round"):
        SplitExperts(host)
