"""Kernel tests are written once and run on a GPU (`pytest -m gpu`) and, on a CPU, under Triton's interpreter.

Triton decides whether to interpret a kernel when the kernel is defined, so test_interpreter.py runs the tests
marked `interpret` in a process of their own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session", autouse=INTERPRETED)
def _language_patched_once() -> Iterator[None]:
    """The interpreter patches triton.language again in each call within a kernel, a third of its time.

    In a process that only interprets, once for each module of kernels is enough. Nor does it compute, a
    quarter of its time, whether sums of integers overflow: it would tell so only to kernels being debugged.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, known = interpreter._patch_lang, set()

    class Stays:
        def restore(self) -> None:
            """Nothing is taken back."""

    def once(fn: Callable[..., Any]) -> Any:
        if fn.__module__ not in known:
            known.add(fn.__module__)
            patch(fn)
        return Stays()

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    plain = dataclasses.replace(builder.options, sanitize_overflow=False)
    with mock.patch.object(interpreter, "_patch_lang", once), mock.patch.object(builder, "options", plain):
        yield


@pytest.fixture
def kernel_device() -> str:
    """The device whose tensors a Triton kernel takes in this process."""
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    return "cuda"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an element that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
