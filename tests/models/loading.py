"""Tiny model folders for the loading tests: ``save_tiny(folder)`` writes weights, config and a tokenizer."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

from tests import peers
from tests.models.tiny import VOCAB, tiny


def tokenizer() -> Any:
    """A character tokenizer of exactly VOCAB ids, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable[:95] if c not in "\t\n\r"] + ["\n"]
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for c in characters:
        if len(vocabulary) < VOCAB:
            vocabulary[c] = len(vocabulary)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    return made


def save_tiny(folder: Path, model_type: str = "llama", *, shard: str = "5GB", **changes: Any) -> Any:
    """Write a tiny model with its tokenizer to ``folder``; returns the model."""
    model = tiny(model_type, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    return model


def packed_state(model: Any) -> dict[str, torch.Tensor]:
    """Every packed part of a model."""
    from fewbits.nn.linear import QuantizedLinear

    return {
        f"{name}.{part}": tensor
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
        for part, tensor in module.packed.parts.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
    )


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits without gradients, in float32; of PEFT's own layers alone, those that it gives twice."""
    with torch.no_grad():
        return peers.steady_peft(model, lambda: model(input_ids=ids).logits.float())


def perturb(peft_model: Any, *, scale: float = 0.2, seed: int = 3) -> Any:
    """Give every LoRA B random values, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return peft_model
