"""Mixtures of experts in GGUF: read back by the gguf package, run by llama.cpp, packed ones as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fewbits
from fewbits import FastLanguageModel
from fewbits.errors import Unsupported
from tests.models.gguf_tensors import decoded, turned
from tests.models.llama_engine import compared
from tests.models.mixtures import mixture
from tests.models.tiny_folders import pair_tokenizer

gguf = pytest.importorskip("gguf")

KINDS = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "olmoe": "olmoe"}


def saved(folder: Path, kind: str, tokenizer: Any = None, **changes: Any) -> Path:
    """A tiny mixture with a tokenizer that GGUF has."""
    tokenizer = pair_tokenizer() if tokenizer is None else tokenizer
    words = {"vocab_size": len(tokenizer), "num_key_value_heads": 4 if kind == "olmoe" else 2, **changes}
    words |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    mixture(kind, **words).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder: Path, how: str | None = None) -> tuple[Any, Any]:
    words: Any = {"load_in_4bit": False} if how is None else {"recipe": recipe(how)}
    return FastLanguageModel.from_pretrained(folder, dtype=torch.float32, **words)


def recipe(how: str) -> dict[str, Any]:
    return {"name": "mine", "linear": {"weight": how}}


def experts_of(values: dict[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up together, and down, as transformers has them."""
    gate, up, down = (values[f"blk.{layer}.ffn_{kind}_exps.weight"] for kind in ("gate", "up", "down"))
    return torch.cat([gate, up], 1), down


@pytest.mark.parametrize(
    "kind", [k if k == "qwen3_moe" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_each_family_reads_back_exactly_in_float32(tmp_path: Path, kind: str) -> None:
    model, tokenizer = opened(saved(tmp_path / "base", kind))
    receipt = model.save_pretrained_gguf(tmp_path / "out", tokenizer, "f32")
    values, _ = decoded(receipt.path)
    layer = model.model.layers[1]
    gate_up, down = experts_of(values, 1)
    assert torch.equal(gate_up, layer.mlp.experts.gate_up_proj) and torch.equal(
        down, layer.mlp.experts.down_proj
    )
    assert torch.equal(values["blk.1.ffn_gate_inp.weight"], layer.mlp.gate.weight)
    q = layer.self_attn.q_proj.weight.detach()
    assert torch.equal(values["blk.1.attn_q.weight"], turned(q, 4) if kind == "mixtral" else q)
    assert receipt.kl < 1e-6 and receipt.top1 == 1.0 and receipt.worst[1] == 0.0
    reader = gguf.GGUFReader(receipt.path)
    with pytest.raises(Unsupported, match="holds a mixture of experts"):
        FastLanguageModel.from_pretrained(receipt.path)
    facts = {
        key: reader.get_field(f"{KINDS[kind]}.{key}").contents()
        for key in ("expert_count", "expert_used_count")
    }
    assert facts == {"expert_count": 8 if kind == "qwen3_moe" else 4, "expert_used_count": 2}
    assert reader.get_field("general.architecture").contents() == KINDS[kind]


def test_packed_experts_leave_with_their_bytes_or_from_the_original(tmp_path: Path) -> None:
    """The original is rounded once where it is there; else blocks of the mix's type stay byte for byte."""
    model, tokenizer = opened(saved(tmp_path / "base", "qwen3_moe"), "nf4")
    receipt = model.save_pretrained_gguf(tmp_path / "nf4", tokenizer, "f32")
    plain, _ = opened(tmp_path / "base")
    values, _ = decoded(receipt.path)
    assert torch.equal(experts_of(values, 0)[0], plain.model.layers[0].mlp.experts.gate_up_proj)

    model, tokenizer = opened(tmp_path / "base", "gguf_q8_0")
    model.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    (tmp_path / "base").rename(tmp_path / "gone")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    wide, q8 = model.save_pretrained_gguf(tmp_path / "out", tokenizer, ["f32", "q8_0"])
    experts = model.model.layers[1].mlp.experts
    values, _ = decoded(wide.path)
    assert torch.equal(experts_of(values, 1)[0], experts.dequantize("gate_up_proj"))
    stored = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(q8.path).tensors}
    gate_up, down = experts_of(stored, 1)
    assert torch.equal(gate_up, experts.packed("gate_up_proj").codes)
    assert torch.equal(down, experts.packed("down_proj").codes)
    assert q8.kept == 8 + 4 and not q8.rounded_again  # linears, and two weights of experts in each layer


def test_adapters_on_experts_are_merged(tmp_path: Path) -> None:
    model, tokenizer = opened(saved(tmp_path / "base", "qwen3_moe"), "nf4")
    adapted = FastLanguageModel.get_peft_model(model, r=2, lora_alpha=8, use_gradient_checkpointing=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    receipt = adapted.save_pretrained_gguf(tmp_path / "out", tokenizer, "f32")
    adapted.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged, _ = opened(tmp_path / "merged")
    values, _ = decoded(receipt.path)
    plain, _ = opened(tmp_path / "base")
    for layer in range(2):
        gate_up, down = experts_of(values, layer)
        for name, found in (("gate_up_proj", gate_up), ("down_proj", down)):
            wanted = getattr(merged.model.layers[layer].mlp.experts, name)
            assert (found - wanted).norm() <= 2**-8 * wanted.norm()  # that one is saved in bfloat16
            assert (
                wanted - getattr(plain.model.layers[layer].mlp.experts, name)
            ).norm() > 0.02 * wanted.norm()
    assert "NOT CHECKED" not in str(receipt) and fewbits.explain(model) is not None


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    for kind, changes, words in (
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False in this model"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some layers of this model have no experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0 in this model"),
        ("olmoe", {"num_key_value_heads": 2}, "fewer heads of keys than of queries"),
        ("mixtral", {"sliding_window": 64}, "sliding_window is 64 in this model"),
        ("granitemoe", {}, "'granitemoe' are not written to GGUF yet"),
    ):
        folder = tmp_path / f"{kind}{len(words)}"
        model, tokenizer = opened(saved(folder, kind, **changes))
        with pytest.raises(Unsupported, match=words):
            model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q8_0")
    assert not (tmp_path / "out").exists()


def test_few_experts_give_attention_more_bits(tmp_path: Path) -> None:
    """As llama.cpp's quantiser does for eight of them; what chooses experts stays in float32."""
    model, tokenizer = opened(saved(tmp_path / "base", "qwen3_moe"))
    receipt = model.save_pretrained_gguf(tmp_path / "out", tokenizer, "q4_0")
    _, kinds = decoded(receipt.path)
    assert kinds["blk.0.attn_v.weight"] == kinds["blk.0.attn_k.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_exps.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"


@torch.no_grad()
def speaks_letters(folder: Path, tokenizer: Any) -> None:
    """Make a random model prefer whole pieces of words: one input of the head says which tokens are none."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.15, generator=torch.Generator().manual_seed(len(name)))
        if name.endswith(("o_proj.weight", "experts.down_proj")):
            parameter[..., 0, :] = 0.0
    model.model.embed_tokens.weight[:, 0] = 2.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[:260, 0] = -50.0  # marks and single bytes
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_writes_the_same_tokens(tmp_path: Path, kind: str, shared: Path) -> None:
    pytest.importorskip("xllamacpp")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "models" / "stories260k")
    folder = saved(tmp_path / "base", kind, tokenizer, max_position_embeddings=256, tie_word_embeddings=False)
    speaks_letters(folder, tokenizer)
    model, _ = opened(folder)
    receipt = model.save_pretrained_gguf(
        tmp_path / "out", tokenizer, "f32"
    )  # in float16 a near-tie chooses others
    different, gap, error = compared(model, tokenizer, receipt.path)
    assert error < 0.01 and different <= 1 and gap < 2 * error
