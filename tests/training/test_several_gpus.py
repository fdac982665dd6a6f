"""`fewbits train` over two GPUs: the curve of one GPU, however the model is spread.

One run at a time: NCCL's kernels wait on the GPU for each other, and those of several runs on the same two
GPUs keep each other from being there at once.

All cases passed on two H200s at 310de71. Before all ranks began with the same adapters
(fewbits.nn.first_values), those that read their own shares of a folder did not.

What is left are sums in another order, rounded to bfloat16, and what INT8 takes from gradients. These
settings in bfloat16 on a CPU, two ranks of gloo that read shares, are off by at most 0.021 % for qlora (four
seeds) and 0.14 % for all weights (three seeds; Adam moves a whole step where a gradient is near zero). Other
adapters are off by 1.2 to 2.8 % (three seeds): more than is allowed here, and hardly more than 2 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.conftest import byte_tokenizer

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "qlora": {"lora_r": 4, "lora_dropout": 0.0},
    "full": {"load_in_4bit": False, "lora_r": 0},
}
CASES = [
    ("qlora", {"parallel": "ddp"}),
    ("qlora", {"parallel": "fsdp"}),
    ("qlora", {"parallel": "tensor"}),
    ("full", {"parallel": "ddp", "communication": "int8"}),
    ("full", {"parallel": "fsdp", "communication": "int8"}),
    ("full", {"parallel": "tensor"}),
]
LIMIT = {"qlora": 4e-3, "full": 1e-2}  # of a loss, relative
SECONDS = 100


@pytest.fixture(scope="module")
def alone(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The curves of one GPU."""
    folder = tmp_path_factory.mktemp("alone")
    return {kind: run(folder / kind, tiny_data, options, count=1) for kind, options in KINDS.items()}


@pytest.mark.multi
@pytest.mark.parametrize(("kind", "way"), CASES, ids=lambda x: " ".join(x.values()) if type(x) is dict else x)
def test_two_gpus_follow_one(
    kind: str, way: dict[str, Any], alone: dict[str, list[float]], tiny_data: Path, tmp_path: Path
) -> None:
    found = run(tmp_path, tiny_data, {**KINDS[kind], **way}, count=2)
    want = alone[kind]
    assert want[0] - want[-1] > 0.5, want  # it learns, by much more than what bfloat16 and INT8 round away
    assert found == pytest.approx(want, rel=LIMIT[kind])
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["ranks"] == 2 and record["parallel"].startswith(f"{way['parallel']}: 2 ranks")
    assert list((tmp_path / "run/final").glob("*model*.safetensors"))


def run(
    folder: Path, data: Path, options: dict[str, Any], *, count: int, device: str = "cuda"
) -> list[float]:
    """Train a small model with so many processes; the losses."""
    torch.manual_seed(0)  # the same weights in every run
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, num_key_value_heads=2, eos_token_id=2, **SHAPE))
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    settings = {
        "model": str(folder / "model"), "train_data": str(data), "output_dir": str(folder / "run"),
        "epochs": 1, "max_steps": 6, "logging_steps": 1, "batch_size": 4, "gradient_accumulation": 2,
        "report": False, "learning_rate": 1e-2, "samples": 0, "device": device, "max_seq_length": 64,
        **options,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(settings))
    several = ["--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run(
        [sys.executable, "-m", "fewbits.cli", "train", str(folder / "run.yaml"), *several],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]
