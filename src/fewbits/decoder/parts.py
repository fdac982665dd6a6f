"""From the modules of one decoder layer to what the fused nodes compute with, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from fewbits.decoder.attention_half import AttentionHalf, fused_attention
from fewbits.decoder.both_halves import Norm
from fewbits.decoder.guard import Guard, refuse_hooks
from fewbits.decoder.keep import Keep
from fewbits.decoder.limits import why_not_attention, why_not_by_spec
from fewbits.decoder.masked_attention import masked_attention
from fewbits.decoder.mlp_half import MLPHalf, fused_mlp
from fewbits.decoder.own_mlp import OwnMLP, residual_factor
from fewbits.decoder.products import (
    CachedValues,
    DenseProjection,
    Float8Projection,
    PairedValues,
    RoundedProjection,
)
from fewbits.decoder.projection import Branch, Part, Projection, RoundedPart, write_adapters
from fewbits.decoder.prompt_cache import filling
from fewbits.decoder.scales import Slot
from fewbits.decoder.weight_scales import WeightScale, scale_of
from fewbits.errors import NotFused
from fewbits.families.shapes import field_of
from fewbits.families.spec import Attention, ModelSpec
from fewbits.formats import E4M3, E4M3_ROW
from fewbits.host.attention import attention_facts, is_plain_mask
from fewbits.kernels.decoder.qkv_epilogue import QKVLayout
from fewbits.kernels.product.matmul_packed import PLAIN, Operands
from fewbits.nn.attention import attention
from fewbits.nn.fake_quantize import FakeQuantizedLinear
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.nn.segments import Segments
from fewbits.nn.tensor_group import WholeLinear, own_weight
from fewbits.nn.tensor_state import TensorState, state_of

FLOAT8_SIDES = 16  # what the sides of a float8 product's weight are multiples of
MAX_RANK = 128  # of one branch: wider ones do not fit beside the tiles that they are added to
FLOAT8 = Operands(activation=E4M3_ROW, gradient=E4M3_ROW, weight_operand=E4M3)
# Transformers' names of activations, and the kernels'.
KERNEL_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class LayerParts:
    """Finds norms and projections in one decoder layer, anew for each call: adapters come and go."""

    def __init__(self, layer: nn.Module, spec: ModelSpec, name: str) -> None:
        """``spec`` is the layer's (`spec_of_layer`)."""
        self.layer, self.spec, self.name = layer, spec, name
        self.own_mlp = None if spec.mlp is not None else OwnMLP.of(layer, spec)
        self._guard = Guard(layer, spec, () if self.own_mlp is None else self.own_mlp.called)
        self._scales: dict[tuple[str, ...], tuple[Any, WeightScale]] = {}
        self._decoded: dict[tuple[str, ...], tuple[Any, CachedValues]] = {}
        self.found: dict[tuple[str, ...], tuple[list[Any], WeightScale]] = {}  # see `PassScales`
        self.float8_stays = False  # see `PromptWeights`

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: what was kept is of the weights of this layer, and the copy has its own."""
        return {**vars(self), "_scales": {}, "_decoded": {}, "found": {}, "float8_stays": False}

    def run(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kwargs: dict[str, Any],
        keep: Keep,
        stash: Any,
        delayed: tuple[Slot, Slot] | None,
    ) -> Tensor:
        """The layer's output for x (B, S, H); raises `NotFused` before anything is computed."""
        self._guard.check()
        attention = self.attention(x, rotary, mask, kwargs, keep, stash)
        if self.own_mlp is not None:
            write_adapters((attention.qkv, attention.o), _products_dtype(x))
            return self.own_mlp.run(fused_attention(x, attention), self._before_own_mlp(), keep, stash)
        mlp = self.mlp(x, keep, stash, delayed)
        write_adapters((attention.qkv, attention.o, mlp.gate_up, mlp.down), _products_dtype(x))
        return fused_mlp(fused_attention(x, attention), mlp)

    def attention(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        kwargs: dict[str, Any],
        keep: Keep,
        stash: Any,
    ) -> AttentionHalf:
        """The attention half of this call, for x (B, S, H)."""
        facts = self._facts()
        module = self._module(facts.path)
        config = module.config
        if self.layer.training and (module.attention_dropout or getattr(config, "resid_pdrop", 0.0)):
            raise NotFused("the configuration asks for dropout")
        dtype = _products_dtype(x)
        group = vars(self.layer).get("tensor_group")
        ranks = 1 if group is None else group.size  # each has its own heads
        norms_rows = self.spec.norm.query is not None and self.spec.norm.query_key_over == "row"
        if norms_rows and ranks > 1:
            raise NotFused("its norms of queries and keys go over the heads of several ranks")
        keys = config.num_key_value_heads // ranks
        layout = QKVLayout(x.shape[0], keys * module.num_key_value_groups, keys, module.head_dim)
        return AttentionHalf(
            norm=self._needed(self.spec.norm.before_attention),
            qkv=self._projection(facts.inputs, dtype, keep),
            o=self._projection((facts.output,), dtype, keep),
            layout=layout,
            rotary=rotary,
            attend=filling(self._attend(x, module, mask, kwargs), kwargs.get("past_key_values"), module),
            norms_rows=norms_rows,
            factor=residual_factor(self.layer, self.spec),
            q_norm=self._optional(self.spec.norm.query),
            k_norm=self._optional(self.spec.norm.key),
            post_norm=self._optional(self.spec.norm.after_attention),
            keep=keep,
            stash=stash,
            dtype=dtype,
            group=group,
        )

    def mlp(self, x: Tensor, keep: Keep, stash: Any, delayed: tuple[Slot, Slot] | None) -> MLPHalf:
        """The MLP half of this call.

        x is (B, S, H).
        """
        mlp = self.spec.mlp
        assert mlp is not None
        config: Any = self._module(self._facts().path).config
        name = field_of(config, mlp.activation)
        if name not in KERNEL_ACTIVATIONS:
            raise NotFused(f"no kernel for the activation {name!r}")
        dtype = _products_dtype(x)
        return MLPHalf(
            norm=self._needed(self.spec.norm.before_mlp),
            gate_up=self._projection(mlp.inputs, dtype, keep),
            down=self._projection((mlp.output,), dtype, keep),
            activation=KERNEL_ACTIVATIONS[name],
            post_norm=self._optional(self.spec.norm.after_mlp),
            keep=keep,
            stash=stash,
            delayed=delayed,
            dtype=dtype,
            group=vars(self.layer).get("tensor_group"),
        )

    def _attend(
        self, x: Tensor, module: Any, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Callable[..., Tensor]:
        if kwargs.get("output_attentions", getattr(module.config, "output_attentions", False)):
            raise NotFused("the call asks for attention weights")
        if not getattr(module, "is_causal", True):
            raise NotFused("attention is not causal")
        facts = attention_facts(module, self._facts())
        window, soft_cap = int(facts.window or 0) or None, facts.soft_cap
        segments = Segments.from_keywords(kwargs, x.shape[0] * x.shape[1])
        if mask is None or is_plain_mask(mask) or segments is not None:
            return partial(attention, scale=facts.scale, window=window, soft_cap=soft_cap, segments=segments)
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            raise NotFused("the call has an attention mask that no fused attention takes")
        eager = str(module.config._attn_implementation).endswith("eager")
        return partial(masked_attention, mask=mask, scale=facts.scale, soft_cap=soft_cap, eager=eager)

    @property
    def norm_paths(self) -> tuple[str, ...]:
        """Paths of the norms that nodes compute."""
        called = () if self.own_mlp is None else self.own_mlp.called
        before = self.spec.norm.before_mlp
        return tuple(path for path in self.spec.norms if path == before or path not in called)

    def norm(self, path: str) -> Norm:
        """One of the layer's norms; raises `NotFused` if it is not what it was."""
        module = self._module(path)
        self._guard.check_norm(path, module)
        eps = getattr(module, "variance_epsilon", None)
        return Norm(own_weight(module), module.eps if eps is None else eps, self.spec.norm.offset)

    @property
    def attention_path(self) -> str:
        """Path of the attention module in the layer."""
        return self._facts().path

    def _module(self, path: str) -> Any:
        """``layer.get_submodule(path)``, without its checks at each step of the way."""
        module: Any = self.layer
        for name in path.split("."):
            module = module._modules.get(name)
            if module is None:
                return self.layer.get_submodule(path)
        return module

    def _facts(self) -> Attention:
        attention = self.spec.attention
        if attention is None:
            raise NotFused("its family's spec says nothing of its attention")
        return attention

    def _needed(self, path: str | None) -> Norm:
        if path is None:
            raise NotFused("one of its halves has no norm before it")
        return self.norm(path)

    def _before_own_mlp(self) -> Norm | None:
        """The norm before an MLP of the layer's own; None where the module has to be called."""
        try:
            return self._optional(self.spec.norm.before_mlp)
        except NotFused:  # it has hooks, or is another module now
            return None

    def _optional(self, path: str | None) -> Norm | None:
        return None if path is None else self.norm(path)

    def _projection(self, paths: tuple[str, ...], dtype: torch.dtype, keep: Keep) -> Projection:
        try:
            pairs = [part_of(self._module(path), path) for path in paths]
        except NotFused:  # perhaps for an adapter of PEFT's own kind, whose merge writes unseen
            self._decoded.pop(paths, None)
            self._scales.pop(paths, None)
            raise
        parts = tuple(part for part, _ in pairs)
        operands = {o for _, o in pairs}
        rounded = tuple(part for part in parts if isinstance(part, RoundedPart))
        if rounded and len(rounded) < len(parts):
            raise NotFused(f"of {', '.join(paths)} some are rounded in training and some are not")
        stays = self.float8_stays and operands == {FLOAT8} and not torch.is_grad_enabled()
        stored = _Stored([part.weight for part in parts])
        values_kept = self._values(paths, parts, stored) if keep.weights or stays else None
        if rounded:
            return RoundedProjection(rounded)
        if operands == {PLAIN}:
            return DenseProjection(parts) if values_kept is None else DenseProjection(parts, values_kept)
        if operands == {FLOAT8}:
            if dtype not in (torch.bfloat16, torch.float32):
                raise NotFused(f"float8 products come out in bfloat16 or float32, not in {dtype}")
            _refuse_sides(paths, sum(part.width for part in parts), int(parts[0].weight.shape[1]))
            scale, values = self._scale(paths, parts, stored), self._paired(parts, keep) or values_kept
            return (
                Float8Projection(parts, scale) if values is None else Float8Projection(parts, scale, values)
            )
        raise NotFused(f"{', '.join(paths)} have formats of their operands that no fused product takes")

    def why_never(self) -> str | None:
        """Why no call can be fused, whatever its adapters; None if one may be."""
        if residual_factor(self.layer, self.spec) != 1.0:
            output: Any = self.layer.get_submodule(self._facts().output)
            if getattr(output, "base_layer", output).bias is not None:
                return "its attention's output is multiplied before it is added, and has a bias"
        for paths in self.spec.products:
            modules = [self.layer.get_submodule(path) for path in paths]
            bases: list[Any] = [getattr(m, "base_layer", m) for m in modules]
            if all(getattr(base, "operands", None) == FLOAT8 for base in bases):
                try:
                    _refuse_sides(paths, sum(b.out_features for b in bases), bases[0].in_features)
                except NotFused as reason:
                    return str(reason)
        return None

    @property
    def values_kept(self) -> tuple[int, ...]:
        """Which values of weights are kept; equal to an earlier answer while none was made or let go of."""
        return tuple(values.state for _, values in self._decoded.values())

    def float8_values(self, stay: bool) -> None:
        """Have float8 values of frozen weights stay from prompt to prompt, or let go of them."""
        self.float8_stays = stay
        if not stay:
            self._decoded.clear()

    def float8_weights(self) -> list[tuple[torch.device, int]]:
        """Device and number of values of each weight that float8 products take."""
        modules = [self.layer.get_submodule(path) for paths in self.spec.products for path in paths]
        bases: list[Any] = [getattr(module, "base_layer", module) for module in modules]
        float8 = [base for base in bases if getattr(base, "operands", None) == FLOAT8]
        return [(next(base.parameters()).device, base.in_features * base.out_features) for base in float8]

    def _paired(self, parts: tuple[Part, ...], keep: Keep) -> PairedValues | None:
        """A place for the transposed float8 weights, where all is kept and every weight is made anew anyway.

        FSDP2 gives a gathered layer back after its forward pass: keeping its values would keep them all.
        """
        all_train = all(isinstance(part.weight, Tensor) and part.weight.requires_grad for part in parts)
        sharded = getattr(self.layer, "_is_fsdp_managed_module", False)
        return (
            PairedValues() if all_train and keep.normed and not sharded and torch.is_grad_enabled() else None
        )

    def forget_values(self) -> None:
        """Let go of all values of weights that were kept (`Keep.weights`)."""
        self._decoded.clear()
        if self.own_mlp is not None:
            self.own_mlp.keep_values(False)

    def forget_weights(self) -> None:
        """Let go of all that was made from the weights, scales included."""
        self._decoded.clear()
        self._scales.clear()
        if self.own_mlp is not None:
            self.own_mlp.forget_values()

    def _values(
        self, paths: tuple[str, ...], parts: tuple[Part, ...], stored: _Stored
    ) -> CachedValues | None:
        """Where values of frozen weights stay while these are the same tensors; None where some may change.

        FSDP2 gives a gathered layer back, and fills one tensor over and over.
        """
        rounded = any(isinstance(part, RoundedPart) for part in parts)
        if rounded or stored.trains or getattr(self.layer, "_is_fsdp_managed_module", False):
            self._decoded.pop(paths, None)
            return None
        entry = self._decoded.get(paths)
        if entry is None or entry[0] != stored.state:
            self._decoded[paths] = entry = (stored.state, CachedValues())
        return entry[1]

    def _scale(self, paths: tuple[str, ...], parts: tuple[Part, ...], stored: _Stored) -> WeightScale:
        """One scale for the weights side by side; kept while they stay the same frozen tensors.

        Weights that train get theirs anew: torch's fused optimizers write them without counting a version.
        FSDP2 fills one tensor over and over: there frozen ones keep their scale though their address changes.
        """
        weights = [part.weight for part in parts]
        if stored.trains:
            self._scales.pop(paths, None)  # frozen later, it is another weight
            of, scale = self.found.pop(paths, (None, None))
            same = of is not None and all(a is b for a, b in zip(of, weights, strict=True))
            return scale if same and scale is not None else _scale_now(weights)
        sharded = getattr(self.layer, "_is_fsdp_managed_module", False)
        key = tuple(map(WeakIdRef, stored.tensors)) if sharded else stored.state
        entry = self._scales.get(paths)
        if entry is None or entry[0] != key:
            self._scales[paths] = entry = (key, _scale_now(weights))
        return entry[1]

    def trained(self, device: torch.device) -> list[tuple[tuple[str, ...], list[Any]]]:
        """Float8 products whose weights train and lie on ``device`` as they are, by the linears' paths.

        FSDP2 gathers a layer's weights when the layer runs, so that they are not there yet.
        """
        if getattr(self.layer, "_is_fsdp_managed_module", False):
            return []
        products = []
        for paths in self.spec.products:
            modules = [self.layer.get_submodule(path) for path in paths]
            if all(type(m) is LowPrecisionLinear and m.operands == FLOAT8 for m in modules):
                weights: list[Any] = [m.weight for m in modules]
                here = all(type(w) in (Tensor, nn.Parameter) and w.device == device for w in weights)
                if here and any(w.requires_grad for w in weights):
                    products.append((paths, weights))
        return products


class _Stored:
    """The tensors that hold weights, all parts of packed ones; what is asked of them is looked up once."""

    def __init__(self, weights: Iterable[Any]) -> None:
        self.tensors = [t for w in weights for t in ([w] if isinstance(w, Tensor) else w.parts.values())]

    @cached_property
    def trains(self) -> bool:
        return any(t.requires_grad for t in self.tensors)

    @cached_property
    def state(self) -> tuple[TensorState, ...]:
        return state_of(self.tensors)


@torch.no_grad()
def _scale_now(weights: list[Any]) -> WeightScale:
    return scale_of(weights)


def part_of(module: Any, path: str) -> tuple[Part, Operands]:
    """One linear, its adapter included, and the formats of its operands.

    Raises:
        NotFused: it does something that the nodes do not.
    """
    base, branch = module, None
    if hasattr(module, "base_layer"):
        base, branch = module.base_layer, _branch(module, path)
    refuse_hooks(path, module, base)
    if type(base) is QuantizedLinear:
        return Part(base.frozen(), base.bias, branch), base.operands
    if type(base) is LowPrecisionLinear:
        return Part(base.weight, base.bias, branch), base.operands
    if type(base) is FakeQuantizedLinear:
        if base.activation_format is not None:
            raise NotFused(f"{path} rounds its inputs, which no fused product does")
        return RoundedPart(base.weight, base.bias, branch, rounding=base.weight_format), PLAIN
    if type(base) is nn.Linear:
        return Part(base.weight, base.bias, branch), PLAIN
    raise NotFused(f"{path} is a {type(base).__name__}")


def _branch(module: nn.Module, path: str) -> Branch | None:
    from fewbits.nn.lora import LoRALinear

    if type(module) is not LoRALinear:
        raise NotFused(f"{path} has an adapter of the kind {type(module).__name__}")
    if module.disable_adapters or module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise NotFused("several adapters are active at once")
    (name,) = active
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p:
        raise NotFused("the adapter has dropout")
    if module.lora_bias[name]:
        raise NotFused("the adapter has a bias")
    if module.lora_variant:
        raise NotFused(f"an adapter of {path} is a variant of LoRA, which PEFT's layer computes")
    if any(type(part) not in (nn.Linear, WholeLinear) for part in (a, b)):
        raise NotFused(f"the adapter of {path} is made of {type(a).__name__} and {type(b).__name__}")
    if a.weight.shape[0] > MAX_RANK:
        raise NotFused(f"the adapter's rank is {a.weight.shape[0]}, and the kernels add {MAX_RANK} at most")
    refuse_hooks(path, a, b, dropout)
    return Branch(own_weight(a), own_weight(b), module.scaling[name])


def _products_dtype(x: Tensor) -> torch.dtype:
    """In which dtype the products of hidden states x are: autocast's where it is on, else x's."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == x.dtype:
        return x.dtype
    if x.dtype != torch.float32:
        raise NotFused(f"autocast is on and the hidden states are {x.dtype}")
    return torch.get_autocast_dtype(kind)


def _refuse_sides(paths: tuple[str, ...], N: int, K: int) -> None:
    """Raise `NotFused` where the units multiply no float8 matrices of these sides."""
    if N % FLOAT8_SIDES or K % FLOAT8_SIDES:
        raise NotFused(
            f"{', '.join(paths)} have {N} outputs and {K} inputs, and float8 products need multiples of"
            f" {FLOAT8_SIDES}"
        )


def check_layer(layer: nn.Module, parts: LayerParts) -> str | None:
    """Why this layer can never be fused, or None."""
    hook = vars(layer).get("_hf_hook")  # accelerate's, of a device map
    if getattr(hook, "offload", False):
        return "its weights wait on another device (a device map with cpu or disk)"
    if "forward" in vars(layer) and hook is None:
        return "it has a forward of its own (another library's patch)"
    for path in (*parts.spec.linears, *parts.spec.norms):
        try:
            layer.get_submodule(path)
        except AttributeError:
            return f"it has no {path}"
    attention: Any = layer.get_submodule(parts.attention_path)
    config, index = getattr(attention, "config", None), getattr(attention, "layer_idx", None)
    if parts.own_mlp is not None:
        reason = parts.own_mlp.why_not or why_not_attention(parts.spec, config, index)
    else:
        reason = why_not_by_spec(parts.spec, config, index)
    return reason or parts.why_never()
