"""Decoding over keys and values in 16, 8 and 4 bits: attention of a new token, and a step of the 8B shape.

    python benchmarks/generation/decode_caches.py                attention, then the step
    python benchmarks/generation/decode_caches.py attention      one of the two

Attention: microseconds a layer with 32 query and 8 key heads of 128, beside torch's backends, from CUDA
graphs over more layers' caches than the GPU's second cache holds. The step: milliseconds, NF4, 2,048 tokens.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fewbits
from fewbits.bench.decode_cases import packed_cache
from fewbits.bench.train.shapes import random_model, shape_of
from fewbits.formats.kv_cache import get_kv_cache
from fewbits.kernels.generation.decode_attention import Cache, DecodeAttention, Rules
from fewbits.kernels.generation.packed_attention import PackedAttention
from fewbits.models.generation.step import DecodeStep

HEADS, KV_HEADS, D = 32, 8, 128
KINDS = ("int8", "fp8", "int8/int4", "int4")
CONTEXTS = {  # tokens, by how many sequences
    1: (128, 2048, 4096, 16384, 65536, 131072),
    4: (2048, 4096),
    16: (2048, 4096, 16384),
    64: (2048, 4096),
}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def graph_us(run: Callable[[], Any], layers: int) -> float:
    """Microseconds of one of ``layers`` launches: the median of three rounds of a graph of ``run``."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 20 / layers)
    return median(times)


def layers_for(nbytes: float) -> int:
    return max(2, min(16, int(200e6 // nbytes) + 1))


def of_torch(q: Tensor, caches: list[tuple[Tensor, Tensor]], backend: SDPBackend) -> float:
    """The faster of queries grouped as rows of one head, and of torch's own grouping; NaN without either."""
    batch = len(q)
    grouped = q.view(batch, KV_HEADS, HEADS // KV_HEADS, D)
    ways = (
        lambda: [F.scaled_dot_product_attention(grouped, k, v) for k, v in caches],
        lambda: [F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in caches],
    )
    times = []
    with sdpa_kernel(backend):
        for way in ways:
            try:
                times.append(graph_us(way, len(caches)))
            except RuntimeError:  # the backend does not take it
                torch.cuda.synchronize()
    return min(times, default=float("nan"))


def attention(batch: int, context: int) -> None:
    rules = Rules(scale=D**-0.5)
    qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * D, device="cuda")
    out = torch.empty(batch, HEADS * D, dtype=torch.bfloat16, device="cuda")
    tables = (torch.rand(context, D, device="cuda"), torch.rand(context, D, device="cuda"))
    position = torch.full((batch,), context - 1, device="cuda")
    first = torch.zeros_like(position)
    layers = layers_for(batch * context * KV_HEADS * D * 4)
    shape = (batch, KV_HEADS, context, D)
    caches = [
        (torch.randn(shape, device="cuda").bfloat16(), torch.randn(shape, device="cuda").bfloat16())
        for _ in range(layers)
    ]
    calls = [DecodeAttention(qkv, Cache(k, v, *tables, position, first), out, rules) for k, v in caches]
    row = {"bfloat16": graph_us(lambda: [call.launch() for call in calls], layers)}
    q = torch.randn(batch, HEADS, 1, D, device="cuda", dtype=torch.bfloat16)
    for backend in BACKENDS:
        row[f"torch {backend.name.split('_')[0].lower()}"] = of_torch(q, caches, backend)
    k, v = (t[:1, :1].expand(shape) for t in caches[0])
    for kind in KINDS:
        copies = layers_for(batch * context * KV_HEADS * D * (1.1 if kind == "int4" else 2))
        packed = [packed_cache(kind, k, v, tables, context - 1) for _ in range(copies)]
        launches = [PackedAttention(qkv, cache, out, rules) for cache in packed]
        row[kind] = graph_us(lambda launches=launches: [call.launch() for call in launches], copies)
        del packed, launches
    times = ", ".join(f"{kind} {us:.1f}" for kind, us in row.items())
    print(f"batch {batch}, {context} tokens, us a layer: {times}", flush=True)


def step(model: Any, batch: int, kind: str | None) -> None:
    cache = None if kind is None else get_kv_cache(kind)
    decode = DecodeStep(model, batch=batch, room=2304, kv_cache=cache)
    for keys in (*decode.keys, *decode.values):
        keys.normal_()
    for packed in decode.packed.values():
        for scales in (packed.key_scales, packed.value_scales):
            scales.fill_(0.1)
        for codes in (packed.key_codes, packed.value_codes):
            codes.random_(0, 256)
    decode.advance()
    times = []
    for _ in range(3):
        decode.position.fill_(2048)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(32):
            decode.advance()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 32 * 1e3)
    print(f"a step, batch {batch}, 2048 tokens, {kind or 'bfloat16'}: {median(times):.3f} ms", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("attention", "step"))
    parser.add_argument("--batches", default="1,4,16,64", help="of the step")
    options = parser.parse_args()
    part = options.part
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if part != "step":
        for batch, contexts in CONTEXTS.items():
            for context in contexts:
                attention(batch, context)
                gc.collect()
                torch.cuda.empty_cache()
    if part != "attention":
        model = random_model(shape_of("llama-3.1-8b").config(), torch.device("cuda"), torch.bfloat16).eval()
        fewbits.convert(model, "qlora_nf4")
        for batch in map(int, options.batches.split(",")):
            for kind in (None, "int8", "int4"):
                step(model, batch, kind)
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
