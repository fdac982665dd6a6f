"""`DotProductAttention`: softmax(q k^T) v by its definition, for all masks, layouts and biases.

Scores, softmax and sums are in float32; the result is rounded once. Where nothing but a causal mask is asked
for, torch's own fused attention computes it. With ``fp8_dpa`` in the recipe queries, keys, values, the
probabilities and the gradients that reach them are rounded by the recipe's quantisers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbits.errors import BadInput
from fewbits.te.attention.masks import (
    Visibility,
    default_slopes,
    diagonal_offset,
    hidden_scores,
    padding_of,
    relative_positions,
    visibility,
)
from fewbits.te.attention.over_ranks import by_ring, check_call, context_group, exchanges, shares_of_call
from fewbits.te.attention.rounded import Rounding, rounding
from fewbits.te.layers.module import Module, refuse
from fewbits.te.layers.recompute import checkpoint
from fewbits.te.ranks.distributed import group_size
from fewbits.te.support import default_device

_BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


@dataclass(frozen=True)
class _Call:
    """What one call of attention computes by, beside its tensors."""

    see: Visibility
    bias_type: str
    bias: Tensor | None
    slopes: Tensor | None
    rounding: Rounding | None


class DotProductAttention(Module):
    """Attention of queries over keys and values.

    Args:
        num_attention_heads: of queries.
        kv_channels: size of a head, or those of keys and of values.
        num_gqa_groups: heads of keys and values; None is as many as of queries.
        attention_dropout: probability of dropping a probability, while training.
        qkv_format: "sbhd", "bshd" or "thd" (packed sequences).
        attn_mask_type: one of `fewbits.te.attention.masks.MASK_TYPES`.
        window_size: (left, right) neighbours a query sees; -1 is any number.
        bottom_right_diagonal: whether the diagonal ends at the last query and key; None is by the mask.
        softmax_scale: multiplies scores; None is 1 / sqrt(size of a head).
        softmax_type: "vanilla", "off-by-one" (a score of 0 beside the others) or "learnable" (one a head).
        return_max_logit: return the largest score of each head too.
        tp_size: ranks that share the heads.
        cp_group: the ranks that share each sequence, see `fewbits.te.context.shares` for who has what.
        cp_comm_type: "p2p", keys and values go round a ring, or "a2a", ranks exchange rows for heads.

    The other arguments choose among Transformer Engine's kernels; they are taken and change nothing.
    """

    module_type = "dpa"

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name, num_products=3)
        heads = num_gqa_groups or num_attention_heads
        if num_attention_heads % heads or heads % tp_size:
            raise BadInput(
                f"{num_attention_heads} query heads, {heads} key heads and {tp_size} ranks do not "
                "divide evenly."
            )
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads // tp_size, heads // tp_size
        self.kv_channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.softmax_scale = softmax_scale if softmax_scale is not None else self.kv_channels[0] ** -0.5
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.bottom_right_diagonal, self.attention_type = bottom_right_diagonal, attention_type
        self.layer_number, self.return_max_logit = layer_number, return_max_logit
        self.get_rng_state_tracker, self.softmax_type = get_rng_state_tracker, softmax_type
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.softmax_offset: Any = None
        self._add_offset(softmax_type)

    def _add_offset(self, softmax_type: str) -> None:
        if softmax_type not in ("vanilla", "off-by-one", "learnable"):
            raise BadInput(f"softmax_type is 'vanilla', 'off-by-one' or 'learnable', not {softmax_type!r}.")
        zeros = torch.zeros(self.num_attention_heads, device=default_device(None), dtype=torch.float32)
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(zeros)
        elif softmax_type == "off-by-one":
            self.softmax_offset = zeros

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Which ranks share each sequence from now on, and how; None: each rank has whole sequences.

        Raises:
            Unsupported: two levels of ranks, or a ``cp_comm_type`` other than "p2p" and "a2a".
        """
        self.context = context_group(cp_group, cp_comm_type)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Any:
        """Attention.

        Args:
            query_layer: (s, b, h, d), (b, s, h, d) or (t, h, d), by the format; keys and values likewise.
            attention_mask: boolean, True where hidden; see `fewbits.te.attention.masks.hidden`.
            cu_seqlens_q: (b + 1,) cumulative lengths (of all ranks' tokens under context parallelism);
                keys' likewise.
            cu_seqlens_q_padded: (b + 1,) where packed sequences begin, if there is padding between them.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: broadcasts to (b, h, s_q, s_kv).
            alibi_slopes: (h,) or (b, h) float32.
            checkpoint_core_attention: compute all again in the backward pass.
            inference_params: a cache of keys and values, see `InferenceParams`.
            qkv_layer: queries, keys and values in one tensor, along axis ``qkv_interleave_dim``.

        Returns:
            (s, b, h * d), (b, s, h * d) or (t, h * d); with ``return_max_logit`` the largest score of each
            head, (h,), beside it.
        """
        return self._run(SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"}))

    def _run(self, words: Any) -> Any:
        """Attention by the words of a call."""
        refuse(
            words.score_mod is not None or words.score_mod_bprop is not None,
            "score_mod",
            "give the scores' change as core_attention_bias",
        )
        layers = (words.query_layer, words.key_layer, words.value_layer)
        q, k, v = _unpacked(layers, words.qkv_layer, words.kv_layer, words.qkv_interleave_dim)
        layout, kind = words.qkv_format or self.qkv_format, words.attn_mask_type or self.attn_mask_type
        lengths = (
            words.cu_seqlens_q,
            words.cu_seqlens_kv,
            words.cu_seqlens_q_padded,
            words.cu_seqlens_kv_padded,
        )
        if words.inference_params is not None:
            layout, k, v, cu = words.inference_params.step_attention(self.layer_number, k, v, layout)
            lengths = (*cu, None, None)
            kind = "padding_causal_bottom_right" if "causal" in kind else "padding"
        below, window = words.bottom_right_diagonal, words.window_size
        see = visibility(
            kind,
            self.window_size if window is None else window,
            self.bottom_right_diagonal if below is None else below,
        )
        bias_type = words.core_attention_bias_type
        if bias_type not in _BIAS_TYPES:
            raise BadInput(f"core_attention_bias_type is one of {', '.join(_BIAS_TYPES)}, not {bias_type!r}.")
        rounded = rounding(self, self.numerics(), q.device)
        call = _Call(see, bias_type, words.core_attention_bias, words.alibi_slopes, rounded)
        run = self._packed if layout.startswith("thd") else self._batched
        if self.context is not None:
            run = self._over_ranks
        arguments = (q, k, v, layout, words.attention_mask, lengths, call)
        if words.checkpoint_core_attention and torch.is_grad_enabled():
            y, largest = checkpoint(run, *arguments)
        else:
            y, largest = run(*arguments)
        return (y, largest) if self.return_max_logit else y

    def _over_ranks(
        self, q: Tensor, k: Tensor, v: Tensor, layout: str, mask: Any, lengths: tuple[Any, ...], call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        """Of sequences that several ranks share: this rank's rows."""
        context, see = self.context, call.see
        assert context is not None
        extras = {
            "a bias of scores": call.bias_type != "no_bias",
            "softmax_type": self.softmax_offset is not None,
            "return_max_logit": bool(self.return_max_logit),
            "FP8 attention": call.rounding is not None,
            "an attention mask": mask is not None,
        }
        drops = self.training and self.attention_dropout > 0.0
        check_call(context, see, extras, {"attention_dropout": drops})
        is_packed, is_sbhd = layout.startswith("thd"), layout.startswith("sbhd")
        if is_packed:
            heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
        else:
            heads_first = [t.permute(1, 2, 0, 3) if is_sbhd else t.transpose(1, 2) for t in (q, k, v)]
        q, k, v = heads_first
        rows, ranks = (q.shape[2], k.shape[2]), group_size(context.group)
        shares = shares_of_call(rows, lengths if is_packed else None, ranks, see.is_causal)
        if context.kind == "p2p":
            y = by_ring((q, k, v), shares, context, see.is_causal, self.softmax_scale)
        else:
            before, after = exchanges(shares, rows, context)
            q, k, v = before(q, k, v)
            if is_packed:
                q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
                flat, _ = self._packed(q, k, v, layout, None, lengths, call)
                y = after(flat.view(*q.shape[:2], -1).transpose(0, 1)[None])
            else:
                y = after(self._attend(q, k, v, None, call)[0])
        if is_packed:
            return y[0].transpose(0, 1).flatten(1), None
        y = y.permute(2, 0, 1, 3) if is_sbhd else y.transpose(1, 2)
        return y.flatten(2), None

    def _batched(
        self, q: Tensor, k: Tensor, v: Tensor, layout: str, mask: Any, lengths: tuple[Any, ...], call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        """Sequences of one length, with or without padding."""
        kv_layout = layout.partition("_")[2] or layout
        q = q.permute(1, 2, 0, 3) if layout.startswith("sbhd") else q.transpose(1, 2)
        k, v = (t.permute(1, 2, 0, 3) if kv_layout.endswith("sbhd") else t.transpose(1, 2) for t in (k, v))
        if call.see.is_padded and mask is None and lengths[0] is not None:
            kv = lengths[1] if lengths[1] is not None else lengths[0]
            mask = (padding_of(lengths[0], q.shape[2]), padding_of(kv, k.shape[2]))
        y, largest = self._attend(q, k, v, mask, call)
        y = y.permute(2, 0, 1, 3) if layout.startswith("sbhd") else y.transpose(1, 2)
        return y.reshape(*y.shape[:2], -1), largest

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: str, mask: Any, lengths: tuple[Any, ...], call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        """Sequences end to end, one at a time; what lies between them comes out as zeros."""
        cu_q, cu_kv, padded_q, padded_kv = (None if c is None else c.tolist() for c in lengths)
        if cu_q is None:
            raise BadInput("qkv_format 'thd' needs cu_seqlens_q: where each packed sequence begins and ends.")
        cu_kv, padded_q = cu_kv or cu_q, padded_q or cu_q
        padded_kv = padded_kv or cu_kv
        kind = call.see.kind.replace("padding_", "").replace("padding", "no_mask")
        see = Visibility(kind, call.see.window, call.see.bottom_right)
        y = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
        rows: list[Tensor] = []
        largest: Tensor | None = None
        for i in range(len(cu_q) - 1):
            n_q, n_kv = cu_q[i + 1] - cu_q[i], cu_kv[i + 1] - cu_kv[i]
            begin, begin_kv = padded_q[i], padded_kv[i]
            keys = [
                t[i, :n_kv] if layout.endswith("2bshd") else t[begin_kv : begin_kv + n_kv] for t in (k, v)
            ]
            if n_q == 0:
                continue
            piece = [t.transpose(0, 1)[None] for t in (q[begin : begin + n_q], *keys)]
            slopes = call.slopes[i] if call.slopes is not None and call.slopes.dim() == 2 else call.slopes
            one = _Call(see, call.bias_type, call.bias, slopes, call.rounding)
            out, top = self._attend(piece[0], piece[1], piece[2], None, one)
            rows.append(torch.arange(begin, begin + n_q, device=q.device))
            y = y.index_copy(0, rows[-1], out[0].transpose(0, 1).to(y.dtype))
            largest = top if largest is None or top is None else torch.maximum(largest, top)
        return y.reshape(y.shape[0], -1), largest

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        """q (b, h, s_q, d), k and v (b, g, s_kv, d): (b, h, s_q, d_v) and the largest scores."""
        if k.shape[1] != q.shape[1]:
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        if call.rounding is not None:
            q, k, v = call.rounding.operands(q, k, v)
        see = call.see
        simple = (
            see.kind in ("no_mask", "causal") and see.window[0] < 0 and (see.is_causal or see.window[1] < 0)
        )
        plain = call.bias_type == "no_bias" and self.softmax_offset is None and not self.return_max_logit
        drop = self.attention_dropout if self.training else 0.0
        if simple and plain and call.rounding is None and drop == 0.0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=see.is_causal, scale=self.softmax_scale)
            return y, None
        return self._by_definition(q, k, v, mask, call, drop)

    def _by_definition(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, call: _Call, drop: float
    ) -> tuple[Tensor, Tensor | None]:
        sizes = (q.shape[0], q.shape[2], k.shape[2])
        hidden = hidden_scores(call.see, mask, sizes, q.device)
        scores = q.float() @ k.float().transpose(-1, -2)
        offset = diagonal_offset(call.see, mask, sizes, q.device)
        scores = _biased(scores, self.softmax_scale, call, offset)
        largest = None
        if self.return_max_logit:
            masked = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
            largest = masked.amax(dim=(0, 2, 3)).to(q.dtype)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if self.softmax_offset is not None:
            offset = self.softmax_offset.float().view(1, -1, 1, 1)
            offset = offset.expand(scores.shape[0], -1, scores.shape[2], -1)
            scores = torch.cat((scores, offset), -1)
        if hidden is not None:  # a row that sees nothing: its softmax would be 0 / 0
            blind = torch.isneginf(scores).all(-1, keepdim=True)
            scores = scores.masked_fill(blind, 0.0)
        probabilities = scores.softmax(-1)
        if self.softmax_offset is not None:
            probabilities = probabilities[..., :-1]
        if hidden is not None:
            probabilities = probabilities.masked_fill(hidden, 0.0)
        with self.get_rng_state_tracker().fork() if self.get_rng_state_tracker and drop else nullcontext():
            probabilities = F.dropout(probabilities, drop, self.training)
        if call.rounding is not None:
            probabilities = call.rounding.probabilities(probabilities)
        return (probabilities @ v.float()).to(q.dtype), largest


def _biased(scores: Tensor, scale: float, call: _Call, offset: Tensor) -> Tensor:
    """Scaled scores (b, h, s_q, s_kv) with the bias that the call asks for; see `diagonal_offset`."""
    if call.bias_type == "alibi":
        _, h, s_q, s_kv = scores.shape
        slopes = default_slopes(h, scores.device) if call.slopes is None else call.slopes.float()
        distance = relative_positions(s_q, s_kv, offset).abs()
        return scores * scale - slopes.view(-1, h, 1, 1) * distance
    if call.bias_type == "no_bias":
        return scores * scale
    if call.bias is None:
        raise BadInput(f"core_attention_bias_type {call.bias_type!r} needs core_attention_bias.")
    bias = call.bias.float()
    return (scores + bias) * scale if call.bias_type == "pre_scale_bias" else scores * scale + bias


def _unpacked(
    layers: tuple[Tensor | None, ...], qkv: Tensor | None, kv: Tensor | None, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, from three tensors or from packed ones."""
    q, k, v = layers
    if qkv is not None:
        q, k, v = qkv.unbind(axis)
    elif kv is not None:
        k, v = kv.unbind(axis)
    if q is None or k is None or v is None:
        raise BadInput("attention needs queries, keys and values: three tensors, or qkv_layer, or kv_layer.")
    return q, k, v
