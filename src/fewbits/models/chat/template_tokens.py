"""A chat template's markers as tokens of their own: added to a tokenizer, given rows, and made to train.

Where a tokenizer lacks them, a named template writes its markers as ordinary text (`named_templates`).
Here they become special tokens instead, one token each, for who wants a base model to speak a family's own
format. A new row begins as the mean of the rows of the tokens that its marker consisted of, so that it means
something from the first step on; embedding and head must then train, beside adapters as whole modules.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput
from fewbits.models.chat.named_templates import named, set_template

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"<\|[^<>|]+\|>|</?[a-z]+(?:_[a-z]+)+>|\[/?[A-Z]+\]")


def markers_of(choice: str) -> list[str]:
    """The markers of a named template that can be tokens; empty where it has words alone (Alpaca, Vicuna).

    Raises:
        BadInput: there is no such name.
    """
    template = named(choice)
    if template is None:
        raise BadInput(
            f"the markers of {choice!r} are not known, for it is no named template; add them by"
            " tokenizer.add_tokens and model.resize_token_embeddings, and save both first."
        )
    parts = [
        *template.user,
        *template.assistant,
        *(template.system or ()),
        template.end,
        template.prompt or "",
    ]
    return list(dict.fromkeys(marker for part in parts for marker in _MARKER.findall(part)))


def add_tokens(tokenizer: PreTrainedTokenizerBase, choice: str) -> dict[str, list[int]]:
    """Add a template's markers that a tokenizer lacks, as special tokens.

    Args:
        tokenizer: of transformers; changed in place.
        choice: the name of a template.

    Returns:
        Each new token, and the tokens that it consisted of before.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    before = {
        marker: [int(i) for i in tokenizer(marker, add_special_tokens=False)["input_ids"]]
        for marker in markers_of(choice)
        if marker not in vocabulary
    }
    tokenizer.add_tokens(
        [AddedToken(marker, special=True, normalized=False) for marker in before], special_tokens=True
    )
    return before


def add_template_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase, choice: str) -> list[str]:
    """Add a template's markers to a tokenizer and rows for them to its model, and set the template.

    Args:
        model: without adapters; its embedding (vocabulary, width) and head grow in place.
        tokenizer: the model's; changed in place.
        choice: the name of a template.

    Returns:
        The tokens that were added. Their rows are means and must train: give ``get_peft_model`` the fields
        ``**modules_to_train(model)``.

    Raises:
        BadInput: there is no such template, or the model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise BadInput("this model has adapters already; call add_template_tokens before get_peft_model.")
    before = add_tokens(tokenizer, choice)
    set_template(tokenizer, choice, begins=True)
    give_rows(model, tokenizer, before)
    return list(before)


def give_rows(model: Any, tokenizer: PreTrainedTokenizerBase, before: dict[str, list[int]]) -> None:
    """Rows of embedding and head for new tokens: the means of what they consisted of before."""
    if not before:
        return
    import torch  # here, so that fewbits.chat_templates loads none of it

    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tables = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not tables[0]:
        tables.append(head.weight)
    with torch.no_grad():
        for table in tables:
            for token, ids in before.items():
                table[tokenizer.convert_tokens_to_ids(token)] = table[ids].float().mean(0).to(table.dtype)


def modules_to_train(model: Any) -> dict[str, Any]:
    """Fields of PEFT's configuration by which embedding and head train as a whole."""
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    saved = [names[id(embedding)]]
    if head is not None and head.weight is not embedding.weight:
        return {"modules_to_save": [*saved, names[id(head)]]}
    return {"modules_to_save": saved, "ensure_weight_tying": True}


__all__ = ["add_template_tokens", "add_tokens", "give_rows", "markers_of", "modules_to_train"]
