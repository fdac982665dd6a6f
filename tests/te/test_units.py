"""Products of float8 operands by a GPU's units: which they take, and what torch is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fewbits.te as te
from fewbits.formats.base import Packed
from fewbits.formats.bits import unpack_bits
from fewbits.kernels.codec.small_blocks import e2m1_values
from fewbits.te import recipe
from fewbits.te.layers.activations import activated
from fewbits.te.layers.norm import normalized
from fewbits.te.products import small_block_units, units
from fewbits.te.products.emulated import in_bfloat16, product_in_bfloat16
from fewbits.te.products.product import product

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def operand(M: int, K: int, quantizer: Any, device: str = "cpu") -> Packed:
    rows = quantizer.operand(torch.randn(M, K, device=device), rows=True, columns=False).rows
    assert isinstance(rows, Packed)
    return rows


def by_tensor(dtype: torch.dtype = E4) -> Any:
    return te.Float8CurrentScalingQuantizer(dtype)


def by_values(dtype: torch.dtype = E4) -> Any:
    return te.Float8BlockQuantizer(dtype, block_scaling_dim=1)


def by_tile(dtype: torch.dtype = E4) -> Any:
    return te.Float8BlockQuantizer(dtype)


class _OnGpu:
    """A tensor that says it is on a GPU."""

    def __init__(self, codes: Tensor) -> None:
        self.dtype, self.device = codes.dtype, torch.device("cuda", 0)


def taken(a: Packed, b: Packed) -> bool:
    as_gpu = [
        Packed(p.format, p.shape, p.dtype, {"codes": _OnGpu(p.codes), "scales": p.scales})  # type: ignore[dict-item]
        for p in (a, b)
    ]
    return units.on_units(*as_gpu)


def test_which_operands_the_units_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not units.on_units(operand(16, 16, by_tensor()), operand(16, 16, by_tensor()))  # on a CPU
    chip = [(9, 0)]
    monkeypatch.setattr(units, "capability_of", lambda device: chip[0])
    plain, values, tile = (
        lambda M, K, kind=kind, **words: operand(M, K, kind(**words))
        for kind in (by_tensor, by_values, by_tile)
    )
    assert taken(plain(16, 32), plain(48, 32)) and taken(plain(16, 32, dtype=E5), plain(48, 32))
    assert not taken(plain(16, 32, dtype=E5), plain(48, 32, dtype=E5))
    for M, N, K in ((15, 48, 32), (16, 40, 32), (16, 48, 40)):
        assert not taken(plain(M, K), plain(N, K))
    assert taken(values(16, 512), tile(128, 512)) and taken(tile(128, 512), values(16, 512))
    assert taken(values(16, 128), values(32, 128)) and not taken(values(16, 144), values(32, 144))
    assert not taken(values(16, 128), tile(128, 128))  # rows of scales that are not aligned
    assert not taken(tile(128, 512), tile(128, 512)) and not taken(values(16, 512), plain(16, 512))
    chip[0] = (8, 9)
    assert taken(plain(16, 32), plain(48, 32)) and not taken(values(16, 512), tile(128, 512))
    chip[0] = (8, 0)
    assert not taken(plain(16, 32), plain(48, 32))
    chip[0] = (10, 0)
    assert not taken(values(16, 512), tile(128, 512))


@pytest.mark.parametrize("kinds", [(by_tensor, by_tensor), (by_values, by_tile), (by_tile, by_values)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_torch_is_given(monkeypatch: pytest.MonkeyPatch, kinds: Any, with_bias: bool) -> None:
    """cuBLAS wants both by rows, scales by values a column at a time, and scales of tiles a row at a time."""

    def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **words: Any) -> Tensor:
        assert a.is_contiguous() and b.t().is_contiguous()
        sides = []
        for codes, scales in ((a, scale_a), (b.t(), scale_b.t() if scale_b.dim() else scale_b)):
            M, K = codes.shape
            if scales.dim() == 0:
                sides.append(codes.double() * scales)
                continue
            tall = M // scales.shape[0]
            assert (scales.t() if tall == 1 else scales).is_contiguous() and scales.shape[1] == K // 128
            grown = scales.repeat_interleave(tall, 0).repeat_interleave(128, 1)
            sides.append(codes.double() * grown)
        assert words["use_fast_accum"] is (scale_a.dim() == 0)
        y = sides[0] @ sides[1].t()
        return (y if words["bias"] is None else y + words["bias"].double()).to(words["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    a, b = operand(128, 512, kinds[0]()), operand(256, 512, kinds[1]())
    bias = torch.randn(256) if with_bias else None
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        y = units.product_on_units(a, b, dtype, bias=bias, short=True)
        expected = product(a, b, torch.float32, bias=bias)  # on a CPU: the definition
        torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance * 20)


def test_torchs_own_product_with_one_scale() -> None:
    a, b = operand(32, 64, by_tensor(E5)), operand(48, 64, by_tensor())
    y = units.product_on_units(a, b, torch.float32, bias=None, short=False)
    torch.testing.assert_close(y, product(a, b, torch.float32), rtol=1e-5, atol=1e-4)


def test_which_products_may_add_shortly() -> None:
    assert recipe.DelayedScaling().short_sums() == (True, False, False)
    assert recipe.Float8CurrentScaling().short_sums() == (True, False, False)
    own = recipe.Float8CurrentScaling(fp8_gemm_dgrad=recipe.MMParams(use_split_accumulator=False))
    assert own.short_sums() == (True, True, False)
    for other in (recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling()):
        assert other.short_sums() == (False, False, False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", [recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling]
)
def test_cuda_a_layer_beside_the_definition(kind: Any) -> None:
    """Two roundings to bfloat16 (2**-9 each) apart, and 0.01 of a number's size for short sums."""
    here = te.LayerNormLinear(512, 1024, params_dtype=torch.bfloat16, device="cuda")
    there = te.LayerNormLinear(512, 1024, params_dtype=torch.bfloat16, device="cpu")
    there.load_state_dict({name: value.cpu() for name, value in here.state_dict().items()})
    x, dy = torch.randn(256, 512).bfloat16(), torch.randn(256, 1024).bfloat16()
    results = []
    for module in (here, there):
        device = module.weight.device
        leaf = x.to(device).requires_grad_()
        with te.autocast(enabled=True, recipe=kind()):
            y = module(leaf)
        y.backward(dy.to(device))
        results.append([t.detach().float().cpu() for t in (y, leaf.grad, module.weight.grad)])
    for ours, definition in zip(*results, strict=True):
        assert (ours - definition).norm() < 0.01 * definition.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_cuda_norms_are_those_in_float32(kind: str) -> None:
    """Torch's own in bfloat16 computes in float32 and rounds once: the same bits, gradients too."""
    x, dy = (torch.randn(15872, 512, device="cuda").bfloat16() for _ in range(2))
    weight, bias = (torch.randn(512, device="cuda").bfloat16() for _ in range(2))
    results = []
    for wide in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)[: 3 if kind == "LayerNorm" else 2]]
        ours = [leaf.float() for leaf in leaves] if wide else leaves
        y = normalized(
            ours[0], ours[1], ours[2] if len(ours) > 2 else None, kind=kind, eps=1e-5, zero_centered=False
        )
        y = y.to(x.dtype)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "srelu", "swiglu"])
def test_cuda_activations_are_those_in_float32(name: str) -> None:
    x = torch.randn(256, 512, device="cuda").bfloat16()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    results = activated(leaves[0], name, {}), activated(leaves[1].float(), name, {}).to(x.dtype)
    dy = torch.randn_like(results[0])
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(y, leaf, dy)[0] for y, leaf in zip(results, leaves, strict=True)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("quantizer", [te.MXFP8Quantizer(E4), te.MXFP8Quantizer(E5), te.NVFP4Quantizer()])
def test_bfloat16_holds_what_the_units_lack(quantizer: Any) -> None:
    """So that products by its units round nothing but the result."""
    a, b = operand(24, 96, quantizer), operand(40, 96, quantizer)
    y = product_in_bfloat16(a, b, torch.float32)
    assert y is not None
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    sums = a.dequantize(torch.float64).abs() @ b.dequantize(torch.float64).abs().t()
    assert ((y - exact).abs() <= sums * 2.0**-24 * 96).all()
    values = in_bfloat16(a)
    assert values is not None and values[0].dtype == torch.bfloat16
    scale = 1.0 if values[1] is None else values[1].double()
    torch.testing.assert_close(
        values[0].double() * scale, a.dequantize(torch.float64), rtol=2.0**-23, atol=0.0
    )
    plain = operand(24, 96, by_tensor(E5))
    assert product_in_bfloat16(plain, plain, torch.bfloat16) is not None
    assert product_in_bfloat16(operand(24, 96, by_values()), plain, torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_emulated_recipes_on_a_gpu_are_those_of_a_cpu(name: str) -> None:
    """Outputs and gradients, without stochastic rounding and rotations, whose sums are each device's own."""
    words = {"disable_rht": True, "disable_stochastic_rounding": True} if name.startswith("NV") else {}
    chosen = getattr(recipe, name)(**words)
    layer = te.Linear(256, 160, device="cpu")
    x, dy = torch.randn(96, 256), torch.randn(96, 160)
    results = []
    for device in ("cpu", "cuda"):
        copy = te.Linear(256, 160, device=device)
        copy.load_state_dict(layer.state_dict())
        leaf = x.clone().to(device).requires_grad_()
        with te.emulation(), te.autocast(recipe=chosen):
            y = copy(leaf)
        y.backward(dy.to(device))
        results.append([t.detach().cpu() for t in (y, leaf.grad, copy.weight.grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=float(theirs.abs().max()) * 2e-6)


def unswizzled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """One scale at a time, by the place that the tensor cores' documentation gives it."""
    tiles = -(-columns // 4)
    matrix = torch.empty(rows, columns, dtype=flat.dtype)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * tiles + c // 4
            matrix[r, c] = flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
    return matrix


SMALL = [
    te.MXFP8Quantizer(E4),
    te.MXFP8Quantizer(E4, with_2d_quantization=True),
    te.NVFP4Quantizer(),
    te.NVFP4Quantizer(with_2d_quantization=True),
]


@pytest.mark.parametrize("quantizer", SMALL)
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_torch_is_given_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, quantizer: Any, with_bias: bool
) -> None:
    """The values that codes and scales stand for there, and shapes and types by torch's own rules."""

    def scaled_mm(a: Tensor, b: Tensor, of_a: Any, kinds: Any, of_b: Any, _: Any, **words: Any) -> Tensor:
        sides = []
        for codes, scales in ((a, of_a), (b.t(), of_b)):
            is_four = codes.dtype == torch.float4_e2m1fn_x2
            values = (
                e2m1_values(unpack_bits(codes.view(torch.uint8), 4, 2 * codes.shape[1]))
                if is_four
                else codes.float()
            )
            M, K = values.shape
            wide = 16 if is_four else 32
            by_block = unswizzled(scales[0].view(torch.uint8), M, K // wide).view(scales[0].dtype).double()
            whole = scales[1].double() if is_four else 1.0
            sides.append(values.double() * by_block.repeat_interleave(wide, 1) * whole)
        y = sides[0] @ sides[1].t()
        return (y if words["bias"] is None else y + words["bias"].double()).to(words["output_dtype"])

    a, b = operand(160, 192, quantizer), operand(96, 192, quantizer)
    bias = torch.randn(96) if with_bias else None
    with monkeypatch.context() as patch:
        patch.setattr(small_block_units.F, "scaled_mm", scaled_mm)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
            y = small_block_units.product_on_small_block_units(a, b, dtype, bias=bias)
            expected = product(a, b, torch.float32, bias=bias)  # on a CPU: the definition
            torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance * 20)
    parts = {id(packed): packed.format.for_units(packed) for packed in (a, b)}  # type: ignore[attr-defined]
    with FakeTensorMode():

        def fake(packed: Packed) -> tuple[Tensor, list[Tensor]]:
            codes, scales = parts[id(packed)]
            one, *others = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (codes, *scales)]
            return one, others

        monkeypatch.setattr(small_block_units, "_for_units", fake)
        y = small_block_units.product_on_small_block_units(a, b, torch.bfloat16, bias=None)
    assert y.shape == (160, 96) and y.dtype == torch.bfloat16


def test_which_small_blocks_the_units_take(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = [(10, 0)]
    monkeypatch.setattr(small_block_units, "capability_of", lambda device: chip[0])

    def takes(a: Packed, b: Packed) -> bool:
        as_gpu = [
            Packed(p.format, p.shape, p.dtype, {**p.parts, "codes": _OnGpu(p.codes)})  # type: ignore[dict-item]
            for p in (a, b)
        ]
        return small_block_units.on_small_block_units(*as_gpu)

    mx, tiles, four = (lambda M, K, i=i: operand(M, K, SMALL[i]) for i in (0, 1, 2))
    assert (
        takes(mx(32, 64), mx(96, 64))
        and takes(mx(32, 64), tiles(96, 64))
        and takes(four(32, 64), four(32, 64))
    )
    assert not takes(mx(32, 64), four(32, 64)) and not takes(mx(48, 64), mx(32, 64))
    assert not takes(operand(32, 64, te.NVFP4Quantizer(row_scaled_nvfp4=True)), four(32, 64))
    assert not takes(*(operand(32, 64, te.MXFP8Quantizer(E5)) for _ in range(2)))
    assert not takes(operand(32, 64, by_tensor()), operand(32, 64, by_tensor()))
    for other in ((9, 0), (12, 0)):
        chip[0] = other
        assert not takes(mx(32, 64), mx(96, 64))
