"""A model's tokenizer: read in a thread while the weights are, then looked over and fitted to the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.errors import BadCheckpoint, BadInput
from fewbits.models.loading.options import Loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEGINNING = 1 << 20  # bytes of tokenizer.json in which its added tokens are looked for
_BLANK = re.compile(r"[ \t\n\r]*")
_SAYS_MORE = ("added_tokens_decoder", "auto_map", "fast_tokenizer_files")  # words of tokenizer_config.json
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that take tokenizer.json as it stands
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")  # that a class may read in its place


class ReadTokenizer(NamedTuple):
    """A tokenizer as its folder has it, and its largest token id."""

    tokenizer: Any
    largest: int


def read_tokenizer(where: str, loading: Loading) -> ReadTokenizer:
    """Read the tokenizer of a folder or hub id; with 128,000 tokens that takes most of a second."""
    from transformers import AutoTokenizer

    options = {k: v for k, v in loading.hf.items() if k in ("token", "revision", "cache_dir", "subfolder")}
    local = loading.local_files_only or Path(where).is_dir()
    options |= {"local_files_only": local, "trust_remote_code": loading.trust_remote_code}
    backend: dict[str, Any] = {}
    if "subfolder" not in options:
        options |= written_added_tokens(Path(where))
        backend = parsed_backend(Path(where))
    tokenizer = AutoTokenizer.from_pretrained(where, **options, **backend)
    if backend and type(tokenizer).__name__ not in _GENERAL:  # this model needs another class
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    return ReadTokenizer(tokenizer, _largest_id(tokenizer))


class _HandedOver:
    """A value that is its own deep copy, for a caller who needs no second one of what nobody else has."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return self.value


def parsed_backend(folder: Path) -> dict[str, Any]:
    """What makes ``AutoTokenizer.from_pretrained`` take tokenizer.json parsed once; {} where it reads others.

    transformers up to 5.17 parses the file, and then copies the tokenizer, which writes it all out as JSON
    and parses that: of 128,000 words 0.73 s in all instead of 0.36, with the interpreter's lock held.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    file = folder / "tokenizer.json"
    if (
        not isinstance(config, dict)
        or not file.is_file()
        or any((folder / name).exists() for name in _OTHERS)
    ):
        return {}
    is_general = config.get("tokenizer_class") in _GENERAL and config.get("backend") in (None, "tokenizers")
    if not is_general or any(name in config for name in ("auto_map", "fast_tokenizer_files")):
        return {}
    from tokenizers import Tokenizer

    return {"tokenizer_object": _HandedOver(Tokenizer.from_file(str(file))), "tokenizer_file": ""}


def _largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Of its tokens; where they have the first ids without a gap, as mostly, without a table of all words."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        count = backend.get_vocab_size(with_added_tokens=True)
        if count and None not in map(backend.id_to_token, range(count)):
            return int(count - 1)
    return max(tokenizer.get_vocab().values(), default=0)


def written_added_tokens(folder: Path) -> dict[str, Any]:
    """``added_tokens_decoder`` for a tokenizer's ``from_pretrained``, as tokenizer.json has it; {} otherwise.

    Where tokenizer_config.json does not name them, transformers parses the whole of tokenizer.json, megabytes
    of words, for the few added tokens near its beginning, and then has it parsed once more.
    """
    others = ("added_tokens.json", "special_tokens_map.json", "tekken.json")  # transformers reads them too
    try:
        if any((folder / other).exists() for other in others):
            return {}
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or any(name in config for name in _SAYS_MORE):
            return {}
        kind = str(config.get("tokenizer_class"))
        if config.get("backend") != "tokenizers" and not kind.endswith(("Fast", "TokenizersBackend")):
            return {}  # it may be one of Python's, for which that file means nothing
        with (folder / "tokenizer.json").open("rb") as stream:
            begin = stream.read(_BEGINNING).decode(errors="ignore")
        tokens = _value_of("added_tokens", begin)
        from tokenizers import AddedToken

        decoder = {token.pop("id"): AddedToken(**token) for token in tokens}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}  # whatever is wrong with these files, transformers finds it and says so
    return {"added_tokens_decoder": decoder}


def _value_of(name: str, text: str) -> Any:
    """The value of a key of a JSON object, of which ``text`` is the beginning.

    Raises:
        ValueError, IndexError: it does not stand there.
    """
    decoder, at = json.JSONDecoder(), _after("{", text, 0)
    while True:
        key, at = decoder.raw_decode(text, at)
        value, end = decoder.raw_decode(text, _after(":", text, at))
        if key == name:
            return value
        at = _after(",", text, end)


def _after(mark: str, text: str, at: int) -> int:
    """Where the next word begins behind a mark, which is next in the text."""
    at = _blank(text, at)
    if text[at] != mark:
        raise ValueError(f"no {mark}")
    return _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return at if match is None else match.end()


def fitted(read: ReadTokenizer, where: str, model: Any, loading: Loading) -> Any:
    """The tokenizer of a loaded model, with a padding token; ``loading`` takes the note of it.

    Raises:
        BadCheckpoint: it has tokens for which the model has no embedding.
    """
    tokenizer, largest = read
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows and not loading.resize_model_vocab:
        raise BadCheckpoint(
            f"the tokenizer of {where} has token ids up to {largest:,}, but the embedding has {rows:,} "
            f"rows; use the tokenizer that belongs to the model, or pass resize_model_vocab={largest + 1}."
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        loading.notes.append(
            f"the tokenizer has no padding token; its end-of-text token {tokenizer.eos_token!r} pads."
        )
    return tokenizer


def adapters_own(adapter: Path, fallback: Any) -> Any:
    """The tokenizer that lies beside an adapter; ``fallback`` if there is none."""
    from transformers import AutoTokenizer

    if not (adapter / "tokenizer_config.json").is_file():
        return fallback
    return AutoTokenizer.from_pretrained(str(adapter), local_files_only=True)


def set_length(model: Any, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None) -> None:
    """Give model and tokenizer the longest sequence; None: what the model was trained for.

    Raises:
        BadInput: it is more than that.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_seq_length is not None and positions is not None and max_seq_length > positions:
        raise BadInput(
            f"max_seq_length={max_seq_length} is more than the {positions} positions that the model was "
            f"trained for; pass at most {positions}."
        )
    model.max_seq_length = max_seq_length or positions
    if model.max_seq_length is not None:
        tokenizer.model_max_length = model.max_seq_length
