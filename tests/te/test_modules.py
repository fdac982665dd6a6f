"""Norms, MLP, attention and whole layers against plain torch, and the names of their parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fewbits.te as te
from fewbits.errors import BadInput, Unsupported
from fewbits.te.recipe import Float8CurrentScaling, NVFP4BlockScaling


@pytest.mark.parametrize("centred", [False, True])
def test_norms(centred: bool) -> None:
    x = torch.randn(3, 5, 24)
    for kind, norm in (("LayerNorm", te.LayerNorm), ("RMSNorm", te.RMSNorm)):
        layer = norm(24, eps=1e-3, zero_centered_gamma=centred, device="cpu")
        assert (layer.weight == (0 if centred else 1)).all()
        torch.nn.init.normal_(layer.weight)
        weight = layer.weight + centred
        if kind == "LayerNorm":
            torch.nn.init.normal_(layer.bias)
            expected = F.layer_norm(x, (24,), weight, layer.bias, 1e-3)
        else:
            expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * weight
        torch.testing.assert_close(layer(x), expected)
        fused = te.LayerNormLinear(
            24,
            10,
            eps=1e-3,
            normalization=kind,
            zero_centered_gamma=centred,
            return_layernorm_output=True,
            device="cpu",
        )
        with torch.no_grad():
            fused.layer_norm_weight.copy_(layer.weight)
            if kind == "LayerNorm":
                fused.layer_norm_bias.copy_(layer.bias)
        y, normed = fused(x)
        torch.testing.assert_close(normed, expected)
        torch.testing.assert_close(y, F.linear(expected, fused.weight, fused.bias))


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "glu": lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "qgeglu": lambda x: x.chunk(2, -1)[0] * torch.sigmoid(1.702 * x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "sreglu": lambda x: F.relu(x.chunk(2, -1)[0]) ** 2 * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation: str) -> None:
    layer = te.LayerNormMLP(12, 20, activation=activation, device="cpu", normalization="RMSNorm")
    x = torch.randn(7, 12)
    normed = F.rms_norm(x, (12,), layer.layer_norm_weight, 1e-5)
    inner = ACTIVATIONS[activation](F.linear(normed, layer.fc1_weight, layer.fc1_bias))
    torch.testing.assert_close(layer(x), F.linear(inner, layer.fc2_weight, layer.fc2_bias))


def test_mlp_with_recomputation_has_the_same_gradients() -> None:
    one, other = (te.LayerNormMLP(16, 32, device="cpu", checkpoint=c) for c in (False, True))
    other.load_state_dict(one.state_dict())
    x = torch.randn(4, 16)
    for layer in (one, other):
        with te.autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
        y.square().sum().backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def attention(q, k, v, hidden=None, bias=None, scale=None):
    """One sequence after another, one head after another; all (b, s, h, d)."""
    times = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, -1e30)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out.flatten(2)


def inputs(b: int = 2, s_q: int = 7, s_kv: int = 7, h: int = 4, g: int = 2, d: int = 8):
    return torch.randn(b, s_q, h, d), torch.randn(b, s_kv, g, d), torch.randn(b, s_kv, g, d)


def distance(s_q: int, s_kv: int, offset: int = 0) -> torch.Tensor:
    return torch.arange(s_kv)[None] - torch.arange(s_q)[:, None] - offset


@pytest.mark.parametrize("s_kv", [7, 11])
@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 3)])
def test_masks_and_windows(s_kv: int, kind: str, window: tuple[int, int] | None) -> None:
    q, k, v = inputs(s_kv=s_kv)
    away = distance(7, s_kv, s_kv - 7 if kind != "causal" else 0)
    hidden = torch.zeros(7, s_kv, dtype=torch.bool)
    if kind != "no_mask":
        hidden |= away > 0
    if window:
        hidden |= (away < -window[0]) | ((away > window[1]) if kind == "no_mask" else (away > 0))
    layer = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=kind)
    torch.testing.assert_close(layer(q, k, v, window_size=window), attention(q, k, v, hidden))


def test_layouts_agree() -> None:
    q, k, v = inputs()
    layer = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd")
    expected = layer(q, k, v)
    swapped = layer(*(t.transpose(0, 1) for t in (q, k, v)), qkv_format="sbhd")
    torch.testing.assert_close(swapped.transpose(0, 1), expected)
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    packed = layer(*(t.flatten(0, 1) for t in (q, k, v)), qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    torch.testing.assert_close(packed, expected.flatten(0, 1))
    joint = torch.stack([q, *(t.repeat_interleave(2, 2) for t in (k, v))], -2)
    torch.testing.assert_close(layer(qkv_layer=joint, qkv_interleave_dim=-2), expected)


def test_padding_and_packed_sequences_agree() -> None:
    q, k, v = inputs(b=3)
    lengths = torch.tensor([3, 7, 5])
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    layer = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal")
    padding = torch.arange(7)[None] >= lengths[:, None]
    by_mask = layer(q, k, v, attention_mask=padding[:, None, None])
    by_length = layer(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    gaps = torch.tensor([0, 7, 14, 21], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    packed = layer(
        *flat,
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=gaps,
        cu_seqlens_kv_padded=gaps,
    )
    for i, n in enumerate(lengths.tolist()):
        expected = attention(q[i : i + 1, :n], k[i : i + 1, :n], v[i : i + 1, :n], distance(n, n) > 0)[0]
        for ours in (by_mask[i], by_length[i], packed.view(3, 7, -1)[i]):
            torch.testing.assert_close(ours[:n], expected)
            assert (ours[n:] == 0).all()


def test_biases_sinks_and_largest_scores() -> None:
    q, k, v = inputs(h=6, g=6)
    layer = te.DotProductAttention(6, 8, qkv_format="bshd", attn_mask_type="no_mask", return_max_logit=True)
    bias = torch.randn(1, 6, 7, 7)
    y, largest = layer(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(y, attention(q, k, v, bias=bias))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5 + bias
    torch.testing.assert_close(largest, scores.amax((0, 2, 3)))
    y, _ = layer(q, k, v, core_attention_bias_type="alibi")
    # six heads: the slopes of four, then every other one of eight
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    torch.testing.assert_close(y, attention(q, k, v, bias=-slopes.view(1, 6, 1, 1) * distance(7, 7).abs()))
    sink = te.DotProductAttention(6, 8, qkv_format="bshd", softmax_type="learnable")
    torch.nn.init.normal_(sink.softmax_offset)
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5).masked_fill(distance(7, 7) > 0, -1e30).exp()
    probabilities = scores / (scores.sum(-1, keepdim=True) + sink.softmax_offset.exp().view(1, 6, 1, 1))
    torch.testing.assert_close(sink(q, k, v), torch.einsum("bhqk,bkhd->bqhd", probabilities, v).flatten(2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_is_a_rotation_by_relative_position(interleaved: bool) -> None:
    rope = te.RotaryPositionEmbedding(8, interleaved=interleaved)
    x = torch.randn(1, 1, 1, 10).expand(12, 1, 1, 10)
    turned = te.apply_rotary_pos_emb(x, rope(20), interleaved=interleaved)
    first, second = (0, 1) if interleaved else (0, 4)
    pair = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * torch.arange(12.0)).view(12, 1, 1)
    torch.testing.assert_close(turned[..., first], pair.real)
    torch.testing.assert_close(turned[..., second], pair.imag)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    later = te.apply_rotary_pos_emb(x, rope(20), start_positions=torch.tensor([5]), interleaved=interleaved)
    torch.testing.assert_close(later[:7], turned[5:])
    packed = te.apply_rotary_pos_emb(
        x[:, 0], rope(20), "thd", cu_seqlens=torch.tensor([0, 5, 12]), interleaved=interleaved
    )
    torch.testing.assert_close(packed, torch.cat([turned[:5], turned[:7]])[:, 0])


NAMES = {
    "self_attention.layernorm_qkv": [
        "layer_norm_weight",
        "layer_norm_bias",
        "query_weight",
        "key_weight",
        "value_weight",
        "query_bias",
        "key_bias",
        "value_bias",
    ],
    "self_attention.proj": ["weight", "bias"],
    "layernorm_mlp": [
        "layer_norm_weight",
        "layer_norm_bias",
        "fc1_weight",
        "fc1_bias",
        "fc2_weight",
        "fc2_bias",
    ],
}


def test_parameters_have_their_names() -> None:
    layer = te.TransformerLayer(16, 32, 4, device="cpu")
    expected = [f"{where}.{name}" for where, names in NAMES.items() for name in names]
    assert [name for name, _ in layer.named_parameters()] == expected
    states = {name for name in layer.state_dict() if name.endswith("_extra_state")}
    assert states == {f"{where}._extra_state" for where in (*NAMES, "self_attention.core_attention")}
    fused = te.TransformerLayer(
        16, 32, 4, fuse_qkv_params=True, bias=False, normalization="RMSNorm", device="cpu"
    )
    assert [name for name, _ in fused.named_parameters()] == [
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.layernorm_qkv.weight",
        "self_attention.proj.weight",
        "layernorm_mlp.layer_norm_weight",
        "layernorm_mlp.fc1_weight",
        "layernorm_mlp.fc2_weight",
    ]


def test_a_layer_is_the_sum_of_its_parts() -> None:
    layer = te.TransformerLayer(
        16, 32, 4, num_gqa_groups=2, hidden_dropout=0, attention_dropout=0, device="cpu"
    )
    attend, mlp = layer.self_attention, layer.layernorm_mlp
    x = torch.randn(9, 2, 16)
    qkv = attend.layernorm_qkv
    normed = F.layer_norm(x, (16,), qkv.layer_norm_weight, qkv.layer_norm_bias)
    q, k, v = (
        F.linear(normed, getattr(qkv, f"{w}_weight"), getattr(qkv, f"{w}_bias"))
        .view(9, 2, -1, 4)
        .transpose(0, 1)
        for w in ("query", "key", "value")
    )
    context = attention(q, k, v, distance(9, 9) > 0).transpose(0, 1)
    hidden = x + F.linear(context, attend.proj.weight, attend.proj.bias)
    torch.testing.assert_close(layer(x), hidden + mlp(hidden)[0] + mlp.fc2_bias)


@pytest.mark.parametrize(
    "words",
    [
        {"layer_type": "decoder"},
        {"output_layernorm": True},
        {"parallel_attention_mlp": True},
        {"apply_residual_connection_post_layernorm": True},
        {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "activation": "swiglu"},
        {"attn_input_format": "bshd", "drop_path_rate": 0.1, "qk_norm_type": "L2Normalization"},
    ],
)
def test_layers_of_every_kind_train_in_four_bits(words: dict) -> None:
    layer = te.TransformerLayer(32, 64, 4, device="cpu", **words)
    x = torch.randn(16, 2, 32, requires_grad=True)
    rope = te.RotaryPositionEmbedding(8)(16)
    with te.autocast(recipe=NVFP4BlockScaling()):
        y = layer(x, encoder_output=torch.randn(16, 2, 32), rotary_pos_emb=rope)
    y.sum().backward()
    assert y.shape == x.shape and all(
        p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()
    )


def test_parameters_on_the_meta_device_are_filled_later() -> None:
    layer = te.LayerNormLinear(8, 6, device="meta")
    assert layer.weight.is_meta
    layer.reset_parameters()
    assert not layer.weight.is_meta and (layer.layer_norm_weight == 1).all() and layer.weight.std() > 0


def test_what_is_refused() -> None:
    with pytest.raises(BadInput, match="normalization"):
        te.LayerNormLinear(4, 4, normalization="BatchNorm", device="cpu")
    with pytest.raises(BadInput, match="activation"):
        te.LayerNormMLP(4, 4, activation="tanh", device="cpu")
    with pytest.raises(BadInput, match="attn_mask_type"):
        te.DotProductAttention(1, 4)(*torch.randn(3, 2, 2, 1, 4), attn_mask_type="diagonal")
    with pytest.raises(Unsupported, match="fp8_output"):
        te.Linear(4, 4, device="cpu")(torch.randn(1, 4), fp8_output=True)
    with pytest.raises(BadInput, match="parameters_split"):
        te.Linear(4, 4, device="cpu", parameters_split={"a": 1, "b": 2})
    with pytest.raises(BadInput, match="E5M2"):
        te.recipe.DelayedScaling(fp8_format=te.recipe.Format.E5M2)


def test_alibi_counts_from_the_end_of_each_padded_sequence() -> None:
    torch.manual_seed(7)
    layer = te.DotProductAttention(2, 8, attention_dropout=0.0, attention_type="cross", qkv_format="bshd")
    q, k, v = torch.randn(2, 4, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    lengths = ((4, 7), (2, 5))
    hidden = [
        torch.stack([torch.arange(size) >= pair[i] for pair in lengths]).view(2, 1, 1, size)
        for i, size in enumerate((4, 7))
    ]
    words = {"core_attention_bias_type": "alibi"}
    y = layer(q, k, v, attention_mask=tuple(hidden), attn_mask_type="padding_causal_bottom_right", **words)
    for i, (n, m) in enumerate(lengths):
        one = (q[i : i + 1, :n], k[i : i + 1, :m], v[i : i + 1, :m])
        alone = layer(*one, attn_mask_type="causal_bottom_right", **words)
        torch.testing.assert_close(y[i, :n], alone[0])
