"""A cache of tables: computed once, as plain tensors that every stream may read, up to a limit of bytes.

A plain `lru_cache` of tensors goes wrong in four ways. Made while something is traced, it keeps a tensor
without values for good; made under another default device, half of it lies there; made on one stream of a
GPU, another stream may read it before it is written; and what was once asked for stays for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")
MAX_BYTES = 2**28  # of one function's tables; the latest stays, however large


def keep_tables(
    maxsize: int = 64, max_bytes: int = MAX_BYTES, *, of_numbers: bool = False
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Keep what a function of hashable values returns: tensors, or an object or a collection that holds some.

    It is made without a gradient, outside of inference mode and of whatever mode is watching, with the CPU as
    the default device. Where tensors have no values (under FakeTensorMode, in make_fx and torch.compile), it
    is made anew and not kept, so that a trace has it as a constant. While a CUDA graph is captured, a result
    that is there already is taken, and a new one is made and not kept.

    Args:
        maxsize: most results.
        max_bytes: most bytes of all results, on all devices together; the least recently used go first.
        of_numbers: it returns no tensors but numbers read from some, which a trace needs as they are.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        store = _Store(maxsize, max_bytes)

        @wraps(make)
        def cached(*args: P.args, **options: P.kwargs) -> T:
            if torch.compiler.is_compiling():
                return make(*args, **options)
            key = (*args, *sorted(options.items()))
            if of_numbers or (has_values() and (key in store or not _is_captured())):
                value: T = store.get(key, lambda: make(*args, **options))
                return value
            with torch.device("cpu"):
                return make(*args, **options)

        cached.cache_clear = store.clear  # type: ignore[attr-defined]
        return cached

    return decorate


def has_values() -> bool:
    """Whether a tensor that is made now is a plain one, and not one of a trace."""
    return type(torch.empty(0, device="cpu", dtype=torch.float32)) is Tensor


def may_keep() -> bool:
    """Whether a table that is made now holds for later: nothing is traced, and no CUDA graph is captured."""
    return has_values() and not torch.compiler.is_compiling() and not _is_captured()


def _is_captured() -> bool:
    return (
        torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


class _Store:
    """The least recently used results go first."""

    def __init__(self, maxsize: int, max_bytes: int) -> None:
        self.maxsize, self.max_bytes = maxsize, max_bytes
        self._results: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = RLock()

    def __contains__(self, key: Any) -> bool:
        with self._lock:
            return key in self._results

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key][0]
            with _disable_current_modes(), torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
                result = make()
            tensors = list(_tensors(result))
            for device in {x.device for x in tensors if x.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # once; then every stream may read it
            count = sum(x.untyped_storage().nbytes() for x in tensors)
            self._results[key] = result, count
            self._bytes += count
            while len(self._results) > 1 and (
                len(self._results) > self.maxsize or self._bytes > self.max_bytes
            ):
                self._bytes -= self._results.popitem(last=False)[1][1]
            return result

    def clear(self) -> None:
        with self._lock:
            self._results.clear()
            self._bytes = 0


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        yield from _tensors(tuple(result.values()))
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)
    elif hasattr(result, "__dict__") and not callable(result):  # torch's BlockMask, for one
        yield from _tensors(vars(result))
