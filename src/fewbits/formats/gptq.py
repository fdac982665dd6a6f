"""GPTQ's file layout, read without its libraries.

A linear with a weight (N, K) is stored as

* ``qweight`` int32 (K * bits / 32, N): each column of words is one stream of unsigned codes along K;
* ``qzeros`` int32 (groups, N * bits / 32): the zero points as streams along N. Version 1 of the layout stores
  them less one (modulo 2**bits), version 2 as they are;
* ``scales`` float16 (groups, N);
* ``g_idx`` int32 (K,): the group of each input; with activation order (``desc_act``) in any order.

``weight = (code - zero point) * scale``. Symmetric files have ``2**(bits - 1)`` for every zero point, so that
their version shows in the values, whatever ``checkpoint_format`` says; there are files that say 1 and are 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.formats.bits import pack_bits, unpack_bits
from fewbits.formats.blocks import Block
from fewbits.formats.integer import Integer, WholeNumbers
from fewbits.formats.integer_indexed import IndexedInteger, check_index
from fewbits.formats.integer_widths import NarrowInteger

PARTS = ("qweight", "qzeros", "scales", "g_idx")
WIDTHS = (2, 3, 4, 8)


def whole_numbers(bits: int, block: Block, zero_point: bool) -> WholeNumbers:
    """The registry's format of these fields, or one that differs from it in the block."""
    ending = {(1, 0): "", (0, 0): "_tensor"}.get(block, f"_g{block[1]}")
    kind = Integer if bits in (4, 8) else NarrowInteger
    has_name = ending in ("", "_g32", "_g64", "_g128") or (ending == "_tensor" and kind is Integer)
    name = f"int{bits}{ending if has_name else '_g128'}{'_zp' if zero_point else ''}"
    return kind(name=name, bits=bits, block=block, zero_point=zero_point)


def from_gptq(
    parts: Mapping[str, Tensor], name: str, settings: Mapping[str, Any], dtype: torch.dtype
) -> Packed:
    """A weight as it was saved.

    The weight is (N, K), in groups of columns.

    Args:
        parts: the tensors named above, by these names; ``g_idx`` may be absent.
        name: of the linear, for messages.
        settings: ``quantization_config`` of config.json; ``bits``, ``group_size``, ``sym`` and
            ``checkpoint_format`` are read.
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: another number of bits.
    """
    bits = int(settings.get("bits", 4))
    if bits not in WIDTHS:
        raise Unsupported(f"{name} has GPTQ codes of {bits} bits; 2, 3, 4 and 8 are read here.")
    try:
        qweight, qzeros, scales = (parts[part] for part in PARTS[:3])
        K, N = qweight.shape[0] * 32 // bits, qweight.shape[1]
        groups = scales.shape[0]
        codes = bytes_of_words(qweight.t())
        zeros = unpack_bits(bytes_of_words(qzeros), bits, N).int()
        if zeros.shape != (groups, N) or scales.shape != (groups, N):
            raise ValueError(f"scales {tuple(scales.shape)}, zero points {tuple(zeros.shape)}")
    except (KeyError, ValueError, IndexError) as error:
        raise BadCheckpoint(
            f"the GPTQ tensors of {name} do not fit together ({error}); fetch it again."
        ) from error
    version = _version(zeros, bits, settings)
    zeros = (zeros + int(version == 1)) % 2**bits
    group = -(-K // groups) if int(settings.get("group_size", -1)) <= 0 else int(settings["group_size"])
    index = parts.get("g_idx")
    tensors = {
        "codes": with_signs_turned(codes, bits, K),
        "scales": scales.float().t().contiguous(),
        "zero_points": (zeros - 2 ** (bits - 1)).to(torch.int8).t().contiguous(),
    }
    format: Format = whole_numbers(bits, (1, group if groups > 1 else 0), True)
    if index is not None and not torch.equal(index.long().cpu(), torch.arange(K) // group):
        check_index(index, groups, f"{name}.g_idx")
        format, tensors["group_index"] = (
            IndexedInteger(name=f"int{bits}_indexed", bits=bits, group=group),
            index.int(),
        )
    return Packed(format, (N, K), dtype, tensors)


def bytes_of_words(words: Tensor) -> Tensor:
    """(R, words) int32 to its bytes, (R, 4 * words) uint8."""
    return words.contiguous().view(torch.uint8)


def with_signs_turned(codes: Tensor, bits: int, K: int) -> Tensor:
    """Unsigned codes (R, bytes) to two's complement, or back: the highest bit of ``bits`` turns."""
    if bits == 8:
        return (codes.view(torch.uint8) ^ 128).view(torch.int8)
    if 8 % bits == 0:
        sign_bits = sum(1 << (bits * (i + 1) - 1) for i in range(8 // bits))
        return codes ^ sign_bits
    return pack_bits(unpack_bits(codes, bits, K) ^ (1 << (bits - 1)), bits)


def _version(zeros: Tensor, bits: int, settings: Mapping[str, Any]) -> int:
    """1 or 2: by the values where they are symmetric, otherwise as the file says."""
    half = 2 ** (bits - 1)
    if bool((zeros == half - 1).all()):
        return 1
    if bool((zeros == half).all()):
        return 2
    return 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
