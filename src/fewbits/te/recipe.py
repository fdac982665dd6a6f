"""Recipes under Transformer Engine's names: which scaling each operand of a product gets.

They are plain data: `fewbits.te.active.operands` turns one into quantisers. Their fields and defaults are
those of ``transformer_engine.common.recipe``; no environment variable changes a default here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from fewbits.errors import BadInput

BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
_SCOPES = ("none", "weights", "activations", "all")


class _FormatHelper(NamedTuple):
    """Largest values of the forward and of the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which eight-bit (or four-bit) kind the operands of each pass have; HYBRID is E4M3, then E5M2."""

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass(frozen=True)
class MMParams:
    """Options of a product: whether a GPU's 8-bit units add in float32, not in their shorter accumulator."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one operand is quantised.

    Attributes:
        power_2_scale: scales are powers of two.
        amax_epsilon: amaxes are taken to be at least this.
        random_hadamard_transform: rotate blocks of 16 before the product for the weight's gradient.
        stochastic_rounding: round to either neighbour, by chance.
        fp4_2d_quantization: tiles of 16 x 16 share a scale.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """Base of all recipes; the class methods tell them apart."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def short_sums(self) -> tuple[bool, bool, bool]:
        """In which of the three products (y, dx, dw) a GPU's units may add in their shorter accumulator."""
        options = (getattr(self, f"fp8_gemm_{word}", None) for word in ("fprop", "dgrad", "wgrad"))
        y, dx, dw = (option is not None and not option.use_split_accumulator for option in options)
        return y or isinstance(self, DelayedScaling), dx, dw

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from earlier steps."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether each tensor's scale comes from the tensor itself."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether blocks of 128 values or of 128 x 128 share a scale."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether a function of the user chooses the quantisers."""
        return issubclass(cls, CustomRecipe)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"recipe_type={type(self).__name__}, {values}"

    def _check(self) -> None:
        if self.fp8_format is Format.E5M2:
            raise BadInput(
                "training in E5M2 alone is not supported: take Format.HYBRID, which keeps E5M2 for gradients."
            )
        if self.backward_override not in BACKWARD_OVERRIDES:
            raise BadInput(
                f"backward_override is None, 'high_precision' or 'dequantized', "
                f"not {self.backward_override!r}."
            )


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """One scale a tensor, computed from the amaxes of earlier steps.

    ``scale = (largest / amax) / 2**margin`` with amax the largest ("max") or the latest ("most_recent") of
    the history, or what a function of the history returns.

    Attributes:
        margin: powers of two that the scale stays below the largest possible one.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: steps that the history holds.
        amax_compute_algo: "max", "most_recent", or a function of the history (length, n) to (n,).
        scaling_factor_compute_algo: a function (amax, old scale, largest, recipe) to the new scale.
        reduce_amax: amaxes are the largest over the process group given to `autocast`.
        fp8_dpa: quantise the operands of attention too.
        fp8_mha: as `fp8_dpa` here: our modules exchange tensors of 16 bits.
        backward_override: None only.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check()
        if self.backward_override is not None:
            raise BadInput(
                "DelayedScaling keeps no operands for a backward pass of high precision: leave "
                "backward_override at None, or take Float8CurrentScaling."
            )
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise BadInput(
                f"amax_compute_algo is 'max', 'most_recent' or a function, not {self.amax_compute_algo!r}."
            )
        if self.amax_history_len < 1:
            raise BadInput(
                f"amax_history_len is {self.amax_history_len}: the history holds at least one step."
            )


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, computed from its own amax.

    Attributes:
        use_power_2_scales: the default of the three `QParams`.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        fp8_quant_fwd_inp: how inputs are quantised; likewise weights and gradients of outputs.
        backward_override: "high_precision" keeps plain operands for the backward pass, "dequantized" uses
            the forward pass's rounded ones; either way the gradient is not quantised.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(use_split_accumulator=False))
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check()
        default = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_inp or default
        self.fp8_quant_fwd_weight = self.fp8_quant_fwd_weight or default
        self.fp8_quant_bwd_grad = self.fp8_quant_bwd_grad or default


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """Blocks of 32 values share a power of two (E8M0), along the axis that the product sums over.

    Attributes:
        margin: unused, as in Transformer Engine.
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        backward_override: see `Float8CurrentScaling`.
        enable_2d_quantization: weights have tiles of 32 x 32, so that both products see the same weight.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._check()


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """Inputs and gradients share scales by 1 x 128 values, weights by 128 x 128.

    Attributes:
        use_f32_scales: any float32 scale instead of powers of two.
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        x_block_scaling_dim: 1 or 2 (tiles) for inputs; likewise ``w_`` and ``grad_``. At most one operand of
            a product has tiles.
        backward_override: see `Float8CurrentScaling`.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=MMParams)
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if not set(dims) <= {1, 2} or dims.count(2) > 1:
            raise BadInput(
                f"blocks have 1 or 2 dimensions, and at most one operand of a product has tiles: "
                f"x, w and grad were given {dims}."
            )
        gemms = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        if not all(gemm.use_split_accumulator for gemm in gemms):
            raise BadInput("products of block-scaled operands need use_split_accumulator=True.")
        if self.fp8_dpa or self.fp8_mha:
            raise BadInput("Float8BlockScaling has no FP8 attention: leave fp8_dpa and fp8_mha at False.")
        default = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_inp or default
        self.fp8_quant_fwd_weight = self.fp8_quant_fwd_weight or default
        self.fp8_quant_bwd_grad = self.fp8_quant_bwd_grad or default


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """Four bits (E2M1); 16 values share an E4M3 scale, and the tensor a float32 one.

    Attributes:
        disable_rht: no random Hadamard transform of the operands of the weight's gradient.
        disable_stochastic_rounding: gradients round to nearest.
        disable_2d_quantization: weights have blocks of 1 x 16 instead of tiles of 16 x 16.
        row_scaled_activation: each row of an input has its own float32 scale.
        nvfp4_4over6: which operands choose for each block whether its largest value becomes 4 or 6, by the
            smaller error: "none", "weights", "activations" or "all".
        nvfp4_4over6_e4m3_use_256: which of these bound the E4M3 scales by 256 instead of 448.
        nvfp4_4over6_err_mode: "MAE" or "MSE".
        backward_override: see `Float8CurrentScaling`.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check()
        if self.fp4_format is not Format.E2M1 or self.fp8_format is not Format.E4M3:
            raise BadInput("NVFP4BlockScaling has values in E2M1 and scales in E4M3 only.")
        if self.nvfp4_4over6 not in _SCOPES or self.nvfp4_4over6_e4m3_use_256 not in _SCOPES:
            raise BadInput(f"nvfp4_4over6 and nvfp4_4over6_e4m3_use_256 are one of {', '.join(_SCOPES)}.")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise BadInput(f"nvfp4_4over6_err_mode is 'MAE' or 'MSE', not {self.nvfp4_4over6_err_mode!r}.")
        rotate = not self.disable_rht
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rotate)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=rotate, stochastic_rounding=not self.disable_stochastic_rounding
        )


@dataclass(repr=False)
class CustomRecipe(Recipe):
    """A function of the user chooses the quantiser of each operand.

    Attributes:
        qfactory: called with a `fewbits.te.QuantizerRole`, or with None for a tensor that leaves a module to
            an unknown taker; returns a quantiser, a `DelayedScalingRequest`, or None for an operand that
            stays as it is. `fewbits.te.quantizer_factories` has ready-made ones.
        backward_override: see `Float8CurrentScaling`.
        quantization_alignment: to how many rows `Fp8Padding` pads each expert.
    """

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        if self.quantization_alignment <= 0:
            raise BadInput(f"quantization_alignment must be positive, not {self.quantization_alignment}.")
        self._check()


NAMES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        CustomRecipe,
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Format,
        MMParams,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
        QParams,
        _FormatHelper,
    )
}
"""What a stored recipe may consist of, by name."""

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]
