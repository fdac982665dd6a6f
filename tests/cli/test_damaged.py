"""Damaged files at the commands' doors: refused by the tensor's name, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbits import FastLanguageModel

NAME = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
DAMAGES = {
    "missing": (lambda w: w.pop(NAME), "lacks 'model.layers.1.mlp.up_proj.lora_B.weight'"),
    "unexpected": (
        lambda w: w.update({NAME.replace("layers.1", "layers.77"): w[NAME].clone()}),
        "adapts 'model.layers.77.mlp.up_proj', which this model does not have",
    ),
    "mismatched": (
        lambda w: w.update({NAME: torch.zeros(3, 4)}),
        "was made for 3 outputs of 'model.layers.1.mlp.up_proj', which has 172",
    ),
    "not finite": (lambda w: w[NAME].fill_(torch.nan), "up_proj.lora_B"),
}


@pytest.fixture(scope="module")
def model(shared: Path) -> Path:
    return shared / "data/models/stories260k"


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded, tokenizer = FastLanguageModel.from_pretrained(model, load_in_4bit=False)
    folder = tmp_path_factory.mktemp("adapter") / "final"
    FastLanguageModel.get_peft_model(loaded, r=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def damaged(folder: Path, file: str, change, to: Path) -> Path:
    shutil.copytree(folder, to)
    weights = load_file(folder / file)
    change(weights)
    save_file(weights, to / file, {"format": "pt"})
    return to


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "command", ["merge", "eval", "generate", pytest.param("export", marks=pytest.mark.slow)]
)
def test_a_damaged_adapter_is_refused_by_name(run, adapter, tmp_path, command, damage):
    change, words = DAMAGES[damage]
    folder = damaged(adapter, "adapter_model.safetensors", change, tmp_path / "adapter")
    (tmp_path / "text.txt").write_text("Once upon a time there was a little girl. " * 4)
    arguments = {
        "merge": (folder, tmp_path / "out"),
        "export": (folder, tmp_path / "out", "--to", "16bit"),
        "eval": ("--model", folder, "--text", tmp_path / "text.txt", "--max-tokens", 40),
        "generate": ("--model", folder, "--prompt", "Once", "--max-new-tokens", 2),
    }
    shown = run(command, *arguments[command])
    assert shown.code == 1 and words in shown.err, shown.err
    assert len(shown.err.strip().splitlines()) == 1 and "Traceback" not in shown.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.input_layernorm.weight",
        pytest.param("model.layers.0.mlp.up_proj.weight", marks=pytest.mark.slow),
        pytest.param("model.embed_tokens.weight", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_a_nan_is_named_by_every_export(run, model, tmp_path, name):
    pytest.importorskip("gguf")

    def change(weights):
        weights[name].view(-1)[7] = torch.nan

    folder = damaged(model, "model.safetensors", change, tmp_path / "model")
    for command in (
        ("export", folder, tmp_path / "out", "--to", "16bit"),
        ("export", folder, tmp_path / "out", "--to", "gguf:f16"),
        ("quantize", folder, tmp_path / "out", "--recipe", "qlora_nf4"),
    ):
        shown = run(*command)
        assert shown.code == 1 and name in shown.err and "NaN" in shown.err, (command, shown.err)
        assert not (tmp_path / "out").exists()
