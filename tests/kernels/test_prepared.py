"""Prepared launches: the machine code that a first launch finds is taken for tensors like its own, only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fewbits.kernels.decoder.gated_activation_triton import LowRank
from fewbits.kernels.decoder.low_rank_add import launch as launch_low_rank_add
from fewbits.kernels.decoder.low_rank_add import low_rank_add_ref
from fewbits.kernels.launch.prepared import Launch, _kind, keep_plans, start_kernel


class Compiled:
    """What Triton's launch returns: machine code, which is called with all arguments in order."""

    packed_metadata = ()

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.calls.append(("machine code", grid, arguments))


class Kernel:
    """A stand-in for a ``@jit`` function of two tensors, a number and two constants."""

    arg_names = ("x_ptr", "y_ptr", "n", "WIDE", "BLOCK")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Compiled:
            self.calls.append(("Triton", grid, arguments, named))
            return Compiled(self.calls)

        return run


def aligned(count: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.zeros(count + 16, dtype=dtype)
    first = next(i for i in range(16) if x[i:].data_ptr() % 16 == 0)
    return x[first : first + count]


def test_the_second_launch_takes_the_machine_code_of_the_first():
    kernel = Kernel()
    launch = Launch(kernel, (3,), (7,), {"BLOCK": 16, "WIDE": True}, num_warps=4)
    x, y = aligned(), aligned()
    launch(x, y)
    assert kernel.calls == [("Triton", (3, 1, 1), (x, y, 7), {"BLOCK": 16, "WIDE": True, "num_warps": 4})]
    launch(y, x)
    name, grid, arguments = kernel.calls[1]
    assert (name, grid) == ("machine code", (3, 1, 1))
    assert arguments[0] is y and arguments[1] is x
    assert arguments[2:] == (7, True, 16)  # in the order of the kernel's own arguments


def test_unaligned_pointers_and_other_dtypes_take_tritons_own_way():
    kernel = Kernel()
    launch = Launch(kernel, (1,), (7,), {"BLOCK": 16, "WIDE": True})
    x, y, other = aligned(), aligned()[1:], aligned(dtype=torch.bfloat16)
    launch(x, y)
    launch(x, y)
    assert [call[0] for call in kernel.calls] == ["Triton", "Triton"]  # nothing is kept of unaligned ones
    for pair in ((x, x), (x, other), (x, other), (other, x), (x, y), (x, x)):
        launch(*pair)
    assert [call[0] for call in kernel.calls[2:]] == [
        "Triton",
        "Triton",
        "machine code",
        "Triton",
        "Triton",
        "machine code",
    ]


def test_a_launch_in_one_call_is_found_again_by_its_numbers_and_constants():
    kernel, x = Kernel(), aligned()
    for n, block in ((5, 8), (5, 8), (5, 16), (5, 8)):
        start_kernel(kernel, (2,), (x, x), n, WIDE=False, BLOCK=block, num_warps=2)
    assert [call[0] for call in kernel.calls] == ["Triton", "machine code", "Triton", "machine code"]
    assert kernel.calls[0][3] == {"WIDE": False, "BLOCK": 8, "num_warps": 2}
    assert kernel.calls[3][2][2:] == (5, False, 8)
    start_kernel(Kernel(), (2,), (x, x), 5, WIDE=False, BLOCK=8, num_warps=2)
    assert len(kernel.calls) == 4  # another kernel of the same facts is another kernel


def test_other_lengths_take_the_machine_code_of_their_kind():
    """With their own grid and numbers. What Triton compiles otherwise: 1, multiples of 16, 64 bits."""
    kernel, x = Kernel(), aligned()
    said = []
    for n in (5, 6, 16, 32, 0, 1, 2**31, 2**31 + 7, 2**31 + 9, 0.5, 1.0):
        start_kernel(kernel, (n + 1,), (x, x), n, WIDE=False, BLOCK=8)
        name, grid, arguments = kernel.calls[-1][:3]
        assert grid == (n + 1, 1, 1) and arguments[2] == n
        assert name == "Triton" or arguments[3:] == (False, 8)
        said.append((n, name))
    first = [n for n, name in said if name == "Triton"]
    assert first == [5, 16, 1, 2**31, 2**31 + 7, 0.5]


def test_numbers_of_a_kind_are_one_to_triton():
    jit = pytest.importorskip("triton.runtime.jit")
    numbers = [
        *range(-40, 40),
        *(sign * 2**bits + n for bits in (31, 32, 63) for n in range(-17, 17) for sign in (1, -1)),
    ]
    numbers = [n for n in numbers if -(2**63) <= n < 2**64]
    kinds: dict[Any, set[Any]] = {}
    for n in [*numbers, True, False, 0.5, 1.0]:
        of_triton = jit.native_specialize_impl(jit.BaseBackend, n, False, True, True)
        kinds.setdefault(_kind(n), set()).add(of_triton)
    assert all(len(of_triton) == 1 for of_triton in kinds.values()), kinds


def test_the_interpreter_leaves_nothing_to_keep():
    class Interpreted(Kernel):
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **named: self.calls.append("interpreted")

    kernel, x = Interpreted(), aligned()
    launch = Launch(kernel, (1,), (), {})
    launch(x, x)
    launch(x, x)
    assert kernel.calls == ["interpreted", "interpreted"]


def test_plans_are_told_apart_by_the_object_and_by_what_else_they_follow_from():
    made: list[Any] = []

    @keep_plans
    def plan(of: Any, n: int) -> int:
        made.append((of, n))
        return 2 * n

    a, b = [1], [1]
    assert [plan(a, 1), plan(a, 1), plan(b, 1), plan(a, 2)] == [2, 2, 2, 4]
    assert len(made) == 3
    with pytest.raises(TypeError):
        plan(a, [])


def test_nothing_is_kept_of_a_trace():
    @keep_plans
    def plan(of: object, n: int) -> torch.Tensor:
        return torch.ones(n)

    format = object()
    with FakeTensorMode():
        assert type(plan(format, 2)) is not torch.Tensor
    assert torch.equal(plan(format, 2), torch.ones(2))
    assert plan(format, 2) is plan(format, 2)


@pytest.mark.gpu
@pytest.mark.interpret
def test_a_kernel_gives_the_same_numbers_launch_after_launch(kernel_device: str) -> None:
    """Aligned, unaligned, aligned again, other numbers of rows: each into poisoned or changed tensors."""
    generator = torch.Generator().manual_seed(3)
    for rows, first in ((32, 0), (32, 0), (32, 1), (32, 0), (48, 0), (48, 3), (48, 0)):
        values = torch.randn(3, rows * 64 + 8, generator=generator).to(kernel_device)
        z, residual = (v[first : first + rows * 64].view(rows, 64) for v in values[:2])
        x, w = (torch.randn(n, 16, generator=generator).to(kernel_device) for n in (rows, 64))
        need = low_rank_add_ref(z, LowRank(x, w), residual)
        launch_low_rank_add(z, LowRank(x, w), residual)
        torch.testing.assert_close(z, need, rtol=1e-2 if kernel_device == "cuda" else 1e-5, atol=2e-2)


@pytest.mark.gpu
def test_a_profiler_that_listens_to_launches_hears_all_of_them() -> None:
    import triton

    heard: list[Any] = []
    z = torch.zeros(32, 64, device="cuda")
    launch_low_rank_add(z, None, torch.ones_like(z))
    listener = heard.append
    triton.knobs.runtime.launch_enter_hook.add(listener)
    try:
        launch_low_rank_add(z, None, torch.ones_like(z))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(listener)
    launch_low_rank_add(z, None, torch.ones_like(z))
    assert len(heard) == 1
    assert torch.equal(z, torch.full_like(z, 3))
