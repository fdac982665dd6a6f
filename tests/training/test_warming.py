"""`fewbits.warm`: two layers of a model's widths run through what a recipe takes, and what came is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fewbits
from fewbits.errors import BadInput, Unsupported
from fewbits.models.fast import FastLanguageModel
from fewbits.models.folders.checkpoint import read_header
from fewbits.recipes import get_recipe
from fewbits.training.ahead import warming
from fewbits.training.ahead.warming import run_small, warm, write_small

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


def test_the_small_model_has_the_widths_and_two_layers(tmp_path: Path) -> None:
    write_small(CONFIG, tmp_path)
    entries = read_header(tmp_path / "model.safetensors")
    layers = {name.split(".")[2] for name in entries if ".layers." in name}
    assert layers == {"0", "1"} and "lm_head.weight" not in entries  # tied
    assert entries["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)
    assert CONFIG["num_hidden_layers"] == len(CONFIG["layer_types"]) == 5  # the caller's stays as it is


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qlora_nf4", "int8", "lora_bf16", "float8_full"])
def test_every_kind_of_recipe_trains_both_ways_and_generates(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    did, training = list[Any](), FastLanguageModel.for_training

    def note_training(model: Any, checkpointing: Any = None) -> Any:
        did.append(checkpointing)
        return training(model, checkpointing)

    monkeypatch.setattr(FastLanguageModel, "for_training", staticmethod(note_training))
    write_small(CONFIG, tmp_path)
    run_small(tmp_path, get_recipe(recipe), batch=(2, 16), rank=2)
    assert did[-2:] == ["unsloth", False]


def test_it_tells_what_came(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ran = tmp_path / "cache", list[Any]()
    (cache / "old").mkdir(parents=True)
    (cache / "old" / "here_before.cubin").write_bytes(b"x")

    def compiling(folder: Path, recipe: Any, **options: Any) -> None:
        ran.append((json.loads((folder / "config.json").read_text())["hidden_size"], recipe.name, options))
        (cache / "new").mkdir(exist_ok=True)
        (cache / "new" / "a_kernel.cubin").write_bytes(b"12345")
        (cache / "new" / "a_kernel.json").write_bytes(b"12")

    monkeypatch.setattr(warming, "_gpu", lambda: "a GPU")
    monkeypatch.setattr(warming, "_cache_folder", lambda: cache)
    monkeypatch.setattr(warming, "run_small", compiling)
    warmed = warm(config, batch=(1, 16), rank=2)
    assert (warmed.kernels, warmed.nbytes, warmed.folder) == (("a_kernel",), 7, cache)
    assert warmed.seconds > 0
    again = warm(tmp_path, "int8", batch=(1, 16), rank=2)
    assert again.kernels == () and again.nbytes == 0
    options = {"batch": (1, 16), "rank": 2}
    assert ran == [(64, "qlora_nf4", options), (64, "int8", options)]


def test_a_packed_folder_is_warmed_by_its_own_recipe(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fewbits.models.loading.hf_quantizer import FewbitsConfig

    packed = {**CONFIG, "quantization_config": FewbitsConfig("int8").to_dict()}
    config.write_text(json.dumps(packed))
    ran: list[str] = []
    monkeypatch.setattr(warming, "_gpu", lambda: "a GPU")
    monkeypatch.setattr(warming, "_cache_folder", lambda: config.parent / "none")
    monkeypatch.setattr(warming, "run_small", lambda folder, recipe, **_: ran.append(recipe.name))
    warm(config, batch=(1, 16))
    warm(config, "qlora_nf4", batch=(1, 16))
    assert ran == ["int8", "qlora_nf4"]


def test_what_cannot_be_warmed_is_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fewbits.warm is warm
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="there is no GPU of CUDA here"):
            warm(config)
    monkeypatch.setattr(warming, "_gpu", lambda: "a GPU")
    monkeypatch.setattr(warming, "_cache_folder", lambda: tmp_path)
    with pytest.raises(BadInput, match="allows sequences of 64 tokens, not of 2,048"):
        warm(config)
    with pytest.raises(BadInput, match="no configuration that can be read"):
        warm(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="no configuration that can be read"):
        warm(tmp_path)


@pytest.mark.gpu
def test_a_second_time_nothing_is_compiled(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: the kernels of the first time are in memory, its files in a cache of its own.

    Into the user's cache other tests write at the same time.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    warm(config, batch=(1, 32))
    assert warm(config, batch=(1, 32)).kernels == ()
