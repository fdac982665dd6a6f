"""Unsloth's ``apply_chat_template``: a conversation written by the text of an example.

The example has ``{INPUT}`` where a user's message goes and ``{OUTPUT}`` where an answer goes, and perhaps
``{SYSTEM}``; written twice, one turn after the other, it says what stands between turns.
"""

from __future__ import annotations

import json
from typing import Any

from fewbits.errors import BadInput

_SYSTEM, _INPUT, _OUTPUT = "{SYSTEM}", "{INPUT}", "{OUTPUT}"


def template_of(example: str, end: str, default_system: str | None = None) -> str:
    """The Jinja template of an example.

    Args:
        example: the text; between a ``{INPUT}`` and its ``{OUTPUT}`` stands what an answer begins with.
        end: the token that ends an answer.
        default_system: what stands for ``{SYSTEM}`` where a conversation has no system message.

    Raises:
        BadInput: the example has not one or two turns, or needs a system message that nobody gave.
    """
    turns = example.count(_INPUT), example.count(_OUTPUT)
    if turns not in ((1, 1), (2, 2)) or example.index(_INPUT) > example.index(_OUTPUT):
        raise BadInput(
            "the text of a chat template has {INPUT}, then {OUTPUT}, once, or twice for two turns; this one"
            f" has {turns[0]} and {turns[1]} of them."
        )
    before, _, rest = example.partition(_INPUT)
    between, _, after = rest.partition(_OUTPUT)
    if turns == (2, 2):
        joint = after.partition(_INPUT)[0]
        text = joint.removeprefix(end).lstrip("\n") if end and joint.startswith(end) else joint.lstrip("\n")
        if not before.endswith(text):
            raise BadInput("the two turns of the chat template's text begin differently; write both alike.")
        head, begin = before[: len(before) - len(text)], text
        gap = joint.removeprefix(end)[: len(joint.removeprefix(end)) - len(text)]
    else:
        cut = before.rfind("\n\n")
        head, begin = (before[: cut + 2], before[cut + 2 :]) if cut >= 0 else ("", before)
        gap = "\n\n" if cut >= 0 else "\n"
    if _SYSTEM in example and default_system is None and _SYSTEM not in head:
        raise BadInput("{SYSTEM} stands among the turns of the chat template's text; it belongs before them.")
    said = json.dumps(default_system or "")
    lead = f"{{% set system = {said} %}}{{% set turns = messages %}}"
    lead += "{% if messages and messages[0]['role'] == 'system' %}"
    lead += "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}{% endif %}"
    parts = [json.dumps(part) for part in head.split(_SYSTEM)]
    top = " + system + ".join(parts) if _SYSTEM in head else parts[0]
    return (
        "{{ bos_token }}" + lead + f"{{{{ {top} }}}}"
        "{% for message in turns %}{% if message['role'] == 'user' %}"
        f"{{{{ ({json.dumps(gap)} if not loop.first else '') + {json.dumps(begin)} + message['content']"
        f" + {json.dumps(between)} }}}}"
        "{% elif message['role'] == 'assistant' %}"
        f"{{{{ message['content'] + {json.dumps(end)} }}}}"
        "{% else %}{{ raise_exception('this chat template has no place here for the role '"
        " + message['role']) }}{% endif %}{% endfor %}"
    )


def apply_chat_template(
    dataset: Any,
    tokenizer: Any,
    chat_template: str,
    default_system_message: str | None = None,
    extra_eos_tokens: Any = None,
) -> Any:
    """Give a tokenizer the template of an example, and a data set of conversations the column "text" by it.

    Args:
        dataset: with a column "conversations" (or "messages") of roles and contents.
        tokenizer: changed in place.
        chat_template: the example; see `template_of`.
        default_system_message: for ``{SYSTEM}`` where a conversation has none.
        extra_eos_tokens: must be None: answers end with the tokenizer's end of text.

    Returns:
        The data set with the column.

    Raises:
        BadInput: an example that is none, no such column, a tokenizer without an end of text.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if extra_eos_tokens:
        raise BadInput(
            "apply_chat_template ends answers with the tokenizer's end of text; leave out extra_eos_tokens."
        )
    if not inner.eos_token:
        raise BadInput(
            "apply_chat_template ends answers with the tokenizer's end of text; set tokenizer.eos_token."
        )
    template = template_of(chat_template, inner.eos_token, default_system_message)
    if not inner.bos_token:
        template = template.removeprefix("{{ bos_token }}")
    names = list(dataset.column_names)
    column = next((name for name in ("conversations", "messages") if name in names), None)
    if column is None:
        raise BadInput(
            f"apply_chat_template needs a column conversations, and the data set has {', '.join(names)}; make"
            " one with to_sharegpt and standardize_sharegpt."
        )
    inner.chat_template = template
    return dataset.map(lambda row: {"text": inner.apply_chat_template(row[column], tokenize=False)})


__all__ = ["apply_chat_template", "template_of"]
