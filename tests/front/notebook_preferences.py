"""The calls of public Unsloth notebooks that train preferences and rewards; as `notebook_calls`."""

from __future__ import annotations

from typing import Any

from tests.front.notebook_calls import SEVEN, STEPS, loaded


def dpo(place: Any, rows: Any) -> Any:
    from fewbits import PatchDPOTrainer
    from fewbits.trl import DPOConfig, DPOTrainer

    PatchDPOTrainer()
    model, tokenizer = loaded(place, "zephyr")
    dataset = rows("ultrafeedback").map(  # the answers as texts, behind the prompt's template
        lambda row: {
            "prompt": f"<|user|>\n{row['prompt']}</s>\n<|assistant|>\n",
            "chosen": row["chosen"][1]["content"] + "</s>\n",
            "rejected": row["rejected"][1]["content"] + "</s>\n",
        }
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=None,
        args=DPOConfig(**STEPS),
        beta=0.1,
        train_dataset=dataset,
        tokenizer=tokenizer,
        max_length=64,
        max_prompt_length=32,
    )
    trainer.train()
    return trainer


def orpo(place: Any, rows: Any) -> Any:
    from fewbits import PatchDPOTrainer
    from fewbits.trl import ORPOConfig, ORPOTrainer

    PatchDPOTrainer()
    model, tokenizer = loaded(place, "llama")
    end = tokenizer.eos_token
    dataset = rows("dolphin").map(
        lambda row: {
            "prompt": row["instruction"] + row["input"],
            "chosen": row["accepted"] + end,
            "rejected": row["rejected"] + end,
        }
    )
    trainer = ORPOTrainer(
        model=model,
        train_dataset=dataset,
        tokenizer=tokenizer,
        args=ORPOConfig(**STEPS, max_length=64, max_prompt_length=32, max_completion_length=32, beta=0.1),
    )
    trainer.train()
    return trainer


def kto(place: Any, rows: Any) -> Any:
    from fewbits import PatchKTOTrainer, is_bfloat16_supported
    from fewbits.chat_templates import get_chat_template
    from fewbits.trl import KTOConfig, KTOTrainer

    PatchKTOTrainer()
    assert not is_bfloat16_supported() or STEPS["bf16"] is False
    model, tokenizer = loaded(place, "qwen2.5")
    tokenizer = get_chat_template(tokenizer, chat_template="chatml")
    trainer = KTOTrainer(
        model=model,
        train_dataset=rows("kto"),
        processing_class=tokenizer,
        args=KTOConfig(**STEPS, beta=0.1, undesirable_weight=1.0, desirable_weight=1.0, max_length=256),
    )
    trainer.train()
    return trainer


def rewarded(completions: Any, **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def grpo(place: Any, rows: Any) -> Any:
    from fewbits import FastLanguageModel
    from fewbits.trl import GRPOConfig, GRPOTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=place("qwen2.5"),
        max_seq_length=128,
        load_in_4bit=True,
        fast_inference=True,
        max_lora_rank=16,
        gpu_memory_utilization=0.6,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=SEVEN,
        lora_alpha=16,
        use_gradient_checkpointing="unsloth",
        random_state=3407,
    )
    system = {"role": "system", "content": "Answer in one word."}
    dataset = rows("gsm8k").map(
        lambda row: {
            "prompt": [system, {"role": "user", "content": row["question"]}],
            "answer": row["answer"].split("####")[1].strip(),
        }
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[rewarded],
        args=GRPOConfig(
            **{**STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
            adam_beta1=0.9,
            adam_beta2=0.99,
            num_generations=2,
            max_prompt_length=64,
            max_completion_length=8,
            max_grad_norm=0.1,
        ),
        train_dataset=dataset,
    )
    trainer.train()
    model.save_lora("grpo_saved_lora")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], tokenize=False, add_generation_prompt=True
    )
    sampling = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 4}  # vLLM's SamplingParams
    lora = model.load_lora("grpo_saved_lora")
    text = model.fast_generate(prompt, sampling_params=sampling, lora_request=lora)[0].outputs[0].text
    assert isinstance(text, str)
    return trainer
