"""DistributedDataParallel with gradients that travel in few bits: a communication hook.

DDP hands over its gradients in buckets, as they become ready. The work on a bucket has three stages, between
which it waits for the network; while one waits, the next bucket begins:

    quantise, all-to-all | decode, add, quantise the mean, all-gather | decode into the bucket

Matrices travel in codes. Biases, norms and other small tensors travel in float32 within the same messages:
they are few, and large beside the values that would share their scale.

What error feedback keeps belongs to parameters, not to buckets: DDP orders its buckets anew after the first
step, and then what was kept is cut anew too. It costs 2 bytes a trained value on every GPU, and 2 / W more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fewbits.errors import BadInput, SpecMismatch
from fewbits.families.registry import written_spec
from fewbits.formats.base import Format
from fewbits.kernels.codec.gradient_codec import (
    Wire,
    dequantize_gradient,
    quantize_gradient,
    sum_gradients,
    wire_of,
)
from fewbits.training.ranks.communication import GradientExchange, Lane, Travel, check_seed, wait


def quantize_gradients(
    model: DistributedDataParallel,
    format: Format,
    *,
    seed: int = 0,
    error_feedback: bool = True,
    stochastic: bool | None = None,
    node_size: int = 1,
    timeout: timedelta | None = None,
    residual_dtype: torch.dtype | None = None,
) -> DDPExchange:
    """Let the gradients of ``model`` travel in few bits. Every rank calls this, before the first backward.

    Args:
        model: wrapped by DDP; it takes one hook in its life.
        format: INT8, INT4 or FP8 E4M3; see `fewbits.kernels.codec.gradient_codec.wire_format` for its blocks.
        seed: of stochastic rounding.
        error_feedback: add to each gradient what rounding took from the one before.
        stochastic: round stochastically; None: only without error feedback.
        node_size: GPUs of a node, if they are to add their gradients as they are before anything leaves the
            node; worth it with several nodes of several GPUs (`fewbits.training.ranks.communication`).
        timeout: how long a rank waits for the others, on a CPU, where the exchange has a process group of its
            own; None: torch's.
        residual_dtype: of what error feedback keeps: bfloat16, or float32, which is twice the memory and
            loses nothing, where bfloat16 loses at most 2**-9 of what rounding took; None: bfloat16 on a GPU,
            whose memory's traffic is what coding takes, float32 on a CPU, which would convert.

    Returns:
        The exchange; `save` and `load` belong into checkpoints, ``str()`` into the receipt.
    """
    check_seed(seed)
    device = next(p for p in model.parameters() if p.requires_grad).device
    ranks = distributed.get_process_group_ranks(model.process_group)
    if len(ranks) % node_size:
        raise BadInput(f"{len(ranks)} ranks are no nodes of {node_size} each; give another node_size.")
    names = {id(p): name for name, p in model.module.named_parameters()}
    if residual_dtype is None:
        residual_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    local, cross = _groups(model.process_group, ranks, node_size, device, timeout)
    exchange = DDPExchange(
        format, cross, names, Lane(device), local=local, rank=ranks.index(distributed.get_rank()),
        seed=seed, error_feedback=error_feedback, stochastic=stochastic, residual_dtype=residual_dtype,
    )  # fmt: skip
    model.register_comm_hook(exchange, _hook)
    return exchange


def fit_ddp(args: Any, model: Any) -> None:
    """Set what the host's arguments say of DDP for this model: its buckets, and whether parts may go unused.

    Of a family that fewbits knows each pass touches each weight. Elsewhere (experts one by one, a tower for
    pictures over rows of text) it may not, and DDP looks which it did: a walk through the graph of each pass.

    Args:
        args: of transformers.Trainer.
        model: what trains.
    """
    args.ddp_bucket_cap_mb = bucket_mib(model)
    config = model.config
    args.ddp_find_unused_parameters = written_spec(model) is None or config.get_text_config() is not config


def bucket_mib(model: nn.Module) -> int:
    """The size of DDP's buckets in MiB: 32 of them, but none below torch's 25 or above 128.

    A bucket costs the host time, whatever its size, which is time of the backward pass on a fast GPU: half a
    millisecond in few bits. What is left of the last one when that pass ends is exposed.
    """
    whole = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return min(max(whole // (32 << 20), 25), 128)


def _groups(
    group: Any, ranks: list[int], node_size: int, device: torch.device, timeout: timedelta | None
) -> tuple[Travel | None, Travel]:
    """The collective calls within this rank's node (None: there is no need), and to its like in others.

    On a CPU the groups are made for this, over gloo: calls of a thread must not come between those of others.
    """
    if node_size == 1 and device.type != "cpu":
        return None, Travel(group)
    backend = "gloo" if device.type == "cpu" else None
    me = distributed.get_rank()

    def mine(partition: list[list[int]]) -> Travel:
        groups = [(part, distributed.new_group(part, timeout, backend=backend)) for part in partition]
        return next(Travel(group) for part, group in groups if me in part)

    cross = mine([ranks[first::node_size] for first in range(node_size)])
    if node_size == 1:
        return None, cross
    return mine([ranks[i : i + node_size] for i in range(0, len(ranks), node_size)]), cross


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
    """DDP's face of an exchange."""
    return state.exchange(bucket)


@dataclass(eq=False)
class _Bucket:
    """What belongs to a bucket from step to step.

    Attributes:
        names: its parameters, in order.
        sizes: their values.
        wire: how a row of it travels.
        plain: which parameters travel in float32.
        residual: (n,), what is left of this rank's gradient, or of its part of its node's; None without error
            feedback.
        first: where in the bucket the residual begins.
        shard_residual: (row,), what is left of the mean of this rank's row.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    wire: Wire
    plain: tuple[int, ...]
    residual: Tensor | None
    first: int
    shard_residual: Tensor | None


class DDPExchange(GradientExchange):
    """See `quantize_gradients`."""

    def __init__(
        self,
        format: Format,
        travel: Travel,
        names: dict[int, str],
        lane: Lane,
        *,
        local: Travel | None = None,
        residual_dtype: torch.dtype = torch.float32,
        **how: Any,
    ) -> None:
        """Args: as of `GradientExchange`; parameters' names by id; where it computes; this rank's node."""
        super().__init__(format, travel, node_size=local.size if local else 1, **how)
        self.local = local
        self.residual_dtype = residual_dtype
        self.lane = lane
        self._names = names
        self._buckets: dict[tuple[str, ...], _Bucket] = {}
        self._waiting: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})  # kept, of no bucket yet
        self._under_way: list[Iterator[None]] = []
        self._promised: list[torch.futures.Future[Tensor]] = []

    def exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The mean of a `torch.distributed.GradBucket` over the ranks, later: one of the same shape, (n,)."""
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
        bucket = self._kept(names, buffer, gradients)
        wire, travel, local = bucket.wire, self.travel, self.local
        plain = [gradients[i] for i in bucket.plain]
        values, shard = _take_out(plain, wire.plain * self.size, buffer.device), buffer
        if local is not None:
            shard, values, work = self._add_in_node(local, wire, buffer, values)
            yield
            wait(work)
        messages = wire.empty(travel.size, buffer.device)
        if plain:
            wire.plain_values(messages).copy_(values.view(travel.size, wire.plain))
        quantize_gradient(shard, bucket.residual, messages, wire, seed=self.seed_of(at[0], 1, at[1]))
        received = torch.empty_like(messages)
        work = travel.all_to_all(received, messages)
        yield
        wait(work)
        mean = wire.empty(1, buffer.device)
        sum_gradients(
            received,
            bucket.shard_residual,
            mean,
            wire,
            factor=1 / self.size,
            seed=self.seed_of(at[0], 2, at[1]),
        )
        work = travel.all_gather(messages, mean)
        yield
        wait(work)
        if local is not None:
            part, messages = messages, wire.empty(self.size, buffer.device)
            work = local.all_gather(messages, part)
            yield
            wait(work)
        dequantize_gradient(messages, buffer, wire)
        _put_back(plain, wire.plain_values(messages) if plain else None)
        future.set_result(buffer)

    def _add_in_node(
        self, local: Travel, wire: Wire, buffer: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """This rank's part of the sum over its node, of the bucket and of what travels in float32."""
        row = wire.row * self.travel.size
        sent = buffer.new_zeros(local.size, row + values.numel() // local.size)
        whole = torch.nn.functional.pad(buffer, (0, row * local.size - buffer.numel()))
        sent[:, :row] = whole.view(local.size, row)
        sent[:, row:] = values.view(local.size, values.numel() // local.size)
        part = torch.empty_like(sent[0])
        work = local.reduce_scatter(part, sent)
        return part[: self._part(wire, buffer.numel())[1]], part[row:], work

    def _part(self, wire: Wire, count: int) -> tuple[int, int]:
        """Where in a bucket of ``count`` values this rank's part begins, and how many values it has."""
        if self.local is None:
            return 0, count
        row = wire.row * self.travel.size
        first = min(self.local.rank * row, count)
        return first, min(row, count - first)

    def _kept(self, names: tuple[str, ...], buffer: Tensor, gradients: Sequence[Tensor]) -> _Bucket:
        bucket = self._buckets.get(names)
        if bucket is not None:
            return bucket
        if any(set(names) & set(other) for other in self._buckets):
            self._cut_anew()
        sizes = tuple(g.numel() for g in gradients)
        block = self.format.contract.block[1]
        plain = tuple(i for i, g in enumerate(gradients) if g.dim() < 2 or g.numel() < block)
        wire = wire_of(self.format, buffer.numel(), self.travel.size, sum(sizes[i] for i in plain))
        first, size = self._part(wire, buffer.numel())
        residual = shard = None
        if self.error_feedback:
            whole = [self._stored(names, sizes, kind, buffer.device) for kind in self._waiting]
            residual = whole[0][first : first + size].to(self.residual_dtype, copy=True)
            row = min(first + self.travel.rank * wire.row, whole[1].numel())
            part = whole[1][row : row + wire.row]
            shard = torch.zeros(wire.row, dtype=self.residual_dtype, device=buffer.device)
            shard[: part.numel()] = part
        self._buckets[names] = _Bucket(names, sizes, wire, plain, residual, first, shard)
        return self._buckets[names]

    def _stored(
        self, names: tuple[str, ...], sizes: tuple[int, ...], waiting: dict[str, Tensor], device: torch.device
    ) -> Tensor:
        """For a new bucket: zeros, or what is waiting for its parameters."""
        flat = torch.zeros(sum(sizes), device=device, dtype=torch.float32)
        for name, view in zip(names, flat.split(sizes), strict=True):
            stored = waiting.pop(name, None)
            if stored is None:
                continue
            if stored.numel() > view.numel():
                raise SpecMismatch(
                    f"the checkpoint kept {stored.numel():,} values for {name}, which has {view.numel():,};"
                    " resume with the model it was written for."
                )
            view[: stored.numel()] = stored
        return flat

    def _cut_anew(self) -> None:
        """DDP has made other buckets: what was kept waits, whole, under its parameters' names."""
        residuals, shards = self._waiting
        for bucket in self._buckets.values():
            if bucket.residual is None or bucket.shard_residual is None:
                continue
            count, row = sum(bucket.sizes), bucket.wire.row * self.travel.size
            residual = bucket.residual
            mean = residual.new_empty(row)
            wait(self.travel.all_gather(mean, bucket.shard_residual))
            if self.local is not None:
                both = torch.stack([torch.nn.functional.pad(residual, (0, row - residual.numel())), mean])
                nodes = residual.new_empty(self.node_size, 2, row)
                wait(self.local.all_gather(nodes, both))
                residual, mean = nodes[:, 0].reshape(-1)[:count], nodes[:, 1].reshape(-1)
            residuals |= zip(bucket.names, residual.split(bucket.sizes), strict=True)
            shards |= zip(bucket.names, mean[:count].split(bucket.sizes), strict=True)
        self._buckets.clear()

    def _state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        tensors: dict[str, Tensor] = {}
        starts: dict[str, int] = {}
        # whole on every rank: of a mean one tells, of a node's gradient one in each node
        if self.rank % self.node_size == 0:
            tensors |= {f"residual/{name}": tensor for name, tensor in self._waiting[0].items()}
        if self.rank == 0:
            tensors |= {f"shard/{name}": tensor for name, tensor in self._waiting[1].items()}
        for bucket in self._buckets.values():
            row = bucket.first + self.travel.rank * bucket.wire.row
            for kind, flat, first in (
                ("residual", bucket.residual, bucket.first),
                ("shard", bucket.shard_residual, row),
            ):
                begin = 0
                for name, size in zip(bucket.names, bucket.sizes, strict=True):
                    low = max(begin, first)
                    high = min(begin + size, first + (0 if flat is None else flat.numel()))
                    if flat is not None and low < high:
                        tensors[f"{kind}/{name}"] = flat[low - first : high - first]
                        starts[f"{kind}/{name}"] = low - begin
                    begin += size
        return tensors, starts

    def _set_state(self, residuals: dict[str, Tensor], shards: dict[str, Tensor]) -> None:
        self._buckets.clear()
        self._waiting = (residuals, shards)


def _take_out(tensors: list[Tensor], room: int, device: torch.device) -> Tensor:
    """Small tensors as (room,) float32, filled up with zeros; where they were, zeros are quantised."""
    if not tensors:
        return torch.empty(0, device=device, dtype=torch.float32)
    flat = torch.cat([t.reshape(-1) for t in tensors]).float()
    torch._foreach_zero_(tensors)
    return torch.nn.functional.pad(flat, (0, room - flat.numel()))


def _put_back(tensors: list[Tensor], room: Tensor | None) -> None:
    """The means of small tensors, from all ranks' messages."""
    if room is None:
        return
    sizes = [t.numel() for t in tensors]
    flat = room.reshape(-1)[: sum(sizes)]
    torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(flat.split(sizes), tensors, strict=True)])
