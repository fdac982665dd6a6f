"""Learning rates of their own for some parameters: embeddings and head, and LoRA+'s for B."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from fewbits.errors import BadInput

if TYPE_CHECKING:
    from torch.optim import Optimizer

_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


def is_embedding(name: str) -> bool:
    """Whether a parameter of this name belongs to an embedding or an output head."""
    return any(part in _EMBEDDINGS for part in name.split("."))


def set_embeddings_apart(optimizer: Optimizer, model: nn.Module, rate: float) -> None:
    """Give the embeddings and the head that train groups of their own, with this learning rate.

    Raises:
        BadInput: none of them trains.
    """
    chosen = [p for name, p in _trained(model) if is_embedding(name)]
    if not chosen:
        raise BadInput(
            "embedding_learning_rate is set, but neither embeddings nor head train; name them in"
            ' target_modules or modules_to_save, as in modules_to_save=["embed_tokens", "lm_head"].'
        )
    _set_apart(optimizer, chosen, rate)


def set_lora_plus(optimizer: Optimizer, model: nn.Module, ratio: float) -> None:
    """Give B, and biases beside adapters, ``ratio`` times their learning rate.

    LoRA+ (Hayou et al. 2024, arXiv 2402.12354), as ``peft.optimizers.create_loraplus_optimizer`` sorts them;
    adapters on embeddings stay as they are.

    Raises:
        BadInput: the model has no adapters.
    """
    chosen = [p for n, p in _trained(model) if "lora_B" in n or (p.ndim == 1 and not is_embedding(n))]
    if not any("lora_B" in name for name, _ in _trained(model)):
        raise BadInput("lora_plus_ratio is set, but there are no adapters; leave it out, or set lora_r.")
    for group_rate in sorted({group["lr"] for group in optimizer.param_groups}):
        members = {id(p) for g in optimizer.param_groups if g["lr"] == group_rate for p in g["params"]}
        _set_apart(optimizer, [p for p in chosen if id(p) in members], group_rate * ratio)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _set_apart(optimizer: Optimizer, chosen: Iterable[nn.Parameter], rate: float) -> None:
    """New groups with another learning rate; everything else of the groups stays."""
    numbers = {id(p) for p in chosen}
    for group in list(optimizer.param_groups):
        apart = [p for p in group["params"] if id(p) in numbers]
        if apart:
            group["params"] = [p for p in group["params"] if id(p) not in numbers]
            more = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            optimizer.add_param_group({**more, "params": apart, "lr": rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


__all__ = ["is_embedding", "set_embeddings_apart", "set_lora_plus"]
