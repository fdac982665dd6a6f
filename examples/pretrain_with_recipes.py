"""A small GPT from nothing, unquantised and with each recipe of fewbits.te: losses side by side.

python examples/pretrain_with_recipes.py [TEXT_FILE] [STEPS]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import fewbits
from fewbits import te

own = "\n".join(path.read_text() for path in sorted(Path(fewbits.__file__).parent.glob("recipes/*.py")))
text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else own
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 16
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens = torch.tensor(list(text.encode()), device=device)
angles = te.RotaryPositionEmbedding(32)(32).to(device)
scalings = ("Delayed", "Float8Current", "Float8Block", "MXFP8Block", "NVFP4Block")
for name in (None, *(f"{scaling}Scaling" for scaling in scalings)):
    recipe = None if name is None else getattr(te.recipe, name)()
    torch.manual_seed(0)
    words = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    layer = te.TransformerLayer(128, 256, 4, device=device, **words)
    embedding = torch.nn.Embedding(256, 128, device=device)
    torch.nn.init.normal_(embedding.weight, std=0.02)
    optimizer = torch.optim.AdamW([*layer.parameters(), *embedding.parameters()], lr=3e-3)
    losses, draws = [], torch.Generator().manual_seed(0)  # of their own: NVFP4 rounds by torch's
    for _ in range(steps):
        first = torch.randint(len(tokens) - 33, (8, 1), generator=draws).to(device)
        rows = tokens[first + torch.arange(33, device=device)]
        with te.emulation(), te.autocast(enabled=recipe is not None, recipe=recipe):
            x = layer(embedding(rows[:, :-1]), rotary_pos_emb=angles)
        loss = F.cross_entropy((x @ embedding.weight.t()).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(f"{name or 'unquantised'}:", *(f"{loss:.3f}" for loss in losses[:: max(steps // 8, 1)]), losses[-1])
