"""Attention of one new token a sequence over packed keys and values, which it also appends.

For each sequence b, with the new token at position n = position[b] and everything before begin = first[b]
unseen; F and R are the cache's ``first`` and ``newest``:

    q, k, v = heads of qkv[b];   q, k = norm(q), norm(k) if norms are given
    q, k = rotary(q, n - begin), rotary(k, n - begin)
    keys = those of begin ... begin + F - 1 in 16 bits, of begin + F ... n - R - 1 decoded,
           of n - R ... n - 1 in 16 bits, k;     values alike
    out[b] = softmax(cap(scale * q . keys)) . values      over the last ``window`` of them, if there is one

then the token n - R is packed, and the new one takes a place among the newest: token n at n % (R + 1), where
no token of this step stands. A step that is run twice gives the same.

Shapes: qkv (B, (heads + 2 kv_heads) D) float32; codes (B, kv_heads, room, bytes of a head) uint8, as
`kernel_codes` makes them; scales (B, kv_heads, room, groups) float16; newest (B, kv_heads, R + 1, D) and
first ones (B, kv_heads, F, D) in 16 bits; out (B, heads D) in 16 bits; cosines and sines (room, rotary)
float32; position and first (B,) int64.

Heads in 4 bits are turned by a Hadamard matrix: the kernel turns the query and the sums of values instead of
keys and values, which is the same (H is orthonormal). Floor: codes and scales are read once, 544 bits a token
and head of 128 values and side at 4 bits: 71 MB a layer of the 8B shape at 65,536 tokens, 16 us at 4.4 TB/s.
The kernel is in CUDA C++ (packed_attention.cu). No gradient: decoding has none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.kv_cache import PLAIN, KVCache, Side, ordered_codes, unordered_codes
from fewbits.kernels.generation.decode_attention import Cache, Rules, cluster_of, rotated
from fewbits.kernels.launch import nvrtc
from fewbits.kernels.launch.jit import cdiv, multiprocessors, on_device_of

SOURCE = "generation/packed_attention.cu"
_MOST_SPLITS = 64  # clusters of one head, as in the source
_WARPS = {False: 6, True: 4}  # of a block, by whether heads have more than 128 values
_BLOCKS = 2  # at once on a multiprocessor
_STAGES = 2  # tiles of a warp in shared memory
_MUST_ASK = 48 * 1024 + 1  # bytes: with what the source has beside them, tiles of 40 KB need more than 48
_ROOM = 16384  # tokens: for no more, all blocks of a head are one cluster
_CLUSTER = 2  # blocks that are one otherwise: of larger clusters an H200 does not hold as many as fill it
_FEW = 256  # packed tokens for each block of a cluster: more are worth several clusters
_RECENT_WORTH = 1024  # packed tokens that take as long as those in 16 bits
_HALVES = {torch.bfloat16: 1, torch.float16: 2}
_KINDS = {"int4": 4, "int8": 8, "fp8": 1}
_LANES = {"keys": 4, "values": 8}
_ADDED = {"int4": 0x88, "int8": 0x80, "fp8": 0}  # to a byte of codes: none is negative


@dataclass(frozen=True)
class PackedKeysValues:
    """Keys and values of one layer, the rotation for each position, where the new token goes, what is seen.

    Shapes as the module's text gives them.
    """

    kind: KVCache
    key_codes: Tensor
    value_codes: Tensor
    key_scales: Tensor
    value_scales: Tensor
    newest_keys: Tensor
    newest_values: Tensor
    first_keys: Tensor
    first_values: Tensor
    cosines: Tensor
    sines: Tensor
    position: Tensor
    first: Tensor

    @property
    def sides(self) -> dict[str, Side]:
        """How keys and values are packed."""
        return {which: self.kind.side(which, self.newest_keys.shape[-1]) for which in ("keys", "values")}

    def stored(self, which: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes, scales, newest and first of "keys" or "values", each (B, heads, ..., D or bytes)."""
        if which == "keys":
            return self.key_codes, self.key_scales, self.newest_keys, self.first_keys
        return self.value_codes, self.value_scales, self.newest_values, self.first_values

    def fill(self, which: str, codes: Tensor, scales: Tensor, newest: Tensor, first: Tensor) -> None:
        """Take over one side of a prompt.

        Args:
            which: "keys" or "values".
            codes: (B, kv_heads, packed tokens, bytes) in the format's own order.
            scales: (B, kv_heads, packed tokens, groups).
            newest: (B, kv_heads, up to R, D): the tokens behind the packed ones.
            first: (B, kv_heads, up to F, D).
        """
        to_codes, to_scales, to_newest, to_first = self.stored(which)
        packed, side = codes.shape[2], self.sides[which]
        to_codes[:, :, :packed] = kernel_codes(codes, side, which)
        to_scales[:, :, :packed] = scales
        slots = (packed + torch.arange(newest.shape[2], device=newest.device)) % (self.kind.newest + 1)
        to_newest[:, :, slots] = newest
        to_first[:, :, : first.shape[2]] = first


def kernel_codes(codes: Tensor, side: Side, which: str) -> Tensor:
    """Codes (..., bytes of a head) in the order and with the offset with which the kernel keeps them.

    Args:
        codes: in the format's own order.
        side: how they are packed.
        which: "keys" or "values".
    """
    return ordered_codes(codes, side, _LANES[which]) ^ _ADDED[side.kind]


def format_codes(codes: Tensor, side: Side, which: str) -> Tensor:
    """The inverse of `kernel_codes`."""
    return unordered_codes(codes ^ _ADDED[side.kind], side, _LANES[which])


def empty_cache(
    kind: KVCache, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The stored tensors of a `PackedKeysValues` by name, zeros.

    Args:
        kind: formats.
        shape: (B, kv_heads, room, D).
        dtype: of what is kept in 16 bits.
        device: where.
    """
    B, heads, room, D = shape
    tensors: dict[str, Tensor] = {}
    for which, one in (("keys", "key"), ("values", "value")):
        side = kind.side(which, D)
        codes = torch.zeros(B, heads, room, side.row_bytes, dtype=torch.uint8, device=device)
        tensors[f"{one}_codes"] = codes
        tensors[f"{one}_scales"] = torch.zeros(
            B, heads, room, D // side.group, dtype=torch.float16, device=device
        )
        tensors[f"newest_{which}"] = torch.zeros(B, heads, kind.newest + 1, D, dtype=dtype, device=device)
        tensors[f"first_{which}"] = torch.zeros(B, heads, kind.first, D, dtype=dtype, device=device)
    return tensors


class Arguments(ctypes.Structure):
    """The kernel's argument, field by field as in the source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("qkv", "key_codes", "value_codes", "key_scales", "value_scales"),
                *("newest_keys", "newest_values", "first_keys", "first_values", "out"),
                *("q_norm", "k_norm", "cosines", "sines", "position", "first", "parts", "arrived"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("qkv_pitch", "out_pitch")),
        *((name, ctypes.c_float) for name in ("scale", "cap", "eps", "norm_offset")),
        *((name, ctypes.c_int) for name in ("kv_heads", "room", "rotary", "window")),
    ]


def packed_attention_ref(qkv: Tensor, cache: PackedKeysValues, rules: Rules) -> Tensor:
    """The definition: (B, heads * D) in the dtype of the newest tokens; the cache is written."""
    B, kv_heads, _, D = cache.newest_keys.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    dtype = cache.newest_keys.dtype
    q, k, v = qkv.float().view(B, -1, D).split([heads, kv_heads, kv_heads], dim=1)
    angle = cache.position - cache.first
    # Of the 16-bit kernel's cache only the tables of the rotation are read here.
    tables = Cache(q, q, cache.cosines, cache.sines, cache.position, cache.first)
    q, k = (rotated(x, norm, tables, angle).to(dtype) for x, norm in ((q, rules.q_norm), (k, rules.k_norm)))
    new = {"keys": k, "values": v.to(dtype)}
    out = torch.empty(B, heads * D, dtype=dtype, device=qkv.device)
    for b in range(B):
        keys, values = (_seen(cache, which, b, new[which][b], rules.window) for which in ("keys", "values"))
        queries = q[b].float().view(kv_heads, heads // kv_heads, D)
        scores = rules.scale * (queries @ keys.transpose(1, 2))
        if rules.cap:
            scores = rules.cap * torch.tanh(scores / rules.cap)
        out[b] = (scores.softmax(-1) @ values).reshape(-1).to(dtype)
        for which in ("keys", "values"):
            _append(cache, which, b, new[which][b])
    return out


def _seen(cache: PackedKeysValues, which: str, b: int, new: Tensor, window: int) -> Tensor:
    """What a new token (kv_heads, D) of sequence b sees: (kv_heads, tokens, D) float32."""
    codes, scales, newest, first = cache.stored(which)
    n, begin, side = int(cache.position[b]), int(cache.first[b]), cache.sides[which]
    low = max(begin, n + 1 - window) if window else begin
    packed, ring = (
        max(begin + cache.kind.first, low),
        max(begin + cache.kind.first, low, n - cache.kind.newest),
    )
    firsts = [i for i in range(cache.kind.first) if low <= begin + i < n]
    slots = [i % (cache.kind.newest + 1) for i in range(ring, n)]
    rows = slice(packed, max(n - cache.kind.newest, packed))
    decoded = side.unpack(format_codes(codes[b, :, rows], side, which), scales[b, :, rows], torch.float32)
    return torch.cat(
        [first[b, :, firsts].float(), decoded, newest[b, :, slots].float(), new[:, None].float()], 1
    )


def _append(cache: PackedKeysValues, which: str, b: int, new: Tensor) -> None:
    codes, scales, newest, first = cache.stored(which)
    n, begin, side = int(cache.position[b]), int(cache.first[b]), cache.sides[which]
    slots, leaves = cache.kind.newest + 1, n - cache.kind.newest
    if leaves >= begin + cache.kind.first:
        packed, scale = side.pack(newest[b, :, leaves % slots])
        codes[b, :, leaves], scales[b, :, leaves] = kernel_codes(packed, side, which), scale
    newest[b, :, n % slots] = new
    if n - begin < cache.kind.first:
        first[b, :, n - begin] = new


def why_not_packed(kind: KVCache, size: int, group: int) -> str:
    """Why the kernel cannot read such a cache; "" if it can.

    Args:
        kind: formats.
        size: values of a head.
        group: query heads that share a key head.
    """
    if PLAIN in (kind.keys, kind.values):
        return f"the kernel of attention over packed keys and values does not take {kind.name}"
    sides = [kind.side(which, size) for which in ("keys", "values")]
    facts = (
        (size % (64 if kind.values == "int4" else 32) == 0 and size <= 256, f"heads of {size} values"),
        (all(side.group >= 32 for side in sides), f"groups of {sides[0].group} values"),
        (1 <= group <= 16 and group * size <= 1024, f"groups of {group} query heads of {size} values"),
        (
            kind.newest <= 128 and kind.first <= 16,
            f"{kind.newest} newest and {kind.first} first tokens in 16 bits",
        ),
    )
    for holds, fact in facts:
        if not holds:
            return f"the kernel of attention over packed keys and values in {kind.name} does not take {fact}"
    return ""


class PackedAttention:
    """One prepared call: tensors that stay where they are, launched for every token.

    Attributes:
        out: where the result is written.
        argument: what the kernel is given; tests run its source on a CPU with the same.
        defines: the macros it is compiled with.
        grid: its blocks.
    """

    def __init__(
        self, qkv: Tensor, cache: PackedKeysValues, out: Tensor, rules: Rules, *, early: bool = False
    ) -> None:
        """Prepare the call that the module's text defines, for tensors on a GPU.

        Raises:
            Unsupported: a format, head size, dtype or grouping that the kernel does not take.
        """
        B, kv_heads, _, D = cache.newest_keys.shape
        heads = qkv.shape[1] // D - 2 * kv_heads
        group = heads // max(kv_heads, 1)
        reason = why_not_packed(cache.kind, D, group)
        dtype = cache.newest_keys.dtype
        if not reason and (dtype not in _HALVES or out.dtype != dtype or group * kv_heads != heads):
            reason = f"attention over packed keys and values does not take {heads} heads in {dtype}"
        if not reason and (qkv.dtype != torch.float32 or qkv.stride(1) != 1):
            reason = f"attention over packed keys and values does not take queries in {qkv.dtype}"
        if not reason and not all(t.is_contiguous() for t in _stored(cache)):
            reason = "attention over packed keys and values does not take a cache that is not contiguous"
        if reason:
            raise Unsupported(f"{reason}.")
        self.out, self._early, self._operands = out, early, (qkv, cache, rules)
        self.warps = _WARPS[D > 128]
        splits, self.cluster, few = _split(qkv.device, B * kv_heads, cache.key_codes.shape[2])
        self._own = (
            torch.empty(
                B * heads * (splits // self.cluster) * (D + 2), dtype=torch.float32, device=qkv.device
            ),
            torch.zeros(B * kv_heads, dtype=torch.int32, device=qkv.device),
        )
        self.shared_bytes = _shared_bytes(cache, group, self.warps)
        self.argument = self._argument(qkv, cache, out, rules)
        self.grid = (splits, kv_heads, B)
        self.defines = (
            *_defines(cache, group, dtype, rules, early),
            ("WARPS", self.warps),
            ("BLOCKS", _BLOCKS),
            ("STAGES", _STAGES),
            ("CLUSTER", self.cluster),
            ("FEW", few),
            ("RECENT_WORTH", _RECENT_WORTH),
        )

    def _argument(self, qkv: Tensor, cache: PackedKeysValues, out: Tensor, rules: Rules) -> Arguments:
        norms = [None if n is None else n.weight.data_ptr() for n in (rules.q_norm, rules.k_norm)]
        norm = rules.q_norm or rules.k_norm
        rest = (cache.cosines, cache.sines, cache.position, cache.first, *self._own)
        return Arguments(
            *(t.data_ptr() for t in (qkv, *_stored(cache), out)),
            *norms,
            *(t.data_ptr() for t in rest),
            *(t.stride(0) for t in (qkv, out)),
            rules.scale,
            rules.cap,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            cache.newest_keys.shape[1],
            cache.key_codes.shape[2],
            cache.cosines.shape[1],
            rules.window,
        )

    def launch(self) -> Tensor:
        """Run it on the current stream of the tensors' device, on a CPU by the definition: (B, heads * D)."""
        if not self.out.is_cuda:
            return self.out.copy_(packed_attention_ref(*self._operands))
        with on_device_of(self.out):
            device, cluster = self.out.device.index, self.cluster
            most_bytes = max(self.shared_bytes, _MUST_ASK)
            kernel = nvrtc.kernel(
                SOURCE, "packed_attention", self.defines, device, most_bytes, cluster=cluster
            )
            size = (32 * self.warps, self.shared_bytes)
            nvrtc.launch(kernel, self.grid, *size, self.argument, early=self._early, cluster=cluster)
        return self.out


def _stored(cache: PackedKeysValues) -> Iterator[Tensor]:
    """The tensors that a step writes, in the order of the kernel's argument."""
    yield from (cache.key_codes, cache.value_codes, cache.key_scales, cache.value_scales)
    yield from (cache.newest_keys, cache.newest_values, cache.first_keys, cache.first_values)


def _split(device: torch.device, heads: int, room: int) -> tuple[int, int, int]:
    """Blocks of a head, of a cluster, and for how many packed tokens one cluster is enough.

    Args:
        device: where.
        heads: of keys, of all sequences.
        room: tokens of a sequence.
    """
    processors = multiprocessors(device)
    splits = min(_MOST_SPLITS, max(1, _BLOCKS * processors // heads))
    single = cluster_of(device, max(1, processors // heads))
    if single > _CLUSTER and room <= _ROOM:
        return single, single, 1 << 30
    cluster = min(cluster_of(device, splits), _CLUSTER)
    return splits // cluster * cluster, cluster, _FEW * cluster


def _shared_bytes(cache: PackedKeysValues, group: int, warps: int) -> int:
    """Bytes of shared memory for the tiles of a block's warps, or their sums: STAGE_SIZE of the source."""
    keys, values = cache.sides["keys"], cache.sides["values"]
    rows = 32 if keys.kind == values.kind == "int4" and keys.size <= 128 else 16
    groups = keys.size // keys.group
    scales = cdiv(2 * rows * groups + 4 * (groups % 2), 16) * 16
    tile = rows * (keys.row_bytes + values.row_bytes) + 2 * scales
    return max(_STAGES * tile * warps, 4 * warps * group * (keys.size + 8))


def _defines(
    cache: PackedKeysValues, group: int, dtype: torch.dtype, rules: Rules, early: bool
) -> nvrtc.Defines:
    keys, values = cache.sides["keys"], cache.sides["values"]
    norm = rules.q_norm or rules.k_norm
    return (
        ("HEADS", group),
        ("D", keys.size),
        ("SCALES", keys.size // keys.group),
        ("KEY_KIND", _KINDS[keys.kind]),
        ("VALUE_KIND", _KINDS[values.kind]),
        ("KEY_TURN", keys.rotation),
        ("VALUE_TURN", values.rotation),
        ("NEWEST", cache.kind.newest),
        ("FIRST", cache.kind.first),
        ("HALF", _HALVES[dtype]),
        ("HEAD_NORM", int(norm is not None)),
        ("CAPPED", int(bool(rules.cap))),
        ("EARLY", int(early)),
    )


def packed_attention(qkv: Tensor, cache: PackedKeysValues, rules: Rules) -> Tensor:
    """The attention that the module's text defines: (B, heads * D) in the dtype of the newest tokens.

    Args:
        qkv: (B, (heads + 2 kv_heads) D) float32, before norms and rotation.
        cache: its tensors as the module's text gives them; they are written.
        rules: how scores come about.

    Raises:
        Unsupported: what the kernel for GPUs does not take.
    """
    if not qkv.is_cuda:
        return packed_attention_ref(qkv, cache, rules)
    B, kv_heads, _, D = cache.newest_keys.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    out = torch.empty(B, heads * D, dtype=cache.newest_keys.dtype, device=qkv.device)
    return PackedAttention(qkv, cache, out, rules).launch()
