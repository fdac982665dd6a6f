"""A live peer judges only where it agrees with its own numbers: each gate, with a right and a wrong one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests import peer_formats, peers

TESTS = Path(__file__).parent
# How peers' own decoders are called: elsewhere than behind a gate that is a comparison without one.
DECODERS = re.compile(
    r"quants\.dequantize\(|\bdequantize_4bit\(|\bto_dtype\(|\bdequantize_affine\(|\bmatmul_4bit\("
)
BEHIND_GATES = {"peers.py", "make_golden.py", "test_peers.py"}


def test_no_other_file_calls_a_peers_decoder() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {match[0]}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name not in BEHIND_GATES
        for match in DECODERS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "compare with what tests/peers.py gives, which skips where the peer is wrong"


def test_small_floats_are_the_specifications_lists() -> None:
    """OCP Microscaling 1.0: all of E2M1, and the ends of the others."""
    assert small_list("e2m1") == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert small_list("e2m3")[1:2] + small_list("e2m3")[-1:] == [0.125, 7.5]
    assert small_list("e3m2")[1:2] + small_list("e3m2")[-1:] == [0.0625, 28.0]


def small_list(kind: str) -> list[float]:
    half = 2 ** sum(peer_formats.ELEMENTS[kind][:2])
    values = peer_formats.small_floats(torch.arange(2 * half), kind).tolist()
    assert values[half:] == [-v for v in values[:half]]
    return values[:half]


def test_a_second_call_that_differs_is_no_judge() -> None:
    given = iter([torch.ones(3), torch.ones(3), torch.ones(3), torch.tensor([1.0, 1.0, 2.0])])
    assert peers.same_twice_or_skip("torch", lambda: next(given), "ones").tolist() == [1, 1, 1]
    with pytest.raises(pytest.skip.Exception, match=r"torch .* gives ones otherwise at a second call"):
        peers.same_twice_or_skip("torch", lambda: next(given), "ones")


def test_a_linear_that_multiplies_otherwise_is_no_judge() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    weights = {"0": model[0].weight.detach().clone()}
    peers.forwards_or_skip("torch", model, weights, rtol=1e-6)
    with torch.no_grad():
        model[0].weight[3, 7] += 0.1
    with pytest.raises(pytest.skip.Exception, match="0 multiplies otherwise than its own codes"):
        peers.forwards_or_skip("torch", model, weights, rtol=1e-6)


def test_torchaos_mx_and_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = torch.randn(4, 64)
    for kind, element in (
        ("e2m1", torch.float4_e2m1fn_x2),
        ("e3m2", "fp6_e3m2"),
        ("e4m3", torch.float8_e4m3fn),
    ):
        scales, codes = module.to_mx(x, element, 32)
        peers.live_mx(codes, scales, kind, element)
        with monkeypatch.context() as patched:
            right = module.to_dtype
            patched.setattr(module, "to_dtype", lambda *a, right=right: right(*a) + 1e-5)
            with pytest.raises(pytest.skip.Exception, match=f"of {kind}, 256 of 256 values differ"):
                peers.live_mx(codes, scales, kind, element)
    weight = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=x.abs().max() / (448 * 6))
    right_value = peers.live_nvfp4(weight)
    monkeypatch.setattr(NVFP4Tensor, "dequantize", lambda self, dtype: right_value.flip(0))
    with pytest.raises(pytest.skip.Exception, match="of NVFP4"):
        peers.live_nvfp4(weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K"])
def test_the_gguf_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 60, (4, 512 // block * size), dtype=np.uint8)
    right, decode = peers.live_gguf(stored, kind), gguf.quants.dequantize
    assert right.shape == (4, 512) and right.isfinite().all()
    monkeypatch.setattr(gguf.quants, "dequantize", lambda rows, of: decode(rows, of) + (len(rows) == 1))
    with pytest.raises(pytest.skip.Exception, match=f"{kind.name} beside its single rows"):
        peers.live_gguf(stored, kind)
    monkeypatch.setattr(gguf.quants, "dequantize", lambda rows, of: decode(rows, of) + 1)
    if kind.name == "Q4_K":  # whose blocks have inner scales: nothing here computes them
        return
    with pytest.raises(pytest.skip.Exception, match=f"{kind.name}, 2048 of 2048 values differ"):
        peers.live_gguf(stored, kind)


def test_compressed_tensors_weights() -> None:
    pytest.importorskip("compressed_tensors")
    parts = {
        "weight_packed": torch.tensor([[0x7654_3210]], dtype=torch.int32),
        "weight_shape": torch.tensor([1, 8]),
        "weight_scale": torch.tensor([[0.5, 2.0]]),
    }
    right = torch.tensor([[-4.0, -3.5, -3.0, -2.5, -8.0, -6.0, -4.0, -2.0]])
    peers_value = peers.live_compressed(lambda: right, parts, 4)
    assert torch.equal(peers_value, right)
    with pytest.raises(pytest.skip.Exception, match="a weight, 1 of 8 values differ"):
        peers.live_compressed(lambda: right + torch.tensor([0, 0, 0, 0, 0, 0, 0, 1.0]), parts, 4)
    asked = {**parts, "weight_zero_point": torch.tensor([[3, 9]], dtype=torch.int32)}
    wanted = torch.tensor([[-1.5, -1.0, -0.5, 0.0, -10.0, -8.0, -6.0, -4.0]])
    assert torch.equal(peers.live_compressed(lambda: wanted, asked, 4), wanted)


def test_pefts_own_layers_are_asked_twice() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 4)), peft.LoraConfig(target_modules=["0"])).eval()
    answers = iter([torch.zeros(2), torch.ones(2), torch.zeros(2)])
    with pytest.raises(pytest.skip.Exception, match="gives logits otherwise"):
        peers.steady_peft(model, lambda: next(answers))
    assert torch.equal(peers.steady_peft(nn.Linear(2, 2), lambda: next(answers)), torch.zeros(2))
