"""`Linear` and `LayerNormLinear`: one product with quantised operands, after a norm or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.active.numerics import current_init
from fewbits.te.layers.module import Module, refuse
from fewbits.te.layers.norm import check_kind, first_scale, normalized
from fewbits.te.layers.primary import hold_quantized
from fewbits.te.products.product import ProductSettings, linear
from fewbits.te.products.weight_gradient import Later, gradient_keeper
from fewbits.te.ranks.distributed import group_size
from fewbits.te.ranks.parallel import after_product, before_product
from fewbits.te.support import default_device

ParametersSplit = Sequence[str] | Mapping[str, int] | None


def default_init(weight: Tensor) -> Tensor:
    """Normal numbers with a standard deviation of 0.023: what weights begin as where nothing else is said.

    ``weight`` is (N, K), and is written.
    """
    return nn.init.normal_(weight, 0.0, 0.023)


def split_sizes(split: ParametersSplit, out_features: int) -> dict[str, int]:
    """Names and rows of the parameters that make up a weight: {"weight": out_features} if it is one."""
    if split is None:
        return {"": out_features}
    names = list(split)
    if not names:
        raise BadInput("parameters_split is empty: name at least one parameter, or leave it at None.")
    if isinstance(split, Mapping):
        sizes = {name.rstrip("_") + "_": int(split[name]) for name in names}
    else:
        sizes = {name.rstrip("_") + "_": out_features // len(names) for name in names}
    if sum(sizes.values()) != out_features:
        raise BadInput(f"parameters_split has {sum(sizes.values())} rows and the layer {out_features}.")
    return sizes


class Projection(Module):
    """A weight (of one or several parameters), a bias, and their product; base of the two linears."""

    def make_parameters(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        split: ParametersSplit,
        init: Callable[[Tensor], Any] | None,
        like: tuple[torch.dtype, torch.device],
        parallel: tuple[str | None, bool, Any, int],
    ) -> None:
        """Register weights (N, K) and biases (N,), this rank's pieces of them.

        Args:
            in_features: K.
            out_features: N.
            bias: whether there are biases.
            split: see `Linear`'s ``parameters_split``.
            init: fills weights, or None.
            like: dtype and device.
            parallel: mode, sequence parallelism, group and its size.
        """
        mode, sequence, group, size = parallel
        if mode not in (None, "column", "row"):
            raise BadInput(f"parallel_mode is None, 'column' or 'row', not {mode!r}.")
        self.parallel_mode, self.tp_group = mode, group
        self.tp_size = group_size(group) if group is not None else size
        self.sequence_parallel = sequence and self.tp_size > 1
        cut = out_features if mode == "column" else in_features
        if mode is not None and cut % self.tp_size:
            raise BadInput(f"{cut} features cannot be split evenly over {self.tp_size} ranks.")
        self.out_features = out_features // (self.tp_size if mode == "column" else 1)
        self.in_features = in_features // (self.tp_size if mode == "row" else 1)
        self.use_bias = bias
        sizes = split_sizes(split, out_features)
        columns = self.tp_size if mode == "column" else 1
        self.weight_names = [f"{name}weight" for name in sizes]
        self.bias_names = [f"{name}bias" for name in sizes]
        for name, rows in zip(self.weight_names, sizes.values(), strict=True):
            self.add_parameter(name, (rows // columns, self.in_features), init or default_init, like)
        for name, rows in zip(self.bias_names, sizes.values(), strict=True):
            if bias:
                self.add_parameter(name, (rows // columns,), nn.init.zeros_, like)
            else:
                setattr(self, name, torch.empty(0, dtype=like[0], device=like[1]))

    def finish_parameters(self, delay_wgrad_compute: bool, fuse_wgrad_accumulation: bool) -> None:
        """Fill the parameters, and quantise the weights where `quantized_model_init` asks for it."""
        self.later = Later() if delay_wgrad_compute else None
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        device = getattr(self, self.weight_names[0]).device
        self.reset_parameters(defer_init=device.type == "meta")
        hold_quantized(self, self.weight_names, current_init())

    def _joined(self, names: list[str]) -> Tensor:
        tensors = [getattr(self, name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def project(self, x: Tensor, dtype: torch.dtype, first: bool | None) -> tuple[Tensor, Tensor | None]:
        """The product of x (..., K), and the bias if it was not added."""
        numerics = self.numerics()
        x = before_product(
            x.to(dtype), self.parallel_mode, self.sequence_parallel, self.tp_group, self.tp_size
        )
        weight = self._joined(self.weight_names)
        bias = self._joined(self.bias_names) if self.use_bias else None
        forward, backward = self.prepare(numerics, x.device)
        plan = ProductSettings(
            input=forward[0],
            weight=forward[1],
            gradient=backward[0],
            weight_operand=self.weight_operand("weight", weight, forward[1], first, dtype),
            override=numerics.recipe.backward_override if numerics.enabled and numerics.recipe else None,
            short=numerics.recipe.short_sums() if numerics.recipe else (False,) * 3,
            keep_weight_gradient=gradient_keeper(self, self.weight_names, self.fuse_wgrad_accumulation),
            later=self.later.note(self, self.weight_names, self.bias_names if bias is not None else [])
            if self.later
            else None,
            after_backward=self.after_backward(numerics, x, weight, bias),
        )
        whole = self.parallel_mode == "row" and self.tp_size > 1  # there the bias is added once, to the sum
        added = None if self.return_bias or whole else bias
        y = linear(x, weight, added, plan)
        y = after_product(y, self.parallel_mode, self.sequence_parallel, self.tp_group, self.tp_size)
        if whole and bias is not None and not self.return_bias:
            y = y + bias.to(y.dtype)
        return y, bias.to(dtype) if bias is not None and self.return_bias else None

    def backward_dw(self) -> None:
        """Compute the weight's and the bias's gradients that ``delay_wgrad_compute`` put off."""
        if self.later is not None:
            self.later.compute()

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has something to do."""
        return self.later is not None

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def check_output(fp8_output: bool | None, fp8_grad: bool | None) -> None:
    """Refuse results that stay quantised between modules."""
    refuse(
        bool(fp8_output or fp8_grad), "fp8_output and fp8_grad", "modules exchange tensors of 16 or 32 bits"
    )


class Linear(Projection):
    """``y = x @ weight.T + bias`` with operands quantised by the recipe that holds.

    Args:
        in_features: K.
        out_features: N.
        sequence_parallel: tensors between layers are cut by their first axis, over ``tp_group``.
        fuse_wgrad_accumulation: the weight's gradient is added to ``weight.main_grad``, a tensor that the
            caller made, and ``weight.grad`` stays None.
        tp_group: process group over which the layer is split.
        tp_size: its size, where the group is set later.
        init_method: fills the weight; None is normal with a deviation of 0.023.
        bias: whether there is one.
        return_bias: return (y without bias, bias).
        params_dtype: of the parameters; None is torch's default.
        parallel_mode: "column", "row" or None.
        parameters_split: names (of equal parts) or a mapping from names to rows: several parameters
            ``NAME_weight`` instead of one ``weight``.
        device: of the parameters; None is the GPU where there is one.
        delay_wgrad_compute: gradients of weight and bias wait for `backward_dw`.
        name: for a `CustomRecipe`'s function.

    The other arguments tell Transformer Engine how to overlap communication or to save memory; they are
    taken and change nothing.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: ParametersSplit = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.return_bias = return_bias
        like = (params_dtype or torch.get_default_dtype(), default_device(device))
        parallel = (parallel_mode, sequence_parallel, tp_group, tp_size)
        self.make_parameters(in_features, out_features, bias, parameters_split, init_method, like, parallel)
        self.finish_parameters(delay_wgrad_compute, fuse_wgrad_accumulation)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """The product.

        Args:
            inp: (..., K).
            is_first_microbatch: True quantises the weight and keeps it, False takes it as kept.
            fp8_output: True is refused.
            fp8_grad: True is refused.

        Returns:
            (..., N), or with ``return_bias`` that and the bias.
        """
        check_output(fp8_output, fp8_grad)
        y, bias = self.project(inp, self.product_dtype(inp), is_first_microbatch)
        return (y, bias) if self.return_bias else y


class LayerNormLinear(Projection):
    """A norm, then a `Linear`.

    Args:
        in_features: K.
        out_features: N.
        eps: of the norm.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: return the norm's result too.
        return_layernorm_output_gathered: with sequence parallelism, return it whole.
        zero_centered_gamma: the norm's weight is what is added to 1.

    The other arguments are `Linear`'s.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: ParametersSplit = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        refuse(
            return_layernorm_output_gathered and sequence_parallel and tp_size > 1,
            "return_layernorm_output_gathered",
            "gather the returned tensor yourself",
        )
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.eps, self.normalization = eps, check_kind(normalization)
        self.zero_centered_gamma = zero_centered_gamma
        like = (params_dtype or torch.get_default_dtype(), default_device(device))
        width = in_features // (tp_size if parallel_mode == "row" else 1)
        self.add_parameter("layer_norm_weight", (width,), first_scale(zero_centered_gamma), like)
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (width,), nn.init.zeros_, like)
        else:
            self.layer_norm_bias = None
        parallel = (parallel_mode, sequence_parallel, tp_group, tp_size)
        self.make_parameters(in_features, out_features, bias, parameters_split, init_method, like, parallel)
        self.finish_parameters(delay_wgrad_compute, fuse_wgrad_accumulation)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """The norm and the product; see `Linear.forward`.

        Returns:
            (..., N), with ``return_bias`` the bias beside it, and with ``return_layernorm_output`` last the
            norm's result (..., K).
        """
        check_output(fp8_output, fp8_grad)
        dtype = self.product_dtype(inp)
        normed = normalized(
            inp.to(dtype),
            self.layer_norm_weight,
            self.layer_norm_bias,
            kind=self.normalization,
            eps=self.eps,
            zero_centered=self.zero_centered_gamma,
        )
        y, bias = self.project(normed, dtype, is_first_microbatch)
        results = [y]
        results += [bias] if self.return_bias else []  # type: ignore[list-item]
        results += [normed] if self.return_layernorm_output else []
        return results[0] if len(results) == 1 else tuple(results)
