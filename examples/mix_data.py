"""Several files in one run: twice as much of one, half of the other, with columns of its own.

python examples/mix_data.py [MODEL_FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import TrainConfig, train

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
folder = Path(tempfile.mkdtemp())
rows = [{"prompt": f"{a} and {b} make", "completion": str(a + b)} for a in range(8) for b in range(8)]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
texts = [{"body": f"The number {i} comes before {i + 1}."} for i in range(32)]
(folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))

mix = [
    {"path": str(folder / "rows.jsonl"), "weight": 2},
    {"path": str(folder / "texts.jsonl"), "weight": 0.5, "fields": {"text": "body"}},
]
result = train(
    TrainConfig(model=model, train_data=mix, output_dir=str(folder / "run"), max_steps=4, packing=True)
)
print(f"{result.tokens:,} tokens in {result.steps} steps")
