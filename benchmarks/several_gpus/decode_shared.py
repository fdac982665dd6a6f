"""Decoding by GPUs that share a model's layers: that it is right, and milliseconds a token.

    torchrun --nproc-per-node 2 benchmarks/several_gpus/decode_shared.py --shapes llama-3.1-8b,llama-3.1-70b

Numbers first: the kernel that sums over the ranks, launched one by one and from a graph of many turns, beside
the sum of all ranks' values; then a model of four layers of the first shape, shared and whole on each GPU:
greedy text and logits. Then for each shape with random weights a step at both contexts, with our kernel for
the sums and with NCCL's, and a token through ``model.generate``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from fewbits import FastLanguageModel, get_recipe
from fewbits.errors import Unsupported
from fewbits.kernels.generation.rank_sum import RankSum, rank_sum_ref
from fewbits.models.fast import with_methods
from fewbits.models.generation import step_ranks
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.step import DecodeStep
from fewbits.training.ranks.tensor_loading import load_tensor_parallel_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from random_model import config_of  # benchmarks/random_model.py

SUMMED = ((1, 8192), (5, 4096), (64, 8192))
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}


def say(text: str) -> None:
    """On the first rank."""
    if distributed.get_rank() == 0:
        print(f"[{time.perf_counter() - BEGAN:5.1f} s] {text}", flush=True)


def sums(device: torch.device) -> bool:
    """Whether our kernel gives the definition, launched one by one and from a graph of many turns."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    right = True
    for shape in SUMMED:
        x = torch.zeros(shape, device=device)
        try:
            ours = RankSum(x, distributed.group.WORLD, rank, size, early=True)
        except Unsupported as error:
            say(f"no kernel of ours: {error}")
            return False
        wrong = 0
        for turn in range(20):
            every = [
                torch.randn(shape, device=device, generator=_seeded(device, turn, r)) for r in range(size)
            ]
            x.copy_(every[rank])
            wrong += int(not torch.equal(ours.launch(), rank_sum_ref(every)))
        x.fill_(1.0)
        graph = recorded(ours.launch, 10)
        for _ in range(3):
            graph.replay()
        wrong += int(not bool((x == float(size) ** 30).all()))
        say(f"sum of {shape} over {size}: {wrong} of 21 wrong")
        right = right and not wrong
    return right


def sum_times(device: torch.device) -> None:
    """Our kernel and NCCL's, 50 in a graph."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for shape in SUMMED:
        x = torch.zeros(shape, device=device)
        ours = RankSum(x, distributed.group.WORLD, rank, size, early=True)
        took = []
        for run in (ours.launch, lambda x=x: distributed.all_reduce(x)):
            run()
            timed = recorded(run, 50)
            timed.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                timed.replay()
            end.record()
            torch.cuda.synchronize()
            took.append(1e3 * begin.elapsed_time(end) / 200)
        say(f"sum of {shape} over {size}: ours {took[0]:.1f} us, NCCL {took[1]:.1f}")


def recorded(run: Any, count: int) -> torch.cuda.CUDAGraph:
    """A graph of so many launches, which do not run yet."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            run()
    return graph


def _seeded(device: torch.device, turn: int, rank: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(1000 * turn + rank)


def build(config: Any, mesh: Any, recipe: str | None) -> Any:
    chosen = None if recipe in (None, "none") else get_recipe(recipe)
    model, _ = load_tensor_parallel_model(config, mesh, recipe=chosen, trains=False)
    model.config.use_cache = True
    FastLanguageModel.for_inference(with_methods(model))
    return model


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def equality(shape: str, shared: Any, alone: Any, recipe: str) -> None:
    """A model of four layers, shared, and whole on each GPU."""
    found = []
    for mesh in (alone, shared):
        model = build(config_of(shape, layers=4), mesh, recipe)
        ids = torch.arange(5, 69, device=model.device)[None] * 37 % 500
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, output_logits=True,
            return_dict_in_generate=True, **GREEDY,
        )  # fmt: skip
        step = decoding_of(model).step
        if not isinstance(step, DecodeStep):
            raise SystemExit(f"no step: {decoding_of(model).said}")
        found.append((out.sequences[0, 64:], torch.stack(out.logits, 1)[0]))
        say(f"{shape}, 4 layers, {recipe}, {mesh.size()} GPUs: {summing(step)}")
        del model, step
        free()
    (text, logits), (ours, shared_logits) = found
    same = int((text != ours).nonzero()[0]) if bool((text != ours).any()) else len(text)
    apart = float((logits[: same + 1] - shared_logits[: same + 1]).norm() / logits[: same + 1].norm())
    gap = 0.0
    if same < len(text):
        two = logits[same].topk(2).values
        gap = float((two[0] - two[1]) / logits[same].std())
    every = [torch.empty_like(shared_logits) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, shared_logits.contiguous())
    bits = all(torch.equal(each, every[0]) for each in every)
    say(
        f"{shape}, 4 layers: the same {same} of {len(text)} tokens (then a gap of {gap:.4f} deviations), "
        f"logits {apart:.4f} apart, equal bits on all ranks: {bits}"
    )


def summing(step: DecodeStep) -> str:
    """Who sums over the ranks."""
    ranks = step.ranks
    if ranks is None or ranks.direct is None:
        return f"NCCL sums ({'' if ranks is None else ranks.why_not_direct})"
    return "our kernel sums"


def wait() -> None:
    """For the device."""
    if KIND == "cuda":
        torch.cuda.synchronize()


def times_ms(run: Any, rounds: int = 3) -> list[float]:
    times = []
    for _ in range(rounds):
        distributed.barrier()
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def measure(model: Any, name: str, contexts: list[int], batch: int) -> None:
    for context in contexts:
        ids = torch.randint(
            5, 500, (batch, context), device=model.device, generator=_seeded(model.device, 1, 1)
        )

        def generate(count: int, ids: torch.Tensor = ids) -> None:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **GREEDY)

        generate(72)
        step = decoding_of(model).step
        if not isinstance(step, DecodeStep):
            raise SystemExit(f"no step: {decoding_of(model).said}")
        few, many = times_ms(lambda: generate(8))[1], times_ms(lambda: generate(72))[1]

        def steps(step: DecodeStep = step, context: int = context) -> None:
            step.position.fill_(context)
            for _ in range(64):
                step.advance()

        each = [ms / 64 for ms in times_ms(steps)]
        say(
            f"{name}, {distributed.get_world_size()} GPUs, batch {batch}, context {context}, "
            f"{summing(step)}: step {each[1]:.3f} ms ({each[0]:.3f} to {each[2]:.3f}), through generate "
            f"{(many - few) / 64:.3f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.1-70b")
    parser.add_argument("--recipe", default="qlora_nf4")
    parser.add_argument("--contexts", default="128,2048")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    distributed.init_process_group("nccl" if KIND == "cuda" else "gloo")
    size, rank = distributed.get_world_size(), distributed.get_rank()
    if KIND == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
        say(f"{size} of {torch.cuda.get_device_name()}, torch {torch.__version__}")
        if not sums(torch.device("cuda", torch.cuda.current_device())):
            step_ranks._MOST_ROWS = 0  # NCCL's sums alone
    shared = init_device_mesh(KIND, (size,), mesh_dim_names=("tensor",))
    alone = init_device_mesh(KIND, (size, 1), mesh_dim_names=("copies", "tensor"))["tensor"]
    shapes, contexts = options.shapes.split(","), list(map(int, options.contexts.split(",")))
    equality(shapes[0], shared, alone, options.recipe)
    for number, shape in enumerate(shapes):
        model = build(config_of(shape), shared, options.recipe)
        if KIND == "cuda" and not number and step_ranks._MOST_ROWS:
            sum_times(torch.device("cuda", torch.cuda.current_device()))
        say(f"{shape} built, {torch.cuda.memory_allocated() / 2**30:.1f} GiB a GPU")
        measure(model, f"{shape} {options.recipe}", contexts, options.batch)
        before = step_ranks._MOST_ROWS
        step_ranks._MOST_ROWS = 0  # NCCL's sums
        decoding_of(model).step = None
        measure(model, f"{shape} {options.recipe}", contexts[:1], options.batch)
        step_ranks._MOST_ROWS = before
        del model
        free()
    say(f"done on rank {rank}")
    distributed.destroy_process_group()


KIND = "cuda" if torch.cuda.is_available() else "cpu"  # a trial of this script
BEGAN = time.perf_counter()
if __name__ == "__main__":
    main()
