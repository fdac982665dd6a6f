"""``_extra_state``: delayed scaling's scales and histories in Transformer Engine's own bytes, both ways.

Theirs is a pickle of a dictionary with a recipe object and four tensors. A pickle can run code, so what is
read here goes through an unpickler that knows the few names such a dictionary needs and refuses all others;
tensors inside are read by ``torch.load(weights_only=True)``. What is written names their recipe class, so
that Transformer Engine reads it, and tensors as torch pickles them. Recipes without a state give no bytes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import BadCheckpoint
from fewbits.te.active.delayed import DelayedState
from fewbits.te.recipe import NAMES, DelayedScaling, Recipe

_THEIR_MODULE = "transformer_engine.common.recipe"
_PLAIN = (bool, int, float, str, tuple, list)


_PythonPickler: Any = pickle._Pickler  # type: ignore[attr-defined]  # C's cannot name a class otherwise


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes our recipe classes under their module's name."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__module__", None) == Recipe.__module__:
            self.write(pickle.GLOBAL + f"{_THEIR_MODULE}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    def save_type(self, obj: Any) -> None:
        self.save_global(obj)

    dispatch = {**_PythonPickler.dispatch, type: save_type}  # noqa: RUF012 - as in pickle itself


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


_ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _load_storage,
}


class _Unpickler(pickle.Unpickler):
    """Reads recipes and tensors, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == _THEIR_MODULE and name in NAMES:
            return NAMES[name]
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise BadCheckpoint(
            f"the _extra_state of a checkpoint names {module}.{name}, which no FP8 state needs: it is not "
            "read, as unpickling it could run code; load the checkpoint without its _extra_state."
        )


def to_bytes(meta: dict[str, Any]) -> Tensor:
    """The state of a module as (n,) uint8 on the CPU; (0,) for recipes without one.

    Args:
        meta: a module's ``fp8_meta``.
    """
    recipe = meta.get("recipe")
    states = {word: meta.get(f"scaling_{word}") for word in ("fwd", "bwd")}
    if not isinstance(recipe, DelayedScaling) or not any(
        isinstance(s, DelayedState) for s in states.values()
    ):
        return torch.empty(0, dtype=torch.uint8)
    content: dict[str, Any] = {"recipe": recipe}
    for word, state in states.items():
        if isinstance(state, DelayedState):
            content[f"scale_{word}"] = state.scale.cpu().clone()
            content[f"amax_history_{word}"] = state.amax_history.cpu().clone()
    content["extra_fp8_variables"] = {k: v for k, v in meta.items() if isinstance(v, _PLAIN)}
    stream = io.BytesIO()
    _Pickler(stream, protocol=4).dump(content)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def from_bytes(state: Any) -> tuple[Recipe, dict[str, Tensor]] | None:
    """Recipe and tensors of an ``_extra_state``; None where there is none.

    Args:
        state: (n,) uint8, or a stream of an older version.

    Raises:
        BadCheckpoint: it is something else, or names what an FP8 state does not need.
    """
    if state is None:
        return None
    if isinstance(state, Tensor):
        data = state.detach().cpu().to(torch.uint8).numpy().tobytes()
    elif isinstance(state, io.BytesIO):
        data = state.getvalue()
    else:
        raise BadCheckpoint(f"an _extra_state is bytes, not {type(state).__name__}.")
    if not data:
        return None
    try:
        content = _Unpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError, TypeError) as error:
        raise BadCheckpoint(f"an _extra_state of the checkpoint is damaged: {error}.") from error
    if not isinstance(content, dict):
        return None
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        return None
    recipe = content.get("recipe")
    return (recipe if isinstance(recipe, Recipe) else _first_version(tensors)), tensors


def _first_version(tensors: dict[str, Tensor]) -> DelayedScaling:
    """Before recipes were stored there was delayed scaling only; its length is the history's."""
    history = tensors.get("amax_history_fwd")
    return DelayedScaling() if history is None else DelayedScaling(amax_history_len=len(history))


def copy_into(state: DelayedState, tensors: dict[str, Tensor], word: str, owner: str) -> None:
    """Fill a state from the tensors of a checkpoint.

    Args:
        state: the module's.
        tensors: from `from_bytes`.
        word: "fwd" or "bwd".
        owner: the module's class, for the message.

    Raises:
        BadCheckpoint: other shapes than the module's.
    """
    for name in ("scale", "amax_history"):
        target, source = getattr(state, name), tensors.get(f"{name}_{word}")
        if source is None:
            continue
        if source.shape != target.shape:
            raise BadCheckpoint(
                f"the checkpoint's {name}_{word} for {owner} has shape {tuple(source.shape)}, and this "
                f"module's has {tuple(target.shape)}: they are modules of different kinds."
            )
        target.copy_(source)
