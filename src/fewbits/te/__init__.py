"""Transformer Engine's blocks with nothing to build: the names of `transformer_engine.pytorch` over fewbits.

``import fewbits.te as te`` takes the place of ``import transformer_engine.pytorch as te``: plain torch, on
any device. A module (`layers/`) asks `active/` which recipe (`recipe.py`) holds and for that recipe's
quantisers (`tensors/`), whose definition is in `arithmetic/`; `products/` multiplies what they give.
`attention/` and `experts/` stand on the layers, `ranks/` is what goes between processes, `ops/` the same
blocks as operations in a row. The only state is in `active/`. Importing it tells torch that
``torch.load(weights_only=True)`` may read its tensors, and keeps former addresses (`former.py`). Imports
formats and kernels. Begin with `layers/linear.py`.
"""

from __future__ import annotations

from fewbits.te import ops as ops
from fewbits.te import optimizers as optimizers
from fewbits.te import recipe as recipe
from fewbits.te.active.numerics import autocast as autocast
from fewbits.te.active.numerics import fp8_autocast as fp8_autocast
from fewbits.te.active.numerics import fp8_model_init as fp8_model_init
from fewbits.te.active.numerics import quantized_model_init as quantized_model_init
from fewbits.te.attention.dot_product import DotProductAttention as DotProductAttention
from fewbits.te.attention.inference import InferenceParams as InferenceParams
from fewbits.te.attention.multi_head_attention import MultiheadAttention as MultiheadAttention
from fewbits.te.attention.rope import RotaryPositionEmbedding as RotaryPositionEmbedding
from fewbits.te.attention.rope import apply_fused_qkv_rotary_pos_emb as apply_fused_qkv_rotary_pos_emb
from fewbits.te.attention.rope import apply_rotary_pos_emb as apply_rotary_pos_emb
from fewbits.te.drop_in import as_transformer_engine as as_transformer_engine
from fewbits.te.experts.padding import Fp8Padding as Fp8Padding
from fewbits.te.experts.padding import Fp8Unpadding as Fp8Unpadding
from fewbits.te.experts.permutation import moe_permute as moe_permute
from fewbits.te.experts.permutation import moe_permute_and_pad_with_probs as moe_permute_and_pad_with_probs
from fewbits.te.experts.permutation import moe_permute_with_probs as moe_permute_with_probs
from fewbits.te.experts.permutation import moe_sort_chunks_by_index as moe_sort_chunks_by_index
from fewbits.te.experts.permutation import (
    moe_sort_chunks_by_index_with_probs as moe_sort_chunks_by_index_with_probs,
)
from fewbits.te.experts.permutation import moe_unpermute as moe_unpermute
from fewbits.te.experts.router import RoutingMapFormat as RoutingMapFormat
from fewbits.te.experts.router import (
    fused_compute_score_for_moe_aux_loss as fused_compute_score_for_moe_aux_loss,
)
from fewbits.te.experts.router import fused_moe_aux_loss as fused_moe_aux_loss
from fewbits.te.experts.router import fused_topk_with_score_function as fused_topk_with_score_function
from fewbits.te.former import keep_former_addresses
from fewbits.te.layers.activations import deinterleave_glu_tensor as deinterleave_glu_tensor
from fewbits.te.layers.activations import interleave_glu_tensor as interleave_glu_tensor
from fewbits.te.layers.graph import make_graphed_callables as make_graphed_callables
from fewbits.te.layers.grouped_linear import GroupedLinear as GroupedLinear
from fewbits.te.layers.layernorm_mlp import LayerNormMLP as LayerNormMLP
from fewbits.te.layers.linear import LayerNormLinear as LayerNormLinear
from fewbits.te.layers.linear import Linear as Linear
from fewbits.te.layers.module import use_recipe as use_recipe
from fewbits.te.layers.norm import LayerNorm as LayerNorm
from fewbits.te.layers.norm import RMSNorm as RMSNorm
from fewbits.te.layers.recompute import checkpoint as checkpoint
from fewbits.te.optimizers import FusedAdam as FusedAdam
from fewbits.te.optimizers import FusedSGD as FusedSGD
from fewbits.te.ranks.cross_entropy import parallel_cross_entropy as parallel_cross_entropy
from fewbits.te.ranks.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
from fewbits.te.refused import CusolverMpCtx as CusolverMpCtx
from fewbits.te.refused import FusedMLAQUpProjRopeQuant as FusedMLAQUpProjRopeQuant
from fewbits.te.refused import ManualOffloadSynchronizer as ManualOffloadSynchronizer
from fewbits.te.refused import destroy_ub as destroy_ub
from fewbits.te.refused import get_cpu_offload_context as get_cpu_offload_context
from fewbits.te.refused import initialize_ub as initialize_ub
from fewbits.te.refused import mark_not_offload as mark_not_offload
from fewbits.te.refused import newton_schulz as newton_schulz
from fewbits.te.refused import onnx_export as onnx_export
from fewbits.te.support import emulation as emulation
from fewbits.te.support import get_align_size_for_quantization as get_align_size_for_quantization
from fewbits.te.support import get_default_recipe as get_default_recipe
from fewbits.te.support import get_device_compute_capability as get_device_compute_capability
from fewbits.te.support import is_bf16_available as is_bf16_available
from fewbits.te.support import is_fp8_available as is_fp8_available
from fewbits.te.support import is_fp8_block_scaling_available as is_fp8_block_scaling_available
from fewbits.te.support import is_mxfp8_available as is_mxfp8_available
from fewbits.te.support import is_nvfp4_available as is_nvfp4_available
from fewbits.te.tensors.quantized_tensor import Float8BlockwiseQTensor as Float8BlockwiseQTensor
from fewbits.te.tensors.quantized_tensor import Float8Tensor as Float8Tensor
from fewbits.te.tensors.quantized_tensor import HybridQuantizedTensor as HybridQuantizedTensor
from fewbits.te.tensors.quantized_tensor import IdentityTensor as IdentityTensor
from fewbits.te.tensors.quantized_tensor import MXFP8Tensor as MXFP8Tensor
from fewbits.te.tensors.quantized_tensor import NVFP4Tensor as NVFP4Tensor
from fewbits.te.tensors.quantized_tensor import QuantizedTensor as QuantizedTensor
from fewbits.te.tensors.quantizers import Float8BlockQuantizer as Float8BlockQuantizer
from fewbits.te.tensors.quantizers import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from fewbits.te.tensors.quantizers import Float8Quantizer as Float8Quantizer
from fewbits.te.tensors.quantizers import HybridQuantizer as HybridQuantizer
from fewbits.te.tensors.quantizers import IdentityQuantizer as IdentityQuantizer
from fewbits.te.tensors.quantizers import MXFP8Quantizer as MXFP8Quantizer
from fewbits.te.tensors.quantizers import NVFP4Quantizer as NVFP4Quantizer
from fewbits.te.tensors.quantizers import Quantizer as Quantizer
from fewbits.te.tensors.roles import DelayedScalingRequest as DelayedScalingRequest
from fewbits.te.tensors.roles import DType as DType
from fewbits.te.tensors.roles import QuantizerRequest as QuantizerRequest
from fewbits.te.tensors.roles import QuantizerRole as QuantizerRole
from fewbits.te.tensors.safe import allow_loading
from fewbits.te.transformer_layer import TransformerLayer as TransformerLayer

allow_loading(former=keep_former_addresses())

_ABSENT = {
    "constants": "the types of data are fewbits.te.DType",
    "UserBufferQuantizationMode": "there are no userbuffers",
    "get_cudnn_version": "nothing here calls cuDNN by itself",
    "prepare_for_saving": "save a quantised tensor as any other",
    "restore_from_saved": "save a quantised tensor as any other",
    "restore_from_func_ctx": "save a quantised tensor as any other",
    **dict.fromkeys(
        (
            f"{kind}Storage"
            for kind in (
                "QuantizedTensor",
                "Float8Tensor",
                "MXFP8Tensor",
                "NVFP4Tensor",
                "Float8BlockwiseQTensor",
                "HybridQuantizedTensor",
                "IdentityTensor",
            )
        ),
        "codes and scales are what the tensor's operand() returns",
    ),
}


def __getattr__(name: str) -> None:
    """A sentence for a name of Transformer Engine that is not here."""
    if name in _ABSENT:
        raise AttributeError(f"fewbits.te has no {name}: {_ABSENT[name]}.")
    raise AttributeError(f"fewbits.te has no {name}.")
