"""Train adapters on rows of prompt and completion, and say where everything is.

python examples/train_from_python.py [MODEL_FOLDER]
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

result = train(
    TrainConfig(
        model=model,
        train_data=str(folder / "rows.jsonl"),
        eval_fraction=0.125,
        output_dir=str(folder / "run"),
        learning_rate=1e-3,
        max_steps=10,
        max_seq_length=64,
        samples=0,
    )
)
print(f"adapter {result.final}, report {result.report}, evaluation loss {result.best_metric:.3f}")
