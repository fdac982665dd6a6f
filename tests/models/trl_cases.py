"""Trainers of TRL 1.16 over a few tiny rows: what `test_trl_trainers` compares.

A case is named as in the guide's table and says how the trainer gets what it asks of the output head:
``"fused"`` (ours answers), ``"logits"`` (it reads them, and they are computed), or the reason that
`TrlHead.taken` counts where TRL's own head computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.models.tiny import tiny

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'a: ' }}{% generation %}"
    "{{ m['content'] + '\n' }}{% endgeneration %}{% else %}"
    "{{ m['role'][0] + ': ' + (m['content'] or '') + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)
TEXTS = [f"{a} and {b} make {a + b} {end}" for a in range(4) for b in range(4) for end in ("!", "or so.")]
PAIRS = [{"prompt": t[:8], "chosen": t[8:], "rejected": " no no."} for t in TEXTS]
PROMPTS = [{"prompt": t[:8]} for t in TEXTS]
STEPS = 4


class Case(NamedTuple):
    """One trainer with one choice of its arguments.

    Attributes:
        trainer: its name, without "Trainer".
        head: "fused", "logits" or a reason; with a comma, both; "" if nothing is asked of the head.
        make: the trainer, of model, tokenizer and folder.
    """

    trainer: str
    head: str
    make: Callable[[Any, Any, Path], Any]


def _find(name: str, experimental: str | None) -> tuple[Any, Any]:
    import importlib

    module = importlib.import_module("trl" if experimental is None else f"trl.experimental.{experimental}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def _case(
    name: str, head: str, rows: list[dict[str, Any]], experimental: str | None = None, **options: Any
) -> Case:
    more = {key: options.pop(key) for key in ("reward_funcs", "teacher_model") if key in options}

    def make(model: Any, tokenizer: Any, folder: Path) -> Any:
        from datasets import Dataset

        trainer, config = _find(name, experimental)
        evaluation = {"eval_dataset": Dataset.from_list(rows[:8])} if "eval_strategy" in options else {}
        arguments = {
            "output_dir": str(folder),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "logging_steps": 1,
            "bf16": False,
            "disable_tqdm": True,
            "learning_rate": 1e-3,
            "seed": 3,
            **options,
        }
        given = {key: value() if key == "teacher_model" else value for key, value in more.items()}
        return trainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            args=config(**arguments),
            **evaluation,
            **given,
        )

    return Case(name, head, make)


def _sft(rows: list[dict[str, Any]], head: str = "fused", **options: Any) -> Case:
    return _case("SFT", head, rows, **{"max_length": 64, **options})


def _talks(tools: bool = False) -> list[dict[str, Any]]:
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    more = {"tools": json.dumps([{"type": "function", "function": tool}])} if tools else {}
    roles = ("user", "assistant", "user", "assistant")
    return [
        {
            "messages": [
                {"role": role, "content": words}
                for role, words in zip(roles, (t[:8], t[8:], "and", "so"), strict=True)
            ],
            **more,
        }
        for t in TEXTS
    ]


def _variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def _teacher() -> Any:
    return tiny("llama", seed=5)


_TEXT = [{"text": t} for t in TEXTS]
_LABELLED = [
    {"prompt": t[:8], "completion": t[8:] if i % 2 else " no no.", "label": bool(i % 2)}
    for i, t in enumerate(TEXTS)
]
_ROLLOUTS = {"reward_funcs": _variety, "num_generations": 2, "max_completion_length": 8}
_ALL_COLUMNS = {"max_length": 64, "remove_unused_columns": False}

CASES = {
    "SFT": _sft(_TEXT),
    "SFT, packed best fit": _sft(_TEXT, packing=True, packing_strategy="bfd"),
    "SFT, packed wrapped": _sft(_TEXT, packing=True, packing_strategy="wrapped"),
    "SFT, padding-free": _sft(_TEXT, padding_free=True, max_length=None),
    "SFT, assistant only": _sft(_talks(), assistant_only_loss=True),
    "SFT, completion only": _sft([{"prompt": t[:8], "completion": t[8:]} for t in TEXTS]),
    "SFT, tools": _sft(_talks(tools=True), max_length=128),
    "SFT, accumulation": _sft(_TEXT, gradient_accumulation_steps=2),
    "SFT, DFT": _sft(_TEXT, loss_type="dft"),
    "SFT, label smoothing": _sft(_TEXT, "fused, logits", label_smoothing_factor=0.1),
    "SFT, NEFTune": _sft(_TEXT, neftune_noise_alpha=5.0),
    "SFT, evaluation": _sft(_TEXT, eval_strategy="steps", eval_steps=2),
    "DPO": _case("DPO", "fused", PAIRS, max_length=64),
    "DPO, precomputed": _case("DPO", "fused", PAIRS, max_length=64, precompute_ref_log_probs=True),
    "DPO, padding-free": _case("DPO", "fused", PAIRS, max_length=64, padding_free=True),
    "DPO, IPO": _case("DPO", "fused", PAIRS, max_length=64, loss_type="ipo"),
    "DPO, WPO": _case("DPO", "log_sum_sq_probs were asked for", PAIRS, max_length=64, use_weighting=True),
    "KTO": _case("KTO", "fused", _LABELLED, max_length=64),
    "ORPO": _case("ORPO", "logits", PAIRS, "orpo", **_ALL_COLUMNS),
    "CPO": _case("CPO", "logits", PAIRS, "cpo", **_ALL_COLUMNS),
    "CPO, SimPO": _case("CPO", "logits", PAIRS, "cpo", loss_type="simpo", cpo_alpha=0.0, **_ALL_COLUMNS),
    "GRPO": _case("GRPO", "fused", PROMPTS, **_ROLLOUTS),
    "GRPO, KL": _case("GRPO", "fused", PROMPTS, beta=0.04, **_ROLLOUTS),
    "GRPO, temperature": _case("GRPO", "fused", PROMPTS, temperature=0.8, **_ROLLOUTS),
    "RLOO": _case("RLOO", "fused", PROMPTS, **_ROLLOUTS),
    "GMPO": _case("GMPO", "fused", PROMPTS, "gmpo", **_ROLLOUTS),
    "TPO": _case(
        "TPO", "logits", [{**row, "reference": row["chosen"]} for row in PAIRS], "tpo", max_length=64
    ),
    "OnlineDPO": _case("OnlineDPO", "logits", PROMPTS, "online_dpo", reward_funcs=_variety, max_new_tokens=8),
    "A2PO": _case(
        "A2PO",
        "logits",
        PROMPTS,
        "a2po",
        reward_funcs=_variety,
        max_completion_length=8,
        num_value_samples=2,
        filter_all_incorrect=False,
    ),
    "Distillation": _case("Distillation", "", PROMPTS, teacher_model=_teacher, max_completion_length=8),
    "GKD": _case("GKD", "logits", _talks(), "gkd", teacher_model=_teacher, max_length=64, max_new_tokens=8),
    "SDFT": _case(
        "SDFT",
        "logits",
        [{**row, "privileged_context": "0"} for row in PROMPTS],
        "sdft",
        num_generations=2,
        distillation_topk=8,
        max_completion_length=8,
    ),
    "SDPO": _case(
        "SDPO", "logits", [{**row, "privileged_context": "0"} for row in PROMPTS], "sdpo", **_ROLLOUTS
    ),
    "Reward": _case(
        "Reward", "", [{name: row[name] for name in ("chosen", "rejected")} for row in PAIRS], max_length=64
    ),
}
