"""GGUF files as models: the same logits as transformers computes from the decoded file; trained on; saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits import FastLanguageModel
from fewbits.cli.models import merge_adapter
from fewbits.errors import BadCheckpoint, BadInput, NotFinite, Unsupported
from fewbits.inference.export import quantize_checkpoint
from fewbits.nn.linear import QuantizedLinear
from tests import peers
from tests.models.loading import logits, packed_state, perturb, same
from tests.models.tiny_folders import byte_tokenizer, pair_tokenizer, saved

gguf = pytest.importorskip("gguf")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
IDS = torch.tensor([[1, 40, 9, 77, 31, 250, 6, 18]])


def export(folder: Path, family: str, method: str, **changes: Any) -> Path:
    """A tiny model as a GGUF file."""
    words = pair_tokenizer() if family == "llama" else byte_tokenizer()
    base = saved(folder / "base", family, words, **changes)
    model, words = FastLanguageModel.from_pretrained(base, load_in_4bit=False, dtype=torch.float32)
    file: Path = model.save_pretrained_gguf(folder / "out", words, method).path
    return file


def loss_of(model: Any) -> float:
    """The loss of a LoRA step whose adapter does something."""
    adapted = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, use_gradient_checkpointing=False)
    for number, layer in enumerate(p for n, p in adapted.named_parameters() if "lora_B" in n):
        layer.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    loss = adapted(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return float(loss.item())


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "q4_k_m"),
        pytest.param("qwen2", "q8_0", marks=pytest.mark.slow),
        pytest.param("qwen3", "iq4_xs", marks=pytest.mark.nightly),
        pytest.param("llama", "tq2_0", marks=pytest.mark.slow),
        pytest.param("llama", "q2_k", marks=pytest.mark.nightly),
    ],
)
def test_a_file_computes_what_its_decoded_weights_do(tmp_path: Path, family: str, method: str) -> None:
    file = export(tmp_path, family, method, **({"head_dim": 128} if family == "qwen3" else {}))
    model, words = FastLanguageModel.from_pretrained(file)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) >= 14 and all(m.format.name.startswith("gguf_") for m in layers.values())
    for tensor in gguf.GGUFReader(file).tensors:
        peers.live_gguf(tensor.data, tensor.tensor_type)  # by which transformers decodes the file
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize(), theirs.get_submodule(name).weight), name
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    assert words.decode(words("the").input_ids, skip_special_tokens=True).strip() == "the"
    model.save_pretrained(tmp_path / "ours")
    # transformers adds Qwen's own special tokens to its tokenizer, for which this tiny vocabulary has no rows
    (byte_tokenizer() if family != "llama" else words).save_pretrained(tmp_path / "ours")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "ours")
    assert same(packed_state(again), packed_state(model))
    wide, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False, dtype=torch.float32)
    wide.load_state_dict(theirs.state_dict())
    assert loss_of(again) == pytest.approx(loss_of(wide), rel=1e-6)


def test_heads_of_another_size_come_back(tmp_path: Path) -> None:
    """The metadata have the size; transformers alone would take that of its default configuration."""
    model, _ = FastLanguageModel.from_pretrained(export(tmp_path, "qwen3", "f32"))
    base, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False, dtype=torch.float32)
    assert model.config.head_dim == 16
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, base(input_ids=IDS).logits)


def test_llama_3s_positions_come_back(tmp_path: Path) -> None:
    """The file holds only what each frequency is divided by; transformers alone would drop that."""
    file = export(tmp_path, "llama", "q8_0", rope_parameters=LLAMA3)
    model, _ = FastLanguageModel.from_pretrained(file)
    assert model.config.rope_parameters == LLAMA3
    base, _ = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False, dtype=torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, base.model.rotary_emb.inv_freq)


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no GGUF file"):
        FastLanguageModel.from_pretrained(tmp_path / "none.gguf")
    file = export(tmp_path, "llama", "q8_0")
    whole = file.read_bytes()
    for cut in (10, 3000, len(whole) - 5000):
        file.write_bytes(whole[:cut])
        with pytest.raises(BadCheckpoint, match="no whole GGUF file"):
            FastLanguageModel.from_pretrained(file)
    file.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(BadCheckpoint, match=r"lacks the tensor blk\.1\.ffn_up"):
        FastLanguageModel.from_pretrained(file)
    file.write_bytes(
        whole.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00bloom")
    )
    with pytest.raises(Unsupported):
        FastLanguageModel.from_pretrained(file)


@pytest.mark.parametrize(
    ("method", "name", "place", "words"),
    [
        ("q8_0", "blk.1.ffn_up.weight", 34, r"in 1 of its Q8_0 blocks, first in row 0"),
        pytest.param(
            *("q4_k_m", "blk.0.attn_q.weight", 2 * 144 + 2, r"in 1 of its Q4_K blocks, first in row \d+"),
            marks=pytest.mark.slow,
        ),
        ("f16", "blk.1.ffn_down.weight", 6, r"\(.*\) holds a NaN or an infinity in 1 of its values"),
        ("q8_0", "blk.1.attn_norm.weight", 8, r"\(\d+,\) holds a NaN or an infinity in 1 of its values"),
    ],
)
def test_a_nan_is_refused_by_its_tensors_name(
    tmp_path: Path, method: str, name: str, place: int, words: str
) -> None:
    file = export(tmp_path, "llama", method)
    (tensor,) = (t for t in gguf.GGUFReader(file).tensors if t.name == name)
    nan = {"F32": b"\x00\x00\xc0\x7f"}.get(tensor.tensor_type.name, b"\x00\x7e")
    with file.open("r+b") as stream:
        stream.seek(tensor.data_offset + place)
        stream.write(nan)
    with pytest.raises(NotFinite, match=f"^{name.replace('.', chr(92) + '.')} .*{words}.*download the file"):
        FastLanguageModel.from_pretrained(file)


def test_an_adapter_over_a_file_finds_it_again_and_is_merged(tmp_path: Path) -> None:
    file = export(tmp_path, "llama", "q8_0")
    model, words = FastLanguageModel.from_pretrained(file)
    model = perturb(FastLanguageModel.get_peft_model(model, r=4)).eval()
    for part in (model, words):
        part.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(tmp_path / "adapter", load_in_4bit=False)
    assert torch.equal(logits(again.eval(), IDS), logits(model, IDS))
    for name, base in (("own", None), ("named", str(file))):
        said = merge_adapter(str(tmp_path / "adapter"), str(tmp_path / name), base=base)
        assert f"{file} is a GGUF file" in said
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        found, need = logits(merged, IDS), logits(model, IDS)
        assert (found - need).norm() < 0.03 * need.norm()  # in 16 bits
    for wrong, words in (
        (file.parent, f"name the GGUF file in it, {file}"),
        (tmp_path / "base" / "config.json", "is a file; give the folder"),
    ):
        with pytest.raises(BadInput, match=re.escape(words)):
            merge_adapter(str(tmp_path / "adapter"), str(tmp_path / "other"), base=str(wrong))
    with pytest.raises(BadInput, match=r"is a GGUF file.* quantised already.*fewbits export"):
        quantize_checkpoint(file, tmp_path / "other", "int8")


@pytest.mark.slow
def test_a_file_that_was_opened_leaves_with_the_same_bytes(tmp_path: Path) -> None:
    """What is packed in the wanted type is not searched for again; the others are."""
    file = export(tmp_path, "llama", "q4_k_m")
    model, words = FastLanguageModel.from_pretrained(file)
    receipt = model.save_pretrained_gguf(tmp_path / "again", words, "q4_k_m")
    first, second = (gguf.GGUFReader(one).tensors for one in (file, receipt.path))
    linears = [t.name for t in first if len(t.shape) == 2 and t.name != "token_embd.weight"]
    assert receipt.kept == len(linears) == 15 and not receipt.rounded_again
    assert receipt.path.name == "base-Q4_K_M.gguf"
    found = {t.name: t.data for t in second}
    assert all((found[t.name] == t.data).all() for t in first if t.name in linears)
    assert "is a GGUF file" in receipt.weights_from
    with pytest.raises(BadInput, match="which is read for this"):  # it lies in memory as the disk has it
        model.save_pretrained_gguf(file.parent, words, "q8_0", overwrite=True)
    assert file.is_file()
    other = model.save_pretrained_gguf(tmp_path / "other", words, "q5_k_m")
    assert other.kept > 0 and len(other.rounded_again) == 15 - other.kept  # the Q6_K of both mixes are kept


def test_longer_sequences_stretch_positions_as_those_of_a_folder(tmp_path):
    file = export(tmp_path, "llama", "q8_0", max_position_embeddings=64)
    plain, _ = FastLanguageModel.from_pretrained(str(file))
    longer, words = FastLanguageModel.from_pretrained(str(file), max_seq_length=128)
    folder, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=128)
    assert longer.config.rope_parameters == folder.config.rope_parameters != plain.config.rope_parameters
    assert longer.config.max_position_embeddings == words.model_max_length == 128
    ours, theirs = (model.model.rotary_emb.inv_freq for model in (longer, folder))
    assert torch.equal(ours, theirs) and torch.equal(2 * ours, plain.model.rotary_emb.inv_freq)
    assert logits(longer, IDS).isfinite().all() and not torch.equal(logits(longer, IDS), logits(plain, IDS))
    with pytest.raises(BadInput, match="stretched by"):
        FastLanguageModel.from_pretrained(str(file), max_seq_length=64 * 1000)
