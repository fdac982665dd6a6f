"""The values that adapters begin with: a function of a seed and a name, and of nothing else.

What peft draws depends on the order in which layers are made, which one process and ranks that read their
own shares do not have in common. Here every parameter has random numbers of its own, on the CPU and in
float32, so that one process, ranks, and any choice of other layers give it the same ones. Distributions are
peft's: A as `nn.Linear` begins (or normal, or orthogonal with B), B zero.

For values to be the same, so must be the kind of CPU: torch draws normal numbers (not uniform ones, which are
the default) with other vector instructions elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput


def generator_of(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers that depend on the seed and the name alone.

    Both go through a hash: torch's generator on a CPU heeds the low 32 bits of what seeds it and no others.
    """
    digest = blake2b(f"{int(seed)} {name}".encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)


def has_first_values(init: bool | str) -> bool:
    """Whether no weight and no data decide what an adapter with this ``init_lora_weights`` begins with."""
    return isinstance(init, bool) or init.lower() in ("gaussian", "orthogonal")


def first_values(
    name: str, shape: Sequence[int], *, seed: int, init: bool | str = True, rank: int | None = None
) -> Tensor:
    """The first values of one parameter of an adapter.

    Args:
        name: the parameter's name in the base model, such as
            "model.layers.0.self_attn.q_proj.lora_A.default.weight".
        shape: its shape, whole.
        seed: another seed, other values.
        init: peft's ``init_lora_weights``: True, "gaussian", or False: B is random as well.
        rank: the adapter's; None: as A's shape has it.

    Returns:
        float32, on the CPU.
    """
    part = next(part for part in name.split(".") if part.startswith("lora_"))
    values, generator = torch.zeros(tuple(shape), dtype=torch.float32), generator_of(seed, name)
    if part.startswith("lora_embedding_"):
        return values.normal_(generator=generator) if part.endswith("_B") or init is False else values
    if part == "lora_B" and init is not False:
        return values
    if values.dim() < 2:  # a bias of B, as nn.Linear begins
        bound = 1 / math.sqrt(rank or 1)
        return values.uniform_(-bound, bound, generator=generator)
    if isinstance(init, str):
        return values.normal_(0, 1 / (rank or values.shape[0]), generator=generator)
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)


def orthogonal_pair(
    rank: int, num_in: int, num_out: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """A and B whose product is zero but for rounding: they meet in rows of one orthogonal matrix.

    Args:
        rank: an even number.
        num_in: inputs of the linear.
        num_out: its outputs.
        generator: None: torch's own.

    Returns:
        A (rank, num_in) and B (num_out, rank), float32.

    Raises:
        BadInput: the rank is odd.
    """
    if rank % 2:
        raise BadInput(
            f"init_lora_weights='orthogonal' needs an even rank, and r is {rank}; pass r={rank + 1}."
        )
    half = rank // 2
    q, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float32))
    a = torch.randn(num_in, half, generator=generator, dtype=torch.float32) @ q[0::2] / 10
    b = torch.randn(half, num_out, generator=generator, dtype=torch.float32).t() @ q[1::2] / 10
    return a.t().contiguous(), b.contiguous()
