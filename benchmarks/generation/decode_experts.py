"""Decoding of mixtures of experts with random weights: a step alone, through ``model.generate``, its kernels.

    python benchmarks/generation/decode_experts.py [--shapes qwen3-30b-a3b,gpt-oss-20b] [--batches 1,16]

Whole shapes unless --layers says otherwise, experts and attention in --recipe, a prompt of 128 random tokens
for each text. Printed are the milliseconds of a step replayed from its CUDA graph (the median of three rounds
of 16) and of a token through ``model.generate`` (greedy; the difference of 72 and 8 new tokens over 64); with
--kernels the kernels of eight steps that take longest. On a CPU a tiny shape runs, to see that the script
does.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from stages import Stages, device, seconds_of
from transformers import AutoConfig, AutoModelForCausalLM

import fewbits
from fewbits.models.fast import with_methods
from fewbits.models.generation.loop import decoding_of

CONTEXT = 128
SHAPES: dict[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
}
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 32, "vocab_size": 512, "moe_intermediate_size": 64}


def build(shape: str, recipe: str, layers: int | None) -> Any:
    """The model, packed."""
    fields = dict(SHAPES[shape])
    if device().type == "cpu":
        fields |= {name: value for name, value in TINY.items() if name in fields}
        fields |= {"intermediate_size": 64} if shape == "gpt-oss-20b" else {"num_experts": 16}
    elif layers:
        fields["num_hidden_layers"] = layers
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    attention = None if shape == "gpt-oss-20b" else "sdpa"  # it has sinks
    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    fewbits.convert(model, recipe)
    with_methods(model)
    gc.collect()
    return model


def measure(stages: Stages, model: Any, what: str, batch: int, kernels: int) -> None:
    """One row of the table, and the kernels."""
    where = device()
    ids = torch.randint(5, 500, (batch, CONTEXT), device=where)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}

    def generate(count: int) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)

    shorter, longer = (8, 72) if where.type == "cuda" else (2, 4)
    generate(longer)  # kernels are compiled, the graph is recorded
    few, many = (seconds_of(partial(generate, count), 3) for count in (shorter, longer))
    token = f"through generate {1e3 * (many - few) / (longer - shorter):.3f} ms a token"
    state = decoding_of(model)
    if state.step is None:
        stages.tell(what, f"no step ({state.refused or state.no_kernels}), {token}")
        return
    step: Any = state.step

    def steps() -> None:
        step.position.fill_(CONTEXT)
        for _ in range(16):
            step.advance()

    steps()
    apart = f"{state.apart:.2g} apart from the model's own"
    stages.tell(what, f"{type(step).__name__} {1e3 * seconds_of(steps, 3) / 16:.3f} ms, {token}, {apart}")
    if kernels:
        _tell_kernels(step, kernels)


def _tell_kernels(step: Any, count: int) -> None:
    step.position.fill_(CONTEXT)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(8):
            step.advance()
        torch.cuda.synchronize()
    found = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    print(f"kernels together {sum(e.self_device_time_total for e in found) / 8000:.3f} ms a step", flush=True)
    for event in sorted(found, key=lambda e: -e.self_device_time_total)[:count]:
        each = event.self_device_time_total / 8000
        print(f"  {each:8.3f} ms  {event.count // 8:5d} x  {event.key[:110]}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,gpt-oss-20b")
    parser.add_argument("--recipe", default="qlora_nf4")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    stages = Stages(args.seconds)
    for shape in args.shapes.split(","):
        model = None
        try:
            model = build(shape, args.recipe, args.layers)
        except torch.OutOfMemoryError as error:
            stages.tell(shape, f"does not fit ({str(error).splitlines()[0][:80]})")
            continue
        stages.tell(shape, f"{args.recipe}, {model.config.num_hidden_layers} layers, built")
        for batch in map(int, args.batches.split(",")):
            what = f"{shape}, {args.recipe}, batch {batch}, context {CONTEXT}"
            stages.run(what, 60, partial(measure, stages, model, what, batch, args.kernels))
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    stages.table()


if __name__ == "__main__":
    with torch.no_grad():
        main()
