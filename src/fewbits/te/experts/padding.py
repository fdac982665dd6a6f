"""`Fp8Padding` and `Fp8Unpadding`: rows of zeros after each expert's, as kernels want, and off again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.active.numerics import current
from fewbits.te.support import get_align_size_for_quantization, get_default_recipe


class _Aligned(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits: list[int]) -> list[int]:
        if len(m_splits) != self.num_gemms:
            raise BadInput(
                f"m_splits has {len(m_splits)} entries, and this module was made for {self.num_gemms}."
            )
        if self.align_size is None:  # by the recipe of the first call
            self.align_size = get_align_size_for_quantization(current().recipe or get_default_recipe())
        size = self.align_size
        return [-(-m // size) * size for m in m_splits]


class Fp8Padding(_Aligned):
    """Fill each expert's rows up with zeros.

    Args:
        num_gemms: experts.
        align_size: of which the rows become a multiple; None is what the recipe that holds needs.
    """

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """inp (rows, K) with m_splits rows an expert: the padded (rows, K), and the rows an expert now."""
        padded = self._padded(m_splits)
        pieces = inp.split(m_splits)
        filled = [nn.functional.pad(p, (0, 0, 0, n - len(p))) for p, n in zip(pieces, padded, strict=True)]
        return (inp, m_splits) if padded == list(m_splits) else (torch.cat(filled), padded)


class Fp8Unpadding(_Aligned):
    """Take the rows away that `Fp8Padding` added; the arguments are the same."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """inp (padded rows, K), m_splits the rows an expert had before: (rows, K)."""
        padded = self._padded(m_splits)
        pieces = inp.split(padded)
        return torch.cat([piece[:m] for piece, m in zip(pieces, m_splits, strict=True)])
