"""Guesses that are verified: tokens/s by look-up and by a draft, and that the greedy text stays the same.

    python benchmarks/generation/guesses.py --shape llama-3.1-8b --draft qwen3-0.6b

Random weights in NF4, one text, 256 greedy tokens. A model of random weights never repeats itself: its text
says what guessing costs where no guess is right. Then embeddings and head are changed so that each token has
one successor, in circles of `PERIOD` tokens: a text that repeats itself, at the cost of any other. The draft
has the shape's vocabulary and random weights, so that no guess of it is right: its row says what guessing
costs at worst. Drafts that are right would need a real pair of models. Numbers first: the first token that
differs from the plain text has to be a tie (its logit within rounding of the largest one of the model's own
forward).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from decode_8b import build
from stages import Stages, device
from torch import Tensor
from transformers import logging as transformers_logging

import fewbits
from fewbits.bench.train.shapes import random_model, shape_of
from fewbits.models.fast import with_methods

PERIOD = 50


def text_of(model: Any, ids: Tensor, count: int, **words: Any) -> tuple[list[int], float]:
    """New greedy tokens of one text, and seconds a token."""
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    given |= {"pad_token_id": 0, "use_cache": True, "max_new_tokens": count}
    for _ in range(3):  # the step's graph and the prompt's are recorded
        model.generate(ids, **given, **words)
    began = time.perf_counter()
    new: list[int] = model.generate(ids, **given, **words)[0, ids.shape[1] :].tolist()
    return new, (time.perf_counter() - began) / count


@torch.no_grad()
def gap(model: Any, ids: Tensor, tokens: list[int], at: int) -> float:
    """How far token ``at`` lies below the likeliest, in standard deviations of the forward's logits."""
    text = torch.cat([ids, torch.tensor([tokens[:at]], device=ids.device, dtype=ids.dtype)], dim=1)
    logits = model(text).logits[0, -1].float()
    return float((logits.max() - logits[tokens[at]]) / logits.std())


@torch.no_grad()
def in_circles(model: Any) -> None:
    """Let the likeliest successor of a token be the next one of its circle; layers compute as they did."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embeddings.normal_(std=50.0)
    tokens = torch.arange(len(embeddings), device=embeddings.device)
    following = tokens // PERIOD * PERIOD + (tokens + 1) % PERIOD
    inside = following < len(tokens)
    head[following[inside]] = embeddings[tokens[inside]] / 50


def measure(stages: Stages, model: Any, name: str, ids: Tensor, count: int, draft: Any) -> None:
    plain, seconds = text_of(model, ids, count)
    stages.tell(f"{name}: without guesses", f"{1e3 * seconds:.2f} ms a token, {1 / seconds:,.0f} tokens/s")
    ways: dict[str, dict[str, Any]] = {f"look-up of {n}": {"prompt_lookup_num_tokens": n} for n in (8, 15)}
    if draft is not None:
        ways["a draft of random weights"] = {"assistant_model": draft}
    for what, words in ways.items():
        tokens, took = text_of(model, ids, count, **words)
        pairs = enumerate(zip(tokens, plain, strict=True))
        first = next((i for i, (a, b) in pairs if a != b), None)
        same = "the same text" if first is None else (
            f"the same for {first} tokens, then {gap(model, ids, tokens, first):.3f} deviations below"
        )  # fmt: skip
        stages.tell(
            f"{name}: {what}",
            f"{1e3 * took:.2f} ms a token, {1 / took:,.0f} tokens/s ({seconds / took:.2f} times); {same}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a name, or a config.json")
    parser.add_argument("--draft", default="qwen3-0.6b", help="a shape; empty: no draft")
    parser.add_argument("--recipe", default="qlora_nf4")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=80)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    stages = Stages(options.seconds)
    model, draft = build(options.shape, options.recipe, 0, None), None
    if options.draft:
        config = shape_of(options.draft).config()
        config.vocab_size = model.config.vocab_size
        draft = random_model(config, device(), torch.bfloat16).eval()
        draft.config.use_cache = draft.generation_config.use_cache = True
        fewbits.convert(draft, options.recipe)
        with_methods(draft)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size - PERIOD, (1, 144), generator=generator).to(device())
    for name in ("a text that never repeats itself", f"a text that does after {PERIOD} tokens"):
        if "after" in name:
            in_circles(model)
        stages.run(name, 40, lambda: measure(stages, model, name, ids, options.tokens, draft))  # noqa: B023 run at once
    stages.table()


if __name__ == "__main__":
    main()
