"""Text from a model in four bits, piece by piece as it is written.

python examples/generate_text.py [MODEL_FOLDER]
"""

import sys
from pathlib import Path

import fewbits
from fewbits import FastLanguageModel
from fewbits.inference.generate import Sampling, stream

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
loaded, tokenizer = FastLanguageModel.from_pretrained(model, load_in_4bit=True)
FastLanguageModel.for_inference(loaded)

sampling = Sampling(max_new_tokens=32, temperature=0.7, seed=1)
for piece in stream(loaded, tokenizer, "The cat", sampling=sampling):
    print(piece, end="", flush=True)
print()
