"""Preference methods from a configuration: TRL's trainers in our run folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fewbits.errors import BadInput, StoppedBySignal, Unsupported
from fewbits.models.fast import FastLanguageModel
from fewbits.training.config import REWARDED, TrainConfig
from fewbits.training.run import train
from fewbits.training.setup.callbacks import read_metrics

pytest.importorskip("trl")

PAIR = {"prompt": "Question", "chosen": "Yes, it is so.", "rejected": "No."}


def longer(completions, **columns):
    """A reward for GRPO and RLOO: the length of a completion, where the row's own column came with it."""
    assert len(columns["weight"]) == len(completions)
    return [float(len(str(c))) for c in completions]


def rows_for(method: str) -> list[dict]:
    if method == "kto":
        return [{"prompt": f"Q{i}", "completion": "Yes" * (i + 1), "label": i % 2 == 0} for i in range(8)]
    if method in REWARDED:
        return [{"prompt": f"Once {i}", "weight": i} for i in range(8)]
    return [{**PAIR, "prompt": f"Question {i}"} for i in range(8)]


@pytest.fixture
def config_of(tmp_path, shared):
    def make(method: str, rows: list[dict] | None = None, **changes) -> TrainConfig:
        data = tmp_path / f"{method}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows or rows_for(method)))
        values = {
            "model": str(shared / "data" / "models" / "stories260k"),
            "train_data": str(data),
            "output_dir": str(tmp_path / "run"),
            "method": method,
            "max_steps": 2,
            "max_seq_length": 64,
            "batch_size": 2,
            "lora_r": 4,
            "save_steps": 1,
            "learning_rate": 1e-2,
            "device": "cpu",
        }
        if method in REWARDED:
            values |= {"rewards": [f"{__name__}:longer"], "num_generations": 2, "max_completion_length": 6}
        return TrainConfig.from_mapping(values | changes)

    return make


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "cpo", "simpo", "grpo", "rloo"])
@pytest.mark.filterwarnings("ignore")
def test_a_method_trains_an_adapter(config_of, method):
    config = config_of(method)
    result = train(config)
    facts = json.loads((result.output_dir / "run.json").read_text())
    assert facts["method"] == method and facts["status"] == "finished" and result.steps == 2
    assert facts["recipe"]["name"] == "qlora_nf4" and set(facts["versions"]) >= {"trl", "torch", "python"}
    page = result.report.read_text()
    assert f"of {method}" in page and "<h3>reward" in page and "nats per token" not in page
    lines = read_metrics(result.output_dir / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert any("reward" in name for name in lines[0])
    weights = load_file(result.final / "adapter_model.safetensors")
    moved = [name for name, w in weights.items() if "lora_B" in name and w.abs().max() > 0]
    assert moved or method in REWARDED  # whose two completions may be of one length
    model, tokenizer = FastLanguageModel.from_pretrained(result.final)
    assert tokenizer.chat_template is None and model.peft_config


@pytest.mark.filterwarnings("ignore")
def test_a_reward_model_learns_to_tell(config_of):
    result = train(config_of("reward", max_steps=8))
    losses = [line["loss"] for line in read_metrics(result.output_dir / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]
    names = load_file(result.final / "adapter_model.safetensors")
    assert any("score" in name for name in names)


@pytest.mark.filterwarnings("ignore")
def test_a_template_makes_chats_of_texts_and_stays_with_the_adapter(config_of):
    result = train(config_of("dpo", chat_template="chatml", max_steps=1, eval_fraction=0.25, merge=True))
    assert not (result.final / "ref").exists(), "TRL's copy of the beginning is nothing that was trained"
    merged = AutoTokenizer.from_pretrained(result.merged, local_files_only=True)
    assert "<|im_start|>" in merged.chat_template
    _, tokenizer = FastLanguageModel.from_pretrained(result.final)
    assert "<|im_start|>" in tokenizer.chat_template
    assert any("eval_loss" in line for line in read_metrics(result.output_dir / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stopped_run_goes_on_to_the_same_weights(config_of, tmp_path, monkeypatch):
    from fewbits.training.preferences import callbacks

    whole = train(config_of("dpo", max_steps=3))
    config = config_of("dpo", max_steps=3, output_dir=str(tmp_path / "cut"))
    ask = callbacks.WholeCheckpoints.on_step_end

    def stopping(self, args, state, control, **kwargs):
        self.stop.number = 15
        return ask(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(StoppedBySignal, match="step 1 of 3"):
        patch.setattr(callbacks.WholeCheckpoints, "on_step_end", stopping)
        train(config)
    half = Path(config.output_dir) / "checkpoints" / "checkpoint-2"
    half.mkdir()  # as a kill while it was written would leave it
    result = train(config, resume=True)
    assert result.steps == 3
    first, second = (load_file(r.final / "adapter_model.safetensors") for r in (whole, result))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(BadInput, match="another"):
        train(config_of("kto", output_dir=config.output_dir), resume=True)


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "cpo", "simpo", "reward"])
@pytest.mark.filterwarnings("ignore")
def test_rows_that_are_too_long_are_counted_and_a_run_without_others_refused(config_of, method):
    long = "a very long question that leaves no room " * 3
    part = {"reward": "chosen"}.get(method, "prompt")
    rows = [row | ({part: long} if i < 3 else {}) for i, row in enumerate(rows_for(method))]
    text = io.StringIO()
    config = config_of(method, rows, max_seq_length=40, max_steps=1)
    facts = train(config, console=Console(file=text, width=10_000)).output_dir / "run.json"
    sentence = json.loads(facts.read_text())["rows_left_out"]
    assert sentence.startswith("3 of 8 rows have no room for their answers in 40 tokens")
    assert sentence in text.getvalue()
    config = config_of(
        method, [{**row, part: long} for row in rows], max_seq_length=40, output_dir=config.output_dir + "2"
    )
    with pytest.raises(BadInput, match=r"^no row has room for its answers in 40 tokens"):
        train(config)


@pytest.mark.parametrize(
    ("method", "changes", "error", "sentence"),
    [
        ("dpo", {"packing": True}, Unsupported, "packing is for method sft"),
        ("dpo", {"sample_prompts": ["a"]}, Unsupported, "fewbits generate"),
        ("dpo", {"long_rows": "refuse"}, Unsupported, "long_rows is for method sft"),
        ("reward", {"merge": True}, Unsupported, "ends in a score; leave merge out"),
        ("dpo", {"optimizer": "adamw_8bit"}, Unsupported, "has no adamw_8bit"),
        ("dpo", {"memory_budget": "offload"}, Unsupported, "keeps or recomputes"),
        ("dpo", {"recipe": "int4_qat"}, Unsupported, "QAT"),
        ("dpo", {"rewards": ["a:b"]}, BadInput, "rewards are for methods grpo and rloo"),
        ("grpo", {"rewards": []}, BadInput, "method grpo needs reward functions"),
        ("rloo", {"rewards": []}, BadInput, "method rloo needs reward functions"),
        ("grpo", {"rewards": ["length"]}, BadInput, "write module:function"),
        ("grpo", {"rewards": ["no_such_module:f"]}, BadInput, "cannot be imported"),
        ("grpo", {"num_generations": 3}, BadInput, "divide them"),
        ("kto", {"batch_size": 1}, BadInput, "at least 2"),
        ("reward", {"lora_r": 0, "load_in_4bit": False}, Unsupported, "leave lora_r out"),
        ("dpo", {"fields": {"chosen": "best"}}, BadInput, "row 1: the row has the columns"),
    ],
)
def test_refusals(config_of, method, changes, error, sentence):
    config = config_of(method, **changes)
    with pytest.raises(error, match=sentence):
        train(config)
    assert not Path(config.output_dir).exists()


@pytest.mark.parametrize(
    ("method", "row", "sentence"),
    [
        ("dpo", {**PAIR, "chosen": ""}, "neither a text nor a list"),
        ("dpo", {**PAIR, "prompt": [{"role": "user", "content": "x"}]}, "write all the same way"),
        ("kto", {"prompt": "a", "completion": "b", "label": "good"}, "must be true or false"),
        (
            "dpo",
            {k: [{"role": "user" if k == "prompt" else "assistant", "content": v}] for k, v in PAIR.items()},
            "set chat_template",
        ),
    ],
)
def test_rows_that_cannot_be_used(config_of, method, row, sentence):
    with pytest.raises(BadInput, match=sentence):
        train(config_of(method, [row]))


def test_values_that_no_run_can_use(config_of):
    with pytest.raises(BadInput, match="method is 'ppo'"):
        config_of("ppo", rows=[PAIR])
    with pytest.raises(BadInput, match="report_to is 'paper'"):
        config_of("dpo", report_to="paper")
    assert config_of("dpo", report_to="none").report_to == ()


@pytest.mark.filterwarnings("ignore")
def test_a_base_model_becomes_a_chat_model(config_of, capsys):
    """Rows of chats, a named template, figures to TensorBoard; the trained model answers in the template."""
    from fewbits.cli import main

    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    result = train(
        config_of("sft", [{"messages": chat}] * 4, chat_template="chatml", report_to="tensorboard")
    )
    assert list(result.output_dir.rglob("*tfevents*"))
    model, tokenizer = FastLanguageModel.from_pretrained(result.final)
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<s><|im_start|>user\nHi</s>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    question = result.output_dir / "question.json"
    question.write_text(json.dumps(chat[:1]))
    words = ["generate", "--model", str(result.output_dir), "--messages", str(question), "--temperature", "0"]
    assert main([*words, "--max-new-tokens", "4"]) == 0


def test_a_reporter_that_is_not_installed_is_named(config_of, monkeypatch):
    from fewbits.training.setup import model_and_trainer

    monkeypatch.setattr(model_and_trainer, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="pip install tensorboard"):
        model_and_trainer.reporters(config_of("dpo", report_to="tensorboard"))
