"""compressed-tensors folders: opened by transformers with that library, and here, with the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export import compressed_schemes
from fewbits.export.compressed_schemes import SCHEMES
from fewbits.export.whole_numbers import rounded
from fewbits.nn.linear import QuantizedLinear
from tests import peer_formats, peers
from tests.models.loading import save_tiny, tokenizer
from tests.models.tiny_folders import rows_file
from tests.models.unwritten import save_unwritten

pytest.importorskip("compressed_tensors")

IDS = torch.tensor([[1, 5, 9, 20, 31]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def layers(model: Any) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def stored(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What the folder has of a linear's weight, by its name in the linear."""
    tensors = load_file(folder / "model.safetensors")
    return {key.rpartition(".")[2]: part for key, part in tensors.items() if key.startswith(f"{name}.weight")}


def decoded(folder: Path, name: str, bits: int) -> torch.Tensor:
    return peer_formats.compressed_decoded(stored(folder, name), bits)


@pytest.mark.parametrize(
    ("method", "limit", "rows"), [("w4a16", 0.5, 128), ("w8a16", 0.05, 128), ("w8a16", 0.05, 172)]
)
def test_both_sides_compute_the_same(tmp_path: Path, method: str, limit: float, rows: int) -> None:
    save_tiny(tmp_path / "base", intermediate_size=rows)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    receipt = model.save_pretrained_merged(
        tmp_path / "out", words, save_method=f"compressed_tensors_{method}"
    )
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    own = {name: decoded(tmp_path / "out", name, int(method[1])) for name in layers(here)}
    need = logits(there)  # before its linears are asked one by one: with some versions they decompress now
    peers.forwards_or_skip("compressed-tensors", there, own, rtol=1e-6)
    assert torch.equal(logits(here), need)
    assert 0 < (logits(here) - logits(model)).norm() / logits(model).norm() < limit
    assert receipt.num_tensors[f"W{method[1]}A16"] == 14 and 0 < receipt.worst[1] < 0.15
    assert any("compressed-tensors" in note for note in here.fewbits_notes)


def test_an_adapter_over_a_packed_base_is_merged(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base")
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    adapted: Any = model.base_model.model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        adapted.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained_merged(tmp_path / "out", words, save_method="compressed_tensors_w8a16")
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    delta = 2.0 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    wanted = (plain.model.layers[1].mlp.down_proj.weight + delta).detach()
    assert (here.model.layers[1].mlp.down_proj.weight - wanted).norm() < 0.02 * wanted.norm()


def test_searched_scales_lose_less_than_plain_ones() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    back = rounded(weight, 4, 128, torch.float32).decoded()
    blocks = weight.reshape(32, 2, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 7
    plain = ((blocks / scale).round() * scale).reshape(weight.shape)
    assert (back - weight).norm() < 0.97 * (plain - weight).norm()


def test_a_wrong_folder_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    monkeypatch.setattr(
        compressed_schemes, "rounded", lambda weight, *rest, **more: rounded(weight.flip(0), *rest, **more)
    )
    with pytest.raises(BadCheckpoint, match="nothing was written"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer(), save_method="compressed_tensors_w8a16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(s, marks=[] if s in ("w4a16_asym", "nvfp4a16", "fp8_dynamic") else [pytest.mark.slow])
        for s in SCHEMES
    ],
)
def test_every_scheme_opens_on_both_sides(tmp_path: Path, scheme: str) -> None:
    save_tiny(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(
        tmp_path / "base", load_in_4bit=False, dtype=torch.float32
    )
    given = {"calibrate": rows_file(tmp_path)} if SCHEMES[scheme].input_scale else {}
    receipt = model.save_pretrained_merged(
        tmp_path / "out", words, save_method=f"compressed_tensors_{scheme}", **given
    )
    few = scheme in ("w2a16", "w3a16")
    assert receipt.num_tensors[SCHEMES[scheme].preset] == 14 and receipt.kl < (5.0 if few else 0.5)
    assert receipt.reader.startswith("compressed-tensors ") and bool(receipt.calibrated_on) == bool(given)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert len(layers(here)) == 14
    bits = int(scheme[len("mxfp")]) if scheme.startswith("mxfp") else int(SCHEMES[scheme].bits)
    for name, layer in layers(here).items():
        weight = theirs.get_submodule(name).weight
        # In which the package decodes it.
        kind = torch.bfloat16 if scheme.startswith("nvfp4") else weight.dtype
        own = weight.to(kind)
        peers.live_compressed(lambda w=own: w, stored(tmp_path / "out", name), bits)
        assert torch.equal(layer.dequantize(kind).to(weight.dtype), weight), name
    if scheme.endswith(("a16", "a16_asym")):  # the others round activations there
        torch.testing.assert_close(logits(here), logits(theirs), rtol=2e-2, atol=2e-2)
    assert (logits(here) - logits(model)).norm() / logits(model).norm() < (2.0 if few else 0.5)


def test_linears_that_run_as_one_share_a_scale(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    model.save_pretrained_merged(tmp_path / "out", words, save_method="compressed_tensors_nvfp4a16")
    stored = load_file(tmp_path / "out" / "model.safetensors")

    def scale(leaf: str) -> float:
        return float(stored[f"model.layers.0.{leaf}.weight_global_scale"])

    assert scale("self_attn.q_proj") == scale("self_attn.k_proj") == scale("self_attn.v_proj")
    assert scale("mlp.gate_proj") == scale("mlp.up_proj") != scale("mlp.down_proj")


def test_schemes_that_need_more_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", intermediate_size=172)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    for scheme, error, reason in (
        ("fp8", BadInput, "--calibrate"),
        ("nvfp4", BadInput, "measured on text"),
        ("nvfp4a16", Unsupported, "rows of 172"),
    ):
        with pytest.raises(error, match=reason):
            model.save_pretrained_merged(tmp_path / "out", words, save_method=f"compressed_tensors_{scheme}")
    with pytest.raises(BadInput, match="no scheme 'w9'"):
        model.save_pretrained_merged(tmp_path / "out", words, save_method="compressed_tensors_w9")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["opt", "falcon"])
def test_a_tied_family_without_a_spec_is_written(family: str, tmp_path: Path) -> None:
    save_unwritten(tmp_path / "base", family, tie_word_embeddings=True)
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    receipt = model.save_pretrained_merged(
        tmp_path / "out", tokenizer, save_method="compressed_tensors_w8a16"
    )
    assert receipt.logits_error <= receipt.tolerance
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "out")
    ids = torch.arange(12)[None] + 3
    one, other = (m.eval()(input_ids=ids).logits for m in (again, model))
    assert float((one - other).norm() / other.norm()) < 0.05


def test_what_compressed_tensors_cannot_pack_is_named(tmp_path: Path) -> None:
    save_unwritten(tmp_path / "base", "gpt2")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    with pytest.raises(Unsupported, match="is a Conv1D, as GPT-2 has them"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer, save_method="compressed_tensors_w8a16")
    assert not (tmp_path / "out").exists()
