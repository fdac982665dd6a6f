"""Products of float8 operands by a GPU's own 8-bit units, as torch offers them; see `product.py`.

One scale a tensor: from compute capability 8.9. Scales by 1 x 128 values or tiles of 128 x 128: on 9.0 alone,
where the units add 128 products before they apply the scales and sum in float32. Not two operands of E5M2,
and not two of tiles, which cuBLAS does not multiply; and shapes as `on_units` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.formats.base import Packed
from fewbits.kernels.launch.jit import capability_of

_TENSOR, _VALUES, _TILE = (0, 0), (1, 128), (128, 128)
_MULTIPLE = 16  # of all three sides
_TILES = 4  # of tiles along the summed side: cuBLAS wants their scales' rows aligned to 16 bytes


def on_units(a: Packed, b: Packed) -> bool:
    """Whether a (M, K) and b (N, K) are of kinds and shapes that this GPU's units multiply."""
    block, other = _block(a), _block(b)
    if block is None or other is None or a.codes.device.type != "cuda":
        return False
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2:
        return False
    (M, K), (N, _) = a.shape, b.shape
    if not M or not N or not K or M % _MULTIPLE or N % _MULTIPLE or K % _MULTIPLE:
        return False
    capability = capability_of(a.codes.device)
    if block == other == _TENSOR:
        return capability >= (8, 9)
    if _TENSOR in (block, other) or block == other == _TILE or capability[0] != 9:
        return False
    return K % _VALUES[1] == 0 and (_TILE not in (block, other) or K // _TILE[1] % _TILES == 0)


def product_on_units(a: Packed, b: Packed, dtype: torch.dtype, *, bias: Tensor | None, short: bool) -> Tensor:
    """``a @ b.T + bias`` by the units.

    Args:
        a: (M, K).
        b: (N, K).
        dtype: of the result (M, N).
        bias: (N,) or None; added before the one rounding where the units do that.
        short: add up in the units' own, shorter, accumulator.
    """
    scales_a, scales_b = _scales(a), _scales(b)
    fused = bias is not None and dtype != torch.float32
    y = torch._scaled_mm(
        _rows(a.codes),
        _rows(b.codes).t(),
        scales_a,
        scales_b if scales_b.dim() < 2 else scales_b.t(),
        bias=bias.to(dtype) if fused and bias is not None else None,
        out_dtype=dtype,
        use_fast_accum=short and _block(a) == _TENSOR,
    )
    return y if bias is None or fused else y.add_(bias.to(dtype))


def _block(packed: Packed) -> tuple[int, int] | None:
    coding = packed.format.contract.coding
    is_float8 = coding is not None and coding.is_float8 and coding.block in (_TENSOR, _VALUES, _TILE)
    return coding.block if is_float8 and coding is not None else None


def _rows(codes: Tensor) -> Tensor:
    return codes if codes.is_contiguous() else codes.contiguous()


def _scales(packed: Packed) -> Tensor:
    """Scales as the units read them: by values each column contiguous, by tiles each row."""
    scales = packed.scales
    if _block(packed) == _TENSOR:
        return scales.reshape(())
    by_column = _block(packed) == _VALUES
    laid = scales.t() if by_column else scales
    laid = laid if laid.is_contiguous() else laid.contiguous()
    return laid.t() if by_column else laid
