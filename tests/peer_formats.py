"""What other libraries' codes and scales decode to, by plain arithmetic from the specifications alone.

Nothing of fewbits and none of the libraries' decoders is in here: tests/peers.py holds a live peer against
these products, and compares ours with it only where they agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Bits of the exponent and of the fraction, and the exponent's bias: OCP Microscaling 1.0, table 5.
ELEMENTS = {"e2m1": (2, 1, 1), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3)}


def small_floats(codes: Tensor, kind: str) -> Tensor:
    """The numbers of 4- and 6-bit floats, one code a byte: sign, exponent, fraction."""
    exponent_bits, fraction_bits, bias = ELEMENTS[kind]
    codes = codes.long()
    fraction = (codes & (2**fraction_bits - 1)).float() / 2**fraction_bits
    exponent = codes >> fraction_bits & (2**exponent_bits - 1)
    size = torch.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias).float()
    )
    return size * (1 - 2 * (codes >> (exponent_bits + fraction_bits) & 1).float())


def halves(stored: Tensor) -> Tensor:
    """The two 4-bit codes of each byte of the last axis, the low half first."""
    stored = stored.view(torch.uint8)
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """``scales``, one for each block of rows and columns, at every value of ``shape``."""
    scales = scales.view(-1, scales.shape[-1])
    rows, columns = shape[0] // scales.shape[0], shape[1] // scales.shape[1]
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def powers(scales: Tensor) -> Tensor:
    """The scales of microscaling: 2**(code - 127)."""
    return 2.0 ** (scales.view(torch.uint8).double() - 127)


def mx_decoded(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Values of blocks of 32, (rows, columns): ``codes`` as torchao keeps them, 6-bit ones one a byte."""
    if kind in ELEMENTS:
        values = small_floats(halves(codes) if kind == "e2m1" else codes.view(torch.uint8), kind)
    else:
        values = codes.float()
    return (values.double() * spread(powers(scales), values.shape)).float()


def nvfp4_decoded(codes: Tensor, scales: Tensor, tensor_scale: Tensor | float) -> Tensor:
    """E2M1 codes, two a byte, times their block's E4M3 scale, times the tensor's."""
    values = small_floats(halves(codes), "e2m1")
    return values * spread(scales.float() * tensor_scale, values.shape)


def _bits(stored: np.ndarray) -> np.ndarray:
    return np.unpackbits(stored, axis=-1, bitorder="little")


def gguf_decoded(stored: np.ndarray, kind: str) -> np.ndarray | None:
    """Rows of one of ggml's plain blocks of 32; None for types whose blocks have inner scales or tables."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
    if kind not in sizes:
        return None
    blocks = np.ascontiguousarray(stored).reshape(-1, sizes[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(len(stored), -1)
    codes = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], axis=1)
    if kind.startswith("Q5"):
        codes = codes | _bits(blocks[:, -20:-16]) << 4
    if kind.endswith("_1"):
        least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        return (codes.astype(np.float32) * scale + least).reshape(len(stored), -1)
    middle = 2 ** (int(kind[1]) - 1)
    return ((codes.astype(np.float32) - middle) * scale).reshape(len(stored), -1)


def from_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of ``bits`` bits of each row of int32 words, lowest bits first."""
    stream = _bits(words.contiguous().numpy().view(np.uint8))[:, : count * bits]
    weights = 2 ** np.arange(bits)
    return torch.from_numpy((stream.reshape(len(stream), count, bits) * weights).sum(-1))


def compressed_decoded(parts: dict[str, Tensor], bits: int) -> Tensor:
    """A weight by what compressed-tensors stores of it: whole numbers or floats of ``bits`` bits."""
    scales = parts["weight_scale"]
    if "weight_global_scale" in parts:
        inverse = 1 / parts["weight_global_scale"].float()
        return nvfp4_decoded(parts["weight_packed"], scales, inverse)
    if scales.dtype == torch.uint8:
        codes = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
        if bits == 6:
            codes = from_words(codes, 6, codes.shape[-1] * 4 // 3).to(torch.uint8)
        return mx_decoded(codes, scales, {4: "e2m1", 6: "e2m3", 8: "e4m3"}[bits])
    if "weight_packed" not in parts:
        values = parts["weight"].float()
        return values * spread(scales.float(), values.shape)
    rows, columns = parts["weight_shape"].tolist()
    codes = from_words(parts["weight_packed"], bits, columns).float()
    zeros: Tensor | float = 2.0 ** (bits - 1)
    if "weight_zero_point" in parts:
        stored = from_words(parts["weight_zero_point"].T, bits, rows).T.float()
        zeros = spread(stored, codes.shape)
    return (codes - zeros) * spread(scales.float(), codes.shape)


def torchao_decoded(weight: Any) -> Tensor:
    """A weight of torchao's integer and float8 classes: its codes less their zero points, times scales."""
    values, scales = weight.qdata.float(), weight.scale.float()
    if getattr(weight, "zero_point", None) is not None:
        values = values - spread(weight.zero_point.float(), values.shape)
    return values * spread(scales, values.shape)
