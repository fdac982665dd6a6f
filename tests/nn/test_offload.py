"""The stash hands back what it was given; copies, waits and buffers come in a safe order."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from fewbits.decoder.offload import HostStash
from fewbits.errors import BadInput


class PlainLane:
    """Copies on the CPU, at the last moment that the events allow, with a diary."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.diary: list[tuple[str, object]] = []
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.count = 0

    def pinned(self, num_bytes: int) -> Tensor:
        self.diary.append(("pin", num_bytes))
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_host(self, source: Tensor, target: Tensor) -> int:
        return self._later(source, target)

    def to_device(self, source: Tensor) -> tuple[Tensor, int]:
        target = torch.full_like(source, float("nan"))
        return target, self._later(source, target)

    def wait(self, event: int) -> None:
        while self.pending and self.pending[0][0] <= event:
            _, source, target = self.pending.pop(0)
            target.copy_(source)

    def _later(self, source: Tensor, target: Tensor) -> int:
        self.count += 1
        self.pending.append((self.count, source, target))
        return self.count


class Counted:
    """Makes one lane a device and remembers them."""

    def __init__(self) -> None:
        self.lanes: list[PlainLane] = []

    def __call__(self, device: torch.device) -> PlainLane:
        self.lanes.append(PlainLane(device))
        return self.lanes[-1]

    @property
    def pins(self) -> int:
        return sum(entry[0] == "pin" for lane in self.lanes for entry in lane.diary)


def test_cpu_tensors_pass_through() -> None:
    stash = HostStash()
    x = torch.randn(3, 4, requires_grad=True)
    handle = stash.put(x)
    assert len(stash) == 1
    stash.prefetch(handle)
    back = stash.get(handle)
    assert back.data_ptr() == x.data_ptr() and not back.requires_grad
    assert len(stash) == 0 and stash.host_bytes == 0


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("resident", [0, 1, 2])
def test_what_comes_back_is_what_went(ahead: int, resident: int) -> None:
    lanes = Counted()
    stash = HostStash(lane=lanes, resident=resident, ahead=ahead)
    for step in range(3):
        xs = [torch.randn(5, 7 + i % 2).to(torch.bfloat16) for i in range(9)]
        handles = [stash.put(x.clone()) for x in xs]
        for x, handle in zip(reversed(xs), reversed(handles), strict=True):
            assert torch.equal(stash.get(handle), x)
        assert lanes.pins == 9, f"step {step}: buffers are had once"
    assert len(lanes.lanes) == 1


def test_the_order_of_taking_is_free() -> None:
    stash = HostStash(lane=Counted(), resident=1)
    xs = [torch.randn(4, 4) for _ in range(6)]
    handles = [stash.put(x.clone()) for x in xs]
    for i in torch.randperm(6).tolist():
        assert torch.equal(stash.get(handles[i]), xs[i])


def test_the_newest_tensors_stay_and_the_ones_before_are_sent_for() -> None:
    lanes = Counted()
    stash = HostStash(lane=lanes)
    handles = [stash.put(torch.randn(4)) for _ in range(6)]
    assert [h.slot.tensor is not None for h in handles] == [False] * 4 + [True] * 2
    stash.get(handles[5])
    assert [h.slot.tensor is not None for h in handles[:5]] == [False] * 3 + [True] * 2
    stash.get(handles[4])
    assert [h.slot.tensor is not None for h in handles[:4]] == [False] * 2 + [True] * 2


def test_a_handle_is_good_once() -> None:
    stash = HostStash(lane=Counted())
    handle = stash.put(torch.randn(4))
    stash.get(handle)
    with pytest.raises(BadInput, match="an offloaded activation was used already"):
        stash.get(handle)


def test_clear_and_dropped_handles_give_their_buffers_back() -> None:
    lanes = Counted()
    stash = HostStash(lane=lanes)
    handles = [stash.put(torch.randn(8)) for _ in range(5)]
    stash.get(handles[4])
    stash.clear()
    assert len(stash) == 0
    with pytest.raises(BadInput, match="memory was freed"):
        stash.get(handles[0])
    del handles
    again = [stash.put(torch.randn(8)) for _ in range(5)]
    assert lanes.pins == 5
    del again
    gc.collect()
    assert len(stash) == 0
    xs = [torch.randn(8) for _ in range(5)]
    handles = [stash.put(x.clone()) for x in xs]
    assert lanes.pins == 5
    assert all(torch.equal(stash.get(h), x) for h, x in zip(handles[::-1], xs[::-1], strict=True))


def test_larger_tensors_replace_buffers_that_are_too_small() -> None:
    stash = HostStash(lane=Counted())
    stash.get(stash.put(torch.randn(8)))
    small = stash.host_bytes
    x = torch.randn(3, 1 << 20)
    assert torch.equal(stash.get(stash.put(x)), x)
    assert small < stash.host_bytes < 2 * x.nbytes


def test_views_and_scalars() -> None:
    stash = HostStash(lane=Counted(), resident=0)
    x = torch.randn(6, 8)
    for part in (x.T, x[:, ::2], x[2, 3], x[:0]):
        assert torch.equal(stash.get(stash.put(part)), part)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_is_never_reused_too_early() -> None:
    stash = HostStash()
    xs = [torch.randn(1 << 22, device="cuda", dtype=torch.bfloat16) for _ in range(12)]
    sums = [x.double().sum().item() for x in xs]
    for _ in range(3):
        handles = []
        for x in xs:
            y = x.clone()
            handles.append(stash.put(y))
            del y
            torch.full((1 << 22,), float("nan"), device="cuda", dtype=torch.bfloat16)
        for handle, x, total in zip(handles[::-1], xs[::-1], sums[::-1], strict=True):
            back = stash.get(handle)
            assert torch.equal(back, x) and back.double().sum().item() == total
            del back
            torch.full((1 << 22,), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert stash.host_bytes == 12 * (1 << 23)
