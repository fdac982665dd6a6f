"""What keys and values in few bits cost over a long context, with heads of 128, through decoding's kernels.

    python benchmarks/quality/train_long_llama.py --data ../shared/data --out /tmp/long_llama --seconds 60
    python benchmarks/quality/long_cache_quality.py /tmp/long_llama

The windows that the training has held out, as long as the model's context, go through `DecodeStep` token by
token, all of them side by side: perplexity over all tokens and over those behind the first 1,024, its change
against 16 bits with the standard error over windows, bits a value at the window's end (all included), and how
many times as many tokens fit. Needles: other rows hold a stretch of 24 tokens, drawn from all of the
held-out text, somewhere in it, and end with it once more; said is how many of its last 20 tokens are the
likeliest ones, of what depth the stretch is, and their mean loss.

Numbers first: the step in 16 bits is compared with the model's own forward, and a step over ``int4`` with the
definition (`PackedCache`).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fewbits.formats.kv_cache import KVCache, get_kv_cache
from fewbits.models.generation.step import DecodeStep

CACHES: tuple[Any, ...] = (
    "bfloat16",
    "int4",
    "int8",
    "int8/int4",
    {"name": "int4", "newest": 16},
    "fp8",
    "int4/int8",
    {"name": "int4", "group": 32},
    {"name": "int4", "rotated": False},
)
STRETCH, CUE, FAR = 24, 4, 1024
AT_ONCE = 64  # steps whose logits are looked at together


class Said(NamedTuple):
    """What a step says to each token but the first: its loss in nats, and whether it is the likeliest."""

    loss: Tensor  # (rows, tokens - 1) float32
    right: Tensor  # (rows, tokens - 1) bool


@torch.no_grad()
def through_step(model: Any, ids: Tensor, kind: KVCache | None, keep: int = 0) -> tuple[Said, Tensor]:
    """The tokens (rows, tokens) one after the other; and the logits behind the first ``keep`` of row 0."""
    rows, length = ids.shape
    step = DecodeStep(model, batch=rows, room=-(-length // 256) * 256, kv_cache=kind)
    losses, rights, kept = [], [], []
    for begin in range(0, length - 1, AT_ONCE):
        logits = []
        for at in range(begin, min(begin + AT_ONCE, length - 1)):
            step.tokens.copy_(ids[:, at])
            logits.append(step.advance().clone())
        whole, targets = torch.stack(logits, 1), ids[:, begin + 1 : begin + 1 + len(logits), None]
        losses.append(whole.logsumexp(-1) - whole.gather(2, targets)[..., 0])
        rights.append(whole.argmax(-1) == targets[..., 0])
        if begin < keep:
            kept.append(whole[0, : keep - begin])
    return Said(torch.cat(losses, 1), torch.cat(rights, 1)), torch.cat(kept) if kept else ids[:0]


def needles(text: Tensor, count: int) -> Tensor:
    """Rows (count, tokens) of held-out text, each with a stretch at another depth that ends it once more."""
    generator = torch.Generator().manual_seed(7)
    rows = text[torch.arange(count) % len(text)].clone()
    length = rows.shape[1]
    for i in range(count):
        stretch = text.flatten()[torch.randint(text.numel(), (STRETCH,), generator=generator)]
        at = (length - 3 * STRETCH) * i // max(count - 1, 1)
        rows[i, at : at + STRETCH] = stretch
        rows[i, -STRETCH:] = stretch
    return rows


@torch.no_grad()
def check(model: Any, ids: Tensor, tokens: int) -> None:
    """The step in 16 bits beside the model's own forward, and over int4 beside the definition."""
    from fewbits.inference.evaluate import cached_logits

    part = ids[:1, :tokens]
    _, ours = through_step(model, part, None, tokens - 1)
    theirs = model(part).logits[0, :-1].float()
    print(f"step in 16 bits: logits {_apart(ours, theirs):.2g} apart from the model's own forward")
    kind = get_kv_cache({"name": "int4", "newest": 16})
    _, packed = through_step(model, part, kind, tokens - 1)
    defined = cached_logits(model, part, torch.ones_like(part), kind, at_once=1)[0, :-1].float()
    print(
        f"step over int4: logits {_apart(packed, defined):.2g} apart from the definition, which is "
        f"{_apart(defined, theirs):.2g} apart from 16 bits ({tokens} tokens, 16 of them in 16 bits)",
        flush=True,
    )


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def described(kind: KVCache) -> str:
    usual = KVCache(keys=kind.keys, values=kind.values)
    names = ("group", "newest", "first", "rotated")
    changed = [
        f"{name} {getattr(kind, name)}" for name in names if getattr(kind, name) != getattr(usual, name)
    ]
    return ", ".join([kind.name, *changed])


def change(losses: Tensor, plain: Tensor) -> str:
    """Of perplexity, with the standard error over windows (windows, tokens)."""
    by_window = (losses - plain).mean(1)
    error = float(by_window.std() / len(by_window) ** 0.5) if len(by_window) > 1 else math.nan
    return f"{100 * math.expm1(float(by_window.mean())):+.3f} % ± {100 * error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--needles", type=int, default=24)
    parser.add_argument("--checked", type=int, default=80, help="tokens of the comparison with definitions")
    parser.add_argument("--caches", type=int, default=len(CACHES), help="so many of them, to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(device).eval()
    config = model.config
    text = torch.load(options.model / "held_out.pt")[: options.windows]
    hidden = needles(text, options.needles)
    ids, count, length = torch.cat([text, hidden]).to(device), len(text), text.shape[1]
    check(model, ids, min(options.checked, length))
    print(
        f"\n{options.model.name}, {config.num_attention_heads} heads over {config.num_key_value_heads} of "
        f"{config.head_dim}, {count} windows of {length} held-out tokens, {len(hidden)} needles\n\n"
        f"| cache | perplexity | change | change behind {FAR:,} tokens | bits a value | capacity | "
        "needles' tokens | first, middle and last third | their loss |\n" + "| --- " * 9 + "|",
        flush=True,
    )
    plain: Tensor | None = None
    for said in CACHES[: options.caches]:
        kind = get_kv_cache(said)
        result, _ = through_step(model, ids, None if kind.is_plain else kind)
        losses = result.loss[:count]
        plain = losses if plain is None else plain
        found, loss = result.right[count:, -STRETCH + CUE :].float(), result.loss[count:, -STRETCH + CUE :]
        bits = 8 * kind.nbytes(length, config.head_dim) / (2 * config.head_dim * length)
        far = slice(min(FAR, length // 2), None)
        cells = (
            described(kind),
            f"{math.exp(float(losses.mean())):.4f}",
            change(losses, plain),
            change(losses[:, far], plain[:, far]),
            f"{bits:.2f}",
            f"{16 / bits:.2f}",
            f"{float(found.mean()):.1%}",
            ", ".join(f"{float(part.mean()):.0%}" for part in found.tensor_split(3)),
            f"{float(loss.mean()):.4f}",
        )
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
