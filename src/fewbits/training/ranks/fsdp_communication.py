"""FSDP2 with gradients that travel in few bits: its reduce-scatter as an all-to-all of codes.

FSDP2 lets every group of parameters (a decoder layer) have its own reduce-scatter. Ours quantises the group's
gradient, W rows of one rank's slices each, sends row r to rank r, and adds there in float32. Matrices travel
in codes; vectors (norms, biases) in float32 within the same messages.

Error feedback keeps what rounding took from this rank's gradient of a whole group, so 2 bytes for every
trained value of the model on every rank (bfloat16; `residual_dtype` can be float32): as much as the gathered
weights. Without it the gradient is rounded stochastically, which is right in the mean.

The all-gather of parameters in few bits is `fewbits.training.ranks.float8_gather`. With replicas as well
(HSDP), the all-reduce between replicas stays as it is. With one rank FSDP2 itself calls no communication. The
tests run it over gloo; on four H200s its step took what bfloat16's did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from fewbits.errors import SpecMismatch, Unsupported
from fewbits.formats.base import Format
from fewbits.kernels.codec.gradient_codec import Wire, quantize_gradient, reduce_gradients
from fewbits.training.ranks.communication import GradientExchange, Travel, check_seed, wait
from fewbits.training.ranks.fsdp import sharded_modules
from fewbits.training.ranks.tensor_parallel import tensor_parallel_of


def quantize_reduce_scatter(
    model: nn.Module,
    format: Format,
    *,
    seed: int = 0,
    error_feedback: bool = True,
    stochastic: bool | None = None,
    residual_dtype: torch.dtype = torch.bfloat16,
) -> FSDPExchange:
    """Let the gradients of a sharded model travel in few bits. Every rank calls this, after `shard`.

    Args:
        model: sharded by FSDP2.
        format: INT8, INT4 or FP8 E4M3; see `fewbits.kernels.codec.gradient_codec.wire_format` for its blocks.
        seed: of stochastic rounding.
        error_feedback: add to each gradient what rounding took from the one before.
        stochastic: round stochastically; None: only without error feedback.
        residual_dtype: of what error feedback keeps, bfloat16 or float32.

    Returns:
        The exchange; `save` and `load` belong into checkpoints, ``str()`` into the receipt.

    Raises:
        Unsupported: the model is not sharded.
    """
    check_seed(seed)
    sharded = list(sharded_modules(model))
    if not sharded:
        raise Unsupported(
            "the model is not sharded, so there is no reduce-scatter; call fewbits.training.ranks.fsdp.shard "
            "first, or use fewbits.training.ranks.ddp.quantize_gradients with DDP."
        )
    exchange = FSDPExchange(
        format, residual_dtype, seed=seed, error_feedback=error_feedback, stochastic=stochastic
    )
    shared = tensor_parallel_of(model)
    exchange.tensor_size = 1 if shared is None else shared.group.size
    names = {id(p): name for name, p in model.named_parameters()}
    for module in sharded:
        group = _Group(exchange, len(exchange.groups), _parameters(module, names))
        exchange.groups.append(group)
        module.set_custom_reduce_scatter(_reduce_scatter(group))
    return exchange


class _Group:
    """The exchange of one FSDP group.

    Attributes:
        index: its number, a part of its seeds.
        parameters: full names and shapes of what trains in it, in FSDP2's order.
        residual: (W * row,), what is left of this rank's gradient of the whole group.
    """

    def __init__(self, exchange: FSDPExchange, index: int, parameters: dict[str, torch.Size]) -> None:
        self.exchange = exchange
        self.index = index
        self.parameters = parameters
        self.residual: Tensor | None = None

    @torch.no_grad()
    def reduce_scatter(self, output: Tensor, gradient: Tensor, travel: Travel, factor: float) -> None:
        """``output`` (row,) = factor * the sum over ranks of row ``rank`` of ``gradient`` (W * row,)."""
        exchange, rows = self.exchange, gradient.view(travel.size, -1)
        slices = self._slices(rows)
        plain = [rows[:, a:b] for a, b, is_plain in slices.values() if is_plain]
        wire = Wire(exchange.format, output.numel(), sum(p.shape[1] for p in plain))
        if exchange.error_feedback and self.residual is None:
            self.residual = self._begin(slices, rows)
        messages = wire.empty(travel.size, gradient.device)
        if plain:
            wire.plain_values(messages).copy_(torch.cat(plain, 1))
            torch._foreach_zero_(plain)
        seed = exchange.seed_of(exchange.step, 1, self.index)
        exchange.step += 1
        quantize_gradient(gradient, self.residual, messages, wire, seed=seed)
        received = torch.empty_like(messages)
        wait(travel.all_to_all(received, messages))
        reduce_gradients(received, output, wire, factor=factor)
        if plain:
            sums = wire.plain_values(received).sum(0).mul_(factor)
            parts = sums.split([p.shape[1] for p in plain])
            plain_parts = [output[a:b] for a, b, is_plain in slices.values() if is_plain]
            torch._foreach_copy_(plain_parts, list(parts))

    def _slices(self, rows: Tensor) -> dict[str, tuple[int, int, bool]]:
        """Where in a row each parameter's slice lies, and whether it travels in float32.

        Empty where FSDP2 reduces other parameters than train: then everything travels in codes.
        """
        slices, begin = {}, 0
        for name, shape in self.parameters.items():
            size = -(-shape[0] // rows.shape[0]) * shape[1:].numel() if shape else 1
            slices[name] = (begin, begin + size, len(shape) < 2)
            begin += size
        return slices if begin == rows.shape[1] else {}

    def _begin(self, slices: dict[str, tuple[int, int, bool]], rows: Tensor) -> Tensor:
        """The residual of the first step: zeros, or what a checkpoint kept."""
        residual = torch.zeros(rows.shape, dtype=self.exchange.residual_dtype, device=rows.device)
        if not slices:
            self.exchange.notes.append(
                f"group {self.index}: FSDP2 reduces other parameters than those that train; all of them"
                " travel in codes, and their rounding errors are not saved"
            )
        for name, (a, b, _) in slices.items():
            stored = self.exchange.waiting.pop(name, None)
            if stored is None:
                continue
            shape = self.parameters[name]
            if stored.numel() != shape.numel():
                raise SpecMismatch(
                    f"the checkpoint kept {stored.numel():,} values for {name}, which has {shape.numel():,};"
                    " resume with the model it was written for."
                )
            whole = torch.zeros(rows.shape[0] * (b - a), dtype=stored.dtype, device=rows.device)
            whole[: stored.numel()] = stored.to(rows.device)
            residual[:, a:b] = whole.view(rows.shape[0], b - a)
        return residual.view(-1)

    def whole(self) -> dict[str, Tensor]:
        """What is kept, by parameter, in the order of its values."""
        if self.residual is None:
            return {}
        rows = self.residual.view(self.exchange.travel.size, -1)
        slices = self._slices(rows)
        return {
            name: rows[:, a:b].reshape(-1)[: self.parameters[name].numel()]
            for name, (a, b, _) in slices.items()
        }


class FSDPExchange(GradientExchange):
    """See `quantize_reduce_scatter`; ``step`` counts the reduce-scatters of all groups."""

    def __init__(self, format: Format, residual_dtype: torch.dtype, **how: Any) -> None:
        """Args: as of `GradientExchange`; the dtype of what is kept."""
        super().__init__(format, Travel(None), **how)
        self.residual_dtype = residual_dtype
        self.groups: list[_Group] = []
        self.waiting: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        """All ranks of the run, where layers are shared as well more than meet in a reduce-scatter."""
        return distributed.get_world_size() if distributed.is_initialized() else 1

    def _state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        residuals = dict(self.waiting)
        for group in self.groups:
            residuals |= group.whole()
        return {f"residual/{name}": tensor for name, tensor in residuals.items()}, {}

    def _set_state(self, residuals: dict[str, Tensor], shards: dict[str, Tensor]) -> None:
        # what DDP kept of the mean gradient is given back by all ranks alike
        names = dict.fromkeys((*residuals, *shards))
        both = {name: [parts[name] for parts in (residuals, shards) if name in parts] for name in names}
        self.waiting = {
            name: parts[0] if len(parts) == 1 else torch.stack([t.float() for t in parts]).sum(0)
            for name, parts in both.items()
        }
        for group in self.groups:
            group.residual = None


def _parameters(module: Any, names: dict[int, str]) -> dict[str, torch.Size]:
    """What trains in an FSDP group, in the order in which FSDP2 lays it out."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return {
        names[id(p.sharded_param)]: p.sharded_param.shape
        for group in groups
        if group is not None
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    }


def _reduce_scatter(group: _Group) -> Any:
    """FSDP2's face of a group's exchange; the class is made here, so that importing this needs no FSDP2."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class QuantizedReduceScatter(ReduceScatter):
        """On the stream that FSDP2 has made current; the host waits for nothing on CUDA."""

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: distributed.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> None:
            exchange = state.exchange
            if exchange.travel.group is None:
                exchange.travel = Travel(group)
            state.reduce_scatter(output_tensor, input_tensor, exchange.travel, _factor(op, group.size()))

    state = group
    return QuantizedReduceScatter()


def _factor(op: Any, size: int) -> float:
    if op == distributed.ReduceOp.AVG:
        return 1.0 / size
    if op == distributed.ReduceOp.SUM:
        return 1.0
    raise Unsupported(
        f"gradients in few bits are added or averaged, not reduced by {op}; leave set_gradient_divide_factor"
        " alone."
    )
