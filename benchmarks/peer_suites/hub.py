"""What stands for names on the hub: tiny random models, a tokenizer of bytes, data sets of TRL's columns.

A model is built once a session from a config of the family in the name; its weights follow one seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_FAMILIES = (
    "qwen3_moe", "gpt_oss", "gemma3", "mistral", "llama", "qwen2_5", "qwen2", "qwen3", "opt", "gptj", "gpt2",
    "gpt-2", "gpt_neox", "bloom",
)  # fmt: skip
_SIZE = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # keys have 32 outputs: PEFT's tests make adapters of rank 20
    "max_position_embeddings": 512,
}
_MORE = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def _family(name: str) -> str | None:
    if Path(name).exists() or "/" not in name:
        return None
    low = name.lower().replace("-", "").replace("_", "")
    return next((f for f in _FAMILIES if f.replace("-", "").replace("_", "") in low), None)


def _build(folder: Path, family: str, rewards: bool) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    target = folder / (family + "-rewards" * rewards)
    if not target.exists():
        kind = {"gemma3": "gemma3_text", "gpt-2": "gpt2", "qwen2_5": "qwen2"}.get(family, family)
        sizes = _SIZE | _MORE.get(kind, {})
        if kind in ("gpt2", "gptj"):
            sizes = {"vocab_size": 1000, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
            sizes |= {"rotary_dim": 4} if kind == "gptj" else {}
        if rewards:
            sizes |= {"num_labels": 1}
        config = AutoConfig.for_model(kind, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        auto = AutoModelForSequenceClassification if rewards else AutoModelForCausalLM
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        auto.from_config(config).eval().save_pretrained(target)
        torch.random.set_rng_state(state)
        _tokenizer().save_pretrained(target)
    return str(target)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def serve_names(folder: Path, after: Callable[[Any], None]) -> None:
    """Let ``from_pretrained`` of transformers, and ``load_dataset``, take names on the hub without it.

    Args:
        folder: where the models that stand for names are kept.
        after: called with each model that was loaded from such a name.
    """
    import datasets
    import transformers

    def served(original: Any) -> Any:
        @functools.wraps(original)
        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            family = _family(str(name))
            if family is not None:
                name = _build(folder, family, "SequenceClassification" in str(name))
                for option in ("revision", "subfolder"):
                    kwargs.pop(option, None)
            made = original.__func__(cls, name, *args, **kwargs)
            if family is not None and isinstance(made, transformers.PreTrainedModel):
                after(made)
            return made

        return classmethod(from_pretrained)

    kinds = [
        transformers.PreTrainedModel, transformers.AutoConfig, transformers.AutoTokenizer,
        transformers.AutoModelForCausalLM, transformers.GenerationConfig, transformers.AutoProcessor,
        transformers.PreTrainedConfig, transformers.PreTrainedTokenizerBase,
    ]  # fmt: skip
    for kind in kinds:
        kind.from_pretrained = served(kind.__dict__["from_pretrained"])
    datasets.load_dataset = functools.partial(_data_set, datasets.load_dataset)


def _data_set(
    original: Any, path: str, name: str | None = None, *, split: str | None = None, **kwargs: Any
) -> Any:
    from datasets import Dataset, DatasetDict

    if path != "trl-internal-testing/zen":
        return original(path, name, split=split, **kwargs)
    made = DatasetDict(
        {part: Dataset.from_list(_rows(str(name), n)) for part, n in (("train", 17), ("test", 2))}
    )
    if split is None:
        return made
    part, _, cut = split.partition("[:")
    rows = made[part] if not cut else made[part].select(range(int(cut.rstrip("]"))))
    return rows.to_iterable_dataset() if kwargs.get("streaming") else rows


def _rows(name: str, count: int) -> list[dict[str, Any]]:
    """Rows with the columns of TRL's data set of this name: "standard_preference", ..."""
    style, _, kind = name.partition("_")
    rows: list[dict[str, Any]] = []
    for i in range(count):
        asked, good, bad = f"Is {i} better than", f" {i} never was.", " it may be, right now."
        said: Any = {"prompt": asked, "good": good, "bad": bad, "text": asked + good}
        if style == "conversational":
            user = [{"role": "user", "content": asked}]
            good_turn, bad_turn = ([{"role": "assistant", "content": text}] for text in (good, bad))
            said = {"prompt": user, "good": good_turn, "bad": bad_turn, "text": user + good_turn}
        whole = {"chosen": said["text"], "rejected": said["prompt"] + said["bad"]}
        rows.append(
            {
                "language_modeling": {"messages" if style == "conversational" else "text": said["text"]},
                "prompt_only": {"prompt": said["prompt"]},
                "prompt_completion": {"prompt": said["prompt"], "completion": said["good"]},
                "preference": {"prompt": said["prompt"], "chosen": said["good"], "rejected": said["bad"]},
                "implicit_prompt_preference": whole,
                "unpaired_preference": {
                    "prompt": said["prompt"], "completion": said["good" if i % 2 else "bad"],
                    "label": bool(i % 2),
                },
            }[kind]
        )  # fmt: skip
    return rows
