"""What a trainer asks of a model in every step, answered from a walk that is remembered.

transformers' Trainer calls ``train``, ``parameters`` (to clip), ``zero_grad`` and ``num_parameters`` (to
count operations) in each step, and torch answers by generators within generators. A packed model of 32
layers under adapters has 2,600 modules: 20 ms of one processor's time a step, while the GPU has nothing to
do. `shorten_walks` gives instances methods that answer the same, from the modules as they are at each call.

A walk that was made once is remembered (`Remembered`): which modules it met in which order, what each of
them held, and where each parameter came first. The next call looks whether all of that still holds, which
takes a tenth of the time of a walk, for it compares lists of numbers; otherwise it walks again. Modules are
remembered by weak references and parameters by their addresses, so that nothing is kept alive; what is
returned is always read from the modules of this moment.

The list of layers gets a ``train``, which the ``train`` of everything around it calls; the model, and what it
was handed over in (a PeftModel), get ``parameters``, which their ``zero_grad`` calls; the model itself gets
``num_parameters``, which asks transformers again wherever the size of a parameter is another. A class that
walks in a way of its own keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from fewbits.host.spec import locate, spec_for
from fewbits.host.unwrap import unwrap

_TRAIN, _PARAMETERS, _COUNT = "train", "parameters", "num_parameters"
_ASKED_FOR_PARAMETERS = ("parameters", "named_parameters", "_named_members")


def shorten_walks(model: nn.Module) -> None:
    """Give ``model``, the model inside it and its list of layers the short walks; in place.

    To be called again for a wrapper that came later. As partials, which copies and pickle take along; what
    has such a method on the instance already keeps it.
    """
    inner, spec = unwrap(model), spec_for(model)
    layers = inner.get_submodule(locate(inner, spec, spec.layers))
    if type(layers).train is nn.Module.train:
        vars(layers).setdefault(_TRAIN, partial(train_all, layers, remembered=Remembered()))
    for owner in (inner, model):
        if all(getattr(type(owner), name) is getattr(nn.Module, name) for name in _ASKED_FOR_PARAMETERS):
            vars(owner).setdefault(_PARAMETERS, partial(all_parameters, owner, remembered=Remembered()))
    if hasattr(type(inner), _COUNT):
        vars(inner).setdefault(_COUNT, partial(count_parameters, inner, {}))


def lengthen_walks(model: nn.Module) -> None:
    """Undo `shorten_walks`, in ``model`` and all below."""
    for owner in model.modules():
        for name in (_TRAIN, _PARAMETERS, _COUNT):
            if getattr(vars(owner).get(name), "func", None) in (train_all, all_parameters, count_parameters):
                delattr(owner, name)


class _Walk(NamedTuple):
    """What a walk met, in its order."""

    modules: list[ref[nn.Module]]
    children: tuple[list[int], list[int]]  # of each module how many, and the addresses of all
    values: tuple[list[int], list[int]]  # the same of what it holds as parameters
    first: list[int]  # where each parameter came for the first time, among all values
    own_train: Sequence[bool]  # which modules got a call of their own, in place of a walk below them


class Remembered:
    """The last walk from one module; a copy or a pickle of it remembers nothing."""

    def __init__(self) -> None:
        self._walk: _Walk | None = None  # in one piece: threads may walk side by side

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()

    def keep(self, modules: Sequence[nn.Module], own_train: Sequence[bool] = ()) -> None:
        """Remember these modules, all of one walk in its order, and which of them were asked in it."""
        numbers, values = _held(modules, _HELD)
        positions: dict[int, int] = {}
        for i, value in enumerate(values):
            if value is not None:
                positions.setdefault(id(value), i)
        children, _ = _held(modules, _CHILDREN)
        references, first = [ref(module) for module in modules], list(positions.values())
        self._walk = _Walk(references, children, numbers, first, own_train)

    def modules_and_flags(self) -> tuple[list[nn.Module] | None, Sequence[bool]]:
        """The modules of the walk, None if it would not meet the same ones again; and which were asked."""
        walk = self._walk
        return _again(walk), () if walk is None else walk.own_train

    def parameters(self) -> list[nn.Parameter] | None:
        """Each parameter of the walk once, if it would find the same ones again; else None."""
        walk = self._walk
        modules = _again(walk)
        if walk is None or modules is None:
            return None
        numbers, values = _held(modules, _HELD)
        return [values[i] for i in walk.first] if numbers == walk.values else None


def _again(walk: _Walk | None) -> list[nn.Module] | None:
    """The modules that a walk met, if one of this moment would meet the same; else None."""
    if walk is None:
        return None
    modules = [module for reference in walk.modules if (module := reference()) is not None]
    if len(modules) < len(walk.modules):
        return None
    return modules if _held(modules, _CHILDREN)[0] == walk.children else None


_CHILDREN, _HELD = attrgetter("_modules"), attrgetter("_parameters")


def _held(
    modules: Sequence[nn.Module], part: attrgetter[Any]
) -> tuple[tuple[list[int], list[int]], list[Any]]:
    """How many values each module holds and their addresses; and the values, one module after the other."""
    dictionaries = list(map(part, modules))
    values = list(chain.from_iterable(map(dict.values, filter(None, dictionaries))))  # most are empty
    return (list(map(len, dictionaries)), list(map(id, values))), values


def train_all(root: nn.Module, mode: bool = True, *, remembered: Remembered | None = None) -> nn.Module:
    """``root.train(mode)``: every module below gets the mode; one with a ``train`` of its own is asked."""
    remembered = remembered or Remembered()
    modules, own_train = remembered.modules_and_flags()
    if modules is None or _own_train_of(modules) != own_train:
        modules = _modules_for_train(root)
        own_train = _own_train_of(modules)
        remembered.keep(modules, own_train)
    for module, is_own in zip(modules, own_train, strict=True):
        if is_own and module is not root:
            module.train(mode)
        elif module.training is not mode:  # to write it costs ten times as much as to look
            module.training = mode
    return root


def _modules_for_train(root: nn.Module) -> list[nn.Module]:
    """The modules below that get the mode, or are asked; not what lies below one that is asked."""
    modules, below = [root], list(root._modules.values())
    while below:
        module = below.pop()
        if module is None:
            continue
        modules.append(module)
        if not _own_train_of([module])[0]:
            below.extend(module._modules.values())
    return modules


def _own_train_of(modules: Sequence[nn.Module]) -> list[bool]:
    """Which have a ``train`` of their own, by their class or, as a frozen layer may, on the instance."""
    own = {kind: kind.train is not nn.Module.train for kind in {type(module) for module in modules}}
    return [own[type(module)] or _TRAIN in module.__dict__ for module in modules]


def all_modules(root: nn.Module) -> list[nn.Module]:
    """``root.modules()``, each once and in torch's order, without names, which take most of torch's time."""
    modules: list[nn.Module] = []
    met: set[nn.Module] = set()
    below: list[nn.Module | None] = [root]
    while below:
        module = below.pop()
        if module is not None and module not in met:
            met.add(module)
            modules.append(module)
            below.extend(reversed(module._modules.values()))
    return modules


def all_parameters(
    root: Any, recurse: bool = True, *, remembered: Remembered | None = None
) -> Iterator[nn.Parameter]:
    """``root.parameters(recurse)``: each parameter once, in torch's order, found when it is asked for."""
    if not recurse:
        yield from type(root).parameters(root, recurse)
        return
    walk = _walk(root, remembered or Remembered())
    for first in walk:
        yield first  # without a look at all modules: ``model.device`` asks for this one, in each token
        others = None if remembered is None else remembered.parameters()
        if others is not None and others[0] is first:
            yield from others[1:]
            return
        break
    yield from walk


def _walk(root: Any, remembered: Remembered) -> Iterator[nn.Parameter]:
    """Each parameter once; a whole walk is remembered, unless a class names its modules its own way."""
    as_torch: dict[type, bool] = {}
    visited: dict[nn.Module, None] = {}
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
            visited[module] = None
            below = [module]
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
        else:
            others = set(visited)
            below = [m for _, m in module.named_modules(others)]
            visited.update(dict.fromkeys(others))
        for owner in below:
            for parameter in owner._parameters.values():
                if parameter is not None and id(parameter) not in parameters:
                    parameters[id(parameter)] = parameter
                    yield parameter
    if all(as_torch.values()):
        remembered.keep(list(visited))


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
    sizes = [p.numel() for p in root.parameters()]
    if exclude_embeddings not in counts or counts[exclude_embeddings][0] != sizes:
        counts[exclude_embeddings] = sizes, count(root, only_trainable, exclude_embeddings)
    return counts[exclude_embeddings][1]
