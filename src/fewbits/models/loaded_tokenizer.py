"""A model's tokenizer: read in a thread while the weights are, then looked over and fitted to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fewbits.errors import BadCheckpoint, BadInput
from fewbits.models.options import Loading


class ReadTokenizer(NamedTuple):
    """A tokenizer as its folder has it, and its largest token id."""

    tokenizer: Any
    largest: int


def read_tokenizer(where: str, loading: Loading) -> ReadTokenizer:
    """Read the tokenizer of a folder or hub id; with 128,000 tokens that takes most of a second."""
    from transformers import AutoTokenizer

    options = {k: v for k, v in loading.hf.items() if k in ("token", "revision", "cache_dir", "subfolder")}
    local = loading.local_files_only or Path(where).is_dir()
    tokenizer = AutoTokenizer.from_pretrained(
        where, local_files_only=local, trust_remote_code=loading.trust_remote_code, **options
    )
    return ReadTokenizer(tokenizer, max(tokenizer.get_vocab().values(), default=0))


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


def set_length(model: Any, tokenizer: Any, max_seq_length: int | None) -> None:
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
