"""What llama.cpp writes, from a prebuilt package, beside a model of ours: for tests that have the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPTS = ("Once upon a time", "Lily and Tom went to the park. They", "One day, a bird")
LENGTH = 40
Answer = tuple[list[int], list[float], int]  # tokens, their log-probabilities, tokens of the prompt


def answers(file: Path) -> list[Answer]:
    """What llama.cpp writes greedily after each prompt, on one thread of the CPU."""
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.cpuparams.n_threads, params.verbosity, params.warmup = 1, -1, False
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(params)
    found = []
    for prompt in PROMPTS:
        asked = {
            "prompt": prompt,
            "n_predict": LENGTH,
            "temperature": 0.0,
            "n_probs": 1,
            "cache_prompt": False,
        }
        reply = server.handle_completions(asked)
        reply = json.loads(reply) if isinstance(reply, str) else reply
        tokens = reply["choices"][0]["logprobs"]["content"]
        count = int(reply["usage"]["prompt_tokens"])
        found.append(([int(t["id"]) for t in tokens], [float(t["logprob"]) for t in tokens], count))
        again = server.handle_completions(asked)
        again = json.loads(again) if isinstance(again, str) else again
        if again["choices"][0]["logprobs"]["content"] != tokens:
            pytest.skip("llama.cpp answers the same prompt otherwise at a second call")
    return found


@torch.no_grad()
def compared(model: Any, words: Any, file: Path) -> tuple[int, float, float]:
    """Greedy tokens that differ, the largest gap between the two there, the largest difference in nats."""
    different, gap, error = 0, 0.0, 0.0
    for prompt, (tokens, log_probabilities, count) in zip(PROMPTS, answers(file), strict=True):
        ids = words(prompt, return_tensors="pt").input_ids
        assert ids.shape[1] == count  # both cut the text alike, BOS included
        logits = model(input_ids=torch.cat([ids, torch.tensor([tokens])], 1)).logits.float()
        here = logits.log_softmax(-1)[0, count - 1 : -1]
        for row, token, there in zip(here, tokens, log_probabilities, strict=True):
            error = max(error, abs(float(row[token]) - there))
            if int(row.argmax()) != token:
                different, gap = different + 1, max(gap, float(row.max() - row[token]))
    return different, gap, error
