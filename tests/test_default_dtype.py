"""What is computed does not depend on torch's default dtype, which users and other libraries set."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fewbits import FastLanguageModel, fuse
from fewbits.nn.packed_layers import packed_layer
from fewbits.recipes import get_recipe
from fewbits.training.optimizer import AdamW8bit, MuonAdamW
from tests.models.loading import save_tiny


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def forget_tables() -> None:
    """As in a new process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fewbits.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if callable(value) and "cache_clear" in getattr(value, "__dict__", {}):
            value.cache_clear()


def of_layers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, 256, generator=generator, dtype=torch.float32) for n in (24, 8))
    results = []
    for name in ("stochastic", "int8"):
        linear = torch.nn.Linear(256, 24, bias=False, dtype=torch.float32)
        linear.weight.data.copy_(w)
        rows = x.clone().requires_grad_()
        y = packed_layer(linear, get_recipe(name).linear)(rows)
        y.sum().backward()
        results += [y.detach(), rows.grad]
    return results


def of_optimizers() -> list[Tensor]:
    results = []
    for kind in (AdamW8bit, MuonAdamW):
        w = torch.linspace(-1, 1, 24 * 512, dtype=torch.float32).view(24, 512)
        params = [torch.nn.Parameter(w.clone()), torch.nn.Parameter(torch.ones(40, dtype=torch.float32))]
        optimizer = kind(params, lr=1e-2)
        for step in range(3):
            for param in params:
                param.grad = (param.detach() * (step + 1)).sin()
            optimizer.step()
        results += [param.detach() for param in params]
    return results


def of_a_model(folder) -> list[Tensor]:
    model, _ = FastLanguageModel.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    model = FastLanguageModel.get_peft_model(model, r=4)
    fuse(model)
    ids = torch.arange(1, 17)[None]
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("what", ["layers", "optimizers", pytest.param("model", marks=pytest.mark.slow)])
def test_nothing_depends_on_it(what, default_dtype, tmp_path) -> None:
    """Under bfloat16 AdamW8bit and every load failed, and stochastic products were wrong without a word."""
    work = {"layers": of_layers, "optimizers": of_optimizers, "model": lambda: of_a_model(tmp_path / "tiny")}
    if what == "model":
        save_tiny(tmp_path / "tiny")
    expected = work[what]()
    for dtype in (torch.bfloat16, torch.float64):
        forget_tables()
        torch.set_default_dtype(dtype)
        results = work[what]()
        assert len(results) == len(expected) > 3
        for tensor, other in zip(results, expected, strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)
