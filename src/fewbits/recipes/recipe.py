"""A recipe says which format goes where. Pure data over formats: it knows no module and no model."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from fewbits.formats.base import Format
from fewbits.formats.kv_cache import KVCache


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Formats of one linear layer; None keeps the dtype that the model has.

    Attributes:
        weight: the format in which the (frozen) weight is stored. None: an ordinary, trainable weight.
        weight_operand: the format to which the weight is brought for the product.
        activation: the format of the layer's input in the product.
        gradient: the format of the output gradient in the products of the backward pass.
    """

    weight: Format | None = None
    weight_operand: Format | None = None
    activation: Format | None = None
    gradient: Format | None = None

    @property
    def is_plain(self) -> bool:
        """True if the layer is left as it is."""
        return self == Rule()


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021), in PEFT's terms.

    Attributes:
        r: rank.
        alpha: the branch is scaled by alpha / r, or by alpha / sqrt(r) with ``rslora``.
        dropout: probability of dropping an input of the branch while training.
        targets: names of the adapted linears, or "all-linear": all of the decoder layers'.
        bias: "none", "all" or "lora_only": which biases train.
        rslora: rank-stabilised scaling (Kalajdzievski 2023).
    """

    r: int = 16
    alpha: float = 16
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    bias: str = "none"
    rslora: bool = False


@dataclass(frozen=True, kw_only=True)
class QAT:
    """Quantisation-aware training: the forward pass sees rounded values, gradients pass straight through.

    Attributes:
        weight: the format in which the weights will be stored after training.
        activation: the format of the layers' inputs, or None.
    """

    weight: Format
    activation: Format | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which format where, for a whole model.

    Attributes:
        name: what-how, as in "qlora_nf4".
        linear: the rule of every linear in the decoder layers.
        head: the output head. ``weight`` is the format in which it is stored; a head that shares its weight
            with the embeddings becomes a packed copy of them. The other formats are those of the operands in
            its products where a training step computes the loss without logits
            (`fewbits.decoder.fuse.fuse`); logits that one reads are computed without them.
        overrides: (glob over the full name, rule) pairs; the first that matches wins over ``linear``.
        skip: globs over full names of linears that are left alone.
        lora: adapters to add, or None.
        qat: fake quantisation while training, or None.
        kv_cache: formats of stored keys and values in `generate`; None: as the model computes them.
        communication: format in which gradients travel between ranks.
    """

    name: str
    linear: Rule = Rule()
    head: Rule = Rule()
    overrides: tuple[tuple[str, Rule], ...] = ()
    skip: tuple[str, ...] = ()
    lora: LoRA | None = None
    qat: QAT | None = None
    kv_cache: KVCache | None = None
    communication: Format | None = None

    @property
    def packs(self) -> bool:
        """Whether it stores weights packed, which are not trained: adapters on them are."""
        rules = (self.linear, self.head, *(rule for _, rule in self.overrides))
        return any(rule.weight is not None for rule in rules)

    def rule_for(self, name: str) -> Rule:
        """The rule for the linear with this full name, such as ``model.layers.0.self_attn.q_proj``."""
        named = self.named_rule(name)
        return self.linear if named is None else named

    def rule_for_head(self, name: str) -> Rule:
        """The rule of the output head, which has this full name: an override's, or ``head.weight``."""
        named = self.named_rule(name)
        return Rule(weight=self.head.weight) if named is None else named

    def named_rule(self, name: str) -> Rule | None:
        """What ``skip`` or an override says of a linear by its name; None: neither names it."""
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            return Rule()
        return next((rule for pattern, rule in self.overrides if fnmatchcase(name, pattern)), None)
