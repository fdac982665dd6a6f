"""Second derivatives are right, or refused in a sentence that names the function; never silently wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fewbits
from fewbits.decoder.fuse import fused_layers
from fewbits.errors import Unsupported
from fewbits.formats.codebook import NF4
from fewbits.formats.integer import INT8
from fewbits.kernels.decoder.gated_activation import gated_activation
from fewbits.kernels.decoder.rmsnorm import rmsnorm
from fewbits.kernels.decoder.rope import rope
from fewbits.kernels.loss.linear_cross_entropy import linear_cross_entropy
from fewbits.kernels.loss.linear_cross_entropy_float8 import head_operands, linear_cross_entropy_float8
from fewbits.kernels.loss.linear_log_probs import linear_log_probs
from fewbits.kernels.product.fake_quantize import fake_quantize, fake_quantized_linear, lora_weight
from fewbits.kernels.product.lora_linear import lora_linear
from fewbits.kernels.product.matmul_operands import operand_linear
from fewbits.kernels.product.matmul_packed import Operands, packed_linear
from fewbits.nn.expert_products import Branch, Weights, into_experts, out_of_experts
from fewbits.nn.grouped import Table

SOURCE = Path(fewbits.__file__).parent


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def double(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Gradients of the squared gradients of f's squared sum."""
    first = torch.autograd.grad(f(*inputs).square().sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs))


W = NF4.quantize(draw(64, 64).detach())
DENSE = W.dequantize()
EXPERTS = NF4.quantize(draw(3, 8, 64).detach())
PAIRS, BRANCH = Table.of(torch.tensor([[0, 2], [2, 0], [0, 1]]), 3), (draw(3, 4, 64), draw(3, 8, 4))
COS, SIN = torch.full((1, 4, 8), 0.6), torch.full((1, 4, 8), 0.8)
ROWS, ADAPTER = draw(3, 64), (draw(4, 64), draw(64, 4))
HEAD, LABELS = draw(16, 64), torch.tensor([1, 2, 3])
REFUSED: dict[str, list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "lora_linear": [
        (lambda x, a, b: lora_linear(x, W, None, a, b, scaling=0.5), (ROWS, *ADAPTER)),
        (
            lambda x, a, b: lora_linear(x, W, None, a, b, scaling=0.5, operands=Operands(activation=INT8)),
            (ROWS, *ADAPTER),
        ),
    ],
    "operand_linear with rounded operands": [
        (lambda x, w: operand_linear(x, w, activation=INT8), (ROWS, draw(8, 64))),
        (lambda x, w: operand_linear(x, w, weight_operand=INT8), (ROWS, draw(8, 64))),
        (lambda x, w: operand_linear(x, w, gradient=INT8), (ROWS, draw(8, 64))),
    ],
    "packed_linear with a rounded gradient": [(lambda x: packed_linear(x, W, gradient=INT8), (ROWS,))],
    "fake_quantized_linear": [
        (lambda x, w: fake_quantized_linear(x, w, weight_format=NF4), (ROWS, draw(8, 64)))
    ],
    "rmsnorm": [(lambda x, w: rmsnorm(x, w, 1e-6), (ROWS, draw(64)))],
    "gated_activation": [(gated_activation, (ROWS, draw(3, 64)))],
    "linear_cross_entropy": [
        (lambda h, w: linear_cross_entropy(h, w, LABELS.view(h.shape[:-1])), (ROWS, draw(11, 64))),
        (
            lambda h, w: linear_cross_entropy(h, w, LABELS.view(h.shape[:-1]), reduction="none"),
            (ROWS, draw(11, 64)),
        ),
        (
            lambda h: linear_cross_entropy_float8(
                h, HEAD.detach(), LABELS.view(h.shape[:-1]), operands=head_operands(HEAD.detach())
            ),
            (ROWS,),
        ),
    ],
    "linear_log_probs": [
        (lambda h: linear_log_probs(h, HEAD.detach(), LABELS.view(h.shape[:-1]))[0], (ROWS,))
    ],
    "the product of experts": [
        (
            lambda x, a, b: into_experts(
                x.view(-1, 64), PAIRS, Weights(EXPERTS.dequantize), Branch(a, b, 0.5)
            ),
            (ROWS, *BRANCH),
        ),
        (
            lambda z, routing, a, b: out_of_experts(
                z, routing, None, PAIRS, Weights(EXPERTS.dequantize), Branch(a, b, 0.5)
            ),
            (draw(6, 64), draw(3, 2), *BRANCH),
        ),
    ],
}

LINEAR = {"packed_linear with a rounded gradient"}  # its gradient depends on no input


@pytest.mark.parametrize("name", REFUSED)
def test_a_second_derivative_that_would_be_wrong_is_refused_by_name(name: str) -> None:
    for f, inputs in REFUSED[name]:
        with pytest.raises(Unsupported, match=f"^{name} can be differentiated once"):
            double(f, *inputs)
        (dx, *_) = torch.autograd.grad(f(*inputs).sum(), inputs, create_graph=True)
        if name not in LINEAR:  # neither a constant gradient nor another way to the inputs hides it
            with pytest.raises(Unsupported):
                torch.autograd.grad(dx.square().sum() + sum(x.sum() for x in inputs), inputs)
        with pytest.raises(Unsupported):
            dx.square().sum().backward()
        plain = torch.autograd.grad(f(*inputs).square().sum(), inputs)
        first = torch.autograd.grad(f(*inputs).square().sum(), inputs, create_graph=True)  # unused: no harm
        for one, other in zip(plain, first, strict=True):
            assert torch.equal(one, other)


def silent_pairs(loss: Tensor, inputs: list[Tensor]) -> list[tuple[int, int]]:
    """Which gradient (first) can be differentiated by which input (second) although that is not right.

    Another path leads from what is differentiated to the input: without it torch itself refuses.
    """
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    found = []
    for i, gradient in enumerate(gradients):
        for j, x in enumerate(inputs):
            try:
                torch.autograd.grad(gradient.square().sum() + x.sum(), x, retain_graph=True)
            except Unsupported:
                continue
            found.append((i, j))
    return found


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - LINEAR))
def test_another_way_to_any_input_does_not_hide_the_refusal(name: str) -> None:
    for f, inputs in REFUSED[name]:
        for shape in ((3, 64), (1, 3, 64)):
            shaped = [x.detach().view(shape).requires_grad_() if x.shape == (3, 64) else x for x in inputs]
            assert silent_pairs(f(*shaped).sum(), shaped) == []


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nor_does_it_in_a_fused_decoder(checkpointing: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = fewbits.get_peft_model(LlamaForCausalLM(config), r=2, target_modules="all-linear")
    fewbits.fuse(model)
    assert len(fused_layers(model)) == 1
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    x = draw(1, 3, 64)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        torch.nn.init.normal_(p)
    output = model(inputs_embeds=x, use_cache=False).logits
    assert silent_pairs(output.sum(), [x, *trained]) == []


def turned(q: Tensor) -> Tensor:
    low, high = q.chunk(2, -1)
    return q * COS + torch.cat([-high, low], -1) * SIN


RIGHT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "packed_linear": (lambda x: packed_linear(x, W).sin(), lambda x: F.linear(x, DENSE).sin(), (ROWS,)),
    "operand_linear": (
        lambda x, w: operand_linear(x, w).sin(),
        lambda x, w: F.linear(x, w).sin(),
        (ROWS, draw(8, 64)),
    ),
    "lora_weight": (
        lambda a, b: lora_weight(DENSE, a, b, 0.5).sin(),
        lambda a, b: (DENSE + 0.5 * b @ a).sin(),
        ADAPTER,
    ),
    "rope": (lambda q: rope(q, q, COS, SIN)[0].sin(), lambda q: turned(q).sin(), (draw(1, 2, 4, 8),)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_second_derivatives_are_right(name: str) -> None:
    f, need, inputs = RIGHT[name]
    for one, other in zip(double(f, *inputs), double(need, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_straight_through_is_the_identity_twice() -> None:
    x = draw(3, 64)
    (dx,) = torch.autograd.grad(fake_quantize(x, INT8).square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(again, torch.full_like(x, 2.0))


# Nodes whose second derivative is right; every other one says @once_differentiable.
TWICE = {
    "_SumValue",
    "_Members",
    "_IntoTarget",
    "_StraightThrough",
    "_Product",
    "_FakeQuantize",
    "_LoRAWeight",
    "_Refused",
    "_Way",
}
TWICE_OPS = {"rope.py"}


def test_every_node_is_right_twice_or_refuses() -> None:
    found, ops = set(), set()
    for path in SOURCE.rglob("*.py"):
        if "bench" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and "autograd.Function" in " ".join(
                map(ast.unparse, node.bases)
            ):
                methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
                decorators = [ast.unparse(d) for d in methods["backward"].decorator_list]
                if not any("once_differentiable(" in d for d in decorators):
                    found.add(node.name)
        if ".register_autograd(" in text and "@once_differentiable(" not in text:
            ops.add(path.name)
    assert (found, ops) == (TWICE, TWICE_OPS)
