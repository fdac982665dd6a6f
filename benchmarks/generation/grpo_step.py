"""A step of GRPO through TRL's own trainer: seconds, and how many of them the rollouts take.

    python benchmarks/generation/grpo_step.py --ways generate,batch,transformers --shape qwen3-1.7b
    python benchmarks/generation/grpo_step.py --ways unsloth --model FOLDER       (Unsloth installed; alone)

Random weights in NF4 with an adapter of rank 16: 8 prompts a step, 8 answers each, no KL term, one optimizer
step for each rollout. Random weights end hardly a text, so that answers have all 256 tokens. Ways:
``generate`` (TRL calls ``model.generate``), ``batch`` (TRL's ``use_transformers_continuous_batching``, our
batch that lives), ``transformers`` (the same model, decoded by transformers' loop). The row has what shows
that the texts are the model's: reward, entropy and mean length, which must agree between the ways.
``--save FOLDER`` writes the shape's random model as a folder for ``--model``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from stages import Stages, device
from transformers import TrainerCallback
from transformers import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.training.trl_trainers import base

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Clock(TrainerCallback):
    """When each step ended, and how long rollouts took."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.rollouts: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


def reward(completion_ids: Any = None, **_: Any) -> list[float]:
    """Even token ids are good; it costs nothing."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def timed(trainer: Any, clock: Clock) -> None:
    """The trainer's rollouts tell how long they took."""
    real = trainer._generate_and_score_completions  # TRL has no hook around it

    def rollout(*args: Any, **words: Any) -> Any:
        began = time.perf_counter()
        result = real(*args, **words)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        clock.rollouts.append(time.perf_counter() - began)
        return result

    trainer._generate_and_score_completions = rollout


def adapted(options: argparse.Namespace, way: str) -> tuple[Any, Any]:
    if way == "unsloth":
        from unsloth import FastLanguageModel as Unsloth

        model, tokenizer = Unsloth.from_pretrained(options.model, max_seq_length=1024, load_in_4bit=True)
        words = {"target_modules": "all-linear", "use_gradient_checkpointing": False}
        return Unsloth.get_peft_model(model, r=16, lora_alpha=16, **words), tokenizer
    from fewbits import FastLanguageModel
    from fewbits.models.fast import with_methods

    model, tokenizer = base(options.shape, "qlora_nf4")
    with_methods(model)
    tokenizer.padding_side = "left"
    return FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing=False), tokenizer


def measure(stages: Stages, options: argparse.Namespace, way: str) -> None:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = adapted(options, way)
    model.generation_config.eos_token_id = None
    inner = model.get_base_model()
    if way == "transformers":
        vars(inner).pop("generate")  # the class's own again
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(LETTERS), (options.prompts * (options.steps + 1), 60), generator=generator)
    texts = ["".join(LETTERS[i] for i in row) for row in places.tolist()]
    rows = options.prompts * options.answers
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        num_generations=options.answers,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        learning_rate=1e-5,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        disable_tqdm=True,
        **({"use_transformers_continuous_batching": True} if way == "batch" else {}),
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        reward_funcs=reward,
        processing_class=tokenizer,
    )
    clock = Clock()
    trainer.add_callback(clock)
    timed(trainer, clock)
    trainer.train()
    each = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)][1:]
    told = trainer.state.log_history[-2]
    new = told.get("completions/mean_length", float("nan")) * rows
    rollout = statistics.median(clock.rollouts[2:] or clock.rollouts)
    step = statistics.median(each)
    stages.tell(
        f"{way}: a step of {options.prompts} prompts x {options.answers} answers, {options.tokens} tokens",
        f"{step:.2f} s ({min(each):.2f} to {max(each):.2f}); rollouts {rollout:.2f} s, "
        f"{new / rollout:,.0f} tokens/s; {device_memory()}; reward {told.get('reward', float('nan')):.3f}, "
        f"entropy {told.get('entropy', float('nan')):.2f}, mean length {new / rows:.0f}",
    )


def device_memory() -> str:
    """The peak so far."""
    return f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if torch.cuda.is_available() else "CPU"


def save(options: argparse.Namespace) -> None:
    from fewbits.bench.train.shapes import random_model, shape_of
    from fewbits.bench.train.tokenizer import write_tokenizer

    model = random_model(shape_of(options.shape).config(), device(), torch.bfloat16)
    model.save_pretrained(options.save)
    write_tokenizer(options.save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ways", default="generate,batch,transformers")
    parser.add_argument("--shape", default="qwen3-1.7b", help="a name, or tiny")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", help="a folder, for the way unsloth")
    parser.add_argument("--save", help="write the random model here and end")
    parser.add_argument("--seconds", type=float, default=88)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    if options.save:
        save(options)
        return
    stages = Stages(options.seconds)
    for way in options.ways.split(","):
        stages.run(way, 45, lambda: measure(stages, options, way))  # noqa: B023 run at once
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    stages.table()


if __name__ == "__main__":
    main()
