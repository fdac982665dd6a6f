"""Adapters that begin as what packing took away: ``init_lora_weights="loftq"`` over a packed base.

    E = W - Q        s * B @ A = the best approximation of E of the adapter's rank

W is the weight of the checkpoint that the model was packed from, Q what it was packed to. So the model
begins nearer to the one before packing, and Q stays as it is. This is LoftQ (Li et al. 2023, arXiv
2310.08659) with one iteration, as PEFT's ``replace_lora_weights_loftq`` computes it; more would pack other
weights.

The adapter belongs to this Q: over the original weights E would count twice. So its configuration keeps the
recipe, in ``auto_mapping``, a field whose content PEFT keeps and does not look at: by that a merge knows that
the adapter is to be added to Q, and the base is packed again wherever the adapter is loaded. To PEFT itself
the saved adapter is an ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.host.conversion import conversion_of
from fewbits.host.transposed import transposed_like
from fewbits.host.unwrap import unwrap
from fewbits.models.merging.branches import CORRECTED_RECIPE, base_name
from fewbits.models.merging.merger import Merger
from fewbits.models.packing.packed import is_packed, recipe_of
from fewbits.nn.first_values import generator_of
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import recipe_to_config

FROM_ERROR = "loftq"
_EXACT_SIDE = 1024  # of matrices no larger all singular values are computed
_MORE, _PASSES = 16, 8  # columns beyond the rank and passes over the matrix, of larger ones


def take_request(lora: Any, settings: dict[str, Any]) -> bool:
    """Whether ``init_lora_weights`` is "loftq", which from here on reads as True, in place.

    PEFT's own configuration would ask for scipy, and PEFT pack a plain weight by bitsandbytes.

    Raises:
        BadInput: more than one iteration is asked for, or details of what is not asked for.
    """
    is_asked = settings.get("init_lora_weights") == FROM_ERROR
    details = settings.pop("loftq_config", None) or {}
    if details and not is_asked:
        raise BadInput("loftq_config is given without init_lora_weights='loftq'; give both, or neither.")
    if getattr(lora, "init_lora_weights", None) == FROM_ERROR:
        is_asked, details = True, lora.loftq_config or {}
        lora.init_lora_weights, lora.loftq_config = True, {}
    if not is_asked:
        return False
    if "init_lora_weights" in settings:
        settings["init_lora_weights"] = True
    details = details if isinstance(details, Mapping) else vars(details)
    if details.get("loftq_iter", 1) != 1:
        raise BadInput(
            f"loftq_iter is {details['loftq_iter']}, and more than one iteration would pack other weights;"
            " leave it out: one takes the error of the base as it is packed."
        )
    return True


def mark(config: Any, model: nn.Module) -> None:
    """Write into a ``peft.LoraConfig`` the recipe of the packed base that its adapter will belong to.

    Raises:
        Unsupported: nothing of the model is packed.
    """
    if not is_packed(model):
        raise Unsupported(
            "init_lora_weights='loftq' begins from the error of a packed base, and nothing of this model is"
            " packed; load it with load_in_4bit=True or a recipe."
        )
    conversion = conversion_of(model)
    recipe = recipe_of(model, name=FROM_ERROR) if conversion is None else conversion.recipe
    config.auto_mapping = {CORRECTED_RECIPE: recipe_to_config(recipe)}
    config.task_type = config.task_type or "CAUSAL_LM"  # else PEFT writes an auto_mapping of its own


def recipe_in(adapter_config: Mapping[str, Any]) -> Any:
    """The recipe by which an adapter's base was packed, where the adapter began from its error; else None."""
    return (adapter_config.get("auto_mapping") or {}).get(CORRECTED_RECIPE)


def check_base(config: Any, model: nn.Module, path: Any) -> None:
    """Refuse to load an adapter that began from the error of packing over a base that is not packed.

    Raises:
        Unsupported: it is one, and the base is not.
    """
    if recipe_in(vars(config)) is not None and not is_packed(model):
        raise Unsupported(
            f"the adapter in {path} began as the error of a packed base and belongs to that; load it with"
            " FastLanguageModel.from_pretrained, which packs the base by the adapter's own recipe."
        )


@torch.no_grad()
def begin_from_error(adapted: Any, adapter_name: str, *, seed: int | None = None) -> None:
    """Give the adapter on each packed linear the error of its weight.

    Args:
        adapted: a PeftModel over a packed model.
        adapter_name: the adapter.
        seed: of the random projection by which large matrices are decomposed.

    Raises:
        Unsupported: the original weights are gone.
    """
    from fewbits.nn.lora import LoRALinear

    base = unwrap(adapted)
    merger = Merger(base, torch.float32)
    merger.branches, merger.corrected = {}, set()  # the original weights, without any adapter
    if merger.original is None:
        raise Unsupported(
            f"init_lora_weights='loftq' compares the packed weights with the original ones, and"
            f" {merger.reason}; load the model from its unpacked folder, or leave init_lora_weights out."
        )
    originals = dict(merger.weights())
    for path, layer in adapted.named_modules():
        if not isinstance(layer, LoRALinear) or adapter_name not in layer.lora_A:
            continue
        linear, name = layer.get_base_layer(), base_name(path)
        if not isinstance(linear, QuantizedLinear):
            continue
        weight = originals[f"{name}.weight"]().to(linear.device, torch.float32)
        error = transposed_like(weight, linear) - linear.dequantize(torch.float32)
        a, b = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
        generator = generator_of(seed or 0, f"{name}.error")
        left, right = low_rank(error, a.shape[0], generator)
        scale = 1 / math.sqrt(layer.scaling[adapter_name])
        a.copy_(right * scale)
        b.copy_(left * scale)


def low_rank(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The best approximation of a matrix (N, K) of a rank: (N, rank) times (rank, K).

    Of sides above 1024 by a random projection with eight passes, whose product comes near the best.
    """
    rows, columns = matrix.shape
    if min(rows, columns) <= _EXACT_SIDE:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        probe = torch.randn(
            columns, min(rank + _MORE, rows, columns), generator=generator, dtype=torch.float32
        ).to(matrix)
        q, _ = torch.linalg.qr(matrix @ probe)
        for _ in range(_PASSES):
            z, _ = torch.linalg.qr(matrix.t() @ q)
            q, _ = torch.linalg.qr(matrix @ z)
        u, s, vh = torch.linalg.svd(q.t() @ matrix, full_matrices=False)
        u = q @ u
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]


__all__ = ["FROM_ERROR", "begin_from_error", "check_base", "low_rank", "mark", "recipe_in", "take_request"]
