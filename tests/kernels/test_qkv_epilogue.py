"""The epilogue of the q, k, v product: the definition against autograd, kernels in each family's setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.kernels.decoder import qkv_epilogue as module
from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.qkv_epilogue import (
    QKNorm,
    QKVExtras,
    QKVLayout,
    Rotation,
    qkv_epilogue,
    qkv_epilogue_backward,
    qkv_epilogue_backward_ref,
    qkv_epilogue_ref,
)
from fewbits.kernels.decoder.qkv_epilogue_triton import QKVTile, launch_bwd, launch_fwd
from fewbits.kernels.decoder.rope import split_heads

# Each side rounds once; before it sums of r and of D products in float32, in another order.
HALF_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


@dataclass(frozen=True)
class Family:
    """A model family's setting in small."""

    layout: tuple[int, int, int, int]
    S: int
    rotary: int | None = None
    per_sequence: bool = False
    bias: bool = False
    ranks: tuple[int, int, int] = (0, 0, 0)
    norm: float | None = None
    positions: bool = False


FAMILIES = {
    "llama": Family((2, 4, 2, 16), 5, ranks=(3, 3, 3)),
    "llama_no_branches": Family((2, 4, 2, 16), 5),
    "qwen2": Family((1, 7, 1, 16), 9, bias=True, ranks=(2, 0, 5)),
    "qwen3": Family((3, 4, 4, 16), 5, ranks=(3, 3, 0), norm=0.0),
    "gemma3": Family((2, 2, 1, 40), 4, norm=1.0, per_sequence=True),
    "phi4_mini": Family((2, 3, 1, 32), 5, rotary=24, ranks=(4, 4, 4)),
    "partial_norm": Family((1, 3, 1, 32), 6, rotary=8, bias=True, norm=1.0, positions=True, ranks=(2, 2, 2)),
    "no_rotation": Family((2, 2, 2, 16), 3, rotary=0, ranks=(1, 0, 0)),
}


def made(
    family: Family, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Rotation | None, QKVLayout, QKVExtras]:
    layout, S = QKVLayout(*family.layout), family.S
    B, H, Hk, D = layout
    qkv = randn(B * S, (H + 2 * Hk) * D + 8, dtype=dtype, device=device)
    d = D if family.rotary is None else family.rotary
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = randn(B if family.per_sequence else 1, S + 3, d // 2, dtype=wide, device=device)
    angle = torch.cat([angle, angle], -1)
    ids = torch.randint(0, S + 3, (B, S), device=device) if family.positions else None
    rotation = Rotation(angle.cos() * 1.1, angle.sin() * 1.1, ids) if d else None
    every = randn(B * S, sum(family.ranks), dtype=dtype, device=device).split(family.ranks, 1)
    low_rank = tuple(
        LowRank(x, randn(h * D, r, dtype=dtype, device=device)) if r else None
        for x, r, h in zip(every, family.ranks, (H, Hk, Hk), strict=True)
    )
    bias = randn((H + 2 * Hk) * D, dtype=dtype, device=device) if family.bias else None
    norm = None
    if family.norm is not None:
        weights = [randn(D, dtype=dtype, device=device) for _ in range(2)]
        norm = QKNorm(*weights, 1e-6, family.norm)
    return qkv, rotation, layout, QKVExtras(bias, low_rank, norm)


def operands(qkv: Tensor, rotation: Rotation | None, layout: QKVLayout, extras: QKVExtras) -> module.Operands:
    return module.checked_arguments(qkv, rotation, layout, extras).operands()


# The definition.


def test_equals_transformers_qwen3_in_float32() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    qkv, rotation, layout, extras = made(replace(FAMILIES["qwen3"], ranks=(0, 0, 0)), torch.float32)
    parts = split_heads(qkv.clone(), *layout)
    norms = []
    for weight in extras.norm[:2]:
        norm = Qwen3RMSNorm(layout.head_dim, 1e-6)
        norm.weight.data.copy_(weight)
        norms.append(norm)
    S = qkv.shape[0] // layout.batch
    cos, sin = (t[:, :S] for t in rotation[:2])
    need = apply_rotary_pos_emb(norms[0](parts[0]), norms[1](parts[1]), cos, sin)
    out = qkv_epilogue(qkv, rotation, layout, extras)
    for y, want in zip(out, (*need, parts[2]), strict=True):
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_autograd_of_the_definition(name: str) -> None:
    qkv, rotation, layout, extras = made(FAMILIES[name], torch.float64)
    o = operands(qkv, rotation, layout, extras)
    leaves = [qkv.clone().requires_grad_(), *(w.requires_grad_() for w in o.weights)]
    out = qkv_epilogue_ref(leaves[0], o)
    dy = [torch.randn_like(y) for y in out]
    need = torch.autograd.grad(out, leaves, dy)
    dqkv = torch.zeros_like(qkv)
    with torch.no_grad():
        before = qkv.clone()
        q, k, v = qkv_epilogue(qkv, rotation, layout, extras)
        dw = qkv_epilogue_backward(
            tuple(dy), dqkv, rotation, layout, extras, qkv=qkv, weight_gradient=extras.norm is not None
        )
    for y, want in zip((q, k, v), out, strict=True):
        torch.testing.assert_close(y, want)
    width = (layout.heads + layout.kv_heads) * layout.head_dim
    if extras.norm is not None:  # the product stays
        assert torch.equal(qkv[:, :width], before[:, :width])
    torch.testing.assert_close(dqkv, need[0])
    assert (dw is None) == (extras.norm is None)
    for g, want in zip(dw or (), need[1:], strict=True):
        torch.testing.assert_close(g, want)


def test_definition_by_finite_differences() -> None:
    qkv, rotation, layout, extras = made(FAMILIES["partial_norm"], torch.float64)
    o = operands(qkv, rotation, layout, extras)
    assert torch.autograd.gradcheck(lambda x: qkv_epilogue_ref(x, o), (qkv.requires_grad_(),), fast_mode=True)


def test_what_does_not_fit_is_refused() -> None:
    qkv, rotation, layout, extras = made(FAMILIES["qwen3"], torch.float32)
    with pytest.raises(BadInput, match="has a multiple of 3 rows"):
        qkv_epilogue(qkv[:-1], rotation, layout)
    with pytest.raises(BadInput, match="do not fit a batch of 3 x 5"):
        qkv_epilogue(qkv, rotation._replace(cos=rotation.cos[:, :4], sin=rotation.sin[:, :4]), layout)
    with pytest.raises(BadInput, match="the bias of this product"):
        qkv_epilogue(qkv, rotation, layout, QKVExtras(bias=randn(3)))
    with pytest.raises(BadInput, match="norms of q and k take weights"):
        qkv_epilogue(qkv, rotation, layout, QKVExtras(norm=QKNorm(randn(3), randn(16), 1e-6)))
    with pytest.raises(BadInput, match="a branch of 4 heads"):
        qkv_epilogue(
            qkv, rotation, layout, QKVExtras(low_rank=(LowRank(randn(15, 2), randn(2, 64)), None, None))
        )
    with pytest.raises(Unsupported, match="rank 128 at most"):
        wide = LowRank(randn(15, 129), randn(64, 129))
        qkv_epilogue(qkv, rotation, layout, QKVExtras(low_rank=(wide, None, None)))
    gradients = tuple(torch.randn_like(p) for p in split_heads(qkv, *layout))
    with pytest.raises(BadInput, match="give it as qkv"):
        qkv_epilogue_backward(gradients, qkv, rotation, layout, extras)
    with pytest.raises(BadInput, match="a gradient of 4 heads"):
        qkv_epilogue_backward((gradients[0][:, :3], *gradients[1:]), qkv, rotation, layout)


# The ops.


@pytest.mark.parametrize("name", ["llama", "partial_norm"])
def test_opcheck(name: str) -> None:
    qkv, rotation, layout, extras = made(FAMILIES[name], torch.float32)
    args = module.checked_arguments(qkv, rotation, layout, extras)
    out = torch.zeros(qkv.shape[0], (layout.heads + layout.kv_heads) * layout.head_dim)
    torch.library.opcheck(module._qkv_epilogue, (qkv, out if extras.norm else out[:0], *args))
    gradients = [torch.randn_like(p) for p in split_heads(qkv.clone(), *layout)]
    torch.library.opcheck(
        module._qkv_epilogue_backward, (gradients, qkv, torch.zeros_like(qkv), *args, extras.norm is not None)
    )


# The kernels, on a GPU or under the interpreter.


def check_kernels(family: Family, dtype: torch.dtype, device: str, tile: QKVTile | None = None) -> None:
    qkv, rotation, layout, extras = made(family, dtype, device)
    o = operands(qkv, rotation, layout, extras)
    B, H, Hk, D = layout
    # sums of r products of normal values reach about 5 sqrt(r); a norm makes them O(1) times the weight
    scale = max(1.0, max(family.ranks, default=0) ** 0.5)
    close = {"rtol": 2 * HALF_UNIT[dtype] + 2.0**-18, "atol": 2.0**-16 * scale}
    before, need = qkv.clone(), qkv_epilogue_ref(qkv, o)
    out = (
        torch.full((B * family.S, (H + Hk) * D), torch.nan, dtype=dtype, device=device)
        if extras.norm
        else qkv
    )
    dy = [torch.randn_like(y) for y in need]
    dy[1] = dy[1].transpose(1, 2).contiguous().transpose(1, 2)
    dz, dweights = qkv_epilogue_backward_ref(dy, qkv, o)
    launch_fwd(qkv, out, o, tile)
    parts = split_heads(qkv, *layout)
    got = (*module._split_q_k(out, layout), parts[2]) if extras.norm else parts
    for y, want in zip(got, need, strict=True):
        torch.testing.assert_close(y, want, **close)
    width = (H + 2 * Hk) * D
    assert torch.equal(qkv[:, width:], before[:, width:])
    dqkv = torch.full((B * family.S, width + 16), torch.nan, dtype=dtype, device=device)
    dw = [launch_bwd(dy, qkv, dqkv, o, bool(extras.norm), tile) for _ in range(2)]
    for g, want in zip(split_heads(dqkv, *layout), dz, strict=True):
        torch.testing.assert_close(g, want, **close)
    assert dqkv[:, width:].isnan().all()
    assert torch.equal(dw[0], dw[1])
    torch.testing.assert_close(dw[0], dweights.float(), rtol=2.0**-12, atol=2.0**-12 * (B * family.S) ** 0.5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_equal_the_definition(name: str, kernel_device: str, poisoned_memory: None) -> None:
    check_kernels(FAMILIES[name], torch.float32, kernel_device, QKVTile(16, 2, 4))


@pytest.mark.gpu
@pytest.mark.interpret
def test_kernels_of_16_bits_and_no_rows(kernel_device: str, poisoned_memory: None) -> None:
    check_kernels(FAMILIES["gemma3"], torch.bfloat16, kernel_device)
    check_kernels(FAMILIES["llama_no_branches"], torch.float16, kernel_device)
    qkv, rotation, layout, extras = made(replace(FAMILIES["qwen3"], S=0), torch.float32, kernel_device)
    o = operands(qkv, rotation, layout, extras)
    launch_fwd(qkv, qkv, o)
    assert launch_bwd(split_heads(qkv, *layout), qkv, qkv, o, True).eq(0).all()


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(HALF_UNIT), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_families(name: str, dtype: torch.dtype) -> None:
    check_kernels(replace(FAMILIES[name], S=131), dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_cuda_real_shapes(D: int) -> None:
    for bias, norm, ranks in (
        (False, None, (16, 16, 16)),
        (True, None, (0, 0, 0)),
        (False, 1.0, (8, 64, 128)),
    ):
        family = Family((2, 8, 2, D), 515, bias=bias, norm=norm, ranks=ranks)
        check_kernels(family, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_cuda_public_functions() -> None:
    qkv, rotation, layout, extras = made(replace(FAMILIES["qwen3"], S=300), torch.bfloat16, "cuda")
    o = operands(qkv, rotation, layout, extras)
    need = qkv_epilogue_ref(qkv, o)
    out = qkv_epilogue(qkv, rotation, layout, extras)
    for y, want in zip(out, need, strict=True):
        torch.testing.assert_close(y, want, rtol=2.0**-7, atol=2.0**-10)
    dqkv = torch.empty_like(qkv)
    grads = tuple(torch.ones((), dtype=qkv.dtype, device="cuda").expand(y.shape) for y in out)
    dw = qkv_epilogue_backward(grads, dqkv, rotation, layout, extras, qkv=qkv, weight_gradient=True)
    want = qkv_epilogue_backward_ref(grads, qkv, o)
    torch.testing.assert_close(split_heads(dqkv, *layout)[0], want[0][0], rtol=2.0**-7, atol=2.0**-10)
    torch.testing.assert_close(torch.stack(dw), want[1], rtol=1e-3, atol=1e-2)
