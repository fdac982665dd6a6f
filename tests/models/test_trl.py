"""TRL's SFTTrainer on our model, without special cases on either side."""

from __future__ import annotations

import peft
import pytest
import torch
from packaging.version import Version
from transformers import Trainer, TrainingArguments

from fewbits import FastLanguageModel, lora_config, restore
from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.nn.lora import LoRALinear
from tests.models.loading import logits, packed_state, same, save_tiny
from tests.models.tiny import tokens

trl = pytest.importorskip("trl")
Dataset = pytest.importorskip("datasets").Dataset
# Before 1.15 TRL has no output head of its own: it reads the model's logits, and nothing is asked of ours.
ASKS_THE_HEAD = Version(trl.__version__) >= Version("1.15")

TEXTS = [f"{a} and {b} make {a + b}" for a in range(8) for b in range(8)]


def arguments(folder, **changes):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 12,
        "learning_rate": 5e-3,
        "logging_steps": 4,
        "report_to": "none",
        "seed": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        **changes,
    }


@pytest.mark.parametrize("rows", ["text", "prompt", "messages"])
def test_sft_trainer(rows, tmp_path):
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16)
    before = packed_state(model)
    data = {
        "text": [{"text": t} for t in TEXTS],
        "prompt": [{"prompt": t[:-2], "completion": t[-2:]} for t in TEXTS],
        "messages": [
            {"messages": [{"role": "user", "content": t[:-2]}, {"role": "assistant", "content": t[-2:]}]}
            for t in TEXTS
        ],
    }[rows]
    trainer = trl.SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(data),
        args=trl.SFTConfig(max_length=64, bf16=False, **arguments(tmp_path / "run")),
    )
    trainer.train()
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert same(packed_state(model), before)

    trainer.save_model(tmp_path / "lora")
    base, _ = FastLanguageModel.from_pretrained(tmp_path / "base")
    restore(base)  # plain linears with the dequantised weights: PEFT's own layers go over them
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "lora")
    torch.testing.assert_close(
        logits(theirs.eval(), tokens()), logits(model.eval(), tokens()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("plain", [False, True])
def test_sft_trainer_adds_the_adapters_itself(tmp_path, plain):
    """From this library's configuration, or from one of PEFT's own."""
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
    trainer = trl.SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"text": t} for t in TEXTS]),
        args=trl.SFTConfig(max_length=64, bf16=False, **arguments(tmp_path / "run", max_steps=2)),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear")
        if plain
        else lora_config(model, r=4, lora_alpha=8),
    )
    kind = peft.tuners.lora.Linear if plain else LoRALinear
    assert sum(isinstance(m, kind) for m in trainer.model.modules()) == 14
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(".lora_" in name for name in moved)


def test_the_plain_trainer_resumes_from_its_own_checkpoint(tmp_path):
    save_tiny(tmp_path / "base")

    def run(resume, **changes):
        model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
        model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
        rows = [tokenizer(t, padding="max_length", max_length=24) for t in TEXTS]
        data = [{**r, "labels": r["input_ids"]} for r in rows]
        settings = arguments(tmp_path / "run", save_strategy="steps", save_steps=6, **changes)
        trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}

    whole = run(None)
    resumed = run(str(tmp_path / "run" / "checkpoint-6"))
    assert same(whole, resumed)


@pytest.mark.parametrize("which", ["sft", "dpo"])
def test_trainers_on_a_fused_model_learn_the_same(which, tmp_path):
    """Loss, entropy, accuracy and mean logits of each step; and our own head gave them where TRL has one."""
    save_tiny(tmp_path / "base")
    logs = []
    for fused in (False, True):
        model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
        if fused:
            fuse(model)
        model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=False)
        options = arguments(tmp_path / "run", max_steps=3, logging_steps=1, learning_rate=1e-3)
        if which == "sft":
            rows, config = [{"prompt": t[:-2], "completion": t[-2:]} for t in TEXTS], trl.SFTConfig
        else:
            rows = [{"prompt": t[:-2], "chosen": t[-2:], "rejected": "99"} for t in TEXTS]
            config = trl.DPOConfig
        trainer = (trl.SFTTrainer if which == "sft" else trl.DPOTrainer)(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            args=config(max_length=64, bf16=False, **options),
        )
        trainer.train()
        timed = ("runtime", "per_second", "memory", "flos")
        logs.append(
            [
                {k: float(v) for k, v in row.items() if not any(word in k for word in timed)}
                for row in trainer.state.log_history
            ]
        )
        if fused:
            taken = fusion_of(model).trl_head.taken
            passes = 3 if which == "sft" else 6  # a reference's pass beside each
            assert taken["fused"] == passes if ASKS_THE_HEAD else not taken, taken
    for plain, quick in zip(*logs, strict=True):
        assert plain.keys() == quick.keys()
        for name, value in plain.items():
            assert quick[name] == pytest.approx(value, rel=2e-3, abs=2e-3), name
