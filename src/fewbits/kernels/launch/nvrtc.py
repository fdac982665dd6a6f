"""CUDA C++ compiled at run time, for kernels that Triton cannot express; launches on the operand's stream.

`cuda.bindings` is NVIDIA's own Python face of NVRTC and the driver; torch's CUDA wheels bring it and NVRTC
along. Nothing is compiled at installation. A kernel's first use takes up to a second; its machine code is
then kept where Triton keeps its own, in the user's cache folder (~/.triton/cache, or TRITON_CACHE_DIR).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, local
from types import ModuleType
from typing import Any

import torch

from fewbits.errors import Unsupported
from fewbits.kernels.launch.grid import check_grid
from fewbits.kernels.launch.jit import triton

Defines = tuple[tuple[str, int], ...]
Macros = tuple[tuple[str, int | str], ...]  # a Defines is one; lists of numbers are text
_KERNELS = Path(__file__).parents[1]  # a source is named by its path from here: "stochastic/lookup.cu"
_DYNAMIC_SHARED_BYTES = 48 * 1024  # above, a kernel must ask first
_PORTABLE_CLUSTER = 8  # blocks; a GPU may allow more, and has to be asked
_ALL = 100  # percent of the first cache's memory as shared memory
_GRANTING = Lock()  # two threads may ask for one function's attributes
_ELF = b"\x7fELF"
_THREAD = local()  # what this thread has; another device brings its own context along


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
def cubin(source: str, defines: Macros, capability: int) -> bytes:
    """Machine code of a file of this package for ``sm_{capability}``; needs no GPU.

    From the user's cache folder if an earlier process left it there; a folder that cannot be read or written
    costs the time to compile again and nothing else.
    """
    # Products of warpgroups are of compute capability 9.0 alone, and need its own architecture's name.
    architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines)]
    cache, name = _cache_of(source, options), f"{Path(source).stem}.cubin"
    with contextlib.suppress(OSError):
        file = None if cache is None else cache.get_file(name)
        if file is not None and (code := Path(file).read_bytes())[:4] == _ELF:
            return code
    code = _compiled(source, options)
    with contextlib.suppress(OSError):
        if cache is not None:
            cache.put(code, name)  # a file of its own first, then renamed: no process sees half of it
    return code


def _cache_of(source: str, options: list[str]) -> Any:
    """Triton's own keeper of files for this source, what it may include, the options and the compiler."""
    if triton is None:
        return None
    from triton.runtime.cache import get_cache_manager

    parts = [source, *options, str(_version())]
    parts += [path.read_text(encoding="utf-8") for path in sorted(_KERNELS.rglob("*.cu"))]
    try:
        return get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    except (OSError, RuntimeError):  # there is no such folder, and none can be made
        return None


def _version() -> tuple[int, ...]:
    status, *numbers = _bindings("nvrtc").nvrtcVersion()
    _checked((status,), "nvrtcVersion")
    return tuple(numbers)


def _compiled(source: str, options: list[str]) -> bytes:
    nvrtc, path = _bindings("nvrtc"), _KERNELS / source
    text = path.read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []), "nvrtcCreateProgram")
    words = [*options, f"--include-path={path.parent}", f"--include-path={_KERNELS}"]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), [o.encode() for o in words])
        if int(status):
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.decode(errors="replace")
            raise Unsupported(f"{source} does not compile with {options[0]}: {said}")
        code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        _checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


@lru_cache(maxsize=256)
def kernel(
    source: str,
    name: str,
    defines: Macros,
    device: int,
    shared_bytes: int,
    *,
    beside: bool = False,
    cluster: int = 1,
) -> Any:
    """A kernel's handle on a device, which is the current one.

    ``beside``: all of a multiprocessor's first cache is shared memory while the kernel runs, so that others
    for which this holds can run beside it. ``cluster``: how many blocks will run side by side.
    """
    driver = _bindings("driver")
    major, minor = torch.cuda.get_device_capability(device)
    module = _module(source, defines, device, 10 * major + minor)
    handle = _checked(driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")
    attributes, attribute_values = driver.CUfunction_attribute, {}
    if beside:
        attribute_values[attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = _ALL
    if cluster > _PORTABLE_CLUSTER:
        attribute_values[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
    if shared_bytes > _DYNAMIC_SHARED_BYTES:
        attribute_values[attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = shared_bytes
    with _GRANTING:
        for attribute, value in attribute_values.items():
            # Never less than before: launches with more shared memory share this function.
            if value > _checked(driver.cuFuncGetAttribute(attribute, handle), "cuFuncGetAttribute"):
                _checked(driver.cuFuncSetAttribute(handle, attribute, value), "cuFuncSetAttribute")
    return handle


@lru_cache(maxsize=256)
def _module(source: str, defines: Macros, device: int, capability: int) -> Any:
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
    cluster: int = 1,
) -> None:
    """Start a kernel of one argument, a structure by value, on the current stream of the current device.

    ``cluster``: so many blocks of the first dimension run side by side (compute capability 9.0 and later).
    ``early`` lets its blocks start before those of the stream's last kernel have ended; the kernel itself
    awaits what that one writes (griddepcontrol.wait; from compute capability 9.0).
    """
    check_grid(grid, "this product")
    driver = _bindings("driver")
    _ensure_context(driver)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    if early or cluster > 1:
        config = _config((grid, threads, shared_bytes, stream), early, cluster)
        status = driver.cuLaunchKernelEx(config, handle, ctypes.addressof(pointers), 0)
        _checked(status, "cuLaunchKernelEx")
        return
    status = driver.cuLaunchKernel(
        handle, *grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0
    )
    _checked(status, "cuLaunchKernel")


@lru_cache(maxsize=1024)
def _config(size: tuple[tuple[int, int, int], int, int, int], early: bool, cluster: int) -> Any:
    """A launch of a grid, threads, bytes of shared memory and a stream, with what only it can ask for."""
    (grid, threads, shared_bytes, stream), driver = size, _bindings("driver")
    names, attributes = driver.CUlaunchAttributeID, []
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size_of_cluster = attribute.value.clusterDim
        size_of_cluster.x, size_of_cluster.y, size_of_cluster.z = cluster, 1, 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _ensure_context(driver: Any) -> None:
    """Give a thread that has launched nothing yet the current device's context.

    A launch by the runtime, as torch's are, does this by itself; one by the driver fails.
    """
    if getattr(_THREAD, "has_context", False):
        return
    if not int(_checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        device = _checked(driver.cuDeviceGet(torch.cuda.current_device()), "cuDeviceGet")
        context = _checked(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        _checked(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    _THREAD.has_context = True


@lru_cache(maxsize=2)
def _bindings(name: str) -> ModuleType:
    return import_module(f"cuda.bindings.{name}")


def _checked(result: tuple[Any, ...], call: str) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"{call} answers {status!r}")
    return values[0] if values else None
