"""Folders in the layouts of GPTQ, AWQ, bitsandbytes and torchao: read back, opened, exact where possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export import gptq_awq
from fewbits.export.methods import codec_for
from fewbits.models.writing import engine_folder
from fewbits.nn.linear import QuantizedLinear
from tests import peer_formats, peers
from tests.models.loading import logits, perturb, save_tiny
from tests.models.mixtures import save_mixture

IDS = torch.tensor([[1, 5, 9, 20, 31]])
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def recipe(format: str) -> dict[str, Any]:
    return {"name": "mine", "linear": {"weight": format}}


def packed_base(folder: Path, format: str) -> tuple[Any, Any]:
    """A model that is packed on the disk: its original weights are gone."""
    save_tiny(folder / "plain", **SIZES)
    model, words = FastLanguageModel.from_pretrained(
        folder / "plain", recipe=recipe(format), dtype=torch.float32
    )
    model.save_pretrained(folder / "packed")
    words.save_pretrained(folder / "packed")
    return FastLanguageModel.from_pretrained(folder / "packed", dtype=torch.float32)


def layers(model: Any) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def exported(model: Any, words: Any, folder: Path, method: str, **options: Any) -> Any:
    return model.save_pretrained_merged(folder, words, save_method=method, **options)


# Formats that the model has, the layout that stores them, and the largest relative error of a weight: that of
# scales which the layout keeps in float16.
EXACT = [
    ("int4_g32", "gptq", 2**-11),
    ("int4_g64_zp", "gptq_v2", 2**-11),
    ("int3_g32_zp", "gptq_v2:int3_g32_zp", 2**-11),
    ("int8_g64", "gptq:int8_g64", 2**-11),
    ("int2_g32", "gptq:int2_g32", 2**-11),
    ("int4_g32_zp", "awq", 2**-11),
    ("int4_g64", "awq", 2**-11),
    ("nf4", "bitsandbytes", 0.0),
    ("nf4_dq", "bitsandbytes", 0.0),
    ("fp4", "bitsandbytes:fp4", 0.0),
    ("int8", "bitsandbytes:int8", 2**-22),
    ("int8", "torchao", 0.0),
    ("int4_g32_zp", "torchao:int4_g32_zp", 0.0),
    ("int5_g64", "torchao:int5_g64", 0.0),
    ("int4_g64", "compressed_tensors:w4a16", 0.0),
    ("int3_g32", "compressed_tensors:w3a16", 0.0),
    ("int4_g32_zp", "compressed_tensors:w4a16_asym", 0.0),
    ("mxfp4", "compressed_tensors:mxfp4a16", 0.0),
    ("mxfp6_e2m3", "compressed_tensors:mxfp6a16", 0.0),
    ("float8_e4m3_row", "compressed_tensors:fp8_dynamic", 0.0),
]
DEFAULT = ("gptq", "awq", "bitsandbytes", "torchao:int4_g32_zp", "compressed_tensors:w4a16")


@pytest.mark.parametrize(
    ("format", "method", "error"),
    [pytest.param(*c, marks=[] if c[1] in DEFAULT else [pytest.mark.slow]) for c in EXACT],
)
def test_codes_go_over_as_they_are(tmp_path: Path, format: str, method: str, error: float) -> None:
    """A packed base that the layout can hold is not rounded a second time, and opens here as it was."""
    if "mxfp6" in method:
        quantization = pytest.importorskip("compressed_tensors.quantization")
        if not quantization.is_preset_scheme("MXFP6A16"):
            pytest.skip("this compressed-tensors does not know MXFP6A16")
    model, words = packed_base(tmp_path, format)
    receipt = exported(model, words, tmp_path / "out", method)
    assert receipt.kept == 14 and not receipt.rounded_again and receipt.worst[1] <= error
    assert receipt.kl < 1e-5 and receipt.top1 == 1.0
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert len(layers(again)) == 14 or method == "bitsandbytes:int8"
    for name, layer in layers(again).items():
        wanted = layers(model)[name].dequantize(torch.float32)
        assert (layer.dequantize(torch.float32) - wanted).norm() <= max(error, 1e-7) * wanted.norm(), name


def test_a_scheme_that_the_installed_package_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    monkeypatch.setattr(quantization, "is_preset_scheme", lambda name: name != "MXFP6A8")
    assert codec_for("compressed_tensors", "mxfp4").kind == "MXFP4"
    with pytest.raises(Unsupported, match="does not know MXFP6A8; install a newer one"):
        codec_for("compressed_tensors", "mxfp6a8")


@pytest.mark.parametrize(
    ("method", "limit"),
    [
        ("gptq", 0.35),
        pytest.param("gptq_v2:int3_g32_zp", 0.7, marks=pytest.mark.slow),
        ("awq", 0.35),
        pytest.param("bitsandbytes:nf4_dq", 0.35, marks=pytest.mark.slow),
        ("bitsandbytes:int8", 0.05),
        pytest.param("torchao", 0.05, marks=pytest.mark.slow),
        pytest.param("torchao:float8", 0.15, marks=pytest.mark.slow),
        ("torchao:int4_g32", 0.35),
    ],
)
def test_an_adapter_over_a_packed_base(tmp_path: Path, method: str, limit: float) -> None:
    """Merged, rounded once, told in the receipt, and the same function but for that rounding."""
    model, words = packed_base(tmp_path, "int8_g32")
    model = perturb(FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=["down_proj"]))
    receipt = exported(model, words, tmp_path / "out", method)
    assert receipt.kept == 0 and len(receipt.rounded_again) == 12  # two of 14 have adapters
    assert "12 packed linears rounded a second time" in str(receipt)
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found, wanted = logits(here, IDS), logits(model, IDS)
    assert (found - wanted).norm() < limit * wanted.norm()


def judge(peer: str, model: Any, rtol: float) -> None:
    """Skip where the other library's linears do not decode and multiply as their own numbers say."""
    weights = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__ == "Linear4bit":
            weights[name] = peers.live_bitsandbytes(weight.data, weight.quant_state).float()
        elif type(module).__name__ == "Linear8bitLt":
            weights[name] = weight.CB.float() * (weight.SCB.float() / 127)[:, None]
        elif hasattr(weight, "qdata"):
            weights[name] = peer_formats.torchao_decoded(weight)
            what = f"{name}, a {type(weight).__name__}"
            peers.same_or_skip(peer, weight.dequantize().float(), weights[name], what, rtol=2**-22)
    assert len(weights) == 14
    peers.forwards_or_skip(peer, model, weights, rtol=rtol)


@pytest.mark.parametrize(
    "method",
    [
        "bitsandbytes:nf4",
        pytest.param("bitsandbytes:fp4_dq", marks=pytest.mark.slow),
        "bitsandbytes:int8",
        "torchao:int4_g32_zp",
        pytest.param("torchao:int8", marks=pytest.mark.slow),
        pytest.param("torchao:float8", marks=pytest.mark.slow),
    ],
)
def test_transformers_opens_it_with_the_other_library(tmp_path: Path, method: str) -> None:
    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(
        tmp_path / "base", load_in_4bit=False, dtype=torch.float32
    )
    exported(model, words, tmp_path / "out", method)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    kinds = {type(m).__name__ for m in theirs.modules()} | {type(p).__name__ for p in theirs.parameters()}
    assert kinds & {"Linear4bit", "Linear8bitLt", "IntxUnpackedToInt8Tensor", "Int8Tensor", "Float8Tensor"}
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    # On a CPU bitsandbytes multiplies in bfloat16, and in 8 bits it rounds the activations.
    tolerance = 3e-2 if method.startswith("bitsandbytes") else 1e-4
    judge(method.partition(":")[0], theirs, tolerance)
    found, wanted = logits(here, IDS), logits(theirs, IDS)
    assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_a_model_in_training_for_a_format_leaves_in_that_format(tmp_path: Path) -> None:
    """What is exported is the rounded weight that training saw, not the one under it, rounded anew."""
    from fewbits.training.calibration.qat import prepare_qat

    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(
        tmp_path / "base", load_in_4bit=False, dtype=torch.float32
    )
    trained = prepare_qat(model, {"name": "mine", "qat": {"weight": "int4_g32"}})
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    receipt = exported(trained, words, tmp_path / "out", "compressed_tensors:w4a16")
    assert receipt.kept == 14 and "as they were in training" in receipt.weights_from
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(here, IDS), logits(trained, IDS), rtol=1e-5, atol=1e-5)


def test_version_1_of_gptq_never_stores_a_zero_point_below_one(tmp_path: Path) -> None:
    """Less one it would wrap around, and engines read that in two ways."""
    model, words = packed_base(tmp_path, "int4_g32_zp")
    layer = next(iter(layers(model).values()))
    layer.packed.parts["zero_points"].fill_(-8)
    receipt = exported(model, words, tmp_path / "v1", "gptq:int4_g32_zp")
    assert receipt.kept == 13 and len(receipt.rounded_again) == 1
    assert exported(model, words, tmp_path / "v2", "gptq_v2:int4_g32_zp").kept == 14
    config = json.loads((tmp_path / "v2" / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == "gptq_v2" and config["group_size"] == 32 and not config["sym"]


def test_linears_that_run_as_one_are_rounded_again_under_one_scale(tmp_path: Path) -> None:
    """Packed one by one, q, k and v have three scales of the second level; engines want one."""
    model, words = packed_base(tmp_path, "nvfp4")
    receipt = exported(model, words, tmp_path / "out", "compressed_tensors:nvfp4a16")
    assert receipt.kept == 4 and len(receipt.rounded_again) == 10  # o_proj and down_proj stand alone
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {
        leaf: float(stored[f"model.layers.0.{leaf}.weight_global_scale"])
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    }
    assert len(set(scales.values())) == 1


def test_without_a_check_the_receipt_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    wrong = gptq_awq.to_gptq
    monkeypatch.setattr(
        gptq_awq, "to_gptq", lambda c, v: {n: t.flip(-1) for n, t in wrong(c, v).items()}
    )  # rows change places
    with pytest.raises(BadCheckpoint, match="nothing was written"):
        exported(model, words, tmp_path / "out", "gptq")
    assert not (tmp_path / "out").exists()
    receipt = exported(model, words, tmp_path / "out", "gptq", check=False)
    assert "NOT CHECKED" in str(receipt) and receipt.measured is None
    assert "NOT CHECKED" in (tmp_path / "out" / "export.json").read_text()


def test_a_rerun_keeps_what_lies_beside_the_export(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    out = tmp_path / "out"
    exported(model, words, out, "gptq", check=False)
    wrote = {path.name for path in out.iterdir()}
    record = json.loads((out / "export.json").read_text())
    assert record["written_by"] == "fewbits" and set(record["files"]) == wrote
    for name in ("preprocessor_config.json", "model_ema.safetensors"):
        (out / name).write_text("mine")
    exported(model, words, out, "gptq", check=False)
    assert {path.name for path in out.iterdir()} == {
        *wrote,
        "preprocessor_config.json",
        "model_ema.safetensors",
    }
    (out / "export.json").write_text(json.dumps({"written": record["written"]}))
    with pytest.raises(BadInput, match="exists and is not empty"):
        exported(model, words, out, "gptq", check=False)


def test_a_changed_tokenizer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    save = type(words).save_pretrained

    def without_template(self: Any, folder: Any, **more: Any) -> Any:
        self.chat_template, kept = None, self.chat_template
        made = save(self, folder, **more)
        self.chat_template = kept
        return made

    monkeypatch.setattr(type(words), "save_pretrained", without_template)
    with pytest.raises(BadCheckpoint, match="chat template"):
        exported(model, words, tmp_path / "out", "awq")
    assert not (tmp_path / "out").exists()


def test_calibration_text_says_which_columns_count(tmp_path: Path) -> None:
    """The error of the outputs on that text falls; where text changes nothing it is refused, not ignored."""
    from tests.models.tiny_folders import rows_file

    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(
        tmp_path / "base", load_in_4bit=False, dtype=torch.float32
    )
    given, errors = rows_file(tmp_path), {}
    ids = words("the cat 3 sat on the mat, 3 times", return_tensors="pt").input_ids
    down = model.model.layers[0].mlp.down_proj
    seen: list[torch.Tensor] = []
    hook = down.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    logits(model, ids)
    hook.remove()
    for name, options in (("plain", {}), ("text", {"calibrate": given})):
        receipt = exported(model, words, tmp_path / name, "gptq:int3_g32", **options)
        here, _ = FastLanguageModel.from_pretrained(tmp_path / name, dtype=torch.float32)
        found = layers(here)["model.layers.0.mlp.down_proj"].dequantize(torch.float32)
        errors[name] = float((seen[0] @ (found - down.weight).t()).norm())
        assert bool(receipt.calibrated_on) == (name == "text")
    assert errors["text"] < errors["plain"]
    for method in ("bitsandbytes:nf4", "torchao:int8", "compressed_tensors:fp8_block"):
        with pytest.raises(BadInput, match="calibration text changes nothing"):
            exported(model, words, tmp_path / "out", method, calibrate=given)


def test_what_an_engine_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("torchao")  # what is not installed is not offered
    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    refused = {
        "awq:int8_g64": r"awq.*gptq:int8_g64, torchao:int8_g64",
        "bitsandbytes:int4_g64": r"gptq:int4_g64.*compressed_tensors:w4a16",
        "gptq:nf4": "bitsandbytes:nf4",
        "torchao:q4_k_m": "gguf:q4_k_m",
        "compressed_tensors:nf4": "bitsandbytes:nf4",
        "gptq:int5_g64": "torchao:int5_g64",
    }
    for method, reason in refused.items():
        with pytest.raises(BadInput, match=reason):
            exported(model, words, tmp_path / "out", method)
    with pytest.raises(Unsupported, match="groups of 48"):
        exported(model, words, tmp_path / "out", "gptq:int4_g48")
    with pytest.raises(BadInput, match="no option calibrate"):
        exported(model, words, tmp_path / "out", "merged_16bit", calibrate="rows.jsonl")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", **SIZES)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    for path, leaf in (("model.layers.1.mlp.up_proj", "up_proj"), ("model.norm", "model.norm")):
        weight = model.get_submodule(path).weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[3] = float("nan")
        for method in ("gptq", "awq", "bitsandbytes:int8", "torchao:int4_g32", "compressed_tensors:w4a16"):
            with pytest.raises(BadCheckpoint, match=f"{leaf}.*NaN"):
                exported(model, words, tmp_path / "out", method)
        assert isinstance(weight, nn.Parameter)
        weight.data.copy_(kept)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq:int4_g32", "torchao:int4_g32", "bitsandbytes:nf4"])
def test_several_files_with_tied_embeddings(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_folder, "_SHARD_BYTES", 20_000)
    save_tiny(tmp_path / "base", **SIZES, tie_word_embeddings=True)
    model, words = FastLanguageModel.from_pretrained(
        tmp_path / "base", load_in_4bit=False, dtype=torch.float32
    )
    exported(model, words, tmp_path / "out", method)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    here, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert here.lm_head.weight is here.model.embed_tokens.weight
    if "gptq" not in method:  # whose library is not here
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        judge(method.partition(":")[0], theirs, 3e-2)
        found, wanted = logits(here, IDS), logits(theirs, IDS)
        assert (found - wanted).norm() <= 3e-2 * wanted.norm()


def test_activation_order_of_a_gptq_model_is_kept(tmp_path: Path) -> None:
    from tests.models.test_foreign import case, write

    settings, writer = case("gptq-4-asym-1-act")
    write(tmp_path / "base", settings, writer, **SIZES)
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    receipt = exported(model, words, tmp_path / "out", "gptq_v2")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert receipt.kept == 14 and receipt.worst[1] == 0.0 and config["desc_act"]
    other = exported(model, words, tmp_path / "awq", "awq")  # has no such thing, and says what it did
    assert other.kept == 0 and len(other.rounded_again) == 14


def test_experts_are_refused_in_one_sentence(tmp_path: Path) -> None:
    """Left in 16 bits, they would be most of a model that calls itself packed."""
    save_mixture(tmp_path / "base", "qwen3_moe")
    model, words = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    with pytest.raises(Unsupported, match=r"experts.*16bit"):
        exported(model, words, tmp_path / "out", "gptq:int4_g32")
    assert not (tmp_path / "out").exists()
