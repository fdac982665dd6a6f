"""Several processes with a process group over gloo, for a test; in a test: ``run_ranks(worker, 2, ...)``.

They are forked from one server that has imported everything and computed nothing, so that a process costs no
import. They meet through a file: no port is chosen that somebody else might take.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 240  # for a machine under load; a hang is told as one
_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "peft",
    "fewbits.decoder.parts",
    "fewbits.nn.lora",
    "fewbits.training.optimizer",
]


def run_ranks(worker: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``worker(*args)`` in ``world_size`` processes of one process group.

    Args:
        worker: a function of a module that can be imported.
        world_size: how many.
        args: what pickle takes; the same for all.

    Returns:
        What each returned (what torch.save takes), by rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(folder, rank, world_size, worker, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(TIMEOUT_S)
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert not errors, "\n".join(errors)
        assert not hung, f"ranks {hung} did not end in {TIMEOUT_S} s"
        assert all(process.exitcode == 0 for process in processes), [p.exitcode for p in processes]
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(folder: str, rank: int, world_size: int, worker: Callable[..., Any], args: Any) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported is no garbage, and is shared with it
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S / 2),
        )
        torch.manual_seed(0)
        torch.save(worker(*args), f"{folder}/{rank}.pt")
        distributed.barrier()
        distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001 - told to the test
        Path(f"{folder}/{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
