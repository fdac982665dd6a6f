"""Cases of 8-bit floating point: quantising activations and gradients, and the products of what they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewbits.bench.problem import Case, Problem, Run, Variant, randn
from fewbits.kernels.codec.float8_operands import (
    block_multipliers,
    block_multipliers_ref,
    one_multiplier,
    one_multiplier_ref,
)
from fewbits.kernels.codec.quantize_float8 import (
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
    scale_of_amax,
)
from fewbits.kernels.codec.small_blocks import (
    SmallBlocks,
    small_blocks,
    small_blocks_ref,
)
from fewbits.kernels.decoder.gated_activation import (
    gated_activation_backward_into,
    gated_activation_backward_ref,
    gated_activation_into,
)
from fewbits.kernels.decoder.gated_activation_triton import GatedOutputs, Quantized8
from fewbits.kernels.decoder.gated_lora_backward import (
    GradientPlaces,
    LowRank,
    gated_lora_backward,
    gated_lora_backward_ref,
)
from fewbits.kernels.decoder.gated_lora_forward import gated_lora_forward, gated_lora_forward_ref
from fewbits.kernels.decoder.rmsnorm import (
    rmsnorm_backward_ref,
    rmsnorm_backward_rows,
    rmsnorm_ref,
    rmsnorm_rows,
)
from fewbits.kernels.decoder.rmsnorm_triton import NormedRows
from fewbits.kernels.product.matmul_float8 import float8_linear, float8_weight, scale_row, weight_scale

_EPS = 1e-5
_RANK = 16
# One rounding to 4 significant bits: 2**-4 at most, 0.026 on average over a binade (see matmul_float8.py).
_ONE_ROUNDING = 0.04
_LARGEST = 448.0


def quantize_cases(max_size: int) -> list[Case]:
    """Activations of Llama-3.1-8B, 8192 tokens: its width, its feed-forward layer's, gate and up together."""
    listed = []
    for part, N in (("rows", 4096), ("rows", 14336), ("rows", 28672), ("blocks", 4096), ("tensor", 4096)):
        M, N = min(8192, max_size), min(N, max_size)
        listed.append(
            Case(
                op="quantize_float8",
                part=part,
                format="float8_e4m3",
                M=M,
                N=N,
                bytes_moved=(5 if part == "tensor" else 3) * M * N,
                tolerance=_ONE_ROUNDING,
                build=_quantize_problem,
            )
        )
    return listed


def _quantize_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.N)
    quantize: Callable[..., tuple[Tensor, Tensor]]
    quantize = {"rows": quantize_rows, "blocks": quantize_blocks, "tensor": quantize_tensor}[case.part]  # type: ignore[assignment]
    block = {"rows": case.N, "blocks": min(128, case.N), "tensor": x.numel()}[case.part]
    scale_shape = (1,) if case.part == "tensor" else (case.M, case.N // block)

    def ours() -> Sequence[Tensor]:
        return quantize(x)

    def eager() -> Sequence[Tensor]:  # what a training recipe in plain torch does
        blocks = x.view(-1, block)
        scale = blocks.abs().amax(1, keepdim=True).float() / _LARGEST
        q = (blocks.float() * (1.0 / scale)).to(torch.float8_e4m3fn)
        return q.view(x.shape), scale.view(scale_shape)

    def exact() -> Sequence[Tensor]:
        blocks = x.double().view(-1, block)
        scale = blocks.abs().amax(1, keepdim=True) / _LARGEST
        return (blocks / scale).view(x.shape), scale.view(scale_shape)

    functions = {"fewbits": ours, "torch_eager": eager}
    if device.type == "cuda":
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
    return Problem({name: _plain(f) for name, f in functions.items()}, exact)


def _plain(f: Run) -> Variant:
    return lambda: f


def operand_cases(max_size: int) -> list[Case]:
    """An activation of 15,872 tokens as both operands of a training step, see float8_operands.py."""
    M, N = min(15872, max_size), min(4096, max_size)
    return [
        Case(
            op="float8_operands",
            part=part,
            format="float8_e4m3",
            M=M,
            N=N,
            bytes_moved=4 * M * N,
            tolerance=_ONE_ROUNDING,
            build=_operand_problem,
        )
        for part in ("one", "values", "tile")
    ]


def _operand_problem(case: Case, device: torch.device) -> Problem:
    x, multiplier = (
        randn(device, torch.bfloat16, case.M, case.N),
        torch.full((1,), 20.0, dtype=torch.float32, device=device),
    )
    kind, tile = torch.float8_e4m3fn, case.part == "tile"

    def ours() -> Sequence[Tensor]:
        if case.part == "one":
            rows, columns = one_multiplier(x, multiplier, kind, rows=True, columns=True)
            assert rows is not None and columns is not None
            return rows, columns
        sides = block_multipliers(x, kind, rows=True, columns=True, tile=tile, power_of_two=True)
        return [part for side in sides if side is not None for part in side]

    def eager() -> Sequence[Tensor]:
        if case.part == "one":
            codes = one_multiplier_ref(x, multiplier, kind)
            return codes, codes.t().contiguous()
        sides = (x, x.t().contiguous())
        words = {"tile": tile, "power_of_two": True, "epsilon": 0.0}
        return [part for side in sides for part in block_multipliers_ref(side, kind, **words)]  # type: ignore[arg-type]

    def exact() -> Sequence[Tensor]:
        if case.part == "one":
            scaled = (x.double() * 20.0).clamp(-_LARGEST, _LARGEST)
            return scaled, scaled.t()
        parts = [part.double() for part in eager()]
        for i, side in ((0, x), (2, x.t())):
            tall, wide = (-(-n // m) for n, m in zip(side.shape, parts[i + 1].shape, strict=True))
            grown = parts[i + 1].repeat_interleave(tall, 0).repeat_interleave(wide, 1)
            parts[i] = side.double() / grown[: side.shape[0], : side.shape[1]]
        return parts

    functions = {"fewbits": ours, "torch_eager": eager}
    if device.type == "cuda":
        functions["torch_compile"] = torch.compile(eager, dynamic=False)
    return Problem({name: _plain(f) for name, f in functions.items()}, exact)


def small_block_cases(max_size: int) -> list[Case]:
    """An activation of 15,872 tokens as MXFP8 and NVFP4 codes, see small_blocks.py."""
    M, N = min(15872, max_size), min(4096, max_size)
    return [
        Case(
            op="small_blocks",
            part=part,
            format=part,
            M=M,
            N=N,
            bytes_moved=round((2 + bits / 8) * M * N),
            tolerance=_ONE_ROUNDING,
            build=_small_block_problem,
        )
        for part, bits in (("mxfp8", 8.25), ("nvfp4", 4.5))
    ]


def _small_block_problem(case: Case, device: torch.device) -> Problem:
    x = randn(device, torch.bfloat16, case.M, case.N)
    amax = x.abs().max().float().view(1)
    is_mx = case.part == "mxfp8"
    dtype, block = (torch.float8_e4m3fn, (1, 32)) if is_mx else (torch.uint8, (1, 16))

    def ours() -> Sequence[Tensor]:
        return small_blocks(x, dtype, block, amax=None if is_mx else amax)

    def eager() -> Sequence[Tensor]:
        codes, scales = ours()
        outputs = torch.empty_like(codes), torch.empty_like(scales)
        small_blocks_ref(SmallBlocks(x, *outputs, amax, list(block), 448.0, -1))
        return outputs

    def exact() -> Sequence[Tensor]:
        return [part.double() for part in eager()]

    return Problem({name: _plain(f) for name, f in {"fewbits": ours, "torch_eager": eager}.items()}, exact)


# The norm with what stands beside it.


def norm_cases(max_size: int) -> list[Case]:
    """The residual, the norm and float8 rows in one pass, and its backward pass: 9 and 9 bytes a value."""
    M, N = min(8192, max_size), min(4096, max_size)
    forward = Case(
        op="rmsnorm",
        part="rows_forward",
        format="float8_e4m3",
        M=M,
        N=N,
        bytes_moved=9 * M * N,
        tolerance=_ONE_ROUNDING,
        build=_norm_problem,
    )
    return [forward, replace(forward, part="rows_backward")]


def _norm_problem(case: Case, device: torch.device) -> Problem:
    x, residual, dy = (randn(device, torch.bfloat16, case.M, case.N) for _ in range(3))
    w = randn(device, torch.bfloat16, case.N) * 0.1 + 1
    summed = x + residual
    r = rmsnorm_rows(summed, w, _EPS).r

    def ours() -> Sequence[Tensor]:
        if case.part == "rows_forward":
            normed = rmsnorm_rows(x, w, _EPS, residual=residual, quantize=True)
            return _present(normed.summed, normed.y, normed.q)
        back = rmsnorm_backward_rows(dy, NormedRows(summed, w, r), residual=residual, quantize=True)
        return _present(back.dx, back.q)

    def apart() -> Sequence[Tensor]:  # the same kernels, one after the other
        if case.part == "rows_forward":
            again = x + residual
            (y,) = _present(rmsnorm_rows(again, w, _EPS).y)
            return again, y, quantize_rows(y)[0]
        dx = rmsnorm_backward_rows(dy, NormedRows(summed, w, r)).dx.add_(residual)
        return dx, quantize_rows(dx)[0]

    def exact() -> Sequence[Tensor]:
        sd, wd = x.double() + residual.double(), w.double()
        y, rd = rmsnorm_ref(sd, wd, _EPS)
        if case.part == "rows_forward":
            return sd, y, _codes(y)
        dx = rmsnorm_backward_ref(dy.double(), sd, wd, rd)[0] + residual.double()
        return dx, _codes(dx)

    return Problem({"fewbits": _plain(ours), "fewbits_apart": _plain(apart)}, exact)


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _codes(x: Tensor) -> Tensor:
    return x / (x.abs().amax(1, keepdim=True) / _LARGEST)


# Gated activations.


def gated_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's SwiGLU to float8 under one scale: h, also in 16 bits, or dgate and dup."""
    M, N = min(8192, max_size), min(14336, max_size)
    forward = Case(
        op="gated_activation",
        part="float8_forward",
        format="float8_e4m3",
        M=M,
        N=N,
        bytes_moved=7 * M * N,
        tolerance=_ONE_ROUNDING,
        build=_gated_problem,
    )
    return [forward, replace(forward, part="float8_backward", bytes_moved=8 * M * N)]


def _gated_problem(case: Case, device: torch.device) -> Problem:
    gate_up = randn(device, torch.bfloat16, case.M, 2 * case.N)
    dh = randn(device, torch.bfloat16, case.M, case.N)
    gate, up = gate_up.chunk(2, 1)
    forward = case.part == "float8_forward"

    def exact() -> Sequence[Tensor]:
        de, du, h = gated_activation_backward_ref(dh.double(), gate.double(), up.double(), "silu")
        return ((h if forward else torch.cat([de, du], 1)) / scale,)

    scale = scale_of_amax(torch.full((1,), 64.0, device=device, dtype=torch.float32))
    inverse, dense, amax = 1 / scale, torch.empty_like(dh), torch.zeros(1, device=device, dtype=torch.float32)
    q = torch.empty(case.M, case.N if forward else 2 * case.N, dtype=torch.float8_e4m3fn, device=device)

    def ours() -> Sequence[Tensor]:
        quantized = Quantized8(q, inverse, amax)
        if forward:
            gated_activation_into(gate, up, dense, quantized=quantized)
        else:
            gated_activation_backward_into(dh, gate, up, GatedOutputs(None, None, quantized=quantized))
        return (q,)

    def apart() -> Sequence[Tensor]:  # the same kernel in 16 bits, and another one to 8
        if forward:
            gated_activation_into(gate, up, dense)
            return quantize_tensor(dense, scale=scale)[:1]
        both = torch.empty_like(gate_up)
        de, du = both.chunk(2, 1)
        gated_activation_backward_into(dh, gate, up, GatedOutputs(de, du))
        return quantize_tensor(both, scale=scale)[:1]

    return Problem({"fewbits": _plain(ours), "fewbits_apart": _plain(apart)}, exact)


# The gated activation's backward pass with the low-rank products of LoRA.


def gated_lora_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's SwiGLU with branches of rank 16, its gradients to float8."""
    M, N = min(8192, max_size), min(14336, max_size)
    return [
        Case(
            op="gated_lora_backward",
            part="backward",
            format="float8_e4m3",
            M=M,
            N=N,
            bytes_moved=8 * M * N,
            flops=12 * M * N * _RANK,
            tolerance=_ONE_ROUNDING,
            build=_gated_lora_problem,
        )
    ]


def _gated_lora_problem(case: Case, device: torch.device) -> Problem:
    gate_up = randn(device, torch.bfloat16, case.M, 2 * case.N)
    (gate, up), dh = gate_up.chunk(2, 1), randn(device, torch.bfloat16, case.M, case.N)

    def branch() -> LowRank:
        x, w = (randn(device, torch.bfloat16, n, _RANK) * 0.3 for n in (case.M, case.N))
        return LowRank(x, w)

    low = branch(), branch(), branch()
    scale = scale_of_amax(torch.full((1,), 64.0, device=device, dtype=torch.float32))
    q = torch.empty(case.M, 2 * case.N, dtype=torch.float8_e4m3fn, device=device)
    quantized = Quantized8(q, 1 / scale, torch.zeros(1, device=device, dtype=torch.float32))

    def ours() -> Sequence[Tensor]:
        return (q, *gated_lora_backward(dh, gate, up, low, into=GradientPlaces(quantized=quantized)))

    def apart() -> Sequence[Tensor]:  # the activation in 16 bits, then what reads it
        both, h = torch.empty_like(gate_up), torch.empty_like(dh)
        de, du = both.chunk(2, 1)
        gated_activation_backward_into(dh, gate, up, GatedOutputs(de, du, h), low_rank=low)
        t = torch.cat([de @ low[0].w, du @ low[1].w], 1)
        codes, _ = quantize_tensor(both, scale=scale)
        return codes, t, de.t() @ low[0].x, du.t() @ low[1].x, h.t() @ low[2].x

    def exact() -> Sequence[Tensor]:
        wide = [LowRank(b.x.double(), b.w.double()) for b in low]
        de, du, rest = gated_lora_backward_ref(
            dh.double(), gate.double(), up.double(), "silu", (wide[0], wide[1], wide[2])
        )
        return (torch.cat([de, du], 1) / scale, *rest)

    return Problem({"fewbits": _plain(ours), "fewbits_apart": _plain(apart)}, exact)


def gated_lora_forward_cases(max_size: int) -> list[Case]:
    """Llama-3.1-8B's SwiGLU with branches of rank 16, to float8, and what down's branch takes of it."""
    M, N = min(8192, max_size), min(14336, max_size)
    return [
        Case(
            op="gated_lora_forward",
            part="forward",
            format="float8_e4m3",
            M=M,
            N=N,
            bytes_moved=5 * M * N,
            flops=6 * M * N * _RANK,
            tolerance=_ONE_ROUNDING,
            build=_gated_lora_forward_problem,
        )
    ]


def _gated_lora_forward_problem(case: Case, device: torch.device) -> Problem:
    gate, up = randn(device, torch.bfloat16, case.M, 2 * case.N).chunk(2, 1)
    x = [randn(device, torch.bfloat16, case.M, _RANK) * 0.3 for _ in range(2)]
    w = [randn(device, torch.bfloat16, case.N, _RANK) * 0.3 for _ in range(3)]
    low, down = (LowRank(x[0], w[0]), LowRank(x[1], w[1])), w[2]
    scale = scale_of_amax(torch.full((1,), 64.0, device=device, dtype=torch.float32))
    q = torch.empty(case.M, case.N, dtype=torch.float8_e4m3fn, device=device)
    quantized = Quantized8(q, 1 / scale, torch.zeros(1, device=device, dtype=torch.float32))

    def ours() -> Sequence[Tensor]:
        return q, gated_lora_forward(gate, up, low, down, h=None, quantized=quantized)

    def apart() -> Sequence[Tensor]:
        h = torch.empty_like(gate, memory_format=torch.contiguous_format)
        gated_activation_into(gate, up, h, low_rank_gate=low[0], low_rank_up=low[1], quantized=quantized)
        return q, h @ down

    def exact() -> Sequence[Tensor]:
        wide = [LowRank(b.x.double(), b.w.double()) for b in low]
        h, xa = gated_lora_forward_ref(
            gate.double(), up.double(), "silu", (wide[0], wide[1]), down.double(), 1.0
        )
        return h / scale, xa

    return Problem({"fewbits": _plain(ours), "fewbits_apart": _plain(apart)}, exact)


# Products.


def product_cases(max_size: int) -> list[Case]:
    """Gate and up, and down of Llama-3.1-8B: y = x W^T, dx = dy W of the transposed weight; the weight."""
    listed = []
    for part, N, K in (
        ("forward", 28672, 4096),
        ("backward", 28672, 4096),
        ("forward", 4096, 14336),
        ("backward", 4096, 14336),
        ("weight", 14336, 4096),
        ("weight_transposed", 14336, 4096),
    ):
        M, N, K = min(8192, max_size), min(N, max_size), min(K, max_size)
        product = not part.startswith("weight")
        listed.append(
            Case(
                op="matmul_float8",
                part=part,
                format="float8_e4m3",
                M=M,
                N=N,
                K=K,
                bytes_moved=N * K + M * (K + 2 * N) if product else 3 * N * K,
                flops=2 * M * N * K if product else 0,
                tolerance=0.06,
                build=_product_problem if product else _weight_problem,
            )
        )
    return listed


def _product_problem(case: Case, device: torch.device) -> Problem:
    weight = randn(device, torch.bfloat16, case.N, case.K) * 0.02
    x = randn(device, torch.bfloat16, case.M, case.K if case.part == "forward" else case.N)
    w = weight if case.part == "forward" else weight.t()
    scale = weight_scale(weight)
    w8 = float8_weight(weight, transposed=case.part == "backward", inverse_scale=1 / scale)
    q, q_scale = quantize_rows(x)
    row = scale_row(scale, w.shape[0])

    def ours() -> Sequence[Tensor]:
        return (float8_linear(q, q_scale, w8, row),)

    def bfloat16() -> Sequence[Tensor]:
        return (x @ w.t(),)

    def exact() -> Sequence[Tensor]:
        return (x.double() @ w.double().t(),)

    return Problem({"fewbits": _plain(ours), "torch_bfloat16": _plain(bfloat16)}, exact)


def _weight_problem(case: Case, device: torch.device) -> Problem:
    weight = randn(device, torch.bfloat16, case.N, case.K) * 0.02
    inverse = 1 / weight_scale(weight)
    transposed = case.part == "weight_transposed"

    def ours() -> Sequence[Tensor]:
        return (float8_weight(weight, transposed=transposed, inverse_scale=inverse),)

    def eager() -> Sequence[Tensor]:
        w8 = (weight.float() * inverse).to(torch.float8_e4m3fn)
        return (w8.t().contiguous() if transposed else w8,)

    def exact() -> Sequence[Tensor]:
        w = weight.double() * inverse.double()
        return (w.t() if transposed else w,)

    return Problem({"fewbits": _plain(ours), "torch_eager": _plain(eager)}, exact)


MAKERS = (
    quantize_cases,
    operand_cases,
    small_block_cases,
    norm_cases,
    gated_cases,
    gated_lora_cases,
    gated_lora_forward_cases,
    product_cases,
)
