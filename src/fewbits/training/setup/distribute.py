"""A run on several processes, up to the first step: the same everything on all, and the model on each."""

from __future__ import annotations

import hashlib
import platform
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import fewbits
from fewbits.errors import BadInput, SpecMismatch, Unsupported
from fewbits.formats import Format, get_format
from fewbits.training.config import TrainConfig
from fewbits.training.plan.parallel import Layout, choose, data_share, need_of
from fewbits.training.ranks.processes import Ranks, join
from fewbits.training.setup.model_and_trainer import (
    Built,
    load_model,
    recipe_of_config,
    stretched_length,
    uses_gpu,
)

_ON_THE_WIRE = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3"}
_PLACES = (
    "model",
    "train_data",
    "eval_data",
)  # may have other names on other machines: contents are compared
_SAMPLED, _PATIENCE_S = 16, 20.0


def gather_ranks(config: TrainConfig, console: Console, attempt: int = 0) -> Ranks:
    """Meet the other processes of the run, if there are any; nothing is spread over GPUs unasked."""
    on_gpu = uses_gpu(config)
    ranks = join(
        on_gpu=on_gpu,
        wait_seconds=config.wait_seconds,
        meeting_seconds=config.meeting_seconds,
        attempt=attempt,
        tell=partial(console.print, highlight=False, markup=False),
    )
    if ranks.size == 1 and on_gpu and torch.cuda.device_count() > 1:
        count = torch.cuda.device_count()
        console.print(
            f"{count} GPUs are visible, and one process uses one of them; --nproc-per-node {count} uses all.",
            highlight=False,
        )
    if ranks.size == 1 and config.parallel not in ("auto", "ddp"):
        console.print(
            f"parallel is {config.parallel}, but this is one process, which holds the whole model.",
            highlight=False,
        )
    if ranks.size == 1 and config.communication not in ("auto", "none"):
        console.print(
            f"communication is {config.communication}, but this is one process: nothing travels.",
            highlight=False,
        )
    return ranks


def check_start(ranks: Ranks, config: TrainConfig, *, resume: bool) -> None:
    """Before anything is read: the same settings and the same software on every rank."""
    settings = {k: v for k, v in config.to_dict().items() if k not in _PLACES}
    ranks.check_same({**settings, "resume": resume, **_software()})


def check_loaded(layout: Layout, facts: Mapping[str, Any], model: nn.Module) -> None:
    """Before the first step: the same data and the same model."""
    if layout.ranks.size > 1:
        config = model.config.get_text_config().to_dict()  # type: ignore[operator, union-attr]
        names = ("_name_or_path", "name_or_path")
        config_facts = {f"model.{k}": v for k, v in config.items() if k not in names}
        weights = weights_fingerprint(model, values=not layout.is_sharded)
        layout.ranks.check_same({**facts, **config_facts, "weights": weights})


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Every rank must see the leader's run folder, which they write checkpoints into.

    Raises:
        SpecMismatch: one does not.
    """
    if ranks.size == 1:
        return
    mark = folder / f".ranks-{ranks.led('mark', lambda: secrets.token_hex(8))}"
    if ranks.leads:
        mark.touch()
    ranks.barrier()
    sees = ranks.exchange("run folder", [ranks.host, _appears(mark)])
    if ranks.leads:
        mark.unlink(missing_ok=True)
    blind = [f"rank {rank} (on {host})" for rank, (host, sees_it) in enumerate(sees) if not sees_it]
    if blind:
        raise SpecMismatch(
            f"{', '.join(blind)} cannot see the run folder {folder} of rank 0 (on {sees[0][0]}); set"
            " output_dir to a folder on storage that all machines share."
        )


def _appears(path: Path) -> bool:
    """Network storage may show a new file some seconds later."""
    deadline = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def layout_for(config: TrainConfig, ranks: Ranks, model: Any, batch: tuple[int, int]) -> Layout:
    """What this rank does; all agree, for the smallest GPU decides.

    Args:
        config: the run.
        ranks: this process among the others.
        model: the model's configuration of transformers; None: not known without its weights.
        batch: sequences and tokens of each in the largest pass.

    Raises:
        BadInput, Unsupported: the settings do not fit the processes, or each other.
    """
    recipe, lora = recipe_of_config(config)
    free = torch.cuda.mem_get_info()[0] if uses_gpu(config) and ranks.size > 1 else None
    smallest = None if free is None else min(ranks.exchange("free memory", free))
    shapes = {} if model is None else model.get_text_config().to_dict()
    need = need_of(shapes, recipe, lora, batch, config.optimizer)
    kind, reason = choose(config.parallel, size=ranks.size, available=smallest, need=need)
    data_rank, data_size = data_share(kind, rank=ranks.rank, size=ranks.size, tensor_size=config.tensor_size)
    layout = Layout(
        kind=kind,
        data_rank=data_rank,
        data_size=data_size,
        ranks=ranks,
        reason=f"{ranks.size} ranks, {reason}",
    )
    if layout.is_sharded and data_size == 1 and config.communication not in ("auto", "none"):
        still = f"communication is {config.communication}, but ranks that share every layer send no gradients"
        layout = replace(layout, reason=f"{layout.reason}; {still}")
    _check_shard_size(config, layout)
    if layout.is_sharded:
        _refuse(config, recipe, layout.kind)
    return layout


def _check_shard_size(config: TrainConfig, layout: Layout) -> None:
    size = config.shard_size
    if size is None or layout.kind == "one" or (config.parallel == "auto" and layout.kind == "ddp"):
        return
    if layout.kind != "fsdp" or layout.data_size != layout.ranks.size:
        raise BadInput(
            f"shard_size is {size}, which works only with parallel=fsdp and without tensor_size; leave"
            " shard_size"
            " out, or change those."
        )
    if layout.ranks.size % size:
        raise BadInput(
            f"shard_size is {size}, which does not divide the {layout.ranks.size} ranks; choose a divisor."
        )


def _refuse(config: TrainConfig, recipe: Any, kind: str) -> None:
    """What a sharded model cannot do."""
    if config.optimizer not in ("adamw", "adamw_8bit", "adafactor", "sgd"):
        raise Unsupported(
            f"{config.optimizer} works only where each process has the whole model, which none has under"
            f" parallel={kind}; set optimizer to adamw, adamw_8bit or sgd, or use parallel=ddp."
        )
    if config.optimizer == "adafactor":  # it would take means over the rows that a rank happens to hold
        raise Unsupported(
            "adafactor needs means over rows and columns of whole matrices, which no process has under"
            f" parallel={kind}; set optimizer to adamw, adamw_8bit or sgd, or use"
            " parallel=ddp."
        )
    if config.merge:
        raise BadInput(
            "merge does not work where processes hold parts of the model; leave it out, and use fewbits"
            " merge on"
            " the finished run."
        )
    if config.template_tokens == "add":
        raise Unsupported(
            f"template_tokens adds rows to the embedding, which no rank holds whole under parallel={kind};"
            " use ddp."
        )
    if recipe is not None and recipe.qat is not None:
        raise Unsupported("quantisation-aware training needs the whole model on each rank; use parallel=ddp.")
    if config.dtype == "float16":
        raise Unsupported("float16 is not used with sharded models; set dtype to bfloat16 or auto.")


def load_distributed(config: TrainConfig, layout: Layout) -> Built:
    """The model of the configuration, spread as the layout says."""
    if not layout.is_sharded:
        return load_model(config)
    if _comes_in_shares(config):
        return _load_in_shares(config, layout)
    return load_model(config, spread=lambda model: _spread(model, config, layout))


def _comes_in_shares(config: TrainConfig) -> bool:
    """Whether no rank needs the whole model in its host memory: a folder, on GPUs."""
    recipe, _ = recipe_of_config(config)
    is_read_by_rows = recipe is None or recipe.qat is None
    return (
        uses_gpu(config)
        and Path(config.model).is_dir()
        and is_read_by_rows
        and stretched_length(config) is None
    )


def _load_in_shares(config: TrainConfig, layout: Layout) -> Built:
    """Each rank reads and packs its share of the weights alone."""
    from transformers import AutoTokenizer

    from fewbits.host.attention import attention_receipt, use_attention
    from fewbits.training.ranks.sharded_loading import load_sharded_model
    from fewbits.training.ranks.tensor_loading import load_tensor_parallel_model

    recipe, lora = recipe_of_config(config)
    data, tensor = _meshes(config, layout)
    options: dict[str, Any] = {"recipe": recipe, "lora": lora, "seed": config.seed}
    options["reshard_after_forward"] = not config.keep_gathered
    if tensor.size() > 1:
        load = partial(load_tensor_parallel_model, config.model, tensor, data)
    else:
        load = partial(load_sharded_model, config.model, mesh=data)
    if lora is None and config.dtype == "auto":  # float32 weights, 16-bit products
        options |= {"dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    elif config.dtype != "auto":
        options["dtype"] = getattr(torch, config.dtype)
    try:
        model, receipt = load(**options)
    except SpecMismatch as error:  # a family whose decoder is not fused
        model, receipt = load(fused=False, **options)
        receipt.notes.append(f"the decoder is not fused: {error}")
    lines = [str(receipt), *use_attention(model).notes]
    lines += attention_receipt(model, seq_len=config.max_seq_length, packed=config.packing, dtype=None)
    tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
    return Built(model, tokenizer, recipe, lora, "\n".join(line for line in lines if line))


def _spread(model: nn.Module, config: TrainConfig, layout: Layout) -> str:
    from fewbits.training.ranks.fsdp import shard

    device = "cuda" if uses_gpu(config) else "cpu"
    data, tensor = _meshes(config, layout)
    lines = []
    if tensor.size() > 1:
        from fewbits.training.ranks.tensor_parallel import tensor_parallel

        lines.append(str(tensor_parallel(model, tensor)))
    if layout.data_size > 1:
        _, lora = recipe_of_config(config)
        options: dict[str, Any] = {"reshard_after_forward": not config.keep_gathered}
        if device == "cuda" and lora is None and config.dtype == "auto":  # float32 weights, 16-bit products
            options |= {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        lines.append(str(shard(model, data, **options)))
    else:
        model.to(device)  # from the host, as sharding does
    return "\n".join(lines)


def _meshes(config: TrainConfig, layout: Layout) -> tuple[Any, Any]:
    """The ranks that share or copy the weights, and those that share a layer."""
    from torch.distributed.device_mesh import init_device_mesh

    width = layout.ranks.size // layout.data_size
    shards = config.shard_size or layout.data_size
    shape = (layout.data_size // shards, shards, width)
    device = "cuda" if uses_gpu(config) else "cpu"
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "data", "tensor"))
    return (mesh["replica", "data"] if shape[0] > 1 else mesh["data"]), mesh["tensor"]


def communication_of(config: TrainConfig, layout: Layout) -> Format | None:
    """The format in which gradients travel; None: their own."""
    recipe, _ = recipe_of_config(config)
    if config.communication != "auto":
        name = _ON_THE_WIRE.get(config.communication)
        chosen = None if name is None else get_format(name)
    else:
        chosen = None if recipe is None else recipe.communication
    return chosen


def weights_fingerprint(model: nn.Module, *, values: bool = True) -> str:
    """A hash of all parameters' names and dtypes, and of shapes and some values where they are whole here."""
    digest = hashlib.blake2b(digest_size=8)
    for name, p in model.named_parameters():
        digest.update(f"{name} {p.dtype} {p.requires_grad}\n".encode())
        if values and p.numel():
            digest.update(str(tuple(p.shape)).encode())
            flat = p.detach().reshape(-1)
            chosen = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED]
            digest.update(chosen.double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _software() -> dict[str, str]:
    import accelerate
    import peft
    import transformers

    return {
        "version of fewbits": fewbits.__version__,
        "version of torch": str(torch.__version__),
        "version of transformers": transformers.__version__,
        "version of peft": peft.__version__,
        "version of accelerate": accelerate.__version__,
        "version of python": ".".join(platform.python_version_tuple()[:2]),
    }
