"""A recipe of one's own: NF4 everywhere, but INT8 where the attention looks values up.

python examples/own_recipe.py [MODEL_FOLDER]
"""

import sys
from dataclasses import replace
from pathlib import Path

import fewbits
from fewbits import FastLanguageModel, explain
from fewbits.formats import INT8
from fewbits.recipes import LoRA, Rule, qlora_nf4

model = sys.argv[1] if len(sys.argv) > 1 else str(Path(fewbits.__file__).parent / "demo" / "assets")
recipe = replace(
    qlora_nf4(),
    name="nf4_int8_values",
    overrides=(("*.v_proj", Rule(weight=INT8)),),
    lora=LoRA(r=8),
)
loaded, _ = FastLanguageModel.from_pretrained(model, recipe=recipe)
print(explain(loaded))
