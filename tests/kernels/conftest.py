"""Kernel tests are written once and run on a GPU (`pytest -m gpu`) and, on a CPU, under Triton's interpreter.

Triton decides whether to interpret a kernel when the kernel is defined, so test_interpreter.py runs the tests
marked `interpret` in a process of their own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
