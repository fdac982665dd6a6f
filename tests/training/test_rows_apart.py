"""Packed rows of a model whose layers run by transformers' code: apart, or refused before training begins."""

from __future__ import annotations

import pytest
import torch

from fewbits.errors import Unsupported
from fewbits.training.config import TrainConfig
from fewbits.training.run import train
from fewbits.training.setup.rows_apart import check_rows_apart
from tests.models.hybrids import hybrid, save_hybrid
from tests.models.mixtures import mixture
from tests.models.tiny import tiny


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1", "nemotron_h", "gpt_oss"])
def test_rows_that_see_each_other_are_refused(kind: str) -> None:
    """A convolution and a state go on from row to row; eager attention with sinks makes no mask of rows."""
    model = (mixture if kind == "gpt_oss" else hybrid)(kind)
    with pytest.raises(Unsupported, match=f"do not stay apart in the layers of {kind}"):
        check_rows_apart(model)
    assert not model.training


def test_a_model_that_refuses_by_itself_is_named() -> None:
    with pytest.raises(Unsupported, match=r"packing: qwen3_next takes no packed rows \(.*set packing: false"):
        check_rows_apart(hybrid("qwen3_next"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["deepseek_v3", "granitemoe", "starcoder2"])
def test_rows_that_stay_apart_are_taken(kind: str, dtype: torch.dtype) -> None:
    if kind == "starcoder2":
        from tests.models.unwritten import unwritten

        model = unwritten(kind)
    else:
        model = mixture(kind)
    check_rows_apart(model.to(dtype).train())
    assert model.training


def test_a_family_with_our_attention_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(model, "forward", None)
    check_rows_apart(model)


def test_a_run_is_refused_before_its_first_step(tmp_path, tiny_data) -> None:
    save_hybrid(tmp_path / "model", "lfm2")
    fields = {
        "model": str(tmp_path / "model"), "train_data": str(tiny_data), "output_dir": str(tmp_path / "run"),
        "load_in_4bit": False, "device": "cpu", "max_steps": 1, "samples": 0, "report": False,
    }  # fmt: skip
    with pytest.raises(Unsupported, match="packing: rows in one sequence do not stay apart"):
        train(TrainConfig.from_mapping({**fields, "packing": True}))
    assert train(TrainConfig.from_mapping({**fields, "output_dir": str(tmp_path / "other")})).steps == 1
