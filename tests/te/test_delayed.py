"""Delayed scaling: scales, histories and when they advance; nested blocks, threads and recomputation."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch

import fewbits.te as te
from fewbits.te.active.delayed import DelayedState, advance_together
from fewbits.te.active.numerics import current
from fewbits.te.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.te import reference

F32 = np.float32


class Column:
    """One tensor's history by the second definition."""

    def __init__(self, length: int, kind: str, margin: int, algorithm: str) -> None:
        self.history, self.scale = [F32(0)] * length, F32(1)
        self.kind, self.margin, self.algorithm = kind, margin, algorithm

    def step(self, amax: F32) -> None:
        if amax == 0:  # nothing was written: all stays
            return
        self.history[0] = F32(amax)
        chosen = max(self.history) if self.algorithm == "max" else self.history[0]
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = F32(0)
        self.scale = reference.next_scale(chosen, self.scale, self.kind, self.margin)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [1, 4])
def test_histories_and_scales(algorithm: str, margin: int, length: int) -> None:
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    layer = te.Linear(12, 8, device="cpu", bias=False)
    x_column, w_column = (Column(length, "e4m3", margin, algorithm) for _ in range(2))
    g_column = Column(length, "e5m2", margin, algorithm)
    for step in range(6):
        x = torch.randn(5, 12) * 10.0 ** (step % 3) * (step != 4)
        x.requires_grad_()
        dy = torch.randn(5, 8) * 0.1 ** (step % 4)
        amax_w = float(layer.weight.detach().abs().max())
        with te.autocast(recipe=recipe):
            y = layer(x)
        x_8 = reference.float8((x.detach().numpy() * x_column.scale).astype(F32), "e4m3")
        w_8 = reference.float8((layer.weight.detach().numpy() * w_column.scale).astype(F32), "e4m3")
        values = np.array(reference.magnitudes("e4m3"))
        a, w = (values[c & 127] * np.where(c & 128, -1, 1) for c in (x_8, w_8))
        expected = (a @ w.T) / (float(x_column.scale) * float(w_column.scale))
        np.testing.assert_allclose(
            y.detach().numpy(), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
        )
        y.backward(dy)
        with torch.no_grad():
            layer.weight += 0.3
        x_column.step(float(x.detach().abs().max()))
        w_column.step(amax_w)
        g_column.step(float(dy.abs().max()))
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        for state, index, column in ((forward, 0, x_column), (forward, 1, w_column), (backward, 0, g_column)):
            assert state.scale[index].item() == column.scale
            assert state.amax_history[:, index].tolist() == column.history


def test_states_that_advance_together_are_those_that_advance_alone() -> None:
    """Of two recipes and both passes, with columns that were not written, in any order."""
    recipes = [
        DelayedScaling(amax_history_len=n, amax_compute_algo=a) for n, a in ((4, "max"), (3, "most_recent"))
    ]
    pair: list[list[DelayedState]] = [[], []]
    for count, (recipe, forward) in enumerate(
        ((recipes[0], True), (recipes[1], True)) * 2 + ((recipes[0], False),)
    ):
        for states in pair:
            states.append(DelayedState(recipe, count + 1, forward=forward, device="cpu"))
    for _ in range(6):
        for alone, together in zip(*pair, strict=True):
            row = torch.randn_like(alone.scale).abs() * (torch.rand_like(alone.scale) < 0.7)
            alone.amax_history[0], together.amax_history[0] = row, row
        for state in pair[0]:
            state.advance()
        advance_together(pair[1])
    for alone, together in zip(*pair, strict=True):
        assert torch.equal(alone.scale, together.scale)
        assert torch.equal(alone.amax_history, together.amax_history)


def test_functions_of_the_user_choose_amax_and_scale() -> None:
    recipe = DelayedScaling(
        amax_history_len=4,
        amax_compute_algo=lambda history: history.sum(0),
        scaling_factor_compute_algo=lambda amax, scale, largest, recipe: scale + amax / largest,
    )
    layer = te.Linear(4, 4, device="cpu")
    with te.autocast(recipe=recipe):
        layer(torch.full((2, 4), 448.0))
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 2.0


def test_a_weight_that_is_not_quantised_again_keeps_its_history() -> None:
    layer = te.Linear(4, 4, device="cpu")
    for first in (True, False, None):
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            layer(torch.ones(2, 4), is_first_microbatch=first)
    history = layer.fp8_meta["scaling_fwd"].amax_history
    assert (history > 0).sum(0).tolist() == [3, 2, 0]


def test_histories_advance_at_the_end_of_the_outermost_block_and_only_with_gradients() -> None:
    layer = te.Linear(4, 4, device="cpu")
    recipe = DelayedScaling(amax_history_len=4)
    x = torch.full((2, 4), 7.0)
    with te.autocast(recipe=recipe):
        with te.autocast(recipe=recipe):
            layer(x)
        state = layer.fp8_meta["scaling_fwd"]
        assert state.scale[0] == 1 and state.amax_history[0, 0] == 7
        layer(2 * x)  # again in the same block: the larger amax counts
    assert state.scale[0] == 448 / 14 and state.amax_history[:, 0].tolist() == [0, 0, 0, 14]
    before = state.scale.clone()
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(100 * x)
    assert torch.equal(state.scale, before)


def test_gradients_advance_when_the_first_module_is_done() -> None:
    model = torch.nn.Sequential(*(te.Linear(4, 4, device="cpu") for _ in range(3)))
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        y = model(torch.randn(2, 4))
    y.sum().backward()
    for layer in model:
        history = layer.fp8_meta["scaling_bwd"].amax_history
        assert history[0, 0] == 0 and history[3, 0] > 0


def test_calibration_records_without_quantising() -> None:
    layer = te.Linear(4, 4, device="cpu")
    x = torch.randn(3, 4)
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling(amax_history_len=2)):
        y = layer(x)
    torch.testing.assert_close(
        y, torch.nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-6, atol=1e-6
    )
    assert layer.fp8_meta["scaling_fwd"].amax_history[1, 0] == x.abs().max()


def test_another_length_of_history_keeps_the_scale() -> None:
    layer = te.Linear(4, 4, device="cpu")
    for length in (4, 2, 6):
        with te.autocast(recipe=DelayedScaling(amax_history_len=length, fp8_format=Format.E4M3)):
            layer(torch.full((1, 4), 56.0))
        assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (length, 3)
        assert layer.fp8_meta["scaling_fwd"].scale[0] == 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_scales_of_the_first_time(reentrant: bool) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    torch.manual_seed(1)
    layers = [
        torch.nn.Sequential(te.Linear(8, 8, device="cpu"), te.Linear(8, 8, device="cpu")) for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    inputs = torch.randn(3, 5, 8) * torch.tensor([1.0, 20.0, 0.05])[:, None, None]
    grads = []
    for which, layer in enumerate(layers):
        for x in inputs:
            x = x.clone().requires_grad_()
            layer.zero_grad()
            with te.autocast(recipe=recipe):
                y = te.checkpoint(layer, x, use_reentrant=reentrant) if which else layer(x)
            y.square().sum().backward()
        grads.append([p.grad for p in layer.parameters()] + [x.grad])
        grads[-1] += [m.fp8_meta[f"scaling_{w}"].amax_history for m in layer for w in ("fwd", "bwd")]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_another_thread_sees_nothing_and_blocks_nest() -> None:
    seen: list[bool] = []
    outer, inner = te.autocast(recipe=Float8CurrentScaling()), te.autocast(enabled=False)
    with outer:
        thread = threading.Thread(target=lambda: seen.append(current().enabled))
        thread.start()
        thread.join()
        with inner:
            assert not current().enabled
            with outer:
                assert current().enabled
            assert not current().enabled
        assert current().enabled
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert current().enabled
    assert seen == [False] and not current().enabled


def test_a_recipe_as_a_value_equals_the_context() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    one, other = (
        torch.nn.Sequential(te.Linear(6, 6, device="cpu"), te.LayerNormMLP(6, 8, device="cpu")) for _ in "ab"
    )
    other.load_state_dict(one.state_dict())
    te.use_recipe(other, recipe)
    for _ in range(3):
        x = torch.randn(4, 6)
        with te.autocast(recipe=recipe):
            y = one(x)
        z = other(x)
        assert torch.equal(y, z)
        y.sum().backward(), z.sum().backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    x = torch.randn(2, 6)
    te.use_recipe(other, None)
    assert torch.equal(other(x), one(x))


def test_another_kind_of_recipe_is_said_once() -> None:
    layer, x = te.Linear(16, 16), torch.randn(16, 16)
    with te.autocast(recipe=DelayedScaling()):
        layer(x)
    with (
        pytest.warns(UserWarning, match="Recipe type changed from DelayedScaling to Float8"),
        te.autocast(recipe=Float8CurrentScaling()),
    ):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=Float8CurrentScaling()):
            layer(x)


def test_other_settings_for_quantised_weights_are_said() -> None:
    with te.quantized_model_init(recipe=DelayedScaling(amax_history_len=8)):
        layer = te.Linear(16, 16)
    with (
        pytest.warns(UserWarning, match="Quantizer is being updated"),
        te.autocast(recipe=DelayedScaling(amax_history_len=1)),
    ):
        layer(torch.randn(16, 16))


def test_weights_on_the_meta_device_are_quantised_when_they_are_filled() -> None:
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.LayerNormMLP(16, 32, device="meta")
    assert layer.fc1_weight.device.type == "meta"
    layer = copy.deepcopy(layer)  # as a stack of layers is made
    layer.reset_parameters()
    assert isinstance(layer.fc1_weight, te.Float8Tensor) and isinstance(layer.fc2_weight, te.Float8Tensor)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(torch.randn(16, 16))
    y.sum().backward()
    assert torch.isfinite(y).all() and layer.fc1_weight.grad is not None


def test_a_role_that_changes_keeps_scales_and_histories() -> None:
    layer, recipe = te.Linear(16, 16), DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        y = layer(torch.randn(16, 16))
        scale = layer.fp8_meta["scaling_fwd"].scale
        layer.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
        assert not layer.fp8_meta_tensors_initialized
        layer.init_fp8_meta_tensors(recipe)
    y.sum().backward()
    # the block's end advances what was recorded before the change, in the tensors that the layer goes on with
    assert layer.fp8_meta["scaling_fwd"].scale is scale and bool((scale[:2] != 1).all())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_with_separate_queries_and_keys_is_recomputed(reentrant: bool) -> None:
    torch.manual_seed(2)
    layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0.1, attention_dropout=0.1)
    again = copy.deepcopy(layer)
    gradients = []
    for module, run in (
        (layer, layer),
        (again, functools.partial(te.checkpoint, again, use_reentrant=reentrant)),
    ):
        torch.manual_seed(3)
        x = torch.ones(8, 2, 32, requires_grad=True)
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                y = run(x)
            y.sum().backward()
        state = module.self_attention.layernorm_qkv.fp8_meta["scaling_bwd"]
        assert state.scale[0] != 1
        gradients.append([x.grad, state.scale, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_pass_without_gradients_does_not_come_first() -> None:
    layer, x = te.Linear(16, 16), torch.randn(16, 16)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        with torch.no_grad():
            layer(x)
        y = layer(x)
    y.pow(2).sum().backward()
    assert layer.fp8_meta["scaling_bwd"].scale[0] != 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_goes_on_with_its_own_scales(duplicate) -> None:
    layer, recipe, x = te.Linear(16, 16), DelayedScaling(amax_history_len=4), torch.randn(16, 16)
    with te.autocast(recipe=recipe):
        layer(x)
    other = duplicate(layer)
    for module in (layer, other):
        with te.autocast(recipe=recipe):
            module(10 * x)
    scale = layer.fp8_meta["scaling_fwd"].scale
    assert torch.equal(other.fp8_meta["scaling_fwd"].scale, scale)
    assert other.fp8_meta["scaling_fwd"].scale.data_ptr() != scale.data_ptr()


def test_a_model_with_a_recipe_of_its_own_can_be_pickled() -> None:
    model = te.use_recipe(torch.nn.Sequential(te.Linear(16, 16)), DelayedScaling(amax_history_len=4))
    other, x = pickle.loads(pickle.dumps(model)), torch.randn(16, 16)
    for _ in range(2):
        assert torch.equal(other(x), model(x))
    assert other[0].fp8_meta["scaling_fwd"].scale[0] != 1  # its own passes advance its histories
