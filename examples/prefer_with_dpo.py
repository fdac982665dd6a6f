"""Direct preference optimisation, by TRL's trainer, from the same configuration.

python examples/prefer_with_dpo.py [MODEL_FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import TrainConfig, train

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
folder = Path(tempfile.mkdtemp())
rows = [{"prompt": f"{i} and 1 make", "chosen": f" {i + 1}", "rejected": " nothing"} for i in range(16)]
(folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

result = train(
    TrainConfig(
        model=model,
        method="dpo",
        train_data=str(folder / "pairs.jsonl"),
        output_dir=str(folder / "run"),
        max_seq_length=64,
        max_steps=4,
        beta=0.1,
    )
)
print(f"margin {result.metrics['rewards/margins']:.4f}, report {result.report}")
