"""A NaN or an infinity in a weight is refused by name everywhere that packs; nothing computes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fewbits
from fewbits import FastLanguageModel
from fewbits.cli.__main__ import main
from fewbits.errors import NotFinite
from fewbits.formats import FORMATS, NF4
from fewbits.formats.bitsandbytes import to_bitsandbytes
from fewbits.inference.evaluate import perplexity
from fewbits.inference.export import quantize_checkpoint
from fewbits.inference.generate import Sampling, generate
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.models.packing.packed import check_parts
from fewbits.nn import finite
from fewbits.nn.finite import check_finite
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes.stochastic_config import StochasticConfig
from fewbits.training.calibration.qat import convert_qat, prepare_qat
from fewbits.training.ranks import sharded_loading
from tests.models.loading import save_tiny

NAME = "model.layers.1.mlp.up_proj.weight"
PLACE = (5, 7)


def damaged(folder: Path, value: float = float("nan"), name: str = NAME) -> Path:
    """The tiny model with one bad value; its folder."""
    save_tiny(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][(0,) * (tensors[name].dim() - 2) + PLACE[-tensors[name].dim() :]] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def pack_after_training(folder: Path) -> None:
    save_tiny(folder.parent / "sound")
    model = prepare_qat(plain(folder.parent / "sound"), "int4_qat")
    with torch.no_grad():
        model.get_parameter(NAME)[PLACE] = float("nan")
    before = {name: type(module) for name, module in model.named_modules()}
    try:
        convert_qat(model)
    finally:
        assert before == {name: type(module) for name, module in model.named_modules()}


def convert(folder: Path) -> None:
    model = plain(folder)
    before = {name: type(module) for name, module in model.named_modules()}
    try:
        fewbits.convert(model, "int8")
    finally:  # nothing was replaced
        assert before == {name: type(module) for name, module in model.named_modules()}


def pack_a_slice(folder: Path) -> None:
    layer = QuantizedLinear(64, 128, FORMATS["nf4"])
    with sharded_loading._Folder(inspect_folder(folder)) as source:
        sharded_loading._pack(layer, NAME, source)


PACKING: dict[str, Callable[[Path], Any]] = {
    "load in 4 bits": lambda folder: FastLanguageModel.from_pretrained(folder),
    "load in 8 bits": lambda folder: FastLanguageModel.from_pretrained(folder, load_in_8bit=True),
    "transformers": lambda folder: AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FewbitsConfig("int8")
    ),
    "stochastic codes": lambda folder: FastLanguageModel.from_pretrained(folder, recipe="stochastic"),
    "quantize": lambda folder: quantize_checkpoint(folder, folder.parent / "packed", "qlora_nf4"),
    "convert": convert,
    "prepare for training": lambda folder: prepare_qat(plain(folder), "nf4_qat"),
    "pack after training": pack_after_training,
    "prepare streams": lambda folder: apply_stochastic(
        plain(folder), StochasticConfig(options=FORMATS["stochastic"])
    ),
    "load by slices": pack_a_slice,
}


@pytest.mark.parametrize("way", PACKING)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_refused_by_name(way, value, tmp_path):
    folder = damaged(tmp_path / "model", value)
    with pytest.raises(
        NotFinite, match=rf"{NAME} .* holds a NaN or an infinity in 1 .* at \[5, 7\]"
    ) as caught:
        PACKING[way](folder)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_gpu_is_asked_once_and_the_weight_still_named(known, tmp_path, monkeypatch):
    """Weights of a GPU are packed before anybody knows: here the CPU's are taken for such."""
    asked = []
    monkeypatch.setattr(finite, "waits", lambda weight: True)
    wrong = finite.FiniteLater.wrong
    monkeypatch.setattr(finite.FiniteLater, "wrong", lambda self: asked.append(1) or wrong(self))
    folder = damaged(tmp_path / "model", value=float("inf") if known else 1e30)
    what = r"in 1 .* inf at \[5, 7\]" if known else "; it cannot be packed"  # float16 makes it an infinity
    with pytest.raises(NotFinite, match=rf"{NAME}.* holds a NaN or an infinity ?{what}"):
        FastLanguageModel.from_pretrained(folder, dtype=None if known else torch.float16)
    assert len(asked) == 1
    save_tiny(tmp_path / "sound")
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "sound")
    assert len(asked) == 3  # of the weights, and of the packed parts
    model.model.layers[1].mlp.up_proj.weight_scale_scales.data[0] = float("nan")
    with pytest.raises(NotFinite, match=r"here: model.layers.1.mlp.up_proj.weight_scale_scales .* in 1 of"):
        check_parts(model, "here")


def test_merging_into_packed_weights_is_refused_and_changes_nothing(tmp_path):
    save_tiny(tmp_path / "model")
    model = FastLanguageModel.get_peft_model(FastLanguageModel.from_pretrained(tmp_path / "model")[0], r=2)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight").fill_(
            float("inf")
        )
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"'default'.*not finite"):
        model.base_model.model.model.layers[0].mlp.up_proj.merge()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_packed_layer_takes_no_nan():
    weight = torch.randn(8, 64)
    layer = QuantizedLinear(64, 8, FORMATS["int8"])
    layer.pack(weight)
    weight[3, 2] = float("inf")
    with pytest.raises(NotFinite, match=r"\(8, 64\) holds .* in 1 of .* inf at \[3, 2\]"):
        layer.pack(weight)


def test_scales_that_are_nan_in_a_packed_folder_are_refused(tmp_path):
    save_tiny(tmp_path / "model")
    FastLanguageModel.from_pretrained(tmp_path / "model", load_in_8bit=True)[0].save_pretrained(
        tmp_path / "p"
    )
    file = tmp_path / "p" / "model.safetensors"
    tensors = load_file(file)
    name = NAME.replace("weight", "weight_scales")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NotFinite, match=name):
        AutoModelForCausalLM.from_pretrained(tmp_path / "p")


def test_scales_that_are_nan_in_a_bitsandbytes_folder_are_refused(tmp_path):
    save_tiny(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {}
    for name, weight in load_file(file).items():
        linear = name.startswith("model.layers") and weight.dim() == 2
        tensors |= to_bitsandbytes(NF4.quantize(weight), name) if linear else {name: weight}
    tensors[f"{NAME}.absmax"].view(-1)[2] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotFinite, match=NAME):
        FastLanguageModel.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_dtype_is_looked_at(dtype):
    weight = torch.zeros(3, 4).to(dtype)
    check_finite(weight)
    weight[1, 2] = torch.tensor(float("nan")).to(dtype)
    with pytest.raises(NotFinite, match=r"w \(3, 4\) holds .* in 1 of .* nan at \[1, 2\]"):
        check_finite(weight, "w")
    check_finite(torch.empty(0, 4, dtype=dtype))
    check_finite(torch.empty(2, 2, dtype=dtype, device="meta"))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_evaluation_and_generation_name_the_weight(name, tmp_path):
    folder = damaged(tmp_path / "model", name=name)
    model, tokenizer = FastLanguageModel.from_pretrained(folder, load_in_4bit=False)
    with pytest.raises(NotFinite, match=rf"loss on tokens .* nan: {name}"):
        perplexity(model, tokenizer, "some text to read")
    for temperature in (0.0, 1.0):
        with pytest.raises(NotFinite, match=rf"logits .* NaN or infinite: {name}"):
            generate(
                model,
                tokenizer,
                "some text to go on with",
                Sampling(max_new_tokens=3, temperature=temperature),
            )


def test_the_command_fails(tmp_path, capsys):
    folder = damaged(tmp_path / "model", name="model.norm.weight")
    (tmp_path / "text").write_text("some text to read")
    assert main(["eval", "--model", str(folder), "--text", str(tmp_path / "text")]) == 1
    out, error = capsys.readouterr()
    assert "model.norm.weight" in error and "perplexity" not in out


def test_finite_weights_that_overflow_are_told_apart(tmp_path):
    save_tiny(tmp_path / "model")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "model", load_in_4bit=False)
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(NotFinite, match="every weight of this LlamaForCausalLM is finite: it overflows"):
        perplexity(model, tokenizer, "some text to read")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2])
def test_the_largest_magnitude_tells(device, dtype):
    weight = torch.linspace(-3, 2, 300 * 257).view(300, 257).to(dtype).to(device)
    assert finite.largest_of(weight) == 3
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 257 * 150 + 9, 300 * 257 - 1):
            damaged_one = weight.clone()
            damaged_one.view(-1)[place] = value
            assert not finite.largest_of(damaged_one).isfinite()
