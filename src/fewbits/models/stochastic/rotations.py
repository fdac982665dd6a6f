"""Rotations folded into a model's weights: what products multiply changes, what the model computes does not.

    values      V'[g] = V[g] H and o' = o H by heads     H: the Hadamard matrix of the head's size
    residual    x' = x R at every place between layers   R: that of the hidden size, with random signs

A Hadamard matrix, divided by the root of its size, is orthogonal and has entries of one magnitude, so every
rotated channel is a mixture of all: channels of outlying size, which make the scale of a row or chunk large
and the codes of the others small, are spread out. Products that quantise their operands gain by that.

The residual stream may be rotated because an RMSNorm without a weight commutes with a rotation: the norms'
weights are first multiplied into the linears behind them. That holds for layers whose norms stand before each
half and nowhere else on the stream. A head that is tied to the embedding is untied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewbits.errors import Unsupported
from fewbits.families.spec import ModelSpec
from fewbits.host.conversion import conversion_of
from fewbits.host.spec import layer_names, locate, spec_for
from fewbits.models.packing.packed_head import untie

_CORES = (12, 20, 44)  # one more than a prime that leaves 3 when divided by 4


def hadamard(size: int) -> Tensor | None:
    """An orthogonal matrix (size, size) float64 of entries of one magnitude; None where none is known here.

    Known are powers of two, and 12, 20 or 44 times one (Sylvester's doubling, Paley's first construction).
    """
    core, doublings = size, 0
    while core % 2 == 0 and core not in _CORES:
        core, doublings = core // 2, doublings + 1
    if core == 1:
        matrix = torch.ones(1, 1, dtype=torch.float64)
    elif core in _CORES:
        matrix = _paley(core - 1)
    else:
        return None
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    for _ in range(doublings):
        matrix = torch.kron(pair, matrix)
    scaled: Tensor = matrix / size**0.5
    return scaled


def _paley(prime: int) -> Tensor:
    """The Hadamard matrix of ``prime + 1`` rows, for a prime that leaves 3 when divided by 4."""
    squares = {x * x % prime for x in range(1, prime)}
    residue = torch.tensor(
        [0.0, *(1.0 if x in squares else -1.0 for x in range(1, prime))], dtype=torch.float64
    )
    index = torch.arange(prime)
    skew = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    skew[1:, 1:] = residue[(index[None] - index[:, None]) % prime]
    return skew + torch.eye(prime + 1, dtype=torch.float64)


@torch.no_grad()
def rotate_values(model: nn.Module) -> None:
    """Rotate each head's values, and back in the projection behind the attention; in place.

    Args:
        model: a Hugging Face model of a known family, in its original form.

    Raises:
        Unsupported: the model is converted, has no linear of its own for values, or heads of a size without
            a Hadamard matrix.
    """
    spec = _spec_of(model)
    attention = spec.attention
    if attention is None or attention.extras or len(attention.inputs) != 3:
        raise Unsupported(f"{spec.model_type} has no linear of its own for values; leave them as they are.")
    layers = list(layer_names(model, spec))
    value, output = attention.inputs[2], attention.output
    pairs = [(_linear(model, f"{name}.{value}"), _linear(model, f"{name}.{output}")) for name in layers]
    config: Any = model.config
    heads = int(config.get_text_config().num_key_value_heads)
    turns = [_matrix(v.out_features // heads, "heads") for v, _ in pairs]
    for (v, o), turn in zip(pairs, turns, strict=True):
        _turn_outputs(v, turn)
        _turn_inputs(o, turn)


@torch.no_grad()
def rotate_residual(model: nn.Module, *, seed: int = 0) -> None:
    """Rotate the residual stream: embedding, norms, all linears and the head; in place.

    Args:
        model: a Hugging Face model of a known family, in its original form.
        seed: of the signs that the rows of the Hadamard matrix have.

    Raises:
        Unsupported: the model is converted, has experts, norms elsewhere than before each half or other than
            RMSNorm, or a hidden size without a Hadamard matrix.
    """
    spec = _spec_of(model)
    attention, mlp, norm = spec.attention, spec.mlp, spec.norm
    if (
        attention is None
        or mlp is None
        or attention.extras
        or spec.experts
        or spec.other_linears
        or spec.towers
    ):
        raise Unsupported(
            f"{spec.model_type} has more on its residual stream than attention and MLP; leave it."
        )
    if norm.layout != "pre" or norm.kind != "rms" or spec.final_norm is None:
        raise Unsupported(
            f"{spec.model_type} has norms that do not commute with a rotation of the stream; leave it."
        )
    embed: Any = model.get_submodule(locate(model, spec, spec.embed))
    hidden = embed.weight.shape[1]
    signs = torch.randint(0, 2, (hidden,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    turn = _matrix(hidden, "hidden states") * signs[:, None]
    halves = ((norm.before_attention, attention.inputs), (norm.before_mlp, mlp.inputs))
    into: list[tuple[Any, list[nn.Linear]]] = []
    out: list[nn.Linear] = []
    for layer in layer_names(model, spec):
        for before, paths in halves:
            linears = [_linear(model, f"{layer}.{path}") for path in paths]
            into.append((model.get_submodule(f"{layer}.{before}"), linears))
        out += [_linear(model, f"{layer}.{path}") for path in (attention.output, mlp.output)]
    head = _untied_head(model, spec, embed)
    into.append((model.get_submodule(locate(model, spec, spec.final_norm)), [head]))
    for before, linears in into:
        for linear in linears:
            linear.weight.copy_(linear.weight.double() * (before.weight.double() + norm.offset))
            _turn_inputs(linear, turn)
        before.weight.fill_(1.0 - norm.offset)
    for linear in out:
        _turn_outputs(linear, turn)
    embed.weight.copy_(embed.weight.double() @ turn.to(embed.weight.device))


def _spec_of(model: nn.Module) -> ModelSpec:
    if conversion_of(model) is not None:
        raise Unsupported("this model is converted already; rotate its original form.")
    spec = spec_for(model)
    if spec.generic:
        raise Unsupported(f"{spec.without_spec}, so that what may be rotated is not known; leave it.")
    return spec


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    if not isinstance(linear, nn.Linear):
        raise Unsupported(f"{name} is no plain linear; merge adapters first.")
    return linear


def _matrix(size: int, what: str) -> Tensor:
    matrix = hadamard(size)
    if matrix is None:
        raise Unsupported(
            f"no Hadamard matrix is known here for {what} of {size} values; it must be a power of two, or "
            "12, 20 or 44 times one."
        )
    return matrix


def _turn_outputs(linear: nn.Linear, turn: Tensor) -> None:
    """y becomes y turn, in every stretch of turn's size."""
    turn = turn.to(linear.weight.device)
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            rows = parameter.double().reshape(-1, len(turn), parameter[0].numel())
            parameter.copy_((turn.t() @ rows).reshape(parameter.shape))


def _turn_inputs(linear: nn.Linear, turn: Tensor) -> None:
    """y stays what it is for x turn in place of x."""
    turn = turn.to(linear.weight.device)
    columns = linear.weight.double().reshape(linear.out_features, -1, len(turn))
    linear.weight.copy_((columns @ turn).reshape(linear.weight.shape))


def _untied_head(model: nn.Module, spec: ModelSpec, embed: nn.Module) -> nn.Linear:
    """The head, with a weight of its own."""
    name = locate(model, spec, spec.head)
    head = _linear(model, name)
    if head.weight is embed.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        untie(model, name)
    return head
