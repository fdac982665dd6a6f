"""`MultiheadAttention`: projections to queries, keys and values, attention, projection back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.attention.dot_product import DotProductAttention
from fewbits.te.attention.rope import apply_rotary_pos_emb
from fewbits.te.layers.linear import LayerNormLinear, Linear
from fewbits.te.layers.module import Module
from fewbits.te.layers.norm import L2Normalization, LayerNorm, RMSNorm
from fewbits.te.ranks.distributed import group_size

Init = Callable[[Tensor], Any] | None

# The words that all projections share.
_COMMON = (
    "fuse_wgrad_accumulation",
    "tp_group",
    "tp_size",
    "get_rng_state_tracker",
    "sequence_parallel",
    "params_dtype",
    "device",
    "bias",
)


class MultiheadAttention(nn.Module):
    """Self-attention, or attention over an encoder's output, with its projections.

    Args:
        hidden_size: of tokens.
        num_attention_heads: of queries.
        kv_channels: size of a head; None is hidden_size / num_attention_heads.
        attention_dropout: while training.
        layernorm_epsilon: of the norm before the projections, if there is one.
        init_method: fills the projections' weights; output_layer_init_method the last one's.
        layer_number: from 1; the place in a cache of keys and values.
        num_gqa_groups: heads of keys and values.
        return_bias: return (y without bias, bias of the last projection).
        return_layernorm_output: return the norm's result too, last.
        input_layernorm: whether there is a norm before the projections.
        attention_type: "self" or "cross".
        set_parallel_mode: split the projections over ``tp_group``.
        fuse_qkv_params: one weight for queries, keys and values instead of three.
        qkv_weight_interleaved: that weight has them head by head.
        rotary_pos_interleaved: see `fewbits.te.apply_rotary_pos_emb`.
        qkv_format: "sbhd", "bshd" or "thd".
        qk_norm_type: None, "L2Normalization", "RMSNorm" or "LayerNorm": of queries and keys.
        qk_norm_before_rope: before their positions are turned in, instead of after.
        softmax_type: see `DotProductAttention`.

    The other arguments are those of `fewbits.te.Linear` and `DotProductAttention`.
    """

    layernorm_qkv: LayerNormLinear
    qkv: Linear
    layernorm_query: LayerNormLinear
    query_layer: Linear

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init = None,
        output_layer_init_method: Init = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self._build(SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"}))

    def _build(self, words: Any) -> None:
        """Check the words of ``__init__`` and make the layers."""
        if words.attention_type not in ("self", "cross"):
            raise BadInput(f"attention_type is 'self' or 'cross', not {words.attention_type!r}.")
        if words.layer_number is not None and words.layer_number < 1:
            raise BadInput(f"layer_number is {words.layer_number}: layers are counted from 1.")
        size = words.tp_size if words.tp_group is None else group_size(words.tp_group)
        heads, groups = words.num_attention_heads, words.num_gqa_groups or words.num_attention_heads
        if heads % groups or groups % size:
            raise BadInput(f"{heads} query heads, {groups} key heads and {size} ranks do not divide evenly.")
        self.name, self.layer_number, self.qkv_format = words.name, words.layer_number or 1, words.qkv_format
        self.attn_mask_type, self.window_size = words.attn_mask_type, words.window_size
        self.bottom_right_diagonal, self.attention_type = words.bottom_right_diagonal, words.attention_type
        self.input_layernorm = words.input_layernorm
        self.return_layernorm_output = words.return_layernorm_output
        self.return_bias, self.fuse_qkv_params = words.return_bias, words.fuse_qkv_params
        self.qkv_weight_interleaved = words.qkv_weight_interleaved and words.fuse_qkv_params
        self.rotary_pos_interleaved = words.rotary_pos_interleaved
        self.qk_norm_before_rope = words.qk_norm_before_rope
        channels = words.kv_channels or words.hidden_size // heads
        self.head_size, self.num_heads, self.num_groups = channels, heads // size, groups // size
        self.q_norm, self.k_norm = _query_key_norms(
            words.qk_norm_type, channels, words.qk_norm_eps, words.device, words.params_dtype
        )
        words.tp_size = size
        common: dict[str, Any] = {word: getattr(words, word) for word in _COMMON}
        split = "column" if words.set_parallel_mode else None
        inner = {**common, "init_method": words.init_method, "parallel_mode": split}
        normed = {
            "eps": words.layernorm_epsilon,
            "normalization": words.normalization,
            "zero_centered_gamma": words.zero_centered_gamma,
            "return_layernorm_output": words.return_layernorm_output,
        }
        self._add_projections(words.hidden_size, channels * heads, channels * groups, inner, normed)
        self.core_attention = DotProductAttention(
            heads,
            channels,
            num_gqa_groups=groups,
            attention_dropout=words.attention_dropout,
            qkv_format=words.qkv_format,
            tp_size=size,
            get_rng_state_tracker=words.get_rng_state_tracker,
            layer_number=self.layer_number,
            attention_type=words.attention_type,
            softmax_type=words.softmax_type,
            name=_child(words.name, "core_attention"),
        )
        self.proj = Linear(
            channels * heads,
            words.hidden_size,
            init_method=words.output_layer_init_method,
            return_bias=words.return_bias,
            parallel_mode="row" if words.set_parallel_mode else None,
            name=_child(words.name, "proj"),
            **common,
        )

    def _add_projections(
        self, hidden: int, q: int, kv: int, inner: dict[str, Any], normed: dict[str, Any]
    ) -> None:
        first: type = LayerNormLinear if self.input_layernorm else Linear
        extra = normed if self.input_layernorm else {}
        word = "layernorm_linear" if self.input_layernorm else "linear"
        if self.attention_type == "self":
            split = None if self.fuse_qkv_params else {"query": q, "key": kv, "value": kv}
            layer = first(
                hidden,
                q + 2 * kv,
                parameters_split=split,
                name=_child(self.name, f"{word}_qkv"),
                **inner,
                **extra,
            )
            setattr(self, "layernorm_qkv" if self.input_layernorm else "qkv", layer)
            return
        split_q = ("query",) if self.input_layernorm and not self.fuse_qkv_params else None
        layer = first(
            hidden, q, parameters_split=split_q, name=_child(self.name, f"{word}_q"), **inner, **extra
        )
        setattr(self, "layernorm_query" if self.input_layernorm else "query_layer", layer)
        split_kv = None if self.fuse_qkv_params else ("key", "value")
        self.key_value = Linear(
            hidden, 2 * kv, parameters_split=split_kv, name=_child(self.name, "linear_kv"), **inner
        )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give all projections the process group over which they are split."""
        for child in self.children():
            if isinstance(child, Module):
                child.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """See `DotProductAttention.set_context_parallel_group`."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """The block; see `DotProductAttention.forward` for what is not named here.

        Args:
            hidden_states: (s, b, h), (b, s, h) or (t, h).
            encoder_output: what "cross" attends to, of the same layout.
            rotary_pos_emb: angles, or those of queries and those of keys.
            is_first_microbatch: see `fewbits.te.Linear.forward`.

        Returns:
            Of the shape of ``hidden_states``, with ``return_bias`` the bias beside it, and with
            ``return_layernorm_output`` last the norm's result.
        """
        q, k, v, normed = self._queries_keys_values(hidden_states, encoder_output, is_first_microbatch)
        bounds = (cu_seqlens_q, cu_seqlens_kv)
        if pad_between_seqs:
            bounds = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
        q, k = self._placed(q, k, rotary_pos_emb, bounds, inference_params)
        context = self.core_attention(
            q,
            k,
            v,
            attention_mask=attention_mask,
            qkv_format=self.qkv_format,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            attn_mask_type=attn_mask_type or self.attn_mask_type,
            window_size=window_size if window_size is not None else self.window_size,
            bottom_right_diagonal=(
                self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
            ),
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
        )
        projected = self.proj(context, is_first_microbatch=is_first_microbatch)
        results = list(projected) if self.return_bias else [projected]
        results += [normed] if self.input_layernorm and self.return_layernorm_output else []
        return results[0] if len(results) == 1 else tuple(results)

    def _placed(
        self, q: Tensor, k: Tensor, angles: Any, bounds: tuple[Tensor | None, Tensor | None], cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys normed and turned by their positions, in the order asked for."""
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            of_q, of_k = angles if isinstance(angles, tuple) else (angles, angles)
            starts = None if cache is None else cache.get_seqlens_pre_step()
            words: dict[str, Any] = {"start_positions": starts, "interleaved": self.rotary_pos_interleaved}
            context = self.core_attention.context
            if context is not None:
                words["cp_size"] = group_size(context.group)
                words["cp_rank"] = torch.distributed.get_rank(context.group)
            q = apply_rotary_pos_emb(q, of_q, self.qkv_format, cu_seqlens=bounds[0], **words)
            k = apply_rotary_pos_emb(k, of_k, self.qkv_format, cu_seqlens=bounds[1], **words)
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def _first(self, layer: nn.Module, x: Tensor, first: bool | None) -> tuple[Tensor, Tensor | None]:
        out = layer(x, is_first_microbatch=first)
        return out if self.input_layernorm and self.return_layernorm_output else (out, None)

    def _queries_keys_values(
        self, x: Tensor, encoded: Tensor | None, first: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries (..., heads, d), keys and values (..., groups, d), and the norm's result."""
        size, groups = self.head_size, self.num_groups
        times = self.num_heads // groups
        if self.attention_type == "self":
            y, normed = self._first(self.layernorm_qkv if self.input_layernorm else self.qkv, x, first)
            if self.qkv_weight_interleaved:
                q, k, v = y.view(*y.shape[:-1], groups, times + 2, size).split((times, 1, 1), -2)
            else:
                q, k, v = y.view(*y.shape[:-1], times + 2, groups, size).split((times, 1, 1), -3)
            return (*(t.reshape(*y.shape[:-1], -1, size) for t in (q, k, v)), normed)  # type: ignore[return-value]
        if encoded is None:
            raise BadInput("cross attention needs encoder_output: what it attends to.")
        both = self.key_value(encoded, is_first_microbatch=first)
        if self.qkv_weight_interleaved:
            k, v = both.view(*both.shape[:-1], groups, 2 * size).chunk(2, -1)
        else:
            k, v = both.view(*both.shape[:-1], 2 * groups, size).chunk(2, -2)
        y, normed = self._first(self.layernorm_query if self.input_layernorm else self.query_layer, x, first)
        return y.view(*y.shape[:-1], self.num_heads, size), k, v, normed


def _child(name: str | None, word: str) -> str | None:
    return None if name is None else f"{name}.{word}"


def _query_key_norms(
    kind: str | None, size: int, eps: float, device: Any, dtype: torch.dtype | None
) -> tuple[nn.Module | None, nn.Module | None]:
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        norm = L2Normalization(eps=eps)
        return norm, norm
    classes = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if kind not in classes:
        raise BadInput(f"qk_norm_type is None, 'L2Normalization', 'RMSNorm' or 'LayerNorm', not {kind!r}.")
    make = classes[kind]
    return make(size, eps=eps, device=device, params_dtype=dtype), make(
        size, eps=eps, device=device, params_dtype=dtype
    )
