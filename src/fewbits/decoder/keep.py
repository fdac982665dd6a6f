"""What one decoder layer keeps from its forward pass for its backward pass, and what it computes again.

Under a memory budget `fewbits.models.plan.memory_plan` chooses for each layer; else `keep_for` says
what the words of ``use_gradient_checkpointing`` mean (`fewbits.models.adapting.checkpointed_layers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.errors import BadInput


@dataclass(frozen=True)
class Keep:
    """The choice for one layer; the numbers that come out are the same for every choice.

    The layer's two inputs (x, and the residual between attention and MLP) are always kept, on the device or
    in host memory.

    Attributes:
        attention: the product of q, k and v (after the rotation), the attention's output and its statistics.
            False: the norm, the qkv product and the attention's forward pass run again; the o product does
            not.
        mlp: the gate_up product. False: the norm and the gate_up product run again; the down product does
            not.
        normed: the outputs of both norms, where a weight trains, whose gradient is made from them (that of
            a LoRA branch is made from their inputs). False: they are made again from the input and 1/rms,
            one pass over memory each. With float8 products and weights that train also these weights'
            transposed values, which are otherwise made from the weights again.
        offload: the two inputs wait in pinned host memory (`fewbits.decoder.offload`) for the backward pass.
        weights: values of frozen weights as the products take them stay from step to step: decoded, and in
            float8 transposed as well. False: they are made anew in each pass.
    """

    attention: bool = True
    mlp: bool = True
    normed: bool = False
    offload: bool = False
    weights: bool = False

    def __str__(self) -> str:
        """``attention+mlp``, ``mlp, inputs on the host``, ``inputs``."""
        names = "+".join(name for name in ("attention", "mlp", "normed", "weights") if getattr(self, name))
        return (names or "inputs") + (", inputs on the host" if self.offload else "")


KEEP_EVERYTHING = Keep(normed=True, weights=True)
KEEP_ACTIVATIONS = Keep(normed=True)  # all of a pass, and no weight beyond it
KEEP_PRODUCTS = Keep()
KEEP_MLP = Keep(attention=False)
KEEP_ATTENTION = Keep(mlp=False)
KEEP_NONE = Keep(attention=False, mlp=False)
KEEP_ON_HOST = Keep(attention=False, mlp=False, offload=True)

# From the fastest to the smallest; the planner mixes them layer by layer.
KEEPS = (KEEP_EVERYTHING, KEEP_ACTIVATIONS, KEEP_PRODUCTS, KEEP_MLP, KEEP_ATTENTION, KEEP_NONE, KEEP_ON_HOST)


def keep_for(choice: bool | float | str) -> Keep:
    """What ``use_gradient_checkpointing`` means for a fused layer.

    Args:
        choice: False keeps all activations, True recomputes, "unsloth" also moves the inputs to the host;
            "auto" or a number of GiB leave it to a memory plan, and until there is one the products are kept.

    Raises:
        BadInput: it is none of these.
    """
    if isinstance(choice, bool):
        return KEEP_NONE if choice else KEEP_ACTIVATIONS
    if choice == "unsloth":
        return KEEP_ON_HOST
    if choice == "auto" or (isinstance(choice, (int, float)) and choice > 0):
        return KEEP_PRODUCTS
    raise BadInput(
        f"use_gradient_checkpointing is {choice!r}; give True, False, 'unsloth', 'auto' or a number of GiB."
    )
