"""Folders that transformers wrote with torchao's MX and NVFP4 tensors: loaded as they are, to the bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.torchao import from_torchao
from fewbits.nn.linear import QuantizedLinear
from tests import peers
from tests.models.loading import packed_state, same, save_tiny, tokenizer
from tests.models.test_foreign import step

KINDS = {"mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "nvfp4_without": "nvfp4"}


def config(kind: str) -> Any:
    """torchao's own, for weights of a kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchao.prototype.mx_formats")
    if kind.startswith("nvfp4"):
        return module.NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=kind == "nvfp4")
    words = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}[kind]
    return module.MXDynamicActivationMXWeightConfig(activation_dtype=words, weight_dtype=words)


def folder(at: Path, kind: str, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """A tiny model as transformers writes it with torchao, and what torchao's own decoding makes of it."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    wanted = config(kind)
    save_tiny(at / "base", **changes)
    model = AutoModelForCausalLM.from_pretrained(
        at / "base", quantization_config=TorchAoConfig(wanted), dtype=torch.bfloat16
    )
    model.save_pretrained(at / kind)
    tokenizer().save_pretrained(at / kind)
    decoded = {}
    for name, module in model.named_modules():
        if type(getattr(module, "weight", None)).__name__ in ("MXTensor", "NVFP4Tensor"):
            what = f"the weight of {name}"
            decode = module.weight.dequantize
            decoded[name] = peers.same_twice_or_skip("torchao", lambda d=decode: d(torch.float32), what)
    return at / kind, decoded


@pytest.mark.parametrize(
    "kind", [k if k == "nvfp4" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_a_folder_of_torchao_is_used_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    """Weights are torchao's; loss and gradients those of a LoRA step over the decoded weights; saved too."""
    at, decoded = folder(tmp_path, kind)
    model, _ = FastLanguageModel.from_pretrained(at, dtype=torch.float32)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert layers.keys() == decoded.keys() and len(layers) == 14
    assert {m.packed.format.name for m in layers.values()} == {KINDS[kind]}
    for name, weight in decoded.items():
        peers.same_or_skip("torchao", weight, layers[name].dequantize(torch.float32), name, rtol=2**-22)
    ids = torch.tensor([[1, 5, 9]])
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
    model.save_pretrained(tmp_path / "ours")
    tokenizer().save_pretrained(tmp_path / "ours")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "ours")
    assert same(packed_state(again), packed_state(model))

    plain = save_tiny(tmp_path / "plain").float()
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data = layer.dequantize(torch.float32)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "_proj" not in k}, strict=False)
    plain.save_pretrained(tmp_path / "plain")
    wide, _ = FastLanguageModel.from_pretrained(tmp_path / "plain", load_in_4bit=False, dtype=torch.float32)
    found, wanted = step(model), step(wide)
    assert found[0] == wanted[0] and len(wanted[1]) == 28
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("N", [24, 128, 130, 256])
@pytest.mark.parametrize("K", [32, 160, 256])
@pytest.mark.parametrize("tiled", [False, True])
def test_scales_in_either_order(N: int, K: int, tiled: bool) -> None:
    """By torchao's own tensors, of E5M2 too, which its configurations do not offer for weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)).bfloat16()
    for element in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2):
        theirs = mx.MXTensor.to_mx(x, element, 32, is_swizzled_scales=tiled)
        parts = {"_weight_qdata": theirs.qdata, "_weight_scale": theirs.scale}
        ours = from_torchao(parts, "x", {}, torch.bfloat16).dequantize(torch.float32)
        found = peers.same_twice_or_skip("torchao", lambda t=theirs: t.dequantize(torch.float32), "a weight")
        peers.same_or_skip("torchao", found, ours, f"{(N, K)} of {element}")
    whole = (x.abs().max() / (448 * 6)).float()
    theirs = nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole, is_swizzled_scales=tiled)
    parts = {"_weight_qdata": theirs.qdata, "_weight_scale": theirs.scale, "_weight_per_tensor_scale": whole}
    ours = from_torchao(parts, "x", {}, torch.bfloat16).dequantize(torch.float32)
    found = peers.same_twice_or_skip("torchao", lambda: theirs.dequantize(torch.float32), "a weight")
    peers.same_or_skip("torchao", found, ours, f"{(N, K)} of NVFP4", rtol=2**-22)


def test_what_does_not_fit_is_refused() -> None:
    codes, scales = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.uint8)
    e8m0, e4m3 = scales.view(torch.float8_e8m0fnu), torch.zeros(8, 4).to(torch.float8_e4m3fn)
    whole = from_torchao({"_weight_qdata": codes, "_weight_scale": e8m0}, "x", {}, torch.bfloat16)
    assert whole.shape == (8, 64)
    for parts, error, words in (
        ({"_weight_qdata": codes, "_weight_scale": e8m0[:7]}, BadCheckpoint, r"scales \(7, 2\) for 8 rows"),
        ({"_weight_qdata": codes[:, :24], "_weight_scale": e8m0}, Unsupported, "blocks of 32 are read"),
        ({"_weight_qdata": codes[None], "_weight_scale": e8m0}, Unsupported, "linears'"),
        (
            {"_weight_qdata": codes, "_weight_scale": e4m3, "_weight_per_tensor_scale": torch.ones(2)},
            Unsupported,
            "2 tensor scales",
        ),
    ):
        with pytest.raises(error, match=words):
            from_torchao(parts, "x", {}, torch.bfloat16)


def test_a_folder_whose_scales_are_missing_is_refused(tmp_path: Path) -> None:
    at, _ = folder(tmp_path, "mxfp4")
    file = at / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if "down_proj._weight_scale" not in k}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((BadCheckpoint, Unsupported), match="down_proj"):
        FastLanguageModel.from_pretrained(at)
    assert json.loads((at / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"
