"""``FP8GlobalStateManager``: what frameworks ask of a global state, answered from our values."""

from __future__ import annotations

from typing import Any

from fewbits.te.active.numerics import current, current_init
from fewbits.te.support import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    get_default_recipe,
)


class FP8GlobalStateManager:
    """Questions about the recipe that holds; nothing global stands behind the answers."""

    @classmethod
    def reset(cls) -> None:
        """Nothing: a block's value ends with the block."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether operands are quantised here."""
        return current().enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether amaxes are recorded here although operands are not quantised."""
        return current().calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules that are built here hold only quantised weights."""
        return current_init().enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """The recipe that holds here, or the default one."""
        return current().recipe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group over which amaxes are taken."""
        return current().group

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Under which name a module's ``fp8_meta`` holds the state of a pass."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """See `fewbits.te.support.check_fp8_support`."""
        return check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """See `fewbits.te.support.check_mxfp8_support`."""
        return check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """See `fewbits.te.support.check_fp8_block_scaling_support`."""
        return check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """See `fewbits.te.support.check_nvfp4_support`."""
        return check_nvfp4_support()
