"""CUDA C++ compiled at run time, for kernels that Triton cannot express; launches on the operand's stream.

`cuda.bindings` is NVIDIA's own Python face of NVRTC and the driver; torch's CUDA wheels bring it and NVRTC
along. Nothing is compiled at installation and nothing is kept on disk: a kernel's first use in a process
takes about a second.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fewbits.errors import Unsupported

Defines = tuple[tuple[str, int], ...]
_DYNAMIC_SHARED_BYTES = 48 * 1024  # above, a kernel must ask first


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed"
    try:
        _checked(_bindings("nvrtc").nvrtcVersion(), "nvrtcVersion")
    except (ImportError, OSError, RuntimeError, Unsupported) as error:
        return f"NVRTC cannot be loaded: {str(error).splitlines()[0]}"
    return None


@lru_cache(maxsize=64)
def cubin(source: str, defines: Defines, capability: int) -> bytes:
    """Machine code of a file beside this one for ``sm_{capability}``; needs no GPU."""
    nvrtc, here = _bindings("nvrtc"), Path(__file__).parent
    text = (here / source).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []), "nvrtcCreateProgram")
    options = [f"--gpu-architecture=sm_{capability}", "--std=c++17", f"--include-path={here}"]
    options += [f"-D{k}={v}" for k, v in defines]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if int(status):
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.decode(errors="replace")
            raise Unsupported(f"{source} does not compile for sm_{capability}: {said}")
        code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        _checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


@lru_cache(maxsize=256)
def kernel(source: str, name: str, defines: Defines, device: int, shared_bytes: int) -> Any:
    """A kernel's handle on a device, which is the current one."""
    driver = _bindings("driver")
    major, minor = torch.cuda.get_device_capability(device)
    module = _module(source, defines, device, 10 * major + minor)
    handle = _checked(driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")
    if shared_bytes > _DYNAMIC_SHARED_BYTES:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(handle, attribute, shared_bytes), "cuFuncSetAttribute")
    return handle


@lru_cache(maxsize=256)
def _module(source: str, defines: Defines, device: int, capability: int) -> Any:
    driver = _bindings("driver")
    torch.cuda.current_stream(device).synchronize()  # the device's context exists and is current
    return _checked(driver.cuModuleLoadData(cubin(source, defines, capability)), "cuModuleLoadData")


def launch(
    handle: Any,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    argument: ctypes.Structure,
    *,
    early: bool = False,
) -> None:
    """Start a kernel of one argument, a structure by value, on the current stream of the current device.

    ``early`` lets its blocks start before those of the stream's last kernel have ended; the kernel itself
    awaits what that one writes (griddepcontrol.wait; from compute capability 9.0).
    """
    driver = _bindings("driver")
    _ensure_context(driver)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    stream = torch.cuda.current_stream().cuda_stream
    if early:
        config = _early_config(grid, threads, shared_bytes, stream)
        status = driver.cuLaunchKernelEx(config, handle, ctypes.addressof(pointers), 0)
        _checked(status, "cuLaunchKernelEx")
        return
    status = driver.cuLaunchKernel(
        handle, *grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0
    )
    _checked(status, "cuLaunchKernel")


@lru_cache(maxsize=1024)
def _early_config(grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int) -> Any:
    driver = _bindings("driver")
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _ensure_context(driver: Any) -> None:
    """Give a thread that has launched nothing yet the current device's context.

    A launch by the runtime, as torch's are, does this by itself; one by the driver fails.
    """
    if not int(_checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        device = _checked(driver.cuDeviceGet(torch.cuda.current_device()), "cuDeviceGet")
        context = _checked(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        _checked(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _bindings(name: str) -> Any:
    return import_module(f"cuda.bindings.{name}")


def _checked(result: tuple[Any, ...], call: str) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"{call} answers {status!r}")
    return values[0] if values else None
