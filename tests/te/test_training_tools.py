"""Optimizers, the cache for generation, streams of random numbers, and what is refused."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import fewbits.te as te
from fewbits.errors import BadInput, Unsupported


def trained(make, dtype: torch.dtype = torch.float32, steps: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(5, 3).to(dtype)),
        torch.nn.Parameter(torch.randn(4).to(dtype)),
    ]
    optimizer = make(parameters)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in parameters]


SMALL = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-9, torch.uint8: 2**-3}


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("state", ["exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"])
def test_adams_states_in_small_types_go_on_after_a_checkpoint(dtype: torch.dtype, state: str) -> None:
    if state == "master_weight_dtype" and dtype in (torch.bfloat16, torch.uint8):
        pytest.skip("master weights are float32 or float16")
    words = {"lr": 0.1, "betas": (0.5, 0.6), "master_weights": True}
    exact = torch.nn.Parameter(torch.randn(9, 7))
    weight = torch.nn.Parameter(exact.detach().bfloat16())
    exact.data.copy_(weight.float())
    reference = te.optimizers.FusedAdam([exact], lr=0.1, betas=(0.5, 0.6))
    optimizer = te.optimizers.FusedAdam([weight], **words, **{state: dtype})
    for step in range(6):
        if step == 3:
            content = optimizer.state_dict()
            assert {t.dtype for t in content["state"][0].values()} == {torch.float32}
            optimizer = te.optimizers.FusedAdam([weight], **words, **{state: dtype})
            optimizer.load_state_dict(content)
        exact.grad = torch.randn(9, 7)
        weight.grad = None
        weight.grad = exact.grad.to(torch.bfloat16)
        exact.grad = weight.grad.float()
        reference.step()
        optimizer.step()
    value = optimizer.get_unscaled_state(weight, "master_param")
    assert value.dtype is torch.float32
    assert (value - exact).abs().max() <= 6 * SMALL[dtype]  # each of six steps rounds once
    torch.testing.assert_close(weight.float(), value, rtol=2**-7, atol=2**-9)


def test_adam_reads_the_lower_half_of_master_weights() -> None:
    value = torch.randn(100)
    weight = torch.nn.Parameter(value.bfloat16())
    # Transformer Engine keeps the float32 number in the parameter's 16 bits and 16 more
    remainder = (value.view(torch.int32) & 0xFFFF).to(torch.int16)
    carried = ((value.view(torch.int32) >> 16) + (remainder < 0)).to(torch.int16).view(torch.bfloat16)
    weight.data.copy_(carried)
    optimizer = te.optimizers.FusedAdam([weight], master_weights=True, store_param_remainders=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    content = optimizer.state_dict()
    content["state"][0]["master_param"] = remainder
    optimizer.load_state_dict(content)
    assert torch.equal(optimizer.get_unscaled_state(weight, "master_param"), value)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(decay: float) -> None:
    words = {"lr": 3e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": decay}
    for decoupled, theirs in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        for ours, expected in zip(
            trained(lambda p, d=decoupled: te.optimizers.FusedAdam(p, adam_w_mode=d, **words)),
            trained(lambda p, t=theirs: t(p, **words)),
            strict=True,
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_master_weights_see_small_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = te.optimizers.FusedAdam([weight], lr=1e-4, master_weights=True)
    for _ in range(30):  # each step is a 40th of bfloat16's spacing below 1
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    master = optimizer.get_unscaled_state(weight, "master_param")
    torch.testing.assert_close(master, torch.full((4,), 1 - 30e-4), rtol=0, atol=1e-6)
    assert torch.equal(weight.detach(), master.bfloat16()) and (weight < 1).all()
    state = optimizer.state_dict()
    again = te.optimizers.FusedAdam([weight], lr=1e-4, master_weights=True)
    again.load_state_dict(state)
    assert again.param_groups[0]["step"] == 30


def test_adam_trains_quantised_weights_from_their_first_values() -> None:
    with te.quantized_model_init(
        preserve_high_precision_init_val=True, recipe=te.recipe.Float8CurrentScaling()
    ):
        layer = te.Linear(16, 16, device="cpu", bias=False)
    first = layer.weight.get_high_precision_init_val()
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-3, master_weights=True)
    layer.weight.grad = torch.ones(16, 16)
    optimizer.step()
    torch.testing.assert_close(optimizer.get_unscaled_state(layer.weight, "master_param"), first - 1e-3)
    assert isinstance(layer.weight, te.Float8Tensor)
    with pytest.raises(Unsupported, match="another type of a moment"):
        te.optimizers.FusedAdam(layer.parameters(), exp_avg_dtype=torch.int8)


def test_sgd_is_torchs() -> None:
    words = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    ours, theirs = (trained(lambda p, o=o: o(p, **words)) for o in (te.optimizers.FusedSGD, torch.optim.SGD))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_generation_with_a_cache_gives_what_whole_sequences_give(paged: bool, layout: str) -> None:
    torch.manual_seed(0)
    model = te.MultiheadAttention(
        16, 4, num_gqa_groups=2, attention_dropout=0.0, qkv_format=layout, layer_number=1, device="cpu"
    ).eval()
    whole = te.MultiheadAttention(
        16, 4, num_gqa_groups=2, attention_dropout=0.0, qkv_format="bshd", device="cpu"
    )
    whole.load_state_dict(model.state_dict())
    rope = te.RotaryPositionEmbedding(4)(12)
    lengths = {7: 9, 3: 6, 5: 8}
    x = {name: torch.randn(1, n, 16) for name, n in lengths.items()}
    expected = {name: whole.eval()(t, rotary_pos_emb=rope)[0] for name, t in x.items()}
    cache = te.InferenceParams(
        3, 12, 2, 4, torch.float32, is_paged=paged, total_num_pages=9, page_size=4, qkv_format=layout
    )
    done = dict.fromkeys(lengths, 0)
    # a prompt of several tokens, single tokens, and a sequence (3) that ends and leaves the batch
    for step in ({7: 4, 3: 5, 5: 2}, {7: 1, 3: 1, 5: 1}, {5: 1, 7: 1}, {5: 4, 7: 3}):
        cache.pre_step(OrderedDict(step))
        pieces = [x[name][0, done[name] : done[name] + n] for name, n in step.items()]
        if layout == "thd":
            given = torch.cat(pieces)
        else:
            given = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=layout == "bshd")
        bounds = torch.tensor([0, *step.values()]).cumsum(0)
        y = model(
            given, rotary_pos_emb=rope, inference_params=cache, cu_seqlens_q=bounds, cu_seqlens_kv=bounds
        )
        for i, (name, n) in enumerate(step.items()):
            ours = (
                y[bounds[i] : bounds[i + 1]]
                if layout == "thd"
                else (y[i, :n] if layout == "bshd" else y[:n, i])
            )
            torch.testing.assert_close(ours, expected[name][done[name] : done[name] + n])
            done[name] += n
    assert done == lengths


def test_a_full_cache_says_so() -> None:
    cache = te.InferenceParams(2, 8, 1, 4, torch.float32, is_paged=True, total_num_pages=2, page_size=4)
    with pytest.raises(BadInput, match="total_num_pages"):
        cache.pre_step(OrderedDict({0: 8, 1: 1}))
    with pytest.raises(BadInput, match="max_sequence_length"):
        te.InferenceParams(2, 8, 1, 4, torch.float32).pre_step(OrderedDict({0: 9}))


def test_streams_of_random_numbers() -> None:
    tracker = te.CudaRNGStatesTracker()
    before = torch.random.get_rng_state()
    tracker.add("a", 5)
    assert torch.equal(torch.random.get_rng_state(), before)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat([first, second]), expected)
    with pytest.raises(BadInput, match="exists already"):
        tracker.add("a", 6)


@pytest.mark.parametrize("name", ["onnx_export", "initialize_ub", "newton_schulz", "get_cpu_offload_context"])
def test_refused_names_say_what_to_do(name: str) -> None:
    with pytest.raises(Unsupported, match=f"{name} is not supported"):
        getattr(te, name)(enabled=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a process without a GPU is told")
def test_graphs_need_a_gpu() -> None:
    with pytest.raises(Unsupported, match="CUDA device"):
        te.make_graphed_callables(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))


def test_a_recipe_that_a_chip_lacks_is_emulated_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from fewbits.te import support

    monkeypatch.setattr(support.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(support.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert te.is_fp8_available() and not te.is_mxfp8_available()
    with (
        pytest.raises(Unsupported, match=r"10\.0.*emulation"),
        te.autocast(recipe=te.recipe.MXFP8BlockScaling()),
    ):
        pass
    with te.emulation():
        assert te.is_mxfp8_available(return_reason=True) == (True, "")
        with te.autocast(recipe=te.recipe.NVFP4BlockScaling()):
            pass


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.parametrize("divides_first", [False, True])
def test_a_grad_scaler_and_gradients_in_float16(divides_first: bool) -> None:
    """Divided by its scale once, a step with an infinite one is left out, and the scale then halves."""
    kind = torch.float32 if divides_first else torch.float16  # torch itself divides no float16
    start = torch.randn(6, 5).to(kind)
    ours, plain = (torch.nn.Parameter(start.clone().to(d)) for d in (kind, torch.float32))
    optimizer = te.optimizers.FusedAdam([ours], lr=1e-2, capturable=True, master_weights=True)
    reference = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    for i in range(4):
        gradient = torch.randn(6, 5)
        ours.grad = (gradient * scaler.get_scale()).to(kind)
        plain.grad = (ours.grad.float() / scaler.get_scale()).clone()
        scaler.scale(torch.zeros(1))
        if i == 2:
            ours.grad[0, 0] = torch.inf
        before = ours.detach().clone()
        if divides_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i == 2:
            assert torch.equal(ours, before) and scaler.get_scale() == 32.0
        else:
            reference.step()
            torch.testing.assert_close(ours.float(), plain, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(ours.grad, gradient.to(kind), rtol=2e-3, atol=1e-3)


def test_norms_and_scaling_of_many_tensors() -> None:
    tools = te.optimizers
    tensors = [torch.randn(3, 5), torch.randn(0), torch.randn(70).bfloat16(), torch.randn(2, 2).half()]
    flag, each = torch.zeros(1, dtype=torch.int32), [t.double().norm() for t in tensors if t.numel()]
    norm, norms = tools.multi_tensor_applier(tools.multi_tensor_l2norm, flag, [tensors], True)
    torch.testing.assert_close(norms.double(), torch.stack(each))
    torch.testing.assert_close(norm.double(), torch.stack(each).norm().view(1))
    half, none = tools.multi_tensor_applier(
        tools.multi_tensor_unscale_l2norm, flag, [tensors], torch.tensor([0.5])
    )
    torch.testing.assert_close(half, norm / 2)
    assert none.numel() == 0 and not flag
    targets = [torch.empty(t.shape, dtype=torch.bfloat16) for t in tensors]
    for op, scale in (
        (tools.multi_tensor_scale, 0.3),
        (tools.multi_tensor_scale_tensor, torch.tensor([0.3])),
    ):
        tools.multi_tensor_applier(op, flag, [tensors, targets], scale)
        for source, target in zip(tensors, targets, strict=True):
            assert torch.equal(target, (source.float() * 0.3).bfloat16())
        assert not flag
    tensors[2][7] = torch.inf
    tools.multi_tensor_applier(tools.multi_tensor_scale, flag, [tensors, tensors], 2.0)
    assert flag == 1 and tensors[2][7] == torch.inf
    assert tools.multi_tensor_applier(tools.multi_tensor_l2norm, flag, [[torch.empty(0)]]) is None
    one, trained = torch.tensor(3.0), torch.nn.Parameter(torch.zeros(()))
    tools.multi_tensor_applier(tools.multi_tensor_scale_tensor, flag, [[one], [trained]], torch.tensor([2.0]))
    assert trained == 6 and trained.is_leaf
    assert not tools.multi_tensor_applier(tools.multi_tensor_l2norm, flag, [[trained]])[0].requires_grad
    with pytest.raises(BadInput, match="one length"):
        tools.multi_tensor_applier(tools.multi_tensor_scale, flag, [tensors, tensors[:1]], 2.0)


def test_the_page_names_every_public_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "transformer-engine.md").read_text()
    words = set(re.findall(r"[A-Za-z_]\w*", page))
    inner = {"allow_loading", "keep_former_addresses", "annotations"}
    public = {n for n, value in vars(te).items() if not n.startswith("_") and not inspect.ismodule(value)}
    assert not public - words - inner
