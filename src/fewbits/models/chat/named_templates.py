"""Chat templates by name: how a model's family writes a conversation, as data, and how a tokenizer gets one.

A template ends each turn with a token. Where the tokenizer has the family's own as a single token, that one
becomes its end of text, so that generation stops there; otherwise its own end-of-text token stands in that
place and the other markers are ordinary text. No token is added and no embedding resized: a LoRA run trains
neither embeddings nor head, so a new row would stay at its first random values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.text_files import read_text

if TYPE_CHECKING:
    from torch import nn

OWN = ("tokenizer", "own")  # the tokenizer's own template
_END = "{end}"
Words = Mapping[str, str]
_WORDS = {
    "role": "role",
    "content": "content",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True)
class NamedTemplate:
    """How one family writes a conversation; ``{end}`` stands for the token that ends a turn.

    Attributes:
        user: what stands before and behind a user's message.
        assistant: what stands before and behind an answer.
        end: the family's token at a turn's end; empty: the tokenizer's end of text.
        system: what stands around a system message; None: it goes before the first user's message.
        default_system: the system message where the conversation has none.
        prompt: what is written for an answer to follow; None: what stands before an answer.
        begins: True if the text begins with the tokenizer's begin-of-text token.
        trims: True if white space around a message is left out.
    """

    user: tuple[str, str]
    assistant: tuple[str, str]
    end: str = ""
    system: tuple[str, str] | None = None
    default_system: str = ""
    prompt: str | None = None
    begins: bool = False
    trims: bool = False

    @property
    def parts(self) -> tuple[str, str]:
        """What a user's turn and an answer begin with, as ``train_on_responses_only`` takes them."""
        answer = self.assistant[0]
        if self.prompt is not None and not (answer and self.prompt.startswith(answer)):
            answer = self.prompt
        return self.user[0], answer or self.user[1]

    def text(self, end: str, words: Words | None = None, *, begins: bool = False) -> str:
        """The template in Jinja, as ``tokenizer.chat_template`` holds it.

        Args:
            end: the token that ends a turn.
            words: other names for role, content, system, user and assistant in the messages.
            begins: begin with the begin-of-text token in any case.
        """
        w = {**_WORDS, **(words or {})}
        head = "{{ bos_token }}" if self.begins or begins else ""
        role, content = f"message[{_quoted(w['role'])}]", f"message[{_quoted(w['content'])}]"
        says = f"{content} | trim" if self.trims else content
        first = (
            f"{{% if messages and messages[0][{_quoted(w['role'])}] == {_quoted(w['system'])} %}}"
            f"{{% set system = messages[0][{_quoted(w['content'])}]{' | trim' if self.trims else ''} %}}"
            "{% set turns = messages[1:] %}"
            f"{{% else %}}{{% set system = {_quoted(self.default_system)} %}}{{% set turns = messages %}}"
            "{% endif %}"
        )
        around = self.system
        lead = ""
        if around is not None:
            lead = f"{{% if system %}}{{{{ {_around(around, 'system', end)} }}}}{{% endif %}}"
        else:
            says_first = f"(system + '\\n\\n' + ({says}) if loop.first and system else ({says}))"
        user = f"({says})" if around is not None else says_first
        more = ""
        if around is not None:
            more = (
                f"{{% elif {role} == {_quoted(w['system'])} %}}{{{{ {_around(around, f'({says})', end)} }}}}"
            )
        prompt = self.assistant[0] if self.prompt is None else self.prompt
        return (
            f"{head}{first}{lead}{{% for message in turns %}}"
            f"{{% if {role} == {_quoted(w['user'])} %}}{{{{ {_around(self.user, user, end)} }}}}"
            f"{{% elif {role} == {_quoted(w['assistant'])} %}}"
            f"{{{{ {_around(self.assistant, f'({says})', end)} }}}}{more}"
            f"{{% else %}}{{{{ raise_exception('this chat template has no place here for the role ' + {role})"
            " }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {_quoted(prompt)} }}}}{{% endif %}}"
        )


def _quoted(text: str) -> str:
    return json.dumps(text)


def _around(pair: tuple[str, str], inner: str, end: str) -> str:
    head, tail = (part.replace(_END, end) for part in pair)
    return " + ".join([*([_quoted(head)] if head else []), inner, *([_quoted(tail)] if tail else [])])


_CHATML = {
    "user": ("<|im_start|>user\n", "{end}\n"),
    "assistant": ("<|im_start|>assistant\n", "{end}\n"),
    "system": ("<|im_start|>system\n", "{end}\n"),
    "end": "<|im_end|>",
}
TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate(**_CHATML),  # type: ignore[arg-type]
    "qwen": NamedTemplate(
        **_CHATML,  # type: ignore[arg-type]
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    "qwen3-thinking": NamedTemplate(
        **_CHATML,  # type: ignore[arg-type]
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    "llama-3": NamedTemplate(
        user=("<|start_header_id|>user<|end_header_id|>\n\n", "{end}"),
        assistant=("<|start_header_id|>assistant<|end_header_id|>\n\n", "{end}"),
        system=("<|start_header_id|>system<|end_header_id|>\n\n", "{end}"),
        end="<|eot_id|>",
        begins=True,
        trims=True,
    ),
    "mistral": NamedTemplate(
        user=("[INST] ", "[/INST]"), assistant=(" ", "{end}"), prompt="", end="</s>", begins=True
    ),
    "gemma": NamedTemplate(
        user=("<start_of_turn>user\n", "{end}\n"),
        assistant=("<start_of_turn>model\n", "{end}\n"),
        end="<end_of_turn>",
        begins=True,
        trims=True,
    ),
    "phi": NamedTemplate(
        user=("<|user|>\n", "{end}\n"),
        assistant=("<|assistant|>\n", "{end}\n"),
        system=("<|system|>\n", "{end}\n"),
        end="<|end|>",
    ),
    "phi-4": NamedTemplate(
        user=("<|im_start|>user<|im_sep|>", "{end}"),
        assistant=("<|im_start|>assistant<|im_sep|>", "{end}"),
        system=("<|im_start|>system<|im_sep|>", "{end}"),
        end="<|im_end|>",
    ),
    "zephyr": NamedTemplate(
        user=("<|user|>\n", "{end}\n"),
        assistant=("<|assistant|>\n", "{end}\n"),
        system=("<|system|>\n", "{end}\n"),
    ),
    "alpaca": NamedTemplate(
        user=("### Instruction:\n", "\n\n"),
        assistant=("### Response:\n", "{end}\n\n"),
        system=("", "\n\n"),
        default_system="Below is an instruction that describes a task. Write a response that appropriately"
        " completes the request.",
    ),
    "vicuna": NamedTemplate(
        user=("USER: ", " "),
        assistant=("ASSISTANT: ", "{end}"),
        prompt="ASSISTANT:",
        system=("", " "),
        default_system="A chat between a curious user and an artificial intelligence assistant. The assistant"
        " gives helpful, detailed, and polite answers to the user's questions.",
    ),
}
ALIASES = {
    "llama3": "llama-3",
    "llama-3.1": "llama-3",
    "llama-31": "llama-3",
    "llama-3.2": "llama-3",
    "llama-3.3": "llama-3",
    "qwen2.5": "qwen",
    "qwen-2.5": "qwen",
    "qwen25": "qwen",
    "qwen3": "chatml",
    "qwen-3": "chatml",
    "qwen3-instruct": "chatml",
    "gemma2": "gemma",
    "gemma-2": "gemma",
    "gemma3": "gemma",
    "gemma-3": "gemma",
    "phi-3": "phi",
    "phi-3.5": "phi",
}


def named(name: str) -> NamedTemplate | None:
    """The template of a name or of another name for it; None: there is none."""
    return TEMPLATES.get(ALIASES.get(name.lower(), name.lower()))


def set_template(tokenizer: Any, choice: str, *, words: Words | None = None, begins: bool = False) -> None:
    """Give a tokenizer a chat template, and the token that its turns end with.

    Args:
        tokenizer: of transformers; changed in place.
        choice: a name in `TEMPLATES`, a file of a Jinja template, or "tokenizer" for the tokenizer's own.
        words: other names for role, content, system, user and assistant, of a named template.
        begins: a named template begins with the begin-of-text token where the tokenizer puts one before every
            text; for callers that tokenise what the template writes without special tokens.

    Raises:
        BadInput: there is no such template, or the tokenizer has nothing to end a turn with.
    """
    name = getattr(tokenizer, "name_or_path", "") or "the model"
    if choice in OWN:
        if not tokenizer.chat_template:
            raise BadInput(
                f"the tokenizer of {name} has no chat template of its own; choose one of"
                f" {', '.join(TEMPLATES)}, or a file."
            )
        return
    template = named(choice)
    if template is None:
        tokenizer.chat_template = _read(choice)
        return
    end = template.end if template.end and _has_token(tokenizer, template.end) else tokenizer.eos_token
    if not end:
        raise BadInput(
            f"the tokenizer of {name} has neither {template.end or 'an end-of-turn token'} nor an end-of-text"
            f" token, with which {choice} ends a turn; set tokenizer.eos_token."
        )
    tokenizer.chat_template = template.text(end, words, begins=begins and _adds_begin(tokenizer))
    if end != tokenizer.eos_token:
        tokenizer.eos_token = end


def parts_of(tokenizer: Any) -> tuple[str, str] | None:
    """What a user's turn and an answer begin with, if the tokenizer's template is a named one."""
    text = tokenizer.chat_template
    for template in TEMPLATES.values():
        for begins in (False, True):
            if tokenizer.eos_token and text == template.text(tokenizer.eos_token, begins=begins):
                return template.parts
    return None


def stop_at_turns(model: nn.Module, tokenizer: Any) -> None:
    """Let a model's generation stop at its tokenizer's end of text, too; changes its generation config."""
    config, end = getattr(model, "generation_config", None), tokenizer.eos_token_id
    if config is None or end is None:
        return
    before = config.eos_token_id
    ends = [] if before is None else list(before) if isinstance(before, (list, tuple)) else [before]
    if end not in ends:
        config.eos_token_id = [*ends, end] if ends else end


def _has_token(tokenizer: Any, token: str) -> bool:
    return token in tokenizer.get_vocab()


def _adds_begin(tokenizer: Any) -> bool:
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [begin]


def _read(choice: str) -> str:
    path = Path(choice)
    if not path.is_file():
        near = get_close_matches(choice.lower(), [*TEMPLATES, *ALIASES], n=1)
        advice = (
            f"did you mean {near[0]}?" if near else f"the names are {', '.join(TEMPLATES)} and tokenizer."
        )
        raise BadInput(f"there is no chat template {choice!r}, neither by name nor as a file; {advice}")
    try:
        text = read_text(path)
    except (OSError, BadInput) as error:
        raise BadInput(f"{path} cannot be read as a text; give the file of a Jinja chat template.") from error
    if "messages" not in text:
        raise BadInput(f"{path} does not read as a chat template: it never uses `messages`.")
    return text
