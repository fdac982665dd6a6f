"""The names that Unsloth's notebooks import, and what they do here."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace

import pytest
import torch

import fewbits
from fewbits import FastLanguageModel, FastModel
from fewbits.errors import BadInput, Unsupported
from fewbits.front import unsloth

Dataset = pytest.importorskip("datasets").Dataset
SFTConfig = pytest.importorskip("trl").SFTConfig
UnslothTrainer, UnslothTrainingArguments = fewbits.UnslothTrainer, fewbits.UnslothTrainingArguments  # of TRL


@pytest.fixture
def loaded(shared):
    path = shared / "data" / "models" / "stories260k"
    return FastModel.from_pretrained(path, max_seq_length=64, load_in_4bit=True)


def test_patches_say_once_that_they_patch_nothing(caplog):
    unsloth._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fewbits"):
        for _ in range(2):
            fewbits.PatchDPOTrainer()
            fewbits.PatchFastRL("GRPO", FastLanguageModel)
    assert [record.message.split()[0] for record in caplog.records] == ["PatchDPOTrainer", "PatchFastRL"]
    assert fewbits.is_bfloat16_supported() == (torch.cuda.is_available() and torch.cuda.is_bf16_supported())


def test_further_names_are_the_same_or_refused_with_the_way():
    from fewbits.chat_templates import to_sharegpt

    assert fewbits.to_sharegpt is to_sharegpt and fewbits.FastQwen2Model is FastLanguageModel
    assert fewbits.is_bf16_supported is fewbits.is_bfloat16_supported
    with pytest.raises(Unsupported, match="a sandbox of your own"):
        _ = fewbits.execute_with_time_limit


def test_fast_generate_and_load_lora(loaded, tmp_path):
    model, tokenizer = loaded
    model = FastModel.get_peft_model(model, r=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    model.save_lora(tmp_path / "lora")
    greedy = {"temperature": 0, "max_tokens": 8}
    ids = tokenizer(["Once upon"], return_tensors="pt")
    with torch.no_grad(), model.disable_adapter():
        bare = model.eval().generate(**ids, max_new_tokens=8, do_sample=False)
    adapted = model.generate(**ids, max_new_tokens=8, do_sample=False)
    model.train()
    active, training = model.active_adapter, [n for n, p in model.named_parameters() if p.requires_grad]
    request = model.load_lora(tmp_path / "lora")
    assert model.active_adapter == active
    (base,) = model.fast_generate("Once upon", sampling_params=greedy)
    (with_adapter,) = model.fast_generate(["Once upon"], sampling_params=greedy, lora_request=request)
    length = ids["input_ids"].shape[1]
    assert base.outputs[0].token_ids == bare[0, length:].tolist()
    assert with_adapter.outputs[0].token_ids == adapted[0, length:].tolist()
    assert base.outputs[0].text != with_adapter.outputs[0].text
    assert model.training and model.active_adapter == active
    assert [n for n, p in model.named_parameters() if p.requires_grad] == training
    assert torch.equal(
        model.fast_generate(**ids, max_new_tokens=2, do_sample=False)[0, :length], ids["input_ids"][0]
    )
    sampled = model.fast_generate("Once", sampling_params={"n": 2, "seed": 1, "max_tokens": 4})
    assert len(sampled[0].outputs) == 2
    with pytest.raises(BadInput, match="put it into sampling_params"):
        model.fast_generate("Once", max_new_tokens=3)
    long = {"temperature": 0, "max_tokens": 40}
    (whole,) = model.fast_generate("Once upon", sampling_params=long)
    stop = whole.outputs[0].text[10:14]
    (cut,) = model.fast_generate("Once upon", sampling_params={**long, "stop": [stop, "never said"]})
    assert cut.outputs[0].text == whole.outputs[0].text.split(stop)[0]  # as vLLM, without it
    with pytest.raises(BadInput, match=r"'max_new_tokens', which .* knows temperature, .*max_tokens"):
        model.fast_generate("Once", sampling_params={"max_new_tokens": 3})
    with pytest.raises(BadInput, match="'presence_penalty'"):
        model.fast_generate("Once", sampling_params=SimpleNamespace(presence_penalty=0.5, min_tokens=0))
    model.base_model.model.model.eval()
    model.fast_generate("Once", sampling_params=greedy)
    assert model.training and not model.base_model.model.model.training  # each module as it was


def test_adapters_are_used_again_and_freed(loaded, tmp_path):
    """A loop of training, saving and loading keeps one adapter; several answer side by side."""
    model = FastModel.get_peft_model(loaded[0], r=4)

    def trained(scale: float, name: str):
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B.default" in key:
                    parameter.normal_(0, scale)
        model.save_lora(tmp_path / name)
        return model.load_lora(tmp_path / name)

    size = len(list(model.parameters()))
    first = trained(0.5, "a")
    assert model.load_lora(tmp_path / "a") == first and len(model.peft_config) == 2
    second = trained(0.4, "a")
    assert second != first and set(model.peft_config) == {"default", second.name}
    other = trained(0.7, "b")
    greedy = {"temperature": 0, "max_tokens": 6}
    both = model.fast_generate(["Once"] * 3, sampling_params=greedy, lora_request=[second, None, other])
    alone = [
        model.fast_generate("Once", sampling_params=greedy, lora_request=r)[0] for r in (second, None, other)
    ]
    assert [b.outputs[0].token_ids for b in both] == [a.outputs[0].token_ids for a in alone]
    with pytest.raises(BadInput, match="2 entries, and there are 3 texts"):
        model.fast_generate(["Once"] * 3, lora_request=[second, None])
    with pytest.raises(BadInput, match="was freed"):
        model.fast_generate("Once", lora_request=first)
    for adapter in (second, other):
        model.unload_lora(adapter)
    assert set(model.peft_config) == {"default"} == {model.active_adapter}
    assert len(list(model.parameters())) == size
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)
    with pytest.raises(BadInput, match="or it was freed"):
        model.unload_lora(second)


def test_several_active_adapters_stay_active_and_any_one_is_saved(loaded, tmp_path):
    """`load_lora` and `fast_generate` left one of them; another than "default" went one folder further."""
    model = FastModel.get_peft_model(loaded[0], r=4).eval()
    model.add_adapter("other", model.peft_config["default"])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.5)
    ids = torch.arange(3, 12)[None]
    model.set_adapter("other")
    model.save_lora(tmp_path / "other")
    with torch.no_grad():
        alone = model(ids).logits
        model.base_model.set_adapter(["default", "other"])
        both = model(ids).logits
        request = model.load_lora(tmp_path / "other")
        model.fast_generate("Once", sampling_params={"max_tokens": 2}, lora_request=request)
        assert torch.equal(model(ids).logits, both) and model.active_adapters == ["default", "other"]
        with pytest.raises(BadInput, match="default, other are active"):
            model.save_lora(tmp_path / "both")
        model.set_adapter(request.name)
        torch.testing.assert_close(model(ids).logits, alone)
    with pytest.raises(BadInput, match="an active adapter"):
        model.unload_lora(request)


def test_load_lora_needs_adapters(loaded):
    with pytest.raises(BadInput, match="get_peft_model"):
        loaded[0].load_lora("nowhere")


def arguments(tmp_path, **more):
    return UnslothTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        max_length=32,
        learning_rate=1e-3,
        **more,
    )


def test_embeddings_learn_at_their_own_rate(loaded, tmp_path):
    model, tokenizer = loaded
    model = FastLanguageModel.get_peft_model(model, r=4, modules_to_save=["embed_tokens"])
    data = Dataset.from_list([{"text": "Once upon a time"}] * 4)
    trainer = UnslothTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=data,
        args=arguments(tmp_path, embedding_learning_rate=1e-5),
    )
    trainer.create_optimizer()
    groups = {group["lr"]: len(group["params"]) for group in trainer.optimizer.param_groups}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert groups.keys() == {1e-3, 1e-5} and groups[1e-5] == 1 and sum(groups.values()) == len(trained)
    trainer.train()
    assert isinstance(trainer.args, SFTConfig)


def test_an_embedding_rate_without_embeddings_is_refused(loaded, tmp_path):
    model, tokenizer = loaded
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"])
    trainer = UnslothTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"text": "Once"}] * 2),
        args=arguments(tmp_path, embedding_learning_rate=1e-5),
    )
    with pytest.raises(BadInput, match="neither embeddings nor head train"):
        trainer.create_optimizer()


def test_arguments_can_be_saved_and_read(tmp_path):
    """Also after caches were cleared, as tests of kernels do."""
    args = arguments(tmp_path, embedding_learning_rate=1e-5)
    again = pickle.loads(pickle.dumps(args))
    assert type(again) is UnslothTrainingArguments and again.embedding_learning_rate == 1e-5


def test_a_classifier_is_packed_and_its_head_trains(shared, caplog):
    from transformers import AutoModelForSequenceClassification

    from fewbits.nn.linear import QuantizedLinear

    path = shared / "data" / "models" / "stories260k"
    kind = {"auto_model": AutoModelForSequenceClassification, "num_labels": 3}
    model, tokenizer = FastModel.from_pretrained(path, max_seq_length=64, **kind)
    packed = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert packed and model.config.num_labels == 3 and tokenizer.model_max_length == 64
    model = FastModel.get_peft_model(model, r=4, task_type="SEQ_CLS", random_state=1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained) and any("lora_A" in name for name in trained)
    ids = torch.randint(5, 100, (2, 7))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    whole, _ = FastModel.from_pretrained(path, full_finetuning=True, **kind)
    assert FastModel.get_peft_model(whole, task_type="SEQ_CLS") is whole
    assert "there are no adapters" in caplog.text
    with pytest.raises(BadInput, match="knows no option 'colour'"):
        FastModel.from_pretrained(path, colour=1, **kind)


def test_a_classifier_in_16_bits_gets_adapters_although_a_plain_load_trains_everything(shared):
    from transformers import AutoModelForSequenceClassification as Kind

    path = shared / "data" / "models" / "stories260k"
    model, _ = FastModel.from_pretrained(path, auto_model=Kind, num_labels=3, load_in_4bit=False)
    assert all(p.requires_grad for p in model.parameters())
    model = FastModel.get_peft_model(model, r=4, task_type="SEQ_CLS")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert all("lora_" in name or "score" in name for name in trained)


def test_a_classifier_is_merged_with_its_trained_head(shared, tmp_path):
    """Its answers are those of the adapters over 16-bit weights, read by plain transformers."""
    from transformers import AutoModelForSequenceClassification as Kind

    path = shared / "data" / "models" / "stories260k"
    model, tokenizer = FastModel.from_pretrained(path, auto_model=Kind, num_labels=3, load_in_4bit=False)
    model = FastModel.get_peft_model(model, r=4, task_type="SEQ_CLS")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(5, 100, (3, 7))
    for _ in range(3):
        optimizer.zero_grad()
        batch = {"attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 2, 1])}
        model(input_ids=ids, **batch).loss.backward()
        optimizer.step()
    expected = model.eval()(input_ids=ids).logits
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = Kind.from_pretrained(tmp_path / "merged").eval()
    assert type(merged).__name__ == "LlamaForSequenceClassification" and merged.config.num_labels == 3
    torch.testing.assert_close(merged(input_ids=ids).logits.float(), expected.float(), rtol=0.05, atol=0.05)


def test_gate_and_up_are_meant_by_one_name_where_a_model_has_two(loaded):
    model = FastModel.get_peft_model(loaded[0], r=4, target_modules=["q_proj", "gate_up_proj"])
    places = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert places == {"q_proj", "gate_proj", "up_proj"}
