"""Columns and ShareGPT's rows into conversations."""

from __future__ import annotations

import pytest

from fewbits.chat_templates import standardize_sharegpt, to_sharegpt
from fewbits.errors import BadInput

Dataset = pytest.importorskip("datasets").Dataset


def test_from_and_value_become_role_and_content():
    talk = [{"from": who, "value": who.upper()} for who in ("system", "human", "gpt")]
    row = standardize_sharegpt(Dataset.from_list([{"conversations": talk, "id": 1}]))[0]
    assert row["conversations"] == [
        {"role": "system", "content": "SYSTEM"},
        {"role": "user", "content": "HUMAN"},
        {"role": "assistant", "content": "GPT"},
    ]
    assert row["id"] == 1
    again = standardize_sharegpt(Dataset.from_list([row]))[0]
    assert again["conversations"] == row["conversations"]


def test_columns_become_conversations():
    data = Dataset.from_list(
        [
            {"name": "Ann", "age": 3, "note": "", "output": "yes"},
            {"name": "Bob", "age": 4, "note": "old {age}", "output": "no"},
        ]
    )
    made = to_sharegpt(data, merged_prompt="{name} is {age}.[[ Note: {note}]]", output_column_name="output")
    assert made.column_names == ["conversations"]
    assert [talk[0]["value"] for talk in made["conversations"]] == ["Ann is 3.", "Bob is 4. Note: old {age}"]
    assert made[0]["conversations"][1] == {"from": "gpt", "value": "yes"}
    longer = to_sharegpt(data, merged_prompt="{name}", conversation_extension=3)
    assert [len(talk) for talk in longer["conversations"]] == [6, 6]
    assert standardize_sharegpt(longer)[0]["conversations"][0] == {"role": "user", "content": "Ann"}


def test_refusals():
    data = Dataset.from_list([{"a": "x", "output": "y"}])
    with pytest.raises(BadInput, match="needs a column instruction, and the data set has a, output"):
        to_sharegpt(data)
    with pytest.raises(BadInput, match="make one with to_sharegpt"):
        standardize_sharegpt(data)
    with pytest.raises(BadInput, match="from 'robot'"):
        standardize_sharegpt(Dataset.from_list([{"conversations": [{"from": "robot", "value": "x"}]}]))
    with pytest.raises(BadInput, match="take one split"):
        standardize_sharegpt({"train": data})
