"""The output head in few bits: which rule a recipe gives it, and what becomes of a tie with the embeddings.

Decoding one text reads every weight once a token, and in 16 bits the head is the largest matrix of a packed
model: 1.05 of the 5.3 GB of an 8B model in NF4. ``head: {weight: int8}`` in a recipe packs it.

Many small models have no weight of their own in the head: it is the embedding table, of which a text reads
one row a token. Packing such a head makes a packed copy and leaves the table alone; the copy takes memory,
and each token reads fewer bytes. From then on the two are different weights, and the config says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fewbits.families.spec import ModelSpec
from fewbits.host.spec import find, locate
from fewbits.recipes import Recipe, Rule


@dataclass(frozen=True)
class HeadRule:
    """What a recipe does with the output head of a model.

    Attributes:
        name: the head's full name.
        rule: its rule; plain where it stays as it is.
        is_tied: its weight is the embedding's.
    """

    name: str
    rule: Rule
    is_tied: bool


def head_rule(model: nn.Module, spec: ModelSpec, recipe: Recipe) -> HeadRule | None:
    """What ``recipe`` does with the head of ``model``, which may lie on the meta device; None without one."""
    name = locate(model, spec, spec.head)
    head: Any = find(model, name)
    if head is None:
        return None
    embedding: Any = find(model, locate(model, spec, spec.embed))
    shared = getattr(head, "weight", None) is getattr(embedding, "weight", None)
    is_plain = type(head) is nn.Linear
    is_tied = is_plain and (
        shared or any(_says_tied(config) for config in _parts(getattr(model, "config", None)))
    )
    rule = recipe.rule_for_head(name) if is_plain else Rule()
    if is_tied and (rule.weight is None or recipe.qat is not None):
        rule = Rule()  # what trains stays one weight
    return HeadRule(name, rule, is_tied)


def untie(model: nn.Module, name: str) -> None:
    """Say that the head ``name``, which is packed now, has a weight of its own."""
    for config in _parts(model.config):
        if _says_tied(config):
            config.tie_word_embeddings = False
    (getattr(model, "all_tied_weights_keys", None) or {}).pop(f"{name}.weight", None)


def tie_again(model: nn.Module, spec: ModelSpec, name: str, head: nn.Linear) -> None:
    """Undo `untie`: ``head``, the plain linear in its place, has the embedding's weight again."""
    embed = locate(model, spec, spec.embed)
    embedding: Any = find(model, embed)
    head.weight = embedding.weight
    say_tied(model.config)
    keys = getattr(model, "all_tied_weights_keys", None)
    if keys is not None:
        keys[f"{name}.weight"] = f"{embed}.weight"


def say_tied(config: Any) -> None:
    """Say in a model's config that its head has the embedding's weight."""
    for part in _parts(config):
        part.tie_word_embeddings = True


def _parts(config: Any) -> list[Any]:
    """The config, and that of the text model inside it where it is another."""
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [] if config is None else [config] if inner is config else [config, inner]


def _says_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


__all__ = ["HeadRule", "head_rule", "say_tied", "tie_again", "untie"]
