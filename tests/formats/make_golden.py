"""Writes golden/*.safetensors: codes and scales that peers gave once, and what these decode to.

    python -m tests.formats.make_golden

Only codes and scales are bitsandbytes' and torchao's own. What they decode to is computed here, value by
value in Python's floats and rounded to float32 once a product, as are the checks: that a block's scale is its
largest magnitude (bitsandbytes), that no other code is nearer to the value. The weights after ten steps of
AdamW8bit are bitsandbytes' own, beside float32 AdamW's, which they have to be near.
"""

from __future__ import annotations

import struct
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fewbits.formats import FORMATS, Integer
from tests import peers

FOLDER = Path(__file__).with_name("golden")
# Rows that are a multiple of the block, rows that are not, an odd count, a block that is not full.
SHAPES = {"whole": (4, 128), "ragged": (7, 96), "odd": (5, 13)}
BLOCKS = (64, 128)
INTEGERS = [f for f in FORMATS.values() if isinstance(f, Integer)]


def float32(value: float) -> float:
    """``value`` rounded to float32, by Python's own conversion."""
    return struct.unpack("f", struct.pack("f", value))[0]


def by_hand(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Each value times its block's scale."""
    kept, factors = values.flatten().tolist(), scales.flatten().tolist()
    return torch.tensor([float32(v * factors[i // block]) for i, v in enumerate(kept)])


def check_nearest(x: Tensor, codes: Tensor, scales: Tensor, table: Tensor, block: int) -> None:
    """No value of the table is nearer by more than the rounding of a division."""
    steps, factors = table.tolist(), scales.flatten().tolist()
    for i, (value, code) in enumerate(zip(x.flatten().tolist(), codes.tolist(), strict=True)):
        scaled = value / factors[i // block]
        assert abs(scaled - steps[code]) <= min(abs(scaled - s) for s in steps) + 2e-7, (i, value)


def bitsandbytes_vectors() -> dict[str, Tensor]:
    import bitsandbytes.functional as bnb

    made = {}
    for name, shape in SHAPES.items():
        x = made[f"{name}.x"] = torch.randn(shape)
        for kind in ("nf4", "fp4"):
            for block in BLOCKS:
                stored, state = bnb.quantize_4bit(x, blocksize=block, quant_type=kind)
                codes = peers.nibbles(stored, x.numel())
                largest = [part.abs().max() for part in x.flatten().split(block)]
                assert torch.equal(state.absmax, torch.stack(largest))
                check_nearest(x, codes, state.absmax, state.code, block)
                key = f"{name}.{kind}.{block}"
                made[f"{key}.stored"], made[f"{key}.absmax"] = stored.flatten(), state.absmax
                made[f"{key}.decoded"] = by_hand(state.code[codes], state.absmax, block).view(shape)
            stored, state = bnb.quantize_4bit(x, blocksize=64, quant_type=kind, compress_statistics=True)
            key, inner = f"{name}.{kind}_dq.64", state.state2
            made[f"{key}.stored"], made[f"{key}.scale_codes"] = stored.flatten(), state.absmax
            made[f"{key}.scale_scales"], made[f"{key}.offset"] = inner.absmax, state.offset.view(1)
            products = by_hand(inner.code[state.absmax.long()], inner.absmax, inner.blocksize)
            scales = torch.tensor([float32(v + state.offset.item()) for v in products.tolist()])
            codes = peers.nibbles(stored, x.numel())
            made[f"{key}.decoded"] = by_hand(state.code[codes], scales, 64).view(shape)
    return made


def torchao_numbers(x: Tensor, format: Integer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales, zero points, codes and decoded values of torchao, told to use the same range of codes."""
    import torchao.quantization.quant_primitives as ao

    rows, columns = format.block
    block = tuple(x.shape) if format.block == (0, 0) else (rows, columns or x.shape[1])
    low = -format.max_code - (1 if format.zero_point else 0)
    mapping = ao.MappingType.ASYMMETRIC if format.zero_point else ao.MappingType.SYMMETRIC
    limits = {"quant_min": low, "quant_max": format.max_code}
    scales, zero_points = ao.choose_qparams_affine(
        x, mapping, block, torch.int8, **limits, scale_dtype=torch.float32, zero_point_dtype=torch.int8
    )
    codes = ao.quantize_affine(x, block, scales, zero_points, torch.int8, **limits)
    decoded = ao.dequantize_affine(
        codes, block, scales, zero_points, torch.int8, **limits, output_dtype=torch.float32
    )
    return scales, zero_points, codes, decoded


def torchao_vectors() -> dict[str, Tensor]:
    made = {"x": torch.randn(2, 256) + 0.7}
    for format in INTEGERS:
        if format.block[0] > made["x"].shape[0]:
            continue
        scales, zero_points, codes, _ = torchao_numbers(made["x"], format)
        block = format.block[1] or 256
        block = made["x"].numel() if format.block == (0, 0) else block
        zeros = zero_points.flatten().repeat_interleave(block).view(codes.shape)
        shifted = codes.float() - (zeros if format.zero_point else 0)
        made |= {f"{format.name}.scales": scales.flatten(), f"{format.name}.codes": codes}
        made[f"{format.name}.decoded"] = by_hand(shifted, scales, block).view(codes.shape)
        if format.zero_point:
            made[f"{format.name}.zero_points"] = zero_points.flatten()
        step = scales.flatten().repeat_interleave(block).view(codes.shape)
        assert ((made["x"] - made[f"{format.name}.decoded"]).abs() <= step * 0.5000001 + 1e-6).all(), format
    return made


def adamw_change(kind: type, device: str = "cpu", steps: int = 10) -> Tensor:
    """What ``kind`` makes of (16, 300) weights in ``steps`` steps, less the weights it began with."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 300, generator=generator)
    weight = torch.nn.Parameter(start.to(device, copy=True))
    optimizer = kind([weight], lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        weight.grad = (torch.randn(16, 300, generator=generator) + 0.5).to(device)
        optimizer.step()
    return weight.detach().cpu() - start


def optimizer_vectors() -> dict[str, Tensor]:
    from bitsandbytes.optim import AdamW8bit

    change, exact = adamw_change(AdamW8bit), adamw_change(torch.optim.AdamW)
    assert (change - exact).norm() < 0.03 * exact.norm()  # the states are in 8 bits
    return {"change": change}


def main() -> None:
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    made = {
        "bitsandbytes": bitsandbytes_vectors(),
        "torchao": torchao_vectors(),
        "bitsandbytes_adamw": optimizer_vectors(),
    }
    for name, tensors in made.items():
        library = name.partition("_")[0]
        kept = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(kept, FOLDER / f"{name}.safetensors", {"made with": f"{library} {version(library)}"})


if __name__ == "__main__":
    main()
