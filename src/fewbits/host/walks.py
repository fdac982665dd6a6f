"""What a trainer asks of a model in every step, answered by one flat loop over its modules.

transformers' Trainer calls ``train``, ``parameters`` (to clip), ``zero_grad`` and ``num_parameters`` (to
count operations) in each step, and torch answers by generators within generators. A packed model of 32
layers under adapters has 2,600 modules: 20 ms of one processor's time a step, while the GPU has nothing to
do. `shorten_walks` gives instances methods that answer the same from the modules as they are at each call.

The list of layers gets a ``train``, which the ``train`` of everything around it calls; the model, and what it
was handed over in (a PeftModel), get ``parameters``, which their ``zero_grad`` calls; the model itself gets
``num_parameters``, which asks transformers again wherever the size of a parameter is another. A class that
walks in a way of its own keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from fewbits.host.spec import locate, spec_for
from fewbits.host.unwrap import unwrap

_TRAIN, _PARAMETERS, _COUNT = "train", "parameters", "num_parameters"
_ASKED_FOR_PARAMETERS = ("parameters", "named_parameters", "_named_members")


def shorten_walks(model: Any) -> None:
    """Give ``model``, the model inside it and its list of layers the short walks; in place.

    To be called again for a wrapper that came later. As partials, which copies and pickle take along; what
    has such a method on the instance already keeps it.
    """
    inner, spec = unwrap(model), spec_for(model)
    layers = inner.get_submodule(locate(inner, spec, spec.layers))
    if type(layers).train is nn.Module.train:
        vars(layers).setdefault(_TRAIN, partial(train_all, layers))
    for owner in (inner, model):
        if all(getattr(type(owner), name) is getattr(nn.Module, name) for name in _ASKED_FOR_PARAMETERS):
            vars(owner).setdefault(_PARAMETERS, partial(all_parameters, owner))
    if hasattr(type(inner), _COUNT):
        vars(inner).setdefault(_COUNT, partial(count_parameters, inner, {}))


def lengthen_walks(model: nn.Module) -> None:
    """Undo `shorten_walks`, in ``model`` and all below."""
    for owner in model.modules():
        for name in (_TRAIN, _PARAMETERS, _COUNT):
            if getattr(vars(owner).get(name), "func", None) in (train_all, all_parameters, count_parameters):
                delattr(owner, name)


def train_all(root: nn.Module, mode: bool = True) -> nn.Module:
    """``root.train(mode)``: every module below gets the mode; one with a ``train`` of its own is asked."""
    own: dict[type, bool] = {}
    root.training = mode
    below = list(root._modules.values())
    while below:
        module = below.pop()
        if module is None:
            continue
        kind = module.__class__
        if kind not in own:
            own[kind] = kind.train is not nn.Module.train
        if own[kind] or _TRAIN in module.__dict__:
            module.train(mode)
            continue
        if module.training is not mode:  # to write it costs ten times as much as to look
            module.training = mode
        below.extend(module._modules.values())
    return root


def all_parameters(root: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    """``root.parameters(recurse)``: each parameter once, in torch's order, found when it is asked for."""
    if not recurse:
        yield from type(root).parameters(root, recurse)
        return
    as_torch: dict[type, bool] = {}
    visited: set[nn.Module] = set()
    # The parameters themselves: an id of one that is gone may come again.
    parameters: dict[int, nn.Parameter] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is None or module in visited:
            continue
        kind = module.__class__
        if kind not in as_torch:
            as_torch[kind] = kind.named_modules is nn.Module.named_modules
        if as_torch[kind]:
            visited.add(module)
            below = [module]
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
        else:
            below = [m for _, m in module.named_modules(visited)]
        for owner in below:
            for parameter in owner._parameters.values():
                if parameter is not None and id(parameter) not in parameters:
                    parameters[id(parameter)] = parameter
                    yield parameter


def count_parameters(
    root: Any,
    counts: dict[bool, tuple[list[int], int]],
    only_trainable: bool = False,
    exclude_embeddings: bool = False,
) -> int:
    """``root.num_parameters(...)``, as transformers counted when all parameters had the sizes that they have.

    Args:
        root: a model of transformers.
        counts: by ``exclude_embeddings``, those sizes and the number; written here.
        only_trainable: is always counted anew.
        exclude_embeddings: leave out those of embeddings.
    """
    count = type(root).num_parameters
    if only_trainable:
        number: int = count(root, only_trainable, exclude_embeddings)
        return number
    sizes = [p.numel() for p in all_parameters(root)]
    if exclude_embeddings not in counts or counts[exclude_embeddings][0] != sizes:
        counts[exclude_embeddings] = sizes, count(root, only_trainable, exclude_embeddings)
    return counts[exclude_embeddings][1]
