"""Which tile a kernel takes on which GPU: measured on this machine, else shipped, else the rule's.

Every kernel has a rule (`row_tile`, `gated_tile`, ...) whose tiles fit all supported GPUs; its numbers are of
an H200. `SHIPPED` has what an architecture takes in their place. `fewbits bench tune` measures a GPU's own
tiles and keeps the winners with Triton's files, in the user's cache folder; they hold for this GPU's name,
this version of Triton and these kernels only.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fewbits.kernels.launch.jit import triton

Tile = tuple[int, ...]
T = TypeVar("T", bound=tuple)

_FILE = "tiles.json"
_LONGEST, _LARGEST = 16, 2**16  # numbers in a tile, and each of them
# By compute capability times ten: what stands in place of a rule's tile. sm_90's were measured on an H200; of
# the others no tile has been measured, and the rules', which the compiler fits into each of them, stand.
SHIPPED: Mapping[int, Mapping[str, Tile]] = {
    80: {},
    89: {},
    90: {"gated_lora 16": (64, 64, 4, 16, 3)},  # 90 KB of shared memory; Triton 3.6 fails on it for sm_100
    100: {},
    120: {},
}


def key_of(op: str, *facts: object) -> str:
    """The name under which a tile stands in a table."""
    return " ".join((op, *map(str, facts)))


def tile_for(op: str, facts: tuple[object, ...], like: Tensor, rule: T) -> T:
    """The tile of ``op`` where ``like`` is: measured there, shipped for the architecture, or the ``rule``'s.

    ``like`` may have any shape: its device is read.

    Args:
        op: the kernel.
        facts: of the operands, as far as the best tile depends on them.
        like: an operand.
        rule: the tile that every GPU takes; its type is the result's.
    """
    return tile_on(like.device, op, facts, rule)


def tile_on(device: torch.device, op: str, facts: tuple[object, ...], rule: T) -> T:
    """`tile_for` an operand on ``device``."""
    if device.type != "cuda":
        return rule
    numbers = tiles_of(device.index or 0).get(key_of(op, *facts))
    kind: Any = type(rule)
    fits = numbers is not None and len(numbers) == len(rule)
    if not fits or any(n == 0 and of_rule != 0 for n, of_rule in zip(numbers or (), rule, strict=False)):
        return rule
    return cast(T, kind(*numbers or ()))


@lru_cache(maxsize=16)
def tiles_of(index: int) -> Mapping[str, Tile]:
    """All tiles of a CUDA device that are not the rules'; read once in a process."""
    major, minor = torch.cuda.get_device_capability(index)
    return {**SHIPPED.get(10 * major + minor, {}), **measured(index)}


def measured(index: int) -> dict[str, Tile]:
    """What `keep` left for this GPU, here or in an earlier process; empty without it.

    A file that is damaged is left out with a warning: the rules' tiles give the same numbers.
    """
    cache = _cache_of(index)
    file = None if cache is None else cache.get_file(_FILE)
    if file is None:
        return {}
    try:
        table = json.loads(Path(file).read_text(encoding="utf-8"))
        tiles = {key: tuple(tile) for key, tile in table.items() if _is_tile(tile)}
        damaged = len(tiles) < len(table)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        tiles, damaged = {}, True
    if damaged:
        warnings.warn(
            f"{file} is damaged and what cannot be read of it is left out; fewbits bench tune measures the "
            "tiles again.",
            stacklevel=2,
        )
    return tiles


def _is_tile(tile: object) -> bool:
    """Whether a value from the file can be one: some whole numbers that a kernel can have as sizes."""
    return (
        isinstance(tile, list)
        and 0 < len(tile) <= _LONGEST
        and all(isinstance(n, int) and 0 <= n <= _LARGEST for n in tile)
    )


def keep(index: int, tiles: Mapping[str, Tile]) -> Path | None:
    """Write what was measured, beside what was kept before; None where there is no cache folder."""
    cache = _cache_of(index)
    if cache is None:
        return None
    path = Path(cache.put(json.dumps({**measured(index), **tiles}, indent=1), _FILE, binary=False))
    tiles_of.cache_clear()
    return path


def _cache_of(index: int) -> Any:
    if triton is None:
        return None
    from triton.runtime.cache import get_cache_manager

    parts = ["fewbits tiles", torch.cuda.get_device_name(index), str(triton.__version__), _kernels()]
    try:
        return get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    except (OSError, RuntimeError):  # there is no such folder, and none can be made
        return None


@lru_cache(maxsize=1)
def _kernels() -> str:
    """The text of all kernels: a tile is measured for one of it."""
    return "\0".join(p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parents[1].rglob("*.py")))
