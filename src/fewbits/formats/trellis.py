"""Trellis codes (QTIP, Tseng et al. 2024): neighbouring values share bits, so that few of them say much.

A code of ``bits`` bits stands at every value, and what it means depends on the codes before it: the codes of
the last ``state_bits / bits`` values, its own lowest, are one number, the state, and a table computed from
the state gives the value. Blocks of values lie along a row, and each closes upon itself: before a block's
first code stands its last (tail-biting), so that a block needs no bits but those of its codes.

    x[i] ~ scale * value(state[i])        state[i] = code[i] + code[i-1] * 2**bits + ...   (modulo the block)

    value(s) = (sum of the four bytes of (34038481 * s + 76625530) mod 2**32 - 510) / 147.8

which is nearly a normal distribution with a deviation of 1, made of one multiplication (QTIP's "1MAD"). The
codes are those with the least squared error under the block's root mean square as the scale, by the Viterbi
algorithm: once for the whole block, then once more with the state in the middle of that path as both ends.
The scale is then the best one for those codes. All in float32; ties take the smaller code.

On normally distributed values the squared error at 2 bits is about 0.07 of the variance, where the best table
of four values has 0.118 and no code can have less than 0.0625. A block with a NaN or an infinity has a NaN as
its scale and codes 0. A seed dithers the values by up to a quarter of their deviation over ``2**bits``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.formats.base import Family, Packed, is_whole
from fewbits.formats.block_format import BlockFormat, Blocks
from fewbits.formats.blocks import Block
from fewbits.formats.contract import Contract
from fewbits.formats.description import Description

_FACTOR, _TERM = 34038481, 76625530
_DEVIATION = 147.8
_AT_ONCE = 2**22  # states of all blocks that are searched together


def trellis_values(state_bits: int, device: torch.device | None = None) -> Tensor:
    """What each state stands for: (2 ** state_bits,) float32, computed on a CPU.

    A GPU divides by a number by multiplying with its inverse, which rounds otherwise.
    """
    mixed = (torch.arange(2**state_bits) * _FACTOR + _TERM) % 2**32
    total = sum((mixed >> shift) & 255 for shift in (0, 8, 16, 24))
    return ((total - 510).float() / _DEVIATION).to(device)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Trellis(BlockFormat):
    """Codes whose meaning depends on those before them.

    Attributes:
        code_bits: of a value: 1 to 4.
        state_bits: of a state, a multiple of ``code_bits``, at most 16. More lose less, and are searched for
            longer, twice as long for each bit; decoding takes the same time.
        block: (1, columns) that share a scale and close upon themselves.

    Parts: ``codes`` (..., ceil(K * code_bits / 8)) uint8, the first code in the lowest bits; ``scales``
        float32.
    """

    code_bits: int = 2
    state_bits: int = 12
    block: Block = (1, 256)

    def problem(self) -> str | None:
        """See `Format.problem`."""
        if not is_whole(self.code_bits, 1, 4):
            return f"code_bits is {self.code_bits!r}, and it is a whole number from 1 to 4"
        if not is_whole(self.state_bits, 2, 16) or self.state_bits % self.code_bits:
            return f"state_bits is {self.state_bits!r}, and it is a multiple of code_bits of at most 16"
        if super().problem() is None and (self.block[0] != 1 or self.block[1] == 0):
            return f"block is {self.block!r}, and a trellis runs along one row, such as [1, 256]"
        return super().problem()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code_bits

    def promise(self) -> Contract:
        """See `Format.promise`: of one value nothing is sure, for its neighbours have a say in it."""
        described = None
        if self.block[1] % 8 == 0 and self.state_bits <= 8 * self.code_bits:
            described = Description(
                bits=self.code_bits, kind="trellis", state_bits=self.state_bits, block=self.block
            )
        return Contract(
            largest_error=1.0,
            block=self.block,
            description=described,
            exact_scale=False,
            cuts=True,
            again="nothing",
        )

    def rounded(self, x: Blocks) -> dict[str, Tensor]:
        """See `BlockFormat.rounded`."""
        values = x.values.float()[:, 0]  # (R, C, c)
        codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
        scales = torch.zeros(values.shape[:2], dtype=torch.float32, device=values.device)
        for at, length in self._stretches(x.shape):
            blocks = values[:, at, :length].reshape(-1, length)
            uniform = None if x.uniform is None else x.uniform[:, 0, at, :length].reshape(-1, length)
            of_blocks, of_scales = self._searched(blocks, uniform)
            shape = (values.shape[0], -1, length)
            codes[:, at, :length] = of_blocks.view(shape)
            scales[:, at] = of_scales.view(shape[:2])
        return {"codes": codes[:, None], "scales": scales[:, None, :, None]}

    def decoded(self, codes: Tensor, scales: Tensor, packed: Packed) -> Tensor:
        """See `BlockFormat.decoded`."""
        table = trellis_values(self.state_bits, codes.device)
        values = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device)
        for at, length in self._stretches(packed.shape):
            values[:, 0, at, :length] = table[self._states(codes[:, 0, at, :length])]
        return values * scales

    def _stretches(self, shape: tuple[int, ...]) -> list[tuple[slice, int]]:
        """The blocks of a row that have one length, and that length: all but a short last one, then it."""
        columns = shape[-1] if shape else 1
        whole, rest = divmod(columns, self.block[1])
        stretches = [(slice(0, whole), self.block[1])] if whole else []
        return [*stretches, (slice(whole, whole + 1), rest)] if rest else stretches

    def _states(self, codes: Tensor) -> Tensor:
        """The states (..., n) int64 of codes (..., n), each block closed upon itself."""
        states = torch.zeros(codes.shape, dtype=torch.int64, device=codes.device)
        for back in range(self.state_bits // self.code_bits):
            states |= codes.long().roll(back, -1) << (back * self.code_bits)
        return states

    def _searched(self, blocks: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes (B, n) uint8 and scales (B,) of blocks (B, n) float32."""
        scales = blocks.double().square().mean(-1).sqrt().float()
        is_bad = ~blocks.isfinite().all(-1)
        units = (blocks / scales.clamp_min(1e-38)[:, None]).nan_to_num(0.0, 0.0, 0.0)
        if uniform is not None:
            units = units + (uniform - 0.5) * 0.5 / 2**self.code_bits
        step = max(_AT_ONCE >> self.state_bits, 1)
        codes = torch.cat([self._path(part) for part in units.split(step)])
        values = trellis_values(self.state_bits, blocks.device)[self._states(codes)]
        # In float64, so that the order of a device's sums does not show.
        units, values = units.double(), values.double()
        fit = (units * values).sum(-1) / values.square().sum(-1).clamp_min(1e-12)
        scales = (scales * fit.float()).masked_fill(is_bad, torch.nan)
        return codes.masked_fill(is_bad[:, None], 0), scales

    def _path(self, units: Tensor) -> Tensor:
        """The codes (B, n) of a closed path with little squared error."""
        memory, n = self.state_bits // self.code_bits - 1, units.shape[1]
        if n <= memory + 1:
            return self._every_path(units)
        turn = n // 2
        open_codes = self._viterbi(units.roll(-turn, -1), None)
        # In rolled order the block's first value stands at n - turn: what precedes it becomes both ends.
        before = open_codes[:, n - turn - memory : n - turn] if n - turn >= memory else open_codes[:, :memory]
        return self._viterbi(units, before)

    def _viterbi(self, units: Tensor, ends: Tensor | None) -> Tensor:
        """The codes (B, n) with the least squared error of units (B, n), the last ones ``ends`` (B, m)."""
        k, (B, n) = self.code_bits, units.shape
        places, choices = 2 ** (self.state_bits - k), 2**k  # what a state keeps of the one before; new codes
        table = trellis_values(self.state_bits, units.device).view(places, choices)
        cost = torch.zeros(B, places, dtype=torch.float32, device=units.device)
        start = None
        if ends is not None:
            start = self._number(ends)
            cost.fill_(torch.inf).scatter_(1, start[:, None], 0.0)
        back = torch.empty(n, B, places, dtype=torch.uint8, device=units.device)
        for i in range(n):
            # states (oldest code, kept bits) before become (kept bits, new code)
            total = cost[:, :, None] + (table - units[:, i, None, None]).square()
            total = total.view(B, choices, places)
            cost = total.amin(1)
            # The first that is the least: of several, which one min() names depends on the device.
            back[i] = (total == cost[:, None]).to(torch.uint8).argmax(1).to(torch.uint8)
        place = cost.argmin(1) if start is None else start
        codes = torch.empty(B, n, dtype=torch.uint8, device=units.device)
        for i in range(n - 1, -1, -1):
            codes[:, i] = (place % choices).to(torch.uint8)
            oldest_code = back[i].gather(1, place[:, None])[:, 0].long()
            place = (oldest_code << (self.state_bits - k) | place) >> k
        return codes

    def _number(self, codes: Tensor) -> Tensor:
        """Codes (B, m) as one number (B,) int64, the last in its lowest bits."""
        number = torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
        for code in codes.unbind(1):
            number = number << self.code_bits | code.long()
        return number

    def _every_path(self, units: Tensor) -> Tensor:
        """The best codes (B, n) of a block shorter than a state, by trying all."""
        n, k = units.shape[1], self.code_bits
        numbers = torch.arange(2 ** (n * k), device=units.device)
        shifts = torch.arange(n, device=units.device) * k
        paths = (numbers[:, None] >> shifts & (2**k - 1)).to(torch.uint8)
        values = trellis_values(self.state_bits, units.device)[self._states(paths)]
        # by |v|^2 - 2 v u, in one product
        errors = values.square().sum(-1) - 2 * units @ values.t()
        best: Tensor = paths[errors.argmin(1)]
        return best


# None is typical: the searches of the contract's tests take minutes, so they run every night; tests of their
# own, with few states, run always.
TRELLISES = Family((Trellis(name=f"trellis{bits}", code_bits=bits) for bits in (2, 3, 4)), typical=())

__all__ = ["TRELLISES", "Trellis", "trellis_values"]
