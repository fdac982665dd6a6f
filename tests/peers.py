"""Other libraries as peers of tests: what their codes and scales say, and whether they decode as these say.

A peer can be wrong on one machine (bitsandbytes 0.50.2 decodes rows that are no multiple of the block wrongly
on CPUs with AVX512-BF16). So nothing of ours is held against a live peer before the peer agrees with its own
codes times its own scales on that input, which is plain arithmetic and stands here; what ours has to be is in
golden files, and in that arithmetic. What has no codes and scales (a forward pass, an opened folder) has to
give the same twice. tests/test_peers.py sees to it that no other file calls a peer's own decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import peer_formats


def same_or_skip(peer: str, found: Tensor, need: Tensor, what: str, *, rtol: float = 0.0) -> None:
    """Skip the test, in a sentence, where what ``peer`` computed is not what its own numbers say."""
    if found.shape == need.shape and torch.allclose(found, need, rtol=rtol, atol=rtol, equal_nan=True):
        return
    wrong = f"{int((found != need).sum())} of {need.numel()}" if found.shape == need.shape else "all"
    pytest.skip(
        f"{peer} {version(peer)} is wrong on this machine: {what}, {wrong} values differ from its own codes "
        "times its own scales; golden files and these products are what ours is compared with here"
    )


def same_twice_or_skip(peer: str, compute: Callable[[], Tensor], what: str) -> Tensor:
    """What ``compute`` gives, a copy; the test is skipped where a second call gives something else.

    For calls into which none of our code goes: a difference is then the peer's.
    """
    first = compute().detach().clone()
    second = compute().detach()
    if first.shape != second.shape or not torch.equal(first.nan_to_num(7.5), second.nan_to_num(7.5)):
        pytest.skip(f"{peer} {version(peer)} gives {what} otherwise at a second call with the same input")
    return first


def steady_peft(model: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` gives, twice the same where PEFT and nothing of ours computes; else a skip."""
    homes = {type(module).__module__.partition(".")[0] for module in model.modules()}
    if "peft" not in homes or "fewbits" in homes or model.training:
        return compute()
    return same_twice_or_skip("peft", compute, "logits")


def forwards_or_skip(peer: str, model: nn.Module, weights: Mapping[str, Tensor], *, rtol: float) -> None:
    """Skip where a linear of ``peer`` in ``model`` does not multiply by its own decoded weight.

    ``rtol`` is relative to the norm of the product: what the peer's own rounding of activations may cost.
    """
    for name, weight in weights.items():
        linear: Any = model.get_submodule(name)
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found = same_twice_or_skip(peer, lambda f=linear, x=x: f(x.clone()), f"the product of {name}")
        need = nn.functional.linear(x, weight.float(), linear.bias)
        error = ((found - need).norm() / need.norm()).item()
        if not error <= rtol:
            pytest.skip(
                f"{peer} {version(peer)} is wrong on this machine: {name} multiplies otherwise than its own "
                f"codes times its own scales ({error:.1e} off)"
            )


def nibbles(stored: Tensor, count: int) -> Tensor:
    """The first ``count`` 4-bit codes of bitsandbytes' bytes, the high half of a byte first."""
    flat = stored.flatten().view(torch.uint8).long()
    return torch.stack([flat >> 4, flat & 15], dim=1).flatten()[:count]


def times_scales(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Flat ``values`` times the scale of their block of ``block``, one float32 product each."""
    at = torch.arange(values.numel()) // block
    return values.float() * scales.flatten().float()[at]


def bitsandbytes_scales(state: Any) -> Tensor:
    """The float32 scale of each block, from codes and scales of its own where these are quantised too."""
    if state.state2 is None:
        return state.absmax.float()
    inner = state.state2
    return times_scales(inner.code[state.absmax.long()], inner.absmax, inner.blocksize) + state.offset


def bitsandbytes_decoded(codes: Tensor, state: Any) -> Tensor:
    """What a 4-bit weight of bitsandbytes is by its codes and scales, in its shape and dtype."""
    count = state.shape.numel()
    values = state.code[nibbles(codes, count)]
    return times_scales(values, bitsandbytes_scales(state), state.blocksize).view(state.shape).to(state.dtype)


def live_bitsandbytes(codes: Tensor, state: Any) -> Tensor:
    """The same by bitsandbytes' own function, on a copy; the test is skipped where it is another."""
    import bitsandbytes.functional as bnb

    found = bnb.dequantize_4bit(codes.clone(), state).view(state.shape)
    what = f"{tuple(state.shape)} {state.quant_type} in blocks of {state.blocksize}, {state.dtype}"
    same_or_skip("bitsandbytes", found, bitsandbytes_decoded(codes, state), what)
    return found


def live_mx(codes: Tensor, scales: Tensor, kind: str, element: Any) -> Tensor:
    """float32 values by torchao's own decoding of MX blocks, or a skip where it decodes otherwise."""
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    found = to_dtype(codes.clone(), scales.clone(), element, 32, torch.float32)
    need = peer_formats.mx_decoded(codes, scales, kind)
    same_or_skip("torchao", found.view(need.shape), need, f"{tuple(need.shape)} of {kind}")
    return found.view(need.shape)


def live_nvfp4(weight: Any) -> Tensor:
    """float32 values of torchao's NVFP4 tensor by its own decoding, or a skip."""
    found = weight.dequantize(torch.float32)
    scales = weight.scale.view(found.shape[0], -1)
    need = peer_formats.nvfp4_decoded(weight.qdata, scales, weight.per_tensor_scale)
    # The two scales are multiplied before or after the code: two roundings of float32.
    same_or_skip("torchao", found, need, f"{tuple(need.shape)} of NVFP4", rtol=2**-22)
    return found


def live_gguf(stored: np.ndarray, kind: Any) -> Tensor:
    """Rows of values by the gguf package's decoding, or a skip.

    Types with one scale a block are held against the products; all have to give the same row by row.
    """
    import gguf

    def decoded(rows: np.ndarray) -> Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(gguf.quants.dequantize(rows, kind).copy())

    found = same_twice_or_skip("gguf", lambda: decoded(stored), f"a tensor of {kind.name}")
    if stored.dtype != np.uint8 or stored.ndim != 2:
        return found
    rows = torch.cat([decoded(stored[i : i + 1]) for i in range(len(stored))]).nan_to_num(7.5)
    same_or_skip("gguf", found.nan_to_num(7.5), rows, f"a tensor of {kind.name} beside its single rows")
    with np.errstate(all="ignore"):
        products = peer_formats.gguf_decoded(stored, kind.name)
    if products is not None:
        same_or_skip("gguf", found, torch.from_numpy(products), f"a tensor of {kind.name}")
    return found


def live_compressed(decode: Callable[[], Tensor], parts: Mapping[str, Tensor], bits: int) -> Tensor:
    """A weight by compressed-tensors' own decoding of ``parts``, or a skip.

    It may round the product to the dtype it decodes to.
    """
    found = same_twice_or_skip("compressed-tensors", decode, "a weight")
    need = peer_formats.compressed_decoded(dict(parts), bits)
    rounding = {torch.float32: 2**-22, torch.float16: 2**-10}.get(found.dtype, 2**-7)
    same_or_skip("compressed-tensors", found.float(), need, "a weight", rtol=rounding)
    return found
