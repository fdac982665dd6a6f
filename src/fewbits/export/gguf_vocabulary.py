"""A tokenizer in GGUF's terms: tokens with types and scores or merges, special ids, the chat template.

llama.cpp has its own tokenizers and knows two that the families here use: ``llama`` (sentencepiece's pair
merging: a pair is joined if the joined token has the best score) and ``gpt2`` (bytes, a regular expression
that cuts the text first, merges by rank). The expression is compiled into llama.cpp under a name,
``tokenizer.ggml.pre``; a tokenizer whose expression is not recognised is refused, because a file with a wrong
name loads and silently answers worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewbits.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The expression that cuts the text, and llama.cpp's name for it.
EXPRESSIONS = {
    _CONTRACTIONS + _WORD + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + _WORD + r"\p{N}" + _REST: "qwen2",
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ): "tekken",
}
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer.

    Attributes:
        model: "llama" or "gpt2".
        pre: llama.cpp's name of what cuts the text.
        tokens: the text of each id; as many as the embedding has rows.
        types: of each token, a ``gguf.TokenType``.
        scores: of each token, for "llama"; None for "gpt2".
        merges: "left right", best first, for "gpt2"; None for "llama".
        special: ids by name ("bos", "eos", "eot", ...).
        adds: whether an encoded text begins with BOS and ends with EOS, and (for "llama") with a space before
            it: "bos", "eos", "space_prefix".
        chat_template: Jinja, or None.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None
    merges: tuple[str, ...] | None
    special: Mapping[str, int]
    adds: Mapping[str, bool]
    chat_template: str | None


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int, stops: Sequence[int] = ()) -> Vocabulary:
    """Read a tokenizer of transformers.

    Args:
        tokenizer: with a ``backend_tokenizer`` (a fast one).
        rows: rows of the model's embedding; ids that the tokenizer does not use become placeholders.
        stops: ids at which the model's generation config ends a text.

    Raises:
        BadInput: the tokenizer has ids beyond the embedding.
        Unsupported: llama.cpp has no such tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise Unsupported(
            f"{type(tokenizer).__name__} has no tokenizer.json behind it, which GGUF is written from; load "
            "the model's fast tokenizer."
        )
    described = json.loads(backend.to_str())
    model = described["model"]
    if model.get("type") != "BPE":
        raise Unsupported(
            f"the tokenizer is of the kind {model.get('type')!r}, and only BPE is written to GGUF; there is "
            "no other way out yet."
        )
    tokens, types = _tokens(described, rows)
    by_bytes = not model.get("byte_fallback")
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    adds = _adds(tokenizer)
    if not by_bytes:
        adds["space_prefix"] = _has_space_prefix(described)
    return Vocabulary(
        model="gpt2" if by_bytes else "llama",
        pre=_pre_name(described) if by_bytes else "default",
        tokens=tokens,
        types=types,
        scores=None if by_bytes else _scores(tokens, merges),
        merges=tuple(" ".join(pair) for pair in merges) if by_bytes else None,
        special=_special_ids(tokenizer, stops),
        adds=adds,
        chat_template=_template(tokenizer),
    )


def _tokens(described: Mapping[str, Any], rows: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    texts: dict[int, str] = {number: text for text, number in described["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, _NORMAL)
    unknown = described["model"].get("unk_token")
    if described["model"].get("byte_fallback"):
        kinds.update({n: _BYTE for n, t in texts.items() if len(t) == 6 and t.startswith("<0x")})
    for added in described.get("added_tokens", ()):
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    kinds.update({n: _UNKNOWN for n, t in texts.items() if t == unknown})
    if max(texts) >= rows:
        raise BadInput(
            f"the tokenizer has ids up to {max(texts):,} and the embedding {rows:,} rows; resize the model's "
            "vocabulary, or use its own tokenizer."
        )
    return (
        tuple(texts.get(n, f"[PAD{n}]") for n in range(rows)),
        tuple(kinds.get(n, _UNUSED) for n in range(rows)),
    )


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> tuple[float, ...]:
    """Sentencepiece's scores from the order of the merges: a token is the better, the earlier it is made."""
    order: dict[str, int] = {}
    last = None
    for pair in merges:
        joined = "".join(pair)
        if joined in order and joined != last:
            raise Unsupported(
                f"the tokenizer makes {joined!r} by merges of different rank, which llama.cpp's "
                "sentencepiece tokenizer cannot do; such a tokenizer has no GGUF form."
            )
        order.setdefault(joined, len(order))
        last = joined
    return tuple(-float(order[token]) if token in order else 0.0 for token in tokens)


def _pre_name(described: Mapping[str, Any]) -> str:
    """llama.cpp's name for what cuts the text before the merges."""
    step = described.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step]) if step.get("type") == "Sequence" else [step]
    kinds = [s.get("type") for s in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        expression = steps[0].get("pattern", {}).get("Regex", "")
        if expression in EXPRESSIONS:
            return EXPRESSIONS[expression]
    raise Unsupported(
        f"the tokenizer cuts text by {' and '.join(map(str, kinds))} in a way that has no name known here in "
        "llama.cpp; such a tokenizer cannot be written to GGUF yet."
    )


def _has_space_prefix(described: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text: by a normalizer, or by the pre-tokenizer Metaspace."""
    normalizer = described.get("normalizer") or {}
    parts = normalizer.get("normalizers", [normalizer])
    metaspace = described.get("pre_tokenizer") or {}
    return any(p.get("type") == "Prepend" for p in parts) or (
        metaspace.get("type") == "Metaspace" and metaspace.get("prepend_scheme", "always") != "never"
    )


def _adds(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    ids = list(tokenizer("a")["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {
        "bos": bos is not None and len(ids) > 1 and ids[0] == bos,
        "eos": eos is not None and len(ids) > 1 and ids[-1] == eos,
    }


def _special_ids(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> dict[str, int]:
    of_tokenizer = {name: getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
    ids = {name: int(number) for name, number in of_tokenizer.items() if number is not None}
    if "eos" not in ids:
        raise BadInput("the tokenizer has no end-of-text token, so no text would end; set its eos_token.")
    other = [n for n in stops if n not in (ids["eos"], ids.get("bos"))]
    if other:
        ids["eot"] = int(other[0])
    return ids


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template
