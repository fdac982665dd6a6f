"""The fused decoder on the second GPU while the first is current: launches go where the operands are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.decoder.keep import KEEP_ON_HOST, KEEP_PRODUCTS, Keep
from fewbits.formats import E4M3, E4M3_ROW, INT4_G32, NF4_DQ
from fewbits.kernels.stochastic.matmul import sc_matmul
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.recipes.recipe import QAT, LoRA, Recipe, Rule
from fewbits.training.optimizer import AdamW8bit
from tests.models.tiny import tiny, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.multi]
RECIPES = {
    "nf4": Recipe(name="nf4", linear=Rule(weight=NF4_DQ)),
    "float8": Recipe(
        name="float8",
        linear=Rule(weight=NF4_DQ, weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW),
    ),
    "qat": Recipe(name="qat", qat=QAT(weight=INT4_G32)),
}


def steps(family: str, recipe: Recipe, keep: Keep, device: str) -> list[Tensor]:
    """Losses and adapters of three training steps."""
    model = tiny(family, dtype=torch.bfloat16).to(device)
    convert(model, recipe)
    model.requires_grad_(False)
    torch.manual_seed(0)
    model = get_peft_model(model, LoRA(r=16)).train()
    fuse(model, keep=keep, delayed_scaling=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW8bit(trained, lr=1e-2, min_8bit_size=16)
    ids, losses = tokens(2, 64).to(device), []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    assert not fusion_of(model).fallbacks
    return [*losses, *(p.detach().float().cpu() for p in trained)]


@pytest.mark.parametrize("keep", [KEEP_PRODUCTS, KEEP_ON_HOST], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_training_on_the_second_gpu(family: str, recipe: str, keep: Keep) -> None:
    """The same as on the first, up to attention's own backward pass, which adds up in any order."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    first, second = (steps(family, RECIPES[recipe], keep, f"cuda:{i}") for i in (0, 1))
    assert torch.cuda.current_device() == 0
    for a, b in zip(first, second, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-3, (float(a.norm()), float((a - b).norm()))
    assert torch.equal(first[0], second[0])  # the first forward pass has one order


def test_stochastic_products_on_the_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b = torch.randn(7, 256), torch.randn(9, 256)
    torch.cuda.set_device(0)
    first, second = (sc_matmul(a.to(d), b.to(d)).cpu() for d in ("cuda:0", "cuda:1"))
    assert torch.equal(first, second)
