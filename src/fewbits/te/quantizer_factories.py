"""Ready-made functions for `fewbits.te.recipe.CustomRecipe`, one for each of the other recipes.

Each is called with the role of an operand, or None where nobody knows who takes a tensor, and gives the
quantiser that the recipe of its name gives there. A function of one's own calls them for the roles that it
does not treat itself.
"""

from __future__ import annotations

from fewbits.te.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fewbits.te.tensors.roles import DelayedScalingRequest, DType, QuantizerRole

_LINEAR = ("linear", "grouped_linear")


def _is_for(role: QuantizerRole | None, tensor_type: str) -> bool:
    return role is not None and role.module_type in _LINEAR and role.tensor_type == tensor_type


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Nothing is quantised."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """As `fewbits.te.recipe.DelayedScaling`."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """As `fewbits.te.recipe.Float8CurrentScaling`: E5M2 for the gradients of outputs, else E4M3."""
    backward = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if backward else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """As `fewbits.te.recipe.Float8BlockScaling`: tiles for weights, else vectors of 128."""
    return Float8BlockQuantizer(
        DType.kFloat8E4M3, block_scaling_dim=2 if _is_for(role, "weight") else 1, force_pow_2_scales=True
    )


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """As `fewbits.te.recipe.MXFP8BlockScaling`."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """As `fewbits.te.recipe.NVFP4BlockScaling`: tiles for weights, else rotated; gradients stochastically."""
    if _is_for(role, "weight"):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(
        with_rht=True, with_post_rht_amax=True, stochastic_rounding=_is_for(role, "grad_output")
    )


def _from_rounded(rows: Quantizer, columns: Quantizer) -> HybridQuantizer:
    """Rows for the forward pass; columns, for the backward pass, from the rounded rows."""
    return HybridQuantizer(
        rowwise_quantizer=rows, columnwise_quantizer=columns, columnwise_source="rowwise_dequantized"
    )


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with blocks of 16 for weights too; their columns are made from the rounded rows."""
    if _is_for(role, "weight"):
        return _from_rounded(NVFP4Quantizer(), NVFP4Quantizer())
    return nvfp4_factory(role)


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """MXFP8 in the forward pass and NVFP4 in the backward pass."""
    if _is_for(role, "weight"):
        return _from_rounded(mxfp8_factory(role), NVFP4Quantizer())
    if _is_for(role, "input"):
        return HybridQuantizer(
            rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=nvfp4_factory(role)
        )
    return nvfp4_factory(role) if _is_for(role, "grad_output") else mxfp8_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """MXFP8 in the forward pass; the backward pass multiplies plain gradients by the rounded operands."""
    if _is_for(role, "weight") or _is_for(role, "input"):
        return _from_rounded(mxfp8_factory(role), IdentityQuantizer())
    return IdentityQuantizer() if _is_for(role, "grad_output") else mxfp8_factory(role)


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Nothing quantised in the forward pass; MXFP8 in the backward pass."""
    if _is_for(role, "grad_output"):
        return mxfp8_factory(role)
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=mxfp8_factory(role))


def _four_bits_forward(role: QuantizerRole | None, columns: Quantizer) -> Quantizer:
    """NVFP4 rows, of inputs with an amax for each row, and columns from the rounded rows."""
    return _from_rounded(NVFP4Quantizer(row_scaled_nvfp4=_is_for(role, "input")), columns)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """For `GroupedLinear` NVFP4 in the forward pass, MXFP8 of its values in the backward pass; else MXFP8."""
    is_grouped = role is not None and role.module_type == "grouped_linear"
    if is_grouped and (_is_for(role, "input") or _is_for(role, "weight")):
        return _four_bits_forward(role, mxfp8_factory(role))
    return mxfp8_factory(role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 in the forward pass; the backward pass multiplies plain gradients by the rounded operands."""
    if _is_for(role, "input") or _is_for(role, "weight"):
        return _four_bits_forward(role, IdentityQuantizer())
    return IdentityQuantizer() if _is_for(role, "grad_output") else NVFP4Quantizer()
