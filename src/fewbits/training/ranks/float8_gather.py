"""Weights that train travel in E4M3: what FSDP2 gathers of a linear is its values in one byte each.

    codes = float8(w / s)   on each rank      w' = codes * s   after the all-gather, in the gathered dtype

One scale s = largest magnitude / 448 for the linears of one product (q, k and v; gate and up), over all
ranks: the one that a float8 product takes (`fewbits.decoder.projection`), so that rounding there again
changes nothing.
The largest magnitudes of all weights are found in one all-reduce in each pass over the model.

The master weights stay as they are, and so do gradients. An all-gather moves a quarter of what float32
weights take, half of bfloat16's. Norms, embeddings and the output head travel unchanged.

FSDP2 asks the sharded tensor for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``; they are put on these
very tensors, which stay plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fewbits.errors import Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.formats import E4M3, Packed
from fewbits.host.spec import layer_names, spec_for
from fewbits.kernels.codec.dequantize import dequantize
from fewbits.kernels.codec.quantize_float8 import scale_of_amax
from fewbits.kernels.product.matmul_float8 import float8_weight


def gather_in_float8(model: Any) -> str:
    """Let the linears' weights that train travel in E4M3; after the model is sharded and has its values.

    Returns:
        A line for a receipt.

    Raises:
        Unsupported: no such weight trains, or one has fewer rows than there are ranks.
    """
    groups = _weights(model, spec_for(model))
    weights = [weight for group in groups for weight in group]
    if not weights:
        raise Unsupported(
            "no weight of a linear trains in this model, so float8_all_gather has nothing to do; leave it"
            " out."
        )
    owner = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    # the very tensors that FSDP2 asks, where to_local() of a parameter gives others
    scales = _Scales(weights, [weight._local_tensor for weight in weights], owner)
    model.register_forward_pre_hook(scales.begin, prepend=True)  # before FSDP2's own, which gather
    for number, weight in enumerate(weights):
        rows, ranks = weight.shape[0], weight.device_mesh.shape[-1]
        if -(-rows // ranks) * (ranks - 1) >= rows:
            raise Unsupported(
                f"a weight of {rows} rows leaves some of {ranks} ranks without any; leave out"
                " float8_all_gather."
            )
        part: Any = scales.parts[number]
        travel = _Travel(scales, number, weight.shape)
        part.fsdp_pre_all_gather, part.fsdp_post_all_gather = travel.before, travel.after
    saved = sum(weight.numel() * (weight.element_size() - 1) for weight in weights)
    return (
        f"{len(weights)} weights travel in float8, {saved / 2**20:,.2f} MiB less for one pass over the model"
    )


class _Scales:
    """The scales of all weights; found again in each pass over the model, and once a weight has changed.

    Torch's fused optimizers change weights without counting a version, hence each pass. Whether it is time
    has one answer on all ranks: they step together, and each has a part of every weight.
    """

    def __init__(self, weights: Sequence[Tensor], parts: Sequence[Tensor], owner: Tensor) -> None:
        self.weights, self.parts, self.owner = list(weights), list(parts), owner
        self._versions: list[tuple[int, int]] = []
        self._pass_began = True
        self._scales = self._inverses = torch.empty(0, dtype=torch.float32)

    def begin(self, *_: Any) -> None:
        """A pass over the model begins (a hook)."""
        self._pass_began = True

    def of(self, number: int, group: Any) -> tuple[Tensor, Tensor]:
        """The scale of a weight and its inverse, (1,) float32 each."""
        if self._pass_began or self._versions[number] != self._version(number):
            self._find(group)
            self._pass_began = False
            self._versions = [self._version(i) for i in range(len(self.parts))]
        at = slice(number, number + 1)
        return self._scales[at], self._inverses[at]

    def _version(self, number: int) -> tuple[int, int]:
        """An optimizer's operations on the DTensor count there, those on the slice count at the slice."""
        return self.weights[number]._version, self.parts[number]._version

    @torch.no_grad()
    def _find(self, group: Any) -> None:
        owner = self.owner = self.owner.to(self.parts[0].device)
        largest = torch.stack(torch._foreach_norm(self.parts, float("inf"))).float()
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
        shared = torch.zeros_like(largest).scatter_reduce_(0, owner, largest, "amax")
        self._scales = scale_of_amax(shared)[owner]
        self._inverses = self._scales.reciprocal()


class _Travel:
    """One weight on its way."""

    def __init__(self, scales: _Scales, number: int, shape: Sequence[int]) -> None:
        self.scales, self.number, self.shape = scales, number, tuple(shape)

    @torch.no_grad()
    def before(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """This rank's bytes, with the rows that FSDP2 pads short slices by, and the scale."""
        part = self.scales.parts[self.number]
        scale, inverse = self.scales.of(self.number, mesh.get_group())
        codes = float8_weight(part, inverse_scale=inverse.view(1, 1)).view(torch.uint8)
        missing = -(-outer_size[0] // mesh.size()) - part.shape[0]
        return (nn.functional.pad(codes, (0, 0, 0, missing)) if missing else codes,), scale

    @torch.no_grad()
    def after(
        self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight in ``dtype``: a new tensor, or the one from before filled again."""
        codes = gathered[0].view(torch.float8_e4m3fn)[: self.shape[0]]
        weight = torch.empty(self.shape, dtype=dtype, device=codes.device) if out is None else out.data
        parts = {"codes": codes, "scales": scale.view(E4M3.layout(self.shape)["scales"].shape)}
        dequantize(Packed(E4M3, self.shape, dtype, parts), out=weight)
        return (weight, (weight,)) if out is None else None


def _weights(model: Any, spec: ModelSpec) -> list[list[Any]]:
    """Trained weights of linears, those of one product together."""
    weights = []
    group_of = {path: group[0] for group in spec.products for path in group}
    for name in layer_names(model, spec):
        products: dict[str, list[Any]] = {}
        for path in spec.linears:
            module = model.get_submodule(f"{name}.{path}")
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear) and isinstance(weight, Tensor) and weight.requires_grad:
                products.setdefault(group_of.get(path, path), []).append(weight)
        weights += list(products.values())
    return weights


__all__ = ["gather_in_float8"]
