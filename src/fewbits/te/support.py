"""Whether this machine takes a recipe: a CPU runs the definition of all, a GPU those that its chip has.

On a GPU whose chip lacks a format other units compute the same numbers, but slower than plain products, which
is rarely what a script means: it is refused unless the caller asks for it with `emulation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fewbits.errors import Unsupported
from fewbits.te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

_EMULATION: ContextVar[bool] = ContextVar("fewbits_te_emulation", default=False)
_NEEDS = {"FP8": (8, 9), "FP8 block scaling": (9, 0), "MXFP8": (10, 0), "NVFP4": (10, 0)}


@contextmanager
def emulation(enabled: bool = True) -> Iterator[None]:
    """Within it a GPU computes recipes that its chip lacks: the same codes, and products by other units."""
    token = _EMULATION.set(enabled)
    try:
        yield
    finally:
        _EMULATION.reset(token)


def default_device(device: torch.device | str | None) -> torch.device:
    """Where parameters are made: as asked, else on the GPU if there is one."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_device_compute_capability() -> tuple[int, int]:
    """The current GPU's capability; (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _support(format: str) -> tuple[bool, str]:
    if not torch.cuda.is_available() or _EMULATION.get():
        return True, ""
    capability, needed = get_device_compute_capability(), _NEEDS[format]
    if capability >= needed:
        return True, ""
    have, want = (".".join(map(str, version)) for version in (capability, needed))
    return False, (
        f"{format} needs a GPU of compute capability {want}, and this one has {have}: "
        "wrap the call in fewbits.te.emulation() to compute it by bfloat16 products, slower than those."
    )


def check_fp8_support() -> tuple[bool, str]:
    """Whether FP8 with one scale a tensor can run, and why not."""
    return _support("FP8")


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Whether FP8 with scales by blocks of 128 can run, and why not."""
    return _support("FP8 block scaling")


def check_mxfp8_support() -> tuple[bool, str]:
    """Whether MXFP8 can run, and why not."""
    return _support("MXFP8")


def check_nvfp4_support() -> tuple[bool, str]:
    """Whether NVFP4 can run, and why not."""
    return _support("NVFP4")


def _answer(support: tuple[bool, str], return_reason: bool) -> bool | tuple[bool, str]:
    return support if return_reason else support[0]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 with one scale a tensor can run here; with ``return_reason`` also why not."""
    return _answer(check_fp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 with scales by blocks of 128 can run here; with ``return_reason`` also why not."""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8 can run here; with ``return_reason`` also why not."""
    return _answer(check_mxfp8_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether NVFP4 can run here; with ``return_reason`` also why not."""
    return _answer(check_nvfp4_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bfloat16 can run here; with ``return_reason`` also why not."""
    capability = get_device_compute_capability()
    available = not torch.cuda.is_available() or capability >= (8, 0)
    reason = "" if available else "bfloat16 needs a GPU of compute capability 8.0."
    return _answer((available, reason), return_reason)


def check_recipe_support(recipe: Recipe) -> None:
    """Refuse a recipe that this machine's GPU lacks.

    Raises:
        Unsupported: with the capability needed, and how to run by definition.
    """
    checks = {
        (DelayedScaling, Float8CurrentScaling): check_fp8_support,
        (Float8BlockScaling,): check_fp8_block_scaling_support,
        (MXFP8BlockScaling,): check_mxfp8_support,
        (NVFP4BlockScaling,): check_nvfp4_support,
    }
    for kinds, check in checks.items():
        if isinstance(recipe, kinds):
            supported, reason = check()
            if not supported:
                raise Unsupported(reason)


def get_default_recipe() -> Recipe:
    """What `autocast` takes where none is named: delayed scaling, or MXFP8 on a GPU that has it."""
    capability = get_device_compute_capability()
    if capability >= (12, 0):
        return Float8CurrentScaling()
    return MXFP8BlockScaling() if capability >= (10, 0) else DelayedScaling()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """To how many rows `Fp8Padding` pads each expert under a recipe."""
    alignment = getattr(recipe, "quantization_alignment", None)
    if alignment is not None:
        return int(alignment)
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16
