"""Cases of attention: plain, windowed, capped and packed, as `fewbits.nn.attention` chooses for the device.

The peers are what a model would run without the choice: torch's own attention by each of its kernels, and the
explicit masks that packed rows and windows need there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fewbits.bench.problem import Case, Problem, differentiated, randn
from fewbits.nn.attention import attention
from fewbits.nn.attention_backends import Pattern, visible
from fewbits.nn.segments import Segments

# Tokens of the rows of a packed batch: 64 to 2048, spread evenly over their logarithms.
_MIXED = (357, 917, 86, 101, 185, 576, 349, 1430, 310, 572, 214, 257, 69, 114, 177, 386, 718, 1024, 111, 170)


@dataclass(frozen=True)
class _Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    rows: tuple[int, ...] = ()

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        total = 0
        for n in self.rows or (self.length,) * self.batch:
            w = min(self.window or n, n)
            total += w * (w + 1) // 2 + (n - w) * w
        return total

    @property
    def name(self) -> str:
        kind = f"_window{self.window}" if self.window else ""
        kind += "_capped" if self.soft_cap else ""
        kind += "_packed" if self.rows else ""
        return f"bfloat16{kind}_b{self.batch}_kv{self.kv_heads}_d{self.head_dim}"


def _shapes(max_size: int) -> list[_Shape]:
    four, one = min(2048, max_size), min(8192, max_size)
    rows = tuple(b - a for a, b in _cut(accumulate((0, *_MIXED, one)), one))
    return [
        _Shape(4, four, 32, 8, 128),
        _Shape(1, one, 32, 8, 128),
        _Shape(4, four, 16, 8, 128),  # Qwen3-0.6B and 1.7B
        _Shape(1, one, 32, 8, 128, window=min(1024, one // 2)),
        _Shape(4, four, 16, 8, 256, soft_cap=50.0),  # Gemma-2-9B, full layers
        _Shape(1, one, 32, 8, 128, rows=rows),
    ]


def _cut(ends: Iterable[int], total: int) -> list[tuple[int, int]]:
    clipped = [min(end, total) for end in ends]
    return [(a, b) for a, b in pairwise(clipped) if b > a]


def attention_cases(max_size: int) -> list[Case]:
    """Forward and backward of each shape; the products of what is seen, and q, k, v and out once."""
    listed = []
    for shape in _shapes(max_size):
        tokens, width = shape.batch * shape.length, shape.heads * shape.head_dim
        once = 2 * tokens * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        flops = 4 * shape.pairs * width
        for part, moved, products in (("forward", once, 1.0), ("backward", 2 * once, 2.5)):
            listed.append(
                Case(
                    op="attention",
                    part=part,
                    format=shape.name,
                    M=tokens,
                    N=width,
                    bytes_moved=moved,
                    flops=int(flops * products),
                    tolerance=8e-3,
                    build=partial(_problem, shape),
                )
            )
    return listed


def _problem(shape: _Shape, case: Case, device: torch.device) -> Problem:
    B, S, H, K, D = shape.batch, shape.length, shape.heads, shape.kv_heads, shape.head_dim
    qkv = randn(device, torch.bfloat16, B, S, H + 2 * K, D)
    operands = tuple(t.transpose(1, 2) for t in qkv.split([H, K, K], 2))
    dy = randn(device, torch.bfloat16, B, S, H, D)
    segments = Segments.from_lengths(shape.rows, device=device) if shape.rows else None
    pattern = Pattern(D**-0.5, True, shape.window, shape.soft_cap, segments)
    ours = partial(attention, window=shape.window, soft_cap=shape.soft_cap, segments=segments)
    functions: dict[str, Callable[..., Tensor]] = {"fewbits": ours, **_peers(pattern, shape, device)}

    trained = 0 if case.part == "forward" else 3
    variants = {name: differentiated(f, operands, dy, trained) for name, f in functions.items()}
    return Problem(variants, lambda: _exact(operands, dy, pattern, trained))


def _peers(pattern: Pattern, shape: _Shape, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    if pattern.soft_cap is not None:
        return {"torch_eager": partial(_eager, pattern)}
    if pattern.window is not None or pattern.segments is not None:
        starts = None if pattern.segments is None else pattern.segments.starts()
        mask = visible(shape.length, pattern, device, starts)
        return {"torch_sdpa_mask": partial(_sdpa, None, mask)}
    if device.type != "cuda":
        return {"torch_sdpa": partial(_sdpa, None, None)}
    kernels = {"torch_cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}
    return {name: partial(_sdpa, kernel, None) for name, kernel in kernels.items()}


def _sdpa(kernel: SDPBackend | None, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def run() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ).transpose(1, 2)

    if kernel is None:
        return run()
    with sdpa_kernel([kernel]):
        return run()


def _eager(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What transformers' Gemma 2 does."""
    groups, cap = q.shape[1] // k.shape[1], pattern.soft_cap or 0.0
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.tanh(q @ k.mT * pattern.scale / cap) * cap
    scores = scores.masked_fill(~visible(q.shape[2], pattern, q.device), torch.finfo(q.dtype).min)
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def _exact(operands: Sequence[Tensor], dy: Tensor, pattern: Pattern, trained: int) -> Sequence[Tensor]:
    """In float64, for one row and one head of keys at a time: all scores together would not fit."""
    q, k, v = operands
    groups = q.shape[1] // k.shape[1]
    out = torch.empty(dy.shape, dtype=torch.float64, device=dy.device)
    gradients = [torch.empty(t.shape, dtype=torch.float64, device=t.device) for t in operands]
    starts = None if pattern.segments is None else pattern.segments.starts()
    mask = visible(q.shape[2], pattern, q.device, starts)
    for b in range(q.shape[0]):
        for g in range(k.shape[1]):
            heads, key = slice(g * groups, (g + 1) * groups), slice(g, g + 1)
            leaves = [t[b, h].detach().double().requires_grad_() for t, h in ((q, heads), (k, key), (v, key))]
            scores = leaves[0] @ leaves[1].mT * pattern.scale
            if pattern.soft_cap is not None:
                scores = pattern.soft_cap * torch.tanh(scores / pattern.soft_cap)
            y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ leaves[2]
            out[b, :, heads] = y.detach().transpose(0, 1)
            if trained:
                own = torch.autograd.grad(y, leaves, dy[b, :, heads].double().transpose(0, 1))
                for to, from_, h in zip(gradients, own, (heads, key, key), strict=True):
                    to[b, h] = from_
    return gradients if trained else (out,)


MAKERS = (attention_cases,)
