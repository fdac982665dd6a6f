"""The shipped model, and the corpus from which it was trained."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from fewbits.demo.run import ASSETS
from fewbits.demo.task import COLOURS, OBJECTS, PERSONS, make_task

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSETS)


def test_it_is_small_and_complete():
    names = {path.name for path in ASSETS.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < 4 * 2**20


def test_plain_transformers_loads_it(tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ASSETS)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.vocab_size == model.config.vocab_size
    assert f"{model.num_parameters():,}" in (ASSETS / "README.md").read_text(encoding="utf-8")


def test_the_words_of_the_task_are_single_tokens(tokenizer):
    for word in (*PERSONS, *COLOURS, *OBJECTS):
        assert len(tokenizer(f" {word}", add_special_tokens=False).input_ids) == 1, word


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "Grüße, 世界! Report:\n\tQ & A?"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_corpus_has_no_answered_questions_and_no_sentence_of_the_task(script):
    corpus = "\n".join(head + tail for head, tail in script.documents(7, 3000))
    assert "Report:" not in corpus
    assert "Question:" not in corpus
    assert "Answer:" not in corpus
    # After a question mark no word of a story follows: what is asked is never answered.
    entities = "|".join((*PERSONS, *COLOURS, *OBJECTS))
    asked = {line for line in re.findall(r"[^.!?\n]*\?", corpus) if re.search(rf"\b({entities})\b", line)}
    assert not asked
    task = make_task(0, num_train=300, num_test=70)
    for question in (*task.train, *task.test):
        assert question.question not in corpus
        for sentence in re.split(r"(?<=[.]) ", question.report):
            if " a " in sentence:
                assert sentence.split(", ")[-1] not in corpus


def test_the_corpus_is_reproducible(script):
    assert script.documents(3, 50) == script.documents(3, 50)
    assert script.documents(3, 50) != script.documents(4, 50)
