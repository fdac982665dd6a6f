"""A Llama of about 100M parameters with heads of 128 that reads 4,096 tokens, for experiments with caches.

    python benchmarks/quality/train_long_llama.py --data ../shared/data --out /tmp/long_llama --seconds 60

The shared texts (`documents` of train_llama_100m.py, whose shape and tokenizer it has), Wikipedia's articles
whole, and Python's standard library beside them, so that fewer tokens come again and far ones are worth
looking at; what is held out is of the shared texts alone. Rows that say a stretch of tokens again and again
teach copying. Most of the time goes to windows of 512 tokens, the rest to whole ones, while the step
falls to nothing. Matrices of the layers move by Muon (`Muon`), embeddings and norms by AdamW.

``--prepare FILE`` only makes the tokens (some 30 s on one core), anywhere; ``--prepared FILE`` takes them.
"""

from __future__ import annotations

import argparse
import math
import re
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_llama_100m import (
    SHAPE,
    TINY,
    VOCAB,
    documents,
    evaluate,
    heads,
    loss_of,
    make_tokenizer,
    orders,
    put_in,
    take_out,
    tokenizer_of,
    windows_of,
)
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SHORT = 512
LIBRARY_BYTES = 6_000_000
AHEAD = 3  # steps that the host may be ahead of the device
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "idlelib"}


def articles(data: Path) -> list[str]:
    """Wikipedia's articles, each a document."""
    wiki = (data / "text/wikitext2_raw_test.txt").read_text(encoding="utf-8")
    return [part for part in re.split(r"(?m)^(?= = [^=].* = $)", wiki) if part.strip()]


def library() -> list[str]:
    """Files of Python's standard library, as many as `LIBRARY_BYTES` hold."""
    root, texts, total = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(root.rglob("*.py")):
        if NOT_LIBRARY & {*path.relative_to(root).parts} or total > LIBRARY_BYTES:
            continue
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
    return texts


def prepare(data: Path, length: int, held_out: float, tiny: bool) -> dict[str, Any]:
    """The tokenizer's text, windows (count, length) int16 to train on, and those held out."""
    shared, beside = [*articles(data), *documents(data, wiki=False)], library()
    if tiny:
        shared, beside = shared[:150], beside[:3]
    tokenizer = make_tokenizer([*shared, *beside], 512 if tiny else VOCAB, length)
    windows = windows_of(shared, tokenizer, 0, length)
    cut = max(int(len(windows) * held_out), 1)
    train = torch.cat([windows[cut:], windows_of(beside, tokenizer, 0, length)])
    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "train": train.short(),
        "held_out": windows[:cut].short(),
    }


def repeating(count: int, text: Tensor, generator: torch.Generator) -> Tensor:
    """Rows (count, length), each of which says one stretch of tokens again and again.

    Stretches of 32 tokens and of up to half a row, so that what is to be copied may stand far back: half of
    them pieces of the text (windows, length), half single tokens of it in no order.
    """
    rows, length, flat = [], text.shape[1], text.flatten()
    for _ in range(count):
        size = 2 ** int(torch.randint(5, length.bit_length() - 1, (1,), generator=generator))
        begin = int(torch.randint(len(flat) - size, (1,), generator=generator))
        places = torch.randint(len(flat), (size,), generator=generator)
        is_piece = bool(torch.rand((), generator=generator) < 0.5)
        stretch = flat[begin : begin + size] if is_piece else flat[places]
        rows.append(stretch.repeat(length // size + 1)[:length])
    return torch.stack(rows)


class Muon:
    """Momentum whose matrices are made nearly orthogonal before they are added (Jordan et al., 2024).

    Matrices of one shape go through the iterations side by side. The root mean square of a step is
    0.2 times the rate, as AdamW's usually is.
    """

    def __init__(self, parameters: list[nn.Parameter], *, decay: float = 0.1, momentum: float = 0.95) -> None:
        self.decay, self.momentum = decay, momentum
        groups: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.states = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step of all matrices."""
        for group, state in zip(self.groups, self.states, strict=True):
            gradients = torch.stack([p.grad for p in group if p.grad is not None]).float()
            state.lerp_(gradients, 1 - self.momentum)
            update = orthogonal(gradients.lerp_(state, self.momentum))
            scale = 0.2 * max(group[0].shape) ** 0.5 * rate
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, [u.float() for u in update.unbind()], alpha=-scale)


def orthogonal(x: Tensor) -> Tensor:
    """Matrices (count, rows, columns) with singular values pushed towards 1, in bfloat16."""
    y = x.mT if x.shape[1] > x.shape[2] else x
    y = (y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = y @ y.mT
        y = 3.4445 * y + (2.0315 * (square @ square) - 4.775 * square) @ y
    return y.mT if x.shape[1] > x.shape[2] else y


def batches(
    windows: Tensor, rows: int, repeats: float, device: str, generator: torch.Generator
) -> Iterator[Tensor]:
    """Rows (rows, length) of windows and of repeated stretches, without end, on a device.

    From pinned memory: a copy from any other would wait for the device.
    """
    repeated = round(repeats * rows)
    for order in orders(len(windows), rows - repeated, generator):
        ids = torch.cat(
            [windows[order], repeating(repeated, windows, generator)] if repeated else [windows[order]]
        )
        ids = ids.pin_memory() if device != "cpu" else ids
        yield ids.to(device, non_blocking=True).long()


def rate_at(part: float) -> float:
    """A share of the largest rate, by the part of the time that is over: up, level, down to nothing."""
    return min(1.0, part / 0.03, max(1 - part, 0.0) / 0.6)


def train(model: Any, next_batch: Callable[[float], Tensor], options: argparse.Namespace) -> int:
    """Train for ``options.seconds``; how many steps there were."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and "layers" in name)]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    events: list[Any] = []
    model.train()
    began, told, step, part = time.perf_counter(), -1.0, 0, 0.0
    while part < 1:
        loss = loss_of(model, next_batch(part))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(options.lr * rate_at(part))
        adam.param_groups[0]["lr"] = options.lr_embeddings * rate_at(part)
        adam.step()
        for parameter in model.parameters():
            parameter.grad = None
        step += 1
        if loss.is_cuda:
            events.append(torch.cuda.Event())
            events[-1].record()
            if step > AHEAD:
                events[step - AHEAD - 1].synchronize()
        seconds = time.perf_counter() - began
        part = seconds / options.seconds
        if seconds > told + 5:
            told = seconds
            print(f"step {step}: loss {float(loss.detach()):.3f}, {seconds:.0f} s", flush=True)
    return step


def model_for(tokenizer: PreTrainedTokenizerFast, length: int, tiny: bool, device: str) -> Any:
    """A model with random weights in float32."""
    shape = TINY if tiny else SHAPE
    config = LlamaConfig(
        **shape, **heads(shape, 16 if tiny else 128),
        vocab_size=len(tokenizer), max_position_embeddings=length, tie_word_embeddings=True,
        rms_norm_eps=1e-5, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(
        device
    )


def parsed() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder shared/data")
    parser.add_argument("--prepare", type=Path, help="only make the tokens, into this file")
    parser.add_argument("--prepared", type=Path, help="tokens made before")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--short-share", type=float, default=0.65, help="of the time, with short windows")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the matrices")
    parser.add_argument("--lr-embeddings", type=float, default=3e-3)
    parser.add_argument("--length", type=int, default=4096, help="of a window")
    parser.add_argument("--repeats", type=float, default=0.25, help="share of rows that say a stretch again")
    parser.add_argument("--held-out", type=float, default=0.06, help="share of the shared texts' windows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a trial of this script")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    began = time.perf_counter()
    if options.prepared is None:
        tokens = prepare(options.data, options.length, options.held_out, options.tiny)
    else:
        tokens = torch.load(options.prepared)
    print(f"{tokens['train'].numel()} tokens to train on, {time.perf_counter() - began:.0f} s", flush=True)
    if options.prepare is not None:
        torch.save(tokens, options.prepare)
        return
    tokenizer = tokenizer_of(Tokenizer.from_str(tokens["tokenizer"]), options.length)
    windows = tokens["train"]
    held_out = tokens["held_out"].long().to(options.device)
    model = model_for(tokenizer, options.length, options.tiny, options.device)
    put_in(model, None)
    generator = torch.Generator().manual_seed(0)
    rest = (options.repeats, options.device, generator)
    short, whole = (
        batches(windows.reshape(-1, n), max(options.tokens // n, 4), *rest)
        for n in (min(SHORT, options.length), options.length)
    )
    count = train(model, lambda part: next(short if part < options.short_share else whole), options)
    take_out(model, None)
    held = evaluate(model, held_out, 4)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    torch.save(held_out.cpu(), options.out / "held_out.pt")
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f}M parameters, {count} steps of {options.tokens} tokens: {held:.3f} "
        f"nats per token (perplexity {math.exp(held):.1f}) on {held_out.numel()} held-out tokens; "
        f"{time.perf_counter() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
