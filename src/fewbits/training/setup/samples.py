"""Short greedy answers to sample prompts, before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fewbits.training.data.examples import RowEncoder, Sample


def answer_all(
    model: Any, encoder: RowEncoder, samples: Sequence[Sample], *, tokens: int, limit: int | None = None
) -> list[str]:
    """The model's greedy continuation of each sample's prompt.

    Args:
        model: left in the mode it was in.
        encoder: knows the tokenizer and which tokens begin a text.
        samples: with prompts as the model is to see them, templates included, and names of images.
        tokens: longest answer.
        limit: longest sequence of the model; longer prompts lose their beginning.
    """
    if not samples:
        return []
    was_training, cached = model.training, getattr(model.config, "use_cache", True)  # some keep it deeper
    model.eval()
    model.config.use_cache = True
    device = model.get_input_embeddings().weight.device
    answers = []
    for sample in samples:
        ids, images = encoder.request_of(sample)
        if limit is not None and not images:
            ids = ids[-max(1, limit - tokens) :]
        inputs = torch.tensor([ids], device=device)
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                **{name: value.to(device) for name, value in images.items()},
                max_new_tokens=max(1, min(tokens, (limit or tokens + len(ids)) - len(ids))),
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
