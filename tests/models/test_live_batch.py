"""Batches that live: each text is what its prompt gives alone, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fewbits
from fewbits.errors import BadInput, NotFinite
from fewbits.models.fast import with_methods
from fewbits.models.generation import step_products
from fewbits.models.generation.live import answers as live
from fewbits.models.generation.live import plan, step_slots
from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.plan import SlotSize, plan_slots
from fewbits.models.generation.live.prompts import Prompts
from fewbits.models.generation.live.rows import Row, Text
from fewbits.models.generation.loop import decoding_of
from tests.models.emulated import on_a_cpu
from tests.models.tiny import tiny, tokens

FAMILIES = ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3")


def rows(count: int = 9) -> list[Row]:
    """Prompts of 2 to 36 tokens; the fourth and fifth are equal."""
    lengths = [2 + (13 * i) % 35 for i in range(count)]
    ids = [tuple(tokens(1, n, seed=i)[0].tolist()) for i, n in enumerate(lengths)]
    if count > 4:
        ids[4] = ids[3]
    return [Row(i, ids[i], seed=100 + i) for i in range(count)]


def made(model: Any, asked: dict[str, Any], count: int = 9, **how: Any) -> list[Text]:
    found = {text.row.index: text for text in answers(model, rows(count), asked, **how)}
    assert sorted(found) == list(range(count))
    return [found[i] for i in range(count)]


def alone(model: Any, row: Row, asked: dict[str, Any]) -> list[int]:
    """transformers' own loop on this prompt alone."""
    ids = torch.tensor([row.ids])
    return type(model).generate(model, ids, **asked)[0, ids.shape[1] :].tolist()


def model_of(family: str, **changes: Any) -> Any:
    model = tiny(family, **changes)
    model.generation_config.eos_token_id = [5, 9, 40]
    model.generation_config.pad_token_id = 0
    return with_methods(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_come_and_go_and_stay_what_they_are(family: str) -> None:
    """Windows of 16 tokens too; texts end by themselves and by length."""
    model, asked, report = model_of(family), {"max_new_tokens": 21, "do_sample": False}, Report()
    texts = made(model, asked, slots=4, report=report)
    for text in texts:
        assert text.tokens == alone(model, text.row, asked)
        assert text.stopped_by == ("end" if text.tokens[-1] in (5, 9, 40) else "length")
    assert report.way == "forward" and report.mean_texts > 2
    assert {text.stopped_by for text in texts} == {"end", "length"} or family.startswith("gemma")
    assert not model.training


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [11, 12]], "min_new_tokens": 6},
        {"sequence_bias": [[[30], 8.0], [[31, 32], 5.0]], "suppress_tokens": [3, 4, 5]},
        {"eos_token_id": 33, "forced_eos_token_id": 33},
        {"max_length": 40, "max_new_tokens": None},
    ],
)
def test_words_of_generate_mean_for_a_row_what_they_mean_alone(asked: dict[str, Any]) -> None:
    model, asked = model_of("llama"), {"max_new_tokens": 12, "do_sample": False, **asked}
    for text in made(model, asked, slots=4):
        assert text.tokens == alone(model, text.row, asked)


def test_drawn_tokens_do_not_depend_on_the_company() -> None:
    model = model_of("qwen3")
    asked = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 20, "min_p": 0.02}
    texts = made(model, asked, slots=5)
    for slots in (1, 9):
        assert [text.tokens for text in made(model, asked, slots=slots)] == [text.tokens for text in texts]
    assert texts[3].row.ids == texts[4].row.ids and texts[3].tokens != texts[4].tokens
    one = next(iter(answers(model, rows()[6:7], asked)))
    assert one.tokens == texts[6].tokens


def test_what_is_drawn_has_the_models_probabilities() -> None:
    """3,000 texts of one token each; by the counts' own spread."""
    model, ids = model_of("llama"), tuple(tokens(1, 6)[0].tolist())
    asked = {"max_new_tokens": 1, "do_sample": True, "top_k": 5, "eos_token_id": None}
    drawn = [text.tokens[0] for text in answers(model, [Row(i, ids, i) for i in range(3000)], asked)]
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0, -1].topk(5)
    for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
        spread = (3000 * share * (1 - share)) ** 0.5
        assert abs(drawn.count(token) - 3000 * share) < 4 * spread + 1
    assert set(drawn) <= set(best.indices.tolist())


def test_equal_prompts_are_read_once_and_long_ones_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = model_of("mistral"), {"max_new_tokens": 6, "do_sample": False}
    want = [text.tokens for text in made(model, asked, slots=4)]
    read: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setitem(live._PIECE_TOKENS, "cpu", 8)
    texts = made(model, asked, slots=4)
    assert [text.tokens for text in texts] == want
    prompts = {text.row.ids for text in texts}
    assert sum(n for n in read if n > 1) <= sum(map(len, prompts)) and max(read) == 8


def test_a_long_prompt_does_not_stall_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven pieces of it: at most four between two steps of a text that waits."""
    model, asked = model_of("llama"), {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    monkeypatch.setitem(live._PIECE_TOKENS, "cpu", 8)
    short, long = (Row(i, tuple(tokens(1, n, seed=i)[0].tolist())) for i, n in enumerate((5, 88)))
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    more = [Row(i, short.ids) for i in range(2, 6)]
    texts = {t.row.index: t for t in answers(model, [short, long, *more], asked, slots=6)}
    first = lengths.index(8)
    pieces = "".join("p" if n > 1 else "s" for n in lengths[first:])
    assert pieces.count("p") == 11 and max(map(len, pieces.split("s"))) == 4
    for row in (short, long):
        assert texts[row.index].tokens == alone(model, row, asked)


def test_prompts_read_together_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: several short prompts in one forward, padded on the left."""
    model, asked = model_of("qwen3"), {"max_new_tokens": 6, "do_sample": False}
    want = [text.tokens for text in made(model, asked, slots=4)]
    real = live.Prompts
    monkeypatch.setattr(live, "Prompts", lambda m, **how: real(m, **{**how, "together": True}))
    forwards: list[Any] = []
    model.register_forward_pre_hook(
        lambda _, __, given: forwards.append(given["input_ids"].shape), with_kwargs=True
    )
    assert [text.tokens for text in made(model, asked, slots=4)] == want
    assert any(rows > 1 and length > 1 for rows, length in forwards)


@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.parametrize("many", ["", "weights stay", "weights are decoded"])
def test_the_same_over_decodings_kernels(look_every: int, many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their definitions: each row at its own position, adapters unmerged, fewer rows at the end."""
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(live, "_LOOK_EVERY", look_every)
    monkeypatch.setattr(live, "_looks_seldom", lambda device: True)
    monkeypatch.setattr(step_slots, "_FEWEST", 1)
    if many:
        monkeypatch.setattr(step_products, "_FEWEST_KEPT", 3 if many == "weights stay" else 1000)
        monkeypatch.setattr(step_products, "_FEWEST_DECODED", 3)
    model = model_of("llama", dtype=torch.bfloat16)
    fewbits.convert(model, "qlora_nf4")
    model = fewbits.get_peft_model(model, r=4, target_modules="all-linear")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    asked, report = {"max_new_tokens": 17, "do_sample": False}, Report()
    texts = made(model, asked, slots=6, report=report)
    assert report.way == "kernels", report.reason
    ties = 0
    for text in texts:
        ids = torch.tensor([[*text.row.ids, *text.tokens]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(text.row.ids) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(text.tokens)[:, None]).squeeze(-1)
        behind = (logits.amax(-1) - chosen) / logits.std(-1)
        assert float(behind.max()) < 0.1  # the likeliest token, or one as likely within rounding
        ties += int((behind > 0).sum())
    assert ties < 8


def test_models_that_keep_something_else_answer_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=5)
    model, report = MambaForCausalLM(config).eval(), Report()
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        texts = made(model, asked, 3, report=report)
    assert [text.tokens for text in texts] == [alone(model, text.row, asked) for text in texts]
    assert report.way == "one by one" and caplog.text.count("one by one") == 1


def test_beams_answer_one_by_one() -> None:
    model, report = model_of("llama"), Report()
    asked = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}
    texts = made(model, asked, 3, report=report)
    assert [text.tokens for text in texts] == [alone(model, text.row, asked) for text in texts]
    assert report.reason == "the call asks for num_beams"


def test_bad_rows_are_named() -> None:
    model, asked = model_of("llama"), {"max_new_tokens": 5, "do_sample": False}

    def why(*found: Row, **how: Any) -> str:
        with pytest.raises(BadInput) as caught:
            list(answers(model, list(found), asked, **how))
        return str(caught.value)

    good = rows(1)[0]
    assert "row 3 has a prompt without tokens" in why(good, Row(2, ()))
    assert "row 2 has a prompt of 128 tokens and the model's context holds 128" in why(
        good, Row(1, tuple(range(128)))
    )
    assert "300 texts at a time were asked for; give 1 to 256" in why(good, slots=300)
    assert list(answers(model, [], asked)) == []
    asked["num_return_sequences"] = 2
    assert "give the prompt as often as it is to be answered" in why(good)
    asked.update(num_return_sequences=1, streamer=object())
    assert "a streamer follows one text at a time" in why(good)


def test_memory_is_planned() -> None:
    assert plan_slots([10, 30], SlotSize(100), 7000, None).slots == 2
    assert plan_slots([10, 30] * 50, SlotSize(100), 7000, None) == plan_slots(
        [30] * 100, SlotSize(100), 7000, None
    )
    plan = plan_slots([30] * 400, SlotSize(10), 10**9, None)
    assert (plan.slots, plan.room, plan.bytes) == (256, 30, 256 * 300)
    with pytest.raises(BadInput, match=r"a text of 30 tokens needs 3.0 kB .* 2.0 kB are there; shorten"):
        plan_slots([30], SlotSize(100), 2000, None)
    with pytest.raises(BadInput, match=r"64 texts at a time do not fit: .*; 3 at a time would fit"):
        plan_slots([30] * 80, SlotSize(100), 9500, 64)


@pytest.mark.parametrize("late", [False, True])
def test_logits_that_are_not_finite_are_refused(late: bool) -> None:
    """At the prompt, or once the text says a certain token."""
    model = model_of("llama", tie_word_embeddings=False)
    asked = {"max_new_tokens": 20, "do_sample": False}
    if late:
        model.generation_config.eos_token_id = None
        token = made(model, asked, 1)[0].tokens[1]
        model.model.embed_tokens.weight.data[token] = float("nan")
    else:
        model.lm_head.weight.data[3] = float("nan")
    for words in ({}, {"num_beams": 2}):  # in the batch, and one by one
        with pytest.raises(NotFinite, match="logits for row 1 are NaN or infinite"):
            made(model, asked | words, 1)


def test_a_consumer_that_stops_leaves_the_model_as_it_was() -> None:
    model = model_of("llama").train()
    texts = answers(model, rows(), {"max_new_tokens": 5, "do_sample": False}, slots=2)
    next(texts)
    assert torch.is_grad_enabled()
    texts.close()
    assert all(module.training for module in model.modules())


def test_prompts_that_are_read_ahead_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan knows of one prompt beside the slots: no more wait than a forward reads, and one forward."""
    monkeypatch.setattr(live, "_looks_seldom", lambda device: True)
    monkeypatch.setattr(live, "_LOOK_EVERY", 2)
    monkeypatch.setitem(live._PIECE_TOKENS, "cpu", 32)
    turn, held = Prompts.turn, []

    def counted(self: Prompts, prompts: Any) -> None:
        turn(self, prompts)
        held.append(sum(len(prompt.ids) for prompt in self.ready))

    monkeypatch.setattr(Prompts, "turn", counted)
    model = model_of("llama")
    rows = [Row(i, tuple(tokens(1, 30, seed=i)[0].tolist())) for i in range(40)]
    asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    assert len(list(answers(model, rows, asked, slots=16))) == 40
    assert 30 < max(held) <= 2 * 32


def test_slots_are_planned_with_the_memory_of_an_earlier_calls_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots stand in its place, so that it is free by then."""
    on_a_cpu(monkeypatch)
    model, asked = model_of("llama", dtype=torch.bfloat16), {"max_new_tokens": 4, "do_sample": False}
    model.generate(tokens(8, 9), **asked)
    step = decoding_of(model).step
    assert step is not None
    size = 2 * sum(keys.numel() * keys.element_size() for keys in step.keys)
    del step
    monkeypatch.setattr(
        plan, "free_bytes", lambda device: size + (0 if decoding_of(model).step is not None else 9 * size)
    )
    report = Report()
    rows = [Row(i, tuple(tokens(1, 100, seed=i)[0].tolist())) for i in range(32)]
    assert len(list(answers(model, rows, asked, slots=32, report=report))) == 32
    assert report.way == "kernels"
