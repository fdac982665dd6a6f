"""Rows as the model will see them; what the loss counts stands between brackets.

python examples/preview_rows.py [MODEL_FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

import fewbits
from fewbits import TrainConfig
from fewbits.training.ahead.preview import preview
from fewbits.training.ahead.preview_page import page

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
folder = Path(tempfile.mkdtemp())
rows = [{"prompt": f"{a} and {b} make", "completion": str(a + b)} for a in range(8) for b in range(8)]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

seen = preview(TrainConfig(model=model, train_data=str(folder / "rows.jsonl")), rows=3)
for row in seen.shown:
    print("".join(f"[{text}]" if trained else text for text, trained in row.parts))
print(seen.report, f"packed {seen.packed:.0%}, single rows {seen.padded:.0%}", sep="; ")
(folder / "preview.html").write_text(page(seen, "Sums"))
