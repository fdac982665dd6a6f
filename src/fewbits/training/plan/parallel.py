"""How several processes share one model: the choice, its reason, and what follows for the data.

``ddp``: each rank holds the whole model and takes its share of a step's sequences. ``fsdp``: weights,
gradients and optimizer are cut into shares as well, and a layer is gathered while it computes. ``tensor``:
each layer's products are cut, and all ranks of a group see the same sequences. ``auto`` takes the first of
``ddp`` and ``fsdp`` that is predicted to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fewbits.errors import BadInput, Unsupported
from fewbits.models.adapting.predicted_memory import predict_memory
from fewbits.models.plan.memory_budget import OPTIMIZER_BYTES, auto_budget
from fewbits.models.plan.memory_plan import GIB, planner
from fewbits.recipes import LoRA, Recipe
from fewbits.training.ranks.processes import Ranks


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What this rank does among the others.

    Attributes:
        kind: one (a process alone), ddp, fsdp or tensor.
        data_rank: of those that take different sequences, the number of this one.
        data_size: how many there are of those.
        ranks: this process, which speaks with the others.
        mesh: torch's DeviceMesh of a sharded model.
        reason: why this kind, in words.
    """

    kind: str = "one"
    data_rank: int = 0
    data_size: int = 1
    ranks: Ranks = field(default_factory=Ranks)
    mesh: Any = None
    reason: str = "one process"

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.kind in ("fsdp", "tensor")

    def __str__(self) -> str:
        """One line for the log and the record."""
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is known of a run before its model is loaded.

    Attributes:
        model: the mapping in config.json.
        recipe: formats and adapters.
        batch: sequences and tokens of each in the largest pass.
        trains_all: all weights train, which stay in float32.
        optimizer: its name.
    """

    model: Mapping[str, Any]
    recipe: Recipe
    batch: tuple[int, int]
    trains_all: bool
    optimizer: str

    def bytes(self, available: int) -> tuple[int, int]:
        """Of one GPU that holds all: at the peak of a step under the best plan; and of these, what shards.

        Raises:
            BadInput: the model's configuration does not tell its shapes.
        """
        static = predict_memory(self.model, self.recipe, dtype_bytes=4 if self.trains_all else 2)
        moments = static.optimizer // 8 * OPTIMIZER_BYTES.get(self.optimizer, 8)
        shards = static.total - static.optimizer + moments
        plans = planner(
            self.model,
            self.recipe,
            num_tokens=self.batch[0] * self.batch[1],
            sequence_length=self.batch[1],
            can_keep_weights=False,  # what is needed, not what room can be used for
        )
        budget = available - shards + plans.static.total
        return shards + plans.plan(budget).predicted.dynamic, shards


def need_of(
    model: Mapping[str, Any], recipe: Recipe | None, lora: LoRA | None, batch: tuple[int, int], optimizer: str
) -> Need:
    """What `choose` needs to know, from a run's settings."""
    return Need(
        model=model,
        recipe=replace(recipe or Recipe(name="plain"), lora=lora),
        batch=batch,
        trains_all=lora is None,
        optimizer=optimizer,
    )


def choose(choice: str, *, size: int, available: int | None, need: Need) -> tuple[str, str]:
    """The kind of parallel training, and why.

    Args:
        choice: auto, ddp, fsdp or tensor.
        size: ranks.
        available: free bytes of the smallest GPU; None: the ranks are on CPUs, which share one memory.
        need: what the run will take.
    """
    if size == 1:
        return "one", "one process"
    if choice != "auto":
        return choice, "as configured"
    if available is None:
        return "ddp", f"auto, for on CPUs each of the {size} ranks can hold the whole model"
    budget = auto_budget(available)
    try:
        whole, shards = need.bytes(budget)
    except (BadInput, Unsupported) as error:
        return "ddp", f"auto, for this model's bytes cannot be predicted ({error})"
    has = f"of {budget / GIB:.1f} GiB that the smallest GPU has free"
    if whole <= budget:
        return "ddp", f"auto, for the whole model is predicted to take {whole / GIB:.1f} GiB {has}"
    part = whole - shards + shards // size
    fits = "" if part <= budget else ", which may still be too much"
    return "fsdp", (
        f"auto, for the whole model is predicted to take {whole / GIB:.1f} GiB {has}, a share of it"
        f" {part / GIB:.1f} GiB{fits}"
    )


def data_share(kind: str, *, rank: int, size: int, tensor_size: int | None) -> tuple[int, int]:
    """Number and count of the ranks that take different sequences; ranks of one tensor group are neighbours.

    Raises:
        BadInput: the ranks cannot be cut into groups of ``tensor_size``.
    """
    if kind in ("one", "ddp"):
        if tensor_size is not None and tensor_size > 1:
            raise BadInput(
                f"tensor_size is {tensor_size}, but parallel is {kind}; set parallel to tensor or fsdp."
            )
        return rank, size
    group = (size if kind == "tensor" else 1) if tensor_size is None else tensor_size
    if size % group:
        raise BadInput(f"tensor_size is {group}, which does not divide the {size} ranks; choose a divisor.")
    return rank // group, size // group
