"""The package ``compressed-tensors``: found, and told apart by version; what its files share.

Whole numbers in groups are packed by the package's own compressor; its config classes write what config.json
says. The group has 128 values, or 64 or 32 where a model's rows do not divide; otherwise each row has one
scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from fewbits.errors import Unsupported

_GROUPS = (128, 64, 32)


def import_compressed_tensors() -> Any:
    """The package ``compressed_tensors``.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        import compressed_tensors.compressors
        import compressed_tensors.quantization
    except ImportError as error:
        raise Unsupported(
            "this format needs the package compressed-tensors, which is not installed; run: "
            "pip install 'fewbits[export]'."
        ) from error
    return compressed_tensors


def reader_name() -> str:
    """The package with its version, for receipts."""
    return f"compressed-tensors {version('compressed-tensors')}"


def group_of(columns: Iterable[int]) -> int:
    """Values that share a scale in a model whose rows have these lengths; 0 for the whole row.

    One size for all: transformers decodes folders with several groups by the first one's.
    """
    lengths = set(columns)
    return next((group for group in _GROUPS if all(n % group == 0 for n in lengths)), 0)
