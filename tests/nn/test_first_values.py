"""First values of adapters: peft's own draws, each from the seed and the parameter's name alone."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.nn.first_values import first_values, generator_of, has_first_values, orthogonal_pair

A, B = "model.layers.0.q_proj.lora_A.default.weight", "model.layers.0.q_proj.lora_B.default.weight"
RANK, NUM_IN, NUM_OUT = 6, 50, 34


def theirs(init: bool | str, name: str, seed: int, *, base: nn.Module | None = None) -> dict[str, Tensor]:
    """What peft's own layer draws when torch's generator begins where ours does."""
    base = base or nn.Linear(NUM_IN, NUM_OUT, bias=False)
    config = peft.LoraConfig(r=RANK, target_modules=["proj"], init_lora_weights=init)
    layer = peft.get_peft_model(nn.ModuleDict({"proj": base}), config).base_model.model["proj"]
    torch.manual_seed(generator_of(seed, name).initial_seed())
    if init == "orthogonal":
        layer.orthogonal_init("default")
    else:
        layer.reset_lora_parameters("default", init)
    return {leaf: p.detach() for leaf, p in layer.named_parameters() if leaf.startswith("lora_")}


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_they_are_pefts_draws(init) -> None:
    found = first_values(A, (RANK, NUM_IN), seed=3, init=init)
    assert found.dtype == torch.float32 and found.std() > 0
    assert torch.equal(found, theirs(init, A, 3)["lora_A.default.weight"])
    assert not first_values(B, (NUM_OUT, RANK), seed=3, init=init).any()


def test_an_embeddings_are_pefts_draws() -> None:
    a, b = (f"model.embed_tokens.lora_embedding_{part}.default" for part in "AB")
    want = theirs(True, b, 3, base=nn.Embedding(NUM_IN, NUM_OUT))["lora_embedding_B.default"]
    assert torch.equal(first_values(b, (NUM_OUT, RANK), seed=3), want) and want.std() > 0.5
    assert not first_values(a, (RANK, NUM_IN), seed=3).any()
    assert first_values(a, (RANK, NUM_IN), seed=3, init=False).std() > 0.5


@pytest.mark.parametrize("name, shape", [(A, (RANK, NUM_IN)), (B, (NUM_OUT, RANK))])
def test_without_an_init_both_begin_as_a_linear_does(name, shape) -> None:
    """Which is what peft then leaves in place: `nn.Linear`'s own weight and bias."""
    torch.manual_seed(generator_of(3, name).initial_seed())
    want = nn.Linear(shape[1], shape[0]).weight
    assert torch.equal(first_values(name, shape, seed=3, init=False), want)
    bias = first_values("q_proj.lora_B.default.bias", (4096,), seed=3, init=False, rank=RANK)
    assert 0.99 * RANK**-0.5 < bias.abs().max() < RANK**-0.5


def test_orthogonal_ones_are_pefts_draws() -> None:
    want = theirs("orthogonal", A, 3)
    a, b = orthogonal_pair(RANK, NUM_IN, NUM_OUT, generator_of(3, A))
    assert torch.equal(a, want["lora_A.default.weight"]) and torch.equal(b, want["lora_B.default.weight"])
    assert (b @ a).abs().max() < 1e-5 < 1e-2 < b.std()
    with pytest.raises(BadInput, match="needs an even rank, and r is 5; pass r=6"):
        orthogonal_pair(5, 8, 8)


def test_another_seed_or_name_is_another_draw() -> None:
    """Seeds beyond 32 bits, negative ones and those that differ by 2^32 among them."""
    names = [A, A.replace("layers.0", "layers.1"), A.replace("q_proj", "k_proj"), A.replace("default", "x")]
    seeds = (0, 1, -1, 2**32, 2**32 + 1, 2**40)
    drawn = {(seed, name): first_values(name, (1, 8), seed=seed) for seed in seeds for name in names}
    assert len({tuple(values.flatten().tolist()) for values in drawn.values()}) == len(seeds) * len(names)
    torch.manual_seed(7)  # which moves nothing, and is not moved
    assert all(torch.equal(first_values(n, (1, 8), seed=s), values) for (s, n), values in drawn.items())
    assert torch.initial_seed() == 7


def test_which_inits_are_drawn() -> None:
    assert all(has_first_values(init) for init in (True, False, "gaussian", "Gaussian", "orthogonal"))
    assert not any(has_first_values(init) for init in ("pissa", "pissa_niter_4", "eva", "olora", "loftq"))
