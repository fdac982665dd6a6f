"""What the ranks of tests/training/test_tensor_parallel.py run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from fewbits.decoder.fuse import fuse, fusion_of
from fewbits.errors import Unsupported
from fewbits.host.attention import use_attention
from fewbits.models.adapting.adapters import get_peft_model, lora_config
from fewbits.models.packing.convert import convert
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from fewbits.training.checkpoints.sharded import export, load_sharded, write_sharded
from fewbits.training.checkpoints.whole import load_whole
from fewbits.training.checkpoints.whole_views import gathered, whole_views
from fewbits.training.optimizer import AdamW8bit
from fewbits.training.ranks.fsdp import local_bytes, shard
from fewbits.training.ranks.sharded_loading import load_sharded_model
from fewbits.training.ranks.tensor_loading import load_tensor_parallel_model
from fewbits.training.ranks.tensor_parallel import clip_grad_norm, tensor_parallel, tensor_parallel_of
from tests.models.tiny import tiny, tokens
from tests.training.fsdp_workers import FORMATS, ROWS, full, mean_over_ranks
from tests.training.sharded_workers import Allocations

# wide enough for blocks of 64 along half of the columns
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def build(kind: str, family: str, *, fused: bool, **changes: Any) -> Any:
    """As in fsdp_workers, wider."""
    model = tiny(family, **SIZES, **changes)
    if kind in FORMATS:
        convert(model, Recipe(name=kind, linear=Rule(weight=FORMATS[kind])))
    else:
        convert(model, Recipe(name="plain"))  # fewbits' own norms
    if kind != "full":
        model.requires_grad_(False)
        model = get_peft_model(model, LoRA(r=4))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1)
    if fused:
        fuse(model)
    return model.train()


def curves(
    cases: list[tuple[str, str, bool]], steps: int, changes: dict[str, Any] | None = None
) -> dict[Any, Any]:
    """Each case over all ranks of one tensor group."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = {}
    for kind, family, fused in cases:
        model = build(kind, family, fused=fused, **(changes or {}))
        whole = local_bytes(model)
        receipt = tensor_parallel(model, mesh)
        share = local_bytes(model) / whole
        losses, _ = train_without_clipping(model, steps)
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=tokens(2, 8)).logits
            made = model.generate(input_ids=tokens(2, 8), max_new_tokens=5, do_sample=False)
        found[kind, family, fused] = {
            "losses": losses,
            "weights": full(model),
            "whole": {n: gathered(v).clone() for n, v in whole_views(model).items()},
            "cuts": tensor_parallel_of(model).cuts,
            "share": share,
            "fallbacks": dict(fusion_of(model).fallbacks) if fused else {},
            "logits": logits,
            "made": made,
            "receipt": str(receipt),
        }
    return found


def train_without_clipping(
    model: Any, steps: int, rows: slice = slice(None), optimizer: Any = None
) -> tuple[list[float], Any]:
    """torch's norm is of one rank's gradients; SGD shows each gradient as it is."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trained, lr=0.05)
    losses = []
    for step in range(steps):
        ids = tokens(ROWS, 16, seed=step)[rows]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, optimizer


def both(kind: str, family: str, steps: int) -> dict[str, Any]:
    """Two ranks share layers, two such pairs share the rest."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = build(kind, family, fused=True)
    tensor_parallel(model, mesh["tensor"])
    shard(model, mesh["data"])
    share = ROWS // 2
    first = mesh["data"].get_local_rank() * share
    losses, _ = train_without_clipping(model, steps, slice(first, first + share))
    found = {"losses": mean_over_ranks(losses), "weights": full(model)}
    found["norm"] = norm_of(model, slice(first, first + share))
    return {**found, "tensor": mesh["tensor"].get_local_rank()}


def with_dropout(kind: str, family: str) -> Any:
    """A model that drops inputs of adapters, weights of attention and, of Phi, what a layer adds."""
    extra = {"resid_pdrop": 0.2} if family == "phi3" else {}
    model = build(kind, family, fused=False, attention_dropout=0.3, **extra)
    for module in model.modules():
        for name in getattr(module, "lora_dropout", {}):
            module.lora_dropout[name] = torch.nn.Dropout(0.4)
    use_attention(model)
    return model


def dropped(cases: list[tuple[str, str]], steps: int) -> dict[Any, Any]:
    """Each case over all ranks of one tensor group: losses, the first gradients' norm, trained weights."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = {}
    for kind, family in cases:
        model = with_dropout(kind, family)
        tensor_parallel(model, mesh)
        torch.manual_seed(3)
        norm = norm_of(model)[0]
        model.zero_grad()
        losses, _ = train_without_clipping(model, steps)
        whole = {n: gathered(v).clone() for n, v in whole_views(model).items()}
        found[kind, family] = losses, norm, whole
    return found


def with_two_adapters(kind: str, family: str, *, fused: bool = False) -> Any:
    """Two active adapters a linear, the second of another rank; of "hooked" one, whose B has a hook."""
    model = build(kind, family, fused=fused)
    if kind == "hooked":
        for name, module in model.named_modules():
            if name.endswith("lora_B.default"):
                module.register_forward_hook(lambda *args: None)
        return model
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data.normal_(0, 0.1)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    """Of one step, by the names of the parameters."""
    ids = tokens(ROWS, 16, seed=9)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def shared_gradients(cases: list[tuple[str, str, bool]]) -> dict[Any, Any]:
    """Of two adapters over all ranks of one tensor group, and where each was cut."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = {}
    for kind, family, fused in cases:
        model = with_two_adapters(kind, family, fused=fused)
        tensor_parallel(model, mesh)
        found[kind, family, fused] = gradients(model), tensor_parallel_of(model).cuts
    with pytest.raises(Unsupported, match="add all adapters before tensor_parallel"):
        model.add_adapter("late", lora_config(model, LoRA(r=2)))
    return found


def norm_of(model: Any, rows: slice = slice(None)) -> tuple[float, float]:
    """The norm of one step's gradients, and what clipping leaves of it."""
    ids = tokens(ROWS, 16, seed=9)[rows]
    model(input_ids=ids, labels=ids).loss.backward()
    norm = clip_grad_norm(model, 1e-3)
    return float(norm), float(clip_grad_norm(model, 1.0))


def optimizer_of(kind: str, model: Any) -> Any:
    """As in sharded_workers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return (
        AdamW8bit(trained, lr=1e-2, min_8bit_size=16)
        if kind != "full"
        else torch.optim.AdamW(trained, lr=1e-2)
    )


def spread(kind: str, family: str, data: int) -> Any:
    """A model over ``data`` times two ranks, its trained weights moved, and its optimizer."""
    model = build(kind, family, fused=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    if data > 1:
        shard(model, mesh["data"])
    return model, optimizer_of(kind, model)


def write(folder: str, family: str) -> None:
    """A step by two pairs of ranks, a checkpoint, an export."""
    for kind in ("nf4", "full"):
        model, optimizer = spread(kind, family, 2)
        train_without_clipping(model, 1, optimizer=optimizer)
        path = Path(folder) / kind
        write_sharded(path / "checkpoint-1", model, optimizer)
        (path / "hf").mkdir(exist_ok=True)
        export(model, path / "hf")


def read(folder: str, family: str, data: int) -> list[Any]:
    """What ranks find there: weights, and moments as they step with them."""
    found = []
    for kind in ("nf4", "full"):
        model, optimizer = spread(kind, family, data)
        load_sharded(Path(folder) / kind / "checkpoint-1", model, optimizer)
        views = {n: gathered(v).clone() for n, v in whole_views(model).items() if "weight_" not in n}
        losses, _ = train_without_clipping(model, 2, optimizer=optimizer)
        found.append((views, losses))
    return found


def filled(folder: str) -> dict[str, Any]:
    """A whole checkpoint, read by ranks that share layers; put together again."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    model = build("full", "phi3", fused=False)
    tensor_parallel(model, mesh)
    copy.deepcopy(model.model.layers[0].self_attn.config)
    load_whole(Path(folder), model)
    return {name: gathered(view).clone() for name, view in whole_views(model).items()}


__all__ = [
    "both",
    "build",
    "curves",
    "dropped",
    "filled",
    "norm_of",
    "optimizer_of",
    "read",
    "train_without_clipping",
    "with_dropout",
    "write",
]


def loaded(folder: str, steps: int) -> dict[str, Any]:
    """Models whose linears are cut as soon as they are read: all they hold, and what they learn."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = {}
    for kind in ("nf4", "nf4_dq", "packed", "full"):
        packs = {"linear": Rule(weight=FORMATS[kind])} if kind in FORMATS else {}
        how = {
            "recipe": None if kind == "packed" else Recipe(name=kind, **packs),
            "lora": None if kind == "full" else LoRA(r=4),
            "dtype": torch.float32,
        }
        where = f"{folder}/{'packed' if kind == 'packed' else 'plain'}"
        reference, _ = load_sharded_model(where, **how)
        want = full(reference, trained=False)
        alone, _ = train_without_clipping(reference, steps)
        with Allocations() as allocations:
            model, receipt = load_tensor_parallel_model(where, mesh, **how)
        held = {name: gathered(view).clone() for name, view in whole_views(model).items()}
        losses, _ = train_without_clipping(model, steps)
        odd = [n for n, t in held.items() if n not in want or not torch.equal(t, want[n])]
        found[kind] = {"odd": odd, "losses": losses, "alone": alone, "receipt": str(receipt)}
        found[kind] |= {"most": allocations.most, "bytes": local_bytes(model)}
    return found
