"""How far a fused model may be from its plain twin: derived in each comparison, from the plain one itself.

A percentage that serves every tensor of every model does not exist: what is a wrong gradient of one is the
rounding of another, whose sums cancel. So the plain model is computed twice more, and the bound on the
fused one's error follows from what these give:

    exact    a copy of the plain model in the next wider dtype (float32 for bfloat16, float64 for float32)
    noisy    that copy once more, where the output of each linear, norm and activation is multiplied by
             1 + u * z, and its gradient on the way back by 1 + u * z', with z in [-1, 1] afresh for every
             value and u half of the narrow dtype's epsilon: what one rounding of each tensor does (4 u for
             q, k and v: inside attention nothing can be shaken, and the softmax's gradient is a difference)

    |fused - exact|  <=  2 * |plain - exact|  +  4 * |noisy - exact|  +  2 * u * |exact|

in the Euclidean norm of each tensor by itself. The terms:

* 2 * |plain - exact|: two ways of computing in one dtype, which round as often, have errors of the same
  size; these are sums of many independent terms, so that their norms are about equal, not twice each other.
* 4 * |noisy - exact|: one way may round where the other does not (a sum that the fused way keeps in
  float32; a product under a branch that the plain way rounds by itself). Between two neighbours of the
  modules listed above there are at most some 16 roundings (of a linear under an adapter: the product, both
  of the branch's, its scaling, the sum, the bias, the residual; in attention the turned q and k, the scores,
  their softmax, the sum over values), and as they are independent, sixteen of them weigh as much as four.
  This term carries the condition of the model: a rounding that a softmax or a rounding to few bits enlarges
  is enlarged in the noisy copy just so. Where values are rounded to few bits (FP8 operands, packed caches,
  quantisation-aware training), a tiny change makes some values take the neighbouring code, a whole step of
  that format: it does so in the noisy copy at the same rate. With u of float32 that is one value in some
  100,000, so that of two passes over small tensors one may have such a step and the other none. There the
  noise is FLIPS at least, under which one value in a thousand takes the other code: a thousandth or so of a
  result in all, where another place of rounding makes a hundredth.
* 2 * u * |exact|: what is returned was rounded to the narrow dtype, by either way.

A loss has no norm over many values, and a single error may be small by accident. But a mean of token losses
may be wrong by what is wrong with a token's logits: its derivative by these is softmax - onehot, of norm
sqrt(2) at most, so that

    4 * sqrt(2) * rms(noisy logits - exact logits)

is added. A gradient may be zero by its formula (that of a query which sees one key): one way of computing
then gives zero and the other what is left of terms that cancel, u times the largest of all gradients at most.

The noise is one draw, and a result may lie just past the bound that it gives (one sequence in 120 did): then
eight further draws are made, and one of them has to explain it. A wrong factor is past all of them.

Where two results are the same to some 32 roundings of float32 nothing is left to be explained, and
the two passes are saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
NOISY_ENDS = ("_proj", "norm", "layernorm", "act_fn", "activation_fn", "embed_tokens", "lm_head", "self_attn")
FLOAT8_ROUNDOFF = 2.0**-4
FLIPS = 2.0**-14
GRADIENT = "gradient of "
INTO_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj")
Results = dict[str, Tensor]


def roundoff(dtype: torch.dtype, device: str = "cpu") -> float:
    """Half of the dtype's epsilon: the largest relative error of one rounding.

    A GPU may round the operands of float32 products to TensorFloat-32.
    """
    if device != "cpu" and dtype == torch.float32:
        return 2.0**-11
    return float(torch.finfo(dtype).eps) / 2


class _Noise(torch.autograd.Function):
    """Multiply by ``1 + u z``, and the gradient by another such factor; z is uniform in [-1, 1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, u: float, generator: torch.Generator) -> Tensor:
        ctx.u, ctx.generator = u, generator
        return _shaken(x, u, generator)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _shaken(dy, ctx.u, ctx.generator), None, None


def _shaken(x: Tensor, u: float, generator: torch.Generator) -> Tensor:
    z = torch.rand(x.shape, generator=generator, dtype=torch.float32) * 2 - 1
    return x * (1 + u * z.to(device=x.device, dtype=x.dtype))


def wider(model: Any, dtype: torch.dtype, padded: bool = False) -> Any:
    """A copy of a model of this dtype in the next wider one, weights that are packed as they are.

    Nothing is recomputed in its backward pass: that changes no number. ``padded`` leaves float32 as it is:
    transformers' float64 gives NaN for a token of the padding, which sees nothing. The plain model has no
    error then, and the bound is the noise's alone.
    """
    other: Any = copy.deepcopy(model)
    wide = torch.float32 if padded else WIDER[dtype]
    nn.Module._apply(other, lambda t: t.to(wide) if t.dtype in (dtype, torch.float32) and _is_value(t) else t)
    for module in other.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    other.zero_grad(set_to_none=True)
    return other


def _is_value(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def shake(model: Any, u: float, seed: int, head_u: float) -> Any:
    """Let a copy round as the text above says; ``head_u`` is the error of the head's own operands.

    Adapters' values move too: fake-quantised weights are rounded with them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "lora_" in path:
                p.copy_(_shaken(p, u, generator))

    def hook_of(size: float) -> Callable[..., Any]:
        def shaken(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (_Noise.apply(output[0], size, generator), *output[1:])
            return _Noise.apply(output, size, generator)

        return shaken

    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if leaf.endswith(NOISY_ENDS) and not hasattr(type(module), "original_module"):
            module.register_forward_hook(hook_of(4 * u if leaf in INTO_ATTENTION else u))
        if leaf == "lm_head" and head_u:
            size = hook_of(2 * head_u)  # x and W are rounded, and the logits' gradient
            module.register_forward_pre_hook(lambda m, args, size=size: (size(m, args, args[0]), *args[1:]))
            module.register_forward_hook(hook_of(2 * head_u))
    return model


def is_near(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same to 32 roundings of float32."""
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= 32 * roundoff(torch.float32) * b.norm())


def allowed(name: str, plain: Results, exact: Results, noisy: Results, u: float) -> float:
    """The bound on the norm of the fused result's error, for the tensor of this name."""
    of_exact = _flat(exact[name])
    spread = error_of(name, noisy, exact)
    if name.startswith(GRADIENT) and not of_exact.any():
        return u * max(float(_flat(t).norm()) for n, t in exact.items() if n.startswith(GRADIENT))
    bound = 2 * error_of(name, plain, exact) + 4 * spread + 2 * u * float(of_exact.norm())
    if of_exact.numel() == 1 and "logits" in exact:
        of_logits = error_of("logits", noisy, exact) / math.sqrt(max(1, exact["logits"].numel()))
        bound += 4 * math.sqrt(2) * of_logits * max(1.0, float(of_exact.norm()))
    return bound


def error_of(name: str, result: Results, exact: Results) -> float:
    """The norm of a result's error."""
    return float((_flat(result[name]) - _flat(exact[name])).norm())


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().double().nan_to_num().flatten()
