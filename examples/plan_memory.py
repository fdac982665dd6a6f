"""What training takes on a GPU that need not be there, from config.json alone.

python examples/plan_memory.py [MODEL_FOLDER]
"""

import json
import sys
from pathlib import Path

import fewbits
from fewbits.training.ahead.gpu_plan import fastest, gpu_named, plan_recipe, trainable_recipes

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
config = json.loads((Path(model) / "config.json").read_text())
gpu = gpu_named("24GiB")

plans = [plan_recipe(config, name, gpu, batch=(4, 64)) for name in trainable_recipes()]
for plan in plans:
    total = plan.plan.predicted.total / 2**20
    print(f"{plan.recipe:20}{total:8.1f} MiB, up to {plan.largest_batch:,} sequences in a pass")
print("fastest that fits:", fastest(plans).recipe)
