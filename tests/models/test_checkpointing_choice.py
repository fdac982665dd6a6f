"""``use_gradient_checkpointing`` wins over a trainer's default, through the instance's own methods."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.decoder.fuse import fuse, fused_layers
from fewbits.decoder.keep import KEEP_ACTIVATIONS, KEEP_NONE, KEEP_ON_HOST
from fewbits.models import fast
from fewbits.models.adapting.checkpointed_layers import chosen
from tests.models.loading import save_tiny
from tests.models.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore:`.*is deprecated:FutureWarning")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, choice: Any, *, fused: bool = False) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(base))
    if fused:
        fuse(model)
    return FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=choice)


def recomputed(model: Any) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.get_base_model().model.layers]


def _as_trainer(model: Any) -> None:
    """transformers 5.2x's Trainer."""
    keywords = {"use_reentrant": False}
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=keywords, every_n_layers=1, offload=False
    )


def _as_older_trainer(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _as_trl(model: Any) -> None:
    from trl.models.utils import disable_gradient_checkpointing

    with disable_gradient_checkpointing(model, None):
        assert not any(recomputed(model))
    model.gradient_checkpointing_enable(None)
    model.enable_input_require_grads()


def _on_the_inner_model(model: Any) -> None:
    model.get_base_model().gradient_checkpointing_enable()


def _by_peft(model: Any) -> None:
    """PEFT asks the method for the name of its argument, of models that say they are quantised."""
    from peft import prepare_model_for_kbit_training

    inner = model.get_base_model()
    inner.is_loaded_in_4bit = True
    trained = [p for p in inner.parameters() if p.requires_grad]
    prepare_model_for_kbit_training(inner, gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in trained:
        parameter.requires_grad_(True)


WAYS = [_as_trainer, _as_older_trainer, _as_trl, _on_the_inner_model, _by_peft]


@pytest.mark.parametrize("ask", WAYS)
def test_false_stays_false(base: Path, ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = adapted(base, False)
    with caplog.at_level(logging.WARNING, logger="fewbits"):
        ask(model)
        ask(model)
    assert not any(recomputed(model))
    lines = [r.message for r in caplog.records if "wins over the trainer's" in r.message]
    assert len(lines) == 1 and "use_gradient_checkpointing=False" in lines[0]
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize("choice", [True, "unsloth", "auto"])
def test_a_yes_is_done_as_the_trainer_asks(base: Path, ask: Any, choice: Any) -> None:
    """Also "auto", which leaves it to others; and PEFT and TRL find what they ask for."""
    model = adapted(base, choice)
    assert all(recomputed(model)) == (choice != "auto")
    ask(model)
    assert all(recomputed(model))
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()


def test_the_trainers_details_hold(base: Path) -> None:
    model = adapted(base, True)
    model.activation_checkpointing_enable(every_n_layers=2)
    assert recomputed(model) == [True, False]


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize(
    ("choice", "keep"), [(False, KEEP_ACTIVATIONS), (True, KEEP_NONE), ("unsloth", KEEP_ON_HOST)]
)
def test_fused_layers_recompute_by_themselves(
    base: Path, ask: Any, choice: Any, keep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(base, choice, fused=True)
    with caplog.at_level(logging.WARNING, logger="fewbits"):
        ask(model)
    assert not any(recomputed(model))
    assert [layer.keep for layer in fused_layers(model)] == [keep, keep]
    assert any("wins over the trainer's" in record.message for record in caplog.records)


def test_for_training_chooses_anew(base: Path) -> None:
    model = adapted(base, False)
    FastLanguageModel.for_training(model, True)
    assert all(recomputed(model)) and chosen(model) is True
    FastLanguageModel.for_inference(model)
    assert not any(recomputed(model))
    FastLanguageModel.for_training(model)
    assert all(recomputed(model))
    FastLanguageModel.for_training(model, False)
    _as_trainer(model)
    assert not any(recomputed(model))


def test_models_without_a_choice_do_as_the_trainer_says(base: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(base))
    model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_has_its_own_method(base: Path, way: str) -> None:
    model = adapted(base, False)
    if way == "copy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    FastLanguageModel.for_training(model, True)
    _as_trainer(other)
    assert not any(recomputed(other)) and all(recomputed(model))


@pytest.mark.parametrize("what", ["adapter", "adapter to look at", "all weights", "frozen"])
def test_what_is_loaded_to_train_is_fused_on_a_gpu(
    base: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision, with a CPU that passes for a GPU."""
    adapted(base, False).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(fast, "_is_on_gpu", lambda model: True)
    where, options = {
        "adapter": (tmp_path / "adapter", {"is_trainable": True, "use_gradient_checkpointing": False}),
        "adapter to look at": (tmp_path / "adapter", {"is_trainable": False}),
        "all weights": (base, {"full_finetuning": True}),
        "frozen": (base, {}),
    }[what]
    model, _ = FastLanguageModel.from_pretrained(str(where), **options)
    keeps = [layer.keep for layer in fused_layers(model)]
    assert keeps == {"adapter": [KEEP_ACTIVATIONS] * 2, "all weights": [KEEP_ON_HOST] * 2}.get(what, [])
    assert any("fused" in note for note in model.fewbits_notes) == bool(keeps)
    if keeps:
        ids = tokens(2, 12)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
