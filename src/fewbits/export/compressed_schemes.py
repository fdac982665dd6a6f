"""The schemes of compressed-tensors that are written: which format each stores, and how it reads back.

Weights in floating point and in rows of INT8 are rounded by the formats of the registry; whole numbers in
groups by a search for each group's scale (`fewbits.export.compressed`). What a scheme does to activations is
for the engine to do while it runs: schemes that need a scale measured beforehand are not written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, BadInput, Unsupported
from fewbits.export.compressed import compress, group_of, import_compressed_tensors
from fewbits.formats import E4M3_128X128, E4M3_ROW, INT4_G128_ZP, INT8, MXFP4, MXFP8_E4M3, NVFP4
from fewbits.formats.base import Format
from fewbits.formats.compressed_tensors import to_compressed_tensors


@dataclass(frozen=True)
class Scheme:
    """One way of storing linears.

    Attributes:
        preset: the package's name for it.
        form: its name for the packing.
        bits: of whole numbers in groups with searched scales; 0 where ``format`` rounds.
        format: rounds the weights; None for searched scales.
    """

    preset: str
    form: str
    bits: int = 0
    format: Format | None = None


_DIVIDED = dataclasses.replace(NVFP4, divides=True)
SCHEMES = {
    "w4a16": Scheme("W4A16", "pack-quantized", bits=4),
    "w8a16": Scheme("W8A16", "pack-quantized", bits=8),
    "w4afp8": Scheme("W4AFP8", "pack-quantized", bits=4),
    "w4a16_asym": Scheme("W4A16_ASYM", "pack-quantized", format=INT4_G128_ZP),
    "w8a8": Scheme("W8A8", "int-quantized", format=INT8),
    "fp8_dynamic": Scheme("FP8_DYNAMIC", "float-quantized", format=E4M3_ROW),
    "fp8_block": Scheme("FP8_BLOCK", "float-quantized", format=E4M3_128X128),
    "nvfp4a16": Scheme("NVFP4A16", "nvfp4-pack-quantized", format=_DIVIDED),
    "mxfp4a16": Scheme("MXFP4A16", "mxfp4-pack-quantized", format=MXFP4),
    "mxfp4": Scheme("MXFP4", "mxfp4-pack-quantized", format=MXFP4),
    "mxfp8a16": Scheme("MXFP8A16", "mxfp8-quantized", format=MXFP8_E4M3),
    "mxfp8": Scheme("MXFP8", "mxfp8-quantized", format=MXFP8_E4M3),
}
_PREFIX = "compressed_tensors_"
_UNCALIBRATED = ("fp8", "nvfp4")
# Linears that an engine runs as one, which want one scale of the second level.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def scheme_named(name: str) -> str | None:
    """The key of `SCHEMES` that a ``save_method`` means; None for a method of another kind.

    Raises:
        BadInput: there is no such scheme.
        Unsupported: one that needs activations measured beforehand.
    """
    if not name.startswith(_PREFIX):
        return None
    key = name.removeprefix(_PREFIX).lower()
    if key in _UNCALIBRATED:
        other = "fp8_dynamic or fp8_block" if key == "fp8" else "nvfp4a16"
        raise Unsupported(
            f"compressed-tensors' scheme {key!r} needs scales of activations that are measured beforehand, "
            f"which is not done here; write {other}."
        )
    if key not in SCHEMES:
        raise BadInput(
            f"there is no scheme {key!r} of compressed-tensors here; it is one of {', '.join(SCHEMES)}."
        )
    return key


class Codec:
    """One scheme over one model: writes a weight's tensors, and reads them back by the package.

    Args:
        key: of `SCHEMES`.
        columns: the lengths of the rows of all linears.
        dtype: of scales that the package keeps in the model's dtype.

    Raises:
        Unsupported: the scheme's blocks do not fit the model's rows.
    """

    def __init__(self, key: str, columns: Sequence[int], dtype: torch.dtype) -> None:
        self.scheme, self.dtype = SCHEMES[key], dtype
        self.group = group_of(columns)
        self.format = self.scheme.format
        if key == "w4a16_asym":
            self.format = dataclasses.replace(INT4_G128_ZP, block=(1, self.group))
        whole_blocks = self.format is not None and self.scheme.form[:2] in ("nv", "mx")
        block = self.format.contract.block[1] if self.format is not None and whole_blocks else 0
        odd = next((n for n in columns if block and n % block), None)
        if odd is not None:
            raise Unsupported(
                f"{self.scheme.preset} needs rows in blocks of {block} values, and this model has rows of "
                f"{odd}; write w8a16."
            )

    def describe(self) -> Any:
        """The package's own description of the scheme."""
        package = import_compressed_tensors().quantization
        preset = package.preset_name_to_scheme(self.scheme.preset, ["Linear"])
        weights = preset.weights
        if weights.strategy == "group" and weights.type == "int":
            changes = {"group_size": self.group or None, "strategy": "group" if self.group else "channel"}
            weights = package.QuantizationArgs(**{**weights.model_dump(), **changes})
        return preset.model_copy(update={"weights": weights, "format": self.scheme.form})

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json, as the package's own class writes it."""
        package = import_compressed_tensors().quantization
        config = package.QuantizationConfig(
            config_groups={"group_0": self.describe()},
            format=self.scheme.form,
            quantization_status="compressed",
            ignore=["lm_head"],
        )
        written: dict[str, Any] = config.model_dump(mode="json")
        return written

    def absmax_counts(self, name: str) -> tuple[str, ...]:
        """The linears that share this one's second-level scale, itself among them; none without such."""
        stem, _, leaf = name.rpartition(".")
        together = next((g for g in _TOGETHER if leaf in g), (leaf,))
        return tuple(f"{stem}.{one}" for one in together) if self._has_tensor_scale else ()

    @property
    def _has_tensor_scale(self) -> bool:
        return self.format is not None and self.format.contract.tensor_scale

    def write(self, weight: Tensor, absmax: float | None = None) -> dict[str, Tensor]:
        """One linear's tensors.

        Args:
            weight: (N, K) float32.
            absmax: of all linears that share its second-level scale; None: its own.

        Raises:
            BadCheckpoint: the weight is not finite.
        """
        if self.scheme.bits:
            return compress(weight, self.scheme.bits, self.group, self.dtype)
        if not bool(weight.isfinite().all()):
            raise BadCheckpoint("a weight holds a NaN or an infinity; nothing was written.")
        assert self.format is not None
        packed = self.format.quantize_under(weight, absmax)
        if "zero_points" in packed.parts:
            scale, zero = packed.scales, packed.parts["zero_points"]
            given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            return {**self._package().compress(given, self.describe()), "weight_scale": scale}
        return to_compressed_tensors(packed)

    def read(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight (N, K) float32 that the package decodes."""
        wide = dict(parts)
        if wide["weight_scale"].dtype in (torch.float16, torch.bfloat16):
            wide["weight_scale"] = wide["weight_scale"].float()
        weight: Tensor = self._package().decompress(wide, self.describe())["weight"]
        return weight.float()

    def _package(self) -> Any:
        registry = import_compressed_tensors().compressors.BaseCompressor
        return registry.get_value_from_registry(self.scheme.form)
