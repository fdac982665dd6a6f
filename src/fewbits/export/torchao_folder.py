"""torchao: folders that transformers opens through ``TorchAoConfig``, in the tensors of torchao's classes.

Weights alone are rounded: FP8 or INT8 by row, whole numbers of 2 to 8 bits in groups (which torchao keeps as
one byte a code until its own kernels repack them). The tensors are made by torchao's classes and taken apart
by its own writer, one linear at a time; its header says for each tensor how it is put together again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.export.codec import Codec, Linear, Model, check_weight
from fewbits.export.whole_numbers import Codes, codes_of, grouping, has_zero_points, rounded

_NAME = re.compile(r"int(?P<bits>[2-8])(_g(?P<group>\d+))?(?P<zero>_zp)?")
_TENSOR = json.dumps({"_type": "Tensor"})
DEFAULT = "int8"


def import_torchao() -> Any:
    """The package ``torchao``, with its writer for safetensors.

    Raises:
        Unsupported: it is not installed, or older than that writer.
    """
    try:
        import torchao
        import torchao.prototype.safetensors.safetensors_support
        import torchao.quantization
        import torchao.quantization.granularity
    except ImportError as error:
        raise Unsupported(
            "an export to torchao is made by the package torchao, from 0.17 on, which is not installed; run: "
            "pip install 'torchao>=0.17'."
        ) from error
    return torchao


class TorchaoCodec(Codec):
    """One of torchao's weight-only formats over one model.

    Args:
        method: "float8", "int8" (by row), or whole numbers in groups such as "int4_g128_zp".
        model: the linears.

    Raises:
        BadInput: there is no such method.
        Unsupported: torchao is missing, or the rows do not fill the groups.
    """

    parts = ("_weight_qdata", "_weight_scale", "_weight_zero_point")

    def __init__(self, method: str, model: Model) -> None:
        self.method, self.dtype = method or DEFAULT, model.dtype
        match = _NAME.fullmatch(self.method)
        if self.method != "float8" and match is None:
            raise BadInput(
                f"torchao has no format {self.method!r} here; write float8, int8, or int2 to int8 in groups, "
                "such as int4_g128."
            )
        import_torchao()
        self.bits = 0 if match is None else int(match["bits"])
        self.group = 0 if match is None else int(match["group"] or 0)
        self.zero_point = match is not None and match["zero"] is not None
        self.is_plain_int8 = self.method == DEFAULT
        self.takes_inputs = bool(self.bits) and not self.is_plain_int8
        if self.bits and not self.is_plain_int8 and any(grouping(f) for f in model.formats):
            self.zero_point = self.zero_point or has_zero_points(model)
        odd = next((n for n, (_, K) in model.shapes.items() if self.group and K % self.group), None)
        if odd is not None:
            raise Unsupported(
                f"{odd} has rows of {model.shapes[odd][1]} values, which groups of {self.group} do not fill; "
                "write torchao:int8."
            )
        self.kind, self.label = self.method.upper(), f"torchao {self.method}"
        self.reader = f"torchao {version('torchao')}"
        self._headers: dict[str, str] = {}
        self._names: dict[str, None] = {}  # of all tensors, in the order of the files

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json, as transformers' own class writes it."""
        from transformers import TorchAoConfig

        settings = TorchAoConfig(self._quantization(), modules_to_not_convert=["lm_head"]).to_dict()
        return {**settings, "quant_method": "torchao"}

    def keeps(self, linear: Linear) -> bool:
        """True if the linear is packed in whole numbers of this width and these groups."""
        codes = codes_of(linear.packed) if self.bits else None
        columns = linear.weight.shape[1]
        return (
            codes is not None
            and codes.index is None
            and (codes.bits, codes.group) == (self.bits, self.group or columns)
            and (codes.is_symmetric or (self.zero_point and not self.is_plain_int8))
            and (self.is_plain_int8 or codes.fits(self.dtype))
        )

    def write(self, linear: Linear) -> dict[str, Tensor]:
        """One linear's tensors, of W (N, K); see `Codec.write`."""
        check_weight(linear)
        if self.bits and not self.is_plain_int8:
            tensor = self._in_groups(linear)
        elif self.keeps(linear):
            tensor = self._int8_of(linear)
        else:
            tensor = self._by_torchao(linear.weight)
        support = import_torchao().prototype.safetensors.safetensors_support
        name = f"{linear.name}.weight"
        tensors, headers = support.flatten_tensor_state_dict({name: tensor})
        self._headers[name] = headers[name]
        return {n.removeprefix(f"{linear.name}."): t for n, t in tensors.items()}

    def read(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight (N, K) float32 that torchao decodes."""
        support = import_torchao().prototype.safetensors.safetensors_support
        stored = {f"{name}.{part}": tensor for part, tensor in parts.items()}
        weight = f"{name}.weight"
        headers = {weight: self._headers[weight], "tensor_names": json.dumps([weight])}
        tensors, _ = support.unflatten_tensor_state_dict(stored, headers)
        decoded: Tensor = tensors[weight].dequantize()
        return decoded.float()

    def metadata(self, names: Collection[str]) -> dict[str, str]:
        """How torchao's tensors are put together again, and which are plain: torchao's own words.

        Readers join the headers of all files, and of ``tensor_names`` keep the last file's: it names all.
        """
        packed = {n for n in self._headers if f"{n.removesuffix('weight')}_weight_qdata" in names}
        plain = {n for n in names if "._weight_" not in n}
        entries = {n: self._headers[n] for n in sorted(packed)} | dict.fromkeys(sorted(plain), _TENSOR)
        self._names.update(dict.fromkeys(entries))
        return {"format": "pt", **entries, "tensor_names": json.dumps(list(self._names))}

    def _quantization(self) -> Any:
        quantization = import_torchao().quantization
        if self.method == "float8":
            return quantization.Float8WeightOnlyConfig(granularity=quantization.PerRow())
        if self.is_plain_int8:
            return quantization.Int8WeightOnlyConfig(version=2)
        grain = quantization.granularity
        return quantization.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{self.bits}"),
            granularity=grain.PerGroup(self.group) if self.group else grain.PerAxis(0),
            mapping_type=quantization.MappingType.ASYMMETRIC
            if self.zero_point
            else quantization.MappingType.SYMMETRIC,
        )

    def _by_torchao(self, weight: Tensor) -> Any:
        """The tensor that torchao itself makes of a weight."""
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=self.dtype)
        linear.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        import_torchao().quantization.quantize_(linear, self._quantization())
        return linear.weight.data

    def _int8_of(self, linear: Linear) -> Any:
        """torchao's tensor of INT8 codes that are there already."""
        tensor = self._by_torchao(linear.weight)
        codes = codes_of(linear.packed)
        assert codes is not None
        tensor.qdata.copy_(codes.values.to(torch.int8))
        tensor.scale.copy_(codes.scales.to(tensor.scale.dtype).view_as(tensor.scale))
        return tensor

    def _in_groups(self, linear: Linear) -> Any:
        codes = codes_of(linear.packed) if self.keeps(linear) else None
        group = self.group or linear.weight.shape[1]
        if codes is None:
            codes = rounded(
                linear.weight,
                self.bits,
                group,
                self.dtype,
                zero_point=self.zero_point,
                importance=linear.importance,
            )
        return self._tensor(codes, group)

    def _tensor(self, codes: Codes, group: int) -> Any:
        kind = import_torchao().quantization.IntxUnpackedToInt8Tensor
        return kind(
            qdata=codes.values.to(torch.int8),
            scale=codes.scales.to(self.dtype),
            zero_point=codes.zeros.to(torch.int8),
            target_dtype=getattr(torch, f"int{self.bits}"),
            block_size=(1, group),
            dtype=self.dtype,
            activation_quantization=None,
        )
