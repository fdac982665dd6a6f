"""`Merger`: one merge of adapters into their base, tensor by tensor, checked before it is called done.

``W_merged = W + scaling * B @ A``, summed in float32 tensor by tensor, then rounded once to the 16-bit
dtype. W is the original checkpoint's weight where that is still on disk (so the error of the 4-bit base
does not enter), read shard by shard; otherwise the dequantised weight. The receipt says which.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fewbits.errors import BadCheckpoint, NotFinite
from fewbits.host.conversion import conversion_of
from fewbits.host.spec import locate, spec_for
from fewbits.host.transposed import transposed_like
from fewbits.models.folders.checkpoint import INDEX, WEIGHTS, Checkpoint
from fewbits.models.folders.original import original_of, source_folder
from fewbits.models.folders.processor_files import copy_processor
from fewbits.models.folders.read_names import renaming_of
from fewbits.models.loading.longer_positions import options_like
from fewbits.models.merging.branches import (
    base_name,
    branches_of,
    corrected_linears,
    effective_state,
    plain_name,
    same_storage,
    was_changed,
)
from fewbits.models.merging.checks import compare_file, distance, jitter, operands_as_they_are, split
from fewbits.models.merging.routing import Routing, routing_distance
from fewbits.models.packing.packed_head import say_tied
from fewbits.nn.finite import first_not_finite, why_not_finite
from fewbits.nn.linear import QuantizedLinear

_FLOAT32_CHECK_VALUES = 2**28  # smaller models are compared in float32: only the weights' rounding remains
_ROUNDINGS = 4.0
TOKENIZER_FILES = (
    "tokenizer*",
    "*processor*.json",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
)


@dataclass(frozen=True)
class MergeReceipt:
    """What was written, from what, and how far the reloaded model's logits are from the expected ones."""

    folder: Path
    method: str
    weights_from: str
    num_merged: int
    logits_error: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.method}, {self.num_merged} adapted weights merged into "
            f"{self.weights_from}; reloaded logits differ by {self.logits_error:.2e} (allowed "
            f"{self.tolerance:.2e}), relative."
        )


class Merger:
    """One merge: finds the branches and the source, writes, reloads, compares.

    Args:
        base: the model inside a PeftModel, or one without adapters.
        dtype: of the merged weights.
    """

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        self.base, self.dtype = base, dtype
        self.routing = Routing()
        self.branches = branches_of(base)
        self.corrected = corrected_linears(base)  # their adapters belong to what was packed
        self.changed: set[str] = set()  # linears whose weight is not the original's any more
        self._look_at_model()
        self.original, self.reason = original_of(base)
        if self.original is not None:
            self._tie_packed_head()
            why_not = self._why_not(self.original)
            if why_not is not None:
                self.original, self.reason = None, why_not
                self._look_at_model()

    @property
    def num_merged(self) -> int:
        """Adapted linears."""
        return len(self.branches)

    def _why_not(self, original: Checkpoint) -> str | None:
        """Why the original's weights cannot be merged into; None if they can."""
        names, tied = self._originals(), self.ties
        adapted = [f"{n}.weight" for n in self.branches]
        absent = [n for n in adapted if n not in names and tied.get(n) not in names]
        return f"the original checkpoint has no {absent[0]}" if absent else None

    @property
    def weights_from(self) -> str:
        """Where W comes from, in words."""
        if self.original is not None:
            own = f", and {len(self.changed)} that were changed in this model" if self.changed else ""
            return f"the original weights of {self.original.folder}{own}"
        kind = "the dequantised weights" if self.packed else "the model's own weights"
        return f"{kind} ({self.reason})"

    def receipt(self, folder: str | Path, method: str, error: float, tolerance: float) -> MergeReceipt:
        """The receipt of a finished merge."""
        return MergeReceipt(Path(folder), method, self.weights_from, self.num_merged, error, tolerance)

    def _look_at_model(self) -> None:
        self.packed: dict[str, QuantizedLinear] = {}
        self.live: dict[str, Tensor] = {}
        self.ties: dict[str, str] = dict(getattr(self.base, "all_tied_weights_keys", {}) or {})
        self.config = self.base.config
        for name, module in self.base.named_modules():
            if isinstance(module, QuantizedLinear):
                self.packed[plain_name(name)] = module
        skip = {f"{n}.{part}" for n, m in self.packed.items() for part in m.state_dict() if part != "bias"}
        for name, tensor in effective_state(self.base):
            if name not in skip:
                self.live[name] = tensor

    def _tie_packed_head(self) -> None:
        """Take a head that was parted from the embeddings to be packed for what it is in the original."""
        conversion = conversion_of(self.base)
        head = None if conversion is None else conversion.untied_head
        if head is None or head not in self.packed:
            return
        spec = spec_for(self.base)
        embedding = f"{locate(self.base, spec, spec.embed)}.weight"
        del self.packed[head]
        self.ties[f"{head}.weight"] = embedding
        self.live[f"{head}.weight"] = self.live[embedding]
        self.config = copy.deepcopy(self.base.config)
        say_tied(self.config)

    def _originals(self) -> dict[str, str]:
        """Model names to the original checkpoint's, which may omit or add the base model's prefix.

        Or have others altogether, which transformers renames.
        """
        assert self.original is not None
        prefix, renamed = f"{self.base.base_model_prefix}.", renaming_of(self.base)
        keys = set(self.live) | {f"{n}.weight" for n in self.packed} | {f"{n}.weight" for n in self.branches}
        originals = {}
        for key in self.original.tensors:
            names = (key, prefix + key, key.removeprefix(prefix), renamed(key))
            originals[next((n for n in names if n in keys), key)] = key
        return originals

    def weights(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Every tensor of the merged model: its name, and a call that makes it, on the CPU.

        One tensor is decoded and merged for each call, and nothing is kept: the memory is that of a tensor.
        """
        if self.original is None:
            for name in self._live_names():
                yield name, partial(self._from_live, name)
            return
        names = {key: name for name, key in self._originals().items()}
        for file in self.original.files:
            with safe_open(file, framework="pt") as stream:
                keys = list(stream.keys())
            for key in keys:
                yield names[key], partial(self._read_and_merge, file, key, names[key])
        for name in self._absent_from(set(names.values())):
            yield name, partial(self._from_live, name)

    def _read_and_merge(self, file: Path, key: str, name: str) -> Tensor:
        with safe_open(file, framework="pt") as stream:
            return self._merged(name, stream.get_tensor(key))

    @property
    def head_is_tied(self) -> bool:
        """True if the embedding is the output head as well, and training did not part them."""
        return bool(self.config.get_text_config().tie_word_embeddings) and not self.head_was_trained()

    def write(self, folder: Path, tokenizer: Any, shard_bytes: int) -> tuple[float, float]:
        """Write everything into ``folder``, reload it, and compare.

        Returns:
            The relative error of the logits, and what is allowed.
        """
        folder.mkdir(exist_ok=True)
        shards = self._from_original() if self.original is not None else self._from_model(shard_bytes)
        weight_map: dict[str, str] = {}
        total = 0
        for file_name, tensors in shards:
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
            compare_file(folder / file_name, tensors)
            weight_map.update(dict.fromkeys(tensors, file_name))
            total += sum(t.nbytes for t in tensors.values())
        if set(weight_map.values()) != {WEIGHTS}:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        self._write_config(folder, weight_map)
        self.write_tokenizer(folder, tokenizer)
        return self.check_written(folder)

    def _from_original(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        assert self.original is not None
        names = {key: name for name, key in self._originals().items()}
        written: set[str] = set()
        extra = self._absent_from(set(names.values()))
        for number, file in enumerate(self.original.files):
            tensors = {}
            with safe_open(file, framework="pt") as stream:
                for key in stream.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensors[key] = self._merged(names[key], stream.get_tensor(key))
                    written.add(names[key])
            if number == len(self.original.files) - 1:
                tensors.update({n: self._from_live(n) for n in extra})
            yield file.name, tensors

    def _absent_from(self, names: set[str]) -> dict[str, Tensor]:
        """Live tensors that the original lacks and that are not another name of one it has."""
        tied = self.ties
        parameters = {base_name(name) for name, _ in self.base.named_parameters(remove_duplicate=False)}
        absent = {}
        for name, tensor in self.live.items():
            source = tied.get(name)
            same = source in self.live and same_storage(self.live[source], tensor)
            same = same and not self.is_parted(name)
            if name not in names and not same and name in parameters:
                absent[name] = tensor
        return absent

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        """What the tensor ``name`` of the original becomes."""
        module = name.removesuffix(".weight") if name.endswith(".weight") else ""
        own = self._own(name, weight)
        if own is not None and (module in self.branches or module in self.packed):
            self.changed.add(module)
        weight = weight if own is None else own
        return self.as_saved(self.branches[module].merged(weight) if module in self.branches else weight)

    def _own(self, name: str, weight: Tensor) -> Tensor | None:
        """The model's own tensor where that is not simply the original's ``weight``."""
        layer = self.packed.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is not None:
            is_own = layer.repacked or name.removesuffix(".weight") in self.corrected
            return transposed_like(layer.dequantize(torch.float32), layer) if is_own else None
        live = self.live.get(name)
        has_values = live is not None and live.device.type != "meta"
        return live if live is not None and has_values and was_changed(live, weight) else None

    def as_saved(self, tensor: Tensor) -> Tensor:
        """A tensor of any shape on the CPU in the dtype of the merge, with memory of its own."""
        tensor = tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype)
        return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor.contiguous()

    def _live_names(self) -> list[str]:
        names = [n for n in self.live if n not in self.ties or not self.is_alias(n) or self.is_parted(n)]
        return sorted({*names, *(f"{n}.weight" for n in self.packed)})

    def _from_model(self, shard_bytes: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
        groups = split(self._live_names(), self._size_of, shard_bytes)
        for number, group in enumerate(groups, 1):
            file_name = (
                WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            )
            yield file_name, {name: self._from_live(name) for name in group}

    def _size_of(self, name: str) -> int:
        layer = self.packed.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        count = layer.in_features * layer.out_features if layer is not None else self.live[name].numel()
        return count * self.dtype.itemsize

    def _from_live(self, name: str) -> Tensor:
        module = name.removesuffix(".weight") if name.endswith(".weight") else ""
        layer = self.packed.get(module)
        weight = self.live[name] if layer is None else transposed_like(layer.dequantize(torch.float32), layer)
        if module in self.branches:
            weight = self.branches[module].merged(weight)
        return self.as_saved(weight)

    def _write_config(self, folder: Path, names: Iterable[str]) -> None:
        config = copy.deepcopy(self.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = self.dtype
        config.architectures = [type(self.base).__name__]
        if config.tie_word_embeddings and self.head_was_trained(set(names)):
            config.tie_word_embeddings = False
        config.save_pretrained(folder)
        if getattr(self.base, "generation_config", None) is not None:
            self.base.generation_config.save_pretrained(folder)

    def head_was_trained(self, written: set[str] | None = None) -> bool:
        """Whether a tensor that the configuration takes for another name of the embedding is one of its own.

        Of those in ``written`` only, if that is given.
        """
        tied = self.ties
        names = tied if written is None else written.intersection(tied)
        if any(map(self.is_parted, names)):
            return True
        pairs = [(self.live.get(n), self.live.get(tied[n])) for n in names]
        return any(a is not None and b is not None and not same_storage(a, b) for a, b in pairs)

    def is_alias(self, name: str) -> bool:
        """Whether the live tensor of this name is the one that the configuration takes it for."""
        source = self.ties.get(name, "")
        return source in self.live and same_storage(self.live[source], self.live[name])

    def is_parted(self, name: str) -> bool:
        """Whether an adapter makes two tensors of one that has ``name`` and another: it is on one of them."""
        source = self.ties.get(name)
        return source is not None and any(
            n.removesuffix(".weight") in self.branches for n in (name, str(source))
        )

    def write_tokenizer(self, folder: Path, tokenizer: Any) -> None:
        """Write the tokenizer that was given, or copy the original's files; those of its processor always."""
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            if (source := source_folder(self.base)) is not None:
                copy_processor(source, folder)
        elif self.original is not None:
            for pattern in TOKENIZER_FILES:
                for file in self.original.folder.glob(pattern):
                    shutil.copyfile(file, folder / file.name)

    def check_written(self, folder: Path) -> tuple[float, float]:
        """Reload what was written; compare its logits on a fixed batch with base plus branches.

        How much of a difference rounding explains depends on the model, so it is measured: every weight of
        the reloaded model is moved at random by up to one rounding, and the logits may not differ by more
        than `_ROUNDINGS` times what that does to them. All three passes send rows to the same experts, and
        the routers' own choices are compared apart (`Routing`).
        """
        vocab_size = self.base.config.get_text_config().vocab_size
        # A classifier reads the last token that is no padding, and takes one row where its files name none.
        rows = 2 if self.base.can_generate() else 1
        ids = (torch.arange(32) * 7919 + 13).remainder(vocab_size).view(rows, -1)
        dtype = self._check_dtype()
        expected = self._expected(ids, dtype)
        merged = type(self.base).from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        with torch.no_grad():
            with self.routing.of(merged) as chosen:
                logits = merged(input_ids=ids).logits.float()
            # In float32 the products' own sums round as much as the weights do: a few units more.
            jitter(merged, torch.finfo(self.dtype).eps * (4 if self.dtype == torch.float32 else 0.5))
            with self.routing.of(merged) as chosen_moved:
                moved = merged(input_ids=ids).logits.float()
        error = distance(logits, expected)
        tolerance = _ROUNDINGS * distance(moved, logits)
        if not math.isfinite(error):
            cause = why_not_finite(self.base if first_not_finite(self.base) else merged)
            raise NotFinite(f"nothing was written, because the merged model's logits are not finite{cause}")
        if not error <= tolerance:
            raise BadCheckpoint(
                f"the merged model's logits differ from base plus adapter by {error:.2e} relative, and "
                f"rounding explains no more than {tolerance:.2e}; nothing was written, keep the adapter and "
                "report this."
            )
        routed = routing_distance(chosen, self.routing.expected or [])
        most = _ROUNDINGS * routing_distance(chosen_moved, chosen)
        if not routed <= most:
            raise BadCheckpoint(
                f"the merged model's routers weigh experts otherwise than the base's, by {routed:.2e} "
                f"relative, and rounding explains no more than {most:.2e}; nothing was written, keep the "
                "adapter and report this."
            )
        return error, tolerance

    def _check_dtype(self) -> torch.dtype:
        if self.original is None:
            return self.base.dtype  # type: ignore[no-any-return]
        count = sum(math.prod(entry.shape) for entry in self.original.tensors.values())
        return torch.float32 if count < _FLOAT32_CHECK_VALUES else self.dtype

    @torch.no_grad()
    def _expected(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits of base plus branches: the model itself, or the original with the branches beside it."""
        logits: Tensor
        if self.original is None:
            training = self.base.training
            with operands_as_they_are(self.base), self.routing.of(self.base):
                logits = self.base.eval()(input_ids=ids.to(self.base.device)).logits
            self.base.train(training)
            return logits.float().cpu()
        source = self.original.folder
        like = options_like(self.base.config, source)
        model = type(self.base).from_pretrained(source, dtype=dtype, local_files_only=True, **like).eval()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            own = self._own(name, parameter)
            if own is not None:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, nn.Parameter(own.detach().to("cpu", dtype)))
        for name, branch in self.branches.items():
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output, branch=branch: branch.apply(args[0], output, module)
            )
        with self.routing.of(model):
            logits = model(input_ids=ids).logits
        return logits.float()
