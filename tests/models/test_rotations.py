"""Rotations folded into weights: the logits stay, and no channel of what products multiply lies far out."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import Unsupported
from fewbits.models.packing.convert import convert
from fewbits.models.stochastic.rotations import hadamard, rotate_residual, rotate_values
from tests.models.tiny import FAMILIES, tiny, tokens

ON_THE_STREAM = {"gemma2", "gemma3_text"}  # norms behind the halves, too


@pytest.mark.parametrize("size", [1, 2, 16, 12, 20, 24, 44, 192])
def test_hadamard_matrices(size: int) -> None:
    matrix = hadamard(size)
    assert matrix is not None
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))


def test_sizes_without_a_matrix() -> None:
    assert hadamard(6) is None and hadamard(36) is None


def inputs_of(model, path: str, ids) -> torch.Tensor:
    operands = []
    handle = model.get_submodule(path).register_forward_hook(lambda m, args, y: operands.append(args[0]))
    model(ids)
    handle.remove()
    return operands[0]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "phi3"])
def test_rotated_values_leave_the_logits(family: str) -> None:
    model, ids = tiny(family), tokens()
    path = "model.layers.1.self_attn.o_proj"
    before, x = model(ids).logits, inputs_of(model, path, ids)
    rotate_values(model)
    assert (model(ids).logits - before).abs().max() < 1e-4 * before.abs().max()
    turn = hadamard(16)
    assert turn is not None
    expected = (x.double().unflatten(-1, (-1, 16)) @ turn).flatten(-2).float()
    torch.testing.assert_close(inputs_of(model, path, ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ON_THE_STREAM])
def test_a_rotated_stream_leaves_the_logits(family: str, tmp_path) -> None:
    model, ids = tiny(family), tokens()
    before, embedding = model(ids).logits, model.get_input_embeddings().weight.clone()
    rotate_residual(model, seed=3)
    assert (model(ids).logits - before).abs().max() < 1e-4 * before.abs().max()
    rotated = model.get_input_embeddings().weight
    assert not torch.allclose(rotated, embedding, atol=1e-2)
    torch.testing.assert_close(rotated @ rotated.t(), embedding @ embedding.t(), rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_an_outlying_channel_is_spread_over_all() -> None:
    model, ids = tiny("llama"), tokens()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 50
    path = "model.layers.0.self_attn.q_proj"

    def share(x: torch.Tensor) -> float:
        return float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).mean().detach())

    before = share(inputs_of(model, path, ids))
    rotate_residual(model)
    assert before > 6 and share(inputs_of(model, path, ids)) < 2


def test_models_that_cannot_be_rotated_are_refused() -> None:
    for family in ON_THE_STREAM:
        with pytest.raises(Unsupported, match="has norms that do not commute with a rotation of the stream"):
            rotate_residual(tiny(family))
    with pytest.raises(Unsupported, match="phi3 has no linear of its own for values"):
        rotate_values(tiny("phi3"))
    with pytest.raises(Unsupported, match="no Hadamard matrix is known here for hidden states of 72 values"):
        rotate_residual(tiny("llama", hidden_size=72, head_dim=16))
    model = tiny("llama")
    convert(model, recipe="int8")
    with pytest.raises(Unsupported, match="converted already; rotate its original form"):
        rotate_values(model)
