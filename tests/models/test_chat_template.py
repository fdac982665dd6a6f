"""Chat templates that do not end, or write without end, are refused within seconds; all others are let be."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from fewbits import FastLanguageModel
from fewbits.cli import main
from fewbits.errors import BadCheckpoint, BadInput
from fewbits.inference.generate import encode_prompt
from fewbits.models.chat import template as chat_template
from fewbits.models.chat.template import check_template
from fewbits.training.data.chat import ChatEncoder
from tests.models.loading import save_tiny, tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
LOOP = "{% for i in range(99999) %}"
ENDLESS = f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}"
HUGE = {
    "a loop that writes": f"{LOOP}{LOOP}many characters{{% endfor %}}{{% endfor %}}",
    "one long text": "{{ 'x' * 2000000000 }}",
    "doubling": "{% set n = namespace(t='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
}
HARMLESS = {
    "none": None,
    "a sound one": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}",
    "one that marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "one that refuses": "{{ raise_exception('no') }}",
    "one with a fault": "{% for",
    "one that divides": "{{ 1 / 0 }}",
    "one that names": {"default": "{{ messages }}", "tools": "{{ tools | tojson }}"},
}


def of(template: object) -> SimpleNamespace:
    return SimpleNamespace(chat_template=template, name_or_path="mine")


def test_an_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    start = time.monotonic()
    with pytest.raises(BadCheckpoint, match=r"the chat template of mine takes more than 1 s for 1 messages"):
        check_template(of(ENDLESS), MESSAGES)
    assert time.monotonic() - start < 6


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_text_without_end_is_refused(template):
    with pytest.raises(BadCheckpoint, match="characters or 1,024 MiB"):
        check_template(of({"default": template}), MESSAGES)


@pytest.mark.parametrize("template", HARMLESS.values(), ids=HARMLESS)
def test_other_templates_are_let_be(template):
    check_template(of(template), MESSAGES)


def test_every_door_that_renders_looks_first():
    bad = tokenizer()
    bad.chat_template = HUGE["a loop that writes"]
    with pytest.raises(BadCheckpoint, match="chat template"):
        encode_prompt(bad, MESSAGES)
    with pytest.raises(BadCheckpoint, match="chat template"):
        ChatEncoder(bad).require_template()
    bad.chat_template = HARMLESS["one that divides"]
    with pytest.raises(BadInput, match="ZeroDivisionError"):
        encode_prompt(bad, MESSAGES)


def test_templates_are_tried_again_on_longer_conversations(monkeypatch):
    """One that is quick for two messages, and for many has no end: also where rows hold such prompts."""
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    tokenizer_ = tokenizer()
    slow = f"{{% if messages | length > 6 %}}{ENDLESS}{{% endif %}}"
    for marks in ("", "{% generation %}{% endgeneration %}"):
        tokenizer_.chat_template = f"{slow}{marks}{{{{ messages | length }}}}"
        encoder = ChatEncoder(tokenizer_)
        encoder.require_template()
        long = [{"role": role, "content": "x"} for _ in range(4) for role in ("user", "assistant")]
        assert encoder.render(long[:4]) == "4"
        with pytest.raises(BadCheckpoint, match="takes more than 1 s for 8 messages"):
            encoder.encode_chat(long, responses_only=True)
    tokenizer_.chat_template = None
    with pytest.raises(BadInput, match="has no chat template"):
        ChatEncoder(tokenizer_).render(MESSAGES)


def test_a_template_that_blows_up_on_some_contents(monkeypatch):
    monkeypatch.setattr("fewbits.training.data.chat.CHARACTERS", 1000)
    tokenizer_ = tokenizer()
    tokenizer_.chat_template = "{{ messages[0].content * (messages[0].content | length) }}"
    encoder = ChatEncoder(tokenizer_)
    assert len(encoder.render([{"role": "user", "content": "x" * 20}])) == 400
    with pytest.raises(BadInput, match="makes 10,000 characters of messages of 100; correct chat_template"):
        encoder.render([{"role": "user", "content": "x" * 100}])


def test_the_command_says_one_sentence(tmp_path, capsys):
    save_tiny(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(HUGE["doubling"])
    (tmp_path / "messages.json").write_text(json.dumps(MESSAGES))
    words = ["generate", "--model", tmp_path / "model", "--messages", tmp_path / "messages.json"]
    assert main([str(word) for word in words]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the chat template of") and error.endswith(".")
    FastLanguageModel.from_pretrained(tmp_path / "model")  # the model itself is sound
