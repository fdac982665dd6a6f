"""``load_lora``, ``save_lora`` and ``fast_generate``: Unsloth's words around vLLM, on PEFT and ``generate``.

``fast_generate`` on texts follows vLLM: each prompt gets an answer object, and the base model answers unless
an adapter that ``load_lora`` returned is passed as ``lora_request``. On tensors it is ``model.generate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.host.unwrap import unwrap
from fewbits.models.adapters import load_adapter

_KNOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TAKEN = (*_KNOWN, "max_tokens", "n", "seed", "stop")
_NOT_HERE = (  # fields of vLLM's SamplingParams that would change the answers
    "presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids", "bad_words", "logit_bias",
    "allowed_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "structured_outputs", "guided_decoding",
)  # fmt: skip


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that ``load_lora`` has put beside the others; ``fast_generate`` takes it as lora_request."""

    name: str
    path: str


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt, in vLLM's words: ``output.outputs[0].text``."""

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)


def load_lora(model: Any, path: str | Path) -> LoadedAdapter:
    """Load a saved adapter beside those that a PeftModel has; what is active and what trains stays so.

    Args:
        model: a PeftModel of get_peft_model or from_pretrained.
        path: the adapter's folder.

    Returns:
        What ``fast_generate`` takes as ``lora_request``.

    Raises:
        BadInput: the model has no adapters.
        BadCheckpoint, SpecMismatch: the folder is no adapter, or one of another model.
    """
    if not hasattr(model, "peft_config"):
        raise BadInput(
            "load_lora adds an adapter to a model that has one; call get_peft_model first, or load the"
            f" adapter with FastLanguageModel.from_pretrained({str(path)!r})."
        )
    number = 1
    while (name := f"loaded_{number}") in model.peft_config:
        number += 1
    active = model.active_adapter
    training = {parameter: parameter.requires_grad for parameter in model.parameters()}
    load_adapter(model, path, adapter_name=name)
    model.set_adapter(active)
    for parameter, requires_grad in training.items():
        parameter.requires_grad_(requires_grad)
    return LoadedAdapter(name, str(path))


def save_lora(model: Any, path: str | Path) -> None:
    """Save a PeftModel's adapter into a folder.

    Raises:
        BadInput: the model has none.
    """
    if not hasattr(model, "peft_config"):
        raise BadInput("save_lora saves an adapter, and this model has none; call get_peft_model first.")
    model.save_pretrained(str(path), selected_adapters=[model.active_adapter])


def fast_generate(
    model: Any,
    prompts: Any = None,
    sampling_params: Any = None,
    lora_request: LoadedAdapter | None = None,
    **options: Any,
) -> Any:
    """Answer texts as vLLM does, or call ``model.generate`` on tensors.

    Args:
        model: what FastLanguageModel returned; it keeps the mode that it is in.
        prompts: a text or a list of texts; anything else, and nothing, goes to ``model.generate``.
        sampling_params: an object or a mapping with temperature, top_p, top_k, min_p, max_tokens, n, seed,
            stop, repetition_penalty; vLLM's SamplingParams serves. None: vLLM's defaults (temperature 1, 16
            tokens).
        lora_request: of ``load_lora``; None: the base model answers, as in vLLM.
        options: of ``model.generate``, with tensors only.

    Returns:
        A list of RequestOutput for texts, else what ``model.generate`` returns.

    Raises:
        BadInput, Unsupported: an empty list, options that vLLM has not, or a model without its tokenizer.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return model.generate(*([] if prompts is None else [prompts]), **options)
    options.pop("use_tqdm", None)
    if options:
        raise BadInput(
            f"fast_generate on texts knows no option {sorted(options)[0]!r}; put it into sampling_params."
        )
    tokenizer = _tokenizer_of(model)
    settings = _settings(sampling_params, tokenizer)
    seed = settings.pop("seed")
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), _answering(model, lora_request), _seeded(seed, model):
            return [_answer(model, tokenizer, text, settings) for text in texts]
    finally:
        for module in was_training:  # a base in evaluation mode stays in it
            module.training = True


def _answer(model: Any, tokenizer: Any, text: str, settings: Mapping[str, Any]) -> RequestOutput:
    begin = tokenizer.bos_token
    written = bool(begin) and text.startswith(begin)  # a chat template has begun the text already
    inputs = tokenizer([text], return_tensors="pt", add_special_tokens=not written).to(model.device)
    length = inputs["input_ids"].shape[1]
    rows = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **settings,
    )
    outputs = []
    for index, row in enumerate(rows):
        ids = [int(i) for i in row[length:]]
        text_of = _before(tokenizer.decode(ids, skip_special_tokens=True), settings.get("stop_strings", ()))
        outputs.append(Completion(text_of, ids, index))
    return RequestOutput(text, inputs["input_ids"][0].tolist(), outputs)


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the texts that end an answer, which vLLM does not give back."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _settings(params: Any, tokenizer: Any) -> dict[str, Any]:
    """Options of ``generate`` for vLLM's, whose defaults hold for what is not said."""

    def value(name: str, default: Any) -> Any:
        named = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
        return default if named is None else named

    named = set(params) if isinstance(params, Mapping) else {n for n in _NOT_HERE if getattr(params, n, None)}
    if unknown := sorted(map(str, named - set(_TAKEN))):
        raise BadInput(
            f"sampling_params has {unknown[0]!r}, which fast_generate does not know; it knows"
            f" {', '.join(_TAKEN)}, and model.generate more, by transformers' names."
        )
    settings: dict[str, Any] = {
        "max_new_tokens": value("max_tokens", 16),
        "num_return_sequences": value("n", 1),
        "seed": value("seed", None),
        "use_cache": True,
    }
    temperature = float(value("temperature", 1.0))
    settings["do_sample"] = temperature > 0
    values = {name: value(name, None) for name in _KNOWN}
    values["temperature"] = temperature
    if values["top_k"] in (-1, None):
        values["top_k"] = 0  # all tokens
    names = _KNOWN if temperature > 0 else ("repetition_penalty",)
    settings |= {name: values[name] for name in names if values[name] is not None}
    if stop := value("stop", None):
        settings |= {"stop_strings": [stop] if isinstance(stop, str) else list(stop), "tokenizer": tokenizer}
    return settings


def _tokenizer_of(model: Any) -> Any:
    base = unwrap(model)
    tokenizer = base.__dict__.get("fewbits_tokenizer")
    if tokenizer is None:
        raise Unsupported(
            "fast_generate on texts needs the model's tokenizer, which is known for models that"
            " FastLanguageModel.from_pretrained loaded; pass tensors to model.generate instead."
        )
    return tokenizer


@contextmanager
def _answering(model: Any, request: LoadedAdapter | None) -> Iterator[None]:
    """With the requested adapter alone, or with none; what trains and what is active comes back."""
    if not hasattr(model, "peft_config"):
        if request is not None:
            raise BadInput("lora_request names an adapter, and this model has none; call get_peft_model.")
        yield
        return
    if request is None:
        with model.disable_adapter():
            yield
        return
    name = getattr(request, "name", None)
    if name not in model.peft_config:
        raise BadInput(f"lora_request is {request!r}; pass what this model's load_lora returned.")
    active = model.active_adapter
    training = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(active)
        for parameter, requires_grad in training:
            parameter.requires_grad_(requires_grad)


@contextmanager
def _seeded(seed: int | None, model: Any) -> Iterator[None]:
    if seed is None:
        yield
        return
    devices: Sequence[Any] = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


__all__ = ["Completion", "LoadedAdapter", "RequestOutput", "fast_generate", "load_lora", "save_lora"]
