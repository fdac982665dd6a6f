"""The recipe of a Llama of about 100M parameters, for experiments that want a real model of some size.

    python benchmarks/quality/train_llama_100m.py --data ../shared/data --out /tmp/llama100m

About a minute on one H200. The text is WikiText-2's test part, TinyStories' validation part and human-written
instructions with their answers (dolly, OpenAssistant): some 5 MB of text, in a byte-level BPE of 8,192 that
is trained on it first. The model sees it about ten times, so it is a small model of that text and no general
one. tiny_shakespeare.txt is left out: it is the text that `same_learning.py` fine-tunes on. The weights
are not kept in the repository; this file makes them again.

For caches of keys and values there is a model of this shape with longer contexts: `train_long_llama.py`.

What FP8 does to a training from the start: no recipe, `--recipe float8_full` and `--recipe float8_full_head`
see the same windows in the same order and are evaluated in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

VOCAB = 8192
LENGTH = 512  # of a window
HELD_OUT = 0.02  # of the windows
SHAPE = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 14}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
QUERIES = 3  # heads of queries that share one of keys; of the tiny model 2
SPECIAL = ["<pad>", "<s>", "</s>"]


def documents(data: Path, *, wiki: bool = True) -> list[str]:
    """The texts, each a document; with ``wiki`` the pieces of Wikipedia too."""
    found = []
    for name in ("wikitext2_raw_test.txt", "tinystories_val.txt")[0 if wiki else 1 :]:
        lines = (data / "text" / name).read_text(encoding="utf-8").split("\n")
        found += ["\n".join(piece) for piece in pieces(lines, 20)]
    for row in rows(data / "instruct/dolly_train.jsonl"):
        found.append("\n".join(row[k] for k in ("context", "instruction", "response") if row.get(k)))
    for row in rows(data / "instruct/oasst_chat.jsonl"):
        found.append("\n".join(message["content"] for message in row["messages"]))
    return found


def pieces(lines: list[str], count: int) -> list[list[str]]:
    """Runs of ``count`` lines."""
    return [lines[i : i + count] for i in range(0, len(lines), count)]


def rows(path: Path) -> list[dict[str, Any]]:
    """A JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heads(shape: dict[str, int], size: int) -> dict[str, int]:
    """How many heads of this size there are."""
    count, group = shape["hidden_size"] // size, QUERIES if shape is SHAPE else 2
    return {"num_attention_heads": count, "num_key_value_heads": max(count // group, 1), "head_dim": size}


def make_tokenizer(texts: list[str], vocab: int, length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of these texts; every sequence begins with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer_of(tokenizer, length)


def tokenizer_of(tokenizer: Tokenizer, length: int) -> PreTrainedTokenizerFast:
    """As transformers has it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=length,
    )


def windows_of(texts: list[str], tokenizer: PreTrainedTokenizerFast, seed: int, length: int) -> Tensor:
    """All documents in a random order, one stream, cut into windows (windows, length)."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    encoded = tokenizer([texts[i] for i in order], add_special_tokens=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in [tokenizer.bos_token_id, *ids]])
    return stream[: len(stream) // length * length].view(-1, length)


@torch.no_grad()
def evaluate(model: Any, windows: Tensor, batch: int) -> float:
    """Mean loss in nats per token."""
    model.eval()
    losses = [float(loss_of(model, ids)) * len(ids) for ids in windows.split(batch)]
    model.train()
    return sum(losses) / len(windows)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Under autocast: float32 weights, bfloat16 products."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def put_in(model: Any, recipe: str | None) -> None:
    """Train through fewbits; without a recipe its fused layers alone."""
    from fewbits import convert, fuse, get_recipe

    if recipe:
        convert(model, get_recipe(recipe), fuse_norms=False)
    print(fuse(model))


def take_out(model: Any, recipe: str | None) -> None:
    """What was trained, as a plain model; what fell back in training is said."""
    from fewbits import restore, unfuse
    from fewbits.decoder.fuse import fusion_of

    for reason, count in fusion_of(model).fallbacks.items():
        print(f"{count} layer calls ran unfused: {reason}")
    unfuse(model)
    if recipe:
        restore(model)


def orders(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Numbers of windows (batch,), pass after pass in another order, without end."""
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:batch]
        left = left[batch:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder shared/data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", help="a recipe of full fine-tuning, such as float8_full_head")
    parser.add_argument("--tiny", action="store_true", help="a trial of this script")
    args = parser.parse_args()
    began = time.perf_counter()

    texts = documents(args.data)
    if args.tiny:
        texts = texts[:200]
    shape = TINY if args.tiny else SHAPE
    tokenizer = make_tokenizer(texts, 512 if args.tiny else VOCAB, LENGTH)
    windows = windows_of(texts, tokenizer, args.seed, LENGTH).to(args.device)
    cut = max(int(len(windows) * HELD_OUT), 1)
    held_out, windows = windows[:cut], windows[cut:]
    print(f"{windows.numel()} tokens to train on after {time.perf_counter() - began:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    config = LlamaConfig(
        **shape, **heads(shape, 16 if args.tiny else 64),
        vocab_size=len(tokenizer), max_position_embeddings=LENGTH,
        tie_word_embeddings=True, rms_norm_eps=1e-5, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(
        args.device
    )
    if args.recipe:
        put_in(model, args.recipe)
    parameters = sum(p.numel() for p in model.parameters())
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    steps = args.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(
            (i + 1) / max(steps // 10, 1), 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(i / steps, 1)))
        ),
    )
    generator = torch.Generator().manual_seed(args.seed)
    model.train()
    for step, order in enumerate(orders(len(windows), args.batch, generator)):
        loss = loss_of(model, windows[order.to(args.device)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            now = time.perf_counter() - began
            print(f"step {step}: loss {float(loss.detach()):.3f}, {now:.0f} s", flush=True)
        if step + 1 >= steps:
            break
    if args.recipe:
        take_out(model, args.recipe)
    held = evaluate(model, held_out, args.batch)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    torch.save(held_out.cpu(), args.out / "held_out.pt")
    print(
        f"{parameters / 1e6:.1f}M parameters, {step + 1} steps of {args.batch * LENGTH} tokens: evaluation "
        f"loss {held:.3f} nats per token on {held_out.numel()} held-out tokens; "
        f"{time.perf_counter() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
