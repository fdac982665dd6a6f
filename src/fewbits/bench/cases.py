"""What is timed: an op, a shape, the bytes and operations it cannot do without, and everyone who can do it.

A case builds its operands on a device and gives one callable per variant: fewbits, and each peer that is
installed. Peers get the same operands and the same number of outputs. No variant is timed that fails the
comparison with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.bench.attention_cases import MAKERS as ATTENTION_MAKERS
from fewbits.bench.decode_cases import MAKERS as DECODE_MAKERS
from fewbits.bench.epilogue_cases import MAKERS as EPILOGUE_MAKERS
from fewbits.bench.expert_cases import MAKERS as EXPERT_MAKERS
from fewbits.bench.float8_cases import MAKERS as FLOAT8_MAKERS
from fewbits.bench.fused_cases import MAKERS as FUSED_MAKERS
from fewbits.bench.gradient_cases import MAKERS as GRADIENT_MAKERS
from fewbits.bench.problem import Case, Problem, differentiated, randn
from fewbits.bench.quantize_cases import MAKERS as QUANTIZE_MAKERS
from fewbits.bench.routing_cases import MAKERS as ROUTING_MAKERS
from fewbits.bench.stochastic_cases import MAKERS as STOCHASTIC_MAKERS
from fewbits.formats import get_format
from fewbits.formats.base import Packed
from fewbits.kernels.codec.dequantize import dequantize, dequantize_ref
from fewbits.kernels.decoder.rmsnorm import rmsnorm, rmsnorm_backward_ref, rmsnorm_ref
from fewbits.kernels.product.lora_linear import lora_linear
from fewbits.kernels.product.matmul_operands import operand_linear
from fewbits.kernels.product.matmul_packed import packed_linear

_EPS = 1e-5
_RANK = 16
_TWO_ROUNDINGS = {"float32": 1e-5, "bfloat16": 4e-3}
_TRAINED = {"forward": 0, "backward": 1, "backward_all": 2}


def cases(op: str | None = None, *, max_size: int | None = None) -> list[Case]:
    """All cases, or those of one op; ``max_size`` cuts their dimensions, for a quick look or a CPU."""
    by_name = {case.name: case for make in _MAKERS for case in make(max_size or 2**31)}
    return [case for case in by_name.values() if op in (None, case.op)]


# RMSNorm.


def _rmsnorm_cases(max_size: int) -> list[Case]:
    shapes = [(8192, 2048), (8192, 4096), (8192, 8192), (262144, 128), (16, 4096)]
    listed = []
    for format, M, N in [*(("bfloat16", M, N) for M, N in shapes), ("float32", 8192, 4096)]:
        M, N, itemsize = min(M, max_size), min(N, max_size), getattr(torch, format).itemsize
        case = Case(
            op="rmsnorm",
            part="",
            format=format,
            M=M,
            N=N,
            bytes_moved=0,
            tolerance=_TWO_ROUNDINGS[format],
            build=_rmsnorm_problem,
        )
        for part, passes, weights in (("forward", 2, 1), ("backward", 3, 1), ("backward_all", 3, 2)):
            bytes_moved = (passes * M + weights) * N * itemsize + 4 * M
            listed.append(replace(case, part=part, bytes_moved=bytes_moved))
    return listed


def _rmsnorm_problem(case: Case, device: torch.device) -> Problem:
    dtype = getattr(torch, case.format)
    x, dy = randn(device, dtype, case.M, case.N), randn(device, dtype, case.M, case.N)
    w = randn(device, dtype, case.N) * 0.1 + 1

    def exact() -> Sequence[Tensor]:
        xd, wd = x.double(), w.double()
        y, r = rmsnorm_ref(xd, wd, _EPS)
        gradients = rmsnorm_backward_ref(dy.double(), xd, wd, r)
        return gradients[: _TRAINED[case.part]] if _TRAINED[case.part] else (y,)

    competitors = _rmsnorm_functions(case.N)
    trained = _TRAINED[case.part]
    return Problem({name: differentiated(f, (x, w), dy, trained) for name, f in competitors.items()}, exact)


def _rmsnorm_functions(N: int) -> dict[str, Callable[..., Tensor]]:
    def ours(x: Tensor, w: Tensor) -> Tensor:
        return rmsnorm(x, w, _EPS)

    def eager(x: Tensor, w: Tensor) -> Tensor:  # what transformers' LlamaRMSNorm does
        xf = x.float()
        return w * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)

    def fused(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (N,), w, _EPS)

    functions: dict[str, Callable[..., Tensor]] = {
        "fewbits": ours,
        "torch_eager": eager,
        "torch_rms_norm": fused,
    }
    if torch.cuda.is_available():
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
    if find_spec("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        functions["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, _EPS, 0.0, "llama", False)
    return functions


# Packed to dense.


def _dequantize_cases(max_size: int) -> list[Case]:
    listed = []
    for format in ("nf4", "nf4_dq", "int8", "int4_g64", "float8_e4m3_row"):
        N, K = min(14336, max_size), min(4096, max_size)
        listed.append(
            Case(
                op="dequantize",
                part="forward",
                format=format,
                M=N,
                N=K,
                build=_dequantize_problem,
                bytes_moved=get_format(format).nbytes((N, K)) + 2 * N * K,
                tolerance=_TWO_ROUNDINGS["bfloat16"],
            )
        )
    return listed


def _dequantize_problem(case: Case, device: torch.device) -> Problem:
    weight = randn(device, torch.bfloat16, case.M, case.N) * 0.02
    packed = get_format(case.format).quantize(weight)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: dequantize(packed, torch.bfloat16),
        "definition": lambda: dequantize_ref(packed, torch.bfloat16),
    }
    if device.type == "cuda" and case.format.startswith("nf4") and find_spec("bitsandbytes"):
        from bitsandbytes.functional import dequantize_4bit

        codes, state = _bitsandbytes_nf4(weight, case.format)
        functions["bitsandbytes"] = lambda: dequantize_4bit(codes, state)
    variants = {name: differentiated(f, (), weight, 0) for name, f in functions.items()}
    return Problem(variants, lambda: (packed.dequantize(torch.float32).double(),))


# Linear layers.


def _linear_cases(max_size: int) -> list[Case]:
    listed = []
    for op, format, part, M, build in (
        *(("matmul_packed", "nf4_dq", "forward", M, _packed_problem) for M in (1, 16, 8192)),
        ("matmul_packed", "nf4_dq", "backward", 8192, _packed_problem),
        *(("matmul_operands", "float8_e4m3", part, 8192, _operands_problem) for part in _TRAINED),
        *(("lora_linear", "nf4_dq", part, 8192, _lora_problem) for part in ("forward", "backward")),
    ):
        M, N, K = min(M, max_size), min(14336, max_size), min(4096, max_size)
        weight_bytes = get_format(format).nbytes((N, K)) if op != "matmul_operands" else 2 * N * K
        products = 2 if part == "backward_all" else 1
        listed.append(
            Case(
                op=op,
                part=part,
                format=format,
                M=M,
                N=N,
                K=K,
                build=build,
                flops=2 * M * N * K * products,
                bytes_moved=products * (weight_bytes + 2 * M * (N + K)),
                tolerance=_TWO_ROUNDINGS["bfloat16"],
            )
        )
    return listed


def _operands(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K), dy (M, N) and the weight (N, K), all bfloat16."""
    x, dy = randn(device, torch.bfloat16, case.M, case.K), randn(device, torch.bfloat16, case.M, case.N)
    return x, dy, randn(device, torch.bfloat16, case.N, case.K) * 0.02


def _exact(case: Case, x: Tensor, weight: Tensor, dy: Tensor) -> Sequence[Tensor]:
    if case.part == "forward":
        return (x.double() @ weight.double().t(),)
    dx = dy.double() @ weight.double()
    return (dx,) if case.part == "backward" else (dx, dy.double().t() @ x.double())


def _packed_problem(case: Case, device: torch.device) -> Problem:
    x, dy, weight = _operands(case, device)
    packed = get_format(case.format).quantize(weight)
    unpacked = packed.dequantize()
    functions: dict[str, Callable[..., Tensor]] = {
        "fewbits": lambda x: packed_linear(x, packed),
        "torch_bfloat16_weight": lambda x: F.linear(x, unpacked),
    }
    if device.type == "cuda" and find_spec("bitsandbytes"):
        functions["bitsandbytes"] = _bitsandbytes(weight, case.format)
    trained = _TRAINED[case.part]
    variants = {name: differentiated(f, (x,), dy, trained) for name, f in functions.items()}
    return Problem(variants, lambda: _exact(case, x, packed.dequantize(torch.float32), dy))


def _bitsandbytes(weight: Tensor, format: str) -> Callable[[Tensor], Tensor]:
    from bitsandbytes import matmul_4bit

    codes, state = _bitsandbytes_nf4(weight, format)
    return lambda x: matmul_4bit(x, codes.t(), state)


def _bitsandbytes_nf4(weight: Tensor, format: str) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=format.endswith("dq"))
    return codes, state


def _operands_problem(case: Case, device: torch.device) -> Problem:
    x, dy, weight = _operands(case, device)
    format = get_format(case.format)
    trained = _TRAINED[case.part]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return operand_linear(x, weight, weight_operand=format, activation=format, gradient=format)

    def exact() -> Sequence[Tensor]:  # of the rounded operands: with one scale a tensor both roundings agree
        return _exact(case, *(format.fake_quantize(t) for t in (x, weight, dy)))

    return Problem({"fewbits": differentiated(ours, (x, weight), dy, trained)}, exact)


def _lora_problem(case: Case, device: torch.device) -> Problem:
    x, dy, weight = _operands(case, device)
    packed: Packed = get_format(case.format).quantize(weight)
    a = randn(device, torch.bfloat16, _RANK, case.K) * case.K**-0.5
    b = randn(device, torch.bfloat16, case.N, _RANK) * 0.02

    def ours(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_linear(x, packed, None, a, b, scaling=1.0)

    def exact() -> Sequence[Tensor]:
        xd, ad, bd, dyd = x.double(), a.double(), b.double(), dy.double()
        decoded = packed.dequantize(torch.float32).double()
        h = xd @ ad.t()
        if case.part == "forward":
            return (xd @ decoded.t() + h @ bd.t(),)
        dh = dyd @ bd
        return dyd @ decoded + dh @ ad, dh.t() @ xd, dyd.t() @ h

    trained = 3 if case.part == "backward" else 0
    return Problem({"fewbits": differentiated(ours, (x, a, b), dy, trained)}, exact)


_MAKERS = (
    _rmsnorm_cases,
    _dequantize_cases,
    _linear_cases,
    *FUSED_MAKERS,
    *EPILOGUE_MAKERS,
    *FLOAT8_MAKERS,
    *STOCHASTIC_MAKERS,
    *QUANTIZE_MAKERS,
    *GRADIENT_MAKERS,
    *ATTENTION_MAKERS,
    *DECODE_MAKERS,
    *EXPERT_MAKERS,
    *ROUTING_MAKERS,
)
