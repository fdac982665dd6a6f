"""An adapter is trained, merged into the original weights, and the result is loaded again.

python examples/merge_an_adapter.py [MODEL_FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import FastLanguageModel, TrainConfig, train

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
folder = Path(tempfile.mkdtemp())
rows = [{"prompt": f"{a} and {b} make", "completion": str(a + b)} for a in range(8) for b in range(8)]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

result = train(
    TrainConfig(
        model=model,
        train_data=str(folder / "rows.jsonl"),
        output_dir=str(folder / "run"),
        max_steps=3,
        max_seq_length=64,
        merge=True,
    )
)
merged, _ = FastLanguageModel.from_pretrained(str(result.merged), load_in_4bit=False)
print(f"{type(merged).__name__} in {result.merged}, {merged.num_parameters():,} weights, no adapter beside")
