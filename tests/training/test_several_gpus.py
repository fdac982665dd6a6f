"""`fewbits train` over two GPUs: the curve of one GPU, however the model is spread.

All runs of a test start together and share the two GPUs. Written without GPUs at hand, where ``device="cpu"``
gave the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from training.conftest import byte_tokenizer

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
QLORA = {"lora_r": 4, "lora_dropout": 0.0}
FULL = {"load_in_4bit": False, "lora_r": 0}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "ddp int8": {"parallel": "ddp", "communication": "int8"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp int8": {"parallel": "fsdp", "communication": "int8"},
    "tensor": {"parallel": "tensor"},
}


@pytest.mark.multi
@pytest.mark.parametrize("options", [QLORA, FULL], ids=["qlora", "full"])
def test_two_gpus_follow_one(options: dict[str, Any], tiny_data: Path, tmp_path: Path) -> None:
    check(options, tiny_data, tmp_path, device="cuda")


def check(
    options: dict[str, Any], data: Path, folder: Path, *, device: str, ways: tuple[str, ...] = tuple(WAYS)
) -> None:
    """One process, and two in each way, side by side; losses within bfloat16's rounding and INT8's."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, num_key_value_heads=2, eos_token_id=2, **SHAPE))
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    runs = {"one": start(folder, "one", data, options, device, 1)}
    runs |= {way: start(folder, way, data, {**options, **WAYS[way]}, device, 2) for way in ways}
    said = {way: run.communicate(timeout=280)[0] for way, run in runs.items()}
    assert not any(run.returncode for run in runs.values()), "\n".join(f"{w}:\n{t}" for w, t in said.items())
    want = curve(folder / "one")
    assert want[0] - want[-1] > 0.5, want  # it learns, by much more than what follows
    for way in ways:
        found = json.loads((folder / way / "run.json").read_text())
        assert found["ranks"] == 2 and found["parallel"].startswith(f"{WAYS[way]['parallel']}: 2 ranks")
        assert curve(folder / way) == pytest.approx(want, rel=2e-2), way
        assert list((folder / way / "final").glob("*model*.safetensors"))


def start(
    folder: Path, name: str, data: Path, options: dict[str, Any], device: str, count: int
) -> subprocess.Popen[str]:
    settings = {
        "model": str(folder / "model"), "train_data": str(data), "output_dir": str(folder / name),
        "epochs": 1, "max_steps": 6, "logging_steps": 1, "batch_size": 4, "gradient_accumulation": 2,
        "learning_rate": 1e-2, "report": False, "samples": 0, "device": device, "max_seq_length": 64,
        **options,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(settings))
    several = ["--nproc-per-node", str(count)] if count > 1 else []
    return subprocess.Popen(
        [sys.executable, "-m", "fewbits.cli", "train", str(path), *several],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def curve(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]
