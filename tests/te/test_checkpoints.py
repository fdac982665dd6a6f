"""State dicts with ``_extra_state`` both ways, quantised weights, and what is not unpickled."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
import types
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fewbits.te as te
from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.formats.base import Packed
from fewbits.te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fewbits.te.tensors.operand import Operand


def trained(recipe: object) -> te.LayerNormMLP:
    layer = te.LayerNormMLP(16, 32, device="cpu")
    for _ in range(3):
        with te.autocast(recipe=recipe):
            y = layer(torch.randn(4, 16) * 3)
        y.sum().backward()
    return layer


def saved_and_loaded(state: dict) -> dict:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def test_histories_travel_through_a_state_dict() -> None:
    recipe = DelayedScaling(amax_history_len=5, margin=1)
    first, second = trained(recipe), te.LayerNormMLP(16, 32, device="cpu")
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    for where in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(first.fp8_meta[where].scale, second.fp8_meta[where].scale)
        assert torch.equal(first.fp8_meta[where].amax_history, second.fp8_meta[where].amax_history)
    x = torch.randn(4, 16)
    with te.autocast(recipe=recipe):
        assert torch.equal(first(x), second(x))


def test_recipes_without_a_state_save_no_bytes() -> None:
    for recipe in (Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()):
        assert trained(recipe).state_dict()["_extra_state"].numel() == 0


@pytest.fixture
def their_module():
    """A module with the names that a pickle of Transformer Engine refers to, and nothing of fewbits."""
    module = types.ModuleType("transformer_engine.common.recipe")

    class _FormatHelper(NamedTuple):
        max_fwd: float
        max_bwd: float

    class Format(Enum):
        E4M3 = _FormatHelper(448, 448)
        HYBRID = _FormatHelper(448, 57344)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: Format = Format.HYBRID
        amax_history_len: int = 1024

    for kind in (_FormatHelper, Format, DelayedScaling):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    names = ("transformer_engine", "transformer_engine.common", module.__name__)
    assert not any(name in sys.modules for name in names)
    sys.modules.update(dict(zip(names, (types.ModuleType("a"), types.ModuleType("b"), module), strict=True)))
    yield module
    for name in names:
        del sys.modules[name]


def test_what_we_write_names_their_classes(their_module) -> None:
    layer = trained(DelayedScaling(amax_history_len=7, margin=2))
    data = layer.get_extra_state().numpy().tobytes()
    content = pickle.loads(data)  # as Transformer Engine does
    assert type(content["recipe"]) is their_module.DelayedScaling
    assert content["recipe"].amax_history_len == 7 and content["recipe"].margin == 2
    assert content["recipe"].fp8_format is their_module.Format.HYBRID
    assert content["scale_fwd"].shape == (6,) and content["amax_history_bwd"].shape == (7, 4)
    assert torch.equal(content["scale_fwd"], layer.fp8_meta["scaling_fwd"].scale)
    assert content["extra_fp8_variables"]["num_gemms"] == 2
    named = {arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}
    assert all(not str(arg).startswith("fewbits") for arg in named)


def test_what_they_write_is_read_without_running_it(their_module) -> None:
    content = {
        "recipe": their_module.DelayedScaling(margin=3, amax_history_len=4),
        "scale_fwd": torch.rand(3),
        "amax_history_fwd": torch.rand(4, 3),
        "scale_bwd": torch.rand(2),
        "amax_history_bwd": torch.rand(4, 2),
        "extra_fp8_variables": {"num_gemms": 1},
    }
    layer = te.Linear(8, 8, device="cpu")
    layer.set_extra_state(torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8))
    assert layer.fp8_meta["recipe"].margin == 3 and type(layer.fp8_meta["recipe"]) is DelayedScaling
    for word in ("fwd", "bwd"):
        assert torch.equal(layer.fp8_meta[f"scaling_{word}"].scale, content[f"scale_{word}"])
        assert torch.equal(layer.fp8_meta[f"scaling_{word}"].amax_history, content[f"amax_history_{word}"])
    del content["recipe"]  # as their first version did
    layer.set_extra_state(torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8))
    assert layer.fp8_meta["recipe"].amax_history_len == 4


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("content", [Evil(), {"scale_fwd": Evil()}, {"recipe": io.BytesIO}])
def test_other_names_are_refused(content: object, capsys) -> None:
    layer = te.Linear(8, 8, device="cpu")
    with pytest.raises(BadCheckpoint, match="could run code"):
        layer.set_extra_state(torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_damaged_bytes_are_refused(cut: int) -> None:
    layer = trained(DelayedScaling(amax_history_len=2))
    with pytest.raises(BadCheckpoint, match=r"damaged|could run code"):
        layer.set_extra_state(layer.get_extra_state()[:-cut])
    wrong = te.Linear(16, 16, device="cpu")
    with pytest.raises(BadCheckpoint, match="different kinds"):
        wrong.set_extra_state(layer.get_extra_state())


RECIPES = [
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
names = {"ids": lambda recipe: type(recipe).__name__}


@pytest.mark.parametrize("recipe", RECIPES, **names)
def test_quantised_weights_train_and_are_saved(recipe: object) -> None:
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = te.Linear(48, 32, device="cpu")
    weight = layer.weight
    assert isinstance(weight, te.QuantizedTensor) and isinstance(weight, torch.nn.Parameter)
    first = weight.get_high_precision_init_val()
    assert 0 < (first - weight.dequantize()).abs().max() < 0.3 * first.abs().max()
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    x = torch.randn(16, 48)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with te.autocast(recipe=recipe):
        y = layer(x)
        again = layer(x)
    if not isinstance(recipe, NVFP4BlockScaling):
        assert torch.equal(y, again)
    before = weight.dequantize().clone()
    y.square().mean().backward()
    assert isinstance(weight.grad, torch.Tensor) and not isinstance(weight.grad, te.QuantizedTensor)
    optimizer.step()
    assert layer.weight is weight and not torch.equal(weight.dequantize(), before)
    other = te.Linear(48, 32, device="cpu")
    other.load_state_dict(saved_and_loaded(layer.state_dict()))
    assert torch.equal(other.weight, weight.dequantize())
    loaded = saved_and_loaded(dict(layer.named_parameters()))["weight"]
    assert type(loaded) is type(weight.data) or isinstance(loaded, te.QuantizedTensor)
    assert torch.equal(loaded.dequantize(), weight.dequantize())


@pytest.mark.parametrize("recipe", RECIPES, **names)
def test_a_quantised_weight_under_another_recipe_is_refused(recipe: object) -> None:
    """All 20 pairs multiplied the codes of one recipe by activations of the other."""
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(32, 32, device="cpu")
    x = torch.randn(32, 32)
    for other in RECIPES:
        with te.autocast(recipe=other):
            if other is recipe:
                layer(x)
                continue
            with pytest.raises(BadInput, match=r"weight: it was quantised by a \w+ and this call's"):
                layer(x)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight.dequantize(), layer.bias))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[:4], **names)
def test_a_loaded_module_trains_on_as_the_saved_one(recipe: object, assign: bool) -> None:
    """Under delayed scaling loaded codes were rounded again, and their scale stood still from then on."""

    def built() -> te.LayerNormMLP:
        with te.quantized_model_init(recipe=recipe):
            return te.LayerNormMLP(32, 64, device="cpu")

    def steps(layer: te.LayerNormMLP, seeds: range) -> list[float]:
        optimizer, losses = te.FusedAdam(layer.parameters(), lr=0.05), []
        for seed in seeds:
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
            with te.autocast(recipe=recipe):
                loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    first, second = built(), built()
    steps(first, range(3))
    second.load_state_dict(saved_and_loaded(first.state_dict()), assign=assign)
    assert steps(second, range(3, 7)) == steps(first, range(3, 7))


def test_loading_forgets_the_weight_that_was_kept_for_microbatches() -> None:
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(32, 32)
    with te.autocast(recipe=RECIPES[3]):
        layer(x, is_first_microbatch=True)
        doubled = {k: v * 2 if k == "weight" else v for k, v in layer.state_dict().items()}
        layer.load_state_dict(doubled)
        assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


def test_a_quantised_weight_in_several_parameters_is_refused() -> None:
    with pytest.raises(Unsupported, match="fuse_qkv_params"), te.quantized_model_init():
        te.TransformerLayer(16, 16, 2, device="cpu")


def test_a_quantised_tensor_is_a_tensor() -> None:
    x = torch.randn(6, 32)
    held = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    real = held.dequantize()
    assert torch.equal(held + 1, real + 1) and torch.equal(held.t(), real.t())
    assert isinstance(held.detach(), te.MXFP8Tensor) and isinstance(held.clone(), te.MXFP8Tensor)
    copy = held.clone()
    copy.mul_(2)
    assert torch.equal(copy.dequantize(), 2 * real) and torch.equal(held.dequantize(), real)
    copy.copy_(torch.zeros(6, 32))
    assert isinstance(copy, te.MXFP8Tensor) and copy.dequantize().abs().sum() == 0
    assert held.to(torch.float64).dtype == torch.float64


def test_columns_that_a_gpu_laid_out_are_saved_once() -> None:
    """On a GPU rows and columns under one scale are two matrices of the same codes."""
    x = torch.randn(256, 512)
    tensor = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x)
    rows, columns = tensor.operand().rows, tensor.operand().columns
    parts = {**columns.parts, "codes": columns.codes.contiguous()}
    as_on_gpu = type(tensor)(
        x, Operand(rows, Packed(columns.format, columns.shape, columns.dtype, parts)), tensor.quantizer
    )
    stream = io.BytesIO()
    torch.save(as_on_gpu, stream)
    assert stream.getbuffer().nbytes < 1.1 * x.numel()
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    for side in ("rows", "columns"):
        ours, theirs = getattr(loaded.operand(), side), getattr(as_on_gpu.operand(), side)
        assert torch.equal(ours.codes.float(), theirs.codes.float()) and ours.shape == theirs.shape
        assert torch.equal(ours.scales, theirs.scales)


BEFORE_ROOMS = Path(__file__).parent / "golden" / "flat_addresses.pt"
"""Quantised tensors of each kind, saved on 24 November 2026, when `fewbits.te` had no rooms."""


@pytest.mark.parametrize("weights_only", [True, False])
def test_files_saved_before_modules_moved_are_read(weights_only: bool) -> None:
    with zipfile.ZipFile(BEFORE_ROOMS) as file:
        pickled = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    assert b"fewbits.te.quantized_tensor\n" in pickled and b"fewbits.te.roles\n" in pickled
    value = (torch.arange(16 * 32, dtype=torch.float32) % 13 - 6).reshape(16, 32) * 0.37
    quantizers = {
        "current": te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
        "block": te.Float8BlockQuantizer(torch.float8_e4m3fn),
        "mxfp8": te.MXFP8Quantizer(torch.float8_e4m3fn),
        "nvfp4": te.NVFP4Quantizer(),
        "identity": te.IdentityQuantizer(),
    }
    loaded = torch.load(BEFORE_ROOMS, weights_only=weights_only)
    assert loaded.keys() == {*quantizers, "tensor", "hybrid"}
    for name, quantizer in quantizers.items():
        again = quantizer.quantize(value)
        assert type(loaded[name]) is type(again)
        assert type(loaded[name].quantizer) is type(quantizer)
        assert torch.equal(loaded[name].dequantize(), again.dequantize())
    assert torch.equal(loaded["hybrid"].dequantize(), loaded["block"].dequantize())
    again = saved_and_loaded(loaded)
    assert all(torch.equal(again[name].dequantize(), loaded[name].dequantize()) for name in loaded)


def test_former_addresses_are_those_of_today() -> None:
    import fewbits.te.linear as former  # type: ignore[import-not-found]

    from fewbits.te import quantizers
    from fewbits.te.attention import DotProductAttention

    assert former.Linear is te.Linear and quantizers.MXFP8Quantizer is te.MXFP8Quantizer
    assert DotProductAttention is te.DotProductAttention
