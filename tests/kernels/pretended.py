"""The launches that a step would make on a GPU, on a machine without one: recorded, not run.

Tensors are torch's fake ones, which have shapes and no memory, so real widths cost nothing; they say that
they are on a GPU, so that every kernel is launched as it would be there.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fewbits.decoder.scales
import fewbits.kernels.launch.nvrtc
import fewbits.kernels.launch.tuning
from fewbits.kernels.launch.jit import multiprocessors

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 188}
_ALLOCATION = 512  # what torch aligns every allocation to


class _Pointer:
    """Stands for a tensor, with the address that it would have in an aligned allocation."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = _ALLOCATION + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


@lru_cache(maxsize=256)
def _binder(kernel: JITFunction, capability: int) -> tuple[Any, Any]:
    backend = make_backend(GPUTarget("cuda", capability, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments and options as they were given."""

    kernel: JITFunction
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    grid: tuple[int, ...]
    capability: int

    def _bound(self) -> tuple[Any, Any, Any, Any]:
        backend, binder = _binder(self.kernel, self.capability)
        args = [_Pointer(a) if isinstance(a, Tensor) else a for a in self.args]
        options = {k: _Pointer(v) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return backend, options, *binder(*args, **options)[:2]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What Triton compiles this kernel for: launches with equal keys share one binary."""
        _, options, _, specialization = self._bound()
        rest = {k: v for k, v in options.items() if k not in self.kernel.arg_names}
        return self.kernel.__name__, str(specialization), str(sorted(rest.items()))

    def facts(self) -> dict[str, Any]:
        """Every argument's specialisation by its name, to say what differs between two keys."""
        _, options, bound, specialization = self._bound()
        named = dict(zip(bound, specialization, strict=True))
        return {**named, **{k: v for k, v in options.items() if k not in named}}

    def compile(self) -> Any:
        """The kernel as Triton compiles it for this launch."""
        backend, given, bound, specialization = self._bound()
        given = {**given, "debug": False, "instrumentation_mode": ""}
        options = {k: v for k, v in given.items() if k not in bound}
        parsed, signature, constexprs, attrs = self.kernel._pack_args(
            backend, given, bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        return triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=parsed.__dict__)


@dataclass
class Recorder:
    """What was launched so far."""

    capability: int
    launches: list[Launch] = field(default_factory=list)

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        self.launches.append(Launch(kernel, args, options, tuple(grid), self.capability))

    def keys(self) -> dict[str, set[tuple[Any, ...]]]:
        """The distinct keys of each kernel."""
        found: dict[str, set[tuple[Any, ...]]] = {}
        for launch in self.launches:
            found.setdefault(launch.kernel.__name__, set()).add(launch.key)
        return found


def without_memory(model: nn.Module) -> None:
    """Give the model fake parameters and buffers of the same shapes; within `pretended_gpu`."""
    known: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in list(kind.items()):
                if tensor is None:
                    continue
                if tensor not in known:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[tensor] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                kind[name] = known[tensor]


@contextlib.contextmanager
def pretended_gpu(capability: int = 90) -> Iterator[Recorder]:
    """Within it fake tensors are on a GPU of this capability, and kernels are recorded."""
    recorder = Recorder(capability)
    pair = divmod(capability, 10)
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(fewbits.kernels.__path__, "fewbits.kernels.")
    ]
    with contextlib.ExitStack() as stack:
        _forget()  # tables and facts of the true device
        stack.callback(_forget)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        patches: list[tuple[Any, str, Any]] = [
            (torch.Tensor, "is_cuda", property(lambda _: True)),
            (torch.cuda, "get_device_capability", lambda *_: pair),
            (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
            (torch.cuda, "current_device", lambda: -1),  # what a fake tensor's get_device() answers
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            # Fake tensors have no values to ask for: whatever a kernel was told to record, it did.
            (fewbits.decoder.scales, "which_have_history", lambda largest: [True] * len(largest)),
            (fewbits.kernels.launch.nvrtc, "missing", lambda: "no memory is there"),
            (fewbits.kernels.launch.tuning, "measured", lambda _: {}),
            (JITFunction, "run", lambda kernel, *a, **k: recorder.run(kernel, *a, **k)),
        ]
        for module in modules:
            if getattr(module, "multiprocessors", None) is multiprocessors:
                patches.append((module, "multiprocessors", lambda _: MULTIPROCESSORS[capability]))
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield recorder


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("fewbits."):
            for cached in list(vars(module).values()):
                if hasattr(cached, "cache_clear"):
                    cached.cache_clear()
