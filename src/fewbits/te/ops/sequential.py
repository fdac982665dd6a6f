"""`Sequential`: operations and modules one after the other, with further inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.ops.operation import FusibleOperation, run_operations


class Sequential(nn.Module):
    """A list of modules that are called in turn.

    An operation's further inputs are taken from the call's, in their order, and its further outputs are
    returned behind the last output.

    Args:
        args: operations or other modules, or one mapping of names to them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(args)

    # As a list

    def _names(self, index: int | slice) -> list[str]:
        names = list(self._modules)
        if isinstance(index, slice):
            return names[index]
        if not -len(names) <= index < len(names):
            raise IndexError(f"index {index} of a Sequential of {len(names)} modules.")
        return [names[index]]

    def _refill(self, modules: Iterable[nn.Module]) -> None:
        """Take these modules, under the names that there are and new ones behind them."""
        modules, names = list(modules), list(self._modules)
        while len(names) < len(modules):
            numbers = [int(name) + 1 for name in names if name.isdecimal()]
            names.append(str(max(numbers, default=0)))
        self._modules.clear()
        for name, module in zip(names, modules, strict=False):
            self.add_module(name, module)

    def __getitem__(self, index: int | slice) -> Any:
        """A module, or a Sequential of some of them."""
        names = self._names(index)
        if isinstance(index, slice):
            return Sequential(*(self._modules[name] for name in names))
        return self._modules[names[0]]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        """Put another module in a place."""
        self._modules[self._names(index)[0]] = module

    def __delitem__(self, index: int | slice) -> None:
        """Remove modules; the others keep their names."""
        for name in self._names(index):
            del self._modules[name]

    def __len__(self) -> int:
        """How many modules there are."""
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        """The modules."""
        return iter(self._modules.values())

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end."""
        return self.extend([module])

    def extend(self, modules: Iterable[Any]) -> Sequential:
        """Add modules at the end."""
        self._refill([*self, *modules])
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Add a module before another."""
        modules = list(self)
        modules.insert(index, module)
        self._refill(modules)
        return self

    def pop(self, index: int | slice) -> Any:
        """Remove what ``[index]`` is, and return it."""
        module = self[index]
        del self[index]
        return module

    def __iadd__(self, modules: Iterable[Any]) -> Sequential:
        """Add modules at the end."""
        return self.extend(modules)

    def __add__(self, modules: Iterable[Any]) -> Sequential:
        """A Sequential of these modules and others."""
        return Sequential(*self, *modules)

    # As a function

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[Any, dict[str, Any]] | None = None,
    ) -> Any:
        """Call all modules in turn.

        Args:
            input: (..., K).
            extra_inputs: of all operations that take any, in their order.
            op_kwargs: further arguments of operations, by module or index.

        Returns:
            The last output, or if operations have further ones a tuple of it and these.
        """
        words = {id(self[key] if isinstance(key, int) else key): w for key, w in (op_kwargs or {}).items()}
        x, waiting, returned = input, list(extra_inputs), []
        for group in _groups(self):
            if isinstance(group, list):
                needed = sum(op.input_channels.count(None) for op in group)
                y = run_operations(group, x, waiting[:needed], words)
                del waiting[:needed]
                x, *further = y if isinstance(y, tuple) else (y,)
                returned += further
            else:
                x = group(x)
        if waiting:
            raise BadInput(f"{len(waiting)} more tensors were given than the operations take.")
        return (x, *returned) if returned else x

    @property
    def _module_groups(self) -> list[Any]:
        """Neighbouring operations together, other modules each by itself."""
        return _groups(self)


def _groups(modules: Iterable[Any]) -> list[Any]:
    groups: list[Any] = []
    for module in modules:
        if not isinstance(module, FusibleOperation):
            groups.append(module)
        elif groups and isinstance(groups[-1], list):
            groups[-1] += module.basic_operations
        else:
            groups.append(module.basic_operations)
    return groups
