"""train_on_responses_only: labels by the place of each token in the text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
)

from fewbits.chat_templates import get_chat_template, train_on_responses_only
from fewbits.errors import BadInput
from fewbits.front.responses import places_of, responses_in

Dataset = pytest.importorskip("datasets").Dataset

USER, ANSWER = "<|im_start|>user\n", "<|im_start|>assistant\n"
TALK = [
    {"role": "user", "content": "Wie geht's? é 🦙"},
    {"role": "assistant", "content": "\nGut, danke 🙂."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Fine"},
]


def tokenizer_of(shared, name):
    return AutoTokenizer.from_pretrained(shared / "data" / name, local_files_only=True)


def trained_text(tokenizer, ids, labels):
    return tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label != -100])


@pytest.mark.parametrize(
    "name", ["models/stories260k", "tokenizers/gpt2", "tokenizers/open_llama", "tokenizers/qwen2.5"]
)
def test_several_turns_and_the_open_end(shared, name):
    tokenizer = get_chat_template(tokenizer_of(shared, name), "chatml")
    ids = tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False))["input_ids"]
    trainer = SimpleNamespace(
        processing_class=tokenizer, train_dataset=Dataset.from_list([{"input_ids": ids}]), eval_dataset=None
    )
    trained = train_on_responses_only(trainer, USER, ANSWER)
    labels = trained.train_dataset[0]["labels"]
    assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
    said = trained_text(tokenizer, ids, labels)
    for word in ("danke", "🙂", "Fine", tokenizer.eos_token):
        assert word in said
    for word in ("geht", "🦙", "And", "user", "assistant"):
        assert word not in said
    last = train_on_responses_only(
        SimpleNamespace(processing_class=tokenizer),
        USER,
        ANSWER,
        return_function=True,
        last_response_only=True,
    )({"input_ids": [ids]})["labels"][0]
    assert trained_text(tokenizer, ids, last).startswith("Fine")


@pytest.mark.parametrize("kind", ["language modelling", "padding", "default", "of one's own"])
def test_labels_survive_the_collator_and_rows_left_out_are_counted(shared, kind, caplog):
    """transformers' collator for language models puts the whole input in the place of labels."""
    tokenizer = get_chat_template(tokenizer_of(shared, "models/stories260k"), "chatml")
    texts = [f"{USER}A{'b' * n}<|im_end|>\n{ANSWER}Yes{' no' * n}" for n in range(3)]
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in [*texts, f"{USER}alone"]]
    collators = {
        "language modelling": DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "padding": DataCollatorWithPadding(tokenizer),
        "default": default_data_collator,
    }
    collator = collators.get(kind, list)
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None,
        data_collator=collator,
    )
    train_on_responses_only(trainer, USER, ANSWER)
    assert len(trainer.train_dataset) == 3
    assert "1 of 4 rows of the train_dataset have no response" in caplog.text
    if kind not in collators:
        assert trainer.data_collator is collator
        return
    for count in (1, 3):
        rows = [trainer.train_dataset[i] for i in range(count)]
        labels = trainer.data_collator(rows)["labels"]
        assert int((labels != -100).sum()) == sum(sum(x != -100 for x in row["labels"]) for row in rows)


def test_a_marker_whose_last_token_holds_the_answers_beginning(shared):
    """In Qwen's vocabulary a line's end and the blank line after it are one token."""
    tokenizer = tokenizer_of(shared, "tokenizers/qwen2.5")
    ids = tokenizer(f"{USER}Hi<|im_end|>\n{ANSWER}\nYes.<|im_end|>\n")["input_ids"]
    marker = tokenizer(ANSWER)["input_ids"]
    assert not any(ids[i : i + len(marker)] == marker for i in range(len(ids))), "the ids alone would do"
    label = train_on_responses_only(
        SimpleNamespace(processing_class=tokenizer), USER, ANSWER, return_function=True
    )
    assert trained_text(tokenizer, ids, label({"input_ids": [ids]})["labels"][0]) == "\n\nYes.<|im_end|>\n"


def test_packed_rows_end_where_their_sequences_do(shared):
    tokenizer = tokenizer_of(shared, "tokenizers/qwen2.5")
    one, two = (tokenizer(text)["input_ids"] for text in (f"{ANSWER}one", "plain text without a marker"))
    label = train_on_responses_only(
        SimpleNamespace(processing_class=tokenizer), USER, ANSWER, return_function=True
    )
    labels = label({"input_ids": [one + two], "seq_lengths": [[len(one), len(two)]]})["labels"][0]
    assert trained_text(tokenizer, one + two, labels) == "one"
    before = [-100] * len(one)
    assert label({"input_ids": [one], "labels": [before]})["labels"] == [before], "what was masked stays so"


@pytest.mark.parametrize("name", ["models/stories260k", "tokenizers/gpt2", "tokenizers/open_llama"])
def test_places_cover_the_text(shared, name):
    tokenizer = tokenizer_of(shared, name)
    ids = tokenizer("Ünï 🦙🦙 code\n\n  x")["input_ids"]
    text, places = places_of(tokenizer, ids)
    assert text == tokenizer.decode(ids) and "🦙🦙" in text
    assert places[0][0] == 0 and places[-1][1] == len(text)
    assert all(a[1] == b[0] for a, b in pairwise(places))
    slow = SimpleNamespace(decode=tokenizer.decode)  # a tokenizer without a Rust core
    assert "".join(text[a:b] for a, b in places_of(slow, ids)[1]) == places_of(slow, ids)[0]
    assert places_of(slow, ids)[0] == text


def test_responses_in_text():
    assert responses_in("A:x Q:y A:z", "Q:", "A:") == [(2, 4), (10, 11)]
    assert responses_in("Q:y", "Q:", "A:") == []


def test_refusals(shared):
    tokenizer = tokenizer_of(shared, "models/stories260k")
    data = Dataset.from_list([{"input_ids": tokenizer("no marker in here")["input_ids"]}])
    trainer = SimpleNamespace(processing_class=tokenizer, train_dataset=data, eval_dataset=None)
    with pytest.raises(BadInput, match="no row of the train_dataset has a response behind"):
        train_on_responses_only(trainer, USER, ANSWER)
    with pytest.raises(BadInput, match="pass instruction_part"):
        train_on_responses_only(trainer)
    with pytest.raises(BadInput, match="two different texts"):
        train_on_responses_only(trainer, USER, USER)
    trainer.train_dataset = Dataset.from_list([{"text": "x"}])
    with pytest.raises(BadInput, match="has no input_ids but text"):
        train_on_responses_only(trainer, USER, ANSWER)
    trainer.processing_class = None
    with pytest.raises(BadInput, match="needs the tokenizer"):
        train_on_responses_only(trainer, USER, ANSWER)


def test_named_templates_bring_their_markers_and_rows_without_a_response_go(shared):
    tokenizer = get_chat_template(tokenizer_of(shared, "models/stories260k"), "zephyr")
    rows = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in (TALK, TALK[:1])]
    data = Dataset.from_list([{"input_ids": tokenizer(row)["input_ids"]} for row in rows])
    trainer = SimpleNamespace(processing_class=tokenizer, train_dataset=data, eval_dataset={"a": data})
    train_on_responses_only(trainer)
    assert len(trainer.train_dataset) == len(trainer.eval_dataset["a"]) == 1
