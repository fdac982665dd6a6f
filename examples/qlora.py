"""QLoRA in the words of an Unsloth script; only the import line is another.

    python examples/qlora.py [MODEL_FOLDER [OUTPUT_FOLDER [STEPS]]]

Without a folder it takes the tiny model that the package brings along; any model of a known family will do.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from fewbits import FastLanguageModel  # an Unsloth script has: from unsloth import FastLanguageModel

tiny = Path(__file__).parents[1] / "src" / "fewbits" / "demo" / "assets"
path = sys.argv[1] if len(sys.argv) > 1 else str(tiny)
output = sys.argv[2] if len(sys.argv) > 2 else "outputs/qlora"
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 30

model, tokenizer = FastLanguageModel.from_pretrained(model_name=path, max_seq_length=128, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=16,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)

sums = [(a, b) for a in range(9) for b in range(9)]
text = "### Question:\nTom has {} cats and {} dogs.\n### Answer:\n{} pets." + tokenizer.eos_token
dataset = Dataset.from_list([{"text": text.format(a, b, a + b)} for a, b in sums])

trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        dataset_text_field="text",
        max_length=128,
        per_device_train_batch_size=4,
        max_steps=steps,
        warmup_steps=2,
        learning_rate=1e-3,
        logging_steps=5,
        bf16=torch.cuda.is_available(),
        seed=3407,
        output_dir=output,
        report_to="none",
    ),
)
trainer.train()
model.save_pretrained(f"{output}/lora")
tokenizer.save_pretrained(f"{output}/lora")
model.save_pretrained_merged(f"{output}/merged", tokenizer, save_method="merged_16bit")
