"""CUDA C++ compiled at run time: what is kept in the user's cache folder. Kernels have their own tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fewbits.kernels.launch import nvrtc

pytest.importorskip("triton")
SOURCE = "decoder/gated_lora_backward.cu"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Options of every compilation, with an empty cache folder and a compiler that only answers."""
    asked: list[list[str]] = []

    def answer(source: str, options: list[str]) -> bytes:
        asked.append(options)
        return b"\x7fELF " + " ".join(options).encode()

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_compiled", answer)
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    nvrtc.cubin.cache_clear()
    return asked


def another_process() -> None:
    nvrtc.cubin.cache_clear()


def test_an_earlier_process_left_it(compiled: list[list[str]]) -> None:
    first = nvrtc.cubin(SOURCE, (("WARPS", 14),), 90)
    another_process()
    assert nvrtc.cubin(SOURCE, (("WARPS", 14),), 90) == first
    assert len(compiled) == 1 and compiled[0][0] == "--gpu-architecture=sm_90a"


def test_other_settings_gpus_and_compilers_have_their_own(
    compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [nvrtc.cubin(SOURCE, (("WARPS", warps),), sm) for warps in (8, 14) for sm in (80, 90)]
    assert len(set(made)) == len(compiled) == 4
    another_process()
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 1))
    nvrtc.cubin(SOURCE, (("WARPS", 8),), 80)
    assert len(compiled) == 5


def test_a_damaged_file_is_compiled_again(compiled: list[list[str]], tmp_path: Path) -> None:
    first = nvrtc.cubin(SOURCE, (), 90)
    (kept,) = (tmp_path / "cache").rglob("*.cubin")
    kept.write_bytes(b"")
    another_process()
    assert nvrtc.cubin(SOURCE, (), 90) == first == kept.read_bytes()
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_made_costs_time_only(
    compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert nvrtc.cubin(SOURCE, (), 90)[:4] == b"\x7fELF"
        another_process()
    assert len(compiled) == 2


def driver_of(given: dict[str, int]) -> SimpleNamespace:
    """As much of the driver as a kernel's attributes need: one function, which keeps what it is given."""

    def give(handle: str, attribute: str, value: int) -> tuple[int]:
        given[attribute] = value
        return (0,)

    attributes = {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": "shared",
        "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": "carveout",
    }
    return SimpleNamespace(
        CUfunction_attribute=SimpleNamespace(**attributes),
        cuModuleGetFunction=lambda module, name: (0, "the function"),
        cuFuncGetAttribute=lambda attribute, handle: (0, given[attribute]),
        cuFuncSetAttribute=give,
    )


def test_launches_of_one_kernel_keep_the_most_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose blocks need less must not take away what another layer's launches were granted."""
    given = {"shared": 48 * 1024, "carveout": -1}
    driver = driver_of(given)
    monkeypatch.setattr(nvrtc, "_bindings", lambda name: driver)
    monkeypatch.setattr(nvrtc, "_module", lambda *key: "a module")
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda device: (9, 0))
    nvrtc.kernel.cache_clear()
    for bytes_of_block in (40, 90, 60, 20):
        nvrtc.kernel(SOURCE, "a kernel", (), 0, bytes_of_block * 1024)
    assert given == {"shared": 90 * 1024, "carveout": -1}
    nvrtc.kernel(SOURCE, "a kernel", (), 0, 100 * 1024, beside=True)
    assert given == {"shared": 100 * 1024, "carveout": 100}
    nvrtc.kernel.cache_clear()
