"""A CUDA kernel's own source, built with g++ and run on a CPU: see cuda_emulation.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import fewbits.kernels

HERE = Path(__file__).parent
KERNELS = Path(fewbits.kernels.__file__).parent
COMPILER = shutil.which("g++")


def build(folder: Path, source: str, wrapper: str, defines: Sequence[tuple[str, int]]) -> ctypes.CDLL:
    """The wrapper around a kernel's source as a library; built once for the same macros in a folder."""
    assert COMPILER is not None
    name = "_".join([Path(wrapper).stem, *(f"{v}" for _, v in defines)])
    library = folder / f"{name}.so"
    if not library.exists():
        macros = [f"-D{k}={v}" for k, v in defines] + [f'-DSOURCE="{KERNELS / source}"', f"-I{KERNELS}"]
        flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-fwrapv", "-ffp-contract=off", "-w"]
        command = [COMPILER, *flags, *macros, "-o", str(library), str(HERE / wrapper)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    return ctypes.CDLL(str(library))
