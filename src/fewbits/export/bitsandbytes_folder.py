"""bitsandbytes: folders that transformers opens with that library, in 4 bits (nf4, fp4) and 8 (int8)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.export.codec import Codec, Linear, Model, check_weight
from fewbits.formats import FP4, FP4_DQ, INT8, NF4, NF4_DQ
from fewbits.formats.base import Packed
from fewbits.formats.bitsandbytes import to_bitsandbytes

_FOUR_BITS = {"nf4": NF4, "nf4_dq": NF4_DQ, "fp4": FP4, "fp4_dq": FP4_DQ}
METHODS = (*_FOUR_BITS, "int8")
_STATE = "weight.quant_state.bitsandbytes__"
_BYTES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def import_bitsandbytes() -> Any:
    """The package ``bitsandbytes``.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        import bitsandbytes
        import bitsandbytes.functional
    except ImportError as error:
        raise Unsupported(
            "an export to bitsandbytes is read back by that package, which is not installed; run: "
            "pip install 'fewbits[export]'."
        ) from error
    return bitsandbytes


class BitsAndBytesCodec(Codec):
    """One of `METHODS` over one model.

    Args:
        method: "nf4" if empty; a model that is packed in another of these gives that one.
        model: the linears.

    Raises:
        BadInput: there is no such method.
        Unsupported: bitsandbytes is missing.
    """

    def __init__(self, method: str, model: Model) -> None:
        own = [name for name, format in _FOUR_BITS.items() if format in model.formats]
        method = method or (own[0] if len(own) == 1 else "nf4")
        if method not in METHODS:
            raise BadInput(f"bitsandbytes has no format {method!r}; it is one of {', '.join(METHODS)}.")
        import_bitsandbytes()
        self.method, self.dtype = method, model.dtype
        self.kind, self.label = method.upper(), f"bitsandbytes {method}"
        self.reader = f"bitsandbytes {version('bitsandbytes')}"
        self.parts = (
            "weight",
            "SCB",
            "weight_format",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            f"{_STATE}nf4",
            f"{_STATE}fp4",
        )

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json, as transformers' own class writes it."""
        from transformers import BitsAndBytesConfig

        if self.method == "int8":
            return dict(BitsAndBytesConfig(load_in_8bit=True).to_dict())
        kind, _, double = self.method.partition("_")
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=bool(double),
            bnb_4bit_compute_dtype=_BYTES.get(self.dtype, "float32"),
        )
        return dict(settings.to_dict())

    def keeps(self, linear: Linear) -> bool:
        """True if the linear is packed so already."""
        contract = None if linear.packed is None else linear.packed.format.contract
        coding = None if contract is None else contract.coding
        if contract is None or coding is None:
            return False
        if self.method == "int8":
            return coding == INT8.contract.coding
        kind, _, double = self.method.partition("_")
        return contract.names.get("bitsandbytes") == kind and bool(coding.scale_block) == bool(double)

    def write(self, linear: Linear) -> dict[str, Tensor]:
        """One linear's tensors, of W (N, K); see `Codec.write`."""
        check_weight(linear)
        format = INT8 if self.method == "int8" else _FOUR_BITS[self.method]
        packed = linear.packed if linear.packed is not None and self.keeps(linear) else None
        packed = (format.quantize(linear.weight) if packed is None else packed).to("cpu")
        if self.method == "int8":
            scales = packed.scales.reshape(-1).float() * 127.0
            return {
                "weight": packed.codes,
                "SCB": scales,
                "weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        dtype = self.dtype if self.dtype in _BYTES else torch.float32
        return to_bitsandbytes(Packed(packed.format, packed.shape, dtype, packed.parts))

    def read(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight (N, K) float32 that bitsandbytes decodes."""
        functional = import_bitsandbytes().functional
        if self.method == "int8":
            weight: Tensor = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
            return weight.float()
        stored = {part: tensor for part, tensor in parts.items() if part != "weight"}
        state = functional.QuantState.from_dict(stored, device=torch.device("cpu"))
        decoded: Tensor = functional.dequantize_4bit(parts["weight"], state)
        return decoded.float()
