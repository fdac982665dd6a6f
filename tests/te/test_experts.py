"""Permutations, router, grouped linear and padding against loops over tokens and experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fewbits.te as te
from fewbits.errors import BadInput, Unsupported
from fewbits.te.recipe import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling


def routed(tokens: int = 11, experts: int = 5, top: int = 2):
    scores = torch.rand(tokens, experts)
    scores[3] = 0  # a token that no expert takes
    probs = torch.zeros_like(scores).scatter(1, scores.topk(top).indices, scores.topk(top).values)
    return torch.randn(tokens, 6, requires_grad=True), probs.requires_grad_(), (probs > 0).int()


def test_permute_orders_by_expert_and_unpermute_adds_up() -> None:
    x, probs, mask = routed()
    n = int(mask.sum())
    y, kept, ids = te.moe_permute_with_probs(x, probs, mask, n)
    routes = [(e, t) for e in range(5) for t in range(11) if mask[t, e]]
    assert torch.equal(y, torch.stack([x[t] for _, t in routes]))
    assert torch.equal(kept, torch.stack([probs[t, e] for e, t in routes]))
    assert torch.equal(te.moe_permute(x, mask, n)[0], y)
    back = te.moe_unpermute(y * 2, ids, restore_shape=x.shape)
    torch.testing.assert_close(back, 2 * x * mask.sum(1, keepdim=True))
    merged = te.moe_unpermute(y, ids, merging_probs=probs, restore_shape=x.shape)
    torch.testing.assert_close(merged, x * probs.sum(1, keepdim=True))
    merged.square().sum().backward()
    expected = (x * probs.sum(1, keepdim=True)).square().sum()
    for ours, theirs in zip(
        (x.grad, probs.grad * mask), torch.autograd.grad(expected, (x, probs)), strict=True
    ):
        torch.testing.assert_close(ours, theirs * (mask if theirs.shape == mask.shape else 1))


def test_permute_by_index() -> None:
    x, index = torch.randn(7, 4), torch.stack([torch.randperm(5)[:3] for _ in range(7)]).int()
    y, ids = te.moe_permute(x, index, 0, map_type="index")
    assert torch.equal(y, torch.stack([x[t] for e in range(5) for t in range(7) if e in index[t]]))
    probs = torch.rand(7, 3)
    back = te.moe_unpermute(y, ids, merging_probs=probs, map_type="index")
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    fewer, _ = te.moe_permute(x, index, 10, map_type="index")
    assert torch.equal(fewer, y[:10])


def test_permute_with_padding() -> None:
    x, probs, mask = routed()
    counts = mask.sum(0)
    y, kept, ids, offsets, padded = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)
    assert (padded % 4 == 0).all() and (padded - counts < 4).all() and len(y) == padded.sum()
    begin = 0
    for e in range(5):
        n = int(counts[e])
        assert torch.equal(y[begin : begin + n], x[mask[:, e].bool()])
        assert torch.equal(kept[begin : begin + n], probs[mask[:, e].bool(), e])
        begin += int(padded[e])
        assert (y[begin - int(padded[e]) + n : begin] == 0).all()
    back = te.moe_unpermute(y, ids, merging_probs=probs, restore_shape=x.shape, pad_offsets=offsets)
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))


def test_sorting_chunks() -> None:
    x, probs = torch.randn(9, 3), torch.rand(9)
    y, p = te.moe_sort_chunks_by_index_with_probs(x, probs, torch.tensor([2, 4, 3]), torch.tensor([2, 0, 1]))
    assert torch.equal(y, torch.cat([x[6:], x[:2], x[2:6]])) and torch.equal(
        p, torch.cat([probs[6:], probs[:6]])
    )


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("groups", [None, 4])
def test_router(function: str, before: bool, groups: int | None) -> None:
    logits = torch.randn(6, 16, requires_grad=True)
    bias = torch.randn(16) if function != "softmax" else None
    probs, mask = te.fused_topk_with_score_function(
        logits, 4, before, groups, groups and 2, 2.5, function, bias
    )
    scores = {
        "softmax": logits.exp() / logits.exp().sum(-1, keepdim=True),
        "sigmoid": 1 / (1 + (-logits).exp()),
        "sqrtsoftplus": (1 + logits.exp()).log() ** 0.5,
    }[function]
    for t in range(6):
        ranked = scores[t] if bias is None else scores[t] + bias
        ranked = (logits[t] if function == "softmax" and not before else ranked).detach()
        allowed = list(range(16))
        if groups:
            quality = [sorted(ranked[4 * g : 4 * g + 4].tolist())[-2:] for g in range(4)]
            best = sorted(range(4), key=lambda g: sum(quality[g]))[-2:]
            allowed = [e for e in range(16) if e // 4 in best]
        chosen = sorted(allowed, key=lambda e: float(ranked[e]))[-4:]
        assert mask[t].nonzero().flatten().tolist() == sorted(chosen)
        expected = scores[t, chosen]
        if function != "softmax" or not before:
            expected = expected / expected.sum()
        torch.testing.assert_close(probs[t, chosen], 2.5 * expected)
    (probs * torch.randn(16)).sum().backward()
    assert logits.grad.abs().sum() > 0
    _, packed = te.fused_topk_with_score_function(
        logits, 4, before, groups, groups and 2, None, function, bias, routing_map_format="bitmap_u8"
    )
    assert torch.equal((packed[:, :, None] >> torch.arange(8) & 1).flatten(1).bool(), mask)


def test_auxiliary_loss() -> None:
    logits = torch.randn(10, 8, requires_grad=True)
    mask, scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
    assert torch.equal(mask, scores >= scores.topk(2).values[:, 1:])
    loss = te.fused_moe_aux_loss(scores, mask.sum(0), 10, 8, 2, 0.1)
    expected = (
        sum(float(scores[:, e].detach().sum()) * int(mask[:, e].sum()) for e in range(8))
        * 8
        * 0.1
        / (2 * 100)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(amax_history_len=2), Float8BlockScaling(), MXFP8BlockScaling()]
)
def test_grouped_linear_is_several_linears(recipe: object) -> None:
    grouped = te.GroupedLinear(3, 16, 12, device="cpu")
    assert [n for n, _ in grouped.named_parameters()] == [
        "weight0",
        "bias0",
        "weight1",
        "bias1",
        "weight2",
        "bias2",
    ]
    alone = [te.Linear(16, 12, device="cpu") for _ in range(3)]
    x = torch.randn(9, 16, requires_grad=True)
    splits = [4, 0, 5]
    with torch.no_grad():
        for i, layer in enumerate(alone):
            layer.weight.copy_(getattr(grouped, f"weight{i}"))
    for _ in range(2):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = grouped(x, splits)
            z = torch.cat([layer(piece) for layer, piece in zip(alone, x.split(splits), strict=True)])
        assert torch.equal(y, z)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert torch.equal(dx, torch.autograd.grad(z, x, dy, retain_graph=True)[0])
        y.backward(dy), z.backward(dy)
    for i in (0, 2):
        assert torch.equal(getattr(grouped, f"weight{i}").grad, alone[i].weight.grad)
    with pytest.raises(BadInput, match="m_splits"):
        grouped(x, [4, 4, 4])


@pytest.mark.parametrize("one_bias", [False, True])
@pytest.mark.parametrize("way", ["plain", "main_grad", "delayed", "both", "apart"])
def test_one_parameter_for_all_pieces(one_bias: bool, way: str) -> None:
    """The same numbers as from a parameter for each piece, wherever the gradients go."""
    fused, later = way in ("main_grad", "both"), way in ("delayed", "both")
    words = {"device": "cpu", "fuse_wgrad_accumulation": fused, "delay_wgrad_compute": later}
    words |= {"return_bias": way == "apart", "use_grouped_tensor": True}
    several = te.GroupedLinear(3, 32, 16, **words)
    one = te.GroupedLinear(3, 32, 16, single_grouped_weight=True, single_grouped_bias=one_bias, **words)
    with torch.no_grad():
        for i in range(3):
            getattr(several, f"bias{i}").normal_()
    one.load_state_dict(several.state_dict())
    assert one.weight.shape == (3, 16, 32) and (not one_bias or one.bias.shape == (3, 16))
    x, dy = torch.randn(24, 32), torch.randn(24, 16)
    gradients = []
    for layer in (several, one):
        weights = [p for n, p in layer.named_parameters() if n.startswith("weight")]
        for weight in weights if fused else ():
            weight.main_grad = torch.full(weight.shape, 0.25)
        for _ in range(2):  # gradients add up
            leaf = x.clone().requires_grad_()
            with te.autocast(recipe=Float8BlockScaling()):
                y = layer(leaf, torch.tensor([8, 0, 16]))
            if way == "apart":
                y, biases = y
                y = y + torch.cat([b.expand(n, -1) for b, n in zip(biases, (8, 0, 16), strict=True)])
            y.backward(dy)
            biases = [p for n, p in layer.named_parameters() if n.startswith("bias")]
            assert all(b.grad is not None for b in biases)
            if later:
                layer.backward_dw()
        of_weights = [w.main_grad if fused else w.grad for w in weights]
        assert not fused or weights[0].grad is None
        parts = [torch.stack(g) if len(g) > 1 else g[0] for g in (of_weights, [b.grad for b in biases])]
        gradients.append((y.detach(), leaf.grad, *parts))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)
    back = te.GroupedLinear(3, 32, 16, device="cpu")
    back.load_state_dict(one.state_dict())
    assert torch.equal(back.weight2, one.weight[2])


@pytest.mark.parametrize(
    "name", ["Float8CurrentScaling", "Float8BlockScaling", "DelayedScaling", "MXFP8BlockScaling"]
)
def test_one_parameter_for_all_pieces_may_be_quantised_alone(name: str, tmp_path: Path) -> None:
    """As a parameter for each piece: through steps of an optimizer, files and state dicts."""
    recipe = getattr(te.recipe, name)()
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        several = te.GroupedLinear(3, 64, 32, device="cpu", bias=False)
        words = {"single_grouped_weight": True, "single_grouped_bias": True}
        one = te.GroupedLinear(3, 64, 32, device="cpu", bias=False, **words)
    assert one.weight.shape == (3, 32, 64) and len(list(one.parameters())) == 1
    assert one.weight.get_high_precision_init_val().shape == (3, 32, 64)
    with torch.no_grad():
        values = torch.randn(3, 32, 64)
        for i in range(3):
            getattr(several, f"weight{i}").copy_(values[i])
        one.weight.copy_(values)
    one.load_state_dict(one.state_dict())
    x, dy = torch.randn(24, 64), torch.randn(24, 32)
    results = []
    for layer in (several, one):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            with te.autocast(recipe=recipe):
                y = layer(leaf, [8, 0, 16])
            y.backward(dy)
            optimizer.step()
            optimizer.zero_grad()
        weights = [layer.weight] if layer is one else [getattr(layer, f"weight{i}") for i in range(3)]
        values = torch.cat([w.dequantize().view(-1, 64) for w in weights])
        results.append((y.detach(), leaf.grad, values))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    torch.save(one.state_dict(), tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(loaded["weight"].dequantize(), one.weight.dequantize())
    with te.quantized_model_init(recipe=recipe):
        again = te.GroupedLinear(3, 64, 32, device="cpu", bias=False, single_grouped_weight=True)
    again.load_state_dict(loaded)
    assert torch.equal(again.weight.dequantize(), one.weight.dequantize())
    plain = te.GroupedLinear(3, 64, 32, device="cpu", bias=False)
    plain.load_state_dict(loaded)
    assert torch.equal(plain.weight1, one.weight[1])
    with pytest.raises(BadInput, match="members"):
        one.weight.operand()


@pytest.mark.parametrize("kind", ["tensor", "block", "mx"])
def test_quantised_tokens_are_permuted_as_codes(kind: str) -> None:
    e4 = torch.float8_e4m3fn
    quantizer = {
        "tensor": te.Float8CurrentScalingQuantizer(e4),
        "block": te.Float8BlockQuantizer(e4, block_scaling_dim=1),
        "mx": te.MXFP8Quantizer(e4),
    }[kind]
    x = torch.randn(10, 256) * torch.randn(10, 1).exp()
    mask = torch.rand(10, 4) < 0.4
    codes = quantizer(x).requires_grad_()
    for size in (int(mask.sum()), int(mask.sum()) - 2, int(mask.sum()) + 3):
        y, ids = te.moe_permute(codes, mask, size)
        real = codes.detach().dequantize().requires_grad_()
        need, same_ids = te.moe_permute(real, mask, size)
        assert type(y) is type(codes) and torch.equal(ids, same_ids)
        assert torch.equal(y.dequantize(), need)
        dy = torch.randn(size, 256)
        (dx,) = torch.autograd.grad(y, codes, dy)
        torch.testing.assert_close(dx, torch.autograd.grad(need, real, dy)[0])
    by_index, _ = te.moe_permute(codes, torch.randint(4, (10, 2)), 0, map_type="index")
    assert type(by_index) is type(codes) and by_index.shape == (20, 256)
    with pytest.raises(BadInput, match="reordered"):
        te.moe_permute(te.Float8BlockQuantizer(e4)(x), mask, 5)


def test_quantile_balancing_counts_the_biases_that_tokens_need() -> None:
    """Token by token: how much more each expert would have needed to reach the best one left out."""
    tokens, experts, topk, bins = 40, 12, 3, 16
    bias, bounds = torch.linspace(-0.2, 0.2, experts), torch.tensor([-0.4, 0.5])
    histogram = torch.zeros(experts, bins, dtype=torch.int32)
    counts = torch.zeros_like(histogram)
    for _ in range(2):  # it is added to
        logits = torch.randn(2, tokens, experts)
        logits[0, 0] = 1.0
        words = {"qb_bin_bounds": bounds, "qb_histogram_mode": "two_kernel"}
        score = ("sigmoid", bias)
        probs, _ = te.fused_topk_with_score_function(
            logits, topk, False, None, None, None, *score, qb_histogram=histogram, **words
        )
        plain = te.fused_topk_with_score_function(logits, topk, False, None, None, None, *score)
        torch.testing.assert_close(probs[:, 1:], plain[0][:, 1:])
        for row in logits.sigmoid().view(-1, experts):
            cutoff = sorted((row + bias).tolist())[-topk - 1]
            for expert in range(experts):
                place = (torch.tensor(cutoff) - row[expert] - bounds[0]) * (bins / (bounds[1] - bounds[0]))
                counts[expert, int(place.floor().clamp(0, bins - 1))] += 1
    assert torch.equal(histogram, counts) and histogram[:, (0, -1)].sum() > 0
    flat = torch.zeros(1, experts)
    _, ties = te.fused_topk_with_score_function(
        flat, topk, False, None, None, None, "sigmoid", torch.zeros(experts), qb_histogram=histogram, **words
    )
    assert ties.sum() == topk
    for wrong, message in (({"qb_bin_bounds": bounds.flip(0)}, "lower < upper"), ({}, "together")):
        with pytest.raises(BadInput, match=message):
            words = {"qb_histogram": histogram, "qb_histogram_mode": "two_kernel"} if wrong else {}
            te.fused_topk_with_score_function(
                flat, 3, False, None, None, None, *score, **words, **(wrong or {"qb_histogram": histogram})
            )
    with pytest.raises(BadInput, match="only supports"):
        te.fused_topk_with_score_function(
            flat,
            3,
            False,
            None,
            None,
            None,
            "softmax",
            None,
            qb_histogram=histogram,
            qb_bin_bounds=bounds,
            qb_histogram_mode="two_kernel",
        )


def test_the_loss_keeps_one_tensor_for_the_backward_pass() -> None:
    logits, target = torch.randn(6, 50, requires_grad=True), torch.randint(50, (6,))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = te.parallel_cross_entropy(logits.bfloat16(), target, 0.1)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.float32, logits.shape)]
    loss.sum().backward()
    with torch.no_grad():
        assert not te.parallel_cross_entropy(logits, target).requires_grad


def test_padding_and_unpadding() -> None:
    x = torch.randn(12, 4, requires_grad=True)
    with te.autocast(recipe=MXFP8BlockScaling()):
        y, sizes = te.Fp8Padding(3)(x, [5, 0, 7])
        assert sizes == [32, 0, 32] and y.shape == (64, 4)
        back = te.Fp8Unpadding(3)(y, [5, 0, 7])
    assert torch.equal(back, x) and (y[5:32] == 0).all()
    back.sum().backward()
    assert (x.grad == 1).all()
    assert te.Fp8Padding(2, align_size=4)(x, [4, 8])[0] is x


def test_a_grouped_linear_over_ranks_is_refused() -> None:
    with pytest.raises(Unsupported, match="whole experts"):
        te.GroupedLinear(2, 4, 4, tp_size=2, device="cpu")


def test_cross_entropy() -> None:
    logits = torch.randn(2, 5, 9, requires_grad=True)
    target = torch.randint(9, (2, 5))
    target[0, 1] = -100
    for smoothing in (0.0, 0.2):
        for reduce in (False, True):
            ours = te.parallel_cross_entropy(logits, target, smoothing, reduce)
            theirs = F.cross_entropy(
                logits.flatten(0, 1),
                target.flatten(),
                label_smoothing=smoothing,
                reduction="mean" if reduce else "none",
            ).view(ours.shape)
            torch.testing.assert_close(ours, theirs)
            (a,), (b,) = (torch.autograd.grad(t.sum(), logits) for t in (ours, theirs))
            torch.testing.assert_close(a, b)
    assert te.parallel_cross_entropy(logits.bfloat16(), target).dtype == torch.float32


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_grouped_products_are_one_node_of_autograd(override: str | None) -> None:
    """Of three axes, with an empty piece, and weights of which some are frozen."""
    chosen = Float8BlockScaling(backward_override=override)
    layer = te.GroupedLinear(3, 32, 16, device="cpu", bias=True)
    layer.weight1.requires_grad_(False)
    alone = [te.Linear(32, 16, device="cpu") for _ in range(3)]
    for i, module in enumerate(alone):
        with torch.no_grad():
            module.weight.copy_(getattr(layer, f"weight{i}"))
            module.bias.copy_(getattr(layer, f"bias{i}"))
    x, dy = torch.randn(4, 10, 32, requires_grad=True), torch.randn(4, 10, 16)
    sizes = [24, 0, 16]
    with te.autocast(recipe=chosen):
        y = layer(x, sizes)
    assert y.shape == (4, 10, 16) and type(y.grad_fn).__name__ == "_ProductBackward"
    y.backward(dy)
    gradient, x.grad = x.grad, None
    with te.autocast(recipe=chosen):
        pieces = [m(part) for m, part in zip(alone, x.view(-1, 32).split(sizes), strict=True)]
    whole = torch.cat(pieces).view(4, 10, 16)
    whole.backward(dy)
    assert torch.equal(y, whole) and torch.equal(gradient, x.grad)
    assert layer.weight1.grad is None
    for i in (0, 2):
        assert torch.equal(getattr(layer, f"weight{i}").grad, alone[i].weight.grad)
        assert torch.equal(getattr(layer, f"bias{i}").grad, alone[i].bias.grad)
