"""Merging a model with experts: through one plain model on the CPU, which transformers writes.

A checkpoint has its experts one by one, or all in one tensor, under names that its family changed over the
years; transformers knows how each is read and written. So such a model is not merged tensor by tensor: the
original is loaded as a plain model, the adapters are added to its parameters, and its own ``save_pretrained``
writes the layout that it was read from. It takes the memory of the model in 16 bits, on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadCheckpoint
from fewbits.formats.base import Packed
from fewbits.host.expert_weights import all_weights_of, weights_of
from fewbits.host.transposed import transposed_like
from fewbits.models.folders.checkpoint import Checkpoint
from fewbits.models.loading.longer_positions import options_like
from fewbits.models.merging.branches import plain_name
from fewbits.models.merging.merger import Merger
from fewbits.nn.branched_experts import BranchedExperts
from fewbits.nn.experts import QuantizedExperts


def has_experts(base: nn.Module) -> bool:
    """Whether a model has experts in one tensor, packed or not, or adapters on parameters of no linear."""
    from peft.tuners.lora.layer import ParamWrapper

    return any(isinstance(module, ParamWrapper) or all_weights_of(module) for module in base.modules())


class WholeMerger(Merger):
    """One merge of a model with experts; see `Merger`."""

    def write(self, folder: Path, tokenizer: Any, shard_bytes: int) -> tuple[float, float]:
        """Write everything into ``folder``, reload it, and compare; see `Merger.write`."""
        folder.mkdir(exist_ok=True)
        model = self._plain()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._sum(name, parameter))
        model.config = self._config()
        type(model).save_pretrained(model, folder, max_shard_size=shard_bytes)
        self.write_tokenizer(folder, tokenizer)
        del model
        return self.check_written(folder)

    def weights(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Every tensor of the merged model; see `Merger.weights`. The plain model stays in memory."""
        model = self._plain(self.base.dtype)
        for name, tensor in model.state_dict().items():
            yield name, partial(self._summed, name, tensor)

    @torch.no_grad()
    def _summed(self, name: str, tensor: Tensor) -> Tensor:
        return self.as_saved(self._sum(name, tensor))

    def stored_experts(self, name: str) -> Packed | None:
        """The weight (E, N, K) as the model computes with it, by its full name; None where it is merged anew.

        That is: no adapter is added to it, and it was not packed from an original that is still there.
        """
        path, _, leaf = name.rpartition(".")
        experts = self._packed_experts.get(path)
        if experts is None or leaf not in experts.shapes or experts.is_turned or name in self._wrappers():
            return None
        if self.original is not None and leaf not in experts.repacked:
            return None
        return experts.packed(leaf)

    @property
    def num_merged(self) -> int:
        """Adapted linears and weights of experts."""
        return len(self.branches) + len(self._wrappers())

    def _why_not(self, original: Checkpoint) -> str | None:
        return None  # transformers reads it, whatever its tensors are called

    def _wrappers(self) -> dict[str, list[tuple[Any, str]]]:
        """Adapters on parameters: (wrapper, adapter) by the parameter's full name."""
        from peft.tuners.lora.layer import ParamWrapper

        wrappers: dict[str, list[tuple[Any, str]]] = {}
        for path, module in self.base.named_modules():
            if isinstance(module, ParamWrapper):
                active = [name for name in module.active_adapters if name in module.lora_A]
                if active:
                    name = f"{plain_name(path)}.{module.parameter_name}"
                    wrappers.setdefault(name, []).extend((module, adapter) for adapter in active)
        return wrappers

    def _sum(self, name: str, weight: Tensor) -> Tensor:
        """What a parameter of the plain model becomes, in float32 or the weight's dtype."""
        if name.endswith(".weight") and name.removesuffix(".weight") in self.branches:
            return self.branches[name.removesuffix(".weight")].merged(weight.float())
        total = weight
        for wrapper, adapter in self._wrappers().get(name, ()):
            total = total.float() + _delta(wrapper, adapter)
        return total

    def _plain(self, dtype: torch.dtype | None = None) -> Any:
        """The model without adapters, in plain weights on the CPU."""
        dtype = dtype or self.dtype
        if self.original is not None:
            folder = self.original.folder
            like = options_like(self.base.config, folder)
            model = type(self.base).from_pretrained(folder, dtype=dtype, local_files_only=True, **like).eval()
            for name, parameter in list(model.named_parameters()):
                own = self._own(name, parameter)
                if own is not None:
                    self.changed.add(name)
                    _set(model, name, own.to("cpu", dtype))
            self._tie(model, dtype)
            return model
        model = type(self.base)._from_config(self._config(), dtype=dtype)
        state = model.state_dict()
        decoded = {name: tensor for name, tensor in self._decoded().items() if name in state}
        for name, tensor in decoded.items():
            if tensor.shape != state[name].shape:
                _set(model, name, tensor.to("cpu", dtype))
        model.load_state_dict({n: t for n, t in decoded.items() if t.shape == state[n].shape}, strict=False)
        self._tie(model, dtype)
        absent = sorted(set(state) - set(decoded) - set(getattr(model, "all_tied_weights_keys", {}) or {}))
        if absent:
            raise BadCheckpoint(
                f"the tensor {absent[0]} is missing from this model; load it again from its original folder."
            )
        return model.eval()

    def _tie(self, model: Any, dtype: torch.dtype) -> None:
        """Make one tensor of a head and its embedding where they are one in this model, else two."""
        for name, source in self.ties.items():
            if name in self.packed:
                continue
            embedding = model.get_parameter(source)
            if self.is_alias(name) and not self.is_parted(name):
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, embedding)
            else:
                _set(model, name, embedding if self.is_alias(name) else self.live[name].to("cpu", dtype))

    def _decoded(self) -> dict[str, Tensor]:
        """Every tensor of the plain model, packed ones decoded."""
        tensors = dict(self.live)
        for name, layer in self.packed.items():
            tensors[f"{name}.weight"] = transposed_like(layer.dequantize(torch.float32), layer)
        for path, module in self.base.named_modules():
            if isinstance(module, QuantizedExperts):
                for name in module.shapes:
                    for part in module.part_names[name]:
                        tensors.pop(f"{plain_name(path)}.{module.key(name, part)}", None)
                    tensors[f"{plain_name(path)}.{name}"] = module.dequantize(name)
        return tensors

    def _config(self) -> Any:
        config = copy.deepcopy(self.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = self.dtype
        if config.tie_word_embeddings and self.head_was_trained():
            config.tie_word_embeddings = False
        return config

    def _own(self, name: str, weight: Tensor) -> Tensor | None:
        """The model's own tensor where it is not the original's, rounded or not."""
        path, _, leaf = name.rpartition(".")
        experts = self._packed_experts.get(path)
        if experts is None or leaf not in experts.shapes:
            return super()._own(name, weight)
        return experts.dequantize(leaf) if leaf in experts.repacked else None

    @cached_property
    def _packed_experts(self) -> dict[str, QuantizedExperts]:
        modules = self.base.named_modules()
        return {plain_name(path): m for path, m in modules if isinstance(m, QuantizedExperts)}

    @torch.no_grad()
    def _expected(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits of base plus branches, which are added to each expert's rows, not to its weights."""
        if self.original is None:
            return super()._expected(ids, dtype)
        model = self._plain(dtype)
        for name, branch in self.branches.items():
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output, branch=branch: branch.apply(args[0], output, module)
            )
        for path, branches in self._by_module().items():
            host = model.get_submodule(path)
            if weights_of(host):
                model.set_submodule(path, BranchedExperts(host, branches))
                continue
            for leaf in branches:  # a router's weight, for one
                parameter = host.get_parameter(leaf)
                parameter.copy_(self._sum(f"{path}.{leaf}", parameter))
        with self.routing.of(model):
            logits: Tensor = model(input_ids=ids).logits
        return logits.float()

    def _by_module(self) -> dict[str, dict[str, tuple[tuple[Tensor, Tensor, float], ...]]]:
        branches: dict[str, dict[str, tuple[tuple[Tensor, Tensor, float], ...]]] = {}
        for name, added in self._wrappers().items():
            path, _, leaf = name.rpartition(".")
            branches.setdefault(path, {})[leaf] = tuple(
                (w.lora_A[a].weight.float().cpu(), w.lora_B[a].weight.float().cpu(), float(w.scaling[a]))
                for w, a in added
            )
        return branches


def _delta(wrapper: Any, adapter: str) -> Tensor:
    """What an adapter adds to its parameter, by PEFT's own sum, in float32 on the CPU."""
    plain = copy.copy(wrapper)  # whose matrices are wide, and nothing else is another
    plain._modules = dict(wrapper._modules)
    for name in ("lora_A", "lora_B"):
        plain._modules[name] = copy.deepcopy(wrapper._modules[name]).float().cpu()
    like = torch.empty((), dtype=torch.float32).expand(wrapper.get_param().shape)
    vars(plain)["get_param"] = lambda: like
    delta: Tensor = plain.get_delta_weight(adapter)
    return delta


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Give ``model`` a copy, to which adapters may be added."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(tensor.detach().clone(), requires_grad=False))


__all__ = ["WholeMerger", "has_experts"]
