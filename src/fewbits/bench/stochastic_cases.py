"""Cases of stochastic-computing products: against the plain product, whose error they have by design."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, differentiated, randn
from fewbits.formats.stochastic import STOCHASTIC, Stochastic
from fewbits.kernels.stochastic.codes import stochastic_codes
from fewbits.kernels.stochastic.emulated import emulated_product, prepare_emulated, stochastic_emulated
from fewbits.kernels.stochastic.integer_product import integer_product
from fewbits.kernels.stochastic.quantize import quantize_stochastic
from fewbits.kernels.stochastic.rows import stochastic_rows

# Measured on normal values: 0.022 for full streams, 0.038 for halved ones.
_STREAM_ERROR = 0.06
_SHORT_STREAM_ERROR = 0.2
_CODES_ERROR = 0.02  # two operands in steps of 1/127 of the largest of 128 values
_OPTIONS = {
    "sc8_halve": STOCHASTIC,
    "sc8_full": Stochastic(chunk_d=128),
    "sc8_l32": STOCHASTIC.with_length(32),
}


def stochastic_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's gate projection, few rows: halved streams in chunks of 128, as its users run it."""
    listed = []
    for M in (1, 16):
        N, K = min(14336, max_size), min(4096, max_size)
        listed.append(
            Case(
                op="matmul_stochastic",
                part="forward",
                format="sc8_halve",
                M=M,
                N=N,
                K=K,
                flops=2 * M * N * K,
                bytes_moved=2 * (N * K + M * K) + 4 * M * N,
                tolerance=_STREAM_ERROR,
                build=_problem,
            )
        )
    return listed


def _problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K)
    options = Stochastic(halve_bipolar_stoc_len=True, chunk_d=128)

    def stochastic() -> Tensor:
        """`sc_matmul` without its check of the values, which waits for the device."""
        return stochastic_codes(
            *quantize_stochastic(x, options), *quantize_stochastic(weight, options), options
        )

    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": stochastic,
        "torch_bfloat16": lambda: x @ weight.t(),
    }

    def exact() -> Sequence[Tensor]:
        return (x.double() @ weight.double().t(),)

    return Problem({name: differentiated(f, (), x, 0) for name, f in functions.items()}, exact)


def codes_cases(max_size: int) -> list[Case]:
    """Prepared operands at the shapes of Llama-3.1-8B and 70B: few rows of decoding, many of a prompt."""
    listed = []
    for N, K in ((14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)):
        N, K = min(N, max_size), min(K, max_size)
        for M, format in product((1, 4, 16, 2048), ("sc8_halve", "sc8_full", "sc8_l32")):
            rows = min(M, max_size)
            listed.append(
                Case(
                    op="stochastic_codes",
                    part="forward",
                    format=format,
                    M=rows,
                    N=N,
                    K=K,
                    flops=2 * rows * N * K,
                    bytes_moved=(N + rows) * (K + K // 32) + 4 * rows * N,
                    tolerance=_SHORT_STREAM_ERROR if format == "sc8_l32" else _STREAM_ERROR,
                    build=_codes_problem,
                )
            )
    return listed


def _codes_problem(case: Case, device: torch.device) -> Problem:
    options = _OPTIONS[case.format]
    x = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K)
    a, b = options.quantize(x), options.quantize(weight)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: stochastic_codes(a.codes, a.scales, b.codes, b.scales, options),
        "torch_bfloat16": lambda: x @ weight.t(),
    }

    def exact() -> Sequence[Tensor]:
        return (x.double() @ weight.double().t(),)

    return Problem({name: differentiated(f, (), x, 0) for name, f in functions.items()}, exact)


def integer_cases(max_size: int) -> list[Case]:
    """Codes as whole numbers, chunk by chunk: what INT layers compute of a prompt and of a token."""
    N, K, listed = min(14336, max_size), min(4096, max_size), []
    for M in (1, 2048):
        rows = min(M, max_size)
        listed.append(
            Case(
                op="integer_product",
                part="forward",
                format="int8",
                M=rows,
                N=N,
                K=K,
                flops=2 * rows * N * K,
                bytes_moved=(N + rows) * (K + K // 32) + 4 * rows * N,
                tolerance=_CODES_ERROR,
                build=_integer_problem,
            )
        )
    return listed


def _integer_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K)
    a, b = STOCHASTIC.quantize(x), STOCHASTIC.quantize(weight)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: integer_product(a.codes, a.scales, b.codes, b.scales, STOCHASTIC),
        "torch_bfloat16": lambda: x @ weight.t(),
    }

    def exact() -> Sequence[Tensor]:
        return (x.double() @ weight.double().t(),)

    return Problem({name: differentiated(f, (), x, 0) for name, f in functions.items()}, exact)


def rows_cases(max_size: int) -> list[Case]:
    """The linears of a decoding step of Llama-3.1-8B, q + k + v and gate + up as one: rows quantised too."""
    listed = []
    for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        N, K = min(N, max_size), min(K, max_size)
        for M in (1, 4):
            listed.append(
                Case(
                    op="stochastic_rows",
                    part="forward",
                    format="sc8_halve",
                    M=M,
                    N=N,
                    K=K,
                    flops=2 * M * N * K,
                    bytes_moved=N * (K + K // 32) + 2 * M * (N + K),
                    tolerance=_STREAM_ERROR,
                    build=_rows_problem,
                )
            )
    return listed


def _rows_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K)
    b = STOCHASTIC.quantize(weight)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: stochastic_rows(x, b.codes, b.scales, STOCHASTIC, dtype=torch.bfloat16),
        "torch_bfloat16": lambda: x @ weight.t(),
    }

    def exact() -> Sequence[Tensor]:
        return (x.double() @ weight.double().t(),)

    return Problem({name: differentiated(f, (), x, 0) for name, f in functions.items()}, exact)


def quantize_cases(max_size: int) -> list[Case]:
    """Rows of activations to codes: a token of decoding, a prompt."""
    K, listed = min(4096, max_size), []
    for M in (1, 2048):
        rows = min(M, max_size)
        listed.append(
            Case(
                op="quantize_stochastic",
                part="forward",
                format="sc8_halve",
                M=rows,
                N=0,
                K=K,
                flops=2 * rows * K,
                bytes_moved=3 * rows * K + rows * K // 32,
                tolerance=2.0**-7,
                build=_quantize_problem,
            )
        )
    return listed


def _quantize_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)

    def quantized() -> Tensor:
        return quantize_stochastic(x, STOCHASTIC)[0]

    def exact() -> Sequence[Tensor]:
        return (STOCHASTIC.quantize(x).codes.double(),)

    return Problem({"fewbits": differentiated(quantized, (), x, 0)}, exact)


_GROUPS = 8  # of Llama-3.1-8B's heads; 4 query heads of a group are rows of one product


def attention_cases(max_size: int) -> list[Case]:
    """QK^T and PV over 2048 keys, one token and a prompt: operands quantised on the fly, a scale per row."""
    listed = []
    for part, rows in product(("qk", "pv"), (4, 8192)):
        keys, rows = min(2048, max_size), min(rows, max_size)
        M, N, K = (rows, keys, 128) if part == "qk" else (rows, 128, keys)
        listed.append(
            Case(
                op="stochastic_codes",
                part=part,
                format="sc8_halve",
                M=_GROUPS * M,
                N=N,
                K=K,
                flops=2 * _GROUPS * M * N * K,
                bytes_moved=_GROUPS * (2 * (M * K + N * K) + 4 * M * N),
                tolerance=_STREAM_ERROR,
                build=_attention_problem,
            )
        )
    return listed


def _attention_problem(case: Case, device: torch.device) -> Problem:
    options = replace(STOCHASTIC, chunk_d=0)
    a = randn(device, torch.bfloat16, _GROUPS, case.M // _GROUPS, case.K)
    b = randn(device, torch.bfloat16, _GROUPS, case.N, case.K)

    def stochastic() -> Tensor:
        (qa, sa), (qb, sb) = quantize_stochastic(a, options), quantize_stochastic(b, options)
        return stochastic_codes(qa, sa, qb, sb, options)

    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": stochastic,
        "torch_bfloat16": lambda: a @ b.mT,
    }

    def exact() -> Sequence[Tensor]:
        return (a.double() @ b.double().mT,)

    return Problem({name: differentiated(f, (), a, 0) for name, f in functions.items()}, exact)


def emulated_cases(max_size: int) -> list[Case]:
    """The model of rank 16 for a prompt of 2048 tokens: the plain product and 16 times its operations."""
    N, K, M = min(14336, max_size), min(4096, max_size), min(2048, max_size)
    return [
        Case(
            op="stochastic_emulated",
            part="forward",
            format="sc8_halve_r16",
            M=M,
            N=N,
            K=K,
            flops=2 * M * N * K * 17,
            bytes_moved=(N + M) * (K + K // 32) + 4 * M * N,
            tolerance=_STREAM_ERROR,
            build=_emulated_problem,
        )
    ]


def _emulated_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.K)
    weight = randn(device, torch.bfloat16, case.N, case.K)
    qa, sa = STOCHASTIC.quantize(x).parts.values()
    qb, sb = STOCHASTIC.quantize(weight).parts.values()
    weight_16 = prepare_emulated(qb, sb, STOCHASTIC, 16)
    functions: dict[str, Callable[[], Tensor]] = {
        "fewbits": lambda: stochastic_emulated(qa, sa, qb, sb, STOCHASTIC, 16),
        "fewbits_prepared": lambda: emulated_product(qa, sa, weight_16, torch.bfloat16),
        "fewbits_exact": lambda: stochastic_codes(qa, sa, qb, sb, STOCHASTIC),
        "torch_bfloat16": lambda: x @ weight.t(),
    }

    def exact() -> Sequence[Tensor]:
        return (x.double() @ weight.double().t(),)

    return Problem({name: differentiated(f, (), x, 0) for name, f in functions.items()}, exact)


MAKERS = (
    stochastic_cases,
    codes_cases,
    integer_cases,
    rows_cases,
    attention_cases,
    emulated_cases,
    quantize_cases,
)
