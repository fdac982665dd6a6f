"""Checkpoints of other libraries: loaded packed, to the bit; generated from and trained on.

compressed-tensors writes its own files here; GPTQ's, AWQ's, FP8's and gpt-oss's are written from the
documented layouts, one value at a time, so that no reader of ours is tested by its own inverse.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats import float8_files, gptq
from fewbits.nn.linear import QuantizedLinear
from tests import peers
from tests.models.loading import packed_state, same, save_tiny
from tests.models.tiny import tokens

GROUP = 32
Written = tuple[dict[str, Tensor], Tensor]  # a linear's tensors, and the weight that they stand for
Writer = Callable[[str, Tensor], Written]


def write(folder: Path, settings: dict[str, Any], writer: Writer, **changes: Any) -> dict[str, Tensor]:
    """A tiny model whose decoder linears ``writer`` stores; returns what they stand for, by name."""
    save_tiny(folder, **changes)
    stands_for, stored = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        stem = name.removesuffix("weight")
        parts, stands_for[name.removesuffix(".weight")] = writer(stem[:-1], tensor)
        stored.update({stem + part: value.contiguous() for part, value in parts.items()})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return stands_for


def rounded(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, K), zero points and float16 scales (N, groups), unsigned."""
    blocks = weight.view(weight.shape[0], -1, GROUP)
    if symmetric:
        scales = (blocks.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).int()
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((high - low) / (2**bits - 1)).half()
        zeros = (-low / scales.float()).round().int().clamp(1, 2**bits - 1)
    codes = (blocks / scales.float()[..., None]).round().int() + zeros[..., None]
    return codes.clamp(0, 2**bits - 1).view(weight.shape), zeros, scales


def words(codes: Tensor, bits: int) -> Tensor:
    """(R, C) unsigned codes as one stream of bits along R in int32 words: (R * bits / 32, C)."""
    out = torch.zeros(codes.shape[0] * bits // 32, codes.shape[1], dtype=torch.int64)
    for row in range(codes.shape[0]):
        for bit in range(bits):
            place = row * bits + bit
            out[place // 32] |= ((codes[row].long() >> bit) & 1) << (place % 32)
    return torch.where(out >= 2**31, out - 2**32, out).int()


def gptq_writer(bits: int, symmetric: bool, version: int, act_order: bool = False) -> Writer:
    def writer(name: str, weight: Tensor) -> Written:
        codes, zeros, scales = rounded(weight, bits, symmetric)
        K = weight.shape[1]
        index = torch.arange(K) // GROUP
        if act_order:
            index = index[torch.randperm(K, generator=torch.Generator().manual_seed(K))]
            codes = codes[:, torch.argsort(index, stable=True).argsort()]  # any codes will do
        stored = (zeros - int(version == 1)) % 2**bits
        parts = {
            "qweight": words(codes.t(), bits),
            "qzeros": words(stored, bits).t(),  # streams along the outputs
            "scales": scales.t(),
            "g_idx": index.int(),
        }
        return parts, (codes - zeros[:, index]).half() * scales[:, index]

    return writer


def awq_writer(name: str, weight: Tensor) -> Written:
    codes, zeros, scales = rounded(weight, 4, False)

    def interleaved(columns: Tensor) -> Tensor:
        out = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
        for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            out |= columns[:, column::8].long() << (4 * nibble)
        return torch.where(out >= 2**31, out - 2**32, out).int()

    parts = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t()), "scales": scales.t()}
    index = torch.arange(weight.shape[1]) // GROUP
    return parts, (codes - zeros[:, index]).half() * scales[:, index]


def float8_writer(name: str, weight: Tensor) -> Written:
    """Tiles of 48 x 40, so that the last ones are short."""
    N, K = weight.shape
    rows, columns = -(-N // 48), -(-K // 40)
    codes, scales = torch.zeros(N, K, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    decoded = torch.zeros(N, K)
    for i in range(rows):
        for j in range(columns):
            at = (slice(48 * i, 48 * (i + 1)), slice(40 * j, 40 * (j + 1)))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            decoded[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, decoded


def compressed_writer(scheme: Any) -> Writer:
    """The library's own observer, compressor and decompressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kind = BaseCompressor.get_value_from_registry(scheme.format)
    args = scheme.weights

    def writer(name: str, weight: Tensor) -> Written:
        blocks = {
            "group": lambda: weight.view(weight.shape[0], -1, args.group_size),
            "tensor_group": lambda: weight.view(weight.shape[0], -1, args.group_size),
            "channel": lambda: weight.view(weight.shape[0], 1, -1),
            "tensor": lambda: weight.view(1, 1, -1),
        }[args.strategy]()
        low, high = blocks.amin(-1), blocks.amax(-1)
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        if args.strategy == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            given["weight_global_scale"] = whole
        parts = kind.compress(given, scheme)
        parts = {k: v for k, v in parts.items() if v is not None}
        return parts, peers.live_compressed(
            lambda: kind.decompress(dict(parts), scheme)["weight"], parts, args.num_bits
        )

    return writer


def compressed(preset: str, **weights: Any) -> tuple[dict[str, Any], Writer]:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, is_preset_scheme, preset_name_to_scheme

    if not is_preset_scheme(preset):
        pytest.skip(f"this compressed-tensors does not know {preset}")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme = scheme.model_copy(update={"weights": scheme.weights.model_copy(update=weights)})
    forms = {
        "W4A16": "pack-quantized",
        "W8A16": "pack-quantized",
        "W4A16_ASYM": "pack-quantized",
        "W3A16": "pack-quantized",
        "W8A8": "int-quantized",
        "FP8": "float-quantized",
        "FP8_DYNAMIC": "float-quantized",
        "NVFP4A16": "nvfp4-pack-quantized",
        "MXFP4A16": "mxfp4-pack-quantized",
        "MXFP6A16": "mxfp6-pack-quantized",
        "MXFP8A16": "mxfp8-quantized",
    }
    scheme = scheme.model_copy(update={"format": forms[preset]})
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=forms[preset],
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return {**config.model_dump(mode="json"), "quant_method": "compressed-tensors"}, compressed_writer(scheme)


def case(name: str) -> tuple[dict[str, Any], Writer]:
    """config.json's words and the writer of a case."""
    kind, _, rest = name.partition("-")
    if kind == "awq":
        settings = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        }
        return settings, awq_writer
    if kind == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [48, 40]}, float8_writer
    if kind == "ct":
        changes = {"group_size": GROUP} if rest in ("W4A16", "W4A16_ASYM", "W3A16", "W8A16") else {}
        return compressed(rest, **changes)
    bits, symmetry, version, order = rest.split("-")
    settings = {
        "quant_method": "gptq",
        "bits": int(bits),
        "group_size": GROUP,
        "sym": symmetry == "sym",
        "desc_act": order == "act",
        "checkpoint_format": "gptq",
    }
    if symmetry == "asym" and version == "2":
        settings["checkpoint_format"] = "gptq_v2"
    return settings, gptq_writer(int(bits), symmetry == "sym", int(version), order == "act")


CASES = (
    "gptq-4-sym-1-plain", "gptq-4-sym-2-plain", "gptq-4-asym-1-plain", "gptq-4-asym-2-plain",
    "gptq-3-asym-1-plain", "gptq-8-sym-1-plain", "gptq-2-asym-2-plain", "gptq-4-asym-1-act", "awq", "fp8",
    "ct-W4A16", "ct-W4A16_ASYM", "ct-W3A16", "ct-W8A16", "ct-W8A8", "ct-FP8_DYNAMIC", "ct-FP8", "ct-NVFP4A16",
    "ct-MXFP4A16", "ct-MXFP6A16", "ct-MXFP8A16",
)  # fmt: skip
DEFAULT = ("gptq-4-sym-2-plain", "gptq-4-asym-1-act", "awq", "fp8", "ct-W4A16_ASYM", "ct-NVFP4A16")


@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.slow]) for c in CASES]
)
def test_a_checkpoint_is_used_as_it_was_saved(name: str, tmp_path: Path) -> None:
    """Every weight equals the other side's decoded one; loss and gradients those over plain weights."""
    settings, writer = case(name)
    stands_for = write(tmp_path / "base", settings, writer)
    model, _ = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert layers.keys() == stands_for.keys() and len(layers) == 14
    for layer, weight in stands_for.items():
        assert torch.equal(layers[layer].dequantize(weight.dtype), weight), layer
    plain = save_tiny(tmp_path / "plain").float()
    for layer in stands_for:
        plain.get_submodule(layer).weight.data = layers[layer].dequantize(torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    wide, _ = FastLanguageModel.from_pretrained(tmp_path / "plain", load_in_4bit=False, dtype=torch.float32)
    found, wanted = step(model), step(wide)
    assert found[0] == wanted[0]
    assert len(wanted[1]) == 28
    for name_, gradient in wanted[1].items():  # the norms' backward rounds in another order
        assert (found[1][name_] - gradient).norm() <= 1e-5 * gradient.norm(), name_


def step(model: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of a LoRA step and its gradients."""
    adapted = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, use_gradient_checkpointing=False)
    added = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    for number, parameter in enumerate(added):
        parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    ids = tokens(rows=1, length=12)
    loss = adapted(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}


def test_what_was_loaded_is_saved_and_generated_from(tmp_path: Path) -> None:
    settings, writer = case("awq")
    write(tmp_path / "base", settings, writer)
    model, words_ = FastLanguageModel.from_pretrained(tmp_path / "base")
    made = model.generate(input_ids=torch.tensor([[1, 5, 9]]), max_new_tokens=3, do_sample=False)
    assert made.shape == (1, 6)
    model.save_pretrained(tmp_path / "ours")
    words_.save_pretrained(tmp_path / "ours")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "ours")
    assert same(packed_state(again), packed_state(model))
    assert any("awq form already" in note for note in model.fewbits_notes)


def test_symmetric_zero_points_tell_their_version_whatever_the_file_says() -> None:
    """Files that say version 1 and hold version 2's zero points: read as 1 they would all be one code off."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for version in (1, 2):
        parts, stands_for = gptq_writer(4, True, version)("x", weight)
        for says in ("gptq", "gptq_v2"):
            packed = gptq.from_gptq(
                parts, "x", {"bits": 4, "group_size": GROUP, "checkpoint_format": says}, torch.float16
            )
            assert torch.equal(packed.dequantize(), stands_for)


def test_gpt_oss_blocks_are_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 64, 3), dtype=torch.uint8, generator=generator)
    packed = float8_files.from_gpt_oss(blocks, scales)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(packed.dequantize(), theirs.transpose(1, 2))  # transformers keeps (experts, K, N)


def test_wrong_checkpoints_are_refused_in_one_sentence(tmp_path: Path) -> None:
    settings, writer = case("gptq-4-sym-1-plain")
    write(tmp_path / "a", settings, writer)
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.scales"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"down_proj do not fit together .* fetch it again"):
        FastLanguageModel.from_pretrained(tmp_path / "a")
    save_file({k: v for k, v in tensors.items() if "qweight" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="declares gptq weights, but none"):
        FastLanguageModel.from_pretrained(tmp_path / "a")
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    for change, words_ in (({"bits": 5}, "5 bits"), ({"quant_method": "awq", "version": "gemv"}, "'gemv'")):
        wrong = {**config, "quantization_config": {**settings, **change}}
        (tmp_path / "a" / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(Unsupported, match=words_):
            FastLanguageModel.from_pretrained(tmp_path / "a")
