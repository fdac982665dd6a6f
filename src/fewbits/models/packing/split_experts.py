"""Experts of a model as linears of their own, where every linear is to be chosen, measured or prepared alone.

A stochastic configuration says for each linear how it runs; the experts that transformers keeps in two 3-D
parameters then become `SplitExperts`, whose linears are called as in checkpoints
(``model.layers.3.mlp.experts.17.gate_proj``) and are found like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from fewbits.errors import Unsupported
from fewbits.host.spec import spec_for
from fewbits.models.packing.experts import expert_modules
from fewbits.nn.experts import QuantizedExperts
from fewbits.nn.split_experts import SplitExperts, why_not_split


def split_experts(model: nn.Module, leave: Callable[[str], bool] | None = None) -> dict[str, nn.Module]:
    """Split the experts of every layer into linears, in place; without memory, as the weights stay.

    Args:
        model: a Hugging Face model; one without experts stays as it is.
        leave: whether the experts of that full name may stay as they are if they cannot be split; None: none.

    Returns:
        The modules whose places were taken, by their full names, for `put_back`. As long as they are held,
        their parameters are.

    Raises:
        Unsupported: experts that cannot be split, or are packed; nothing is changed then.
    """
    spec = spec_for(model)
    hosts = {}
    for path, host in expert_modules(model, spec):
        packed = isinstance(host, QuantizedExperts)
        reason = "they are packed" if packed else why_not_split(host)
        if reason is None:
            hosts[path] = host
        elif leave is None or not leave(path):
            raise Unsupported(
                f"{path} cannot be linears of their own ({reason}), so most products of this model would be "
                'exact; let them be exact by name ("*.experts": {runs: exact}), or take another model.'
            )
    for path, host in hosts.items():
        model.set_submodule(path, SplitExperts(host))
    return hosts


def put_back(model: nn.Module, hosts: Mapping[str, nn.Module]) -> None:
    """Give the model the modules again that `split_experts` took out."""
    for path, host in hosts.items():
        model.set_submodule(path, host)


def join_experts(model: nn.Module) -> list[str]:
    """Undo `split_experts` with the weights that the linears have by now; a layer's at a time are copied.

    Returns:
        Full names of the modules that were joined.

    Raises:
        Unsupported: a linear of theirs is converted.
    """
    split = [(path, module) for path, module in model.named_modules() if isinstance(module, SplitExperts)]
    for path, module in split:
        model.set_submodule(path, module.host())
    return [path for path, _ in split]


@contextmanager
def experts_split(model: nn.Module, leave: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Within it, the experts are linears of their own; after it, the model is what it was."""
    hosts = split_experts(model, leave)
    try:
        yield
    finally:
        put_back(model, hosts)


@contextmanager
def split_unless_refused(model: nn.Module, leave: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Split the experts; they stay so, unless an error leaves this context: then nothing is changed."""
    hosts = split_experts(model, leave)
    with ExitStack() as undo:
        undo.callback(put_back, model, hosts)
        yield
        undo.pop_all()


def split_as_stored(model: nn.Module, packed: Iterable[str]) -> None:
    """Split the experts of a model whose checkpoint holds packed linears of these names, if any is theirs."""
    inside = [name for name in packed if ".down_proj" in name]
    if not inside:
        return
    try:
        paths = [path for path, _ in expert_modules(model, spec_for(model))]
    except Unsupported:
        return
    if any(name.startswith(f"{path}.") for path in paths for name in inside):
        split_experts(model)
