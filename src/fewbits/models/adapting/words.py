"""``load_lora``, ``unload_lora``, ``save_lora``, ``fast_generate``: vLLM's words, on PEFT and ``generate``.

``fast_generate`` on texts follows vLLM: each prompt gets an answer object, and the base model answers unless
an adapter that ``load_lora`` returned is passed as ``lora_request``. On tensors it is ``model.generate``.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.host.record import part_of, put_part
from fewbits.host.unwrap import unwrap
from fewbits.models.adapting.adapters import load_adapter

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

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


@dataclass
class LoadedAdapters:
    """The adapters that ``load_lora`` has put on one model.

    Attributes:
        by_name: where each came from, and a hash of its files.
    """

    by_name: dict[str, tuple[str, str]] = field(default_factory=dict)


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

    A folder that is loaded again gives the same adapter if its files are what they were; if they have changed
    (a loop that trains, saves and loads), the new ones take the old one's place, which is freed.

    Args:
        model: a PeftModel of get_peft_model or from_pretrained.
        path: the adapter's folder.

    Returns:
        What ``fast_generate`` takes as ``lora_request``, and ``unload_lora``.

    Raises:
        BadInput: the model has no adapters.
        BadCheckpoint, SpecMismatch: the folder is no adapter, or one of another model.
    """
    if not hasattr(model, "peft_config"):
        raise BadInput(
            "load_lora adds an adapter to a model that has one; call get_peft_model first, or load the"
            f" adapter with FastLanguageModel.from_pretrained({str(path)!r})."
        )
    loaded = part_of(model, LoadedAdapters) or LoadedAdapters()
    put_part(model, loaded)
    place, content = str(Path(path).resolve()), _hash_of(Path(path))
    of_place = [
        name for name, (where, _) in loaded.by_name.items() if where == place and name in model.peft_config
    ]
    for name in of_place:
        if loaded.by_name[name][1] == content:
            return LoadedAdapter(name, str(path))
    number = 1
    while (name := f"loaded_{number}") in model.peft_config or name in loaded.by_name:
        number += 1
    with _as_before(model):
        load_adapter(model, path, adapter_name=name)
    loaded.by_name[name] = (place, content)
    for earlier in of_place:
        unload_lora(model, LoadedAdapter(earlier, place))
    return LoadedAdapter(name, str(path))


def unload_lora(model: Any, adapter: LoadedAdapter) -> None:
    """Take an adapter that ``load_lora`` has loaded off the model again, and free its memory.

    Raises:
        BadInput: it is none of them, or not there any more.
    """
    loaded = part_of(model, LoadedAdapters)
    name = getattr(adapter, "name", None)
    if loaded is None or name not in loaded.by_name or name not in model.peft_config:
        raise BadInput(f"{adapter!r} is no adapter that this model's load_lora has loaded, or it was freed.")
    if name in model.active_adapters:
        raise BadInput(
            f"{adapter!r} is an active adapter; activate another one with model.set_adapter first."
        )
    with _as_before(model):
        model.delete_adapter(name)


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """What is active and what trains comes back."""
    active, together = model.active_adapter, list(model.active_adapters)
    training = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        model.set_adapter(active)
        if together != [active]:  # as base_model.set_adapter takes several, which PeftModel's own does not
            model.base_model.set_adapter(together)
        for parameter, requires_grad in training:
            parameter.requires_grad_(requires_grad)


def _hash_of(folder: Path) -> str:
    """Of an adapter's settings and weights; of a folder without them none, which loading tells."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def save_lora(model: Any, path: str | Path) -> None:
    """Save a PeftModel's active adapter into a folder, itself and not one below it, whatever its name.

    Raises:
        BadInput: the model has none, or several are active.
    """
    if not hasattr(model, "peft_config"):
        raise BadInput("save_lora saves an adapter, and this model has none; call get_peft_model first.")
    name, *others = model.active_adapters
    if others:
        raise BadInput(
            f"save_lora saves one adapter, and {', '.join(model.active_adapters)} are active; choose one with"
            " model.set_adapter, or call model.save_pretrained, which gives each a folder of its own."
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".save_lora_", dir=folder) as beside:
        model.save_pretrained(beside, selected_adapters=[name])
        for written in (Path(beside) / ("" if name == "default" else name)).iterdir():
            written.replace(folder / written.name)


def fast_generate(
    model: Any,
    prompts: Any = None,
    sampling_params: Any = None,
    lora_request: LoadedAdapter | Sequence[LoadedAdapter | None] | None = None,
    **options: Any,
) -> Any:
    """Answer texts as vLLM does, or call ``model.generate`` on tensors.

    Args:
        model: what FastLanguageModel returned; it keeps the mode that it is in.
        prompts: a text or a list of texts; anything else, and nothing, goes to ``model.generate``.
        sampling_params: an object or a mapping with temperature, top_p, top_k, min_p, max_tokens, n, seed,
            stop, repetition_penalty; vLLM's SamplingParams serves. None: vLLM's defaults (temperature 1, 16
            tokens).
        lora_request: of ``load_lora``, or one for each text; None: the base model answers, as in vLLM.
        options: of ``model.generate``, with tensors only.

    Returns:
        A list of RequestOutput for texts, else what ``model.generate`` returns.

    Raises:
        BadInput, Unsupported: an empty list, options that vLLM has not, other requests than texts, or a model
            without its tokenizer.
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
    requests = _of_each(lora_request, texts)
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        answers = []
        with torch.no_grad(), _seeded(seed, model):
            for request, some in groupby(zip(requests, texts, strict=True), key=itemgetter(0)):
                with _answering(model, request):
                    answers += [_answer(model, tokenizer, text, settings) for _, text in some]
        return answers
    finally:
        for module in was_training:  # a base in evaluation mode stays in it
            module.training = True


def _of_each(request: Any, texts: Sequence[str]) -> list[Any]:
    """The request of each text."""
    if not isinstance(request, (list, tuple)):
        return [request] * len(texts)
    if len(request) != len(texts):
        raise BadInput(
            f"lora_request has {len(request)} entries, and there are {len(texts)} texts; give as many."
        )
    return list(request)


def _answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str, settings: Mapping[str, Any]
) -> RequestOutput:
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


def _settings(params: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
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


def _tokenizer_of(model: nn.Module) -> Any:
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
        loaded = part_of(model, LoadedAdapters)
        freed = loaded is not None and name in loaded.by_name
        why = ", which was freed (its folder was loaded anew, or unload_lora called)" if freed else ""
        raise BadInput(f"lora_request is {request!r}{why}; pass what this model's load_lora returned.")
    with _as_before(model):
        model.set_adapter(name)
        yield


@contextmanager
def _seeded(seed: int | None, model: Any) -> Iterator[None]:
    if seed is None:
        yield
        return
    devices: Sequence[Any] = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


__all__ = [
    "Completion",
    "LoadedAdapter",
    "RequestOutput",
    "fast_generate",
    "load_lora",
    "save_lora",
    "unload_lora",
]
