"""A tiny model folder with a tokenizer of its own, small data, and runs in processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token for each byte, and the marks of ChatML."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {
        token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML if chat else None
    return fast


def make_tiny_folder(folder: Path) -> None:
    """A Llama of 30 thousand weights in a folder, with dropout in its attention, and a tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.1,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def write_tiny_data(path: Path) -> None:
    """Fifty rows of prompt and completion."""
    rows = [{"prompt": f"{i} plus {i % 7} is ", "completion": str(i + i % 7)} for i in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_folder(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    write_tiny_data(path)
    return path


class Killer:
    """Runs configurations in children of one process that has imported everything already."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killed_runs.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, config: dict, *, resume: bool = True, **fate: float | str | None) -> dict:
        """One run: exit status (-9: killed), seconds, number of fsyncs, and the error if there was one.

        ``after`` seconds, ``at_fsync`` or in ``at_step`` it is killed, in a step by ``signal``; it writes no
        file larger than ``file_limit`` bytes. ``command``: it is ``fewbits train``. ``host``: the machine it
        takes itself to be on; ``launch`` and ``attempt``: see `fewbits.training.run.train`.
        """
        self.process.stdin.write(json.dumps({"config": config, "resume": resume, **fate}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run_ranks(self, configs: list[dict], *, resume: bool = False, **fate: object) -> list[dict]:
        """The same for the ranks of one run. ``kill``: (rank, n), at its n-th fsync, or for -n in step n.

        ``signal``: what it gets in that step instead of SIGKILL. ``pace``: of the watch's heartbeats.
        ``by_slices``: sharded models are read so, as they are on GPUs.
        """
        order = {"configs": configs, "resume": resume, **fate}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="session")
def killer():
    killer = Killer()
    yield killer
    killer.process.stdin.close()
    killer.process.wait(timeout=180)  # busy machines take long over its libraries
