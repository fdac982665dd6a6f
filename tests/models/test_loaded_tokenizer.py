"""A tokenizer is read in one parse of its file, and is the one that transformers reads in two."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, tokenization_utils_base

from fewbits.models.loading import loaded_tokenizer
from fewbits.models.loading.loaded_tokenizer import parsed_backend, read_tokenizer, written_added_tokens
from fewbits.models.loading.options import sort_options
from tests.models.loading import tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with_more = tokenizer()
    with_more.add_tokens(["<|im_start|>", 'quoted "added_tokens": []'])
    with_more.save_pretrained(tmp_path)
    return tmp_path


def test_it_is_the_same_tokenizer_from_one_parse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def refuse(stream: Any) -> Any:
        assert Path(stream.name).name != "tokenizer.json"
        return json.load(stream)

    monkeypatch.setattr(tokenization_utils_base, "json", SimpleNamespace(load=refuse, dumps=json.dumps))
    with pytest.raises(AssertionError):
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    read = read_tokenizer(str(folder), sort_options({}))
    assert read.largest == max(usual.get_vocab().values())
    assert str(read.tokenizer) == str(usual) and read.tokenizer.init_kwargs == usual.init_kwargs
    monkeypatch.undo()
    for name, one in (("usual", usual), ("read", read.tokenizer)):
        one.save_pretrained(folder / name)
    names = sorted(file.name for file in (folder / "usual").iterdir())
    assert names == sorted(file.name for file in (folder / "read").iterdir())
    assert all((folder / "usual" / n).read_bytes() == (folder / "read" / n).read_bytes() for n in names)


def test_what_was_parsed_is_neither_copied_nor_parsed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def remembered(where: Path) -> dict[str, Any]:
        options = parsed_backend(where)
        given.append(options["tokenizer_object"].value)
        return options

    monkeypatch.setattr(loaded_tokenizer, "parsed_backend", remembered)
    read = read_tokenizer(str(folder), sort_options({}))
    assert read.tokenizer.backend_tokenizer is given[0]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Special"}))
    monkeypatch.setattr(loaded_tokenizer, "_GENERAL", ("Special",))  # and transformers takes another class
    again = read_tokenizer(str(folder), sort_options({}))
    assert len(given) == 2 and again.tokenizer.backend_tokenizer is not given[1]
    assert again.tokenizer.get_vocab() == read.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer.model", {}),
        ("vocab.json", {}),
        ("", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("", {"tokenizer_class": None}),
        ("", {"backend": "sentencepiece"}),
        ("", {"auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}),
    ],
)
def test_only_the_general_class_takes_what_was_parsed(
    folder: Path, file: str, changes: dict[str, Any]
) -> None:
    assert parsed_backend(folder)
    if file:
        (folder / file).write_text("")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert parsed_backend(folder) == {}


def test_the_largest_id_with_gaps_and_without(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    read = read_tokenizer(str(folder), sort_options({}))
    assert read.largest == len(read.tokenizer) - 1
    vocabulary = content["model"]["vocab"]
    vocabulary[next(word for word, number in vocabulary.items() if number == 9)] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert read_tokenizer(str(folder), sort_options({})).largest == 5000


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"vocab": {"added_tokens": 1}}'),
        ("tokenizer.json", '{"added_tokens": [{"content": "x"}]}'),
        ("tokenizer.json", '{"added_tokens": 7}'),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": "BertJapaneseTokenizer"}'),
        ("added_tokens.json", "{}"),
    ],
)
def test_what_transformers_reads_otherwise_is_left_to_it(folder: Path, file: str, text: str) -> None:
    assert written_added_tokens(folder)
    (folder / file).write_text(text)
    assert written_added_tokens(folder) == {}
