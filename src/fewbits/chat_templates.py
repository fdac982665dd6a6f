"""Chat templates and conversations, by the names of Unsloth's module of this name.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Any

from fewbits.errors import BadInput, Unsupported
from fewbits.front.by_example import apply_chat_template
from fewbits.front.responses import train_on_responses_only
from fewbits.front.sharegpt import standardize_sharegpt, to_sharegpt
from fewbits.models.chat.named_templates import TEMPLATES as CHAT_TEMPLATES
from fewbits.models.chat.named_templates import set_template
from fewbits.models.chat.template_tokens import add_template_tokens, modules_to_train

standardize_data_formats = standardize_sharegpt  # its newer name


def get_chat_template(
    tokenizer: Any,
    chat_template: str | tuple[str, ...] = "chatml",
    mapping: dict[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> Any:
    """Give a tokenizer a chat template.

    Args:
        tokenizer: of transformers; changed in place.
        chat_template: a name in ``CHAT_TEMPLATES``, or a file of a Jinja template.
        mapping: other names for role, content, user and assistant in the messages, as in
            ``{"role": "from", "content": "value", "user": "human", "assistant": "gpt"}``.
        map_eos_token: must be True: a turn ends with the family's token where the tokenizer has it, otherwise
            with its end-of-text token (see `fewbits.models.chat.named_templates`).
        system_message: must be None: put it among the messages.

    Returns:
        The tokenizer.

    Raises:
        BadInput, Unsupported: no such template, or an option that chooses something else.
    """
    if not isinstance(chat_template, str):
        raise Unsupported(
            "get_chat_template takes a name or a file; write a template of your own into a file, or set"
            " tokenizer.chat_template to its text."
        )
    if not map_eos_token:
        raise Unsupported(
            "get_chat_template ends turns with a token that stops generation; leave map_eos_token out."
        )
    if system_message is not None:
        raise Unsupported("get_chat_template takes no system message; put one among each row's messages.")
    unknown = set(mapping or {}) - {"role", "content", "system", "user", "assistant"}
    if unknown:
        raise BadInput(f"mapping has {sorted(unknown)[0]!r}; it maps role, content, user and assistant.")
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    set_template(inner, chat_template, words=mapping)
    return tokenizer


__all__ = [
    "CHAT_TEMPLATES",
    "add_template_tokens",
    "apply_chat_template",
    "get_chat_template",
    "modules_to_train",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_sharegpt",
    "train_on_responses_only",
]
