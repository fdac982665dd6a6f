"""Rollouts: 64 prompts, 16 answers each of up to 512 tokens, tokens/s beside transformers' two ways.

    python benchmarks/generation/rollouts.py --shape llama-3.1-8b --slots 64,128,256

Random weights in NF4. Answers end by themselves: one token id in 256 ends a text, so that lengths are
geometric, of some 220 tokens on average and at most 512; tokens that stand in an answer are counted, padding
is not. Numbers first: answers made in company are compared with those made alone, and each of their tokens
with the likeliest one of the model's forward. transformers' ``generate`` decodes 64 of the texts for 96
tokens; its continuous batching (``generate_batch``) makes the first 128. ``--peer unsloth`` generates 64 at
a time through Unsloth instead of all this, from the folder ``--model`` in 4 bits.
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

from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.rows import Row

PROMPTS, ANSWERS, MOST, END_SHARE = 64, 16, 512, 256


def ids_of(vocabulary: int, length: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(5, vocabulary, (length,), generator=generator).tolist())


@torch.no_grad()
def behind(model: Any, row: Row, tokens: list[int]) -> float:
    """How far below the likeliest token a text's tokens lie at most, in standard deviations of the logits."""
    ids = torch.tensor([[*row.ids, *tokens]], device=model.device)
    logits = model(ids).logits[0, len(row.ids) - 1 : -1].float()
    chosen = logits.gather(-1, torch.tensor(tokens, device=model.device)[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


def equality(stages: Stages, model: Any, generator: torch.Generator) -> None:
    """Ten greedy texts of different lengths in four slots, beside each text alone."""
    greedy = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}
    vocabulary = model.config.vocab_size
    lengths = [7, 300, 33, 120, 2, 64, 500, 17, 90, 250]
    rows = [Row(i, ids_of(vocabulary, n, generator)) for i, n in enumerate(lengths)]
    report, equal, total, worst = Report(), 0, 0, 0.0
    for text in answers(model, rows, greedy, slots=4, report=report):
        ids = torch.tensor([text.row.ids], device=model.device)
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, ids.shape[1] :].tolist()
        pairs = enumerate(zip(text.tokens, alone, strict=True))
        equal += next((i for i, (a, b) in pairs if a != b), len(alone))
        total += len(alone)
        worst = max(worst, behind(model, text.row, text.tokens))
    stages.tell(
        f"equal in company and alone ({report.way}{' ' + report.reason if report.reason else ''})",
        f"{equal} of {total} tokens before the first that differs; the worst chosen one {worst:.3f} standard "
        "deviations below the likeliest of the forward",
    )


def live(stages: Stages, model: Any, rows: list[Row], words: dict[str, Any], slots: int) -> None:
    """Our batch that lives, as far as the stage's time goes."""
    report, tokens, ended, began, first = Report(), 0, 0, time.perf_counter(), 0.0
    try:
        for text in answers(model, rows, words, slots=slots, report=report):
            first = first or time.perf_counter() - began
            tokens, ended = tokens + len(text.tokens), ended + 1
    finally:
        seconds = time.perf_counter() - began
        steps = f"{report.steps} steps of {report.mean_texts:.0f} texts" if report.steps else "not all"
        stages.tell(
            f"fewbits, {slots} at a time ({report.way})",
            f"{ended} answers of {len(rows)}, {tokens:,} tokens in {seconds:.1f} s: "
            f"{tokens / seconds:,.0f} tokens/s; {steps}; the first ended after {first:.1f} s",
        )


def padded(rows: list[Row], at: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row.ids)) + list(row.ids) for row in rows], device=at)
    lengths = torch.tensor([len(row.ids) for row in rows], device=at)
    return ids, (torch.arange(longest, device=at) >= longest - lengths[:, None]).long()


def told(stages: Stages, what: str, new: Tensor, ends: list[int], seconds: float) -> None:
    """What a call that pads made; tokens behind an end do not count."""
    end = torch.isin(new, torch.tensor(ends, device=new.device))
    tokens = int((end.cumsum(1) - end.long() == 0).sum())
    stages.tell(
        what,
        f"{tokens:,} tokens in {new.shape[1]} steps of {len(new)} texts, {seconds:.1f} s: "
        f"{tokens / seconds:,.0f} tokens/s ({new.numel() / seconds:,.0f} if none had ended)",
    )


def padded_batch(
    stages: Stages, what: str, run: Any, rows: list[Row], words: dict[str, Any], count: int
) -> None:
    """A ``generate`` that decodes all texts to the longest one's end."""
    ids, mask = padded(rows, device())
    began = time.perf_counter()
    out = run(ids, attention_mask=mask, **{**words, "max_new_tokens": count})
    new = out[:, ids.shape[1] :]
    int(new.sum())  # waits
    told(stages, what, new, words["eos_token_id"], time.perf_counter() - began)


def continuous(stages: Stages, model: Any, rows: list[Row], words: dict[str, Any]) -> None:
    """transformers' continuous batching of the same rows."""
    from copy import deepcopy

    config = deepcopy(model.generation_config)
    for name, value in words.items():
        setattr(config, name, value)
    before = model.config._attn_implementation
    model.set_attn_implementation("paged|sdpa")
    began = time.perf_counter()
    try:
        outputs = type(model).generate_batch(
            model, [list(row.ids) for row in rows], config, progress_bar=False
        )
    finally:
        model.set_attn_implementation(before)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    stages.tell(
        "transformers, generate_batch (continuous batching)",
        f"{len(outputs)} answers of {len(rows)}, {tokens:,} tokens in {seconds:.1f} s: "
        f"{tokens / seconds:,.0f} tokens/s",
    )


def unsloth(stages: Stages, options: argparse.Namespace, rows: list[Row], words: dict[str, Any]) -> None:
    """Unsloth's generate; it must be imported before transformers, so that this runs alone."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(options.model, max_seq_length=1024, load_in_4bit=True)
    FastLanguageModel.for_inference(model)
    padded_batch(stages, "Unsloth, warm", model.generate, rows[:64], words, 8)
    padded_batch(stages, "Unsloth, generate(), 64 texts", model.generate, rows[:64], words, options.most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a name, or a config.json")
    parser.add_argument("--recipe", default="qlora_nf4")
    parser.add_argument("--slots", default="256,64")
    parser.add_argument("--most", type=int, default=MOST, help="new tokens of an answer at most")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--peer", choices=["unsloth"])
    parser.add_argument("--model", help="the folder for --peer")
    parser.add_argument("--seconds", type=float, default=88)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    stages, generator = Stages(options.seconds), torch.Generator().manual_seed(0)
    model = None if options.peer else build(options.shape, options.recipe, 0, None)
    vocabulary = 128256 if model is None else model.config.vocab_size
    ends = torch.randperm(vocabulary - 5, generator=generator)[: max(vocabulary // END_SHARE, 1)] + 5
    prompts = [ids_of(vocabulary, 96 + 7 * (i % 9), generator) for i in range(options.prompts)]
    rows = [Row(i, prompts[i // ANSWERS], i) for i in range(options.prompts * ANSWERS)]
    words: dict[str, Any] = {
        "max_new_tokens": options.most,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": ends.tolist(),
        "pad_token_id": 0,
    }
    if model is None:
        stages.run("unsloth", options.seconds, lambda: unsloth(stages, options, rows, words))
    else:
        stages.tell("built", f"{options.shape} in {options.recipe}")
        stages.run("equality", 15, lambda: equality(stages, model, generator))
        for slots in map(int, options.slots.split(",")):
            stages.run(f"{slots} at a time", 35, lambda slots=slots: live(stages, model, rows, words, slots))  # type: ignore[misc]
        own = type(model).generate
        few = rows[:: max(len(rows) // 64, 1)][:64]
        stages.run(
            "transformers",
            18,
            lambda: padded_batch(
                stages, "transformers, generate()", lambda *a, **k: own(model, *a, **k), few, words, 96
            ),
        )
        stages.run("continuous batching", 25, lambda: continuous(stages, model, rows[:128], words))
    stages.table()


if __name__ == "__main__":
    main()
