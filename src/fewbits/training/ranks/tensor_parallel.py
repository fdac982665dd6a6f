"""`tensor_parallel`: the ranks of a mesh share every layer, by the model's own plan, packed or not.

transformers' configurations name the linears that are cut by outputs ("colwise") and by inputs ("rowwise").
What is cut here are the modules themselves: each rank then has smaller linears, packed ones too
(`fewbits.training.ranks.packed_slices`), and its own heads; the fused nodes and the layers' own forward sum
over the ranks where `fewbits.nn.tensor_group` says. Of an adapter, the side that touches the cut axis is cut
with its linear, the other is whole on all ranks. Embeddings, norms and the output head are whole.

A linear that holds several (Phi's qkv_proj and gate_up_proj) is cut part by part: each rank has rows of q, of
k and of v. transformers' plan for it gathers the outputs of all ranks instead; here nothing is gathered.

All ranks of a group see the same batch. `fewbits.training.ranks.fsdp.shard` over the other dimension of a
mesh comes after it. The norm of all gradients is known to no rank alone: `clip_grad_norm` finds it. Run on
two H200s, plain and packed (tests/training/test_several_gpus.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fewbits.decoder.guard import for_unfused_layers
from fewbits.errors import Unsupported
from fewbits.families.shapes import field_of
from fewbits.families.spec import MLP, Attention, ModelSpec
from fewbits.host.attention import used_attention
from fewbits.host.receipt import Change, Receipt
from fewbits.host.record import part_of, put_part
from fewbits.host.spec import find, layer_names, spec_for
from fewbits.nn.cut_dropout import CutDropout
from fewbits.nn.linear import LowPrecisionLinear, QuantizedLinear
from fewbits.nn.norm import RMSNorm
from fewbits.nn.tensor_group import TensorGroup, WholeLinear, sum_gradient, sum_value
from fewbits.training.ranks.fsdp import is_sharded, local
from fewbits.training.ranks.packed_slices import cut

_AXES = {"colwise": 0, "rowwise": 1}  # the axis of the weight (N, K) that is cut
# of a family whose linears hold several: transformers gathers what it has cut, and cuts it again
_GATHERED = {"colwise_gather_output": 0, "colwise_rep": 0, "rowwise_split_input": 1, "rowwise_rep": 1}


@dataclass
class TensorParallel:
    """What `tensor_parallel` left on a model.

    Attributes:
        group: the ranks that share its layers.
        receipt: what was cut, and how.
        cuts: the axis along which a parameter was cut, by its full name; the others are whole on each rank.
        parts: rows of the parts of a parameter that was cut part by part along axis 0, by its full name.
        mesh: all ranks, for checkpoints (`fewbits.training.checkpoints.whole_views`).
    """

    group: TensorGroup
    receipt: Receipt
    cuts: dict[str, int] = field(default_factory=dict)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mesh: Any = None


@dataclass(frozen=True)
class _Cut:
    """Where a linear is cut.

    Attributes:
        axis: 0, its outputs, or 1, its inputs.
        sizes: of the parts along that axis that are cut each.
        group: by whom.
    """

    axis: int
    sizes: tuple[int, ...]
    group: TensorGroup

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Begin and end of what is this rank's."""
        ranges, begin = [], 0
        for size in self.sizes:
            length = size // self.group.size
            first = begin + self.group.rank * length
            ranges.append((first, first + length))
            begin += size
        return ranges

    @property
    def length(self) -> int:
        """Of what is this rank's."""
        return sum(self.sizes) // self.group.size

    def of(self, parameter: Tensor) -> nn.Parameter:
        """This rank's pieces of a parameter, in memory of their own."""
        slices = [parameter.detach().narrow(self.axis, a, b - a) for a, b in self.pieces]
        return nn.Parameter(torch.cat(slices, self.axis), requires_grad=parameter.requires_grad)


def tensor_parallel(model: Any, mesh: Any, *, before: Callable[[str], None] | None = None) -> Receipt:
    """Cut the layers of ``model`` for the ranks of ``mesh``, in place; before it is sharded.

    Args:
        model: a model that is whole and the same on all these ranks; with adapters the PeftModel.
        mesh: a device mesh of one dimension.
        before: called with the name of each linear before it is cut, where that has no values until then.

    Returns:
        What was cut, and how.

    Raises:
        Unsupported: the plan, the number of heads or a packed weight does not allow it.
    """
    spec = spec_for(model)
    attention, mlp = _halves(spec)
    group = TensorGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    _refuse(model, group, mlp)
    receipt = Receipt(f"{spec.model_type}, layers shared by {group.size} ranks (tensor parallelism)")
    state = TensorParallel(group, receipt)
    axes = _axes(model, spec)
    for name in layer_names(model, spec):
        layer: Any = model.get_submodule(name)
        for path, axis in axes.items():
            if before is not None:
                before(f"{name}.{path}")
            _cut_linear(model, f"{name}.{path}", axis, _parts(layer, path, spec), state, receipt)
        own: Any = layer.get_submodule(attention.path)
        layer.tensor_group = own.tensor_group = group
        if spec.fused:
            _own_heads(own, group)
        for norm in (spec.norm.query, spec.norm.key):
            _share_norm(None if norm is None else find(layer, norm), group)
        _sum_unfused(own, layer.get_submodule(mlp.path), group)
    _same_on_all(model, state, mesh.device_type)
    receipt.notes.append("embeddings, norms and the output head are whole on each rank")
    put_part(model, state)
    return receipt


def _halves(spec: ModelSpec) -> tuple[Attention, MLP]:
    """Attention and MLP of a family whose layers can be cut."""
    if spec.generic:
        raise Unsupported(f"{spec.without_spec}, so its layers cannot be cut among ranks; use parallel=fsdp.")
    if spec.attention is None or spec.mlp is None or spec.other_linears or spec.experts is not None:
        raise Unsupported(
            f"layers of {spec.model_type} are more than attention and one MLP, and cannot be cut among ranks;"
            " use parallel=fsdp."
        )
    if spec.norm.query is not None and spec.norm.query_key_over == "row":
        raise Unsupported(
            f"{spec.model_type} normalises queries and keys over all heads, which ranks that share them"
            " cannot; use parallel=fsdp."
        )
    return spec.attention, spec.mlp


def tensor_parallel_of(model: Any) -> TensorParallel | None:
    """What `tensor_parallel` left on this model."""
    return part_of(model, TensorParallel)


@torch.no_grad()
def clip_grad_norm(model: Any, max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of a model that is sharded, shared, both or neither: a scalar.

    Returns:
        The norm of all gradients before, the same on all ranks.
    """
    state = tensor_parallel_of(model)
    cuts = {} if state is None else state.cuts
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not named:
        return torch.zeros((), dtype=torch.float32)
    mesh = next((grad.device_mesh for _, grad in named if hasattr(grad, "device_mesh")), None)
    # of what is whole on the ranks of a layer, and cut
    squares = torch.zeros(2, device=named[0][1].device, dtype=torch.float32)
    for name, grad in named:
        squares[int(name in cuts)] += local(grad).float().square().sum()
    if mesh is not None:
        distributed.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))  # the slices; replicas are equal
    if state is not None:
        state.group.sum_(squares[1:])
    norm = squares.sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in named:
        local(grad).mul_(factor.to(grad.dtype))
    return norm


def _axes(model: Any, spec: ModelSpec) -> dict[str, int]:
    """By the configuration's plan, whose names begin with "layers"."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    styles = {**_AXES, **_GATHERED} if spec.fused else _AXES
    axes = {}
    for path in spec.linears:
        style = next((s for name, s in plan.items() if fnmatchcase(f"layers.0.{path}", name)), None)
        if style not in styles:
            raise Unsupported(
                f"the plan of {model.config.model_type} for {path} is {style!r}, and layers are shared by"
                " rows ('colwise') and columns ('rowwise') only; use parallel=fsdp for this family."
            )
        axes[path] = styles[style]
    return axes


def _parts(layer: Any, path: str, spec: ModelSpec) -> tuple[int, ...] | None:
    """Outputs of each linear that this one holds; None: it is one."""
    attention, mlp = _halves(spec)
    own = layer.get_submodule(attention.path)
    config, head = own.config, own.head_dim
    if attention.inputs == (path,):
        keys = config.num_key_value_heads * head
        return config.num_attention_heads * head, keys, keys
    if mlp.inputs == (path,) and mlp.is_gated:
        inner = field_of(config, mlp.width)
        return inner, inner
    return None


class _OwnHeads:
    """A configuration, but for the number of heads: this rank's."""

    def __init__(self, config: Any, size: int) -> None:
        self._config, self.num_attention_heads = config, config.num_attention_heads // size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # asked of what copy has not filled yet
            raise AttributeError(name)
        return getattr(self._config, name)


def _own_heads(attention: Any, group: TensorGroup) -> None:
    """For its own forward, which finds where the queries end by their number."""
    attention.config = _OwnHeads(attention.config, group.size)
    attention.num_key_value_heads //= group.size


def _refuse(model: Any, group: TensorGroup, mlp: MLP) -> None:
    if tensor_parallel_of(model) is not None or is_sharded(model):
        raise Unsupported("this model is shared or sharded already; share its layers first, and once.")
    config = model.config.get_text_config()
    if getattr(config, "attention_dropout", 0.0) and used_attention(model) is None:
        raise Unsupported(
            f"attention has dropout {config.attention_dropout}, and ranks that share its heads would drop the"
            " same places in each part; call fewbits.host.attention.use_attention first, or set"
            " attention_dropout to 0."
        )
    for what in ("num_attention_heads", "num_key_value_heads", mlp.width):
        count = getattr(config, what)
        if count % group.size:
            raise Unsupported(
                f"{what} is {count}, which {group.size} ranks cannot share equally; use a number of ranks"
                " that divides it."
            )


def _cut_linear(
    model: Any, name: str, axis: int, parts: tuple[int, ...] | None, state: TensorParallel, receipt: Receipt
) -> None:
    outer: Any = model.get_submodule(name)
    base = outer.base_layer if hasattr(outer, "base_layer") else outer
    before, size = type(base).__name__, _bytes(outer)
    where = _Cut(axis, parts or ((base.out_features, base.in_features)[axis],), state.group)
    smaller = _smaller(name, base, where)
    if outer is base:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, smaller)
        prefix = name
    else:
        outer.base_layer, prefix = smaller, f"{name}.base_layer"
        _cut_adapters(name, outer, where, state)
    for leaf, parameter in smaller.named_parameters():
        if leaf != "bias" or axis == 0:
            _note_cut(state, f"{prefix}.{leaf}", where, parameter, base.get_parameter(leaf))
    what = f"{'outputs' if axis == 0 else 'inputs'} {where.length} of {sum(where.sizes)}"
    after = what if parts is None else f"{what} in {len(parts)} parts"
    receipt.changes.append(Change(name, before, after, size, _bytes(model.get_submodule(name))))


def _note_cut(state: TensorParallel, name: str, where: _Cut, part: Tensor, whole: Tensor) -> None:
    if part.shape == whole.shape:
        return
    state.cuts[name] = along = where.axis if part.dim() == 2 else 0
    if len(where.sizes) > 1:  # of a vector through all rows, so many entries a row
        state.parts[name] = tuple(part.shape[along] * size // where.length for size in where.sizes)


def _smaller(name: str, base: Any, where: _Cut) -> nn.Module:
    """The linear with some of its outputs, or some of its inputs; the bias of the latter is added once."""
    axis, length = where.axis, where.length
    outputs, inputs = (length, base.in_features) if axis == 0 else (base.out_features, length)
    if type(base) is QuantizedLinear:
        packed = cut(base.packed, axis, *where.pieces)
        smaller: Any = QuantizedLinear(inputs, outputs, packed.format, dtype=base.dtype, device="meta")
        smaller.operands = base.operands
        smaller.load_packed(packed)
    elif type(base) in (nn.Linear, LowPrecisionLinear):
        smaller = type(base)(inputs, outputs, bias=False, device="meta")
        smaller.weight = where.of(base.weight)
        if isinstance(base, LowPrecisionLinear):
            smaller.operands = base.operands
    else:
        raise Unsupported(
            f"{name} is a {type(base).__name__}, which is not shared by ranks yet; use parallel=fsdp or ddp."
        )
    if base.bias is not None:
        smaller.bias = base.bias if axis else where.of(base.bias)
        if axis and base.bias.requires_grad:
            raise Unsupported(f"the bias of {name} trains, and it is added on one rank only; freeze it.")
        if axis and where.group.rank:
            smaller.bias = nn.Parameter(torch.zeros_like(base.bias), requires_grad=False)
    smaller.tensor_group = where.group  # an adapter that came now would not be shared
    smaller.train(base.training)
    return smaller  # type: ignore[no-any-return]


def _cut_adapters(name: str, outer: Any, where: _Cut, state: TensorParallel) -> None:
    from fewbits.nn.lora import LoRALinear

    odd = any(outer.lora_bias.values()) or outer.merged or getattr(outer, "lora_variant", {})
    if type(outer) is not LoRALinear or odd:
        raise Unsupported(
            f"the adapter on {name} is merged, has a bias, or is not a plain LoRA of fewbits; only those are"
            " shared by ranks."
        )
    outer.in_features, outer.out_features = outer.base_layer.in_features, outer.base_layer.out_features
    for adapter, drop in outer.lora_dropout.items():
        if where.axis == 1 and isinstance(drop, nn.Dropout):
            outer.lora_dropout[adapter] = CutDropout(drop.p, where.group).train(drop.training)
    for adapter in outer.lora_A:
        a, b = outer.lora_A[adapter], outer.lora_B[adapter]
        own, whole = (b, a) if where.axis == 0 else (a, b)  # which touches the cut axis
        before, own.weight = own.weight, where.of(own.weight)
        own.in_features, own.out_features = own.weight.shape[1], own.weight.shape[0]
        WholeLinear.take(whole, state.group)
        side = "B" if where.axis == 0 else "A"
        _note_cut(state, f"{name}.lora_{side}.{adapter}.weight", where, own.weight, before)


def _share_norm(norm: Any, group: TensorGroup) -> None:
    """The norm of a head: each rank has some of the heads that its weight's gradient comes from."""
    if norm is None:
        return
    if norm.weight.requires_grad and not isinstance(norm, RMSNorm):
        raise Unsupported(
            f"a {type(norm).__name__} of heads trains, whose gradient is summed in fewbits' own norm only;"
            " convert the model with fuse_norms, or freeze the norm."
        )
    norm.tensor_group = group


def _sum_unfused(attention: nn.Module, mlp: nn.Module, group: TensorGroup) -> None:
    """Hooks for the layers' own forward; the fused nodes call neither module."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            return (sum_gradient(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": sum_gradient(kwargs["hidden_states"], group)}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return sum_value(output[0], group), *output[1:]
        return sum_value(output, group)

    for module in (attention, mlp):
        module.register_forward_pre_hook(for_unfused_layers(before), with_kwargs=True)
        module.register_forward_hook(for_unfused_layers(after))


def _same_on_all(model: Any, state: TensorParallel, device_type: str) -> None:
    """What trains and is whole has the first rank's values; a model on the host is sent through the GPUs."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in state.cuts:
            sent = parameter.data.to(device_type)
            distributed.broadcast(sent, group=state.group.process_group, group_src=0)
            parameter.data.copy_(sent)


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


__all__ = ["TensorParallel", "clip_grad_norm", "tensor_parallel", "tensor_parallel_of"]
