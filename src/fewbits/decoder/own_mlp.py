"""Layers of which only the attention half is fused; the other half runs as the modules that it is made of.

    y = fused_attention(x)        z = y + m after(mlp(before(y)))        all (B, S, H)

``mlp`` is whatever a layer has there: a router and experts, an MLP without a gate; m is 1 but for families
whose halves are multiplied before they are added (Granite). Modules are called as the layer's own forward
calls them, so hooks below them run, and what transformers collects there (logits of routers) is collected.
What `Keep` says of the MLP holds for all of it: not kept, it is computed again from y, by torch's checkpoint,
and y waits on the host where inputs do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fewbits.decoder.both_halves import Norm, backward_norm
from fewbits.decoder.keep import Keep
from fewbits.families.shapes import field_of
from fewbits.families.spec import MLP, ModelSpec
from fewbits.host.spec import find
from fewbits.kernels.decoder.rmsnorm import rmsnorm, rmsnorm_rows
from fewbits.kernels.launch.derivatives import once_differentiable
from fewbits.kernels.launch.matrix import rows_of
from fewbits.nn.experts import QuantizedExperts


def spec_of_layer(spec: ModelSpec, layer: nn.Module) -> ModelSpec:
    """What a family's spec says of this one layer; without an MLP where no fused node computes it.

    Some layers of a mixture of experts have a dense MLP in the experts' place, and some models of a family
    have no norms of queries and keys.
    """
    norm = spec.norm
    if norm.query_key_if is not None and norm.query is not None and find(layer, norm.query) is None:
        spec = replace(spec, norm=replace(norm, query=None, key=None))
    mlp = spec.mlp
    if spec.experts is None and mlp is not None and mlp.is_gated:
        return spec
    if spec.experts is not None:
        mlp = mlp or MLP()
    dense = mlp if mlp is not None and mlp.is_gated and _has(layer, mlp.linears) else None
    has_experts = dense is None and spec.experts is not None and _has(layer, (spec.experts.path,))
    experts = spec.experts if has_experts else None
    return replace(spec, mlp=dense, experts=experts, some_layers=(), other_linears=())


def residual_factor(layer: nn.Module, spec: ModelSpec) -> float:
    """What each half of this layer is multiplied by before it is added."""
    attention = None if spec.attention is None else find(layer, spec.attention.path)
    return float(field_of(getattr(attention, "config", None), spec.residual_multiplier, 1.0))


def _has(layer: nn.Module, paths: tuple[str, ...]) -> bool:
    return all(find(layer, path) is not None for path in paths)


@dataclass(frozen=True)
class OwnMLP:
    """The second half of one layer, by the names of its modules.

    Attributes:
        layer: that has them.
        before: the norm before it.
        mlp: names of the layer's modules with parameters that are neither norms nor attention: one, where
            this can stand for the layer's own forward.
        after: the norm of its output, or None.
        factor: that its output is multiplied by before it is added.
    """

    layer: nn.Module
    before: str | None
    mlp: tuple[str, ...]
    after: str | None
    factor: float = 1.0

    @classmethod
    def of(cls, layer: nn.Module, spec: ModelSpec) -> OwnMLP:
        """What this layer has, by `spec_of_layer`."""
        others = {path.partition(".")[0] for path in spec.norms}
        if spec.attention is not None:
            others.add(spec.attention.path.partition(".")[0])
        names = tuple(
            name
            for name, module in layer.named_children()
            if name not in others and next(module.parameters(), None) is not None
        )
        return cls(layer, spec.norm.before_mlp, names, spec.norm.after_mlp, residual_factor(layer, spec))

    @property
    def why_not(self) -> str | None:
        """Why this cannot stand for the layer's own second half, or None."""
        if self.before is None:
            return "one of its halves has no norm before it"
        if len(self.mlp) != 1:
            names = " and ".join(self.mlp)
            return f"beside its attention it has {names or 'nothing'}, and one module can stand there"
        return None

    @property
    def called(self) -> tuple[str, ...]:
        """Paths in the layer of all that is called as it stands."""
        return tuple(path for path in (self.before, *self.mlp, self.after) if path is not None)

    @property
    def _packed(self) -> list[QuantizedExperts]:
        modules = (module for name in self.mlp for module in self.layer.get_submodule(name).modules())
        return [module for module in modules if isinstance(module, QuantizedExperts)]

    def keep_values(self, on: bool) -> None:
        """Keep the decoded weights of its experts from pass to pass (`Keep.weights`), or let go of them.

        FSDP2 gives a gathered layer back after its pass: keeping its values would keep them all.
        """
        on = on and not getattr(self.layer, "_is_fsdp_managed_module", False)
        for experts in self._packed:
            if on != experts.keeps_values:
                experts.keep_values(on)

    def forget_values(self) -> None:
        """Let go of those that are kept; the next pass makes them anew."""
        for experts in self._packed:
            experts.kept.clear()

    def run(self, y: Tensor, norm: Norm | None, keep: Keep, stash: Any) -> Tensor:
        """y and what the half adds to it, (B, S, H) both; inputs kept on the host are in ``stash``.

        ``norm`` is what the module ``before`` computes; None: the module is called.
        """
        if not torch.is_grad_enabled():
            return y + self._added(self._normed(y, norm))
        if keep.mlp:
            if norm is None:
                return y + self._added(self._normed(y, None))
            beside, normed = _NormBeside.apply(y, norm.weight, norm)  # type: ignore[no-untyped-call]
            return beside + self._added(normed)  # type: ignore[no-any-return]
        with on_host(stash) if keep.offload else contextlib.nullcontext():
            added: Tensor = checkpoint(lambda x: self._added(self._normed(x, norm)), y, use_reentrant=False)
        return y + added

    def _normed(self, y: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            module: Any = self.layer.get_submodule(str(self.before))
            return module(y)  # type: ignore[no-any-return]
        return rmsnorm(y, norm.weight, norm.eps, offset=norm.offset)

    def _added(self, normed: Tensor) -> Tensor:
        modules: Any = self.layer._modules
        z = modules[self.mlp[0]](normed)
        z = z[0] if isinstance(z, tuple) else z  # with the routers' logits, in transformers 4's way
        z = z if self.after is None else self.layer.get_submodule(self.after)(z)
        result: Tensor = z if self.factor == 1.0 else z * self.factor
        return result


class _NormBeside(torch.autograd.Function):
    """y (B, S, H) as it is, and its norm: one pass gives the gradient of both together."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        normed = rmsnorm_rows(rows_of(y), weight, norm.eps, offset=norm.offset)
        assert normed.y is not None
        ctx.norm = norm.eps, norm.offset
        ctx.save_for_backward(y, weight, normed.r)
        return y.view_as(y), normed.y.view(y.shape)

    @staticmethod
    @once_differentiable("the norm before the experts")
    def backward(ctx: Any, beside: Tensor, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, r = ctx.saved_tensors
        needs_dy, needs_dw, _norm = ctx.needs_input_grad
        eps, offset = ctx.norm
        dn, round_it = rows_of(dnormed.contiguous()), rows_of(beside.to(y.dtype).contiguous())
        norm = Norm(weight, eps, offset)
        dy, dw = backward_norm(dn, rows_of(y), norm, r, residual=round_it, needs_dw=needs_dw)
        return dy.view(y.shape) if needs_dy else None, dw, None


@contextlib.contextmanager
def on_host(stash: Any) -> Iterator[None]:
    """What autograd saves in here waits in ``stash`` (`fewbits.decoder.offload.HostStash`)."""

    def put(tensor: Tensor) -> Any:
        return stash.put(tensor) if tensor.numel() else tensor

    def get(handle: Any) -> Tensor:
        return handle if isinstance(handle, Tensor) else stash.get(handle)  # type: ignore[no-any-return]

    with saved_tensors_hooks(put, get):
        yield


__all__ = ["OwnMLP", "residual_factor", "spec_of_layer"]
