"""Products of a decode step by the library, weights that stay decoded, and the cache that texts move in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import fewbits
from fewbits import FastLanguageModel
from fewbits.decoder.fuse import forget_weights, fuse
from fewbits.formats import get_format
from fewbits.kernels.generation.batch_rows import batch_rows_ref
from fewbits.kernels.generation.operands import LowRankSum, Product, RowNorm
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop, products, step_products
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.model_state import state_of_model
from fewbits.models.generation.products import DecodedWeights, ManyRows
from fewbits.models.generation.step import DecodeStep
from fewbits.models.generation.step_cache import StepCache
from fewbits.nn.linear import QuantizedLinear
from tests.models.emulated import on_a_cpu
from tests.models.tiny import tiny, tokens

CPU = torch.device("cpu")
GREEDY = {"do_sample": False, "max_new_tokens": 8}


def _model() -> nn.Module:
    """A packed linear layer of 64 inputs and 128 outputs, for its size."""
    return nn.Sequential(QuantizedLinear(64, 128, format=get_format("nf4_dq")))


def _product(rows: int, kind: str, *, bias: bool, rank: int) -> Product:
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sizes = {"gated": [96, 96], "three": [64, 32, 32], "added": [64]}[kind]
    f = get_format("nf4_dq")
    norm = None if kind == "added" else RowNorm(numbers(128), 1e-5)
    inner = [numbers(rows, rank, dtype=torch.float32) for _ in sizes]
    branches = [
        LowRankSum(numbers(n, rank), t, 0.5) if rank else None for n, t in zip(sizes, inner, strict=True)
    ]
    return Product(
        numbers(rows, 128, dtype=torch.float32),
        [f.quantize(numbers(n, 128) * 0.1) for n in sizes],
        numbers(rows, sizes[0] if kind == "gated" else sum(sizes), dtype=torch.float32),
        biases=[numbers(n) if bias else None for n in sizes],
        branches=branches,
        norm=norm,
        activation="silu" if kind == "gated" else None,
        add=kind == "added",
    )


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["gated", "three", "added"])
@pytest.mark.parametrize(("bias", "rank"), [(False, 0), (True, 0), (False, 4), (True, 4)])
def test_the_library_computes_the_products(kept: bool, kind: str, bias: bool, rank: int) -> None:
    """As the kernels' definition has them, within a few roundings of the result to 8 bits of mantissa."""
    product = _product(70, kind, bias=bias, rank=rank)
    decoded = DecodedWeights(_model(), torch.bfloat16, CPU) if kept else None
    want = batch_rows_ref(replace(product, out=product.out.clone())).double()
    call = ManyRows(product, dtype=torch.bfloat16, decoded=decoded)
    assert (call.keeps_weights, decoded is None or decoded.kept) == (kept, True)
    if not product.add:
        product.out.fill_(torch.nan)
    got = call.launch().double()
    assert float((got - want).norm() / want.norm()) < 2**-7


def test_weights_stay_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free at most, and none where nothing is packed."""
    model = _model()
    for free, kept in ((4 * 64 * 128, True), (4 * 64 * 128 - 1, False)):
        monkeypatch.setattr(products, "free_bytes", lambda device, free=free: free)
        assert DecodedWeights(model, torch.bfloat16, CPU).kept == kept
    monkeypatch.setattr(products, "free_bytes", lambda device: 2**40)
    assert not DecodedWeights(nn.Linear(8, 8), torch.bfloat16, CPU).kept


def test_steps_over_one_cache_share_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_products, "_FEWEST_KEPT", 3)
    model = tiny("llama", dtype=torch.bfloat16)
    fewbits.convert(model, "qlora_nf4")
    whole = DecodeStep(model, batch=6, room=16)
    fewer = DecodeStep(model, batch=4, room=16, beside=whole)
    alone = DecodeStep(model, batch=6, room=16, keep_decoded=False)
    assert whole.products.decoded is not None and fewer.products.decoded is whole.products.decoded
    assert alone.products.decoded is None
    for step in (whole, alone):
        step.tokens.copy_(torch.arange(6) + 7)
    apart = (whole.run() - alone.run()).norm() / alone.logits.norm()
    assert float(apart) < 2**-6


def ready(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Any:
    """A packed model whose steps of three texts and more keep decoded weights."""
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(step_products, "_FEWEST_KEPT", 3)
    model = tiny("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.model.layers.parameters():
            parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter))
    fewbits.convert(model, "qlora_nf4")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return with_methods(model.requires_grad_(False))


def test_weights_that_are_loaded_into_a_model_are_those_of_its_next_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``load_state_dict`` writes into the packed weights' memory, beside which decoded ones stay."""
    model, other, ids = ready(monkeypatch), ready(monkeypatch, 1), tokens(4, 9)
    before, need = (m.generate(ids, **GREEDY) for m in (model, other))
    step = decoding_of(model).step
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.generate(ids, **GREEDY), need) and not torch.equal(before, need)
    assert decoding_of(model).step is step and step.products.decoded is not None  # type: ignore[union-attr]


def test_writes_that_leave_no_trace_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ``tensor.data``: whoever writes so calls forget_weights."""
    model, other, ids = ready(monkeypatch), ready(monkeypatch, 1), tokens(4, 9)
    before, need = (m.generate(ids, **GREEDY) for m in (model, other))
    for to, of in zip(model.parameters(), other.parameters(), strict=True):
        to.data.copy_(of.data)
    forget_weights(model)
    assert torch.equal(model.generate(ids, **GREEDY), need) and not torch.equal(before, need)


def test_a_model_that_is_to_generate_keeps_them_until_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and embeddings of a loaded model say that they train, which nobody means after for_inference."""
    model = ready(monkeypatch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    fuse(model)
    model.generate(tokens(4, 9), **GREEDY)
    assert decoding_of(model).step.products.decoded is None  # type: ignore[union-attr]
    loop._STATES.pop(model)
    FastLanguageModel.for_inference(model)
    model.generate(tokens(4, 9), **GREEDY)
    assert decoding_of(model).step.products.decoded is not None  # type: ignore[union-attr]
    FastLanguageModel.for_training(model)
    assert decoding_of(model).step is None


@pytest.mark.parametrize("own", [False, True])
def test_a_step_makes_room_for_a_long_prompt(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and weights of an earlier call are no reason to refuse one; a caller's cache goes on."""
    model = ready(monkeypatch)
    words = {"past_key_values": DynamicCache()} if own else {}
    need = type(model).generate(model, tokens(1, 60), **GREEDY)
    model.generate(tokens(4, 9), **GREEDY)

    def full(_: Any, __: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] == 60 and decoding_of(model).step is not None:
            raise torch.OutOfMemoryError("full")

    hook = model.register_forward_pre_hook(full, with_kwargs=True)
    decoding_of(model).of_model = state_of_model(model)  # but for the hook it is the same model
    assert torch.equal(model.generate(tokens(1, 60), **GREEDY, **words), need)
    hook.remove()


SHAPES: list[Any] = [(3, 2, 8, 4), (3, 1, 8, 4), (3, 2, 8, 4), (3, 2, 0, 4)]


@pytest.mark.parametrize("together", [False, True])
def test_texts_move_in_a_cache(together: bool) -> None:
    """Layers of several shapes, one of them without room; with layers all alike in one tensor."""
    shapes = SHAPES[:1] * 3 if together else SHAPES
    cache = StepCache(shapes, torch.float32, CPU)
    sides = [[torch.randn(heads, 5, size) for _, heads, _, size in shapes] for _ in range(2)]
    cache.put(1, *(torch.stack(side) if together else side for side in sides))
    cache.move(1, 0, 4)
    for whole, side in zip((cache.keys, cache.values), sides, strict=True):
        for layer, put, (_, _, room, _) in zip(whole, side, shapes, strict=True):
            if not room:
                assert layer.numel() == 0
                continue
            assert torch.equal(layer[1, :, :5], put) and not layer[1, :, 5:].any()
            assert torch.equal(layer[0, :, :4], put[:, :4]) and not layer[0, :, 4:].any()
            assert not layer[2].any()
