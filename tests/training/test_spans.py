"""Masks of responses with tokenizers whose offsets are wrong, and texts far longer than a row may be."""

from __future__ import annotations

import csv
import json
import random
import time
import tracemalloc

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from fewbits.errors import BadInput
from fewbits.training.config import TrainConfig
from fewbits.training.data import spans
from fewbits.training.data.examples import RowEncoder, load_data
from fewbits.training.data.spans import SpanEncoder, cuts_a_token, lie_inside, touch
from tests.training.conftest import byte_tokenizer

WORDS = [
    "the",
    "a",
    "fish",
    "is",
    "in",
    "water",
    "and",
    "Carp,",
    "Cod",
    "Quail?",
    "live",
    "long",
    "near",
    "lakes;",
    "what",
    "does",
    "it",
    "eat",
]
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }} : {% endif %}{% endfor %}"
)


def lagging() -> LlamaTokenizer:
    """transformers' Llama tokenizer with a small vocabulary: it drops "C", "Q", "," and line ends."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzAB:;?."]
    merges = [("▁", "f"), ("i", "s"), ("▁f", "is"), ("▁fis", "h"), ("a", "r"), ("ar", "p"), ("▁", "a")]
    names = ["<unk>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    return LlamaTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=merges)


def encoder(tokenizer, max_length=512, **options) -> RowEncoder:
    config = TrainConfig(model="m", train_data="d", **options)
    return RowEncoder(tokenizer, config, max_length)


def trained_text(tokenizer, tokens) -> str:
    ids, trained = tokens
    return tokenizer.decode([i for i, t in zip(ids, trained, strict=True) if t and i > 2])


def kept(tokenizer, text: str) -> str:
    """What the tokenizer keeps of a text."""
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_responses_are_trained_whole_where_offsets_lag():
    """A prompt with characters that are dropped moved the mask: "Carp" had no token to train on."""
    tokenizer, choose = lagging(), random.Random(1)
    rows = encoder(tokenizer)
    for _ in range(200):
        prompt = "Q: " + ", ".join(choose.choices(WORDS, k=6)) + "?\nA:"
        response = " " + " ".join(choose.choices(WORDS, k=choose.randrange(1, 5)))
        rows.chat.inexact = False
        tokens = rows.chat.encode_pair(prompt, response)
        assert rows.chat.inexact
        want = kept(tokenizer, response).replace(" ", "")
        assert trained_text(tokenizer, tokens).replace(" ", "") == want
        ids, trained = tokens
        untrained = [i for i, t in zip(ids, trained, strict=True) if not t]
        assert tokenizer.decode(untrained).replace(" ", "") == kept(tokenizer, prompt).replace(" ", "")


def test_rows_with_wrong_offsets_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [("Quail?", "Carp"), ("what is it", "a fish"), ("Cod, fish:", "in water")]
    path.write_text("".join(json.dumps({"prompt": p, "completion": r}) + "\n" for p, r in rows))
    data = load_data(path, encoder(lagging()))
    assert data.report.inexact == 2 and "2 rows whose prompt and response were tokenised apart" in str(
        data.report
    )
    assert int(data.examples[0].trained.sum()) >= 2  # "arp" is one token; and the end


def test_marked_templates_where_offsets_lag():
    tokenizer = lagging()
    tokenizer.chat_template = MARKED
    rows = encoder(tokenizer)
    messages = [{"role": "user", "content": "Q, Cod"}, {"role": "assistant", "content": "a fish is near"}]
    (tokens,) = rows.chat.encode_chat(messages, responses_only=True)
    assert rows.chat.inexact and trained_text(tokenizer, tokens).strip() == "a fish is near"


def test_marked_templates_are_read_as_transformers_does():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = MARKED
    messages = [
        {"role": role, "content": text}
        for role, text in [
            ("user", "hé?"),
            ("assistant", "\U0001f600: ja"),
            ("user", "x"),
            ("assistant", "y"),
        ]
    ]
    want = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (found,) = encoder(tokenizer).chat.encode_chat(messages, responses_only=True)
    assert found == (list(want["input_ids"]), [bool(mark) for mark in want["assistant_masks"]])


def unigram() -> PreTrainedTokenizerFast:
    words = sorted({*" ".join(WORDS), *(" " + w for w in WORDS), "fi", "sh"})
    model = models.Unigram([("<unk>", 0.0), *((w, -len(words) / len(w)) for w in words)], unk_id=0)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>", eos_token="<unk>")


def lower_case() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(["<e>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")


TOKENIZERS = {"bytes": byte_tokenizer, "lagging": lagging, "unigram": unigram, "lower case": lower_case}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_cut_text_begins_with_the_tokens_of_the_whole(name, monkeypatch):
    """And one that fits is not cut; smaller figures, so that there is something to cut."""
    monkeypatch.setattr(spans, "_GENEROUS", 3)
    monkeypatch.setattr(spans, "_LEAST", 40)
    tokenizer, choose = TOKENIZERS[name](), random.Random(name)
    plain = SpanEncoder(tokenizer)
    for _ in range(150):
        limit = choose.randrange(1, 60)
        text = " ".join(
            choose.choices([*WORDS, "aaaaaaa", "  ", "\n\n", "\U0001f600é"], k=choose.randrange(1, 90))
        )
        edge = choose.randrange(len(text) + 1)
        cut = SpanEncoder(tokenizer, limit)
        ids, trained = cut.encode_spans(text, [(edge, len(text))])
        want = plain.encode_spans(text, [(edge, len(text))])
        if len(want[0]) <= limit:
            assert (ids, trained) == want
        else:
            assert len(ids) > limit
        whole, _ = plain.encode_spans(text, [(0, len(text))])
        assert SpanEncoder(tokenizer, limit).encode_spans(text, [(0, len(text))])[0][:limit] == whole[:limit]


def test_a_row_of_many_megabytes_is_cut_before_it_is_tokenised(tmp_path):
    path = tmp_path / "rows.jsonl"
    long = "fish in water. " * 2_000_000  # 30 MB
    rows = [
        {"prompt": "what? ", "completion": long},
        {"prompt": "a", "completion": "b"},
        {"prompt": long, "completion": "b"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.monotonic()
    data = load_data(path, encoder(byte_tokenizer(), max_length=64))
    assert time.monotonic() - began < 5
    assert (
        [len(e) for e in data.examples] == [64, 3] and data.report.truncated == 2 and data.report.dropped == 1
    )
    with pytest.raises(BadInput, match=r"row 1 has at least 6[0-9] tokens, but max_seq_length is 64"):
        load_data(path, encoder(byte_tokenizer(), max_length=64, long_rows="refuse"))


@pytest.mark.slow
def test_a_row_of_100_megabytes_takes_seconds_and_twice_its_size(tmp_path):
    """Its line and its text lie in memory together, and nothing else of its size."""
    path, size = tmp_path / "rows.jsonl", 100_000_000
    with path.open("w") as file:
        file.write('{"prompt": "what? ", "completion": "' + "fish in water. " * (size // 15) + '"}\n')
        file.write('{"prompt": "a", "completion": "b"}\n')
    tracemalloc.start()
    began = time.monotonic()
    try:
        data = load_data(path, encoder(byte_tokenizer(), max_length=64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 10  # 1 s on an idle core
    assert [len(e) for e in data.examples] == [64, 3] and data.report.truncated == 1
    assert peak < 2.2 * size
    said = r"row 1 has at least 6[0-9] tokens, but max_seq_length is 64"
    with pytest.raises(BadInput, match=said) as refused:
        load_data(path, encoder(byte_tokenizer(), max_length=64, long_rows="refuse"))
    assert len(str(refused.value)) < 300


def test_a_long_cell_of_a_csv_file_is_a_row(tmp_path):
    """The csv module takes 131,072 characters of a cell, unless it is told otherwise."""
    path, limit = tmp_path / "rows.csv", csv.field_size_limit()
    path.write_text("prompt,completion\na," + "fish " * 40_000 + "\na,b\n")
    data = load_data(path, encoder(byte_tokenizer(), max_length=64))
    assert [len(e) for e in data.examples] == [64, 3] and data.report.truncated == 1
    assert csv.field_size_limit() == limit


def test_a_long_document_is_tokenised_in_pieces(monkeypatch):
    tokenizer = byte_tokenizer()
    text = "\n".join(" ".join(WORDS) for _ in range(40))
    want = SpanEncoder(tokenizer).all_ids(text)
    monkeypatch.setattr(spans, "_PIECE", 333)
    assert SpanEncoder(tokenizer).all_ids(text) == want == tokenizer(text)["input_ids"]
    assert SpanEncoder(tokenizer).all_ids("") == []


def test_half_characters_and_deep_nesting_are_bad_rows(tmp_path):
    """And each bad row is one row, counted once."""
    path = tmp_path / "rows.jsonl"
    lines = [
        '{"prompt": "a", "completion": "b"}',
        '{"prompt": "a", "completion": "\\ud800"}',
        '{"prompt": "\\udfff", "completion": "b"}',
        '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "completion": "b"}',
        "{broken",
        '{"prompt": "a", "completion": ""}',
    ]
    path.write_text("\n".join(lines) + "\n")
    report = load_data(path, encoder(byte_tokenizer(), skip_bad_rows=True)).report
    assert (report.rows, report.examples, report.skipped) == (6, 1, 5)
    for bad, sentence in ((1, "lone surrogate"), (2, "lone surrogate"), (3, "nested too deeply")):
        path.write_text(lines[bad] + "\n")
        with pytest.raises(BadInput, match=sentence):
            load_data(path, encoder(byte_tokenizer()))
        with pytest.raises(BadInput, match=r"no usable row .1 bad, 0 without .* of 1.;"):
            load_data(path, encoder(byte_tokenizer(), skip_bad_rows=True))


def test_exact_tokenizers_are_not_tokenised_apart(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    found = SpanEncoder(tokenizer)
    found.encode_spans("what is é \U0001f600 <|im_end|> here", [(9, 20)])
    assert not found.inexact


def test_places_of_tokens_are_looked_up_as_they_are_counted_out():
    """Also where spans lie over each other, in any order, and tokens stand for no character."""
    chooser = random.Random(0)
    for _ in range(500):
        length = chooser.randint(1, 20)
        tokens, start = [], 0
        while start < length:
            end = min(length, start + chooser.randint(0, 4))
            tokens += [(start, end)] * chooser.choice((1, 1, 1, 2))  # bytes of one character
            start = max(end, start + 1)
        spans = [tuple(sorted(chooser.choices(range(length + 1), k=2))) for _ in range(chooser.randint(0, 5))]
        edges = sorted({edge for span in spans for edge in span} - {0, length})
        assert lie_inside(tokens, spans) == [any(s <= a and b <= e for s, e in spans) for a, b in tokens]
        assert touch(tokens, spans) == [any(s < b and a < e for s, e in spans) for a, b in tokens]
        assert cuts_a_token(edges, tokens) == any(a < edge < b for a, b in tokens for edge in edges)
