"""Cases of rounding: packing a weight, rounding it for training (also with its adapter), 8-bit AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Variant, differentiated, randn
from fewbits.formats import get_format
from fewbits.kernels.codec.quantize import quantize, quantize_ref
from fewbits.kernels.product.fake_quantize import (
    fake_quantize,
    fake_quantize_lora,
    fake_quantize_lora_ref,
    fake_quantize_ref,
)
from fewbits.training.optimizer import AdamW8bit

_RANK = 16
_EXACT = 4e-3  # one rounding to bfloat16 of what is compared in float32
_MOVED = 0.05  # the sum's last bit may move a few values to the next code


def quantize_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's gate projection."""
    N, K = min(14336, max_size), min(4096, max_size)
    listed = []
    for format in ("nf4", "nf4_dq", "fp4", "int8", "int8_tensor", "int4_g32", "int4_g128_zp"):
        listed.append(
            Case(
                op="quantize",
                part="forward",
                format=format,
                M=N,
                N=K,
                build=_quantize_problem,
                bytes_moved=get_format(format).nbytes((N, K)) + 2 * N * K,
                tolerance=_EXACT,
            )
        )
    return listed


def _quantize_problem(case: Case, device: torch.device) -> Problem:
    """Codes are compared as numbers; bitsandbytes puts a byte's first code into its high half."""
    weight = randn(device, torch.bfloat16, case.M, case.N) * 0.02
    format = get_format(case.format)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: quantize(weight, format).codes,
        "definition": lambda: quantize_ref(weight, format).codes,
    }
    if device.type == "cuda" and case.format in ("nf4", "nf4_dq", "fp4") and find_spec("bitsandbytes"):
        from bitsandbytes.functional import quantize_4bit

        def peer() -> Tensor:
            codes, _ = quantize_4bit(
                weight, quant_type=case.format[:3], compress_statistics=case.format.endswith("dq")
            )
            swapped: Tensor = (codes >> 4) | (codes << 4)
            return swapped.view(case.M, -1)

        functions["bitsandbytes"] = peer
    variants = {name: differentiated(f, (), weight, 0) for name, f in functions.items()}
    return Problem(variants, lambda: (format.quantize(weight).codes.double(),))


def fake_quantize_cases(max_size: int) -> list[Case]:
    """The same weight, as it is ("forward") and with an adapter of rank 16 ("adapter")."""
    N, K = min(14336, max_size), min(4096, max_size)
    listed = []
    for format in ("int4_g32", "int4_g128", "nf4", "int8"):
        for part, tolerance in (("forward", _EXACT), ("adapter", _MOVED)):
            listed.append(
                Case(
                    op="fake_quantize",
                    part=part,
                    format=format,
                    M=N,
                    N=K,
                    build=_fake_quantize_problem,
                    bytes_moved=4 * N * K + (2 * _RANK * (N + K) if part == "adapter" else 0),
                    tolerance=tolerance,
                )
            )
    return listed


def _fake_quantize_problem(case: Case, device: torch.device) -> Problem:
    weight = randn(device, torch.bfloat16, case.M, case.N) * 0.02
    a = randn(device, torch.bfloat16, _RANK, case.N) * case.N**-0.5
    b = randn(device, torch.bfloat16, case.M, _RANK) * 0.02
    format = get_format(case.format)
    functions: dict[str, Callable[[], Tensor]]
    if case.part == "forward":
        functions = {
            "fewbits": lambda: fake_quantize(weight, format),
            "definition": lambda: fake_quantize_ref(weight, format, weight.dtype),
        }
    else:
        functions = {
            "fewbits": lambda: fake_quantize_lora(weight, a, b, 1.0, format),
            "definition": lambda: fake_quantize_lora_ref(weight, a, b, 1.0, format, weight.dtype),
        }
    variants = {name: differentiated(f, (), weight, 0) for name, f in functions.items()}

    def exact() -> Sequence[Tensor]:
        if case.part == "forward":
            return (fake_quantize_ref(weight, format, torch.float32).double(),)
        return (fake_quantize_lora_ref(weight, a, b, 1.0, format, torch.float32).double(),)

    return Problem(variants, exact)


def adamw_cases(max_size: int) -> list[Case]:
    """One step of LoRA r=16 on Llama-3.1-8B, 14 tensors a layer, and of a 1.7B model's MLP weights."""
    layers = 32 if max_size >= 4096 else 1
    sizes = [min(n, max_size) for n in (4096, 1024, 14336)]
    H, KV, I = sizes
    lora = [(16, k) for k in (H, H, H, H, H, H, I)] + [(n, 16) for n in (H, KV, KV, H, I, I, H)]
    width = min(6144, max_size), min(2048, max_size)
    listed = []
    for part, shapes in (("lora", lora * layers), ("weights", [width] * 3 * max(layers - 4, 1))):
        n = sum(a * b for a, b in shapes)
        listed.append(
            Case(
                op="adamw",
                part=part,
                format="bfloat16",
                M=len(shapes),
                N=n // len(shapes),
                bytes_moved=10 * n + 16 * n // 256,
                tolerance=_EXACT,
                build=lambda case, device, shapes=shapes: _adamw_problem(shapes, device),  # type: ignore[misc]
            )
        )
    return listed


def _adamw_problem(shapes: list[tuple[int, int]], device: torch.device) -> Problem:
    """Every variant steps its own copy of the parameters; what is compared is the first tensor after it."""
    params = [randn(device, torch.bfloat16, *shape) for shape in shapes]
    grads = [randn(device, torch.bfloat16, *shape) * 0.01 for shape in shapes]

    def variant(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Variant:
        mine = [p.clone().requires_grad_() for p in params]
        for p, g in zip(mine, grads, strict=True):
            p.grad = g
        optimizer = make(mine)

        def run() -> Sequence[Tensor]:
            optimizer.step()
            return (mine[0].detach(),)

        return lambda: run

    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "fewbits": lambda ps: AdamW8bit(ps, lr=1e-6, min_8bit_size=0),
        "fewbits_stochastic": lambda ps: AdamW8bit(ps, lr=1e-6, min_8bit_size=0, stochastic_rounding=True),
        "torch_fused_32bit": lambda ps: torch.optim.AdamW(ps, lr=1e-6, fused=True),
    }
    if device.type == "cuda" and find_spec("bitsandbytes"):
        from bitsandbytes.optim import AdamW8bit as Peer

        makers["bitsandbytes"] = lambda ps: Peer(ps, lr=1e-6, min_8bit_size=0)
    exact = params[0].double()  # steps of 1e-6 stay below bfloat16's own rounding
    return Problem({name: variant(make) for name, make in makers.items()}, lambda: (exact,))


MAKERS = (quantize_cases, fake_quantize_cases, adamw_cases)
