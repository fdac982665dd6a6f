"""Texts of a model whose layers two ranks share: those of the whole model, the same to the bit on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.errors import BadInput
from fewbits.models.generation.products import products_in_16_bits
from tests.models.emulated import on_a_cpu
from tests.models.loading import tokenizer
from tests.models.tiny import tiny, tokens
from tests.training.generation_workers import (
    SIZES,
    build,
    by_row,
    different,
    guessed,
    loaded,
    many,
    prompts,
    texts,
    with_two_adapters,
)
from tests.training.processes import run_ranks

GREEDY = {"do_sample": False}
CASES: list[dict[str, Any]] = [
    {"model": {"family": "llama", "recipe": "qlora_nf4"}, "rows": 1, "words": GREEDY},
    {"model": {"family": "qwen3", "recipe": None, "fused": True}, "rows": 3, "words": GREEDY},
    {"model": {"family": "llama", "recipe": "int8", "adapted": True}, "rows": 2, "words": GREEDY},
    {"model": {"family": "llama", "recipe": "qlora_nf4", "adapted": True, "fused": True}, "rows": 1}
    | {"words": {**GREEDY, "kv_cache": {"name": "int8", "newest": 4}}},
    {
        "model": {"family": "qwen2", "recipe": "qlora_nf4"},
        "rows": 2,
        "words": {"do_sample": True, "top_k": 9},
    },
]


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return run_ranks(texts, 2, CASES)


@torch.no_grad()
def behind(model: Any, text: Tensor, new: int) -> float:
    """How far new tokens lie below the likeliest of the whole model at most, in standard deviations."""
    logits = model(text).logits[:, -new - 1 : -1].float()
    chosen = logits.gather(-1, text[:, -new:, None])[..., 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


@torch.no_grad()
def logits_of(model: Any, text: Tensor, new: int) -> Tensor:
    """Of the whole model in one forward, behind each place from the prompt's last one on."""
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with products_in_16_bits(model):
        out = model(text, attention_mask=mask, position_ids=places)
    return out.logits[:, -new - 1 : -1].float()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_ranks_write_what_one_process_writes(found: list[Any], number: int) -> None:
    """Each logit up to rounding, each greedy token the likeliest up to it; drawn ones the first rank's."""
    case, ranks = CASES[number], [rank[number] for rank in found]
    assert torch.equal(ranks[0]["text"], ranks[1]["text"])
    for rank in ranks:
        assert rank["step"] and rank["steps"] == 11 and rank["heads"] == 1, rank["said"]
        assert all("prompts are read" in line for line in rank["said"]), rank["said"]
        if not case["model"].get("adapted"):  # 5 and 2 sums a layer; zeros, the head's share, and its sum
            assert rank["launches"] == 2 * 7 + 3
    text, ours = ranks[0]["text"], ranks[0]["logits"]
    model = build(**case["model"])
    theirs = logits_of(model, text, 12)
    if ours is not None:
        assert torch.equal(ours, ranks[1]["logits"])
        assert float((ours - theirs).norm() / theirs.norm()) < 0.06
    if not case["words"]["do_sample"]:
        chosen = theirs.gather(-1, text[:, -12:, None])[..., 0]
        assert float(((theirs.amax(-1) - chosen) / theirs.std(-1)).max()) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qlora_nf4", None])
def test_a_folder_through_the_public_face(recipe: str | None, tmp_path: Path) -> None:
    """Half of the layers' weights in each process; what is written is what the whole model writes."""
    plain = tiny("llama", **SIZES)
    plain.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    ranks = run_ranks(loaded, 2, str(tmp_path), recipe)
    assert torch.equal(ranks[0]["text"], ranks[1]["text"]) and ranks[0]["says"] == ranks[1]["says"]
    if recipe:
        fewbits.convert(plain, recipe)
    whole = sum(p.nbytes for p in plain.model.layers.parameters())
    for rank in ranks:
        assert rank["step"] and not rank["trains"], rank["said"]
        assert whole / 2 <= rank["bytes"] < 0.55 * whole
    assert behind(plain, ranks[0]["text"], 8) < 0.15


def test_one_process_alone_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="start several, as by torchrun --nproc-per-node 2"):
        fewbits.load_shared_model(tmp_path, on_gpu=False)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="holds an adapter; merge it into its base"):
        fewbits.load_shared_model(tmp_path)
    with pytest.raises(BadInput, match=r"there is no folder .*download the model first"):
        fewbits.load_shared_model(tmp_path / "other")


@pytest.mark.slow
def test_guesses_change_no_text() -> None:
    ranks = run_ranks(guessed, 2)
    assert torch.equal(ranks[0], ranks[1])
    assert behind(build("llama", "qlora_nf4"), ranks[0], 24) < 0.15


@pytest.mark.slow
def test_rows_have_adapters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys and values in few bits, and guesses, too."""
    names = [["default", "other", "__base__"], ["other", "default"], ["other"]]
    words: list[dict[str, Any]] = [{}, {"kv_cache": {"name": "int8", "newest": 4}}]
    words.append({"prompt_lookup_num_tokens": 3})
    ranks = run_ranks(by_row, 2, names, words)
    on_a_cpu(monkeypatch)
    whole = with_two_adapters()
    for number, (chosen, more) in enumerate(zip(names, words, strict=True)):
        asked = {"max_new_tokens": 10, "do_sample": False, "adapter_names": chosen, **more}
        text = whole.generate(**prompts(len(chosen)), **asked)
        assert torch.equal(ranks[0][number], text) and torch.equal(ranks[1][number], text)


def test_ranks_that_are_asked_for_different_texts_are_told_so() -> None:
    for said in run_ranks(different, 2):
        assert len(said) == 6 and all("called with different prompts or settings" in line for line in said)


@pytest.mark.slow
def test_many_texts_are_made_one_by_one() -> None:
    ranks = run_ranks(many, 2)
    assert ranks[0] == ranks[1]
    way, new = ranks[0]
    assert way.startswith("one by one: ranks share") and [len(each) for each in new] == [6, 6, 6]
    model = build("llama", "qlora_nf4")
    for i, each in enumerate(new):
        assert behind(model, torch.cat([tokens(1, 5 + i), torch.tensor([each])], 1), 6) < 0.15
