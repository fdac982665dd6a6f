"""What each recipe of `fewbits.te` makes of a training from nothing: a Llama of 105M parameters.

    python benchmarks/quality/te_learning.py --data ../shared/data [--recipes delayed ...] [--seeds 0 1 2]

The text and the tokens are those of `train_llama_100m.py`; eight `te.TransformerLayer` of 1024 (RMSNorm,
SwiGLU of 3072, 16 heads over 4 of keys, rotary positions, no biases), tied embeddings in bfloat16, float32
weights under autocast, AdamW. Of one seed all recipes begin with the same weights and see the same windows in
the same order. Held-out windows are evaluated without a recipe, in bfloat16. MXFP8 and NVFP4 are emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fewbits.te as te
from fewbits.te import recipe

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.quality.train_llama_100m import VOCAB, documents, make_tokenizer, orders, windows_of

RECIPES: dict[str, Any] = {
    "bfloat16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
SHAPE = {"hidden": 1024, "feed": 3072, "heads": 16, "groups": 4, "layers": 8}
TINY = {"hidden": 64, "feed": 128, "heads": 4, "groups": 2, "layers": 2}


class Llama(nn.Module):
    """Embeddings, layers of `fewbits.te`, a norm, and the embeddings again."""

    def __init__(self, vocab: int, length: int, shape: dict[str, int], device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, shape["hidden"], device=device)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                shape["hidden"],
                shape["feed"],
                shape["heads"],
                num_gqa_groups=shape["groups"],
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=True,
                attn_input_format="bshd",
                params_dtype=torch.float32,
                device=device,
            )
            for _ in range(shape["layers"])
        )
        self.norm = te.RMSNorm(shape["hidden"], params_dtype=torch.float32, device=device)
        angles = te.RotaryPositionEmbedding(shape["hidden"] // shape["heads"])(length).to(device)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, ids: Tensor, scaling: Any) -> Tensor:
        """The mean loss of ids (b, length), in nats."""
        on = te.autocast(enabled=scaling is not None, recipe=scaling)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            x = self.embedding(ids).to(torch.bfloat16)
            with on:
                for layer in self.layers:
                    x = layer(x, rotary_pos_emb=self.angles)
            logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train(model: Llama, windows: Tensor, scaling: Any, args: argparse.Namespace, seed: int) -> list[Tensor]:
    """The loss of each step."""
    wide, narrow = ([p for p in model.parameters() if (p.dim() > 1) == wants] for wants in (True, False))
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    warm = max(args.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 0.05 + 0.475 * (1 + math.cos(math.pi * min(i / args.steps, 1)))),
    )
    losses = []
    for order in orders(len(windows), args.batch, torch.Generator().manual_seed(seed)):
        loss = model(windows[order.to(windows.device)], scaling)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if len(losses) == args.steps:
            return losses
    raise AssertionError("the order of windows has no end")


@torch.no_grad()
def evaluate(model: Llama, windows: Tensor, batch: int) -> float:
    """Mean loss of held-out windows (n, length), in bfloat16."""
    losses = [model(ids, None) * len(ids) for ids in windows.split(batch)]
    return float(sum(losses) / len(windows))


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="the folder shared/data")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a trial of this script")
    args = parser.parse_args()
    texts = documents(args.data)[: 200 if args.tiny else None]
    tokenizer = make_tokenizer(texts, 512 if args.tiny else VOCAB, args.length)
    for seed in args.seeds:
        windows = windows_of(texts, tokenizer, seed, args.length).to(args.device)
        held_out, rest = windows[: len(windows) // 50 + 1], windows[len(windows) // 50 + 1 :]
        base: tuple[float, float] | None = None
        for name in args.recipes:
            torch.manual_seed(seed)
            model = Llama(len(tokenizer), args.length, TINY if args.tiny else SHAPE, args.device)
            began = time.perf_counter()
            lacks = name in ("mxfp8", "nvfp4")
            with te.emulation() if lacks else contextlib.nullcontext():
                losses = train(model, rest, RECIPES[name], args, seed)
            tail = float(torch.stack(losses[-args.steps // 10 :]).mean())
            seconds = time.perf_counter() - began
            held = evaluate(model, held_out, args.batch)
            base = base or (tail, held)
            size = sum(p.numel() for p in model.parameters()) / 1e6
            print(
                f"seed {seed}, {name}: {size:.1f}M parameters, {args.steps} steps of "
                f"{args.batch * args.length} tokens, {seconds:.1f} s: last tenth {tail:.4f} "
                f"({100 * (tail / base[0] - 1):+.2f} %), held out {held:.4f} "
                f"({100 * (held / base[1] - 1):+.2f} %), first {float(losses[0]):.4f}",
                flush=True,
            )
            del model


if __name__ == "__main__":
    main()
