"""Attention of one new token a sequence over its cache: norms of heads, rotary, appending and softmax in one.

For each sequence b, with the new token at position n = position[b] and everything before first[b] unseen:

    q, k, v = heads of qkv[b];   q, k = norm(q), norm(k) if norms are given
    q, k = rotary(q, n - first[b]), rotary(k, n - first[b]);   keys[b, :, n], values[b, :, n] = k, v
    scores = cap(scale * q . keys[b, :, first[b] ... n])      the last ``window`` of them, if there is one
    out[b] = softmax(scores) . values[b, :, first[b] ... n]

Shapes: qkv (B, (heads + 2 kv_heads) D) float32; keys and values (B, kv_heads, room, D) in 16 bits, written at
n; out (B, heads D) in 16 bits; cosines and sines (room, rotary) float32; position and first (B,) int64. Query
heads that share a key head are next to each other. q and k are rounded to the cache's dtype after the
rotation, as a model does.

Floor: every key and value that is seen is read once: 8.4 MB a layer of the 8B shape at 2,048 tokens, 1.9 us
at 4.4 TB/s. Measured on an H200: with one sequence of that shape 5.8 us at 128 tokens, 8.8 at 2,048, 101 at
65,536; with 64 sequences of 2,048 tokens 135, 90 % of that speed. The kernel is in CUDA C++
(decode_attention.cu; attention_walk.cu on tensor cores). No gradient: decoding has none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.kernels.decoder.rmsnorm import rmsnorm_ref
from fewbits.kernels.generation.operands import NextInner, RowNorm, takes_parts
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, multiprocessors, next_power_of_2, on_device_of

SOURCE = "generation/decode_attention.cu"
_WARPS, _WARPS_THAT_WALK = 8, 4  # of a block
_MOST_SPLITS = 64
_MOST_CLUSTER = 16
_HALVES = {torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How scores come about.

    Attributes:
        scale: what q . k is multiplied by.
        window: how many positions are seen, the new one included; 0: all.
        cap: scores become cap * tanh(score / cap); 0: they stay.
        q_norm: an RMSNorm over each query head, or None.
        k_norm: the same of the key heads.
    """

    scale: float
    window: int = 0
    cap: float = 0.0
    q_norm: RowNorm | None = None
    k_norm: RowNorm | None = None


@dataclass(frozen=True)
class Cache:
    """Keys and values, the rotation for each position, where the new token goes and what is seen first."""

    keys: Tensor
    values: Tensor
    cosines: Tensor
    sines: Tensor
    position: Tensor
    first: Tensor


class Arguments(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "qkv keys values out q_norm k_norm cosines sines".split()),  # noqa: SIM905
        *(
            (name, ctypes.c_void_p)
            for name in ("position", "first", "parts", "arrived", "next_a", "next_sums")
        ),
        *((name, ctypes.c_int64) for name in ("qkv_pitch", "out_pitch", "key_pitch", "value_pitch")),
        *((name, ctypes.c_float) for name in ("scale", "cap", "eps", "norm_offset")),
        *((name, ctypes.c_int) for name in ("kv_heads", "room", "rotary", "window")),
    ]


def decode_attention_ref(qkv: Tensor, cache: Cache, rules: Rules) -> Tensor:
    """The definition: (B, heads * D) in the cache's dtype; the cache is written."""
    B, kv_heads, _, D = cache.keys.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    q, k, v = qkv.float().view(B, -1, D).split([heads, kv_heads, kv_heads], dim=1)
    rows = torch.arange(B, device=qkv.device)
    angle = cache.position - cache.first
    dtype = cache.keys.dtype
    q, k = (rotated(x, norm, cache, angle).to(dtype) for x, norm in ((q, rules.q_norm), (k, rules.k_norm)))
    for whole, new in ((cache.keys, k), (cache.values, v.to(dtype))):
        if whole.stride(0) == 0:  # rows of one sequence
            whole[0, :, cache.position] = new.transpose(0, 1)
        else:
            whole[rows, :, cache.position] = new
    out = torch.empty(B, heads * D, dtype=dtype, device=qkv.device)
    for b in range(B):
        end, begin = int(cache.position[b]) + 1, int(cache.first[b])
        begin = max(begin, end - rules.window) if rules.window else begin
        keys, values = (t[b, :, begin:end].float() for t in (cache.keys, cache.values))
        queries = q[b].float().view(kv_heads, heads // kv_heads, D)
        scores = rules.scale * (queries @ keys.transpose(1, 2))
        if rules.cap:
            scores = rules.cap * torch.tanh(scores / rules.cap)
        out[b] = (scores.softmax(-1) @ values).reshape(-1).to(dtype)
    return out


def rotated(x: Tensor, norm: RowNorm | None, cache: Cache, angle: Tensor) -> Tensor:
    """Heads x (B, n, D) after their norm and the rotation by ``angle`` (B,)."""
    if norm is not None:
        x, _ = rmsnorm_ref(x, norm.weight, norm.eps, norm.offset)
    cosines, sines = cache.cosines[angle][:, None], cache.sines[angle][:, None]
    rotary = cosines.shape[-1]
    part, rest = x[..., :rotary], x[..., rotary:]
    low, high = part.chunk(2, dim=-1)
    return torch.cat([part * cosines + torch.cat([-high, low], dim=-1) * sines, rest], dim=-1)


class DecodeAttention:
    """One prepared call: tensors that stay where they are, launched for every token.

    Attributes:
        out: where the result is written.
        argument: what the kernel is given; tests run its source on a CPU with the same.
        defines: the macros it is compiled with.
        grid: its blocks.
        cluster: how many of them read each other's shared memory.
        warps: of a block.
        next_sums: (parts, B, ranks) float32, what each launch leaves for the product that reads ``out``; None
            if it begins nothing there.
    """

    def __init__(
        self,
        qkv: Tensor,
        cache: Cache,
        out: Tensor,
        rules: Rules,
        *,
        early: bool = False,
        after: NextInner | None = None,
    ) -> None:
        """Prepare the call that the module's text defines, for tensors on a GPU.

        ``after``: branches of the product that reads ``out``, where `begins_inner` holds.

        Raises:
            Unsupported: a head size, dtype or grouping that the kernel does not take.
        """
        B, kv_heads, room, D = cache.keys.shape
        heads = qkv.shape[1] // D - 2 * kv_heads
        group = heads // max(kv_heads, 1)
        _check(qkv, cache, out)
        self.out, self._early, self._operands = out, early, (qkv, cache, rules)
        walks = group <= 8 and D in (64, 96, 128)  # sizes of the tensor cores' products
        self.warps = _WARPS_THAT_WALK if walks else _WARPS
        device = qkv.device
        splits = min(_MOST_SPLITS, max(1, cdiv(2 * multiprocessors(device), B * kv_heads)))
        self.cluster = cluster_of(device, splits)
        splits = splits // self.cluster * self.cluster
        self._after, self.next_sums = after, None
        if after is not None:
            size = (kv_heads * self.cluster, B, after.ranks)
            self.next_sums = torch.zeros(size, dtype=torch.float32, device=device)
        parts = torch.empty(
            B * heads * (splits // self.cluster) * (D + 2), dtype=torch.float32, device=device
        )
        arrived = torch.zeros(B * kv_heads, dtype=torch.int32, device=device)
        self._own = (parts, arrived)
        norms = [None if n is None else n.weight.data_ptr() for n in (rules.q_norm, rules.k_norm)]
        norm = rules.q_norm or rules.k_norm
        self.argument = Arguments(
            *(t.data_ptr() for t in (qkv, cache.keys, cache.values, out)),
            *norms,
            *(
                t.data_ptr()
                for t in (cache.cosines, cache.sines, cache.position, cache.first, parts, arrived)
            ),
            None if after is None else after.a.data_ptr(),
            None if self.next_sums is None else self.next_sums.data_ptr(),
            *(t.stride(0) for t in (qkv, out, cache.keys, cache.values)),
            rules.scale,
            rules.cap,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            kv_heads,
            room,
            cache.cosines.shape[1],
            rules.window,
        )
        self.grid = (splits, kv_heads, B)
        self.defines: nvrtc.Defines = (
            ("GROUP", group),
            ("D", D),
            ("LANES", next_power_of_2(D // 8)),
            ("HALF", _HALVES[cache.keys.dtype]),
            ("HEAD_NORM", int(norm is not None)),
            ("CAPPED", int(bool(rules.cap))),
            ("EARLY", int(early)),
            ("CLUSTER", self.cluster),
            ("WALKS", int(walks)),
            ("WARPS", self.warps),
            ("NEXT", 0 if after is None else after.ranks),
        )

    def launch(self) -> Tensor:
        """Run it on the current stream of the tensors' device, on a CPU by the definition: (B, heads * D)."""
        if not self.out.is_cuda:
            self.out.copy_(decode_attention_ref(*self._operands))
            if self._after is not None and self.next_sums is not None:
                self.next_sums.zero_()[0] = self._after.sums_of(self.out)
            return self.out
        with on_device_of(self.out):
            device, cluster = self.out.device.index, self.cluster
            kernel = nvrtc.kernel(SOURCE, "decode_attention", self.defines, device, 0, cluster=cluster)
            threads = 32 * self.warps
            nvrtc.launch(kernel, self.grid, threads, 0, self.argument, early=self._early, cluster=cluster)
        return self.out


def _check(qkv: Tensor, cache: Cache, out: Tensor) -> None:
    _, kv_heads, _, D = cache.keys.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    group = heads // max(kv_heads, 1)
    facts = (
        (cache.keys.dtype in _HALVES and out.dtype == cache.keys.dtype, f"a cache in {cache.keys.dtype}"),
        (D % 8 == 0 and D <= 256, f"heads of {D} values"),
        (
            group * kv_heads == heads and 1 <= group <= 16,
            f"{heads} query heads over {kv_heads} key heads",
        ),
        (group * D <= 1024, f"groups of {group} heads of {D} values"),
        (qkv.dtype == torch.float32 and qkv.stride(1) == 1, f"queries in {qkv.dtype}"),
        (all(t[0].is_contiguous() for t in (cache.keys, cache.values)), "a cache that is not contiguous"),
    )
    for holds, fact in facts:
        if not holds:
            raise Unsupported(f"the kernel of decoding's attention does not take {fact}.")


def begins_inner(cache: Tensor, heads: int, ranks: Sequence[int]) -> bool:
    """Whether the kernel begins inner values of these branches of the product that reads its result.

    Args:
        cache: keys (B, kv_heads, room, D).
        heads: of queries.
        ranks: of each branch.
    """
    B, kv_heads, _, D = cache.shape
    return takes_parts(B, ranks) and D >= 32 and heads // kv_heads * D % (8 * _MOST_CLUSTER) == 0


def cluster_of(device: torch.device, splits: int) -> int:
    """Blocks of one head that run side by side: a power of two.

    Sixteen are more than every GPU promises: data centre GPUs of compute capability 9 and 10 take them when
    they are whole, slices of them eight. Other GPUs get single blocks, which add up through global memory.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return 1
    processors = multiprocessors(device)
    most = _MOST_CLUSTER if processors >= 100 else 8 if processors >= 32 else 1
    return min(most, 1 << (splits.bit_length() - 1))


def decode_attention(qkv: Tensor, cache: Cache, rules: Rules) -> Tensor:
    """The attention that the module's text defines: (B, heads * D) in the cache's dtype.

    Args:
        qkv: (B, (heads + 2 kv_heads) D) float32, before norms and rotation.
        cache: its tensors as the module's text gives them; keys and values are written.
        rules: how scores come about.

    Raises:
        Unsupported: what the kernel for GPUs does not take.
    """
    if not qkv.is_cuda:
        return decode_attention_ref(qkv, cache, rules)
    B, _, _, D = cache.keys.shape
    heads = qkv.shape[1] // D - 2 * cache.keys.shape[1]
    out = torch.empty(B, heads * D, dtype=cache.keys.dtype, device=qkv.device)
    return DecodeAttention(qkv, cache, out, rules).launch()
