"""Where modules stood when `fewbits.te` had no rooms: files saved then name classes by these addresses."""

from __future__ import annotations

import importlib
import sys

_ROOMS = {
    "arithmetic": ("scaling", "microscaling", "float4", "layouts"),
    "ranks": ("distributed", "parallel", "rng", "cross_entropy"),
    "tensors": ("operand", "roles", "quantized_tensor", "quantizers", "safe"),
    "active": ("numerics", "delayed", "operands", "extra_state", "global_state"),
    "products": ("product", "units", "weight_gradient"),
    "layers": (
        "module",
        "linear",
        "norm",
        "layernorm_mlp",
        "grouped_linear",
        "primary",
        "activations",
        "recompute",
        "graph",
    ),
    "attention": ("masks", "rope", "inference", "multi_head_attention", "rounded"),
    "experts": ("permutation", "router", "padding"),
}
"""Each file's room: ``fewbits.te.NAME`` is ``fewbits.te.ROOM.NAME`` now."""


def keep_former_addresses() -> dict[str, str]:
    """Let ``import fewbits.te.NAME``, and so a pickle that names it, find the module in its room.

    Returns:
        The former address of each module by today's.
    """
    former = {}
    for room, names in _ROOMS.items():
        for name in names:
            module = importlib.import_module(f"fewbits.te.{room}.{name}")
            sys.modules.setdefault(f"fewbits.te.{name}", module)
            former[module.__name__] = f"fewbits.te.{name}"
    return former
