"""`LoRALinear`: PEFT's LoRA layer over a packed, a plain or a fake-quantised linear.

It is a true PEFT layer: a PeftModel wraps the model, and saving, loading, adding, switching, disabling and
merging adapters are PEFT's own, names included. This class only says how the layer computes, and what merging
means for its base:

* packed base: one lean autograd step (`fewbits.kernels.product.lora_linear`); merging decodes, adds, and
rounds
  again. The parts from before are kept while merged, so that unmerging gives them back bit for bit.
* plain base: the same step without decoding.
* fake-quantised base: the effective weight is rounded as a whole, ``Q(W + s B A)``, so that merging and then
  packing changes nothing.

Variants that read the base weight stay with PEFT's own layers, over packed bases too
(`fewbits.models.adapting.adapters`, `fewbits.nn.decoded_weight`), but for DoRA over packed bases: PEFT's
layer unmerges by arithmetic, and would round once more. A layer of this kind with a variant computes as
PEFT's does.

Importing this module imports peft.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import VARIANT_KWARG_KEYS, LoraLayer
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.kernels.product.fake_quantize import lora_weight
from fewbits.kernels.product.lora_linear import lora_linear
from fewbits.kernels.product.matmul_packed import PLAIN, Operands
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.first_values import orthogonal_pair
from fewbits.nn.lasting import lasting_tensors
from fewbits.nn.linear import QuantizedLinear
from fewbits.nn.lora_variants import check_variant, variant_of
from fewbits.nn.tensor_group import WholeLinear, own_weight

_PEFTS: Any = PeftLinear  # its functions, for layers of ours
# begins as PEFT's own sentence does, for code that looks for it
_NOT_FINITE = (
    "NaNs detected in the merged weights. The adapter {name} seems to be broken: {name!r} gives {what} "
    "not finite; nothing was merged."
)


class LoRALinear(nn.Module, LoraLayer):
    """``y = base(x) + s * B(A(drop(x)))`` in PEFT's terms; see the module's text for the kinds of base."""

    fan_in_fan_out = False
    if TYPE_CHECKING:  # PEFT makes most attributes; nn.Module alone would call them Tensor | Module

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, r: int = 0, lora_alpha: float = 1, **kwargs: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self._packed_before: dict[str, Tensor] = {}
        self._repacked_before = False
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, **kwargs)

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        """Add an adapter (PEFT calls this); refuses what the base cannot do."""
        base = self.get_base_layer()
        if vars(base).get("tensor_group") is not None:
            raise Unsupported(
                "the ranks of a group share this layer already, and an adapter that is added now would be no"
                " part of that; add all adapters before tensor_parallel."
            )
        if isinstance(base, FakeQuantizedLinear) and kwargs["config"].lora_dropout:
            raise Unsupported(
                "LoRA dropout has no meaning under quantisation-aware training, where weight and adapter are "
                "rounded as one matrix; set the dropout to 0."
            )
        config = kwargs["config"]
        variant = variant_of(config)
        if variant is not None:
            check_variant(variant, {type(base)})
        init = config.init_lora_weights
        if init != "orthogonal" or not isinstance(base, QuantizedLinear):
            super().update_layer(adapter_name, r, *args, **kwargs)
            return
        # PEFT would ask for the weight's dtype, which a packed weight has not
        kwargs["config"] = copy.copy(config)
        kwargs["config"].init_lora_weights = True
        super().update_layer(adapter_name, r, *args, **kwargs)
        pair = orthogonal_pair(r, self.in_features, self.out_features)
        for part, values in zip((self.lora_A, self.lora_B), pair, strict=True):
            part[adapter_name].weight.data.copy_(values)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Those of PEFT's own layer."""
        return _PEFTS.lora_variants.fget(self)  # type: ignore[no-any-return]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """As PEFT's own layer says."""
        return _PEFTS.supports_lora_conversion(self, adapter_name)  # type: ignore[no-any-return]

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        like = base_layer if isinstance(base_layer, QuantizedLinear) else base_layer.weight
        return like.device, like.dtype  # type: ignore[return-value]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., K) to (..., N)."""
        if self.lora_variant:
            return _PEFTS.forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
        self._check_forward_args(x, *args, **kwargs)
        adapter_names = kwargs.pop("adapter_names", None)
        for key in VARIANT_KWARG_KEYS:
            kwargs.pop(key, None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = (
            []
            if self.disable_adapters or self.merged
            else [a for a in self.active_adapters if a in self.lora_A]
        )
        if adapter_names is not None and not self.disable_adapters:
            return self._mixed_batch_forward(x, *args, adapter_names=adapter_names, **kwargs)  # type: ignore[no-any-return]
        base = self.base_layer
        if not active:
            return base(x, *args, **kwargs)  # type: ignore[no-any-return]
        if isinstance(base, FakeQuantizedLinear):
            *before, last = active
            adapter = (self.lora_A[last].weight, self.lora_B[last].weight, self.scaling[last])
            return self._add_biases(base.product(x, self.effective_weight(before), adapter), active)
        return self._branch_forward(x, active)

    def _branch_forward(self, x: Tensor, active: list[str]) -> Tensor:
        stored = self._frozen_weight() if self._is_plain(active[0]) else None
        if stored is None:
            y, rest = self.base_layer(x), active
        else:
            name, *rest = active
            weight, operands = stored
            drop = self.lora_dropout[name]
            dropped = drop(x) if isinstance(drop, nn.Dropout) and drop.training else None
            y = lora_linear(
                x,
                weight,
                self.base_layer.bias,
                own_weight(self.lora_A[name]),
                own_weight(self.lora_B[name]),
                scaling=self.scaling[name],
                dropped=dropped,
                operands=operands,
            )
            if self.lora_bias[name]:
                y = self._add_biases(y, [name])
        for name in rest:
            branch_in = self.lora_dropout[name](self._cast_input_dtype(x, self.lora_A[name].weight.dtype))
            inner = self._cast_input_dtype(self.lora_A[name](branch_in), self.lora_B[name].weight.dtype)
            y = (y + self.lora_B[name](inner) * self.scaling[name]).to(y.dtype)
        return y  # type: ignore[no-any-return]

    def _frozen_weight(self) -> tuple[Any, Operands] | None:
        """The base's weight and the formats of its product, if the lean step can compute it."""
        base = self.base_layer
        if _is_called(base):
            return None
        if type(base) is QuantizedLinear:
            return base.frozen(), base.operands
        if type(base) is nn.Linear and not base.weight.requires_grad:
            return base.weight, PLAIN
        return None

    def _is_plain(self, name: str) -> bool:
        """Whether this branch is two linears' weights, so that no module of it need be called."""
        a, b = self.lora_A[name], self.lora_B[name]
        kinds = all(type(part) in (nn.Linear, WholeLinear) for part in (a, b))
        return kinds and not any(_is_called(module) for module in (a, b, self.lora_dropout[name]))

    def _add_biases(self, y: Tensor, active: list[str]) -> Tensor:
        for name in active:
            if self.lora_bias[name]:
                y = y + (self.lora_B[name].bias * self.scaling[name]).to(y.dtype)
        return y

    def get_delta_weight(self, adapter: str) -> Tensor:
        """``s * B @ A`` (N, K), in the wider dtype of A and B, float32 under autocast too."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        dtype = torch.promote_types(a.dtype, b.dtype)
        with torch.autocast(a.device.type, enabled=False):
            return (b.to(dtype) @ a.to(dtype)) * self.scaling[adapter]  # type: ignore[no-any-return]

    def effective_weight(self, adapters: list[str]) -> Tensor:
        """W (N, K) and each ``s * B @ A`` in turn, in W's dtype; what `merge` writes, to the bit.

        Over a fake-quantised base each is added with one rounding.
        """
        weight = self.base_layer.weight
        for name in adapters:
            weight = self._adapted(weight, name)
        return weight  # type: ignore[no-any-return]

    def _adapted(self, weight: Tensor, name: str) -> Tensor:
        if isinstance(self.get_base_layer(), FakeQuantizedLinear):
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            return lora_weight(weight, a, b, self.scaling[name])
        return (weight + self.get_delta_weight(name)).to(weight.dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write the adapters into the base weight; a packed base is rounded again, and a warning says so.

        Args:
            safe_merge: refuse a result that is not finite, before anything is changed.
            adapter_names: the adapters; None: the active ones.
        """
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            base = self.get_base_layer()
            with lasting_tensors():
                self._merge_one(base, name, safe_merge)
            self.merged_adapters.append(name)

    def _merge_one(self, base: Any, name: str, safe_merge: bool) -> None:
        weight = base.dequantize() if isinstance(base, QuantizedLinear) else base.weight
        if name in self.lora_variant:
            merged = self.lora_variant[name].merge_safe(self, name, weight.detach().clone())
        else:
            merged = self._adapted(weight, name)
        must_be_finite = safe_merge or isinstance(
            base, QuantizedLinear
        )  # a packed one would be NaN by blocks
        if must_be_finite and not torch.isfinite(merged).all():
            raise ValueError(_NOT_FINITE.format(name=name, what="weights that are"))
        if self.lora_bias[name]:
            bias = self._merged_bias(base, name, must_be_finite)
            base.bias.copy_(bias)
        if not isinstance(base, QuantizedLinear):
            base.weight.data = merged
            return
        warnings.warn(
            f"merging into weights stored as {base.format.name} rounds them again; "
            "save_pretrained_merged(..., save_method='merged_16bit') keeps all of the adapter.",
            stacklevel=2,
        )
        if not self.merged_adapters:
            self._packed_before = {name: t.detach() for name, t in base.stored().items()}
            self._repacked_before = base.repacked
        base.pack(merged)

    def _merged_bias(self, base: nn.Module, name: str, must_be_finite: bool) -> Tensor:
        if base.bias is None:
            # PEFT's own sentence and kind of error, for code that looks for them, and what it leaves unsaid
            raise RuntimeError(
                "Impossible to merge LoRA with `lora_bias=True` because the base layer has no bias; adapter "
                f"{name!r} was not merged into this layer. Keep it beside the model."
            )
        merged = base.bias + (self.lora_B[name].bias * self.scaling[name]).to(base.bias.dtype)
        if must_be_finite and not torch.isfinite(merged).all():
            raise ValueError(_NOT_FINITE.format(name=name, what="a bias that is"))
        return merged  # type: ignore[no-any-return]

    def enable_adapters(self, enabled: bool) -> None:
        """Switch all adapters on or off (PEFT calls this); off, a merged layer is unmerged at once.

        PEFT's layers do that in their next pass, which a fused decoder does not make.
        """
        if not enabled and self.merged:
            self.unmerge()
        super().enable_adapters(enabled)

    def unmerge(self) -> None:
        """Take all merged adapters out again; a packed base gets back the very bits it had."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base: Any = self.get_base_layer()
        with lasting_tensors():
            while self.merged_adapters:
                name = self.merged_adapters.pop()
                if name not in self.lora_A:
                    continue
                if not isinstance(base, QuantizedLinear):
                    base.weight.data = self._without(base.weight, name)
                if self.lora_bias[name]:
                    base.bias.sub_((self.lora_B[name].bias * self.scaling[name]).to(base.bias.dtype))
        if self._packed_before:
            for name, tensor in self._packed_before.items():
                base.get_parameter(name).data = tensor.to(base.device)
            base.repacked = self._repacked_before
            self._packed_before = {}

    def _without(self, weight: Tensor, name: str) -> Tensor:
        if name in self.lora_variant:
            return self.lora_variant[name].unmerge(self, name, weight)  # type: ignore[no-any-return]
        return weight - self.get_delta_weight(name).to(weight.dtype)

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


def lora_layer(
    base_layer: nn.Module, adapter_name: str, *, parameter_name: str | None = None, **kwargs: Any
) -> LoRALinear | None:
    """What PEFT puts over a linear; None leaves the choice to it: where one parameter is the target."""
    return None if parameter_name is not None else LoRALinear(base_layer, adapter_name, **kwargs)


def _is_called(module: nn.Module) -> bool:
    """Whether calling this module does more than its class says: hooks, or a forward of this instance."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    own = vars(module)
    return any(hooks) or ("forward" in own and "_hf_hook" not in own)
