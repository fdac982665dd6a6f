"""DistributedDataParallel with gradients that travel in few bits: a communication hook.

DDP hands over its gradients in buckets, as they become ready. The work on a bucket has three stages, between
which it waits for the network; while one waits, the next bucket begins:

    quantise, all-to-all | decode, add, quantise the mean, all-gather | decode into the bucket

Matrices travel in codes. Biases, norms and other small tensors travel in float32 within the same messages:
they are few, and large beside the values that would share their scale.

What error feedback keeps belongs to parameters, not to buckets: DDP orders its buckets anew after the first
step, and then what was kept is cut anew too. It costs 4 bytes a trained value on every rank, and 4 / W more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from fewbits.errors import SpecMismatch
from fewbits.formats.base import Format
from fewbits.kernels.gradient_codec import (
    Wire,
    dequantize_gradient,
    quantize_gradient,
    sum_gradients,
    wire_of,
)
from fewbits.training.communication import GradientExchange, Lane, Travel, check_seed, wait


def quantize_gradients(
    model: DistributedDataParallel,
    format: Format,
    *,
    seed: int = 0,
    error_feedback: bool = True,
    stochastic: bool | None = None,
    timeout: timedelta | None = None,
) -> DDPExchange:
    """Let the gradients of ``model`` travel in few bits. Every rank calls this, before the first backward.

    Args:
        model: wrapped by DDP; it takes one hook in its life.
        format: INT8, INT4 or FP8 E4M3; see `fewbits.kernels.gradient_codec.wire_format` for its blocks.
        seed: of stochastic rounding.
        error_feedback: add to each gradient what rounding took from the one before.
        stochastic: round stochastically; None: only without error feedback.
        timeout: how long a rank waits for the others, on a CPU, where the exchange has a process group of its
            own; None: torch's.

    Returns:
        The exchange; `save` and `load` belong into checkpoints, ``str()`` into the receipt.
    """
    check_seed(seed)
    device = next(p for p in model.parameters() if p.requires_grad).device
    group = model.process_group
    if device.type == "cpu":  # the thread's calls must not come between those of others
        group = distributed.new_group(distributed.get_process_group_ranks(group), timeout, backend="gloo")
    names = {id(p): name for name, p in model.module.named_parameters()}
    exchange = DDPExchange(
        format, Travel(group), names, Lane(device),
        seed=seed, error_feedback=error_feedback, stochastic=stochastic,
    )  # fmt: skip
    model.register_comm_hook(exchange, _hook)
    return exchange


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
    """DDP's face of an exchange."""
    return state.exchange(bucket)


@dataclass(eq=False)
class _Kept:
    """What belongs to a bucket from step to step.

    Attributes:
        names: its parameters, in order.
        sizes: their values.
        wire: how a row of it travels.
        plain: which parameters travel in float32.
        residual: (N,), what is left of this rank's gradient; None without error feedback.
        shard_residual: (row,), what is left of the mean of this rank's row.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    wire: Wire
    plain: tuple[int, ...]
    residual: Tensor | None
    shard_residual: Tensor | None


class DDPExchange(GradientExchange):
    """See `quantize_gradients`."""

    def __init__(self, format: Format, travel: Travel, names: dict[int, str], lane: Lane, **how: Any) -> None:
        """Args: as of `GradientExchange`; names of the parameters by id; where it computes."""
        super().__init__(format, travel, **how)
        self.lane = lane
        self._names = names
        self._buckets: dict[tuple[str, ...], _Kept] = {}
        self._waiting: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})  # kept, of no bucket yet
        self._under_way: list[Iterator[None]] = []
        self._promised: list[torch.futures.Future[Tensor]] = []

    def exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The mean of a `torch.distributed.GradBucket` over the ranks, later."""
        names = tuple(self._names[id(p)] for p in bucket.parameters())
        index, last, step = bucket.index(), bucket.is_last(), self.step
        self.step += last
        devices: Any = [self.lane.device] if self.lane.stream is not None else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        if index == 0:
            self._promised.clear()
        self._promised.append(future)
        stages = self._stages((step, index), names, bucket.buffer(), bucket.gradients(), future)

        def advance() -> None:
            """The new bucket's first stage, then one stage of each before it; behind the last, all."""
            if index == 0:
                self._under_way.clear()  # a backward pass that failed has left something
            self._under_way.insert(0, stages)
            while True:
                self._under_way = [one for one in self._under_way if next(one, "done") is None]
                if not last or not self._under_way:
                    break

        self.lane.submit(advance, self._failed)
        return future

    def _failed(self, error: BaseException) -> None:
        """Whoever waits for a bucket is told."""
        for future in self._promised:
            if not future.done():
                future.set_exception(error)  # type: ignore[arg-type]

    @torch.no_grad()
    def _stages(
        self,
        at: tuple[int, int],
        names: tuple[str, ...],
        buffer: Tensor,
        gradients: Sequence[Tensor],
        future: torch.futures.Future[Tensor],
    ) -> Iterator[None]:
        """One bucket; ``at`` is the step and the bucket's number."""
        kept = self._kept(names, buffer, gradients)
        wire, travel = kept.wire, self.travel
        messages = wire.empty(travel.size, buffer.device)
        plain = [gradients[i] for i in kept.plain]
        _take_out(plain, wire.plain_values(messages) if plain else None)
        quantize_gradient(buffer, kept.residual, messages, wire, seed=self.seed_of(at[0], 1, at[1]))
        received = torch.empty_like(messages)
        work = travel.all_to_all(received, messages)
        yield
        wait(work)
        mean = wire.empty(1, buffer.device)
        sum_gradients(
            received, kept.shard_residual, mean, wire,
            factor=1 / travel.size, seed=self.seed_of(at[0], 2, at[1]),
        )  # fmt: skip
        work = travel.all_gather(messages, mean)
        yield
        wait(work)
        dequantize_gradient(messages, buffer, wire)
        _put_back(plain, wire.plain_values(messages) if plain else None)
        future.set_result(buffer)

    def _kept(self, names: tuple[str, ...], buffer: Tensor, gradients: Sequence[Tensor]) -> _Kept:
        found = self._buckets.get(names)
        if found is not None:
            return found
        if any(set(names) & set(other) for other in self._buckets):
            self._cut_anew()
        sizes = tuple(g.numel() for g in gradients)
        block = self.format.block[1]
        plain = tuple(i for i, g in enumerate(gradients) if g.dim() < 2 or g.numel() < block)
        wire = wire_of(self.format, buffer.numel(), self.travel.size, sum(sizes[i] for i in plain))
        residual = shard = None
        if self.error_feedback:
            residual, shard = self._residuals(names, sizes, wire, buffer.device)
        self._buckets[names] = _Kept(names, sizes, wire, plain, residual, shard)
        return self._buckets[names]

    def _residuals(
        self, names: tuple[str, ...], sizes: tuple[int, ...], wire: Wire, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Of a new bucket: zeros, or what is waiting for its parameters."""
        whole = []
        for waiting in self._waiting:
            flat = torch.zeros(sum(sizes), device=device)
            for name, view in zip(names, flat.split(sizes), strict=True):
                stored = waiting.pop(name, None)
                if stored is not None:
                    if stored.numel() != view.numel():
                        raise SpecMismatch(
                            f"the checkpoint kept {stored.numel():,} values for {name}, which has"
                            f" {view.numel():,}; resume with the model it was written for."
                        )
                    view.copy_(stored)
            whole.append(flat)
        first = min(self.travel.rank * wire.row, whole[1].numel())
        shard = torch.zeros(wire.row, device=device)
        part = whole[1][first : first + wire.row]
        shard[: part.numel()] = part
        return whole[0], shard

    def _cut_anew(self) -> None:
        """DDP has made other buckets: what was kept waits under its parameters' names."""
        residuals, shards = self._waiting
        for kept in self._buckets.values():
            if kept.residual is None or kept.shard_residual is None:
                continue
            rows = torch.empty(self.travel.size, kept.wire.row, device=kept.residual.device)
            wait(self.travel.all_gather(rows, kept.shard_residual))
            mean = rows.view(-1)[: kept.residual.numel()]
            residuals |= zip(kept.names, kept.residual.split(kept.sizes), strict=True)
            shards |= zip(kept.names, mean.split(kept.sizes), strict=True)
        self._buckets.clear()

    def _state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        tensors = {f"residual/{name}": tensor for name, tensor in self._waiting[0].items()}
        starts: dict[str, int] = {}
        if self.travel.rank == 0:  # whole on every rank: one tells
            starts = {f"shard/{name}": 0 for name in self._waiting[1]}
            tensors |= {f"shard/{name}": tensor for name, tensor in self._waiting[1].items()}
        for kept in self._buckets.values():
            if kept.residual is None or kept.shard_residual is None:
                continue
            begin, row = 0, self.travel.rank * kept.wire.row
            for name, size, residual in zip(
                kept.names, kept.sizes, kept.residual.split(kept.sizes), strict=True
            ):
                tensors[f"residual/{name}"] = residual
                low, high = max(begin, row), min(begin + size, row + kept.wire.row)
                if low < high:
                    tensors[f"shard/{name}"] = kept.shard_residual[low - row : high - row]
                    starts[f"shard/{name}"] = low - begin
                begin += size
        return tensors, starts

    def _set_state(self, residuals: dict[str, Tensor], shards: dict[str, Tensor]) -> None:
        self._buckets.clear()
        self._waiting = (residuals, shards)


def _take_out(tensors: list[Tensor], room: Tensor | None) -> None:
    """Small tensors into their room in the messages; where they were, zeros are quantised."""
    if room is None:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors]).float()
    room.copy_(torch.nn.functional.pad(flat, (0, room.numel() - flat.numel())).view(room.shape))
    torch._foreach_zero_(tensors)


def _put_back(tensors: list[Tensor], room: Tensor | None) -> None:
    """The means of small tensors, from all ranks' messages."""
    if room is None:
        return
    sizes = [t.numel() for t in tensors]
    flat = room.reshape(-1)[: sum(sizes)]
    torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(flat.split(sizes), tensors, strict=True)])
