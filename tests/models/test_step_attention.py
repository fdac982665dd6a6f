"""Attention of one token by groups of heads is attention over keys and values written out for each head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fewbits.models.generation.step_attention import heads_in_groups
from tests.models.tiny import tiny


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 4), (5, 1)])
def test_groups_are_heads_written_out(heads: int, groups: int, length: int) -> None:
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    with heads_in_groups(model):
        ours = ALL_ATTENTION_FUNCTIONS["fewbits_step"]
    q = torch.randn(2, heads, length, 16)
    k, v = torch.randn(2, 2, groups, 11, 16)
    mask = torch.zeros(2, 1, length, 11).masked_fill_(torch.rand(2, 1, length, 11) < 0.4, -torch.inf)
    mask[..., 0] = 0
    out, none = ours(_module(heads // groups), q, k, v, mask, scaling=0.3)
    every = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
    want = nn.functional.scaled_dot_product_attention(q, *every, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(out, want.transpose(1, 2))
    assert none is None


def _module(groups: int) -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = groups, True
    module.config = SimpleNamespace()
    return module


def test_names_are_given_back_and_eager_stays() -> None:
    model, eager = tiny("llama"), tiny("llama")
    model.set_attn_implementation("sdpa")
    eager.set_attn_implementation("eager")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="within"), heads_in_groups(model):
        assert model.config._attn_implementation == "fewbits_step"
        raise RuntimeError("within")
    assert model.config._attn_implementation == before
    with heads_in_groups(eager):
        assert eager.config._attn_implementation == "eager"
