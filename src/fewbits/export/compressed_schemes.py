"""The schemes of compressed-tensors that are written: which format each stores, and how it reads back.

Weights in floating point and in rows of INT8 are rounded by the formats of the registry; whole numbers in
groups by a search for each group's scale (`fewbits.export.whole_numbers`). What a scheme does to activations
is for the engine to do while it runs; two schemes need the largest activation of each linear on calibration
text, and keep it in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.export.codec import Codec, Linear, Model, check_weight
from fewbits.export.compressed import group_of, import_compressed_tensors, reader_name
from fewbits.export.whole_numbers import codes_of, grouping, rounded
from fewbits.formats import E4M3, E4M3_128X128, E4M3_ROW, INT8, MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4
from fewbits.formats.base import Format, Packed
from fewbits.formats.compressed_tensors import PARTS, to_compressed_tensors


@dataclass(frozen=True)
class Scheme:
    """One way of storing linears.

    Attributes:
        preset: the package's name for it.
        form: its name for the packing.
        bits: of whole numbers in groups with searched scales; 0 where ``format`` rounds.
        zero_point: those groups may lie unevenly around zero.
        format: rounds the weights; None for searched scales.
        input_scale: the tensor that keeps a scale of activations measured beforehand; "" for none.
    """

    preset: str
    form: str
    bits: int = 0
    zero_point: bool = False
    format: Format | None = None
    input_scale: str = ""


_DIVIDED = replace(NVFP4, divides=True)
_PACKED, _FLOAT, _NV, _MX4, _MX6, _MX8 = (
    "pack-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
SCHEMES = {
    **{f"w{bits}a16": Scheme(f"W{bits}A16", _PACKED, bits=bits) for bits in (2, 3, 4, 5, 6, 7, 8)},
    "w4a16_asym": Scheme("W4A16_ASYM", _PACKED, bits=4, zero_point=True),
    "w4a8": Scheme("W4A8", _PACKED, bits=4),
    "w4afp8": Scheme("W4AFP8", _PACKED, bits=4),
    "w8a8": Scheme("W8A8", "int-quantized", format=INT8),
    "fp8": Scheme("FP8", _FLOAT, format=E4M3, input_scale="input_scale"),
    "fp8_dynamic": Scheme("FP8_DYNAMIC", _FLOAT, format=E4M3_ROW),
    "fp8_block": Scheme("FP8_BLOCK", _FLOAT, format=E4M3_128X128),
    "nvfp4": Scheme("NVFP4", _NV, format=_DIVIDED, input_scale="input_global_scale"),
    "nvfp4a16": Scheme("NVFP4A16", _NV, format=_DIVIDED),
    "mxfp4a16": Scheme("MXFP4A16", _MX4, format=MXFP4),
    "mxfp4": Scheme("MXFP4", _MX4, format=MXFP4),
    "mxfp6a16": Scheme("MXFP6A16", _MX6, format=MXFP6_E2M3),
    "mxfp6a8": Scheme("MXFP6A8", _MX6, format=MXFP6_E2M3),
    "mxfp8a16": Scheme("MXFP8A16", _MX8, format=MXFP8_E4M3),
    "mxfp8": Scheme("MXFP8", _MX8, format=MXFP8_E4M3),
}
_LARGEST_NVFP4 = 448.0 * 6.0  # what the largest value of a tensor becomes under both levels of scales


class CompressedCodec(Codec):
    """One scheme over one model: writes a weight's tensors, and reads them back by the package.

    Args:
        key: of `SCHEMES`.
        model: the linears.

    Raises:
        BadInput: there is no such scheme.
        Unsupported: the scheme's blocks do not fit the model's rows; the package is missing.
    """

    parts = PARTS

    def __init__(self, key: str, model: Model) -> None:
        if key not in SCHEMES:
            raise BadInput(
                f"there is no scheme {key!r} of compressed-tensors here; it is one of {', '.join(SCHEMES)}."
            )
        package = import_compressed_tensors()
        self.scheme, self.dtype = SCHEMES[key], model.dtype
        if not package.quantization.is_preset_scheme(self.scheme.preset):
            raise Unsupported(
                f"{reader_name()} does not know {self.scheme.preset}; install a newer one, with pip install "
                "-U compressed-tensors."
            )
        self.kind, self.label = self.scheme.preset, f"compressed-tensors {self.scheme.preset}"
        self.reader, self.wants_inputs = reader_name(), bool(self.scheme.input_scale)
        self.takes_inputs = bool(self.scheme.bits)
        self.format = self.scheme.format
        self.shares_scale = self.format is not None and _has_one_scale(self.format)
        columns = [K for _, K in model.shapes.values()]
        own = {sizes[1] for f in model.formats if (sizes := grouping(f)) and sizes[0] == self.scheme.bits}
        usable = len(own) == 1 and all(n % (next(iter(own)) or n) == 0 for n in columns)
        self.group = next(iter(own)) if usable else group_of(columns)
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

    def keeps(self, linear: Linear) -> bool:
        """True if the linear is packed so already, and what runs as one with it shares its scale."""
        packed = linear.packed
        if packed is None:
            return False
        if self.scheme.bits:
            codes = codes_of(packed)
            columns = linear.weight.shape[1]
            return (
                codes is not None
                and codes.index is None
                and (codes.bits, codes.group) == (self.scheme.bits, self.group or columns)
                and (self.scheme.zero_point or codes.is_symmetric)
                and codes.fits(self.dtype)
            )
        same = self.format is not None and _same(packed.format, self.format)
        return same and _share(packed, linear.alike)

    def write(self, linear: Linear) -> dict[str, Tensor]:
        """One linear's tensors, of W (N, K); see `Codec.write`."""
        check_weight(linear)
        tensors = (
            self._whole_numbers(linear) if self.scheme.bits else to_compressed_tensors(self._packed(linear))
        )
        if self.scheme.input_scale:
            largest = linear.input_absmax
            if not largest:
                raise Unsupported(
                    f"{linear.name} was never reached by the calibration text, or only by zeros, so there is "
                    "no scale for its inputs; give other text."
                )
            value = largest / 448.0 if self.scheme.preset == "FP8" else _LARGEST_NVFP4 / largest
            tensors[self.scheme.input_scale] = torch.tensor([value], dtype=torch.float32)
        return tensors

    def read(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight (N, K) float32 that the package decodes."""
        wide = {n: t for n, t in parts.items() if not n.startswith("input_")}
        if wide["weight_scale"].dtype in (torch.float16, torch.bfloat16):
            wide["weight_scale"] = wide["weight_scale"].float()
        weight: Tensor = self._package().decompress(wide, self.describe())["weight"]
        return weight.float()

    def _whole_numbers(self, linear: Linear) -> dict[str, Tensor]:
        codes = codes_of(linear.packed) if self.keeps(linear) else None
        if codes is None:
            group = self.group or linear.weight.shape[1]
            codes = rounded(
                linear.weight,
                self.scheme.bits,
                group,
                self.dtype,
                zero_point=self.scheme.zero_point,
                importance=linear.importance,
            )
        scales = codes.scales.to(self.dtype)
        tensors = {"weight": codes.decoded(scales), "weight_scale": scales.float()}
        if self.scheme.zero_point:
            tensors["weight_zero_point"] = codes.zeros.to(torch.int8)
        return {**self._package().compress(tensors, self.describe()), "weight_scale": scales}

    def _packed(self, linear: Linear) -> Packed:
        """The weight in the scheme's format, under one scale for what runs as one."""
        assert self.format is not None
        if linear.packed is not None and self.keeps(linear):
            return _divided(linear.packed)
        return self.format.quantize_under(linear.weight, linear.absmax or None)

    def _package(self) -> Any:
        registry = import_compressed_tensors().compressors.BaseCompressor
        return registry.get_value_from_registry(self.scheme.form)


def _has_one_scale(format: Format) -> bool:
    """True if a scale stands for the whole tensor, alone or above those of the blocks."""
    return format.contract.tensor_scale or format.contract.block == (0, 0)


def _same(format: Format, target: Format) -> bool:
    """True if both decode by the same rule, whatever their names and however they round."""
    one, other = format.contract, target.contract
    if one.coding is not None or other.coding is not None:
        return one.coding == other.coding
    both_levels = one.tensor_scale and other.tensor_scale and one.block == other.block
    return format == target or both_levels


def _one_scale(packed: Packed) -> str:
    """The name of the part that stands for the whole tensor."""
    return next((part for part in packed.parts if part not in ("codes", "scales")), "scales")


def _share(packed: Packed, alike: tuple[Packed, ...] | None) -> bool:
    """True if linears that run as one have one scale for the whole of them, where the format has such."""
    if not _has_one_scale(packed.format):
        return True
    part = _one_scale(packed)
    return alike is not None and all(
        part in other.parts and torch.equal(other.parts[part], packed.parts[part]) for other in alike
    )


def _divided(packed: Packed) -> Packed:
    """NVFP4 with the inverse of the tensor's scale, as this library stores it; any other as it is."""
    if not packed.format.contract.tensor_scale or packed.format.contract.stored_as:
        return packed
    scale = _one_scale(packed)
    parts = {name: tensor for name, tensor in packed.parts.items() if name != scale}
    parts[_DIVIDED.whole_scale] = 1.0 / packed.parts[scale]
    return replace(packed, format=_DIVIDED, parts=parts)
