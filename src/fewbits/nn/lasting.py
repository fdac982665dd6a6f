"""Weights that are written while `torch.inference_mode` is on, and are used to train afterwards.

A tensor that is made in that mode can never be saved for a backward pass. Weights are made there too:
``disable_adapter()`` takes a merged adapter out again, and the evaluation of a reference model is where that
happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """What is computed inside has no gradient, and may be saved for one later, in whatever mode we are."""
    with torch.inference_mode(False), torch.no_grad():
        yield
