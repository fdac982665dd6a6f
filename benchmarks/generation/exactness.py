"""Exactness of decoding: the graph beside the plain path, greedy tokens for 512 steps, and equal bits.

    python benchmarks/generation/exactness.py --models models/stories3m --shape llama-3.1-8b

For each model, in NF4 and plain: a greedy text of our step is fed to the model's own forward (products in 16
bits, as the step has them), all at once. Where our token is not the forward's likeliest, the forward's two
likeliest logits are compared with the rounding between the two ways (four standard deviations of the
difference of two logits at that place): such a place is a tie if they are nearer than that, else an error,
and the script ends with 1. Then how often the forward's first two logits are that near at all, whether a
second run gives the same bits (tokens and logits), whether equal rows of a batch give the row's own tokens,
and whether guesses by look-up do.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from decode_8b import build
from stages import Stages, device
from torch import Tensor
from transformers import logging as transformers_logging

from fewbits import FastLanguageModel
from fewbits.models.generation.loop import decoding_of, products_in_16_bits
from fewbits.models.generation.speculation import ROUNDING

WRONG: list[str] = []


def generate(model: Any, ids: Tensor, count: int, **words: Any) -> tuple[Tensor, Tensor | None]:
    """New greedy tokens (batch, count), and raw logits (batch, count, vocabulary) without guesses."""
    guesses = "prompt_lookup_num_tokens" in words
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        return_dict_in_generate=not guesses,
        output_logits=not guesses,
        **words,
    )
    if guesses:
        return out[:, ids.shape[1] :], None
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def compare(stages: Stages, name: str, model: Any, ids: Tensor, count: int) -> None:
    tokens, ours = generate(model, ids, count)
    assert ours is not None
    state = decoding_of(model)
    way = "our step" if state.step is not None else f"transformers' loop, {'; '.join(state.said)}"
    with torch.no_grad(), products_in_16_bits(model):
        text = torch.cat([ids, tokens], dim=1)
        theirs = model(text).logits[:, ids.shape[1] - 1 : -1].float()
    rounding = float((ours - theirs).norm() / theirs.norm())
    two = theirs.topk(2, dim=-1)
    gap = two.values[..., 0] - two.values[..., 1]
    other = two.indices[..., 0] != tokens
    # Two logits of one place differ between the ways by sqrt(2) of the root mean square over the vocabulary;
    # a gap below four times that may turn over. (Twice the largest difference would excuse every error.)
    near = 4 * 2**0.5 * (ours - theirs).square().mean(-1).sqrt()
    if not rounding <= ROUNDING * model.config.num_hidden_layers**0.5:
        WRONG.append(f"{name}: logits")
    ties, errors = gap <= near, other & (gap > near)
    stages.tell(f"{name}, {way}: logits beside the plain path", f"{rounding:.2g} relative over {count} steps")
    stages.tell(
        f"{name}: tokens that are not the plain path's likeliest",
        f"{int(other.sum())} of {tokens.numel()}, of these not tied within rounding {int(errors.sum())}; "
        f"{int(ties.sum())} places are tied within rounding",
    )
    if bool(errors.any()):
        WRONG.append(f"{name}: tokens")
    again, logits = generate(model, ids, count)
    assert logits is not None
    same = torch.equal(again, tokens) and torch.equal(logits, ours)
    stages.tell(f"{name}: a second run gives the same bits", "yes" if same else "NO")
    if not same:
        WRONG.append(f"{name}: bits")
    others(stages, name, model, ids, tokens, ties)


def others(stages: Stages, name: str, model: Any, ids: Tensor, tokens: Tensor, ties: Tensor) -> None:
    """Rows of a batch, and guesses, beside the row alone: the first token that differs has to be a tie."""
    count = tokens.shape[1]
    ways = {
        "a row among 4": lambda: generate(model, ids.expand(4, -1), count)[0][3:],
        "a row among 16": lambda: generate(model, ids.expand(16, -1), count)[0][15:],
        "look-up of 8 guesses": lambda: generate(model, ids, count, prompt_lookup_num_tokens=8)[0],
    }
    for what, run in ways.items():
        row = run()
        differs = (row != tokens)[0].nonzero()
        first = int(differs[0]) if len(differs) else count
        tied = first == count or bool(ties[0, first])
        stages.tell(
            f"{name}: {what}", "the same tokens" if first == count else f"the same for {first} tokens, then "
            f"{'a tie within rounding' if tied else 'NO tie'}",
        )  # fmt: skip
        if not tied:
            WRONG.append(f"{name}: {what}")


def real(stages: Stages, folder: str, recipe: str, steps: int) -> None:
    words = {"load_in_4bit": False, "recipe": None if recipe == "none" else recipe, "dtype": torch.bfloat16}
    model, tokenizer = FastLanguageModel.from_pretrained(folder, **words)
    FastLanguageModel.for_inference(model)
    ids = tokenizer(["Once upon a time"], return_tensors="pt").input_ids.to(model.device)
    count = min(steps, model.config.max_position_embeddings - ids.shape[1])
    name = f"{folder.rstrip('/').rsplit('/', 1)[-1]} {recipe}"
    stages.run(name, 20, lambda: compare(stages, name, model, ids, count))


def random(stages: Stages, shape: str, recipe: str, steps: int) -> None:
    model = build(shape, "lora_bf16" if recipe == "none" else recipe, 0, None)
    ids = torch.randint(5, model.config.vocab_size, (1, 64), device=device())
    name = f"{shape} {recipe}"
    stages.run(name, 30, lambda: compare(stages, name, model, ids, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="folders of real models")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of a random model; empty: none")
    parser.add_argument("--recipes", default="qlora_nf4,none")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=88)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    stages = Stages(options.seconds)
    for recipe in options.recipes.split(","):
        for folder in filter(None, options.models.split(",")):
            real(stages, folder, recipe, options.steps)
        if options.shape:
            random(stages, options.shape, recipe, options.steps)
        gc.collect()
        torch.cuda.empty_cache()
    stages.table()
    if WRONG:
        raise SystemExit(f"not exact: {', '.join(WRONG)}")


if __name__ == "__main__":
    main()
