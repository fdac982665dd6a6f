"""What the ranks of tests/training/test_fsdp.py and its neighbours run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FullyShardedDataParallel

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.formats import E4M3, E4M3_ROW, INT4_G32, INT8, NF4, NF4_DQ
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import get_recipe
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from fewbits.training.optimizer import AdamW8bit
from fewbits.training.ranks.fsdp import local_bytes, shard
from fewbits.training.ranks.fsdp_communication import quantize_reduce_scatter
from tests.models.mixtures import MIXTURES, mixture
from tests.models.tiny import tiny, tokens
from tests.models.unwritten import UNWRITTEN, unwritten

ROWS, LENGTH = 4, 16
FORMATS = {"nf4": NF4, "nf4_dq": NF4_DQ, "int4": INT4_G32}


def build(kind: str, family: str = "llama", *, fused: bool = True) -> Any:
    """A tiny model: "full", "float8" (E4M3 products), "lora", "lora_bf16", a format, "nf4_float8" (QLoRA)."""
    dtype = torch.bfloat16 if kind == "lora_bf16" else torch.float32
    model = _tiny(family).to(dtype)
    if kind in FORMATS:
        convert(model, Recipe(name=kind, linear=Rule(weight=FORMATS[kind])))
    if kind == "nf4_float8":  # E4M3 products of weights that stay in NF4
        convert(model, get_recipe("qlora_nf4_fp8"))
    if kind == "float8":
        rule = Rule(weight_operand=E4M3, activation=E4M3_ROW, gradient=E4M3_ROW)
        convert(model, Recipe(name=kind, linear=rule))
    elif kind != "full":
        model.requires_grad_(False)
        torch.manual_seed(0)
        model = get_peft_model(model, LoRA(r=4))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros would leave A without a gradient
                parameter.data.normal_(0, 0.1)
    if fused:
        fuse(model)
    return model.train()


def _tiny(family: str) -> Any:
    """Of a family that fuses, of a mixture of experts, or of a family that nobody wrote a spec for."""
    if family in MIXTURES:
        return mixture(family)
    return unwritten(family) if family in UNWRITTEN else tiny(family)


def train(
    model: Any, steps: int, rows: slice = slice(None), optimizer: Any = None
) -> tuple[list[float], Any]:
    """Losses of some steps on this slice of the global batch; each step has a batch of its own.

    AdamW moves a value by lr g / (|g| + eps) at first: where a gradient is next to nothing, so is what it is
    divided by, and a last bit of a sum becomes a step of its own. With the usual eps of 1e-8 one value of a
    matrix made 99 % of what two threads and one differed by (1e-5; two ranks and one process 3e-5). Gradients
    have a norm of at most 1, so rounding in their sums is some 1e-8, and with this eps moves a value by 1e-6.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
    losses = []
    for step in range(steps):
        ids = tokens(ROWS, LENGTH, seed=step)[rows].to(trained[0].device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, optimizer


def own_rows() -> slice:
    """The part of the global batch that is this rank's."""
    share = ROWS // distributed.get_world_size()
    return slice(distributed.get_rank() * share, (distributed.get_rank() + 1) * share)


def mean_over_ranks(losses: list[float]) -> list[float]:
    """Of each loss."""
    total = torch.tensor(losses, dtype=torch.float64)
    distributed.all_reduce(total)
    return [float(value) for value in total / distributed.get_world_size()]


def full(model: Any, *, trained: bool = True) -> dict[str, Tensor]:
    """The parameters as they are without shards."""
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad or not trained)
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named}


def sharded_curves(cases: list[tuple[str, str, bool]], steps: int) -> dict[Any, Any]:
    """Loss curve, weights and bytes of each case, sharded over all ranks."""
    found = {}
    for kind, family, fused in cases:
        model = build(kind, family, fused=fused)
        whole = local_bytes(model)
        receipt = shard(model)
        share = local_bytes(model) / whole
        losses, _ = train(model, steps, own_rows())
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=tokens(2, 8)).logits
        fallbacks = dict(fusion_of(model).fallbacks) if fused else {}
        found[kind, family, fused] = {
            "losses": mean_over_ranks(losses),
            "weights": full(model),
            "share": share,
            "fallbacks": fallbacks,
            "logits": logits,
            "receipt": str(receipt),
        }
    return found


def in_float8(steps: int) -> dict[str, Any]:
    """Full fine-tuning whose weights travel in E4M3: bfloat16-like products, and E4M3 ones."""
    found = {}
    for kind in ("full", "float8"):
        model = build(kind)
        receipt = shard(model, float8_all_gather=True)
        adam = AdamW8bit if kind == "float8" else partial(torch.optim.AdamW, fused=True)
        optimizer = adam(model.parameters(), lr=1e-2)
        losses, _ = train(model, steps, own_rows(), optimizer)
        found[kind] = {"losses": mean_over_ranks(losses), "weights": full(model), "receipt": str(receipt)}
        with torch.no_grad():
            model(input_ids=tokens(2, 8))  # fused optimizers count no versions: a pass finds the scales
        weight = model.model.layers[1].mlp.down_proj.weight
        travel = weight._local_tensor.fsdp_pre_all_gather.__self__
        found[kind]["scale"] = travel.scales.of(travel.number, weight.device_mesh.get_group())[0]
    return found


def in_bfloat16(steps: int) -> dict[str, Any]:
    """float32 masters that travel in bfloat16; generation by all ranks."""
    model = build("full")
    shard(model, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses, _ = train(model, steps, own_rows())
    dtypes = {p.dtype for p in model.parameters()} | {p.to_local().dtype for p in model.parameters()}
    model.eval()
    made = model.generate(input_ids=tokens(2, 8), max_new_tokens=4, do_sample=False)
    return {"losses": mean_over_ranks(losses), "dtypes": dtypes, "made": made}


def in_flat_parameters() -> dict[str, Any]:
    """One step of adapters under FSDP1, which ignores stored weights: the loss and the trained weights."""
    model = build("nf4_dq", fused=False)
    with pytest.raises(ValueError, match="Must flatten tensors with uniform dtype"):
        FullyShardedDataParallel(
            build("nf4_dq", fused=False), use_orig_params=True, device_id=torch.device("cpu")
        )
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    stored = [part for layer in layers for part in layer.stored().values()]
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), ignored_states=stored
    )
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05)
    ids = tokens(ROWS, 16)[own_rows()]
    loss = wrapped(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    found = {"loss": mean_over_ranks([float(loss.detach())])[0]}
    with FullyShardedDataParallel.summon_full_params(wrapped):
        names = ((n.replace("_fsdp_wrapped_module.", ""), p) for n, p in wrapped.named_parameters())
        found["weights"] = {n: p.detach().clone() for n, p in names if "lora_" in n}
    return found


def nccl_rank(rank: int, size: int, folder: str, kinds: list[str], steps: int) -> None:
    """Loss curves over NCCL: without steps, unsharded on all rows, and sharded on this rank's."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    where = {"rank": rank, "world_size": size, "device_id": device}
    distributed.init_process_group("nccl", init_method=f"file://{folder}/store", **where)
    found = {}
    for kind in kinds:
        plain, *how = kind.split("+")
        alone, _ = train(build(plain).to(device), steps)
        model = build(plain).to(device)
        untrained, _ = train(model, steps, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        model = build(plain).to(device)
        shard(model, float8_all_gather="float8_gather" in how)
        if "int8_reduce" in how:
            quantize_reduce_scatter(model, INT8)
        losses, _ = train(model, steps, own_rows())
        everyone = torch.tensor(losses, dtype=torch.float64, device=device)
        distributed.all_reduce(everyone)
        mean = [float(loss) for loss in everyone / size]
        found[kind] = untrained, alone, mean, dict(fusion_of(model).fallbacks)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
