"""What a method's name asks for: "rotate+awq+gptq+learned" lists steps, in the order in which they act."""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.errors import BadInput

FOLDS = ("rotate", "smooth", "awq")
ROUNDINGS = ("nearest", "gptq", "gptaq")
LEARNED = "learned"
_STEPS = 200  # of training in each layer
STEPS = (*FOLDS, *ROUNDINGS, LEARNED)


@dataclass(frozen=True, kw_only=True)
class Method:
    """The steps by which a layer's linears are rounded.

    Attributes:
        rotate: Hadamard rotations are folded into the weights first.
        smooth: SmoothQuant's scales are folded into norms and weights.
        awq: AWQ's scales are.
        rounding: one of `ROUNDINGS`: how codes are chosen.
        steps: for which codes and scales are then trained in each layer; 0: they are not.
    """

    rotate: bool
    smooth: bool
    awq: bool
    rounding: str
    steps: int


def read_method(name: str) -> Method:
    """The steps of a name such as "gptq", "awq+gptq", "rotate+gptq+learned" or "gptq+learned:400".

    Raises:
        BadInput: an unknown step, a step named twice, or two ways of choosing codes.
    """
    steps, count = name.split("+"), 0
    if steps[-1].startswith(f"{LEARNED}:"):
        number = steps[-1].partition(":")[2]
        count = int(number) if number.isascii() and number.isdigit() else 0
        if count < 1:
            raise BadInput(f"{name!r} trains for {number!r} steps; give a whole number, such as learned:200.")
        steps[-1] = LEARNED
    unknown = next((step for step in steps if step not in STEPS), None)
    if unknown is not None or len(set(steps)) != len(steps):
        fault = (
            f"there is no method {unknown!r} of rounding"
            if unknown is not None
            else f"{name!r} names a step twice"
        )
        raise BadInput(
            f"{fault}; a method is one or more of {', '.join(STEPS)}, joined by +, such as gptq+learned."
        )
    roundings = [step for step in steps if step in ROUNDINGS]
    if len(roundings) > 1 or {"smooth", "awq"} <= set(steps):
        first, second = roundings if len(roundings) > 1 else ("smooth", "awq")
        raise BadInput(f"{name!r} names both {first} and {second}, which do the same work; name one of them.")
    alone = "nearest" if steps in (["awq"], ["smooth"]) else "gptq"
    return Method(
        rotate="rotate" in steps,
        smooth="smooth" in steps,
        awq="awq" in steps,
        rounding=roundings[0] if roundings else alone,
        steps=(count or _STEPS) if LEARNED in steps else 0,
    )
