"""The calls of public Unsloth notebooks, as facts: which names, with which arguments, in which order.

Each function is one notebook; it takes ``place(name)``, the folder of a tiny model of that name's family, and
``rows(name)``, a few rows with the columns of that data set. Only the two imports differ: ``fewbits`` stands
where ``unsloth`` stood, ``fewbits.trl`` where ``trl`` stood. Sizes are tiny; nothing else is changed.
"""

from __future__ import annotations

from typing import Any

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
USUAL: dict[str, Any] = {
    "lora_dropout": 0,
    "bias": "none",
    "use_gradient_checkpointing": "unsloth",
    "random_state": 3407,
    "use_rslora": False,
    "loftq_config": None,
}
STEPS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 1,
    "max_steps": 2,
    "learning_rate": 2e-4,
    "logging_steps": 1,
    "optim": "adamw_8bit",
    "weight_decay": 0.001,
    "lr_scheduler_type": "linear",
    "seed": 3407,
    "output_dir": "outputs",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
}


def loaded(place: Any, name: str, **more: Any) -> Any:
    from fewbits import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        **{"model_name": place(name), "max_seq_length": 256, "dtype": None, "load_in_4bit": True, **more}
    )
    model = FastLanguageModel.get_peft_model(model, r=16, target_modules=list(SEVEN), lora_alpha=16, **USUAL)
    return model, tokenizer


def supervised(model: Any, tokenizer: Any, dataset: Any, **more: Any) -> Any:
    from fewbits.trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=dataset,
        **more,
        args=SFTConfig(dataset_text_field="text", **STEPS),
    )


def answered(model: Any, tokenizer: Any, text: str = "Name a colour.") -> str:
    from transformers import TextStreamer

    from fewbits import FastLanguageModel

    FastLanguageModel.for_inference(model)
    inputs = tokenizer([text], return_tensors="pt")
    out = model.generate(**inputs, streamer=TextStreamer(tokenizer), max_new_tokens=4, use_cache=True)
    return str(tokenizer.batch_decode(out)[0])


def alpaca(place: Any, rows: Any) -> Any:
    model, tokenizer = loaded(place, "llama")
    end = tokenizer.eos_token
    prompt = "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"

    def formatted(examples: Any) -> Any:
        columns = zip(examples["instruction"], examples["input"], examples["output"], strict=True)
        return {"text": [prompt.format(*row) + end for row in columns]}

    dataset = rows("alpaca").map(formatted, batched=True)
    trainer = supervised(model, tokenizer, dataset, max_seq_length=256, dataset_num_proc=1, packing=False)
    trainer.train()
    answered(model, tokenizer)
    model.save_pretrained("lora")
    tokenizer.save_pretrained("lora")
    return trainer


def conversational(place: Any, rows: Any) -> Any:
    from transformers import DataCollatorForSeq2Seq

    from fewbits.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only

    model, tokenizer = loaded(place, "llama")
    tokenizer = get_chat_template(tokenizer, chat_template="llama-3.1")
    dataset = standardize_sharegpt(rows("finetome"))

    def formatted(examples: Any) -> Any:
        talks = examples["conversations"]
        words = {"tokenize": False, "add_generation_prompt": False}
        return {"text": [tokenizer.apply_chat_template(talk, **words) for talk in talks]}

    dataset = dataset.map(formatted, batched=True)
    trainer = supervised(
        model,
        tokenizer,
        dataset,
        max_seq_length=256,
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer),
    )
    trainer = train_on_responses_only(
        trainer,
        instruction_part="<|start_header_id|>user<|end_header_id|>\n\n",
        response_part="<|start_header_id|>assistant<|end_header_id|>\n\n",
    )
    assert any(label != -100 for label in trainer.train_dataset[0]["labels"])
    trainer.train()
    return trainer


def reasoning(place: Any, rows: Any) -> Any:
    import pandas as pd
    from datasets import Dataset

    from fewbits.chat_templates import standardize_sharegpt

    model, tokenizer = loaded(place, "qwen3", load_in_8bit=False, full_finetuning=False)
    problems, chats = rows("openmathreasoning"), standardize_sharegpt(rows("finetome"))
    talks = [
        [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": row["generated_solution"]},
        ]
        for row in problems
    ]
    thought = tokenizer.apply_chat_template(talks, tokenize=False)
    plain = tokenizer.apply_chat_template(list(chats["conversations"]), tokenize=False)
    data = pd.concat([pd.Series(thought), pd.Series(plain).sample(2, random_state=2407)])
    data.name = "text"
    dataset = Dataset.from_pandas(pd.DataFrame(data)).shuffle(seed=3407)
    trainer = supervised(model, tokenizer, dataset, eval_dataset=None)
    trainer.train()
    prompt = tokenizer.apply_chat_template(
        talks[0][:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=4, temperature=0.7, top_p=0.8, top_k=20)
    return trainer


def thinking(place: Any, rows: Any) -> Any:
    from fewbits.chat_templates import get_chat_template, train_on_responses_only

    model, tokenizer = loaded(place, "qwen3")
    tokenizer = get_chat_template(tokenizer, chat_template="qwen3-thinking")

    def talk(row: Any) -> Any:
        messages = [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": row["generated_solution"]},
        ]
        return {"text": tokenizer.apply_chat_template(messages, tokenize=False)}

    trainer = supervised(model, tokenizer, rows("openmathreasoning").map(talk))
    trainer = train_on_responses_only(
        trainer, instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n"
    )
    trainer.train()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    return trainer


def instruct(place: Any, rows: Any) -> Any:
    from fewbits.chat_templates import get_chat_template, standardize_data_formats, train_on_responses_only

    model, tokenizer = loaded(place, "qwen3")
    tokenizer = get_chat_template(tokenizer, chat_template="qwen3-instruct")
    dataset = standardize_data_formats(rows("finetome"))
    dataset = dataset.map(
        lambda batch: {"text": tokenizer.apply_chat_template(batch["conversations"], tokenize=False)},
        batched=True,
    )
    trainer = supervised(model, tokenizer, dataset)
    trainer = train_on_responses_only(
        trainer, instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n"
    )
    trainer.train()
    return trainer


def text_completion(place: Any, rows: Any) -> Any:
    from fewbits import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=place("mistral"), max_seq_length=256, dtype=None, load_in_4bit=True
    )
    usual = {**USUAL, "use_rslora": True}
    targets = [*SEVEN, "embed_tokens", "lm_head"]
    model = FastLanguageModel.get_peft_model(model, r=16, target_modules=targets, lora_alpha=32, **usual)
    end = tokenizer.eos_token
    dataset = rows("stories").map(lambda batch: {"text": [t + end for t in batch["text"]]}, batched=True)
    trainer = UnslothTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset,
        args=UnslothTrainingArguments(
            dataset_text_field="text", max_length=256, embedding_learning_rate=5e-5, **STEPS
        ),
    )
    trainer.train()
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert len(rates) == 2 or rates == {0.0}
    answered(model, tokenizer, "Once upon a time")
    return trainer


def continued_pretraining(place: Any, rows: Any) -> Any:
    from fewbits import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments

    model, tokenizer = FastLanguageModel.from_pretrained(model_name=place("mistral"), max_seq_length=256)
    targets = [*SEVEN, "embed_tokens", "lm_head"]
    model = FastLanguageModel.get_peft_model(model, r=16, target_modules=targets, lora_alpha=32, **USUAL)
    for name in ("wikipedia", "alpaca"):  # first texts, then instructions, with one adapter
        column = "text" if name == "wikipedia" else "output"
        end = tokenizer.eos_token
        dataset = rows(name).map(lambda row, column=column, end=end: {"text": row[column] + end})
        trainer = UnslothTrainer(
            model=model,
            tokenizer=tokenizer,
            train_dataset=dataset,
            args=UnslothTrainingArguments(dataset_text_field="text", embedding_learning_rate=1e-5, **STEPS),
        )
        trainer.train()
    return trainer


def gpt_oss(place: Any, rows: Any) -> Any:
    from fewbits.chat_templates import standardize_sharegpt, train_on_responses_only

    model, tokenizer = loaded(place, "gpt-oss", full_finetuning=False)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        reasoning_effort="low",
    )
    model.generate(**inputs, max_new_tokens=4)
    dataset = standardize_sharegpt(rows("thinking")).map(
        lambda batch: {"text": [tokenizer.apply_chat_template(m, tokenize=False) for m in batch["messages"]]},
        batched=True,
    )
    trainer = supervised(model, tokenizer, dataset)
    trainer = train_on_responses_only(
        trainer,
        instruction_part="<|start|>user<|message|>",
        response_part="<|start|>assistant<|channel|>final<|message|>",
    )
    trainer.train()
    return trainer


def long_context(place: Any, rows: Any, length: int = 32768) -> Any:
    from datasets import Dataset

    model, tokenizer = loaded(place, "gpt-oss", max_seq_length=length, unsloth_tiled_mlp=True)
    book = " ".join(row["text"] for row in rows("stories"))
    talk = [{"role": "user", "content": "Print it."}, {"role": "assistant", "content": book}]
    text = tokenizer.apply_chat_template(talk, tokenize=False) + tokenizer.eos_token
    trainer = supervised(model, tokenizer, Dataset.from_list([{"text": text}] * 4))
    trainer.train()
    return trainer


def rope_scaling(place: Any, rows: Any) -> Any:
    model, tokenizer = loaded(place, "tinyllama", max_seq_length=16384)  # of a model for 8,192
    trainer = supervised(model, tokenizer, rows("stories"), max_seq_length=16384, packing=True)
    trainer.train()
    assert model.config.max_position_embeddings == 16384
    return trainer


def mixture_of_experts(place: Any, rows: Any) -> Any:
    from fewbits import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        place("moe"), max_seq_length=256, load_in_4bit=False, fast_inference=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=4,
        target_modules=[*SEVEN, "gate_up_proj"],
        lora_alpha=8,
        use_gradient_checkpointing=True,
        random_state=3407,
        bias="none",
    )
    trainer = supervised(model, tokenizer, rows("stories"))
    trainer.train()
    return trainer


def tool_calling(place: Any, rows: Any) -> Any:
    from fewbits import FastQwen2Model

    def vector_sum(a: list[float], b: list[float]) -> list[float]:
        """Add two vectors.

        Args:
            a: First vector
            b: Second vector
        """
        return [x + y for x, y in zip(a, b, strict=True)]

    model, tokenizer = FastQwen2Model.from_pretrained(
        model_name=place("qwen2.5"), max_seq_length=None, dtype=None, load_in_4bit=False, fix_tokenizer=False
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Add [1] and [2]."}],
        tokenize=True,
        add_generation_prompt=True,
        padding=True,
        tools=[vector_sum],
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=4)
    assert out.shape[1] > prompt["input_ids"].shape[1]


def vision(place: Any, rows: Any) -> Any:
    from fewbits import FastVisionModel, get_chat_template
    from fewbits.trainer import UnslothVisionDataCollator
    from fewbits.trl import SFTConfig, SFTTrainer

    model, processor = FastVisionModel.from_pretrained(
        place("gemma3-vision"), load_in_4bit=True, use_gradient_checkpointing="unsloth"
    )
    model = FastVisionModel.get_peft_model(
        model,
        finetune_vision_layers=True,
        finetune_language_layers=True,
        finetune_attention_modules=True,
        finetune_mlp_modules=True,
        r=4,
        lora_alpha=4,
        lora_dropout=0,
        bias="none",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
        target_modules="all-linear",
    )
    asks = {"type": "text", "text": "Write it."}
    data = [
        {
            "messages": [
                {"role": "user", "content": [asks, {"type": "image", "image": row["image"]}]},
                {"role": "assistant", "content": [{"type": "text", "text": row["text"]}]},
            ]
        }
        for row in rows("latex").select(range(8))
    ]
    assert get_chat_template is not None
    FastVisionModel.for_inference(model)
    image = data[0]["messages"][0]["content"][1]["image"]
    messages = [{"role": "user", "content": [{"type": "image"}, asks]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(image, text, add_special_tokens=False, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=4, use_cache=True, temperature=1.0, top_p=0.95, top_k=64)
    FastVisionModel.for_training(model)
    trainer = SFTTrainer(
        model=model,
        train_dataset=data,
        processing_class=processor.tokenizer,
        data_collator=UnslothVisionDataCollator(model, processor),
        args=SFTConfig(
            **{**STEPS, "optim": "adamw_torch_fused"},
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_grad_norm=0.3,
            warmup_ratio=0.03,
            remove_unused_columns=False,
            dataset_text_field="",
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=256,
        ),
    )
    trainer.train()
    return trainer


def ollama(place: Any, rows: Any) -> Any:
    from fewbits import apply_chat_template, standardize_sharegpt, to_sharegpt

    model, tokenizer = loaded(place, "llama")
    dataset = to_sharegpt(
        rows("alpaca"),
        merged_prompt="{instruction}[[\nYour input is:\n{input}]]",
        output_column_name="output",
        conversation_extension=3,
    )
    example = "Some tasks.\n\n### Instruction:\n{INPUT}\n\n### Response:\n{OUTPUT}"
    dataset = apply_chat_template(standardize_sharegpt(dataset), tokenizer=tokenizer, chat_template=example)
    assert dataset[0]["text"].count("### Response:") == 3
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Go on: 1, 1, 2"}], add_generation_prompt=True, return_tensors="pt"
    )
    model.generate(ids, max_new_tokens=4, pad_token_id=tokenizer.eos_token_id)
    trainer = supervised(model, tokenizer, dataset, max_seq_length=256, packing=False)
    trainer.train()
    return trainer


def classification(place: Any, rows: Any) -> Any:
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, pipeline

    from fewbits import FastModel, is_bfloat16_supported

    names = {0: "sadness", 1: "joy"}
    model, tokenizer = FastModel.from_pretrained(
        model_name=place("bert"),
        auto_model=AutoModelForSequenceClassification,
        max_seq_length=256,
        dtype=None,
        num_labels=2,
        full_finetuning=True,
        id2label=names,
        label2id={name: i for i, name in names.items()},
        load_in_4bit=False,
    )
    model = FastModel.get_peft_model(
        model, r=16, target_modules=list(SEVEN), lora_alpha=16, task_type="SEQ_CLS", **USUAL
    )
    dataset = rows("stories").map(lambda row: tokenizer(row["text"]))
    dataset = dataset.add_column("labels", [i % 2 for i in range(len(dataset))])
    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset,
        args=TrainingArguments(
            **{**STEPS, "optim": "adamw_torch", "bf16": is_bfloat16_supported()},
        ),
    )
    trainer.train()
    told = pipeline("sentiment-analysis", model=model, tokenizer=tokenizer)("It is amazing!")
    assert told[0]["label"] in names.values()
    model.save_pretrained("bert_lora")
    return trainer


def embedding(place: Any, rows: Any) -> Any:
    from fewbits import FastSentenceTransformer

    return FastSentenceTransformer.from_pretrained(place("qwen3"), max_seq_length=512, full_finetuning=False)


def quantisation_aware(place: Any, rows: Any) -> Any:
    from fewbits import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(model_name=place("qwen3"), load_in_4bit=False)
    return FastLanguageModel.get_peft_model(
        model, r=16, target_modules=list(SEVEN), lora_alpha=32, qat_scheme="int4", **USUAL
    )
