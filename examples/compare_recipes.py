"""How far a model is from itself in fewer bits: KL divergence, the likeliest token, bytes.

python examples/compare_recipes.py [MODEL_FOLDER]
"""

import sys
from pathlib import Path

import fewbits
from fewbits import FastLanguageModel
from fewbits.inference.compare import compare

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
text = "The cat sat on the mat, and the dog lay by the door. " * 8


def load(recipe):
    return FastLanguageModel.from_pretrained(
        model, load_in_4bit=False, recipe=None if recipe == "as stored" else recipe
    )


for one in compare(load, ["as stored", "int8", "qlora_nf4"], text, window=64):
    kl = "reference" if one.kl is None else f"{one.kl:.5f} nats"
    print(f"{one.name:12}{kl:>16}{one.num_bytes / 2**20:8.2f} MiB   perplexity {one.perplexity:.2f}")
