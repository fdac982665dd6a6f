"""The definition behind the parity check: a decoder with LoRA in plain torch, a function of its tensors.

It calls no model class, because peers replace those. In float32 it is the exact result; with a `rounding` it
is the same formula in bfloat16, or with the operands of the base's products rounded to FP8, and says how
large an error that precision itself makes.

Shapes: B sequences, T tokens, D hidden, H heads, G key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fewbits.errors import Unsupported
from fewbits.families.catalog import LLAMA
from fewbits.families.registry import family_of, known_families, model_type_of, written_spec
from fewbits.families.spec import ModelSpec

_HEAD_ROWS = 2048


class Adapter(NamedTuple):
    """One LoRA branch: ``y += scaling * x A^T B^T``."""

    a: Tensor  # (r, K)
    b: Tensor  # (N, r)
    scaling: float


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The tensors of a decoder, by their names in transformers (without ``model.``), and its facts."""

    tensors: Mapping[str, Tensor]
    adapters: Mapping[str, Adapter]
    num_layers: int
    head_dim: int
    eps: float
    inverse_frequencies: Tensor
    rope_scaling: float
    padding_id: int | None = None  # this token's embedding gets no gradient

    def to(self, dtype: torch.dtype) -> Decoder:
        """The same with leaves of another dtype that require gradients where these do; ties stay."""
        copies: dict[int, Tensor] = {}

        def leaf(t: Tensor) -> Tensor:
            if id(t) not in copies:
                copies[id(t)] = t.detach().to(dtype).requires_grad_(t.requires_grad)
            return copies[id(t)]

        return replace(
            self,
            tensors={name: leaf(t) for name, t in self.tensors.items()},
            adapters={n: Adapter(leaf(x.a), leaf(x.b), x.scaling) for n, x in self.adapters.items()},
        )

    def trained(self) -> dict[str, Tensor]:
        """The tensors, of any shape, that get a gradient; an adapter's are ``<name>.lora_A`` and ``.lora_B``.

        A tied head is not there a second time.
        """
        named = dict(self.tensors)
        for name, adapter in self.adapters.items():
            named |= {f"{name}.lora_A": adapter.a, f"{name}.lora_B": adapter.b}
        unique = {id(t): name for name, t in reversed(named.items()) if t.requires_grad}
        return {name: named[name] for name in reversed(unique.values())}


def rope_of(config: Any, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies (D / 2,) and the factor on cosine and sine."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not _is_defined(written_spec(config)):
        defined = [name for name in known_families() if _is_defined(family_of(name))]
        raise Unsupported(
            f"the parity check has no definition of {model_type_of(config)!r}, and no speed goes without it: "
            f"choose a shape of {', '.join(defined)}."
        )
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
        return frequencies.float(), float(scaling)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def _is_defined(spec: ModelSpec | None) -> bool:
    """Whether `token_losses` computes what this family does: Llama's layers, with norms of heads at most."""
    if spec is None:
        return False
    norm = replace(spec.norm, query=None, key=None)
    same = (norm, spec.mlp, spec.experts, spec.other_linears) == (LLAMA.norm, LLAMA.mlp, None, ())
    window = spec.attention is not None and replace(spec.attention, window="layer") == LLAMA.attention
    ends = (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_divisor, spec.logits_multiplier)
    return same and window and spec.logits_soft_cap is None and not any(ends) and not spec.generic


def token_losses(decoder: Decoder, ids_BT: Tensor, rounding: str | None = None) -> Tensor:
    """The loss of every token but the first of each sequence, float32 (B, T - 1).

    Args:
        decoder: its tensors all of one dtype.
        ids_BT: tokens, which are also the labels.
        rounding: None or "bf16": the dtype's own arithmetic; "fp8_row", "fp8_tensor": the products with
            the layers' base weights take operands rounded to FP8, with "fp8_row_head" the head's too.
    """
    is_head, rounding = rounding == "fp8_row_head", "fp8_row" if rounding == "fp8_row_head" else rounding
    mode = rounding if rounding in ("fp8_row", "fp8_tensor") else None
    weights = decoder.tensors
    x = F.embedding(ids_BT, weights["embed_tokens.weight"], decoder.padding_id)
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    angles = torch.outer(positions.float(), decoder.inverse_frequencies).repeat(1, 2)
    cos, sin = ((f(angles) * decoder.rope_scaling).to(x.dtype) for f in (torch.cos, torch.sin))
    for i in range(decoder.num_layers):
        x = _layer(decoder, f"layers.{i}", x, (cos, sin), mode)
    x = _rmsnorm(x, weights["norm.weight"], decoder.eps)[:, :-1].flatten(0, 1)
    labels, head = ids_BT[:, 1:].flatten(), weights["lm_head.weight"]
    pieces = [
        checkpoint(
            _head_losses,
            x[i : i + _HEAD_ROWS],
            head,
            labels[i : i + _HEAD_ROWS],
            mode if is_head else None,
            use_reentrant=False,
        )
        for i in range(0, len(x), _HEAD_ROWS)
    ]
    return torch.cat(pieces).view(ids_BT.shape[0], -1)  # type: ignore[arg-type]


def _head_losses(x: Tensor, head: Tensor, labels: Tensor, mode: str | None) -> Tensor:
    z = F.linear(x, head) if mode is None else _RoundedLinear.apply(x, head, mode)
    return F.cross_entropy(z.float(), labels, reduction="none")


def _layer(decoder: Decoder, name: str, x: Tensor, rope: tuple[Tensor, Tensor], mode: str | None) -> Tensor:
    weights, eps = decoder.tensors, decoder.eps
    h = _rmsnorm(x, weights[f"{name}.input_layernorm.weight"], eps)
    x = x + _attention(decoder, f"{name}.self_attn", h, rope, mode)
    h = _rmsnorm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
    gate = _linear(decoder, f"{name}.mlp.gate_proj", h, mode)
    up = _linear(decoder, f"{name}.mlp.up_proj", h, mode)
    return x + _linear(decoder, f"{name}.mlp.down_proj", F.silu(gate) * up, mode)


def _attention(
    decoder: Decoder, name: str, h: Tensor, rope: tuple[Tensor, Tensor], mode: str | None
) -> Tensor:
    B, T, _ = h.shape
    q, k, v = (_linear(decoder, f"{name}.{p}_proj", h, mode).view(B, T, -1, decoder.head_dim) for p in "qkv")
    if f"{name}.q_norm.weight" in decoder.tensors:
        q = _rmsnorm(q, decoder.tensors[f"{name}.q_norm.weight"], decoder.eps)
        k = _rmsnorm(k, decoder.tensors[f"{name}.k_norm.weight"], decoder.eps)
    q, k, v = (t.transpose(1, 2) for t in (_rotate(q, rope), _rotate(k, rope), v))
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _linear(decoder, f"{name}.o_proj", out.transpose(1, 2).reshape(B, T, -1), mode)


def _rotate(x_BTHE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t[None, :, None] for t in rope)
    low, high = x_BTHE.chunk(2, -1)
    return x_BTHE * cos + torch.cat((-high, low), -1) * sin


def _rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return w * normed.to(x.dtype)


def _linear(decoder: Decoder, name: str, x: Tensor, mode: str | None) -> Tensor:
    w, bias = decoder.tensors[f"{name}.weight"], decoder.tensors.get(f"{name}.bias")
    y = F.linear(x, w, bias) if mode is None else _RoundedLinear.apply(x, w, mode)
    if mode is not None and bias is not None:
        y = y + bias
    adapter = decoder.adapters.get(name)
    if adapter is not None:
        y = y + F.linear(F.linear(x, adapter.a), adapter.b) * adapter.scaling
    return y  # type: ignore[no-any-return]


class _RoundedLinear(torch.autograd.Function):
    """``y = q(x) q(w)^T``, ``dx = q(dy) q(w)``, ``dw = q(dy)^T q(x)``, with q rounding to FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, mode: str) -> Tensor:
        x, w = _rounded(x, mode), _rounded(w, mode)
        ctx.save_for_backward(x, w)
        ctx.mode = mode
        return F.linear(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, w = ctx.saved_tensors
        _needs_dx, needs_dw, _mode = ctx.needs_input_grad
        dy = _rounded(dy, ctx.mode, gradient=True)
        dw = dy.flatten(0, -2).t() @ x.flatten(0, -2) if needs_dw else None
        return dy @ w, dw, None


def _rounded(t: Tensor, mode: str, *, gradient: bool = False) -> Tensor:
    """To E4M3 with a scale for each row, or (fp8_tensor) one scale, gradients then E5M2; and back."""
    dtype = torch.float8_e5m2 if gradient and mode == "fp8_tensor" else torch.float8_e4m3fn
    largest = t.detach().abs()
    largest = largest.amax() if mode == "fp8_tensor" else largest.amax(-1, keepdim=True)
    scale = largest.float().clamp_min(1e-12) / torch.finfo(dtype).max
    return ((t.float() / scale).to(dtype).float() * scale).to(t.dtype)
