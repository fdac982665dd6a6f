"""`LayerNormMLP`: a norm, a product, an activation, a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.active.numerics import Numerics, current_init
from fewbits.te.layers.activations import GATED, SMOOTH, activated, check_activation
from fewbits.te.layers.linear import default_init
from fewbits.te.layers.module import Module
from fewbits.te.layers.norm import check_kind, first_scale, normalized
from fewbits.te.layers.primary import hold_quantized
from fewbits.te.layers.recompute import checkpoint
from fewbits.te.products.product import ProductSettings, activated_pair, fuses, linear
from fewbits.te.products.weight_gradient import Later, gradient_keeper
from fewbits.te.ranks.distributed import group_size
from fewbits.te.ranks.parallel import after_product, before_product
from fewbits.te.support import default_device
from fewbits.te.tensors.roles import QuantizerRole


class LayerNormMLP(Module):
    """``fc2(activation(fc1(norm(x))))`` with both products' operands quantised by the recipe that holds.

    Args:
        hidden_size: K.
        ffn_hidden_size: between the products; a gated activation doubles the rows of ``fc1_weight``.
        eps: of the norm.
        bias: whether the products have biases.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu",
            "swiglu" or "clamped_swiglu".
        activation_params: "limit", "alpha" and "glu_linear_offset" of the last.
        init_method: fills ``fc1_weight``; None is normal with a deviation of 0.023.
        output_layer_init_method: fills ``fc2_weight``, likewise.
        return_bias: return (y without bias, bias of fc2).
        return_layernorm_output: return the norm's result too, last.
        set_parallel_mode: split fc1 by columns and fc2 by rows over ``tp_group``.
        checkpoint: compute everything again in the backward pass instead of keeping it.

    The other arguments are those of `fewbits.te.Linear`.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    fc1_weight: nn.Parameter
    fc1_bias: Tensor
    fc2_weight: nn.Parameter
    fc2_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(name, num_products=2)
        self.activation, self.activation_params = check_activation(activation), activation_params or {}
        self.eps, self.normalization = eps, check_kind(normalization)
        self.zero_centered_gamma, self.use_bias, self.return_bias = zero_centered_gamma, bias, return_bias
        self.return_layernorm_output, self.checkpoint = return_layernorm_output, checkpoint
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size = tp_group, group_size(tp_group) if tp_group is not None else tp_size
        self.set_parallel_mode = set_parallel_mode
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        cut = self.tp_size if set_parallel_mode else 1
        if ffn_hidden_size % cut:
            raise BadInput(f"ffn_hidden_size {ffn_hidden_size} cannot be split evenly over {cut} ranks.")
        inner = ffn_hidden_size // cut
        like = (params_dtype or torch.get_default_dtype(), default_device(device))
        self.add_parameter("layer_norm_weight", (hidden_size,), first_scale(zero_centered_gamma), like)
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (hidden_size,), nn.init.zeros_, like)
        else:
            self.layer_norm_bias = None
        first = inner * 2 if activation in GATED else inner
        for words, shape, init in (
            ("fc1", (first, hidden_size), init_method),
            ("fc2", (hidden_size, inner), output_layer_init_method),
        ):
            self.add_parameter(f"{words}_weight", shape, init or default_init, like)
            if bias:
                self.add_parameter(f"{words}_bias", shape[:1], nn.init.zeros_, like)
            else:
                setattr(self, f"{words}_bias", torch.empty(0, dtype=like[0], device=like[1]))
        self.later = (Later(), Later()) if delay_wgrad_compute else None
        self.reset_parameters(defer_init=like[1].type == "meta")
        for slot, weight in ((1, "fc1_weight"), (4, "fc2_weight")):
            hold_quantized(self, [weight], current_init(), slot)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The block.

        Args:
            inp: (..., K).
            is_first_microbatch: see `fewbits.te.Linear.forward`.

        Returns:
            (..., K), with ``return_bias`` the bias beside it, and with ``return_layernorm_output`` last the
            norm's result.
        """
        dtype = self.product_dtype(inp)
        if self.checkpoint and torch.is_grad_enabled():
            y, normed = checkpoint(self._compute, inp, dtype, is_first_microbatch)
        else:
            y, normed = self._compute(inp, dtype, is_first_microbatch)
        results = [y]
        results += [self.fc2_bias.to(dtype) if self.use_bias else None] if self.return_bias else []
        results += [normed] if self.return_layernorm_output else []
        return results[0] if len(results) == 1 else tuple(results)

    def _compute(self, inp: Tensor, dtype: torch.dtype, first: bool | None) -> tuple[Tensor, Tensor]:
        numerics = self.numerics()
        normed = normalized(
            inp.to(dtype),
            self.layer_norm_weight,
            self.layer_norm_bias,
            kind=self.normalization,
            eps=self.eps,
            zero_centered=self.zero_centered_gamma,
        )
        split = (self.sequence_parallel, self.tp_group, self.tp_size if self.set_parallel_mode else 1)
        whole = before_product(normed, "column", *split)
        forward, backward = self.prepare(numerics, whole.device)
        words = (numerics, forward, backward, first, dtype)
        plans = self._plan(0, *words, whole), self._plan(1, *words, None)
        bias = self.fc2_bias if self.use_bias and not self.return_bias else None
        summed = split[2] > 1
        of_fc1 = (self.fc1_weight, self.fc1_bias if self.use_bias else None)
        of_fc2 = (self.fc2_weight, None if summed else bias)
        if self.activation in SMOOTH and fuses(whole, plans):
            y = activated_pair(whole, SMOOTH[self.activation], (*of_fc1, *of_fc2), plans)
        else:
            hidden = activated(linear(whole, *of_fc1, plans[0]), self.activation, self.activation_params)
            y = linear(hidden, *of_fc2, plans[1])
        y = after_product(y, "row", *split)
        return y + bias.to(y.dtype) if summed and bias is not None else y, normed

    def _plan(
        self,
        index: int,
        numerics: Numerics,
        forward: list[Any],
        backward: list[Any],
        first: bool | None,
        dtype: torch.dtype,
        x: Tensor | None,
    ) -> ProductSettings:
        word = f"fc{index + 1}"
        name, bias = f"{word}_weight", f"{word}_bias"
        weight, quantizer = getattr(self, name), forward[3 * index + 1]
        biases = [bias] if self.use_bias and not (index == 1 and self.return_bias) else []
        later = self.later[index].note(self, [name], biases) if self.later else None
        tensors = (x, weight, getattr(self, bias)) if x is not None else ()
        return ProductSettings(
            input=forward[3 * index],
            weight=quantizer,
            gradient=backward[2 * index],
            weight_operand=self.weight_operand(word, weight, quantizer, first, dtype),
            override=numerics.recipe.backward_override if numerics.enabled and numerics.recipe else None,
            short=numerics.recipe.short_sums() if numerics.recipe else (False,) * 3,
            keep_weight_gradient=gradient_keeper(self, [name], self.fuse_wgrad_accumulation),
            later=later,
            after_backward=self.after_backward(numerics, *tensors) if tensors else None,
        )

    def roles(self, *, forward: bool) -> list[QuantizerRole | None]:
        """As `Module.roles`, of two products: what goes from one to the other is the other's."""
        names = [f"{self.name}.{word}" if self.name else word for word in ("fc1", "fc2")]
        if forward:
            (in1, w1), (in2, w2) = (
                [QuantizerRole("linear", kind, name) for kind in ("input", "weight")] for name in names
            )
            return [in1, w1, in2, in2, w2, self.output_quantizer_role]
        dy1, dy2 = (QuantizerRole("linear", "grad_output", name) for name in names)
        return [dy1, self.grad_input_quantizer_role, dy2, dy1]

    def backward_dw(self) -> None:
        """Compute the gradients of weights and biases that ``delay_wgrad_compute`` put off."""
        for later in reversed(self.later or ()):
            later.compute()

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has something to do."""
        return self.later is not None
