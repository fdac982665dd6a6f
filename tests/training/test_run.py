"""train() from a configuration to a run folder, and everything it refuses."""

from __future__ import annotations

import errno
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits.decoder.fuse import fused_layers
from fewbits.errors import BadCheckpoint, BadInput, SpecMismatch, TrainingStopped, Unsupported
from fewbits.training.checkpoints import model_state
from fewbits.training.config import TrainConfig
from fewbits.training.data.collator import Collator
from fewbits.training.run import train
from fewbits.training.setup.callbacks import read_metrics
from fewbits.training.setup.model_and_trainer import fused_decoder
from tests.training.conftest import byte_tokenizer


@pytest.fixture
def make_config(tiny_folder, tiny_data, tmp_path):
    def make(**options):
        values = {
            "model": str(tiny_folder),
            "train_data": str(tiny_data),
            "load_in_4bit": False,
            "output_dir": str(tmp_path / "run"),
            "max_steps": 4,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "report": False,
            "samples": 0,
            "device": "cpu",
        }
        return TrainConfig.from_mapping({**values, **options})

    return make


def test_the_run_folder(make_config, tmp_path):
    config = make_config(
        eval_fraction=0.2,
        samples=2,
        sample_tokens=5,
        sample_prompts=["7 plus 1 is "],
        eval_steps=2,
        save_steps=2,
    )
    result = train(config)
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml", "run.json", "metrics.jsonl", "samples.json", "checkpoints", "final",
    }  # fmt: skip
    assert TrainConfig.from_yaml(folder / "config.yaml") == config
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "finished" and run["started"] <= run["ended"]
    assert {"versions", "device", "recipe", "receipt", "model", "parameters", "data"} <= run.keys()
    assert run["data"]["train"]["examples"] == 40 and run["data"]["eval"]["examples"] == 10
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 2, 4]
    for record in records:
        assert {"step", "epoch", "tokens", "seconds", "memory_bytes"} <= record.keys()
        assert "loss" not in record or {"learning_rate", "grad_norm", "tokens_per_second"} <= record.keys()
    samples = json.loads((folder / "samples.json").read_text())
    assert [set(s) for s in samples] == [
        {"prompt", "before", "after"},
        *[{"prompt", "before", "after", "expected"}] * 2,
    ]
    assert result.steps == 4 and result.final == folder / "final" and result.tokens == records[-1]["tokens"]
    assert result.best_metric == min(r["eval_loss"] for r in records if "eval_loss" in r and r["step"])


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_learns(make_config, packed):
    config = make_config(
        lora_r=0,
        max_steps=None,
        epochs=12 if not packed else 30,
        packing=packed,
        eval_fraction=0.2,
        eval_steps=20,
    )
    result = train(config)
    losses = [r["eval_loss"] for r in read_metrics(result.output_dir / "metrics.jsonl") if "eval_loss" in r]
    assert losses[0] > 5 and result.best_metric < 2.2


def test_the_adapter_is_one_that_peft_loads(make_config, tiny_folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = train(make_config(merge=True))
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model = PeftModel.from_pretrained(base, result.final).eval()
    merged = AutoModelForCausalLM.from_pretrained(result.merged, dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        assert (
            adapted - merged(ids).logits
        ).abs().max() < 0.05 * adapted.abs().max()  # merged is in bfloat16
        with model.disable_adapter():
            assert (model(ids).logits - adapted).abs().max() > 1e-3


def test_in_four_bits(make_config):
    result = train(make_config(load_in_4bit=True, lora_r=4, lora_alpha=8))
    run = json.loads((result.output_dir / "run.json").read_text())
    assert run["recipe"]["name"] == "qlora_nf4" and "nf4" in run["receipt"].lower()
    adapter = json.loads((result.final / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)


def test_the_best_weights_are_kept(make_config):
    """With a learning rate that destroys the model the best checkpoint is an early one; final/ holds it."""
    config = make_config(
        learning_rate=1.0, scheduler="constant", warmup=0, max_steps=8, eval_fraction=0.2, eval_steps=1,
        save_steps=100, keep_checkpoints=1, lora_r=0,
    )  # fmt: skip
    result = train(config)
    evaluations = {
        r["step"]: r["eval_loss"]
        for r in read_metrics(result.output_dir / "metrics.jsonl")
        if "eval_loss" in r
    }
    del evaluations[0]
    assert result.best_step == min(evaluations, key=evaluations.get) < 8
    from transformers import AutoModelForCausalLM

    final = AutoModelForCausalLM.from_pretrained(result.final)
    best = AutoModelForCausalLM.from_pretrained(
        result.output_dir / f"checkpoints/checkpoint-{result.best_step}"
    )
    for p, q in zip(final.parameters(), best.parameters(), strict=True):
        assert torch.equal(p, q)
    assert len(list((result.output_dir / "checkpoints").iterdir())) == 2  # the newest and the best


def test_early_stopping(make_config):
    config = make_config(
        learning_rate=1.0, scheduler="constant", warmup=0, max_steps=50, eval_fraction=0.2, eval_steps=1,
        early_stopping_patience=3, lora_r=0,
    )  # fmt: skip
    result = train(config)
    assert result.stopped_early and result.steps == result.best_step + 3 < 50
    assert train(config, resume=True) == result  # what is finished is not trained again
    shutil.rmtree(result.final)
    run = json.loads((result.output_dir / "run.json").read_text())
    (result.output_dir / "run.json").write_text(json.dumps({**run, "status": "running"}))
    again = train(config, resume=True)  # killed after its last checkpoint
    assert again == result and again.final.is_dir()


def test_a_run_that_stopped_early_says_why_it_is_not_prolonged(make_config):
    settings = {"learning_rate": 1e-9, "eval_fraction": 0.2, "eval_steps": 1, "early_stopping_patience": 1}
    result = train(make_config(**settings, max_steps=20))
    text = io.StringIO()
    again = train(
        make_config(**settings, max_steps=30), resume=True, console=Console(file=text, width=10_000)
    )
    assert again.steps == result.steps < 20
    assert f"had stopped early at step {result.steps}" in text.getvalue()


def test_an_adapter_is_trained_on_with_its_own_settings(make_config, tmp_path):
    first = train(make_config(lora_r=2, lora_alpha=6, max_steps=1))
    after = {"model": str(first.final), "output_dir": str(tmp_path / "second"), "max_steps": 1}
    for settings in ({"lora_r": 8}, {"lora_r": 0}, {"lora_alpha": 16}, {"lora_targets": ["q_proj"]}):
        name = next(iter(settings))
        with pytest.raises(BadInput, match=rf"^{name} is .*is an adapter with .*leave {name} out"):
            train(make_config(**after, **settings))
    with pytest.raises(BadInput, match=f"is a training run; .*{first.final}"):
        train(make_config(**{**after, "model": str(first.output_dir)}))
    second = train(make_config(**after, lora_r=2))
    facts = json.loads((second.output_dir / "run.json").read_text())
    assert (facts["lora"]["r"], facts["lora"]["alpha"]) == (2, 6)


def test_a_run_that_has_ended_is_merged_and_reported_when_asked_later(make_config, tmp_path):
    whole = train(make_config(lora_r=2, max_steps=1, merge=True, output_dir=str(tmp_path / "whole")))
    ended = train(make_config(lora_r=2, max_steps=1))
    shutil.rmtree(ended.output_dir / "checkpoints")  # nothing may be trained again
    later = make_config(lora_r=2, max_steps=1, merge=True, report=True, title="Mine", sample_tokens=3)
    result = train(later, resume=True)
    assert result.merged is not None and result.report is not None and "Mine" in result.report.read_text()
    one, other = (load_file(r.merged / "model.safetensors") for r in (whole, result))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_progress_is_quiet_away_from_a_terminal(make_config, capfd):
    text = io.StringIO()
    train(make_config(eval_fraction=0.2, eval_steps=2), console=Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == [
        "step 0/4",
        "step 2/4",
        "step 4/4",
    ]
    assert "eval loss" in lines[-1] and len(lines) == 7  # data, two of attention, four of progress
    train(make_config(output_dir=str(make_config().output_dir) + "2"))
    assert capfd.readouterr().out == ""


def test_progress_on_a_terminal(make_config):
    text = io.StringIO()
    train(make_config(), console=Console(file=text, force_terminal=True, width=200))
    for part in ("4/4", "loss", "tokens/s", "MiB", "left"):
        assert part in text.getvalue()


def test_chat_rows(make_config, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(12)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = train(make_config(train_data=str(path), eval_fraction=0.2, samples=1, sample_prompts=["hi"]))
    first, second = json.loads((result.output_dir / "samples.json").read_text())
    assert first["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert second["expected"].isdigit()


def test_quantisation_aware_training_ends_packed(make_config):
    result = train(make_config(recipe="int4_qat", max_steps=2))
    run = json.loads((result.output_dir / "run.json").read_text())
    assert run["status"] == "finished" and "packed" in run["receipt"]
    from fewbits import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(result.final, load_in_4bit=False)
    assert any(type(m).__name__ == "QuantizedLinear" for m in model.modules())


# Bad input


def refused(kind, sentence, config, **options):
    with pytest.raises(kind, match=sentence) as error:
        train(config, **options)
    assert "\n" not in str(error.value)


def test_another_run_in_the_folder(make_config):
    config = make_config(max_steps=1)
    record = train(config).output_dir / "run.json"
    before = record.read_bytes()
    refused(BadInput, "holds another run; choose another one, or go on", config)
    refused(
        BadInput, "holds another run, with another learning_rate", make_config(max_steps=1, lr=1), resume=True
    )
    assert record.read_bytes() == before
    assert train(config, resume=True).steps == 1


def test_resume_without_a_run_begins_one(make_config):
    assert train(make_config(max_steps=1), resume=True).steps == 1


def test_an_old_checkpoint_that_a_killed_run_left_is_removed(make_config):
    config = make_config(max_steps=4, save_steps=2, keep_checkpoints=1)
    folder = train(config).output_dir
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "running"}))
    shutil.copytree(folder / "checkpoints/checkpoint-4", folder / "checkpoints/checkpoint-2")
    train(config, resume=True)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-4"]


def test_other_data_in_a_resumed_run(make_config, tiny_data, tmp_path):
    data = tmp_path / "d.jsonl"
    shutil.copy(tiny_data, data)
    config = make_config(train_data=str(data), max_steps=1)
    result = train(config)
    run = json.loads((result.output_dir / "run.json").read_text())
    (result.output_dir / "run.json").write_text(json.dumps({**run, "status": "stopped"}))
    data.write_text(data.read_text().replace("plus", "and"))
    refused(SpecMismatch, "has changed since the run", config, resume=True)


def test_longer_than_the_model_allows(make_config):
    refused(
        BadInput,
        r"max_seq_length=2049 is 16.01 times the 128 positions .*; pass at most 2048",
        make_config(max_seq_length=2049),
    )


@pytest.mark.parametrize("options", [{"train_data": "none.jsonl"}, {"eval_data": "none.jsonl"}])
def test_missing_data(make_config, options):
    refused(BadInput, "there is no data file none.jsonl", make_config(**options))


def test_empty_evaluation_data(make_config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(BadInput, "empty.jsonl is empty", make_config(eval_data=str(tmp_path / "empty.jsonl")))
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_missing_model(make_config):
    refused(BadInput, "no model folder", make_config(model="./nowhere/at/all"))


def test_token_ids_beyond_the_embedding(make_config, tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(20)])
    tokenizer.save_pretrained(folder)
    refused((SpecMismatch, BadCheckpoint), "embedding", make_config(model=str(folder)))


def test_no_gpu(make_config):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refused(Unsupported, "torch sees no GPU", make_config(device="cuda"))


def test_nothing_to_train(make_config):
    refused(Unsupported, "are packed .* set lora_r", make_config(load_in_4bit=True, lora_r=0))


def test_bad_rows_are_counted(make_config, tiny_data, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(tiny_data.read_text() + "{broken\n")
    refused(BadInput, r"d\.jsonl, line 51 is not valid JSON", make_config(train_data=str(path)))
    result = train(make_config(train_data=str(path), skip_bad_rows=True))
    assert json.loads((result.output_dir / "run.json").read_text())["data"]["train"]["skipped"] == 1


def test_a_run_that_stops_says_so_and_keeps_its_checkpoints(make_config, monkeypatch):
    original = Collator.__call__
    calls = []

    def poisoned(self, sequences):
        calls.append(1)
        batch = original(self, sequences)
        if len(calls) == 7:
            batch["labels"][:] = -100  # a mean over nothing
        return batch

    monkeypatch.setattr(Collator, "__call__", poisoned)
    config = make_config(max_steps=20, save_steps=2)
    refused(TrainingStopped, "at step 7 .* rows", config)
    run = json.loads((Path(config.output_dir) / "run.json").read_text())
    assert run["status"] == "stopped" and "step 7" in run["error"]
    monkeypatch.undo()
    assert train(config, resume=True).steps == 20


# A full disk


def fail_at(monkeypatch, name, error, which):
    """The function ``name`` of checkpoints raises from its call number ``which`` on."""
    original = getattr(model_state, name)
    calls = []

    def failing(*arguments):
        calls.append(1)
        if len(calls) >= which:
            raise error
        return original(*arguments)

    monkeypatch.setattr(model_state, name, failing)


@pytest.mark.parametrize(
    "kind, text, way_out",
    [
        (None, "No space left on device", "the disk is full.*: make room, then"),
        (
            "safetensors",
            "I/O error: No space left on device (os error 28)",
            "the disk is full.*: make room, ",
        ),
        (
            "safetensors",
            "I/O error: Input/output error (os error 5)",
            "of SafetensorError: .*: mend that, then",
        ),
        (
            RuntimeError,
            "PytorchStreamWriter failed writing file data/0",
            "whether it is full or failing, then",
        ),
        (RuntimeError, "shapes do not fit", "of RuntimeError: shapes do not fit.*: mend that, then"),
        (PermissionError, "no", "of PermissionError: no.*: mend that, then"),
    ],
)
def test_a_checkpoint_that_cannot_be_written(make_config, monkeypatch, kind, text, way_out, tmp_path):
    """Room is asked for only where the disk is full."""
    from safetensors import SafetensorError

    made = {None: lambda text: OSError(errno.ENOSPC, text), "safetensors": SafetensorError}.get(kind, kind)
    error = made(text)
    fail_at(monkeypatch, "save_weights", error, which=2)
    config = make_config(max_steps=6, save_steps=2)
    begin, _, end = way_out.partition(".*") if ".*" in way_out else ("", "", way_out)
    sentence = (
        f"checkpoint-4 could not be written because .*{begin}.* the checkpoints before it are whole"
        rf" \(checkpoint-2\).*{end}"
    )
    refused(TrainingStopped, sentence, config)
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()
    assert train(config, resume=True).steps == 6


@pytest.mark.slow
def test_a_really_full_disk(killer, make_config, tmp_path):
    """A limit on the size of a file, as the kernel enforces it: the optimizer's state does not fit."""
    config = make_config(max_steps=6, save_steps=2, lora_r=0).to_dict()
    result = killer.run(config, file_limit=150_000, resume=False)
    assert result["status"] == 1 and result["error"].startswith("TrainingStopped"), result
    assert "the disk is full" in result["error"] or "took no more bytes" in result["error"]
    assert not list((tmp_path / "run/checkpoints").iterdir())
    assert killer.run(config, resume=True)["status"] == 0


def test_a_damaged_checkpoint(make_config, tmp_path):
    config = make_config(max_steps=2, save_steps=1)
    train(config)
    run = tmp_path / "run/run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), "status": "stopped"}))
    (tmp_path / "run/checkpoints/checkpoint-2/trainable.safetensors").write_bytes(b"x" * 100)
    refused(
        BadCheckpoint,
        "trainable.safetensors has 100 bytes .* checkpoint-1 before it is whole, .*: rm -r .*/checkpoint-2"
        " && fewbits train .*/config.yaml --resume$",
        config,
        resume=True,
    )
    shutil.rmtree(tmp_path / "run/checkpoints/checkpoint-2")
    assert train(config, resume=True).steps == 2


def test_the_configuration_in_the_folder_is_yaml(make_config, tmp_path):
    train(make_config(max_steps=1))
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["max_steps"] == 1


def test_a_memory_budget_is_kept_told_and_changes_no_weight(make_config, tmp_path):
    free = train(make_config())
    told = io.StringIO()
    config = make_config(memory_budget=1e-4, output_dir=str(tmp_path / "tight"))
    tight = train(config, console=Console(file=told, width=200))
    assert "GiB predicted" in told.getvalue()
    notes = json.loads((tight.output_dir / "run.json").read_text())["memory"]
    assert "recomputed" in notes[0] or "layers keep" in notes[0]
    assert tight.metrics["loss"] == free.metrics["loss"]
    assert json.loads((free.output_dir / "run.json").read_text())["memory"] == []


def test_a_graph_that_cannot_be_says_why_and_changes_no_weight(make_config, tmp_path):
    plain = train(make_config(lora_dropout=0.1, seed=3))
    config = make_config(lora_dropout=0.1, seed=3, cuda_graph=True, output_dir=str(tmp_path / "graph"))
    graphed = train(config)
    told = json.loads((graphed.output_dir / "run.json").read_text())["cuda_graph"]
    assert (
        told
        == "0 of 4 passes were replays of a CUDA graph; the others ran as usual: the model is on a cpu (4)"
    )
    assert graphed.steps == plain.steps
    assert json.loads((plain.output_dir / "run.json").read_text())["cuda_graph"] is None


def test_the_decoder_is_fused_once_or_the_receipt_says_why_not():
    def made(family, **options):
        config = AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, **options)
        return AutoModelForCausalLM.from_config(config)

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = made("llama", **small, num_key_value_heads=2)
    told = fused_decoder(model)
    assert "fused" in told and fused_decoder(model) == told and len(fused_layers(model)) == 2
    other = made("gpt2", n_embd=32, n_layer=1, n_head=2)
    assert fused_decoder(other).startswith("the decoder is not fused: ") and not fused_layers(other)


def test_a_recipe_as_a_mapping_is_recorded_resumed_and_reported(make_config):
    recipe = {"name": "qlora_nf4", "linear": {"weight": "int8"}, "lora": {"r": 2}}
    config = make_config(recipe=recipe, max_steps=2, save_steps=1, report=True)
    folder = train(config).output_dir
    run = json.loads((folder / "run.json").read_text())
    assert "int8" in str(run["recipe"]["linear"]["weight"]) and run["recipe"]["lora"]["r"] == 2
    assert "linear = (weight = int8)" in (folder / "report.html").read_text()
    shutil.rmtree(folder / "checkpoints/checkpoint-2")
    (folder / "run.json").write_text(json.dumps({**run, "status": "running"}))
    refused(
        BadInput, "with another recipe", make_config(max_steps=2, save_steps=1, recipe="int8"), resume=True
    )
    assert train(TrainConfig.from_yaml(folder / "config.yaml"), resume=True).steps == 2
