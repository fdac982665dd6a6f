"""A CUDA kernel's own source, built with g++ and run on a CPU: see cuda_emulation.h."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import fewbits.kernels

HERE = Path(__file__).parent
KERNELS = Path(fewbits.kernels.__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-fwrapv", "-ffp-contract=off", "-w")


@cache
def _headers() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """The C++ library's headers, compiled once for this process: else they are a quarter of every build."""
    folder = tempfile.TemporaryDirectory()
    header = Path(folder.name, "libraries.h")
    shutil.copyfile(HERE / "libraries.h", header)
    _run(*FLAGS, "-x", "c++-header", "-o", f"{header}.gch", str(header))
    return folder, header


def _run(*words: str) -> None:
    assert COMPILER is not None
    run = subprocess.run([COMPILER, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def build(folder: Path, source: str, wrapper: str, defines: Sequence[tuple[str, int | str]]) -> ctypes.CDLL:
    """The wrapper around a kernel's source as a library; built once for the same macros in a folder."""
    macros = [f"-D{k}={v}" for k, v in defines] + [f'-DSOURCE="{KERNELS / source}"', f"-I{KERNELS}"]
    name = hashlib.sha256(" ".join([wrapper, *macros]).encode()).hexdigest()
    library = folder / f"{name}.so"
    if not library.exists():
        _run(
            *FLAGS,
            "-shared",
            "-include",
            str(_headers()[1]),
            *macros,
            "-o",
            str(library),
            str(HERE / wrapper),
        )
    return ctypes.CDLL(str(library))
