"""What a call of ``generate`` asks for: whether loop.py's loop does it, and if not, why."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.host.unwrap import unwrap
from fewbits.host.walks import all_modules
from fewbits.models.generation.own_caches import continues
from fewbits.models.generation.step import why_not

# Arguments of generate that ask for something else than one token a step from a cache of the loop's own.
_OTHER_WAYS = {
    "custom_generate": None,
    "past_key_values": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "use_cache": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "synced_gpus": False,
}
# Caches on the device, in the model's dtype: a step's own is such a one. All but the first are former names.
_STATIC = ("static", "hybrid", "hybrid_chunked", "sliding_window")
_OTHER_CACHES = {
    "quantized": ', by other packages; kv_cache="int4" or "int8" keeps keys and values in few bits here',
    "paged": ", which is transformers' continuous batching; fewbits.generate_many is ours",
}
# What transformers hands a loop beside the ids: read here, or of no consequence for it.
_READ_HERE = {
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "tokenizer",
}


def option_of(model: nn.Module, arguments: dict[str, Any], name: str) -> Any:
    """What a call says to one word of ``generate``, or its generation config, or the model's."""
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def other_speculation(model: Any, arguments: dict[str, Any]) -> str:
    """Why guesses are transformers' own business; "" if nobody guesses, or this loop can verify."""
    draft, lookup = arguments.get("assistant_model"), option_of(model, arguments, "prompt_lookup_num_tokens")
    if draft is None and not lookup:
        return ""
    if option_of(model, arguments, "do_sample"):
        return "guesses of tokens that are drawn are verified there"
    ids = next((arguments[name] for name in ("inputs", "input_ids") if arguments.get(name) is not None), None)
    if ids is None or len(ids) * (option_of(model, arguments, "num_return_sequences") or 1) != 1:
        return "guesses are for one text at a time"
    if draft is None:
        return ""
    if arguments.get("assistant_tokenizer") is not None or lookup:
        return (
            "the draft model has another tokenizer" if not lookup else "two ways of guessing were asked for"
        )
    draft = unwrap(draft)
    sizes = {m.config.get_text_config().vocab_size for m in (model, draft)}
    reason = "it has another vocabulary" if len(sizes) > 1 else why_not(draft) or drops(draft)
    return f"the draft model has no step ({reason})" if reason else ""


def with_stop_strings(keywords: dict[str, Any]) -> dict[str, Any]:
    """The call's stop strings as a stopping criterion.

    transformers takes the tokenizer that it needs for them out of a call that has a loop from outside.
    """
    if not keywords.get("stop_strings") or keywords.get("tokenizer") is None:
        return keywords
    from transformers import StoppingCriteriaList, StopStringCriteria

    rest = {name: value for name, value in keywords.items() if name != "stop_strings"}
    stop = StopStringCriteria(stop_strings=keywords["stop_strings"], tokenizer=keywords["tokenizer"])
    return {**rest, "stopping_criteria": StoppingCriteriaList([*(rest.get("stopping_criteria") or ()), stop])}


def _other_cache(model: nn.Module, arguments: dict[str, Any]) -> str:
    """Why the kind of cache that a call names is none of this loop's; "" if it is, or none is named."""
    name = option_of(model, arguments, "cache_implementation")
    if name in (None, "dynamic", *_STATIC):
        return ""
    why = _OTHER_CACHES.get(name, ", which keeps them on the host" if "offloaded" in str(name) else "")
    return f"the call asks for cache_implementation={name!r}{why}"


def other_way(model: Any, arguments: dict[str, Any]) -> str:
    """What a call asks for that this loop does not do; "" if nothing.

    What a call leaves open its generation config says, and what that leaves open the model's.
    """
    configs = (arguments.get("generation_config"), model.generation_config)
    for name, usual in _OTHER_WAYS.items():
        chosen = option_of(model, arguments, name)
        embedded = arguments.get("inputs_embeds") is not None
        if name == "past_key_values" and chosen is not None and continues(chosen) and not embedded:
            continue
        same = chosen is None or chosen is usual or (usual is None and chosen is False)
        if not same and (isinstance(chosen, Tensor) or chosen != usual):
            return f"the call asks for {name}"
    reason = _other_cache(model, arguments)
    if reason:
        return reason
    if any(getattr(config, "stop_strings", None) for config in configs):
        return "a generation config has stop_strings"
    prepare: Any = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "the model's inputs are prepared by another library (PEFT's prompt learning)"
    return ""


def drops(model: nn.Module) -> str:
    """Whether the model is in training mode and something in it drops values; "" if not."""
    for module in all_modules(model):
        if not module.training:
            continue
        share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if share:
            return "the model is in training mode and has dropout"
    return ""


def speculates(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a call of ``generate`` asks for guesses."""
    lookup = option_of(model, arguments, "prompt_lookup_num_tokens")
    return bool(lookup) or arguments.get("assistant_model") is not None


def check_keywords(model: nn.Module, input_ids: Tensor, padding: Tensor, keywords: dict[str, Any]) -> None:
    """Raise `Unsupported` for what the model's own forward would be given and this loop does not give it.

    Args:
        model: the model.
        input_ids: (batch, length); only the shape and the device count where there are vectors.
        padding: (batch,) tokens in front of each.
        keywords: what transformers hands to a loop.
    """
    others = sorted(name for name in keywords.keys() - _READ_HERE if keywords[name] is not None)
    if others:
        raise Unsupported(f"the call passes {', '.join(others)} to the model.")
    if input_ids.device != model.device:
        raise Unsupported("the prompts are not on the model's device.")
    places = torch.arange(input_ids.shape[1], device=input_ids.device) - padding[:, None]
    positions = keywords.get("position_ids")
    if positions is None:
        return
    if positions.shape[-1] != places.shape[-1] or bool(
        ((positions.to(places) != places) & (places >= 0)).any()
    ):
        raise Unsupported("the call passes position_ids of its own.")
