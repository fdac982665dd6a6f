"""``generate`` of a model that may be training, with the right cache, and with what a template gave.

What cannot be generated from is refused in one sentence before the model runs: a prompt without tokens, one
that fills the model's context. A batch that the memory does not hold says how many texts would fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput
from fewbits.families.shapes import head_dim
from fewbits.host.walks import all_modules
from fewbits.models.generation.adapters_by_row import drop_adapter_rows
from fewbits.models.generation.calls import option_of
from fewbits.models.generation.live.plan import free_share, size_in_words
from fewbits.models.generation.loop import with_loop
from fewbits.models.generation.own_caches import check_own_cache
from fewbits.models.generation.step_ranks import check_same_call, ranks_of


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` in evaluation mode if the model is training with checkpointed layers; the mode comes back.

    transformers drops the key-value cache of such layers and still feeds one token at a time, which gives
    fluent nonsense.

    Raises:
        BadInput: a prompt without tokens, one that fills the model's context, or no tokens of this model.
        NotFinite: the model's logits are NaN or infinite.
        torch.OutOfMemoryError: the batch does not fit; the message says how many texts would.
    """
    with ExitStack() as unless_done:
        unless_done.callback(drop_adapter_rows, model)  # of a call that fails, or is interrupted
        answers = _generate(model, *args, **kwargs)
        unless_done.pop_all()
    return answers


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    of_class = type(model).generate
    if isinstance(kwargs.get("input_ids"), Mapping):  # of apply_chat_template, which once gave the ids alone
        kwargs = {**kwargs.pop("input_ids"), **kwargs}
    if args and isinstance(args[0], Mapping):
        args, kwargs = args[1:], {**args[0], **kwargs}
    arguments = inspect.signature(of_class).bind_partial(model, *args, **kwargs).arguments
    arguments = {**arguments, **arguments.pop("kwargs", {})}
    group = ranks_of(model)
    if group is not None:  # before one of them refuses the call, or waits for the others
        check_same_call(group, model.device, arguments)
    ids = _prompt_of(arguments)
    if not getattr(model.config, "is_encoder_decoder", False):
        _check_kind(model, arguments)
        _check_prompt(model, ids, arguments)
    training = [module for module in all_modules(model) if module.training]
    if any(getattr(module, "gradient_checkpointing", False) for module in training):
        kwargs = {"use_cache": True, **kwargs}
        model.eval()
    else:
        training = []
    try:
        return of_class(model, *args, **with_loop(model, args, kwargs))
    except torch.OutOfMemoryError as error:
        if ids is None:
            raise
        raise torch.OutOfMemoryError(_too_much(model, ids, arguments)) from error
    finally:
        for module in training:
            module.training = True


def _prompt_of(arguments: dict[str, Any]) -> Tensor | None:
    """The tokens of a call's prompts (batch, length); None if it has none of its own."""
    if arguments.get("inputs_embeds") is not None:
        return None
    ids = next((arguments[name] for name in ("inputs", "input_ids") if arguments.get(name) is not None), None)
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None


def _check_prompt(model: Any, ids: Tensor | None, arguments: dict[str, Any]) -> None:
    """Raise `BadInput` for a prompt that nothing can be generated from."""
    piece = option_of(model, arguments, "prefill_chunk_size")
    if piece is not None and piece < 1:
        raise BadInput(f"prefill_chunk_size={piece} is no number of tokens; give 1 or more, or leave it out.")
    if ids is None:
        return
    length = ids.shape[1]
    if not ids.numel():
        raise BadInput(
            f"the prompt is {tuple(ids.shape)}, without tokens; give at least one, such as the BOS token."
        )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and length >= context > 0:
        raise BadInput(
            f"the prompt has {length:,} tokens and the model's context holds {context:,}; shorten it, or "
            f"load the model with max_seq_length={length + 256} or more."
        )
    _check_tokens(model, ids, arguments)
    if arguments.get("past_key_values") is not None:
        copies = max(option_of(model, arguments, name) or 1 for name in ("num_return_sequences", "num_beams"))
        mask = arguments.get("attention_mask")
        check_own_cache(model, arguments["past_key_values"], ids, mask, copies)


def _check_tokens(model: Any, ids: Tensor, arguments: dict[str, Any]) -> None:
    """Raise `BadInput` for tokens that the model does not have, which would end the process on a GPU.

    What stands for images or sounds may be any number, and is the model's own business.
    """
    num_tokens = getattr(model.get_input_embeddings(), "num_embeddings", None)
    others = set(arguments) - {name for name in arguments if name.startswith(("pixel", "image", "audio"))}
    if num_tokens is None or others != set(arguments) or ids.device.type == "meta":
        return
    least, most = torch.stack([ids.min(), ids.max()]).tolist()
    if least < 0 or most >= num_tokens:
        wrong = least if least < 0 else most
        raise BadInput(
            f"the prompt has the token {wrong}, and the model knows 0 to {num_tokens - 1:,}; use the"
            " tokenizer that belongs to it."
        )


def _check_kind(model: Any, arguments: dict[str, Any]) -> None:
    """Raise `BadInput` for a prompt that is no tensor (batch, length) of tokens."""
    prompt = next(
        (arguments[name] for name in ("inputs", "input_ids") if arguments.get(name) is not None), None
    )
    if prompt is None or getattr(model, "main_input_name", "") != "input_ids":
        return
    if not isinstance(prompt, Tensor):
        raise BadInput(
            f"the prompt is a {type(prompt).__name__}; give a tensor (batch, length) of tokens, as"
            ' tokenizer(..., return_tensors="pt") makes it.'
        )
    if prompt.dim() != 2 or prompt.is_floating_point():
        raise BadInput(
            f"the prompt is {tuple(prompt.shape)} of {prompt.dtype}; give whole numbers (batch, length)."
        )


def _too_much(model: Any, ids: Tensor, arguments: dict[str, Any]) -> str:
    """Why a batch ended for want of memory, and how many texts would fit."""
    texts = len(ids) * (option_of(model, arguments, "num_return_sequences") or 1)
    texts *= option_of(model, arguments, "num_beams") or 1
    new = option_of(model, arguments, "max_new_tokens")
    end = ids.shape[1] + new if new else option_of(model, arguments, "max_length") or ids.shape[1]
    each = end * _bytes_per_token(model)
    free = free_share(model.device)
    fitting = min(free // max(each, 1), texts - 1)
    needs = f"keys and values of each take {size_in_words(each)}, and {size_in_words(free)} are free"
    return (
        f"there is no memory for {texts} texts of up to {end:,} tokens: {needs}; {fitting} at a time would "
        'fit, or keep them in fewer bits (kv_cache="int4").'
    )


def _bytes_per_token(model: Any) -> int:
    """Keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = head_dim(config.to_dict())
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)
