"""Is a configuration right? Loss and gradients of its first layers beside float32, before anything is timed.

The model that will be timed is cut to its first layers, all else (its kernels, its compiled blocks, the
shape of the batch) as it will be. Loss and gradients of every trained tensor in them are compared with
`reference` in float32 on the same weights, dequantised. LoRA's B, zero at first, gets random values for
this, or the gradient of A would be zero.

How far may they be off? As far as the precision itself is: `reference` runs a second time, in bfloat16 or
with operands rounded to FP8 as the configuration rounds them. A tensor's gradient may be off by twice that
error (relative, Frobenius norm; at least 2**-8, one rounding to bfloat16), the mean loss by the mean
absolute error of the tokens' losses. A NaN never passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewbits.bench.measure import relative_error
from fewbits.bench.train.reference import Adapter, Decoder, rope_of, token_losses
from fewbits.host.unwrap import unwrap
from fewbits.nn.linear import QuantizedLinear

_TIMES, _LEAST = 2.0, 2.0**-8
_B_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What the check found.

    Attributes:
        layers: how many were compared.
        loss: of the configuration.
        exact_loss: of the reference in float32.
        loss_error, loss_tolerance: absolute, in nats.
        gradient_error: the largest relative error of a gradient ...
        gradient_tolerance: ... and what that tensor was allowed.
        worst: the tensor that came closest to what it is allowed, or passed it by most.
        failures: a sentence for each that is off by too much.
    """

    layers: int
    loss: float
    exact_loss: float
    loss_error: float
    loss_tolerance: float
    gradient_error: float
    gradient_tolerance: float
    worst: str
    failures: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def check(
    model: nn.Module,
    ids: Tensor,
    step: Any,
    *,
    rounding: str,
    layers: int = 2,
    history: Sequence[Tensor] = (),
) -> Parity:
    """Compare the first ``layers`` of ``model``; weights stay what they were, without gradients.

    ``ids`` are (B, S) int64, ``history`` the tokens of earlier steps, each (B, S).

    Args:
        model: as it will be timed, in training mode.
        ids: one batch of tokens.
        step: runs forward and backward of ``model`` on a batch and gives its loss.
        rounding: see `Configuration.rounding`.
        layers: how many.
        history: batches that pass before, for scales that are known from earlier steps.
    """
    base = unwrap(model)
    inner = base.model
    every, config = inner.layers, base.config
    depth = config.num_hidden_layers
    inner.layers = nn.ModuleList(list(every)[:layers])
    config.num_hidden_layers = len(inner.layers)
    try:
        named = _adapters(inner)
        _fill_b(named)
        for earlier in history:
            step(earlier)
            _forget(model)
        loss = float(step(ids))
        leaves = _leaves(base, named)
        gradients = {name: p.grad for name, p in leaves.items()}
        exact = _decoder(base, named)
    finally:
        inner.layers, config.num_hidden_layers = every, depth
    _forget(model)
    with torch.no_grad():
        for adapter in named.values():
            adapter.b.zero_()
    return _compare(exact, gradients, loss, ids, rounding)


def _forget(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def dense(linear: Any) -> Tensor:
    """The weight (N, K) that a linear multiplies by, float32."""
    base = getattr(linear, "base_layer", linear)
    if isinstance(base, QuantizedLinear):
        return base.dequantize(torch.float32)
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return base.weight.detach().float()  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(base.weight.detach(), state).float()  # type: ignore[no-any-return]


def _adapters(inner: Any) -> dict[str, Adapter]:
    """The adapters of a decoder, the very parameters."""
    adapters = {}
    for name, module in inner.named_modules():
        a, b = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        if a is None or b is None or "default" not in a:
            continue
        adapters[name] = Adapter(a["default"].weight, b["default"].weight, float(module.scaling["default"]))
    return adapters


def _fill_b(named: dict[str, Adapter]) -> None:
    """The same values for every configuration, whatever the order in which it has its modules."""
    with torch.no_grad():
        for i, name in enumerate(sorted(named)):
            b = named[name].b
            generator = torch.Generator().manual_seed(i)
            b.copy_(torch.randn(b.shape, generator=generator, dtype=torch.float32) * _B_STD)


def _leaves(base: nn.Module, named: dict[str, Adapter]) -> dict[str, Tensor]:
    """The trained parameters of the cut model, by the names of `Decoder.trained`."""
    leaves: dict[str, Tensor] = {}
    for name, adapter in named.items():
        leaves |= {f"{name}.lora_A": adapter.a, f"{name}.lora_B": adapter.b}
    for name, p in base.named_parameters():
        if p.requires_grad and ".lora_" not in name:
            leaves[name.removeprefix("model.")] = p
    return leaves


def _decoder(base: Any, named: dict[str, Adapter]) -> Decoder:
    """The reference's tensors in float32."""
    inner, config = base.model, base.config
    tensors: dict[str, Tensor] = {}

    def put(name: str, value: Tensor, like: Any) -> None:
        tensors[name] = value.detach().float().clone().requires_grad_(bool(like.requires_grad))

    for name, module in inner.named_modules():
        weight = getattr(getattr(module, "base_layer", module), "weight", None)
        plain = not name.endswith((".base_layer", ".default")) and ".lora_" not in name
        if plain and isinstance(getattr(module, "base_layer", module), QuantizedLinear):
            tensors[f"{name}.weight"] = dense(module)
        elif plain and weight is not None:
            put(f"{name}.weight", dense(module), weight)
        bias = getattr(getattr(module, "base_layer", module), "bias", None)
        if plain and isinstance(bias, Tensor):
            put(f"{name}.bias", bias, bias)
    head = base.get_output_embeddings().weight
    tied = head is inner.embed_tokens.weight
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    else:
        put("lm_head.weight", head, head)
    adapters = {name: Adapter(_leaf(x.a), _leaf(x.b), x.scaling) for name, x in named.items()}
    frequencies, scaling = rope_of(config, head.device)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Decoder(
        tensors=tensors,
        adapters=adapters,
        num_layers=len(inner.layers),
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        inverse_frequencies=frequencies,
        rope_scaling=scaling,
        padding_id=getattr(inner.embed_tokens, "padding_idx", None),
    )


def _leaf(t: Tensor) -> Tensor:
    return t.detach().float().clone().requires_grad_()


def _run(decoder: Decoder, ids: Tensor, rounding: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The tokens' losses, and the gradients of the mean loss."""
    losses, tokens = [], ids[:, 1:].numel()
    for row in ids.split(1):  # one sequence at a time, for memory
        loss = token_losses(decoder, row, rounding)
        (loss.sum() / tokens).backward()
        losses.append(loss.detach().flatten())
    return torch.cat(losses), {n: t.grad for n, t in decoder.trained().items() if t.grad is not None}


def _compare(
    exact: Decoder, gradients: dict[str, Tensor | None], loss: float, ids: Tensor, rounding: str
) -> Parity:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(ids.device.type, enabled=False):
            want_losses, want = _run(exact, ids, None)
            own_losses, own = _run(exact.to(torch.bfloat16), ids, rounding)
    finally:
        torch.set_float32_matmul_precision(precision)
    exact_loss = float(want_losses.mean())
    loss_error, loss_tolerance = abs(loss - exact_loss), float((own_losses - want_losses).abs().mean())
    failures = []
    if not loss_error <= loss_tolerance:
        failures.append(
            f"its loss is {loss:.5f} and exact is {exact_loss:.5f}, off by more than {loss_tolerance:.1g}"
        )
    worst = ("", 0.0, _LEAST)
    for name, gradient in want.items():
        have = gradients.get(name)
        error = math.inf if have is None else relative_error(have, gradient)
        allowed = _TIMES * max(relative_error(own[name], gradient), _LEAST)
        if not error <= allowed:
            failures.append(f"its gradient of {name} is off by {error:.2g}, more than {allowed:.2g}")
        if not error / allowed <= worst[1] / worst[2]:
            worst = (name, error, allowed)
    return Parity(
        layers=exact.num_layers,
        loss=loss,
        exact_loss=exact_loss,
        loss_error=loss_error,
        loss_tolerance=loss_tolerance,
        gradient_error=worst[1],
        gradient_tolerance=worst[2],
        worst=worst[0],
        failures=tuple(failures),
    )
