"""Configurations of models that several tests predict something of."""

from __future__ import annotations

LLAMA = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
