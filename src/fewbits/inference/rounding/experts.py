"""Experts while a layer is rounded: each a linear of its own, rounded by the tokens that are sent to it.

An expert sees few tokens, some none at all. H of fewer rows than columns says nothing of the directions in
which no row lies; GPTQ would move the weight there at will. So such an expert's moments are filled up, to as
many rows as it has columns, by those of the mean row that experts of its layer got: a well-visited expert is
rounded by its own tokens, one that no token reached by what experts of its layer see on average.

The linears are put together again as soon as their codes are chosen: a layer of the packed model has one
packed tensor for each of the host's 3-D parameters.

Shapes: E experts; a 3-D parameter is (E, N, K), gate and up one below the other in N.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.formats.base import Format, Packed
from fewbits.host.expert_weights import weights_of
from fewbits.inference.rounding.activations import LayerMoments
from fewbits.inference.rounding.awq import Fold
from fewbits.inference.rounding.grids import Grids
from fewbits.models.packing.experts import expert_modules, expert_rules, packed_place, why_not_packed
from fewbits.nn.split_experts import SplitExperts, why_not_split
from fewbits.recipes import Recipe, Rule

_NAMED = 8  # experts that a sentence names


@dataclass(frozen=True, kw_only=True)
class ExpertLinears:
    """The experts of one layer as linears.

    Attributes:
        path: of the module in the layer.
        host: the module whose place they take.
        weights: of each of the host's 3-D parameters that is packed: for each expert its linears, one below
            the other, by their names in the layer.
    """

    path: str
    host: nn.Module
    weights: Mapping[str, Sequence[Sequence[str]]]

    @property
    def linears(self) -> list[str]:
        """All of them."""
        return [name for experts in self.weights.values() for names in experts for name in names]

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Those that stand for the same product in each expert, by its name."""
        kinds: dict[str, list[str]] = {}
        for name in self.linears:
            kinds.setdefault(name.rpartition(".")[2], []).append(name)
        return kinds


def experts_to_round(model: nn.Module, spec: ModelSpec, recipe: Recipe) -> tuple[dict[str, Rule], list[str]]:
    """The rules of the experts' 3-D parameters that calibration rounds, and sentences on what it leaves.

    Raises:
        Unsupported: a format that stores one scale for all experts.
    """
    rules, left = expert_rules(model, spec, recipe), dict[str, int]()
    for path, module in expert_modules(model, spec):
        own = [name for name in weights_of(module) if f"{path}.{name}" in rules]
        reason = why_not_packed(module) or (why_not_split(module) if own else None)
        if reason is not None:
            left[reason] = left.get(reason, 0) + sum(getattr(module, n).numel() for n in weights_of(module))
            for name in own:
                del rules[f"{path}.{name}"]
    sentences = [
        f"{values:,} values of experts stay as they are: {reason}" for reason, values in left.items()
    ]
    return rules, sentences


def check_format(name: str, format: Format, shape: tuple[int, ...]) -> None:
    """Refuse a format that cannot hold one 3-D parameter (E, N, K) as its experts' parts one after another.

    Raises:
        Unsupported: it cannot.
    """
    Grids(format, torch.zeros(1, shape[-1], dtype=torch.float32))
    parts_of_expert = 2 if name.endswith("gate_up_proj") else 1
    one = format.layout((shape[1] // parts_of_expert, shape[2]))
    for part, spec in format.layout(shape).items():
        sizes = prod(spec.shape), prod(one[part].shape)
        of_each = sizes[0] == shape[0] * parts_of_expert * sizes[1]
        if not (of_each or (_is_shared(format) and sizes == (1, 1))):
            raise Unsupported(
                f"{name} is {shape[0]} experts, and {format.name} has no scales for each alone; choose a"
                " format with scales for rows or groups, such as int4_g64 or float8_e4m3_row."
            )


def _is_shared(format: Format) -> bool:
    """Whether one scale of the whole tensor stands above the experts' own, as in NVFP4."""
    return format.contract.tensor_scale and format.contract.block[0] == 1


def split_layer(
    model: nn.Module, layer_name: str, spec: ModelSpec, rules: Mapping[str, Rule]
) -> ExpertLinears | None:
    """Make linears of a layer's experts, in place, if any of their weights is to be rounded."""
    if spec.experts is None:
        return None
    path = f"{layer_name}.{spec.experts.path}"
    own = [name.rpartition(".")[2] for name in rules if name.rpartition(".")[0] == path]
    if not own:
        return None
    host = model.get_submodule(path)
    split = SplitExperts(host)
    model.set_submodule(path, split)
    weights = {}
    for name in own:
        weights[name] = _linears_of(split, spec.experts.path, name)
    return ExpertLinears(path=spec.experts.path, host=host, weights=weights)


def _linears_of(split: SplitExperts, path: str, name: str) -> list[list[str]]:
    """For each expert the linears that one 3-D parameter holds, by their names in the layer."""
    leaves = split.names[-1:] if name == "down_proj" else split.names[:-1]
    return [[f"{path}.{e}.{leaf}" for leaf in leaves] for e in range(split.count)]


def expert_folds(layer: nn.Module, spec: ModelSpec, experts: ExpertLinears) -> Iterator[Fold]:
    """Where scales fold in a layer of experts: into the norm before them, into each one's up projection.

    The norm is read by all experts, by the router, and where there is one by the shared expert and its gate.
    """
    split: Any = layer.get_submodule(experts.path)
    norm, block = spec.norm.before_mlp, experts.path.rpartition(".")[0]
    columns = split.get_submodule(f"0.{split.names[0]}").weight.shape[1]
    readers = []
    for name, module in layer.get_submodule(block).named_modules(prefix=block):
        weight = getattr(module, "weight", None)
        is_reader = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == columns
        if is_reader and not name.endswith("down_proj"):
            readers.append(name)
    if norm is not None:
        yield Fold(norm, readers)
    if len(split.names) == 3:  # the product of gate and up is linear in up
        for e in range(split.count):
            own = f"{experts.path}.{e}"
            yield Fold(f"{own}.up_proj", (f"{own}.down_proj",), is_proven=True)


def filled(moments: LayerMoments, experts: ExpertLinears) -> LayerMoments:
    """The moments with those of experts that got fewer rows than they have columns filled up; see above.

    Raises:
        BadInput: no token reached any expert of the layer.
    """
    second, cross = dict(moments.second), dict(moments.cross)
    magnitude, largest = dict(moments.magnitude), dict(moments.largest)
    for names in experts.kinds.values():
        reached = [name for name in names if moments.rows[name]]
        if not reached:
            raise BadInput(f"no token of the text reaches an expert of {experts.path}; give more text.")
        rows, (K, _) = sum(moments.rows[name] for name in reached), second[reached[0]].shape
        means = {
            id(sums): sum((sums[name] for name in reached[1:]), sums[reached[0]]) / rows
            for sums in (moments.second, moments.cross, moments.magnitude)
            if sums
        }
        pairs = ((moments.second, second), (moments.cross, cross), (moments.magnitude, magnitude))
        for name in names:
            missing = max(K - moments.rows[name], 0)
            for sums, into in pairs if missing else ():
                if sums:
                    more = means[id(sums)] * missing
                    into[name] = sums[name] + more if name in sums else more
            if name not in largest:
                largest[name] = torch.stack([moments.largest[other] for other in reached]).mean(0)
    return replace(moments, second=second, cross=cross, magnitude=magnitude, largest=largest)


def grids_of(
    formats: Mapping[str, Format], weights: Mapping[str, Tensor], experts: ExpertLinears | None
) -> dict[str, Grids]:
    """The grids of a layer's linears (N, K); those that are stored as one tensor share what it has one of."""
    shared: dict[str, Grids] = {}
    for stacks in () if experts is None else experts.weights.values():
        names = [name for stack in stacks for name in stack]
        if not _is_shared(formats[names[0]]):
            continue
        of_all = Grids(formats[names[0]], torch.cat([weights[name].float() for name in names]))
        for name in names:
            shared[name] = copy.copy(of_all)
            shared[name].shape = (weights[name].shape[0], weights[name].shape[1])
    return {
        n: shared[n] if n in shared else Grids(format, weights[n].float()) for n, format in formats.items()
    }


def join(
    model: nn.Module,
    layer_name: str,
    experts: ExpertLinears,
    packed: Mapping[str, Packed],
    rules: Mapping[str, Rule],
) -> None:
    """Put packed experts in the place of the linears of `split_layer`.

    Args:
        model: holds the layer.
        layer_name: its full name.
        experts: from `split_layer`.
        packed: of each linear, (N, K).
        rules: by the full names of 3-D parameters; each with the format that was chosen.
    """
    path, host = f"{layer_name}.{experts.path}", experts.host
    split: Any = model.get_submodule(path)
    for name in weights_of(host):
        if name not in experts.weights:  # not packed; scales may have been folded into it
            leaves = split.names[-1:] if name == "down_proj" else split.names[:-1]
            each = [
                [split.get_submodule(f"{e}.{leaf}").weight for leaf in leaves] for e in range(split.count)
            ]
            getattr(host, name).data = torch.stack([torch.cat(list(parts)) for parts in each])
    model.set_submodule(path, host)
    place = packed_place(model, path, rules)
    for name, stacks in experts.weights.items():
        format, shape = place.formats[name], tuple(getattr(host, name).shape)
        parts = [packed[linear].parts for stack in stacks for linear in stack]
        place.take(name, _stacked(format, shape, parts))
        setattr(host, name, None)
    place.train(host.training)


def stacked_weight(model: nn.Module, layer_name: str, stacks: Sequence[Sequence[str]]) -> Tensor:
    """The plain weight (E, N, K) that a layer's linears make together, as they now are."""
    layer: Any = model.get_submodule(layer_name)
    return torch.stack(
        [torch.cat([layer.get_submodule(n).weight.detach() for n in names]) for names in stacks]
    )


def _stacked(
    format: Format, shape: tuple[int, ...], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The parts of a tensor (E, N, K) of those of its rows."""
    whole = {}
    for part, spec in format.layout(shape).items():
        own = [tensors[part] for tensors in parts]
        is_one = _is_shared(format) and prod(spec.shape) == 1
        whole[part] = own[0].clone() if is_one else torch.cat([t.flatten() for t in own]).view(spec.shape)
    return whole


def unreached(moments: LayerMoments, experts: ExpertLinears) -> list[int]:
    """The experts that no token was sent to."""
    of_first = next(iter(experts.weights.values()))
    return [e for e, names in enumerate(of_first) if not moments.rows[names[0]]]


def sentence(name: str, missed: Sequence[int], count: int) -> str:
    """What to say about experts of a layer that the text did not reach."""
    named = ", ".join(str(e) for e in missed[:_NAMED]) + (" and others" if len(missed) > _NAMED else "")
    return (
        f"{len(missed)} of {count} experts of {name} were reached by no token of the text ({named}): they are"
        " rounded by the mean of what the layer's others saw; more text, or another, reaches more"
    )
