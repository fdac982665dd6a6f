"""What ranks do in test_gradient_communication.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fewbits.formats import get_format
from fewbits.training.ranks.ddp import DDPExchange, quantize_gradients


class Net(nn.Module):
    """Matrices of sizes that are and are not multiples of a block, a norm, a bias, an odd vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(24, 40)
        self.norm = nn.LayerNorm(40)
        self.second = nn.Linear(40, 33, bias=False)
        self.odd = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).sum() + (self.odd.sum() ** 2) * x.mean()


class Aligned(nn.Module):
    """Every size is a multiple of a block: in whatever order, the same values share a scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(24, 128, bias=False), nn.LayerNorm(128), nn.Linear(128, 64, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 24, generator=generator)


def exact_mean(step: int, world_size: int) -> dict[str, Tensor]:
    """The mean of all ranks' gradients, in float64, without any communication."""
    model = Net()
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for rank in range(world_size):
        model.zero_grad()
        model(inputs(step, rank)).backward()
        for name, p in model.named_parameters():
            total[name] += p.grad.double() / world_size
    return total


def device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"


def wrapped(
    format: str, net: type[nn.Module] = Net, **how: Any
) -> tuple[DistributedDataParallel, DDPExchange]:
    """What is kept is float32 unless a test says otherwise, on a GPU too: then sums close."""
    model = DistributedDataParallel(net().to(device()), bucket_cap_mb=0.003)
    return model, quantize_gradients(model, get_format(format), **{"residual_dtype": torch.float32, **how})


def steps(model: DistributedDataParallel, numbers: range) -> list[dict[str, Tensor]]:
    """The gradients that arrive on this rank, step by step; the weights stay as they are."""
    rank, found = distributed.get_rank(), []
    for step in numbers:
        model.zero_grad()
        model(inputs(step, rank).to(device())).backward()
        found.append({name: p.grad.cpu().clone() for name, p in model.module.named_parameters()})
    return found


def pending(exchange: DDPExchange) -> dict[str, Tensor]:
    """All that has not arrived yet, of all ranks: what the mean still lacks."""
    states: list[Any] = [None] * exchange.size
    tensors, starts = exchange._state()
    distributed.all_gather_object(states, ({key: t.cpu() for key, t in tensors.items()}, starts))
    total: dict[str, Tensor] = {}
    for tensors, starts in states:
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            share = 1 / exchange.size if kind == "residual" else 1
            begin = starts.get(key, 0)
            room = total.setdefault(name, torch.zeros(8192, dtype=torch.float64))
            room[begin : begin + tensor.numel()] += tensor.double() * share
    return total


def many_steps(format: str, count: int, how: dict[str, Any]) -> dict[str, Any]:
    model, exchange = wrapped(format, **how)
    found = steps(model, range(count))
    buckets = [sorted(names) for names in exchange._buckets]
    return {
        "steps": found,
        "pending": pending(exchange) if exchange.error_feedback else {},
        "buckets": buckets,
        "bytes": exchange.travel.sent_bytes,
        "receipt": str(exchange),
        "counter": exchange.step,
    }


def bad_number(format: str, bad: float) -> list[dict[str, Tensor]]:
    """Three steps; in the second, rank 1 has one bad number in a matrix and one in a bias."""
    model, _ = wrapped(format)
    found = steps(model, range(1))
    model.zero_grad()
    if distributed.get_rank() == 1:
        for weight, at in ((model.module.second.weight, (3, 4)), (model.module.first.bias, (2,))):
            hook = torch.zeros_like(weight)
            hook[at] = bad
            weight.register_hook(lambda g, add=hook: g + add if add.abs().nan_to_num(1).any() else g)
    model(inputs(1, distributed.get_rank())).backward()
    found.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
    for weight in (model.module.second.weight, model.module.first.bias):
        weight._backward_hooks = None
    return found + steps(model, range(2, 4))


def saved_and_loaded(
    format: str, folder: str, write: bool, numbers: list[int], how: dict[str, Any]
) -> dict[str, Any]:
    model, exchange = wrapped(format, **how)
    before = None
    if not write:
        exchange.load(Path(folder))
        before = pending(exchange)
    found = steps(model, range(*numbers))
    if write:
        exchange.save(Path(folder))
        distributed.barrier()
    return {
        "steps": found,
        "before": before,
        "pending": pending(exchange),
        "counter": exchange.step,
        "receipt": str(exchange),
    }


def failing() -> list[str]:
    """An error on the exchange's thread: the backward pass must not wait for ever, and neither the next."""
    model, exchange = wrapped("int8")
    steps(model, range(1))

    def fails(out: Tensor, sent: Tensor) -> None:
        raise KeyError("planted")

    exchange.travel.all_gather = fails
    told = []
    for step in (1, 2):
        try:
            steps(model, range(step, step + 1))
        except BaseException as error:  # noqa: BLE001 - told to the test
            told.append(f"{type(error).__name__}: {error}")
    return told


def sharded_net() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.first)
    return fully_shard(model)


def sharded_steps(
    format: str, numbers: list[int], how: dict[str, Any], folder: str = "", write: bool = False, bad: int = -1
) -> dict[str, Any]:
    """Gradients of a sharded model step by step, whole; one bad number of rank 1's in step ``bad``."""
    from fewbits.training.ranks.fsdp_communication import quantize_reduce_scatter

    model = sharded_net()
    exchange = quantize_reduce_scatter(model, get_format(format), **how)
    if folder and not write:
        exchange.load(Path(folder))
    before, found, rank = kept_of(exchange), [], distributed.get_rank()
    for step in range(*numbers):
        model.zero_grad()
        x = inputs(step, rank)
        if step == bad and rank == 1:
            x[0, 0] = torch.nan
        model(x).backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    if write:
        exchange.save(Path(folder))
        distributed.barrier()
    return {
        "steps": found,
        "before": before,
        "kept": kept_of(exchange),
        "receipt": str(exchange),
        "bytes": exchange.travel.sent_bytes,
        "step": exchange.step,
    }


def kept_of(exchange: Any) -> dict[str, Tensor]:
    """What the mean still lacks, of all ranks."""
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, exchange._state()[0])
    total: dict[str, Tensor] = {}
    for tensors in states:
        for key, tensor in tensors.items():
            name = key.partition("/")[2]
            total[name] = total.get(name, 0) + tensor.double() / len(states)
    return total


def nccl_rank(rank: int, size: int, folder: str, format: str, how: dict[str, Any]) -> None:
    """A whole process of test_gradient_communication_gpu.py, which can be imported by its name here."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(many_steps(format, 4, how), f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
