"""Names of Transformer Engine that have no meaning here: each says why, and what to do, when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fewbits.errors import Unsupported


def _refused(name: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"{name} is not supported by fewbits.te: {why}.")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refused: {why}."
    return refuse


onnx_export = _refused(
    "onnx_export",
    "quantised modules have no ONNX operators here; export the model unquantised with torch.onnx",
)
initialize_ub = _refused(
    "initialize_ub",
    "products and communication are not overlapped by userbuffers; leave the ub_ arguments alone",
)
destroy_ub = _refused("destroy_ub", "there are no userbuffers to destroy")
newton_schulz = _refused("newton_schulz", "it needs NVIDIA's cuSOLVERMp; torch.optim.Muon has the iteration")
CusolverMpCtx = _refused("CusolverMpCtx", "it needs NVIDIA's cuSOLVERMp")
FusedMLAQUpProjRopeQuant = _refused(
    "FusedMLAQUpProjRopeQuant", "compose Linear, apply_rotary_pos_emb and DotProductAttention"
)
get_cpu_offload_context = _refused(
    "get_cpu_offload_context", "use torch.autograd.graph.save_on_cpu around the forward pass"
)
mark_not_offload = _refused("mark_not_offload", "nothing is offloaded; see get_cpu_offload_context")
ManualOffloadSynchronizer = _refused(
    "ManualOffloadSynchronizer", "nothing is offloaded; see get_cpu_offload_context"
)


def is_in_onnx_export_mode() -> bool:
    """Never."""
    return False
