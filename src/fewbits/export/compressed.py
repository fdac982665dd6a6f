"""compressed-tensors: whole numbers in groups, as vLLM, SGLang and transformers read them.

Weights of the linears become INT4 or INT8 (symmetric, a scale for each group of a row) and are packed by the
``compressed-tensors`` package's own compressor; its config classes write what config.json says. The group has
128 values, or 64 or 32 where a model's rows do not divide; otherwise each row has one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported

_GROUPS = (128, 64, 32)
_FACTORS = 16  # scales tried below the plain one
_STEP = 0.02  # their distance, as a part of the plain one


def import_compressed_tensors() -> Any:
    """The package ``compressed_tensors``.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        import compressed_tensors.compressors
        import compressed_tensors.quantization
    except ImportError as error:
        raise Unsupported(
            "this format needs the package compressed-tensors, which is not installed; run: "
            "pip install 'fewbits[export]'."
        ) from error
    return compressed_tensors


def group_of(columns: Iterable[int]) -> int:
    """Values that share a scale in a model whose rows have these lengths; 0 for the whole row.

    One size for all: transformers decodes folders with several groups by the first one's.
    """
    lengths = set(columns)
    return next((group for group in _GROUPS if all(n % group == 0 for n in lengths)), 0)


def scheme_of(bits: int, group: int) -> Any:
    """The package's description of how weights in groups of this size (0: rows) are stored."""
    package = import_compressed_tensors().quantization
    weights = package.QuantizationArgs(
        num_bits=bits,
        type="int",
        strategy="group" if group else "channel",
        group_size=group or None,
        symmetric=True,
        dynamic=False,
    )
    return package.QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def describe(bits: int, group: int, ignored: list[str]) -> dict[str, Any]:
    """``quantization_config`` of config.json, as the package's own class writes it.

    Args:
        bits: of a code.
        group: values that share a scale; 0 for the whole row.
        ignored: linears that stay as they are.
    """
    package = import_compressed_tensors().quantization
    config = package.QuantizationConfig(
        config_groups={"group_0": scheme_of(bits, group)},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=ignored,
    )
    written: dict[str, Any] = config.model_dump(mode="json")
    return written


def compress(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One linear's weight as the package stores it.

    Args:
        weight: (N, K) float32.
        bits: of a code.
        group: values that share a scale; 0 for the whole row.
        dtype: of the scales.

    Returns:
        ``weight_packed`` (N, words) int32, ``weight_scale`` (N, groups), ``weight_shape`` (2,) int64.

    Raises:
        BadCheckpoint: the weight is not finite.
    """
    if not bool(weight.isfinite().all()):
        raise BadCheckpoint("a weight holds a NaN or an infinity; nothing was written.")
    scale = _scales(weight, group or weight.shape[1], bits).to(dtype)
    parts = {"weight": weight, "weight_scale": scale.float()}
    packed: dict[str, Tensor] = _compressor().compress(parts, scheme_of(bits, group))
    return {**packed, "weight_scale": scale}


def decompress(parts: Mapping[str, Tensor], bits: int, group: int) -> Tensor:
    """The weight (N, K) float32 that the package decodes from `compress`'s tensors."""
    wide = {**parts, "weight_scale": parts["weight_scale"].float()}
    weight: Tensor = _compressor().decompress(wide, scheme_of(bits, group))["weight"]
    return weight


def _compressor() -> Any:
    return import_compressed_tensors().compressors.PackedQuantizationCompressor


def _scales(weight: Tensor, group: int, bits: int) -> Tensor:
    """(N, groups): of several scales from the plain one down, the one with the least squared error."""
    most = 2 ** (bits - 1) - 1
    blocks = weight.reshape(weight.shape[0], -1, group)
    plain = (blocks.abs().amax(-1, keepdim=True) / most).clamp_min(1e-12)
    best, chosen = torch.full_like(plain, torch.inf), plain
    for number in range(_FACTORS):
        scale = plain * (1 - number * _STEP)
        error = (
            (blocks - scale * (blocks / scale).round().clamp(-most - 1, most)).square().sum(-1, keepdim=True)
        )
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scale, chosen)
    scales: Tensor = chosen.squeeze(-1)
    return scales
