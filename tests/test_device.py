"""What a device can do, and how a request beyond it is refused."""

from __future__ import annotations

import pytest
import torch

from fewbits.device import Device, describe, pick
from fewbits.errors import BadInput, Unsupported


def gpu(capability: tuple[int, int]) -> Device:
    return Device(type="cuda", name="a card", memory_bytes=1, capability=capability)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), (False, False, False)),
        ((8, 0), (True, False, False)),
        ((8, 9), (True, True, False)),
        ((9, 0), (True, True, False)),
        ((10, 0), (True, True, True)),
        ((12, 0), (True, True, True)),
    ],
)
def test_what_each_generation_multiplies(capability: tuple[int, int], expected: tuple[bool, ...]) -> None:
    device = gpu(capability)
    assert tuple(device.runs(dtype) for dtype in ("bfloat16", "float8", "float4")) == expected


def test_refusal_names_the_need_and_the_way_out() -> None:
    message = r"float8_full needs compute capability 8\.9 or later .* \(a card\) has 8\.0: .* device=\"cpu\""
    with pytest.raises(Unsupported, match=message):
        gpu((8, 0)).require("float8", "float8_full")
    gpu((9, 0)).require("float8", "float8_full")


def test_a_cpu_runs_every_reference() -> None:
    cpu = describe("cpu")
    cpu.require("float4", "anything")
    assert cpu.capability is None and cpu.memory_bytes > 2**28


def test_facts_are_asked_once() -> None:
    assert describe("cpu") is describe(torch.device("cpu"))


def test_pick_refuses_what_is_not_there() -> None:
    assert pick("cpu") == torch.device("cpu")
    with pytest.raises(BadInput, match="is no device"):
        pick("toaster")
    with pytest.raises(Unsupported, match="CUDA devices are here"):
        pick("cuda:99")
    with pytest.raises(Unsupported, match="not on 'meta'"):
        describe("meta")


@pytest.mark.gpu
def test_cuda_facts() -> None:
    device = describe("cuda")
    assert device.capability == torch.cuda.get_device_capability()
    assert (
        device.multiprocessors > 0 and device.shared_memory_bytes >= 48 * 1024 and device.memory_bytes > 2**30
    )
