"""`fuse` and its kin live in `fewbits.decoder.fuse`; scripts may go on importing them from here."""

from fewbits.decoder.fuse import (
    FusedForward,
    Fusion,
    forget_weights,
    fuse,
    fused_layers,
    fusion_of,
    load_scales,
    scales_of,
    unfuse,
)

__all__ = [
    "FusedForward",
    "Fusion",
    "forget_weights",
    "fuse",
    "fused_layers",
    "fusion_of",
    "load_scales",
    "scales_of",
    "unfuse",
]
