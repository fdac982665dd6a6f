"""Every Triton kernel compiles to machine code for every supported GPU, on a machine without one.

Each kernel's first case for one architecture here; in the slow tests its second and its last for that one,
and the first for the oldest architecture; every night those between too, the first case for the other
architectures, and the further ones for one of these in turn: each takes most of a second that Triton's cache,
in the user's home, does not save the first time.

Each kernel file lists `COMPILE_CASES`; tests/test_architecture.py sees to it that no kernel is missing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from typing import Any

import pytest

import fewbits.kernels
from fewbits.kernels.launch.jit import CompileCase
from tests.kernels.machine_code import ARCHITECTURES, build

pytest.importorskip("triton")

SHARED_MEMORY_BYTES = 99 * 1024  # what the smallest of them, sm_89 and sm_120, give one program


def compile_cases() -> list[CompileCase]:
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(fewbits.kernels.__path__, "fewbits.kernels.")
    ]
    return [case for module in modules for case in getattr(module, "COMPILE_CASES", ())]


def case_id(case: CompileCase) -> str:
    return case.kernel.__name__ + "-" + "-".join(str(v) for v in case.constants.values())


def cases_and_architectures() -> list[Any]:
    found, seen = [], Counter[str]()
    all_cases = compile_cases()
    num_cases = Counter(case.kernel.__name__ for case in all_cases)
    for case in all_cases:
        first = max(90, case.capability)
        others = [sm for sm in ARCHITECTURES if sm >= case.capability and sm != first]
        count = seen[case.kernel.__name__]
        seen[case.kernel.__name__] += 1
        mark = pytest.mark.slow if count in (1, num_cases[case.kernel.__name__] - 1) else pytest.mark.nightly
        found.append(pytest.param(case, first, marks=mark if count else ()))
        for sm in others if not count else others[count % len(others) :][:1]:
            oldest = not count and sm == others[0]
            found.append(pytest.param(case, sm, marks=pytest.mark.slow if oldest else pytest.mark.nightly))
    return found


@pytest.mark.parametrize(
    ("case", "capability"),
    cases_and_architectures(),
    ids=lambda v: case_id(v) if isinstance(v, CompileCase) else str(v),
)
def test_compiles_to_machine_code(case: CompileCase, capability: int) -> None:
    built = build(case, capability)
    assert built.asm["cubin"][:4] == b"\x7fELF"
    assert f".target sm_{capability}" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("capability", [80, 86])
def test_float8_weights_decode_where_the_hardware_has_no_float8(capability: int) -> None:
    from fewbits.kernels.codec.dequantize_triton import COMPILE_CASES

    cases = [c for c in COMPILE_CASES if c.constants["FLOAT8"] and not c.constants["NATIVE"]]
    assert sorted(c.constants["FLOAT8"] for c in cases) == [1, 2]
    for case in cases:
        built = build(case, capability)
        assert f".target sm_{capability}" in built.asm["ptx"] and built.asm["cubin"][:4] == b"\x7fELF"
        assert ".e4m3" not in built.asm["ptx"] and ".e5m2" not in built.asm["ptx"]


def test_float8_weights_decode_by_the_hardware_where_it_can() -> None:
    from fewbits.kernels.codec.dequantize_triton import COMPILE_CASES

    (case,) = (c for c in COMPILE_CASES if c.constants["FLOAT8"] == 1 and c.constants["NATIVE"])
    for capability in (89, 90):
        assert "cvt.rn.f16x2.e4m3x2" in build(case, capability).asm["ptx"]


def test_aligned_kernels_move_16_bytes_at_a_time() -> None:
    """The tile of a real launch loads and stores in the widest access there is."""
    from fewbits.kernels.decoder.rmsnorm_triton import COMPILE_CASES

    for case in (c for c in COMPILE_CASES if c.aligned):
        ptx = build(case, 90).asm["ptx"]
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
