"""The layouts of GPTQ (both versions) and AWQ ("gemm"): whole numbers in groups, packed into 32-bit words.

What the tensors are is said in `fewbits.formats.gptq` and `fewbits.formats.awq`, which read them. Their
libraries are none of ours (they are built for a GPU), so these exports are read back by those readers, which
are tested against the documented layouts, and the receipt says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadInput, Unsupported
from fewbits.export.codec import Codec, Linear, Model, check_weight
from fewbits.export.whole_numbers import Codes, codes_of, grouping, has_zero_points, rounded
from fewbits.formats import awq, gptq
from fewbits.formats.bits import pack_bits

GPTQ, GPTQ_V2, AWQ = "gptq", "gptq_v2", "awq"
DEFAULTS = {GPTQ: "int4_g128", GPTQ_V2: "int4_g128", AWQ: "int4_g128_zp"}
_NAME = re.compile(r"int(?P<bits>[2348])(_g(?P<group>\d+))?(?P<zero>_zp)?")
_GROUPS = (128, 64, 32)


class WordsCodec(Codec):
    """GPTQ's or AWQ's layout over one model.

    Args:
        layout: one of `DEFAULTS`.
        method: whole numbers in groups, such as "int4_g128_zp"; "" for the layout's usual ones. If the model
            is packed in whole numbers of that width already, its own groups are taken.
        model: the linears.

    Raises:
        BadInput: no such method in this layout.
        Unsupported: the model's sizes do not fill the layout's words or groups.
    """

    takes_inputs = True

    def __init__(self, layout: str, method: str, model: Model) -> None:
        self.layout = layout
        self.bits, self.group, self.zero_point = _sizes(layout, method, model)
        self.by_order = any(f.contract.indexed is not None for f in model.formats) and layout != AWQ
        name = "AWQ" if layout == AWQ else f"GPTQ version {1 + int(layout == GPTQ_V2)}"
        group = f"groups of {self.group}" if self.group else "rows"
        self.kind = f"INT{self.bits}"
        self.label = f"{name}, {self.kind} in {group}{', zero points' if self.zero_point else ''}"
        self.reader = f"fewbits' reader of that layout ({name.split()[0]}'s library is built for GPUs)"
        self.parts = awq.PARTS if layout == AWQ else gptq.PARTS
        for linear, (N, K) in model.shapes.items():
            self._check_size(linear, N, K)

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        shared = {"bits": self.bits, "group_size": self.group or -1}
        if self.layout == AWQ:
            return {
                "quant_method": "awq",
                **shared,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        return {
            "quant_method": "gptq",
            **shared,
            "sym": not self.zero_point,
            "desc_act": self.by_order,
            "checkpoint_format": self.layout,
            "lm_head": False,
            "true_sequential": True,
            "pack_dtype": "int32",
        }

    def keeps(self, linear: Linear) -> bool:
        """True if the linear is packed in whole numbers of this width and these groups."""
        codes = codes_of(linear.packed)
        if codes is None or codes.bits != self.bits or not codes.fits(torch.float16):
            return False
        if codes.index is not None:
            return self.by_order and codes.group == self.group
        lowest = bool((codes.zeros == -(2 ** (self.bits - 1))).any())
        symmetric = self.zero_point or codes.is_symmetric
        return (
            codes.group == (self.group or linear.weight.shape[1])
            and symmetric
            and not (lowest and self.layout == GPTQ)
        )

    def write(self, linear: Linear) -> dict[str, Tensor]:
        """The linear's tensors, of W (N, K); see `Codec.write`."""
        check_weight(linear)
        codes = codes_of(linear.packed) if self.keeps(linear) else None
        if codes is None:
            columns = linear.weight.shape[1]
            codes = rounded(
                linear.weight,
                self.bits,
                self.group or columns,
                torch.float16,
                zero_point=self.zero_point,
                importance=linear.importance,
            )
        if not bool(codes.scales.half().isfinite().all()):
            raise Unsupported(
                f"{linear.name} has scales above float16's range, in which this layout keeps them; export it "
                "to compressed-tensors."
            )
        return to_awq(codes) if self.layout == AWQ else to_gptq(codes, 1 + int(self.layout == GPTQ_V2))

    def read(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight (N, K) float32 that the layout stands for."""
        read = awq.from_awq if self.layout == AWQ else gptq.from_gptq
        return read(parts, name, self.config(), torch.float32).dequantize(torch.float32)

    def _check_size(self, name: str, N: int, K: int) -> None:
        odd = N * self.bits % 32 or (self.layout != AWQ and K * self.bits % 32)
        if odd or (self.group and K % self.group):
            group = f" and groups of {self.group}" if self.group else ""
            raise Unsupported(
                f"{name} is {N} x {K}, which does not fill this layout's 32-bit words{group}; export to "
                "compressed-tensors (vLLM, SGLang, transformers) or GGUF (llama.cpp)."
            )


def _sizes(layout: str, method: str, model: Model) -> tuple[int, int, bool]:
    """(bits, group or 0 for a row, zero points) of what is written."""
    name = method or DEFAULTS[layout]
    match = _NAME.fullmatch(name)
    if match is None or (layout == AWQ and match["bits"] != "4"):
        choices = "int4 in groups" if layout == AWQ else "int2, int3, int4 and int8 in groups or rows"
        raise BadInput(
            f"{layout}:{name} names no format of that layout, which has {choices}: write such as "
            f"{layout}:{DEFAULTS[layout]}."
        )
    bits, zero_point = int(match["bits"]), match["zero"] is not None
    group = int(match["group"] or 0)
    if not method:
        own = {sizes for f in model.formats if (sizes := grouping(f)) is not None and sizes[0] == bits}
        if len(own) == 1:
            group = next(iter(own))[1]
            zero_point = zero_point or has_zero_points(model)
        else:
            columns = {K for _, K in model.shapes.values()}
            group = next((size for size in _GROUPS if all(K % size == 0 for K in columns)), 0)
    return bits, group, zero_point or layout == AWQ


def to_gptq(codes: Codes, version: int) -> dict[str, Tensor]:
    """The tensors in which GPTQ's libraries save these codes; see `fewbits.formats.gptq`."""
    bits, half = codes.bits, 2 ** (codes.bits - 1)
    K = codes.values.shape[1]
    index = torch.arange(K) // codes.group if codes.index is None else codes.index
    zeros = (codes.zeros + half - int(version == 1)) % 2**bits
    unsigned = (codes.values + half).to(torch.uint8)
    return {
        "qweight": _words(pack_bits(unsigned, bits)).t().contiguous(),
        "qzeros": _words(pack_bits(zeros.t().to(torch.uint8).contiguous(), bits)),
        "scales": codes.scales.t().half().contiguous(),
        "g_idx": index.int(),
    }


def to_awq(codes: Codes) -> dict[str, Tensor]:
    """The tensors in which AWQ saves these 4-bit codes of W (N, K); see `fewbits.formats.awq`."""
    return {
        "qweight": _interleaved((codes.values + 8).t()),
        "qzeros": _interleaved((codes.zeros + 8).t()),
        "scales": codes.scales.t().half().contiguous(),
    }


def _interleaved(codes: Tensor) -> Tensor:
    """(R, N) of 0 to 15 to (R, N / 8) int32: nibble i of a word holds column ``awq.ORDER[i]`` of eight."""
    eights = codes.reshape(codes.shape[0], -1, 8)[:, :, list(awq.ORDER)].flatten(1).to(torch.uint8)
    return _words(pack_bits(eights.contiguous(), 4))


def _words(stream: Tensor) -> Tensor:
    """(R, bytes) uint8 to (R, words) int32."""
    return stream.reshape(-1).view(torch.int32).reshape(stream.shape[0], -1)
