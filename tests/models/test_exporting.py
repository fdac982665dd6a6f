"""Exports of whole models: read back by the gguf package, compared with the model in memory; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export import gguf_file
from fewbits.models.writing.exporting import save_pretrained_gguf
from tests.models.gguf_tensors import decoded, turned
from tests.models.tiny import tiny
from tests.models.tiny_folders import SIZES, TEMPLATE, byte_tokenizer, pair_tokenizer, saved

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("llama", pair_tokenizer),
        ("mistral", pair_tokenizer),
        ("qwen2", byte_tokenizer),
        ("qwen3", byte_tokenizer),
    ],
)
def test_each_family_reads_back_exactly_in_float32(tmp_path: Path, family: str, make: Any) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(
        saved(tmp_path / "base", family, make()), load_in_4bit=False
    )
    receipt = model.save_pretrained_gguf(tmp_path / "out", tokenizer, "f32")
    values, _ = decoded(receipt.path)
    layer = model.model.layers[1]
    q, k = layer.self_attn.q_proj.weight.detach(), layer.self_attn.k_proj.weight.detach()
    if family in ("llama", "mistral"):
        q, k = turned(q, 8), turned(k, 2)
    assert torch.equal(values["blk.1.attn_q.weight"], q) and torch.equal(values["blk.1.attn_k.weight"], k)
    assert torch.equal(values["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight.detach())
    assert ("output.weight" in values) == (not model.config.tie_word_embeddings)
    assert receipt.kl < 1e-6 and receipt.top1 == 1.0 and receipt.worst[1] == 0.0


def test_the_metadata_are_the_models_and_the_tokenizers(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "qwen2", byte_tokenizer(), rms_norm_eps=2e-6)
    model, tokenizer = FastLanguageModel.from_pretrained(base, load_in_4bit=False)
    reader = gguf.GGUFReader(model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q8_0").path)

    def value(key: str) -> Any:
        return reader.get_field(key).contents()

    assert value("general.architecture") == "qwen2" and value("tokenizer.ggml.pre") == "qwen2"
    assert value("general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0
    assert value("qwen2.attention.head_count_kv") == 2 and value("qwen2.rope.dimension_count") == 32
    assert value("qwen2.attention.layer_norm_rms_epsilon") == pytest.approx(2e-6)
    assert value("tokenizer.ggml.merges") == ["t h", "th e", "Ġ a"]
    assert value("tokenizer.ggml.tokens")[:259] == tokenizer.convert_ids_to_tokens(list(range(259)))
    assert value("tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert value("tokenizer.ggml.token_type")[tokenizer.eos_token_id] == gguf.TokenType.CONTROL
    assert value("tokenizer.ggml.token_type")[511] == gguf.TokenType.UNUSED
    assert value("tokenizer.chat_template") == TEMPLATE and value("tokenizer.ggml.add_bos_token") is False


def test_a_sentencepiece_tokenizer_has_scores_by_rank(tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(
        saved(tmp_path / "base", "llama", pair_tokenizer()), load_in_4bit=False
    )
    reader = gguf.GGUFReader(model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q8_0").path)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    scores = reader.get_field("tokenizer.ggml.scores").contents()
    assert [scores[tokens.index(t)] for t in ("th", "▁th", "▁the")] == [0.0, -1.0, -2.0]
    kinds = reader.get_field("tokenizer.ggml.token_type").contents()
    assert kinds[0] == gguf.TokenType.UNKNOWN and kinds[3] == gguf.TokenType.BYTE
    assert reader.get_field("tokenizer.ggml.add_bos_token").contents() is True
    assert reader.get_field("tokenizer.ggml.add_space_prefix").contents() is True


def test_a_mix_of_a_packed_base_and_an_adapter(tmp_path: Path) -> None:
    """The base's own folder is packed, so its decoded weights are merged, one tensor at a time."""
    saved(tmp_path / "base", "llama", pair_tokenizer())
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "packed")
    decoded_down = model.model.layers[1].mlp.down_proj.dequantize(torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    adapted: Any = model.base_model.model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        adapted.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    delta = 2.0 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    receipt = model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q4_k_m")
    values, kinds = decoded(receipt.path)
    wanted = (decoded_down + delta).detach()
    assert delta.norm() > 0.2 * decoded_down.norm()
    assert (values["blk.1.ffn_down.weight"] - wanted).norm() < 0.1 * wanted.norm()
    assert kinds["blk.1.ffn_down.weight"] == "Q6_K" and kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert "dequantised" in receipt.weights_from and not receipt.fallbacks
    assert sum(receipt.num_tensors.values()) == 21


def test_rows_without_whole_blocks_are_in_the_receipt(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama", pair_tokenizer(), hidden_size=64, intermediate_size=172)
    model, tokenizer = FastLanguageModel.from_pretrained(base, load_in_4bit=False)
    receipt = model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q4_k_m")
    assert "blk.1.ffn_down.weight is F16 and not Q6_K, its rows have 172 values" in receipt.fallbacks
    assert "with another type than the mix's" in str(receipt)


def test_several_methods_give_a_file_each(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "qwen3", byte_tokenizer())
    model, tokenizer = FastLanguageModel.from_pretrained(base, load_in_4bit=False)
    receipts = model.save_pretrained_gguf(tmp_path / "out", tokenizer, ["q8_0", "q6_k"])
    assert [r.path.name for r in receipts] == ["base-Q8_0.gguf", "base-Q6_K.gguf"]
    assert receipts[0].kl < receipts[1].kl
    with pytest.raises(BadInput, match="not empty"):
        model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q8_0", overwrite=False)
    six = (tmp_path / "out" / "base-Q6_K.gguf").read_bytes()
    model.save_pretrained_gguf(tmp_path / "out", tokenizer, ["q8_0", "q5_0"])  # joins the earlier export
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"base-{kind}.gguf" for kind in ("Q8_0", "Q6_K", "Q5_0")),
        "export.json",
    }
    assert (tmp_path / "out" / "base-Q6_K.gguf").read_bytes() == six
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record.pop("written_by") == "fewbits" and set(record.pop("files")) == {*record, "export.json"}
    assert set(record) == {f"base-{kind}.gguf" for kind in ("Q8_0", "Q6_K", "Q5_0")}
    mine = tmp_path / "out" / "mine.gguf"
    mine.write_text("not of that export")
    model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q8_0", overwrite=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"base-Q8_0.gguf", "export.json", "mine.gguf"}


def test_only_exports_of_ours_are_joined(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "qwen3", byte_tokenizer())
    model, tokenizer = FastLanguageModel.from_pretrained(base, load_in_4bit=False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "base-Q8_0.gguf").write_text("of llama.cpp")
    for text in (
        '{"mine": "my exporter"}',
        '{"base-Q8_0.gguf": ["mine"]}',
        '{"base-Q8_0.gguf": "GGUF Q8_0"}',
        "[]",
        "{}",
        '{"written": ["out: gptq:int4_g32, 3 MB"]}',
    ):
        (out / "export.json").write_text(text)
        with pytest.raises(BadInput, match="exists and is not empty"):
            model.save_pretrained_gguf(out, tokenizer, "q8_0", check=False)
        assert (out / "base-Q8_0.gguf").read_text() == "of llama.cpp"
        assert (out / "export.json").read_text() == text
    (out / "base-Q8_0.gguf").unlink()
    (out / "export.json").unlink()
    model.save_pretrained_gguf(out, tokenizer, "q8_0", check=False)
    record = json.loads((out / "export.json").read_text())
    bare = {"base-Q8_0.gguf": record["base-Q8_0.gguf"]}
    (out / "export.json").write_text(json.dumps(bare))  # as exports wrote it before they named themselves
    (out / "base-Q5_0.gguf").write_text("of llama.cpp")
    (out / "tokenizer.model").write_text("mine")
    with pytest.raises(BadInput, match=r"base-Q5_0\.gguf is not of the earlier call"):
        model.save_pretrained_gguf(out, tokenizer, "q5_0", check=False)
    model.save_pretrained_gguf(out, tokenizer, ["q8_0", "q6_k"], check=False)
    assert (out / "base-Q5_0.gguf").read_text() == "of llama.cpp"
    assert (out / "tokenizer.model").read_text() == "mine"
    files = json.loads((out / "export.json").read_text())["files"]
    assert files == ["base-Q6_K.gguf", "base-Q8_0.gguf", "export.json"]


@pytest.mark.parametrize("fault", ["rows stay as they are", "two tensors change places"])
def test_a_wrong_file_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    base = saved(tmp_path / "base", "llama", pair_tokenizer())
    model, tokenizer = FastLanguageModel.from_pretrained(base, load_in_4bit=False)
    if fault == "rows stay as they are":
        monkeypatch.setattr(gguf_file, "interleave_halves", lambda weight, heads: weight)
    else:
        encode = gguf_file.encode
        monkeypatch.setattr(gguf_file, "encode", lambda weight, *rest: encode(weight.flip(0), *rest))
    with pytest.raises(BadCheckpoint, match="nothing was written"):
        model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q8_0")
    assert not (tmp_path / "out").exists() and [p.name for p in tmp_path.iterdir()] == ["base"]


def test_what_has_no_gguf_form_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="gemma"):
        save_pretrained_gguf(tiny("gemma"), tmp_path / "out", byte_tokenizer())
    with pytest.raises(Unsupported, match="cuts text"):
        save_pretrained_gguf(tiny("qwen2", **SIZES), tmp_path / "out", byte_tokenizer("unknown"))
    with pytest.raises(BadInput, match="embedding 96 rows"):
        save_pretrained_gguf(tiny("qwen2"), tmp_path / "out", byte_tokenizer())
    with pytest.raises(BadInput, match="tokenizer"):
        save_pretrained_gguf(tiny("qwen2"), tmp_path / "out")
    with pytest.raises(BadInput, match="no option"):
        save_pretrained_gguf(tiny("qwen2"), tmp_path / "out", byte_tokenizer(), qantization="q8_0")
    assert not (tmp_path / "out").exists()
