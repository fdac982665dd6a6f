"""`apply_chat_template` of Unsloth: conversations written by the text of an example."""

from __future__ import annotations

import pytest

from fewbits import apply_chat_template
from fewbits.errors import BadInput
from fewbits.front.by_example import template_of
from tests.models.loading import tokenizer

Dataset = pytest.importorskip("datasets").Dataset
ONCE = "Some tasks.\n\n### In:\n{INPUT}\n\n### Out:\n{OUTPUT}"
TWICE = "Tasks: {SYSTEM}\n>>> {INPUT}\n<<< {OUTPUT}</s>\n>>> {INPUT}\n<<< {OUTPUT}</s>"
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": 'say "c"'},
    {"role": "assistant", "content": "d\n"},
]


def test_one_turn_says_all_of_them():
    words = tokenizer()
    data = apply_chat_template(Dataset.from_list([{"conversations": TALK}]), words, ONCE)
    begin = "<s>Some tasks.\n\n### In:\na\n\n### Out:\nb</s>\n\n"
    assert data[0]["text"] == begin + '### In:\nsay "c"\n\n### Out:\nd\n</s>'
    asked = words.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    assert data[0]["text"].startswith(asked) and asked.endswith("### Out:\n")


def test_two_turns_say_what_stands_between_and_a_system_message_has_its_place():
    words = tokenizer()
    rows = Dataset.from_list([{"messages": TALK}])
    data = apply_chat_template(rows, words, TWICE, default_system_message="Be kind.")
    text = '<s>Tasks: Be kind.\n>>> a\n<<< b</s>\n>>> say "c"\n<<< d\n</s>'
    assert data[0]["text"] == text
    told = [{"role": "system", "content": "Be brief."}, *TALK]
    assert words.apply_chat_template(told, tokenize=False) == text.replace("Be kind.", "Be brief.")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("nothing", "this one has 0 and 0"),
        ("{OUTPUT} {INPUT}", "{INPUT}, then {OUTPUT}"),
        ("a {INPUT} b {OUTPUT} c {INPUT} d {OUTPUT}", "begin differently"),
        ("a\n\n{SYSTEM} {INPUT} b {OUTPUT}", "belongs before them"),
    ],
)
def test_an_example_that_is_none_is_refused(example, words):
    with pytest.raises(BadInput, match=words):
        template_of(example, "</s>")


def test_columns_and_ends_that_are_missing_are_said():
    with pytest.raises(BadInput, match="needs a column conversations, and the data set has text"):
        apply_chat_template(Dataset.from_list([{"text": "a"}]), tokenizer(), ONCE)
    with pytest.raises(BadInput, match="leave out extra_eos_tokens"):
        apply_chat_template(
            Dataset.from_list([{"messages": TALK}]), tokenizer(), ONCE, extra_eos_tokens=["x"]
        )
    words = tokenizer()
    words.eos_token = None
    with pytest.raises(BadInput, match=r"set tokenizer\.eos_token"):
        apply_chat_template(Dataset.from_list([{"messages": TALK}]), words, ONCE)
