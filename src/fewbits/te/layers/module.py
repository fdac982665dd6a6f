"""What all modules of `fewbits.te` share: recipe, quantisers, their state, and its way through checkpoints.

A module computes by the recipe that `fewbits.te.active.numerics` says holds, or by one of its own:
`use_recipe` gives a whole model a recipe as a value, after which no context is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput, Unsupported
from fewbits.te.active.delayed import DelayedState
from fewbits.te.active.extra_state import copy_into, from_bytes, to_bytes
from fewbits.te.active.numerics import Numerics, current, enter_region, leave_region
from fewbits.te.active.operands import Slots, slots_for
from fewbits.te.recipe import Recipe
from fewbits.te.support import default_device
from fewbits.te.tensors.operand import Operand
from fewbits.te.tensors.quantized_tensor import QuantizedTensor
from fewbits.te.tensors.quantizers import Float8Quantizer, Quantizer
from fewbits.te.tensors.roles import QuantizerRole

_ROLES = ("output_quantizer_role", "grad_input_quantizer_role")


class RecipeMismatch(BadInput, RuntimeError):
    """A weight that exists quantised alone meets a recipe of another kind; a RuntimeError, as there."""


class Module(nn.Module):
    """Base of the modules with products.

    Attributes:
        fp8_meta: the state by Transformer Engine's names: "recipe", "scaling_fwd", "scaling_bwd" and others.
        quantizers: of the last call, by those names.
        num_products: products in a call.
        output_quantizer_role: what takes the output; a `CustomRecipe`'s function is asked for a quantiser
            with it, or with None.
        grad_input_quantizer_role: the same of the gradient that goes back to the input.
        module_type: see `QuantizerRole`.
        after_reset: functions of the module, with further arguments, that the next `reset_parameters` which
            fills the parameters calls last.
        recipe: this module's own recipe, or None for the context's.
    """

    module_type = "linear"
    output_quantizer_role: QuantizerRole | None = None
    grad_input_quantizer_role: QuantizerRole | None = None

    def __init__(self, name: str | None = None, num_products: int = 1) -> None:
        super().__init__()
        self.name, self.num_products = name, num_products
        self.recipe: Recipe | None = None
        self.fp8_meta: dict[str, Any] = {"num_gemms": num_products, "fp8_checkpoint": False, "recipe": None}
        self.quantizers: dict[str, list[Quantizer | None]] = {}
        self._slots: tuple[str, torch.device, Slots, Slots] | None = None
        self._weight_operands: dict[str, Operand] = {}
        self.after_reset: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._init_fns: dict[str, Callable[[Tensor], Any]] = {}

    # Parameters

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Callable[[Tensor], Any], like: Any
    ) -> None:
        """Register a parameter of ``shape``, with the function that fills it; ``like`` is (dtype, device)."""
        dtype, device = like
        self._init_fns[name] = init
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill all parameters; those on the meta device are made first, unless ``defer_init``."""
        if defer_init:
            return
        for name, init in self._init_fns.items():
            parameter = getattr(self, name)
            if parameter.device.type == "meta":
                parameter = nn.Parameter(
                    torch.empty_like(parameter, device=default_device(None)), parameter.requires_grad
                )
                setattr(self, name, parameter)
            with torch.no_grad():
                init(parameter)
        waiting, self.after_reset = self.after_reset, []
        for finish, words in waiting:
            finish(self, *words)

    # Recipe and quantisers

    def numerics(self) -> Numerics:
        """What holds for this call: the context's word, or that of the module's own recipe."""
        surrounding = current()
        if self.recipe is None:
            return surrounding
        return replace(surrounding, enabled=True, recipe=self.recipe)

    def roles(self, *, forward: bool) -> list[QuantizerRole | None]:
        """Which operands the slots of a pass are for; None for what leaves the module to an unknown taker."""
        name = self.name or ""
        inner = [QuantizerRole(self.module_type, kind, name) for kind in ("input", "weight", "grad_output")]
        if forward:
            return [*inner[:2], self.output_quantizer_role] * self.num_products
        return [inner[2], self.grad_input_quantizer_role] * self.num_products

    def __setattr__(self, name: str, value: Any) -> None:
        """Another role asks for the quantisers anew; delayed scaling's state goes on."""
        if name in _ROLES and getattr(self, name) != value:
            self._slots = None
        super().__setattr__(name, value)

    def prepare(self, numerics: Numerics, device: torch.device) -> tuple[list[Any], list[Any]]:
        """The quantisers of the forward and of the backward pass; all None where nothing is quantised."""
        if not (numerics.enabled or numerics.calibrating) or numerics.recipe is None:
            return [None] * (3 * self.num_products), [None] * (2 * self.num_products)
        forward, backward = self.slots_of(numerics.recipe, device)
        for slots in (forward, backward):
            if slots.state is not None:
                slots.state.group = numerics.group
        used = forward.quantizers
        if numerics.tape is not None and forward.state is not None:
            scale = numerics.tape.scale(forward.state)
            used = used if scale is None else _with_scales(used, scale)
        if numerics.region is not None and not (numerics.tape and numerics.tape.replaying):
            numerics.region.add(forward.state, backward.state)
        if not numerics.enabled:
            return [_Calibrating(q) if q else None for q in used], [None] * len(backward.quantizers)
        return used, backward.quantizers

    def num_quantizers(self, mode: str) -> int:
        """How many tensors of the "forward" or the "backward" pass are quantised, or might be."""
        return len(self.roles(forward=mode == "forward"))

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """The quantiser of a slot of the "forward" or the "backward" pass; None before the first call."""
        if self._slots is None:
            return None
        _, _, forward, backward = self._slots
        return (forward if mode == "forward" else backward).quantizers[index]

    def slots_of(self, recipe: Recipe, device: torch.device) -> tuple[Slots, Slots]:
        """The quantisers' slots of the forward and the backward pass; another recipe or device has others."""
        key = repr(recipe)
        if self._slots is None or self._slots[0] != key or self._slots[1] != device:
            self._say_what_changes(recipe)
            halves = []
            for is_forward, where in ((True, "scaling_fwd"), (False, "scaling_bwd")):
                old = self.fp8_meta.get(where)
                previous = old if isinstance(old, DelayedState) else None
                slots = slots_for(
                    recipe,
                    self.roles(forward=is_forward),
                    forward=is_forward,
                    device=device,
                    previous=previous,
                )
                self.fp8_meta[where] = slots.state if slots.state is not None else old
                halves.append(slots)
            forward, backward = halves
            self._slots = (key, device, forward, backward)
            self._weight_operands.clear()
            self.fp8_meta["recipe"], self.fp8_meta["fp8_checkpoint"] = recipe, True
            self.quantizers = {"scaling_fwd": forward.quantizers, "scaling_bwd": backward.quantizers}
        return self._slots[2], self._slots[3]

    def _say_what_changes(self, recipe: Recipe) -> None:
        """Warn of another kind of recipe, or of other settings for weights that exist quantised alone."""
        old = self.fp8_meta.get("recipe")
        if old is None or repr(old) == repr(recipe):
            return
        kinds = type(old), type(recipe)
        if not issubclass(kinds[1], kinds[0]) and not issubclass(kinds[0], kinds[1]):
            warnings.warn(
                f"Recipe type changed from {kinds[0].__name__} to {kinds[1].__name__}: this module goes on "
                "with the new one, and what the old one recorded of its tensors has no meaning for it.",
                stacklevel=4,
            )
        elif any(isinstance(p, QuantizedTensor) for p in self.parameters(recurse=False)):
            warnings.warn(
                "Quantizer is being updated, this may affect model behavior: the weights of this module were "
                f"quantised under {old!r} and go on under {recipe!r}.",
                stacklevel=4,
            )

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether this module has the quantisers of a recipe; a role that changes takes them away."""
        return self._slots is not None

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Make the quantisers of a recipe; delayed scaling goes on with the tensors that it has."""
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        self.slots_of(recipe, device)

    def after_backward(self, numerics: Numerics, *tensors: Tensor | None) -> Callable[[], None] | None:
        """What ends the backward pass of the region's first module, if this is the one."""
        region, tape = numerics.region, numerics.tape
        if region is None:
            return None
        has_gradients = any(t is not None and t.requires_grad for t in tensors)
        if tape is not None:  # its first pass may run without gradients, where only parameters ask for them
            has_gradients = has_gradients or any(p.requires_grad for p in self.parameters(recurse=False))
            first = tape.first(region, has_gradients)
        else:
            first = has_gradients and torch.is_grad_enabled() and region.claim_first()
        if not first or not torch.is_grad_enabled():
            return None
        return lambda: region.advance(region.backward)

    def weight_operand(
        self, name: str, weight: Tensor, quantizer: Any, first: bool | None, dtype: torch.dtype
    ) -> Operand | None:
        """The quantised weight where it can be had without quantising: held as such, or kept from before.

        Args:
            name: under which it is kept.
            weight: (N, K).
            quantizer: of the weight.
            first: ``is_first_microbatch``: True keeps it, False takes what was kept, None does neither.
            dtype: of the product.
        """
        if isinstance(weight, QuantizedTensor) and quantizer is not None:
            return self._held(name, weight, quantizer)
        if quantizer is None or first is None or isinstance(quantizer, _Calibrating):
            return None
        if first or name not in self._weight_operands:
            self._weight_operands[name] = quantizer.operand(
                weight.detach().to(dtype), rows=True, columns=True
            )
        return self._weight_operands[name]

    def _held(self, name: str, weight: QuantizedTensor, quantizer: Any) -> Operand:
        """A weight (N, K) that exists in quantised form alone, if it is of this call's recipe.

        Under delayed scaling it goes on with this module's scales, whatever it was loaded with.

        Raises:
            RecipeMismatch: it is of another recipe.
        """
        own, of_call = weight.quantizer, getattr(quantizer, "quantizer", quantizer)  # as calibrating wraps it
        if type(own) is not type(of_call):
            raise RecipeMismatch(
                f"Recipe mismatch for {name}: it was quantised by a {type(own).__name__} and this call's"
                f" recipe takes a {type(of_call).__name__}: use the recipe that quantized_model_init was"
                " given, or build the module under the other one and load this one's state_dict."
            )
        if self._slots is not None and any(quantizer is slot for slot in self._slots[2].quantizers):
            weight.quantizer = quantizer
        return weight.operand()

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """The type of products: autocast's, else x's, which parameters must then share.

        x may have any shape.

        Raises:
            BadInput: another type of x than of the parameters, outside of torch.autocast.
        """
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != x.dtype:
                raise BadInput(
                    f"the input is {x.dtype} and {name} is {parameter.dtype}: outside of torch.autocast both "
                    "have one type, so cast the input or build the module with params_dtype."
                )
        return x.dtype

    # Checkpoints

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._weight_operands.clear()  # of the weights before
        super()._load_from_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Tensor:
        """Scales and histories of delayed scaling as bytes, (n,) uint8; empty where there are none."""
        return to_bytes(self.fp8_meta)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: quantisers, which look into delayed scaling's tensors, are made anew."""
        return {**self.__dict__, "_slots": None, "quantizers": {}, "_weight_operands": {}}

    def set_extra_state(self, state: Any) -> None:
        """What `get_extra_state` of this library or of Transformer Engine returned."""
        loaded = from_bytes(state)
        if loaded is None:
            return
        recipe, tensors = loaded
        self._slots = None
        slots = [Slots([]), Slots([])]
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        slots = list(self.slots_of(recipe, device))
        for half, word in zip(slots, ("fwd", "bwd"), strict=True):
            if half.state is not None:
                copy_into(half.state, tensors, word, type(self).__name__)

    def reset_fp8_meta_tensors(self) -> None:
        """Forget delayed scaling's scales and histories."""
        self._slots = None
        for where in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta.pop(where, None)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the module the process group over which it is split."""
        self.tp_group = tp_group


class _Calibrating(Quantizer):
    """Records amaxes and quantises nothing."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.quantizer = quantizer

    def operand(self, x_MK: Tensor, *, rows: bool, columns: bool) -> Operand:
        self.quantizer.calibrate(x_MK)
        return Operand(x_MK if rows else None, x_MK.t() if columns else None)


def _with_scales(quantizers: list[Any], scale: Tensor) -> list[Any]:
    """The quantisers of a pass that is computed again: earlier scales, and amaxes that nobody reads."""
    old = [q for q in quantizers if isinstance(q, Float8Quantizer)]
    again = iter([Float8Quantizer(scale[i], torch.zeros_like(q.amax), q.dtype) for i, q in enumerate(old)])
    return [next(again) if isinstance(q, Float8Quantizer) else q for q in quantizers]


def use_recipe(model: nn.Module, recipe: Recipe | None) -> nn.Module:
    """Give every module of `fewbits.te` in ``model`` a recipe of its own, for which no context is needed.

    With delayed scaling the histories advance at the end of each of the model's own forward passes.

    Args:
        model: any module.
        recipe: None goes back to the context's.

    Returns:
        ``model``.
    """
    for module in model.modules():
        if isinstance(module, Module):
            module.recipe = recipe
    for handle in model.__dict__.pop("_te_region_hooks", ()):
        handle.remove()
    if recipe is not None and recipe.delayed():
        model.__dict__["_te_region_hooks"] = _region_hooks(model)
    return model


def _enter(*_: Any) -> None:
    enter_region()


def _leave(*_: Any) -> None:
    leave_region()


def _region_hooks(model: nn.Module) -> list[Any]:
    """A region for each outermost forward pass of ``model``."""
    return [model.register_forward_pre_hook(_enter), model.register_forward_hook(_leave, always_call=True)]


def refuse(condition: bool, what: str, instead: str) -> None:
    """Refuse an argument that has no meaning here, in one sentence.

    Raises:
        Unsupported: if ``condition``.
    """
    if condition:
        raise Unsupported(f"{what} is not supported by fewbits.te: {instead}.")
