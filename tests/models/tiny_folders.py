"""Folders of tiny models with tokenizers of two kinds, as exports and GGUF files need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.tiny import tiny

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


def rows_file(folder: Path) -> Path:
    """Calibration text."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f'{{"text": "the cat {n} sat on the mat, {n} times"}}\n' for n in range(40)))
    return file


def byte_tokenizer(kind: str = "qwen2") -> Any:
    """A byte-level BPE tokenizer of fewer than 512 tokens; ``kind`` chooses what cuts the text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from fewbits.export.gguf_vocabulary import EXPRESSIONS

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: n for n, c in enumerate([*alphabet, "th", "the", "Ġa"])}
    backend = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "a")]))
    expression = next((e for e, name in EXPRESSIONS.items() if name == kind), r"\w+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    return made


def pair_tokenizer() -> Any:
    """A tokenizer as sentencepiece's: bytes as a last resort, merges by score, BOS first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁theas", "th", "▁th", "▁the"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e")]
    vocabulary = {name: n for n, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.ByteFallback()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def saved(folder: Path, family: str, tokenizer: Any, **changes: Any) -> Path:
    tiny(family, **{**SIZES, **changes}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
