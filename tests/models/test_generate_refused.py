"""Prompts and batches that ``model.generate`` cannot take: one sentence with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.models.generation import careful_generate
from tests.models.emulated import on_a_cpu
from tests.models.test_decode_generate import model_of
from tests.models.tiny import tokens


def test_a_prompt_longer_than_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    context = model.config.max_position_embeddings
    for emulated in (False, True):
        if emulated:
            on_a_cpu(monkeypatch)
        with pytest.raises(BadInput, match=f"has {context} tokens and the model's context holds {context}"):
            model.generate(tokens(1, context), max_new_tokens=1)
        ids = tokens(1, context - 1)  # the last one that fits
        assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1).shape == (
            1,
            context,
        )


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_a_prompt_without_tokens(shape: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="without tokens; give at least one"):
        model_of("llama").generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1, 2]], "the prompt is a list; give a tensor"),
        (torch.tensor([1, 2]), r"the prompt is \(2,\) of torch.int64; give whole numbers \(batch, length\)"),
        (torch.ones(1, 3), "the prompt is .* of torch.float32; give whole numbers"),
        (torch.tensor([[1, 96]]), "has the token 96, and the model knows 0 to 95"),
        (torch.tensor([[1, -100]]), "has the token -100, and the model knows 0 to 95"),
    ],
)
def test_a_prompt_that_is_no_tokens_of_the_model(prompt: Any, message: str) -> None:
    """On a GPU such a token ends the process."""
    with pytest.raises(BadInput, match=message):
        model_of("llama").generate(prompt, max_new_tokens=1)


def test_a_batch_that_does_not_fit_says_how_many_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    config = model.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * (9 + 30)
    monkeypatch.setattr(careful_generate, "free_share", lambda _: 3 * each + 1)

    def full(self: Any, inputs: Any = None, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(type(model), "generate", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"8 texts of up to 39 tokens.* 3 at a time would fit"):
        model.generate(inputs=tokens(4, 9), max_new_tokens=30, num_return_sequences=2)
