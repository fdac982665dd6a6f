"""A step of quantisation-aware training beside the same step of plain LoRA, in one process on one device.

    python benchmarks/training/qat_step.py [--layers 32] [--formats int4_g32,nf4] [--tokens 4x2048] [--fused]

The Llama-3.1-8B shape in bfloat16 with random weights and tokens, LoRA r=16 on all seven linears, torch's
fused AdamW, no recomputation. ``plain`` trains adapters over the bfloat16 weights; a format's row rounds
``W + s B A`` to it in every forward pass (`fewbits.kernels.product.fake_quantize`). Printed are medians
over the steps after the warm-up, their ratio to plain, and the peak of allocated memory. ``--fused`` measures
all under the fused decoder instead. ``--tiny`` is a toy shape, for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

WARMUP = 3


def random_model(options: argparse.Namespace) -> Any:
    """The 8B shape, or a toy's."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128256}
    if options.tiny:
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "vocab_size": 512}
    config = LlamaConfig(
        **shape,
        num_hidden_layers=options.layers,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def adapted(options: argparse.Namespace, variant: str) -> Any:
    """The model of one variant with its adapters in bfloat16."""
    from fewbits import LoRA, Recipe, convert, get_peft_model
    from fewbits.formats import get_format
    from fewbits.recipes.recipe import QAT
    from fewbits.training.calibration.qat import prepare_qat

    model, lora = random_model(options).requires_grad_(False), LoRA(r=16, alpha=16)
    if variant == "plain":
        convert(model, Recipe(name="plain"))
        model = get_peft_model(model, lora)
    else:
        model = prepare_qat(model, Recipe(name="qat", qat=QAT(weight=get_format(variant)), lora=lora))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" in name:
            p.data = p.data.to(torch.bfloat16)
    model.train()
    if options.fused:
        from fewbits.decoder.fuse import fuse

        fuse(model)
    return model


def stepper(options: argparse.Namespace, variant: str) -> Callable[[int], torch.Tensor]:
    """A function that trains one step on the tokens of its number and gives the loss."""
    model = adapted(options, variant)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=options.device == "cuda")
    rows, length = (int(n) for n in options.tokens.split("x"))

    def step(number: int) -> torch.Tensor:
        generator = torch.Generator(device=options.device).manual_seed(number)
        size = (rows, length)
        ids = torch.randint(0, model.config.vocab_size, size, device=options.device, generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    return step


def timed(options: argparse.Namespace, step: Callable[[int], torch.Tensor], number: int) -> tuple[float, Any]:
    """Milliseconds of one step, and its loss."""
    if options.device != "cuda":
        began = time.perf_counter()
        loss = step(number)
        return (time.perf_counter() - began) * 1e3, loss
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    loss = step(number)
    last.record()
    last.synchronize()
    return first.elapsed_time(last), loss


def measure(options: argparse.Namespace, variant: str) -> tuple[float, str]:
    """Median milliseconds, and a line about the variant."""
    step, times, losses = stepper(options, variant), [], []
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(WARMUP + options.steps):
        ms, loss = timed(options, step, number)
        times.append(ms)
        losses.append(loss)
    times, median = times[WARMUP:], statistics.median(times[WARMUP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0.0
    line = f"{median:8.2f} ms ({min(times):.2f}-{max(times):.2f})  peak {peak:.2f} GiB  "
    return median, line + f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}"


def main() -> None:
    """Measure each variant and print its line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--formats", default="int4_g32,nf4")
    parser.add_argument("--tokens", default="4x2048")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    plain = None
    for variant in ("plain", *options.formats.split(",")):
        median, line = measure(options, variant)
        plain = plain or median
        name = variant + (", fused" if options.fused else "")
        print(f"{options.layers} layers  {name:16s} {line}  x{median / plain:.3f}", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
