"""How a gradient lies in its messages; gradient_codec.py says what is done with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.errors import Unsupported
from fewbits.formats.base import Format, Packed
from fewbits.formats.contract import Coding
from fewbits.formats.float8 import E4M3_1X128
from fewbits.formats.integer import INT4_G64, INT8_G128

_BLOCKS = (32, 64, 128, 256, 512, 1024)
# By what a code is and its bits: the format in which gradients travel, where the given one has other blocks.
_TRAVELS = {("whole", 8): INT8_G128, ("whole", 4): INT4_G64, ("e4m3", 8): E4M3_1X128}


def wire_format(format: Format) -> Format:
    """The format in which gradients travel: that of ``format``'s codes, with blocks along a row.

    Formats with one scale a row or a tensor get blocks of 128 values, INT4 of 64: a bucket of gradients holds
    many tensors of unlike size.

    Raises:
        Unsupported: another family of formats; gradients travel in INT8, INT4 or FP8 E4M3.
    """
    coding = format.contract.coding
    travels = None if coding is None else _TRAVELS.get((coding.kind, coding.bits))
    if coding is not None and travels is not None and not coding.zero_point:
        plain = format.contract.rounds_plainly and coding.kind == "whole"
        return format if plain and coding.block[0] == 1 and coding.block[1] in _BLOCKS else travels
    raise Unsupported(
        f"gradients cannot travel in {format.name}; choose int8, int4 or float8_e4m3 for communication."
    )


@dataclass(frozen=True)
class Wire:
    """How one row of a gradient lies in its message.

    Attributes:
        format: from `wire_format`.
        row: values of a row.
        plain: float32 values behind the scales that travel as they are.
    """

    format: Format
    row: int
    plain: int = 0

    @property
    def coding(self) -> Coding:
        """How the codes stand for numbers."""
        coding = self.format.contract.coding
        assert coding is not None
        return coding

    @property
    def block(self) -> int:
        """Values under one scale."""
        return self.coding.block[1]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.coding.bits

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.row // self.block)

    @property
    def padded_row(self) -> int:
        """Values of a row, filled up to whole blocks."""
        return self.num_blocks * self.block

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes; the scales begin there."""
        return self.padded_row * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a message."""
        return -(-(self.code_bytes + 4 * (self.num_blocks + self.plain)) // 16) * 16

    def scales(self, message: Tensor) -> Tensor:
        """The scales in messages (W, row_bytes): a view (W, num_blocks), float32."""
        first = self.code_bytes // 4
        return message.view(torch.float32)[:, first : first + self.num_blocks]

    def plain_values(self, message: Tensor) -> Tensor:
        """The values that travel as they are: a view (W, plain), float32."""
        first = self.code_bytes // 4 + self.num_blocks
        return message.view(torch.float32)[:, first : first + self.plain]

    def empty(self, rows: int, device: torch.device | str) -> Tensor:
        """Room for the messages of ``rows`` rows, (rows, bytes) uint8; the padding at their end is 0."""
        message = torch.empty(rows, self.row_bytes, dtype=torch.uint8, device=device)
        used = self.code_bytes + 4 * (self.num_blocks + self.plain)
        message[:, used:] = 0
        return message

    def packed(self, message: Tensor) -> Packed:
        """Messages (W, row_bytes) as a packed tensor (W, padded_row)."""
        rows = message.shape[0]
        codes = message[:, : self.code_bytes]
        shape = (rows, self.padded_row)
        codes = codes.view(self.format.layout(shape)["codes"].dtype)
        parts = {"codes": codes.contiguous(), "scales": self.scales(message).contiguous()}
        return Packed(self.format, shape, torch.float32, parts)


def wire_of(format: Format, count: int, rows: int, plain: int = 0) -> Wire:
    """The wire of ``count`` values cut into ``rows`` rows of whole blocks, with ``plain`` values beside."""
    wire = Wire(wire_format(format), 0)
    blocks = -(-count // (rows * wire.block))
    return replace(wire, row=blocks * wire.block, plain=-(-plain // rows))
