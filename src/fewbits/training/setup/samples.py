"""Short greedy answers to sample prompts, before and after training."""

from __future__ import annotations

from typing import Any

import torch

from fewbits.training.data.examples import RowEncoder


def answer_all(
    model: Any, encoder: RowEncoder, prompts: list[str], *, tokens: int, limit: int | None = None
) -> list[str]:
    """The model's greedy continuation of each prompt.

    Args:
        model: left in the mode it was in.
        encoder: knows the tokenizer and which tokens begin a text.
        prompts: as the model is to see them, templates included.
        tokens: longest answer.
        limit: longest sequence of the model; longer prompts lose their beginning.
    """
    if not prompts:
        return []
    was_training, cached = model.training, model.config.use_cache
    model.eval()
    model.config.use_cache = True
    device = model.get_input_embeddings().weight.device
    answers = []
    for prompt in prompts:
        ids = encoder.prompt_ids(prompt)
        if limit is not None:
            ids = ids[-max(1, limit - tokens) :]
        inputs = torch.tensor([ids], device=device)
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=min(tokens, (limit or tokens + len(ids)) - len(ids)),
                max_length=None,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=encoder.eos if encoder.eos is not None else 0,
            )
        answers.append(encoder.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip())
    model.config.use_cache = cached
    model.train(was_training)
    return answers
