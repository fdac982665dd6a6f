"""`Decoding` gives the tokens of transformers' own greedy ``generate``; its step reads nothing back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.decode import Decoding
from fewbits.models.loading.in_memory import apply_stochastic, convert
from fewbits.recipes import get_recipe
from fewbits.recipes.stochastic_config import AttentionSetting, StochasticConfig
from tests.models.tiny import tiny, tokens

ATTENTION = (("*", AttentionSetting(scores=64, values=64)),)


def model_under(recipe: str, family: str = "llama", device: str = "cpu") -> Any:
    model = tiny(family, dtype=torch.float32).to(device)
    model.set_attn_implementation("sdpa")
    if recipe == "stochastic attention":
        apply_stochastic(model, StochasticConfig(options=STOCHASTIC, attention=ATTENTION))
    elif recipe != "plain":
        convert(model, get_recipe(recipe))
    return model


class ReadsBack(TorchDispatchMode):
    """Notes every operation that waits for the device or depends on its values."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "aten.equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.WAITS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["plain", "qlora_nf4", "stochastic", "stochastic attention"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_of_generate(family: str, recipe: str) -> None:
    model, ids = model_under(recipe, family), tokens(2, 20)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[:, 20:]
    decoding = Decoding(model, batch_size=2, max_tokens=28)
    for _ in range(2):  # a second prompt begins anew
        assert torch.equal(decoding.prefill(ids), expected[:, :1])
        assert torch.equal(decoding.decode(8), expected)
    assert decoding.without_graph == "the model is not on a GPU"


@pytest.mark.parametrize("recipe", ["plain", "stochastic", "stochastic attention"])
def test_a_step_reads_nothing_back(recipe: str) -> None:
    decoding = Decoding(model_under(recipe), batch_size=2, max_tokens=16)
    decoding.prefill(tokens(2, 5))
    with ReadsBack() as seen:
        decoding.step()
    assert not seen.found
    with ReadsBack() as seen:
        bool(decoding.tokens.sum())
    assert seen.found  # what the line above would have found


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="layers of a sliding window"):
        Decoding(tiny("mistral"), max_tokens=8)
    with pytest.raises(BadInput, match="batch_size is 0 and max_tokens is 8; both must be at least 1"):
        Decoding(tiny("llama"), batch_size=0, max_tokens=8)
    decoding = Decoding(tiny("llama"), max_tokens=8)
    with pytest.raises(BadInput, match="has no prompt yet; call prefill"):
        decoding.step()
    with pytest.raises(BadInput, match="holds 1 sequences of 1 to 8 tokens"):
        decoding.prefill(tokens(1, 9))
    decoding.prefill(tokens(1, 8))
    with pytest.raises(BadInput, match="is full; make max_tokens larger"):
        decoding.step()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["plain", "qlora_nf4", "stochastic", "stochastic attention"])
def test_gpu_a_graph_gives_the_same_tokens(recipe: str) -> None:
    model, ids = model_under(recipe, device="cuda"), tokens(3, 20).cuda()
    made = []
    for graph in (False, True):
        decoding = Decoding(model, batch_size=3, max_tokens=48, cuda_graph=graph)
        assert bool(decoding.without_graph) != graph
        for prompt in (ids, ids.flip(1)):  # one graph serves both
            decoding.prefill(prompt)
            made.append(decoding.decode(24))
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3])
    assert not torch.equal(made[0], made[1])
