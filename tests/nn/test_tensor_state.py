"""Keys of tensors' values: equal while nothing is written, and safe to copy."""

from __future__ import annotations

import copy
import gc
import pickle

import torch

from fewbits.nn.tensor_state import state_of


def test_a_key_follows_memory_and_version() -> None:
    tensor = torch.randn(3, 4)
    key = state_of([tensor])
    assert key == state_of([tensor]) and hash(key) == hash(state_of([tensor]))
    assert key != state_of([tensor.clone()])
    tensor.add_(1)
    assert key != state_of([tensor])


def test_a_copy_of_a_key_names_nothing_and_gives_nothing_back() -> None:
    """A reference that was given back twice ended the process when garbage was collected."""
    tensor = torch.randn(3, 4)
    key = state_of([tensor])
    for made in (copy.deepcopy(key), copy.copy(key[0][0]), pickle.loads(pickle.dumps(key))):
        assert made not in (key, key[0][0])
        assert made != copy.deepcopy(made)
        del made
    gc.collect()
    assert key == state_of([tensor])
    other = torch.randn(3, 4)
    assert key != state_of([other])
