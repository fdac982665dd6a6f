"""`fewbits.trl`: TRL with the words of notebooks that were written for a patched one; TRL stays as it is."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

from fewbits import FastLanguageModel, FastModel, FastSentenceTransformer
from fewbits.errors import BadInput, Unsupported
from fewbits.front import trl_words
from fewbits.front.vision_rows import UnslothVisionDataCollator, beside
from tests.models.loading import save_tiny

trl = pytest.importorskip("trl")
Dataset = pytest.importorskip("datasets").Dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("words") / "base"
    save_tiny(place, tie_word_embeddings=False)
    return place


def settings(tmp_path, **more):
    return {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        **more,
    }


def test_an_older_call_of_sft_trains(folder, tmp_path):
    from fewbits.trl import SFTConfig, SFTTrainer

    model, tokenizer = FastModel.from_pretrained(folder, max_seq_length=32)
    model = FastModel.get_peft_model(model, finetune_vision_layers=True, finetune_mlp_modules=False, r=4)
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    rows = [{"body": "a b c d"}] * 4
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=rows,
        dataset_text_field="body",
        max_seq_length=16,
        packing=False,
        args=SFTConfig(**settings(tmp_path, optim="adamw_8bit", warmup_ratio=0.1)),
    )
    assert isinstance(trainer, trl.SFTTrainer) and isinstance(trainer.args, trl.SFTConfig)
    assert trainer.args.max_length == 16 and trainer.args.dataset_text_field == "body"
    assert trainer.args.optim == ("adamw_8bit" if torch.cuda.is_available() else "adamw_torch")
    assert trainer.train().global_step == 1
    assert type(pickle.loads(pickle.dumps(trainer.args))) is SFTConfig


def test_fields_of_dpo_beside_its_configuration(folder, tmp_path, caplog):
    from transformers import TrainingArguments

    from fewbits.trl import DPOTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(model, r=4)
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b c", "rejected": "d"}] * 4)
    trl_words._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fewbits"):
        trainer = DPOTrainer(
            model=model,
            ref_model=None,
            beta=0.3,
            max_length=24,
            max_prompt_length=8,
            tokenizer=tokenizer,
            train_dataset=rows,
            args=TrainingArguments(**settings(tmp_path)),
        )
    assert trainer.args.beta == 0.3 and trainer.args.max_length == 24 and trainer.args.max_steps == 1
    assert "max_prompt_length chooses nothing here" in caplog.text
    assert trainer.train().global_step == 1
    with pytest.raises(BadInput, match="DPOTrainer knows no option 'betta'"):
        DPOTrainer(model=model, betta=0.3, processing_class=tokenizer, train_dataset=rows)


def test_a_step_of_grpo_has_whole_groups(tmp_path, caplog):
    from fewbits.trl import GRPOConfig

    few = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_generations": 4}
    with caplog.at_level(logging.WARNING, logger="fewbits"):
        made = GRPOConfig(**{**settings(tmp_path), **few, "use_vllm": True, "max_prompt_length": 16})
    assert made.per_device_train_batch_size == 4 and not made.use_vllm
    assert "whole groups" in caplog.text and "use_vllm chooses nothing" in caplog.text
    assert (
        GRPOConfig(
            **{**settings(tmp_path), **few, "gradient_accumulation_steps": 4}
        ).per_device_train_batch_size
        == 1
    )


def test_what_is_no_trainer_is_trls_own():
    import fewbits.trl

    assert fewbits.trl.get_peft_config is trl.get_peft_config
    assert fewbits.trl.ORPOConfig is fewbits.trl.ORPOConfig  # of an experimental part
    with pytest.raises(TypeError, match="no_such_word"):
        fewbits.trl.SFTConfig(no_such_word=1)
    with pytest.raises(AttributeError, match="no NoSuchTrainer"):
        _ = fewbits.trl.NoSuchTrainer
    assert trl.SFTConfig.__module__.startswith("trl.")


def test_embeddings_among_the_targets_train_as_a_whole(folder, tmp_path):
    from fewbits.trainer import UnslothTrainer, UnslothTrainingArguments

    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "embed_tokens", "lm_head"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sum("modules_to_save" in name for name in trained) == 2
    assert all("modules_to_save" in name or "q_proj.lora_" in name for name in trained)
    assert any("trained as a whole" in note for note in model.fewbits_notes)
    trainer = UnslothTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=[{"text": "a b c"}] * 4,
        max_seq_length=16,
        dataset_text_field="text",
        args=UnslothTrainingArguments(
            **settings(tmp_path, learning_rate=1e-3, embedding_learning_rate=1e-5, optim="adamw_8bit")
        ),
    )
    trainer.create_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {1e-3, 1e-5}


def test_ids_that_came_as_a_batch_are_taken(folder):
    """What apply_chat_template of transformers 5 returns stands where it once returned the ids alone."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    model = FastLanguageModel.for_inference(FastLanguageModel.get_peft_model(model, r=4))
    batch = tokenizer("a b", return_tensors="pt")
    want = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(input_ids=batch, max_new_tokens=3, do_sample=False), want)


def test_images_go_beside_their_messages():
    parts = [
        {"type": "image", "image": "first", "text": None},
        {"type": "text", "text": "What?", "image": None},
    ]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "That."}]}
    made = beside(row)
    assert made["images"] == ["first"] and made["messages"][1]["content"] == "That."
    assert made["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert beside(made) is made
    with pytest.raises(BadInput, match="needs the processor"):
        UnslothVisionDataCollator(None, object())


def test_embedding_models_are_refused_with_the_way():
    with pytest.raises(Unsupported, match="sentence-transformers"):
        FastSentenceTransformer.from_pretrained("org/model")


def test_texts_that_were_written_from_conversations_are_what_trains(folder, tmp_path):
    """As in notebooks whose messages have other words for role and content, which a template then knows."""
    from fewbits.chat_templates import get_chat_template
    from fewbits.trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(folder)
    words = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    tokenizer = get_chat_template(tokenizer, "chatml", mapping=words)
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    rows = Dataset.from_list([{"conversations": talk, "text": text}] * 4)
    model = FastLanguageModel.get_peft_model(model, r=4)
    trainer = SFTTrainer(
        model=model, tokenizer=tokenizer, train_dataset=rows, args=SFTConfig(**settings(tmp_path))
    )
    seen = tokenizer.decode(trainer.train_dataset[0]["input_ids"]).replace("<unk>", "")
    assert seen == "<s>" + text.replace("\n", "") + "</s>"  # a character tokenizer without line ends
    assert trainer.train().global_step == 1
