"""What an adapter adds to a model, read from its modules: low-rank branches, trained copies of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.host.transposed import is_transposed
from fewbits.nn.linear import QuantizedLinear

# In the ``auto_mapping`` of an adapter's configuration: the recipe of the packed base that it belongs to.
CORRECTED_RECIPE = "fewbits_corrected_recipe"


@dataclass(frozen=True)
class Branch:
    """The low-rank branches of one linear: pairs A (r, K), B (N, r) with their scaling.

    With DoRA's magnitude m (N,) the rows of the sum are brought to these lengths:
    ``W' = m / ||W + s B A|| * (W + s B A)``. Where ``transposed`` is True, weights come and go as (K, N):
    those of GPT-2, and of embeddings, where K is the vocabulary.
    """

    pairs: tuple[tuple[Tensor, Tensor, float], ...]
    magnitude: Tensor | None = None
    transposed: bool = False

    def delta(self, device: torch.device | str = "cpu") -> Tensor:
        """(N, K) float32."""
        total: Tensor | float = 0.0
        for a, b, scaling in self.pairs:
            total = total + scaling * (b.detach().to(device).float() @ a.detach().to(device).float())
        assert isinstance(total, Tensor)
        return total

    def merged(self, weight: Tensor) -> Tensor:
        """The weight (N, K), or (K, N) if `transposed`, with the branches in it, float32, on its device."""
        weight = weight.t() if self.transposed else weight
        total = weight.detach().float() + self.delta(weight.device)
        total = total if self.magnitude is None else self._rows_scaled(weight)[:, None] * total
        return total.t().contiguous() if self.transposed else total

    def _rows_scaled(self, weight: Tensor) -> Tensor:
        """(N,) float32: by how much DoRA scales each row of the sum."""
        assert self.magnitude is not None
        total = weight.detach().float() + self.delta(weight.device)
        rows: Tensor = self.magnitude.detach().to(total) / torch.linalg.vector_norm(total, dim=1)
        return rows

    def apply(self, x: Tensor, y: Tensor, linear: nn.Linear | nn.Embedding) -> Tensor:
        """What becomes of the output y (..., N) for x: (..., K) of a linear, (...) ids of an embedding."""
        z: Tensor | float = 0.0
        if isinstance(linear, nn.Embedding):
            for a, b, scaling in self.pairs:
                row = F.embedding(x, a.detach().to(y).t())
                z = z + scaling * getattr(linear, "embed_scale", 1.0) * (row @ b.detach().to(y).t())
            return y + z
        for a, b, scaling in self.pairs:
            z = z + scaling * (x @ a.detach().to(x).t() @ b.detach().to(x).t())
        if self.magnitude is None:
            return y + z
        rows = self._rows_scaled(linear.weight.t() if self.transposed else linear.weight).to(y)
        return rows * (y + z) if linear.bias is None else rows * (y - linear.bias + z) + linear.bias


def branches_of(base: nn.Module) -> dict[str, Branch]:
    """The active adapters' branches, by the full name of what they adapt; those on experts left out.

    Raises:
        Unsupported: an adapter that is neither a plain sum of low-rank products over a linear or an
            embedding nor one of DoRA over a linear (biases, other variants of LoRA).
        BadInput: an adapter that is merged already.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    branches = {}
    for name, module in base.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if getattr(module, "merged", False):
            raise BadInput(f"the adapter is merged into {name} already; call unmerge_adapter() first.")
        if isinstance(module, ParamWrapper):  # `fewbits.models.merging.experts` adds those
            continue
        pairs, magnitude = [], None
        for adapter in module.active_adapters:
            _check_adapter(module, name, adapter)
            pairs.extend(_pair(module, adapter))
            if _is_dora(module, adapter):
                magnitude = module.lora_magnitude_vector[adapter].weight
        if magnitude is not None and len(pairs) > 1:
            raise Unsupported(
                f"several adapters are active on {name} and one is of DoRA, which scales the sum; make one "
                "active with set_adapter()."
            )
        if pairs:
            base_layer = module.get_base_layer()
            branches[plain_name(name)] = Branch(
                tuple(pairs), magnitude, is_transposed(base_layer) or isinstance(base_layer, nn.Embedding)
            )
    return branches


def _pair(module: Any, adapter: str) -> list[tuple[Tensor, Tensor, float]]:
    """The adapter's A, B and scaling over a linear or an embedding; empty where it is not on this module."""
    if adapter in module.lora_A:
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    elif adapter in module.lora_embedding_A:
        a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
    else:
        return []
    return [(a, b, float(module.scaling[adapter]))]


def corrected_linears(base: nn.Module) -> set[str]:
    """Packed linears with an active adapter that began as the error of packing, by their full names."""
    from peft.tuners.lora import LoraLayer

    configs = getattr(base, "peft_config", {})
    begun = {name for name, config in configs.items() if CORRECTED_RECIPE in (config.auto_mapping or {})}
    return {
        plain_name(name)
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer)
        and isinstance(module.get_base_layer(), QuantizedLinear)
        and begun.intersection(module.active_adapters)
    }


def _check_adapter(module: nn.Module, name: str, adapter: str) -> None:
    is_variant = adapter in getattr(module, "lora_variant", {}) and not _is_dora(module, adapter)
    is_dora_embedding = adapter in getattr(module, "lora_embedding_A", {}) and _is_dora(module, adapter)
    if is_variant or is_dora_embedding or getattr(module, "lora_bias", {}).get(adapter):
        raise Unsupported(
            f"the adapter {adapter!r} on {name} is neither a plain sum of low-rank products nor DoRA over a "
            "linear (it has a LoRA bias, or is another variant); merge it with PEFT's "
            "merge_and_unload()."
        )


def _is_dora(module: nn.Module, adapter: str) -> bool:
    return bool(getattr(module, "use_dora", {}).get(adapter))


def plain_name(name: str) -> str:
    """A parameter's or module's name without what PEFT puts around it."""
    for around in (".token_adapter.base_layer", ".base_layer", ".original_module"):
        name = name.replace(around, "")
    return name


def base_name(name: str) -> str:
    """What a parameter of a PeftModel is called in the base model; a trained copy has its original's name."""
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", plain_name(name.removeprefix("base_model.model.")))


def effective_state(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names as without PEFT, and the tensors that count, of any shape: trained copies replace originals."""
    replaced: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in base.state_dict(keep_vars=True).items():
        if ".modules_to_save." in name:
            head, _, tail = name.partition(".modules_to_save.")
            adapter, _, leaf = tail.partition(".")
            if adapter in _active(base.get_submodule(head)):
                replaced[f"{head}.{leaf}"] = tensor
        elif not any(
            f".{part}" in name
            for part in ("lora_A", "lora_B", "lora_embedding_", "lora_magnitude_vector", "token_adapter.")
        ):
            plain[plain_name(name)] = tensor
    yield from {**plain, **replaced, **_with_trained_tokens(base)}.items()


@torch.no_grad()
def _with_trained_tokens(base: nn.Module) -> dict[str, Tensor]:
    """Embeddings (V, K) whose rows of single tokens an adapter trained (PEFT's ``trainable_token_indices``).

    A head that is tied to one is the same tensor.
    """
    if not any("trainable_tokens_delta" in name for name, _ in base.named_parameters()):
        return {}
    from peft.utils.other import TrainableTokensWrapper

    weights: dict[str, Tensor] = {}
    by_layer: dict[int, Tensor] = {}
    for name, module in base.named_modules():
        if not isinstance(module, TrainableTokensWrapper):
            continue
        layer: Any = module.token_adapter
        source = layer if layer.tied_adapter is None else layer.tied_adapter
        if id(source) not in by_layer:
            by_layer[id(source)] = source.get_merged_weights(source.active_adapters).detach()
        weights[f"{plain_name(name)}.weight"] = by_layer[id(source)]
    return weights


def _active(wrapper: Any) -> list[str]:
    active = getattr(wrapper, "active_adapters", None) or getattr(wrapper, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def was_changed(live: Tensor, original: Tensor) -> bool:
    """True if ``live`` is not simply ``original`` in live's dtype: it was trained, or resized.

    Either may have any shape.
    """
    if live.shape != original.shape:
        return True
    return not torch.equal(live.detach().cpu(), original.detach().cpu().to(live.dtype))


def same_storage(a: Tensor, b: Tensor) -> bool:
    """True if the two are one tensor under two names.

    Either may have any shape.
    """
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape
