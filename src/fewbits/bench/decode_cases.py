"""Cases of decoding: products of one row with packed weights, attention of a new token over its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product as product_of

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.problem import Case, Problem, randn
from fewbits.formats import get_format
from fewbits.formats.base import Packed
from fewbits.formats.kv_cache import get_kv_cache
from fewbits.kernels.generation.batch_rows import batch_rows
from fewbits.kernels.generation.decode_attention import Cache, Rules, decode_attention, decode_attention_ref
from fewbits.kernels.generation.few_rows import few_rows, few_rows_ref
from fewbits.kernels.generation.operands import Product
from fewbits.kernels.generation.packed_attention import (
    PackedKeysValues,
    empty_cache,
    packed_attention,
    packed_attention_ref,
)

_FORMATS = ("nf4_dq", "nf4", "int4_g64", "int8", "float8_e4m3_row", "bfloat16")
_SHAPES = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
)  # of the 8B shape: q, k, v; o; gate, up; down
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128


def _product_cases(max_size: int) -> list[Case]:
    listed = []
    for op, rows, build in (("few_rows", 1, _few_rows_problem), ("batch_rows", 16, _batch_rows_problem)):
        for format, (N, K) in product_of(_FORMATS, _SHAPES):
            N, K = min(N, max_size), min(K, max_size)
            weight = 2 * N * K if format == "bfloat16" else get_format(format).nbytes((N, K))
            listed.append(
                Case(
                    op=op,
                    part="forward",
                    format=format,
                    M=rows,
                    N=N,
                    K=K,
                    bytes_moved=weight + rows * (2 * K + 4 * N),
                    tolerance=2.0**-7,
                    build=build,
                )
            )
    return listed


def _few_rows_problem(case: Case, device: torch.device) -> Problem:
    return _product_problem(case, device, lambda x, weight: few_rows(x, [weight]))


def _batch_rows_problem(case: Case, device: torch.device) -> Problem:
    def ours(x: Tensor, weight: Packed | Tensor) -> Tensor:
        out = torch.empty(case.M, case.N, dtype=torch.float32, device=device)
        return batch_rows(Product(x, [weight], out))

    return _product_problem(case, device, ours)


def _product_problem(
    case: Case, device: torch.device, product: Callable[[Tensor, Packed | Tensor], Tensor]
) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)
    dense = randn(device, torch.bfloat16, case.N, case.K) * 0.02
    weight: Packed | Tensor = dense if case.format == "bfloat16" else get_format(case.format).quantize(dense)

    def ours() -> Sequence[Tensor]:
        return (product(x, weight),)

    functions: dict[str, Callable[[], Sequence[Tensor]]] = {"fewbits": ours}
    if isinstance(weight, Tensor):
        functions["torch"] = lambda: (F.linear(x, dense),)
    variants = {name: (lambda f=f: f) for name, f in functions.items()}
    return Problem(variants, lambda: (few_rows_ref(x.double(), [weight]),))


def _attention_cases(max_size: int) -> list[Case]:
    listed = []
    for tokens in (128, 2048, 32768):
        tokens = min(tokens, 8 * max_size)
        cache = 2 * 2 * tokens * _KV_HEADS * _HEAD
        listed.append(
            Case(
                op="decode_attention",
                part="forward",
                format="bfloat16",
                M=1,
                N=tokens,
                bytes_moved=cache,
                tolerance=2.0**-7,
                build=_attention_problem,
            )
        )
    return listed


def _attention_problem(case: Case, device: torch.device) -> Problem:
    tokens = case.N
    qkv = randn(device, torch.float32, 1, (_HEADS + 2 * _KV_HEADS) * _HEAD)
    keys, values = (randn(device, torch.bfloat16, 1, _KV_HEADS, tokens, _HEAD) for _ in range(2))
    angle = (
        torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, _HEAD // 2, dtype=torch.float32))
        .to(device)
        .repeat(1, 2)
    )
    position = torch.full((1,), tokens - 1, device=device)
    cache = Cache(keys, values, angle.cos(), angle.sin(), position, torch.zeros_like(position))
    rules = Rules(scale=_HEAD**-0.5)

    def exact() -> Sequence[Tensor]:
        return (decode_attention_ref(qkv, cache, rules),)

    return Problem({"fewbits": lambda: lambda: (decode_attention(qkv, cache, rules),)}, exact)


def packed_cache(
    kind: str, keys: Tensor, values: Tensor, tables: tuple[Tensor, Tensor], tokens: int
) -> PackedKeysValues:
    """A cache that holds the first ``tokens`` of these keys and values (B, kv_heads, room, D)."""
    formats = get_kv_cache(kind)
    B, heads, room, D = keys.shape
    position = torch.full((B,), tokens, device=keys.device)
    cache = PackedKeysValues(
        formats,
        **empty_cache(formats, (B, heads, room, D), keys.dtype, keys.device),
        cosines=tables[0],
        sines=tables[1],
        position=position,
        first=torch.zeros_like(position),
    )
    packed = max(tokens - formats.newest, 0)
    for which, whole in (("keys", keys), ("values", values)):
        codes, scales = cache.sides[which].pack(whole[:, :, :packed])
        first = whole[:, :, : min(formats.first, tokens)]
        cache.fill(which, codes, scales, whole[:, :, packed:tokens], first)
    return cache


def _packed_cases(max_size: int) -> list[Case]:
    listed = []
    for kind in ("int4", "int8", "fp8"):
        for tokens in (2048, 32768):
            tokens = min(tokens, 8 * max_size)
            listed.append(
                Case(
                    op="packed_attention",
                    part="forward",
                    format=kind,
                    M=1,
                    N=tokens,
                    bytes_moved=_KV_HEADS * get_kv_cache(kind).nbytes(tokens, _HEAD),
                    tolerance=2.0**-7,
                    build=_packed_problem,
                )
            )
    return listed


def _packed_problem(case: Case, device: torch.device) -> Problem:
    tokens = case.N
    qkv = randn(device, torch.float32, 1, (_HEADS + 2 * _KV_HEADS) * _HEAD)
    keys, values = (randn(device, torch.bfloat16, 1, _KV_HEADS, tokens, _HEAD) for _ in range(2))
    angle = (
        torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, _HEAD // 2, dtype=torch.float32))
        .to(device)
        .repeat(1, 2)
    )
    cache = packed_cache(case.format, keys, values, (angle.cos(), angle.sin()), tokens - 1)
    rules = Rules(scale=_HEAD**-0.5)

    def exact() -> Sequence[Tensor]:
        return (packed_attention_ref(qkv, cache, rules),)

    return Problem({"fewbits": lambda: lambda: (packed_attention(qkv, cache, rules),)}, exact)


MAKERS = (_product_cases, _attention_cases, _packed_cases)
