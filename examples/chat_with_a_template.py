"""A base model learns chats, written by a template that stays with the adapter.

python examples/chat_with_a_template.py [MODEL_FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import FastLanguageModel, TrainConfig, train

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
folder = Path(tempfile.mkdtemp())
turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]
(folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 16)

result = train(
    TrainConfig(
        model=model,
        train_data=str(folder / "chats.jsonl"),
        chat_template="alpaca",
        output_dir=str(folder / "run"),
        max_steps=4,
    )
)
_, tokenizer = FastLanguageModel.from_pretrained(str(result.final))
print(tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True))
