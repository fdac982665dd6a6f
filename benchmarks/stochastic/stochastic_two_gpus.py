"""A model of 70B under stochastic computing, its layers over two GPUs as ``device_map="auto"`` places them.

    python benchmarks/stochastic/stochastic_two_gpus.py --bf16 [--out rows.csv --commit HASH]   # 2 minutes
    python benchmarks/stochastic/stochastic_two_gpus.py --shape tiny --prompt 8 --steps 2   # a trial

Random weights, prepared one after the other where they stay (recipe "stochastic"); accelerate's balanced map
and its hooks. With the current device left at 0: text is decoded and timed; then every layer of the second
GPU is moved to the first and must give, for the inputs that it had there, the same bits. With ``--bf16`` the
plain model goes through the same loop afterwards. A step is recorded in CUDA graphs of one GPU each with
copies between them, and must give the tokens of single launches, which are timed as well.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import get_balanced_memory

from fewbits.bench.record import Row, append, conditions
from fewbits.inference.decode import Decoding
from fewbits.models.stochastic.sharing import share_inputs
from fewbits.recipes import get_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_model import config_of, empty_model, fill

GIB = 2**30
START = time.perf_counter()
SHAPES = ((1, 1), (16, 1), (1, 64))  # batch and tokens of the inputs that layers are compared on


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, flush=True)


def synchronize() -> None:
    for i in range(torch.cuda.device_count()):
        torch.cuda.synchronize(i)


def map_of(model: Any) -> dict[str, Any]:
    """Where each part goes: balanced over the GPUs, or all on the CPU."""
    if torch.cuda.device_count() < 2:
        device = 0 if torch.cuda.is_available() else "cpu"
        names = [name for name, _ in model.model.named_children() if name != "layers"]
        layers = [f"layers.{i}" for i in range(len(model.model.layers))]
        return dict.fromkeys([*(f"model.{name}" for name in (*names, *layers)), "lm_head"], device)
    whole = ["LlamaDecoderLayer"]
    memory = get_balanced_memory(model, no_split_module_classes=whole)
    found: dict[str, Any] = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    return found


def split_model(config: Any, recipe: str | None) -> Any:
    model = empty_model(config, None if recipe is None else get_recipe(recipe))
    places = map_of(model)

    def place(name: str) -> torch.device:
        fits = [part for part in places if name == part or name.startswith(f"{part}.")]
        return torch.device(
            places[max(fits, key=len)] if fits else "meta"
        )  # above the parts there is nothing

    fill(model, place)
    model = dispatch_model(model, device_map=places, skip_keys="past_key_values", force_hooks=True)
    used = {str(device): sum(p == device for p in places.values()) for device in places.values()}
    say(f"{recipe or 'bf16'}: parts of the model on each device: {used}")
    return model


def second_layers(model: Any) -> dict[int, Any]:
    """The layers that are not where the first is, by number; without a second device, the last."""
    first = next(model.model.layers[0].parameters()).device
    layers = dict(enumerate(model.model.layers))
    found = {i: m for i, m in layers.items() if next(m.parameters()).device != first}
    return found or {len(layers) - 1: layers[len(layers) - 1]}


def record_calls(model: Any) -> dict[int, list[tuple[Any, Any, torch.Tensor]]]:
    """What each of these layers was given and gave, for three shapes of input."""
    calls: dict[int, list[tuple[Any, Any, torch.Tensor]]] = {}
    hooks = []
    for i, layer in second_layers(model).items():

        def note(_: Any, args: Any, kwargs: Any, out: Any, i: int = i) -> None:
            calls.setdefault(i, []).append((args, kwargs, out.clone()))

        hooks.append(layer.register_forward_hook(note, with_kwargs=True))
    with torch.inference_mode():
        for batch, length in SHAPES:
            generator = torch.Generator().manual_seed(batch + length)
            ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
            model(input_ids=ids.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(x, device) for x in value)
    return {k: moved(v, device) for k, v in value.items()} if isinstance(value, dict) else value


def compare(model: Any, calls: dict[int, list[tuple[Any, Any, torch.Tensor]]]) -> None:
    """Each of these layers on the first device; destroys the model's placement."""
    device, count = model.device, 0
    layers = second_layers(model)
    remove_hook_from_module(model, recurse=True)
    for i, layer in layers.items():
        before = next(layer.parameters()).device
        layer.to(device)
        for args, kwargs, out in calls[i]:
            with torch.inference_mode():
                here = layer(*moved(args, device), **moved(kwargs, device))
            if not torch.equal(here, out.to(device)):
                wrong = int((here != out.to(device)).sum())
                raise SystemExit(
                    f"layer {i}: {wrong} of {out.numel()} outputs differ between {before} and {device}"
                )
            count += 1
    if torch.cuda.is_available() and torch.cuda.current_device() != 0:
        raise SystemExit("the current device is no longer 0")
    say(f"exact: {len(layers)} layers of {before} give on {device} the same bits, {count} inputs in all")


def decode(model: Any, args: argparse.Namespace, variant: str, rows: list[Row]) -> None:
    """Times of prompts and tokens, from graphs and launched one by one: the same tokens."""
    for batch, graph in ((1, False), (1, True), (4, True)):
        decoding = Decoding(
            model, batch_size=batch, max_tokens=args.prompt + args.steps + 8, cuda_graph=graph
        )
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, model.config.vocab_size, (batch, args.prompt), generator=generator)
        times: dict[str, list[float]] = {"prefill": [], "token": []}
        for _ in range(4 if graph else 3):
            synchronize()
            begin = time.perf_counter()
            decoding.prefill(prompt)
            synchronize()
            middle = time.perf_counter()
            ids = decoding.decode(args.steps + 1)
            synchronize()
            times["prefill"].append(1e3 * (middle - begin))
            times["token"].append(1e3 * (time.perf_counter() - middle) / args.steps)
        if not bool(((ids >= 0) & (ids < model.config.vocab_size)).all()):
            raise SystemExit(f"{variant}: no tokens of the vocabulary")
        if not graph:
            launched = ids
            del times["prefill"]
        elif batch == 1 and not torch.equal(ids, launched):
            raise SystemExit(f"{variant}: graphs and single launches give other tokens; nothing is recorded")
        how = f"({decoding.without_graph or decoding.recorded})"
        for what, found in times.items():
            found = sorted(found[1:])  # the first compiles
            part = f"{args.shape} of {len(model.model.layers)} layers, batch {batch}"
            part += f", prompt of {args.prompt}" if what == "prefill" else f", after {args.prompt} tokens"
            part += "" if graph else ", without graphs"
            value = statistics.median(found)
            say(f"{variant:12s} {part:76s} {what:8s} {value:9.2f} ms   {how}")
            rows.append(
                Row(
                    op="stochastic_two_gpus", part=part, variant=variant, format=variant,
                    metric="time", unit="ms per token" if what == "token" else "ms",
                    low=round(found[0], 3), value=round(value, 3), high=round(found[-1], 3),
                )
            )  # fmt: skip
        del decoding
    for i in range(torch.cuda.device_count()):
        peak = torch.cuda.max_memory_allocated(i) / GIB
        say(f"{variant:12s} peak memory of cuda:{i} {peak:8.2f} GiB")
        rows.append(
            Row(
                op="stochastic_two_gpus", part=f"{args.shape}, cuda:{i}", variant=variant, format=variant,
                metric="peak memory", unit="GiB", low=round(peak, 2), value=round(peak, 2),
                high=round(peak, 2),
            )
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-70b")
    parser.add_argument("--layers", type=int, default=None, help="fewer, for less memory or time")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--bf16", action="store_true", help="the plain model as well")
    parser.add_argument("--out", type=Path, default=None, help="CSV file to add rows to")
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    rows: list[Row] = []
    config = config_of(args.shape, args.layers)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
        say(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")

    model = split_model(config, "stochastic")
    calls = record_calls(model)
    say(*share_inputs(model).notes)
    decode(model, args, "stochastic", rows)
    compare(model, calls)
    del model, calls
    if args.bf16:
        gc.collect()
        for i in range(torch.cuda.device_count()):
            with torch.cuda.device(i):
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(i)
        model = split_model(config, None)
        decode(model, args, "bf16", rows)
    print(f"\n{'':76s} {'variant':12s} {'value':>10s}")
    for row in rows:
        print(f"{row.part:76s} {row.variant:12s} {row.value:10.2f} {row.metric}, {row.unit}")
    if args.out is not None:
        command = "python benchmarks/stochastic/stochastic_two_gpus.py" + (" --bf16" if args.bf16 else "")
        run = conditions(device, command=command, commit=args.commit, packages=("transformers", "accelerate"))
        append(args.out, rows, run)


if __name__ == "__main__":
    main()
