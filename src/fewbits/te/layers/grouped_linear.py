"""`GroupedLinear`: one linear for each of several pieces of the input, as experts have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.active.numerics import Numerics, current_init
from fewbits.te.layers.linear import default_init
from fewbits.te.layers.module import Module, refuse
from fewbits.te.layers.primary import hold_quantized, hold_quantized_group
from fewbits.te.products.product import ProductSettings, linear_of_pieces
from fewbits.te.products.weight_gradient import Later, Place, gradient_keeper
from fewbits.te.support import default_device
from fewbits.te.tensors.grouped_tensor import GroupedQuantizedTensor, members_of
from fewbits.te.tensors.quantized_tensor import QuantizedTensor


class GroupedLinear(Module):
    """``y_i = x_i @ weight_i.T + bias_i`` for pieces of the input's rows.

    Args:
        num_gemms: pieces; parameters are ``weight0``, ``weight1`` ... and ``bias0`` ...
        in_features: K.
        out_features: N.
        return_bias: return (y without biases, list of biases).
        parallel_mode: more than one rank is refused, as experts are spread by whole layers.
        single_grouped_weight: one parameter ``weight`` (pieces, N, K) instead. State dicts of either kind
            load into either.
        single_grouped_bias: one parameter ``bias`` (pieces, N) instead.
        use_grouped_tensor: gradients of biases do not wait with ``delay_wgrad_compute``, as there.

    The other arguments are those of `fewbits.te.Linear`.
    """

    module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name, num_products=num_gemms)
        refuse(tp_size > 1, "tensor parallelism inside GroupedLinear", "give each rank whole experts")
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias and bias
        self.use_grouped_tensor = bool(use_grouped_tensor)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        like = (params_dtype or torch.get_default_dtype(), default_device(device))
        for i in range(num_gemms):
            self._register("weight", i, (out_features, in_features), init_method or default_init, like)
            if bias:
                self._register("bias", i, (out_features,), nn.init.zeros_, like)
            else:
                setattr(self, f"bias{i}", torch.empty(0, dtype=like[0], device=like[1]))
        self.later = [Later() for _ in range(num_gemms)] if delay_wgrad_compute else []
        self.reset_parameters(defer_init=like[1].type == "meta")
        if single_grouped_weight:
            hold_quantized_group(self, "weight", current_init())
        for i in range(0 if single_grouped_weight else num_gemms):
            hold_quantized(self, [f"weight{i}"], current_init(), 3 * i + 1)

    def _register(self, word: str, i: int, shape: tuple[int, ...], init: Any, like: Any) -> None:
        """The i-th parameter of a kind, or with the first that of all, whose entries are filled alike."""
        place = self._place(word, i)
        if isinstance(place, str):
            self.add_parameter(place, shape, init, like)
        elif i == 0:

            def fill(whole: Tensor) -> None:
                for entry in whole:
                    init(entry)

            self.add_parameter(word, (self.num_gemms, *shape), fill, like)

    def _place(self, word: str, i: int) -> Place:
        is_single = self.single_grouped_weight if word == "weight" else self.single_grouped_bias
        return (word, i) if is_single else f"{word}{i}"

    def _members(self, word: str) -> list[Tensor]:
        """The weights (N, K) or the biases (N,), of one parameter or of several."""
        if isinstance(self._place(word, 0), tuple):
            return list(members_of(getattr(self, word)))
        return [getattr(self, f"{word}{i}") for i in range(self.num_gemms)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Takes a state dict of one parameter for several, and the other way round."""
        for word in ("weight", "bias") if self.use_bias else ("weight",):
            one, several = f"{prefix}{word}", [f"{prefix}{word}{i}" for i in range(self.num_gemms)]
            is_single = isinstance(self._place(word, 0), tuple)
            if is_single and one not in state_dict and all(name in state_dict for name in several):
                members = [state_dict.pop(name) for name in several]
                members = [m.dequantize() if isinstance(m, QuantizedTensor) else m for m in members]
                state_dict[one] = torch.stack(members)
            elif not is_single and one in state_dict and not any(name in state_dict for name in several):
                state_dict.update(zip(several, state_dict.pop(one).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """The products.

        Args:
            inp: (..., K).
            m_splits: rows of each piece; a list or a tensor.
            is_first_microbatch: see `fewbits.te.Linear.forward`.
            out: refused, as is ``dgrad_out``.

        Returns:
            (..., N), or with ``return_bias`` that and the biases: a list, or the one parameter.
        """
        refuse(out is not None or dgrad_out is not None, "out", "take the returned tensor")
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        dtype = self.product_dtype(inp)
        x = inp.to(dtype).reshape(inp.numel() // max(inp.shape[-1], 1), inp.shape[-1])
        if len(sizes) != self.num_gemms or sum(sizes) != len(x):
            raise BadInput(f"m_splits {sizes} does not cut {len(x)} rows into {self.num_gemms} pieces.")
        numerics = self.numerics()
        forward, backward = self.prepare(numerics, x.device)
        weights, biases = self._members("weight"), self._members("bias")
        added = biases if self.use_bias and not self.return_bias else [None] * self.num_gemms
        parameters = list(zip(weights, added, strict=True))
        pieces = enumerate(zip(x.split(sizes), parameters, strict=True))
        plans = [
            self._plan(i, (x_i, *own), numerics, forward, backward, is_first_microbatch)
            for i, (x_i, own) in pieces
        ]
        y = linear_of_pieces(inp.to(dtype), sizes, parameters, plans)
        if not self.return_bias:
            return y
        return y, self.bias if self.use_bias and self.single_grouped_bias else [b.to(dtype) for b in biases]

    def _plan(
        self,
        i: int,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        numerics: Numerics,
        forward: list[Any],
        backward: list[Any],
        first: bool | None,
    ) -> ProductSettings:
        x, weight, bias = tensors
        places, quantizer = [self._place("weight", i)], forward[3 * i + 1]
        whole = self.weight if self.single_grouped_weight else None
        held = whole.members[i] if isinstance(whole, GroupedQuantizedTensor) else weight
        return ProductSettings(
            input=forward[3 * i],
            weight=quantizer,
            gradient=backward[2 * i],
            weight_operand=self.weight_operand(f"weight{i}", held, quantizer, first, x.dtype),
            override=numerics.recipe.backward_override if numerics.enabled and numerics.recipe else None,
            short=numerics.recipe.short_sums() if numerics.recipe else (False,) * 3,
            keep_weight_gradient=gradient_keeper(self, places, self.fuse_wgrad_accumulation),
            later=self.later[i].note(self, places, [self._place("bias", i)] if bias is not None else [])
            if self.later
            else None,
            later_bias=not self.use_grouped_tensor,
            after_backward=self.after_backward(numerics, x, weight, bias),
        )

    def backward_dw(self) -> None:
        """Compute the gradients that ``delay_wgrad_compute`` put off."""
        for later in self.later:
            later.compute()

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has something to do."""
        return bool(self.later)
