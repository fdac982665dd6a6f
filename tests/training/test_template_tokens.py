"""A chat template's markers become tokens that train; adapter, merged model and generation know them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from fewbits.chat_templates import add_template_tokens, modules_to_train
from fewbits.errors import BadInput, Unsupported
from fewbits.models.chat.template_tokens import markers_of
from fewbits.models.fast import FastLanguageModel
from fewbits.training.config import TrainConfig
from fewbits.training.run import train
from tests.models.loading import save_tiny
from tests.models.tiny_folders import byte_tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def base(request, tmp_path):
    """A base model whose tokenizer has no marker and no template."""
    save_tiny(tmp_path / "base", vocab_size=272, tie_word_embeddings=request.param)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    for old in (tmp_path / "base").glob("*token*"):
        old.unlink()
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def config_for(base, tmp_path, **changes):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(8)))
    values = {
        "model": str(base), "train_data": str(data), "output_dir": str(tmp_path / "run"), "max_steps": 6,
        "batch_size": 4, "lora_r": 4, "learning_rate": 1e-2, "device": "cpu", "max_seq_length": 64,
        "chat_template": "chatml", "template_tokens": "add", "report": False, "samples": 0,
    }  # fmt: skip
    return TrainConfig.from_mapping(values | changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_base_model_learns_a_template_with_tokens_of_its_own(base, tmp_path, capsys):
    from fewbits.cli import main

    result = train(config_for(base, tmp_path, merge=True))
    saved = load_file(result.final / "adapter_model.safetensors")
    assert any("embed_tokens" in name for name in saved)
    answers = []
    for place in (result.final, result.merged):
        model, tokenizer = FastLanguageModel.from_pretrained(place, load_in_4bit=False)
        ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
        text = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (
            written.count(ids[0]) == 2 and written.count(ids[1]) == 1 and tokenizer.eos_token == "<|im_end|>"
        )
        assert tokenizer.eos_token_id in model.generation_config.eos_token_id or (
            model.generation_config.eos_token_id == tokenizer.eos_token_id
        )
        answers.append(model(torch.tensor([written])).logits.detach().float())
    torch.testing.assert_close(answers[0], answers[1], atol=0.1, rtol=0.1)  # merged in bfloat16
    question = tmp_path / "question.json"
    question.write_text(json.dumps(CHAT[:1]))
    words = ["generate", "--model", str(result.output_dir), "--messages", str(question), "--temperature", "0"]
    assert main([*words, "--max-new-tokens", "3"]) == 0


def test_new_rows_begin_as_means_and_train(base, tmp_path):
    model, tokenizer = FastLanguageModel.from_pretrained(base)
    ids = tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
    expected = model.get_input_embeddings().weight[ids].mean(0)
    added = add_template_tokens(model, tokenizer, "chatml")
    assert added == ["<|im_start|>", "<|im_end|>"] and add_template_tokens(model, tokenizer, "chatml") == []
    row = tokenizer.convert_tokens_to_ids("<|im_start|>")
    torch.testing.assert_close(model.get_input_embeddings().weight[row], expected)
    model = FastLanguageModel.get_peft_model(model, r=2, **modules_to_train(model))
    trained = {
        name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad and "save" in name
    }
    assert "embed_tokens" in trained
    with pytest.raises(BadInput, match="before get_peft_model"):
        add_template_tokens(model, tokenizer, "llama-3")


def test_markers_by_name():
    assert markers_of("gemma") == ["<start_of_turn>", "<end_of_turn>"]
    assert markers_of("llama-3.1") == ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert markers_of("alpaca") == [] and markers_of("mistral") == ["[INST]", "[/INST]"]
    with pytest.raises(BadInput, match="it is no named template"):
        markers_of("mine.jinja")


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"chat_template": None}, BadInput, "no chat_template says which"),
        ({"template_tokens": "some"}, BadInput, "template_tokens"),
        ({"method": "reward"}, Unsupported, "method reward adds no tokens"),
    ],
)
def test_refusals(tmp_path, changes, error, sentence):
    save_tiny(tmp_path / "base")
    with pytest.raises(error, match=sentence):
        train(config_for(tmp_path / "base", tmp_path, **changes))
