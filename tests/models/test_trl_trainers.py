"""TRL's trainers over a fused NF4 model, beside plain TRL and PEFT over the same weights in float32.

Each step's loss and metrics agree, nothing falls back to a layer's own forward, and the output head is asked
as the guide's table says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from fewbits import FastLanguageModel, FewbitsConfig, get_peft_model, restore
from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.models.adapting.adapters import begin_adapter
from fewbits.nn.loss import LazyLogits
from tests.models.loading import save_tiny
from tests.models.trl_cases import CASES, STEPS, TEMPLATE

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# TRL takes these over a batch's padding as well, where the attention of the two sees other tokens.
_OF_PADDING = ("logits/", "objective/")
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "trl.md"
_TIMED = ("runtime", "per_second", "flos", "step_time", "memory")


def _adapted(folder: Any, fused: bool, scores: bool) -> tuple[Any, Any]:
    """The fused model, or what plain TRL and PEFT train; for rewards with a score in the head's place."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    if scores:
        torch.manual_seed(5)  # of the score's first values
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, num_labels=1, quantization_config=FewbitsConfig("qlora_nf4"))
        model.config.pad_token_id = tokenizer.pad_token_id
    options = {"r": 8, "lora_alpha": 16, "target_modules": TARGETS}
    options |= (
        {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if scores else {"task_type": "CAUSAL_LM"}
    )
    if fused:
        model = get_peft_model(model, seed=7, **options)
        fuse(model)
        return model, tokenizer
    restore(model)  # plain linears with the dequantised weights
    model.requires_grad_(False)
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    begin_adapter(model, 7)
    return model, tokenizer


def _history(trainer: Any) -> list[dict[str, float]]:
    torch.manual_seed(11)
    trainer.train()
    return [
        {name: float(value) for name, value in row.items() if not any(word in name for word in _TIMED)}
        for row in trainer.state.log_history
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_learns_what_plain_trl_does(name, tmp_path, monkeypatch):
    case = CASES[name]
    scores = case.trainer == "Reward"
    save_tiny(tmp_path / "base")
    plain = _history(case.make(*_adapted(tmp_path / "base", False, scores), tmp_path / "plain"))

    computed = []
    compute = LazyLogits._compute
    monkeypatch.setattr(LazyLogits, "_compute", lambda self: (computed.append(self.shape), compute(self))[1])
    model, tokenizer = _adapted(tmp_path / "base", True, scores)
    quick = _history(case.make(model, tokenizer, tmp_path / "fused"))

    assert len(plain) == len(quick) > STEPS
    for theirs, ours in zip(plain, quick, strict=True):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            share = 0.2 if key.startswith(_OF_PADDING) else 1e-3
            assert ours[key] == pytest.approx(value, rel=share, abs=share / 10), key
    fusion = fusion_of(model)
    assert not fusion.fallbacks
    ways = {*(fusion.trl_head.taken if fusion.trl_head else []), *(["logits"] if computed else [])}
    assert ways == set(filter(None, case.head.split(", ")))


def test_the_guides_table_says_what_the_cases_hold():
    words = {
        "fused": "answered",
        "logits": "reads logits",
        "fused, logits": "answered for the metrics, reads logits for the loss",
    }
    said = {name: head for name, runs, head in _table() if runs == "yes"}
    assert said.keys() == CASES.keys()
    for name, case in CASES.items():
        own = "has none: a score stands in its place" if name == "Reward" else "TRL's own"
        assert said[name] == words.get(case.head, own), name
        assert name.partition(",")[0] == case.trainer


def test_the_guides_table_has_every_trainer_of_trl():
    release, (stated,) = (
        Version(trl.__version__).release[:2],
        re.findall(r"what TRL (\d+\.\d+) offers", GUIDE.read_text()),
    )
    if release != Version(stated).release:
        pytest.skip(f"the table is of TRL {stated}, and {trl.__version__} is installed")
    sources = Path(trl.__file__).parent.glob("**/*_trainer.py")
    offered = {
        name for path in sources for name in re.findall(r"^class (\w+)Trainer\b", path.read_text(), re.M)
    }
    assert offered - {"_Base"} == {name.partition(",")[0] for name, _, _ in _table()}


def _table() -> list[tuple[str, ...]]:
    """Trainer, whether it runs, output head: the rows of the guide."""
    rows = re.findall(r"^\| (\S.*?) \| (\S.*?) \| (.*?) ?\|$", GUIDE.read_text(), re.M)
    return [row for row in rows if row[0] != "trainer"]
