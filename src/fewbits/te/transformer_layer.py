"""`TransformerLayer`: attention and MLP with their norms, dropouts and residual sums."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.attention.multi_head_attention import MultiheadAttention
from fewbits.te.layers.layernorm_mlp import LayerNormMLP
from fewbits.te.layers.module import Module
from fewbits.te.layers.norm import LayerNorm, RMSNorm
from fewbits.te.ranks.distributed import group_size

Init = Callable[[Tensor], Any] | None

# The words of a layer that its attentions and its MLP share, and those that its attentions have besides.
_COMMON = (
    "hidden_size",
    "init_method",
    "output_layer_init_method",
    "tp_group",
    "tp_size",
    "fuse_wgrad_accumulation",
    "get_rng_state_tracker",
    "sequence_parallel",
    "params_dtype",
    "return_layernorm_output",
    "set_parallel_mode",
    "zero_centered_gamma",
    "bias",
    "normalization",
    "device",
)
_OF_ATTENTION = (
    "num_attention_heads",
    "kv_channels",
    "attention_dropout",
    "layernorm_epsilon",
    "layer_number",
    "num_gqa_groups",
    "fuse_qkv_params",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "qkv_format",
    "qk_norm_type",
    "qk_norm_eps",
    "qk_norm_before_rope",
    "softmax_type",
)
_OF_CALL = (
    "is_first_microbatch",
    "checkpoint_core_attention",
    "inference_params",
    "rotary_pos_emb",
    "core_attention_bias_type",
    "core_attention_bias",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_q_padded",
    "pad_between_seqs",
)


class DropPath(nn.Module):
    """Drops whole samples of a residual branch while training (Huang et al. 2016); samples are on axis 0."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        """x (b, ...), each sample kept and scaled, or zero."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        chosen = torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), device=x.device, dtype=torch.float32) < keep
        return x / keep * chosen


class TransformerLayer(nn.Module):
    """One layer of a transformer: encoder, or decoder with attention over an encoder's output.

    Args:
        hidden_size: of tokens.
        ffn_hidden_size: inside the MLP.
        num_attention_heads: of queries.
        hidden_dropout: of what attention and MLP add, while training.
        apply_residual_connection_post_layernorm: residuals start after the norms.
        output_layernorm: a norm at the end, and none before attention.
        parallel_attention_mlp: both from the same input.
        layer_type: "encoder" or "decoder".
        drop_path_rate: see `DropPath`.
        self_attn_mask_type: see `attention/masks.py`; ``enc_dec_`` words are those of the second attention.
        attn_input_format: "sbhd", "bshd" or "thd".

    The other arguments are those of `MultiheadAttention` and `LayerNormMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init = None,
        output_layer_init_method: Init = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self._build(SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"}))

    def _build(self, words: Any) -> None:
        """Check the words of ``__init__`` and make the layers."""
        _check(words)
        self.name, self.layer_number, self.layer_type = words.name, words.layer_number, words.layer_type
        self.self_attn_mask_type, self.window_size = words.self_attn_mask_type, words.window_size
        self.bottom_right_diagonal = words.bottom_right_diagonal
        self.enc_dec_attn_mask_type = words.enc_dec_attn_mask_type
        self.enc_dec_window_size = words.enc_dec_window_size
        self.enc_dec_bottom_right_diagonal = words.enc_dec_bottom_right_diagonal
        self.output_layernorm, self.parallel_attention_mlp = (
            words.output_layernorm,
            words.parallel_attention_mlp,
        )
        self.hidden_dropout = words.hidden_dropout
        words.tp_size = words.tp_size if words.tp_group is None else group_size(words.tp_group)
        words.return_layernorm_output = words.apply_residual_connection_post_layernorm
        words.qkv_format, name = words.attn_input_format, words.name
        common = {word: getattr(words, word) for word in _COMMON}
        attention: dict[str, Any] = {**common, **{word: getattr(words, word) for word in _OF_ATTENTION}}
        self.self_attention = MultiheadAttention(
            **attention,
            attn_mask_type=words.self_attn_mask_type,
            input_layernorm=not words.output_layernorm,
            return_bias=not words.parallel_attention_mlp,
            name=name and f"{name}.self_attention",
        )
        if words.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                **attention,
                attn_mask_type=words.enc_dec_attn_mask_type,
                input_layernorm=True,
                attention_type="cross",
                return_bias=True,
                name=name and f"{name}.inter_attention",
            )
        self.layernorm_mlp = LayerNormMLP(
            **common,
            ffn_hidden_size=words.ffn_hidden_size,
            eps=words.layernorm_epsilon,
            return_bias=not words.parallel_attention_mlp,
            activation=words.activation,
            activation_params=words.activation_params,
            name=name and f"{name}.layernorm_mlp",
        )
        self.drop_path = DropPath(words.drop_path_rate) if words.drop_path_rate > 0.0 else None
        if words.output_layernorm:
            norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[words.normalization]
            self.layernorm = norm(
                words.hidden_size,
                eps=words.layernorm_epsilon,
                sequence_parallel=words.sequence_parallel and words.tp_size > 1,
                params_dtype=words.params_dtype,
                zero_centered_gamma=words.zero_centered_gamma,
                device=words.device,
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give all layers the process group over which they are split."""
        for module in self.modules():
            if isinstance(module, Module):
                module.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """See `DotProductAttention.set_context_parallel_group`."""
        for module in self.children():
            if isinstance(module, MultiheadAttention):
                module.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def reset_fp8_meta_tensors(self) -> None:
        """Forget delayed scaling's scales and histories."""
        for module in self.modules():
            if isinstance(module, Module):
                module.reset_fp8_meta_tensors()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor:
        """The layer; see `MultiheadAttention.forward` for the arguments.

        Args:
            hidden_states: (s, b, h), (b, s, h) or (t, h).
            encoder_output: what a decoder's second attention attends to; ``enc_dec_`` words are its masks.

        Returns:
            Of the same shape.
        """
        call = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(kind))
        attended = self._attended(hidden_states, call)
        if not self.parallel_attention_mlp:
            hidden_states = self._added(attended, hidden_states, self.drop_path)
        if self.layer_type == "decoder":
            hidden_states = self._added(self._attended_encoder(hidden_states, call), hidden_states, None)
        fed = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        if self.parallel_attention_mlp:
            fed = (attended + fed, None)
        output = self._added(fed, hidden_states, self.drop_path)
        return self.layernorm(output) if self.output_layernorm else output

    def _attended(self, x: Tensor, call: Any) -> Any:
        """Self-attention by the words of a call."""
        shared = {word: getattr(call, word) for word in _OF_CALL}
        below = call.bottom_right_diagonal
        return self.self_attention(
            x,
            attention_mask=call.attention_mask,
            attn_mask_type=call.self_attn_mask_type or self.self_attn_mask_type,
            window_size=self.window_size if call.window_size is None else call.window_size,
            bottom_right_diagonal=self.bottom_right_diagonal if below is None else below,
            cu_seqlens_kv=call.cu_seqlens_q,
            cu_seqlens_kv_padded=call.cu_seqlens_q_padded,
            **shared,
        )

    def _attended_encoder(self, x: Tensor, call: Any) -> Any:
        """Attention over the encoder's output by the words of a call."""
        shared = {word: getattr(call, word) for word in _OF_CALL}
        below, window = call.enc_dec_bottom_right_diagonal, call.enc_dec_window_size
        return self.inter_attention(
            x,
            attention_mask=call.enc_dec_attn_mask,
            attn_mask_type=call.enc_dec_attn_mask_type or self.enc_dec_attn_mask_type,
            window_size=self.enc_dec_window_size if window is None else window,
            bottom_right_diagonal=self.enc_dec_bottom_right_diagonal if below is None else below,
            encoder_output=call.encoder_output,
            cu_seqlens_kv=call.cu_seqlens_kv,
            cu_seqlens_kv_padded=call.cu_seqlens_kv_padded,
            **shared,
        )

    def _added(self, results: tuple[Any, ...], residual: Tensor, drop_path: DropPath | None) -> Tensor:
        """A branch's (y, bias) or (y, bias, norm's result), dropped out and added to the residual."""
        y, bias = results[:2]
        if len(results) == 3:
            residual = results[2]
        y = y if bias is None else y + bias
        y = F.dropout(y, self.hidden_dropout, self.training)
        return residual + (y if drop_path is None else drop_path(y))


def _check(words: Any) -> None:
    if words.layer_type not in ("encoder", "decoder"):
        raise BadInput(f"layer_type is 'encoder' or 'decoder', not {words.layer_type!r}.")
    apart = words.apply_residual_connection_post_layernorm or words.output_layernorm
    if words.parallel_attention_mlp and (words.layer_type != "encoder" or apart):
        raise BadInput(
            "parallel_attention_mlp goes with layer_type='encoder' alone: without "
            "apply_residual_connection_post_layernorm and output_layernorm."
        )
    if words.fuse_wgrad_accumulation and not words.fuse_qkv_params:
        raise BadInput("fuse_wgrad_accumulation needs fuse_qkv_params=True: one main_grad for one weight.")
