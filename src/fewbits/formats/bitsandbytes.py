"""bitsandbytes' serialised layouts: 4 bits both ways, 8 bits read; bitsandbytes itself is not needed.

A weight named ``weight`` is stored under these keys:

* ``weight``: (ceil(n / 2), 1) uint8, the first code of a byte in the high nibble (ours: the low one); *
``weight.absmax``: the block scales, float32, or uint8 if they are double-quantised; * ``weight.quant_map``:
the 16 values; * ``weight.nested_absmax``, ``weight.nested_quant_map``: second-level scales and the 256
values, if double-quantised; * ``weight.quant_state.bitsandbytes__nf4`` or ``__fp4``: JSON as uint8 with the
rest (shape, dtype, block sizes, offset).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint, Unsupported
from fewbits.formats.base import Packed
from fewbits.formats.codebook import FP4, FP4_DQ, NF4, NF4_DQ, Codebook
from fewbits.formats.integer import INT8

_KINDS = {"nf4": (NF4, NF4_DQ), "fp4": (FP4, FP4_DQ)}
_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_bitsandbytes(packed: Packed, name: str = "weight") -> dict[str, Tensor]:
    """The tensors under which bitsandbytes saves this weight (N, K).

    Raises:
        Unsupported: a format other than NF4 and FP4, or a dtype that bitsandbytes does not know.
    """
    format = packed.format
    kind, coding = format.contract.names.get("bitsandbytes"), format.contract.coding
    if kind is None or coding is None:
        raise Unsupported(f"bitsandbytes has no 4-bit form of {format.name!r}; quantise to nf4 or fp4.")
    dtype = str(packed.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise Unsupported(
            f"bitsandbytes keeps float32, float16 and bfloat16 weights, not {dtype}; convert it first."
        )
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": coding.block[1],
        "dtype": dtype,
        "shape": list(packed.shape),
    }
    device = packed.codes.device
    tensors = {
        name: swap_nibbles(packed.codes).reshape(-1, 1),
        f"{name}.absmax": packed.scales.reshape(-1).clone(),
        f"{name}.quant_map": torch.tensor(coding.values, device=device, dtype=torch.float32),
    }
    if coding.scale_block:
        state["nested_blocksize"] = coding.scale_block
        state["nested_dtype"] = "float32"
        state["nested_offset"] = packed.parts["scale_offset"].item()
        tensors[f"{name}.nested_absmax"] = packed.parts["scale_scales"].clone()
        tensors[f"{name}.nested_quant_map"] = torch.tensor(
            coding.scale_values, device=device, dtype=torch.float32
        )
    tensors[name + _STATE + kind] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def from_bitsandbytes(tensors: Mapping[str, Tensor], name: str = "weight") -> Packed:
    """The weight called ``name`` among ``tensors``, as it was saved.

    It may have any shape, which stands in the state that was saved beside it.

    The format is `NF4`, `NF4_DQ`, `FP4` or `FP4_DQ`, with other fields where the checkpoint says so: its
    block sizes, or an 8-bit map with other values.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: a table that is neither NF4's nor FP4's.
    """
    kind = next((k for k in _KINDS if name + _STATE + k in tensors), None)
    if kind is None:
        raise BadCheckpoint(
            f"{name!r} has no bitsandbytes 4-bit state beside it; load it as an ordinary tensor."
        )
    try:
        state = json.loads(bytes(tensors[name + _STATE + kind].cpu().tolist()))
        shape, dtype = tuple(int(s) for s in state["shape"]), _DTYPES[state["dtype"]]
        format, parts = _format(kind, state, tensors, name)
        parts["codes"] = swap_nibbles(tensors[name].contiguous().view(torch.uint8).reshape(-1))
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"the bitsandbytes state of {name!r} is damaged ({error}); fetch it again."
        ) from error
    layout = format.layout(shape)
    for part, spec in layout.items():
        if parts[part].numel() != prod(spec.shape):
            raise BadCheckpoint(
                f"{name!r} says shape {shape}, but its {part} hold {parts[part].numel()} values instead of "
                f"{prod(spec.shape)}; fetch the file again."
            )
    return Packed(
        format,
        shape,
        dtype,
        {part: parts[part].to(spec.dtype).reshape(spec.shape) for part, spec in layout.items()},
    )


def from_int8(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Packed:
    """A weight of ``LLM.int8()``: codes int8 (N, K) as ``weight``, each row's largest magnitude as ``SCB``.

    Args:
        tensors: both, by these names, and ``weight_format``.
        name: of the linear, for messages.
        dtype: of the layer.

    Raises:
        BadCheckpoint: parts are missing or do not fit together.
        Unsupported: the codes are in the order of a GPU's tiles, as versions before 0.46 could save them.
    """
    codes, largest, order = tensors.get("weight"), tensors.get("SCB"), tensors.get("weight_format")
    if order is not None and int(order.flatten()[0]):
        raise Unsupported(
            f"{name} holds 8-bit codes in the order of a GPU's tiles; open the model with the bitsandbytes "
            "that saved it and save it again, or use the original."
        )
    if codes is None or largest is None or codes.dtype != torch.int8 or largest.numel() != codes.shape[0]:
        raise BadCheckpoint(
            f"{name} has no int8 weight with a scale for each of its rows; fetch the file again."
        )
    parts = {"codes": codes.contiguous(), "scales": (largest.float() / 127.0).reshape(-1, 1).contiguous()}
    shape = tuple(codes.shape)
    return Packed(INT8, shape, dtype, {n: parts[n].reshape(s.shape) for n, s in INT8.layout(shape).items()})


def swap_nibbles(codes: Tensor) -> Tensor:
    """Exchange the two 4-bit codes in each byte: between bitsandbytes' order and ours.

    ``codes`` are uint8 of any shape, which the result shares.
    """
    return (codes >> 4) | (codes << 4)


def _format(
    kind: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str
) -> tuple[Codebook, dict[str, Tensor]]:
    """The format, and the parts that belong to the scales."""
    double = f"{name}.nested_absmax" in tensors
    format = dataclasses.replace(_KINDS[kind][double], block=int(state["blocksize"]))
    values = tensors[f"{name}.quant_map"].cpu().float()
    # the decimals of NF4 differ in their last digit among old versions; codes mean the same
    if values.shape != (16,) or not torch.allclose(
        values, torch.tensor(format.values, dtype=torch.float32), rtol=0, atol=1e-3
    ):
        raise Unsupported(
            f"{name!r} uses a 4-bit table that is not {kind}; quantise the original weights instead."
        )
    parts = {"scales": tensors[f"{name}.absmax"]}
    if double:
        scale_values = tuple(tensors[f"{name}.nested_quant_map"].cpu().float().tolist())
        parts["scale_scales"] = tensors[f"{name}.nested_absmax"]
        parts["scale_offset"] = torch.tensor(
            [float(state["nested_offset"])], device=parts["scales"].device, dtype=torch.float32
        )
        format = dataclasses.replace(
            format,
            scale_block=int(state["nested_blocksize"]),
            scale_values=None if scale_values == format.scale_table else scale_values,
        )
    return format, parts
