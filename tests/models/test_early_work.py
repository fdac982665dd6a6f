"""What packing takes is loaded in a thread where something will be packed on a GPU, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaForCausalLM

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.loading import early_work, streamed_loading
from fewbits.models.loading.early_work import load_kernels, work_beside
from fewbits.models.loading.streamed_loading import StreamedLoader
from fewbits.models.loading.streamed_weights import StreamedWeights
from fewbits.models.packing.model_shapes import auto_class_of, class_of
from fewbits.models.packing.packed import is_packed
from tests.models.loading import packed_state, same, save_tiny
from tests.models.tiny import FAMILIES, tiny_config

CPU = torch.device("cpu")


def test_only_where_weights_are_packed_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "plain")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packed")
    plain, packed = (
        inspect_folder(tmp_path / n, allow_pickle=False, remote_code=False) for n in ("plain", "packed")
    )
    loaded: list[Any] = []
    monkeypatch.setattr(early_work, "load_kernels", lambda *a: loaded.append(a))
    with work_beside("qlora_nf4", plain, None, None) as early:
        assert early.kernels is None and early.weights is None  # no GPU
    monkeypatch.setattr(early_work, "one_gpu", lambda device_map: CPU)
    monkeypatch.setattr(early_work, "dtype_of", lambda dtype, device_map: torch.bfloat16)
    for recipe, checkpoint in ((None, plain), ("qlora_nf4", packed), ("qlora_nf4", None)):
        with work_beside(recipe, checkpoint, None, None) as early:
            assert early.kernels is None and (early.weights is None) == (checkpoint is None)
    assert not loaded
    with work_beside("int8", plain, None, None) as early:
        assert early.kernels is not None and early.kernels.exception() is None
    assert loaded == [("int8", CPU, torch.bfloat16)]


@pytest.mark.parametrize("recipe", ["qlora_nf4", "int8", "lora_bf16", "stochastic"])
def test_every_weight_format_of_a_recipe_is_packed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    packed: list[str] = []
    pack = early_work.quantize
    monkeypatch.setattr(early_work, "quantize", lambda w, f: packed.append(f.name) or pack(w, f))
    load_kernels(recipe, CPU, "auto")
    assert len(packed) == (recipe != "lora_bf16")


def test_the_first_weight_waits_and_an_error_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed in the thread is not told twice, nor hides what the weights say."""
    save_tiny(tmp_path)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("in the thread")

    class Future:
        asked = 0

        def exception(self) -> Exception:
            Future.asked += 1
            return RuntimeError("in the thread")

    monkeypatch.setattr(
        streamed_loading,
        "loader_for",
        lambda auto, kind, device_map, early, look: StreamedLoader(
            kind, CPU, early._replace(kernels=Future())
        ),
    )
    monkeypatch.setattr(early_work, "one_gpu", lambda device_map: CPU)
    monkeypatch.setattr(early_work, "load_kernels", fail)
    monkeypatch.setattr(early_work, "dtype_of", lambda dtype, device_map: torch.bfloat16)
    model, _ = FastLanguageModel.from_pretrained(tmp_path)
    assert Future.asked == 1 and is_packed(model)


def test_what_is_being_read_is_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reading of the files, begun before the model is built, for plain and packed folders alike."""
    save_tiny(tmp_path / "plain", shard="60KB")
    usual, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "plain")
    usual.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    opened: list[Any] = []
    enter = StreamedWeights.__enter__
    monkeypatch.setattr(StreamedWeights, "__enter__", lambda self: opened.append(self) or enter(self))
    for module in (early_work, streamed_loading):
        monkeypatch.setattr(module, "one_gpu", lambda device_map: CPU)
    monkeypatch.setattr(early_work, "load_kernels", lambda *arguments: None)
    monkeypatch.setattr(early_work, "dtype_of", lambda dtype, device_map: torch.bfloat16)
    for folder in ("plain", "packed"):
        model, _ = FastLanguageModel.from_pretrained(tmp_path / folder)
        assert same(packed_state(model), packed_state(usual)) and len(opened) == 1
        assert not opened.pop()._files  # closed
    (tmp_path / "packed" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises(BadCheckpoint):
        FastLanguageModel.from_pretrained(tmp_path / "packed")
    assert all(not weights._files for weights in opened)


def test_the_model_is_built_once_and_looked_over_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path)
    for module in (early_work, streamed_loading):
        monkeypatch.setattr(module, "one_gpu", lambda device_map: CPU)
    monkeypatch.setattr(early_work, "dtype_of", lambda dtype, device_map: torch.bfloat16)
    monkeypatch.setattr(early_work, "load_kernels", lambda *arguments: None)
    built: list[Any] = []
    make = LlamaForCausalLM.__init__

    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        built.append(self)
        make(self, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", remember)
    model, _ = FastLanguageModel.from_pretrained(tmp_path)
    assert len(built) == 1 and built[0] is model
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    monkeypatch.setattr(StreamedLoader, "_load_pretrained_model", None)
    with pytest.raises(BadCheckpoint, match=r"config\.json makes it"):
        FastLanguageModel.from_pretrained(tmp_path)
    assert len(built) == 2


@pytest.mark.parametrize(
    "config", [*map(tiny_config, FAMILIES), GPT2Config(n_layer=1)], ids=lambda config: config.model_type
)
def test_the_class_is_told_without_building(config: Any) -> None:
    with torch.device("meta"):
        assert class_of(config) is type(auto_class_of(config).from_config(config))
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    assert class_of(config) is None
