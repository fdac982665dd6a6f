"""Transformer Engine's unfused attention, plain torch from the checkout of its tests, beside `fewbits.te`'s.

Its tests of attention run one call by two of its backends and compare. Here its "UnfusedDotProductAttention"
is the class of that name in the checkout, with two of its C++ functions in torch; "FusedAttention" is ours.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

import torch

import fewbits.te as te

PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"
FILES = ("backends", "softmax", "utils")
BACKENDS = {"No_Backend": -1, "F16_arbitrary_seqlen": 1, "FP8": 2}


def convert_thd_to_bshd(packed: Any, ends: Any, sequences: int, longest: int) -> Any:
    """Packed sequences (t, h, d) with zeros behind each, (b, s, h, d)."""
    batch = packed.new_zeros(sequences, longest, *packed.shape[1:])
    for i, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        batch[i, : end - begin] = packed[begin:end]
    return batch


def convert_bshd_to_thd(batch: Any, ends: Any, tokens: int) -> Any:
    """The way back."""
    packed = batch.new_zeros(tokens, *batch.shape[2:])
    for i, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        packed[begin:end] = batch[i, : end - begin]
    return packed


def choose_backend(params: Any) -> tuple[Any, ...]:
    """What their ``get_attention_backend`` returns: no flash attention; ours; theirs where nothing is FP8."""
    plain = not params.fp8 and not params.has_score_mod
    return (
        False,
        None,
        True,
        BACKENDS["FP8" if params.fp8 else "F16_arbitrary_seqlen"],
        plain,
        [False, True, plain],
    )


def _by_theirs(utils: Any, backends: Any, module: Any, words: SimpleNamespace) -> Any:
    kind = words.attn_mask_type or module.attn_mask_type
    window = module.window_size if words.window_size is None else words.window_size
    below = (
        module.bottom_right_diagonal if words.bottom_right_diagonal is None else words.bottom_right_diagonal
    )
    below = False if kind in ("causal", "padding_causal") else below
    below = True if below is None or kind.endswith("bottom_right") else below
    layout = words.qkv_format or module.qkv_format
    tensors = (words.query_layer, words.key_layer, words.value_layer)
    lengths = [words.max_seqlen_q, words.max_seqlen_kv]
    if layout == "thd":
        for i, ends in enumerate((words.cu_seqlens_q, words.cu_seqlens_kv)):
            lengths[i] = lengths[i] or int(ends.diff().max())
    else:
        lengths = [t.shape[layout.index("s")] for t in tensors[:2]]
    attention = backends.UnfusedDotProductAttention(
        module.softmax_scale,
        attention_type=module.attention_type,
        attention_dropout=module.attention_dropout,
        layer_number=module.layer_number,
        softmax_type=module.softmax_type,
        return_max_logit=module.return_max_logit,
    ).train(module.training)
    offset = None if module.softmax_offset is None else module.softmax_offset.float().view(1, -1, 1, 1)
    cache = {f"_{word}": None for word in ("alibi_slopes", "alibi_bias", "num_heads", "max_seqlen_q")}
    cache.update({"_alibi_slopes_require_update": True, "_alibi_bias_require_update": True})
    cache.update({"_max_seqlen_kv": None, "_bottom_right_alignment": None})
    return attention(
        cache,
        *tensors,
        qkv_layout=f"{layout}_{layout}_{layout}",
        cu_seqlens_q=words.cu_seqlens_q,
        cu_seqlens_kv=words.cu_seqlens_kv,
        max_seqlen_q=lengths[0],
        max_seqlen_kv=lengths[1],
        attn_mask_type=kind,
        attention_mask=words.attention_mask,
        window_size=utils.check_set_window_size(kind, window),
        bottom_right_diagonal=below,
        core_attention_bias_type=words.core_attention_bias_type,
        core_attention_bias=words.core_attention_bias,
        alibi_slopes=words.alibi_slopes,
        softmax_offset=offset,
    )


def put_beside_ours(utils: Any, backends: Any, missing: Any) -> None:
    """Let the tests' environment variables choose between the two, as they do there."""
    utils.get_attention_backend = choose_backend
    for name in ("FlashAttentionUtils", "_get_supported_versions"):  # tests of these are tests of theirs
        setattr(utils, name, missing(f"{PACKAGE}.utils.{name}"))
    utils.AttentionLogging._is_logging_setup = True
    ours = te.DotProductAttention.forward
    signature = inspect.signature(ours)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = os.environ.get("NVTE_UNFUSED_ATTN") == "1" and os.environ.get("NVTE_FUSED_ATTN") == "0"
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        words = SimpleNamespace(**call.arguments)
        given = words.qkv_layer is None and words.kv_layer is None and words.inference_params is None
        if theirs and given and not te.active.numerics.current().enabled:
            return _by_theirs(utils, backends, self, words)
        return ours(self, *args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    te.DotProductAttention.forward = forward
    torch.nn.Module.fast_setattr = lambda self, name, value: self.__dict__.__setitem__(name, value)
