"""Learning rates of their own for some parameters: embeddings and head, and LoRA+'s for B."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from fewbits.errors import BadInput
from fewbits.host.unwrap import unwrap

if TYPE_CHECKING:
    from torch.optim import Optimizer


def set_embeddings_apart(optimizer: Optimizer, model: nn.Module, rate: float) -> None:
    """Give the embeddings and the head that train groups of their own, with this learning rate.

    Raises:
        BadInput: none of them trains.
    """
    embeddings = _of_embeddings(model)
    chosen = [p for _, p in _trained(model) if id(p) in embeddings]
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
    embeddings = _of_embeddings(model)
    chosen = [p for n, p in _trained(model) if "lora_B" in n or (p.ndim == 1 and id(p) not in embeddings)]
    if not any("lora_B" in name for name, _ in _trained(model)):
        raise BadInput("lora_plus_ratio is set, but there are no adapters; leave it out, or set lora_r.")
    for group_rate in sorted({group["lr"] for group in optimizer.param_groups}):
        members = {id(p) for g in optimizer.param_groups if g["lr"] == group_rate for p in g["params"]}
        _set_apart(optimizer, [p for p in chosen if id(p) in members], group_rate * ratio)


def _of_embeddings(model: nn.Module) -> set[int]:
    """Numbers of the parameters of the token embedding and the output head, adapters and copies included."""
    base: Any = unwrap(model)
    numbers: set[int] = set()
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(base, getter)()
        except (AttributeError, NotImplementedError):  # a model without a head
            continue
        numbers |= set() if module is None else {id(parameter) for parameter in module.parameters()}
    return numbers


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


__all__ = ["set_embeddings_apart", "set_lora_plus"]
