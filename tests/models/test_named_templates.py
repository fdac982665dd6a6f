"""Chat templates by name, beside what the models' own templates write."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fewbits.chat_templates import CHAT_TEMPLATES, get_chat_template
from fewbits.errors import BadInput, Unsupported
from fewbits.models.chat.named_templates import ALIASES, parts_of, set_template

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Yes: {{ 'é' }}"},
    {"role": "user", "content": "More"},
]
OF_TRL = {"llama-3": "llama3", "gemma": "gemma", "phi": "phi3", "qwen": "qwen2_5"}


@pytest.fixture
def tokenizer(shared):
    return AutoTokenizer.from_pretrained(shared / "data" / "models" / "stories260k", local_files_only=True)


def written(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("name", OF_TRL)
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("prompts", [True, False])
def test_the_families_own_templates_write_the_same(tokenizer, name, begin, prompts):
    trl = pytest.importorskip("trl")
    own = Path(trl.__file__).parent / "chat_templates" / f"{OF_TRL[name]}.jinja"
    if not own.is_file():
        pytest.skip(f"this trl has no {own.name}")
    if name == "gemma" and not begin:
        pytest.skip("gemma's own template refuses a system message; ours puts it before the first question")
    if name == "phi" and not prompts:
        pytest.skip("phi's own template writes one more end token behind a whole conversation")
    tokenizer.add_special_tokens({"eos_token": CHAT_TEMPLATES[name].end})
    messages = TALK[begin:] if prompts else TALK[begin:3]
    tokenizer.chat_template = own.read_text()
    expected = written(tokenizer, messages, add_generation_prompt=prompts)
    set_template(tokenizer, name)
    assert written(tokenizer, messages, add_generation_prompt=prompts) == expected


@pytest.mark.parametrize("messages", [TALK, TALK[1:]])
def test_qwen_as_its_tokenizer(shared, messages):
    tokenizer = AutoTokenizer.from_pretrained(
        shared / "data" / "tokenizers" / "qwen2.5", local_files_only=True
    )
    expected = written(tokenizer, messages, add_generation_prompt=True)
    tokenizer.eos_token = "<|endoftext|>"  # as the base models have it
    set_template(tokenizer, "qwen")
    assert written(tokenizer, messages, add_generation_prompt=True) == expected
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_prompt_begins_the_conversation_and_turns_end(tokenizer, name):
    """What training on responses and generation both rest on."""
    set_template(tokenizer, name, begins=True)
    prompt = written(tokenizer, TALK[:2], add_generation_prompt=True)
    if name == "qwen3-thinking":  # an answer begins with its thought, which this one lacks
        assert prompt.endswith("<think>\n")
        prompt = prompt.removesuffix("<think>\n")
    whole = written(tokenizer, TALK[:3])
    assert whole.startswith(prompt) and whole.startswith("<s>") and not whole.startswith("<s><s>")
    assert whole[len(prompt) :].strip().endswith("</s>")
    instruction, response = parts_of(tokenizer)
    assert instruction in whole and response in whole


def test_other_words_for_roles(tokenizer):
    get_chat_template(tokenizer, "chatml")
    expected = written(tokenizer, TALK[1:])
    words = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    get_chat_template(tokenizer, "chatml", mapping=words)
    talk = [{"from": words.get(m["role"], m["role"]), "value": m["content"]} for m in TALK[1:]]
    assert written(tokenizer, talk) == expected


def test_a_file_the_tokenizers_own_and_refusals(tokenizer, tmp_path):
    with pytest.raises(BadInput, match="no chat template of its own"):
        set_template(tokenizer, "tokenizer")
    with pytest.raises(BadInput, match="did you mean chatml"):
        set_template(tokenizer, "chatmll")
    path = tmp_path / "mine.jinja"
    path.write_text("{{ 'hello' }}")
    with pytest.raises(BadInput, match="never uses"):
        set_template(tokenizer, str(path))
    path.write_text("{% for m in messages %}{{ m['content'] }}|{% endfor %}")
    set_template(tokenizer, str(path))
    assert written(tokenizer, TALK[1:2]) == "Hi |" and parts_of(tokenizer) is None
    set_template(tokenizer, "tokenizer")
    with pytest.raises(Unsupported, match="map_eos_token"):
        get_chat_template(tokenizer, "chatml", map_eos_token=False)
    with pytest.raises(Unsupported, match="a name or a file"):
        get_chat_template(tokenizer, ("template", "eos"))
    tokenizer.eos_token = None
    with pytest.raises(BadInput, match="has neither an end-of-turn token"):
        set_template(tokenizer, "zephyr")
    assert set(ALIASES.values()) <= set(CHAT_TEMPLATES)
