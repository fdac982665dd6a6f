"""`as_transformer_engine`: ``import transformer_engine.pytorch`` finds `fewbits.te`, here and by choice.

It adds one finder to ``sys.meta_path``, which knows the modules of `_PLACES`, each a view of ours, and a
distribution named "transformer-engine" for libraries that ask whether it is installed. Undoing takes the
finder and these modules away again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType, TracebackType
from typing import Any

from fewbits.errors import Unsupported

VERSION = "2.20.0"
"""The version of Transformer Engine whose names `fewbits.te` has."""

_TENSORS = ("tensors.quantized_tensor", "tensors.quantizers")
_PLACES: dict[str, Sequence[str]] = {
    "": (),
    "common": (),
    "common.recipe": ("recipe",),
    "pytorch": ("", "active.global_state"),
    "pytorch.attention": (
        "attention.dot_product",
        "attention.multi_head_attention",
        "attention.rope",
        "attention.inference",
    ),
    "pytorch.attention.dot_product_attention": ("attention.dot_product",),
    "pytorch.attention.dot_product_attention.context_parallel": ("context.shares",),
    "pytorch.attention.inference": ("attention.inference",),
    "pytorch.attention.multi_head_attention": ("attention.multi_head_attention",),
    "pytorch.attention.rope": ("attention.rope",),
    "pytorch.constants": ("tensors.roles",),
    "pytorch.cross_entropy": ("ranks.cross_entropy",),
    "pytorch.custom_recipes": (),
    "pytorch.custom_recipes.quantizer_factories": ("quantizer_factories",),
    "pytorch.custom_recipes.quantizer_factory_zoo": ("quantizer_factories",),
    "pytorch.distributed": ("layers.recompute", "ranks.rng", "ranks.parallel"),
    "pytorch.export": ("refused",),
    "pytorch.float8_tensor": _TENSORS,
    "pytorch.fp8": ("active.numerics", "support", "active.global_state", "tensors.roles"),
    "pytorch.graph": ("layers.graph",),
    "pytorch.module": ("", "layers.module"),
    "pytorch.module.base": ("layers.module",),
    "pytorch.module.fp8_padding": ("experts.padding",),
    "pytorch.module.fp8_unpadding": ("experts.padding",),
    "pytorch.module.grouped_linear": ("layers.grouped_linear",),
    "pytorch.module.layernorm": ("layers.norm",),
    "pytorch.module.layernorm_linear": ("layers.linear",),
    "pytorch.module.layernorm_mlp": ("layers.layernorm_mlp",),
    "pytorch.module.linear": ("layers.linear",),
    "pytorch.module.rmsnorm": ("layers.norm",),
    "pytorch.ops": ("ops",),
    "pytorch.ops.basic": ("ops",),
    "pytorch.ops.basic.l2normalization": ("layers.norm",),
    "pytorch.ops.linear": ("ops",),
    "pytorch.ops.op": ("ops",),
    "pytorch.ops.sequential": ("ops",),
    "pytorch.optimizers": ("optimizers",),
    "pytorch.permutation": ("experts.permutation",),
    "pytorch.quantization": (
        "active.numerics",
        "support",
        "active.global_state",
        "tensors.roles",
        "recipe_state",
    ),
    "pytorch.quantized_tensor": _TENSORS,
    "pytorch.router": ("experts.router",),
    "pytorch.tensor": _TENSORS,
    "pytorch.tensor.float8_blockwise_tensor": _TENSORS,
    "pytorch.tensor.float8_tensor": _TENSORS,
    "pytorch.tensor.mxfp8_tensor": _TENSORS,
    "pytorch.tensor.nvfp4_tensor": _TENSORS,
    "pytorch.tensor.hybrid_tensor": _TENSORS,
    "pytorch.tensor.identity_tensor": _TENSORS,
    "pytorch.transformer": ("transformer_layer",),
    "pytorch.utils": ("support", "layers.activations"),
}
_OTHER_NAMES = {"TransformerEngineBaseModule": "Module"}


class _View(ModuleType):
    """A module whose names are those of some of ours."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for source in _PLACES[self.__name__.removeprefix("transformer_engine").lstrip(".")]:
                ours = importlib.import_module(f"fewbits.te.{source}".rstrip("."))
                own_name = _OTHER_NAMES.get(name, name)
                if hasattr(ours, own_name):
                    return getattr(ours, own_name)
        raise AttributeError(f"{self.__name__} stands for fewbits.te here, which has no {name}.")


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _View(spec.name, f"A view of fewbits.te under the name {spec.name}.")
        if spec.name == "transformer_engine":
            module.__version__ = VERSION  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        for name in ("pytorch", "common"):  # as the original's package loads both
            if module.__name__ == "transformer_engine":
                importlib.import_module(f"transformer_engine.{name}")


class _Installed(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {VERSION}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        raise Unsupported("transformer-engine stands for fewbits.te here and has no files of its own.")


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        if first != "transformer_engine" or rest not in _PLACES:
            return None
        is_package = any(place.startswith(f"{rest}." if rest else "") and place != rest for place in _PLACES)
        return ModuleSpec(name, _Loader(), is_package=is_package)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        name = (context or DistributionFinder.Context()).name
        if name is None or name.lower().replace("_", "-") == "transformer-engine":
            yield _Installed()


class StandIn:
    """What `as_transformer_engine` returns: call `undo`, or use it in a ``with`` statement."""

    def __init__(self, finder: MetaPathFinder) -> None:
        self._finder = finder

    def undo(self) -> None:
        """Take the finder and its modules away; a second call does nothing."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            for name in [name for name, module in sys.modules.items() if isinstance(module, _View)]:
                del sys.modules[name]

    def __enter__(self) -> StandIn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def as_transformer_engine() -> StandIn:
    """From now on ``import transformer_engine.pytorch`` finds `fewbits.te`, in this process.

    Libraries that ask whether Transformer Engine is installed are told that version 2.20.0 is. Call this
    before they are imported, as some remember the answer.

    Returns:
        An object whose ``undo()`` ends it; it is also a context manager.

    Raises:
        Unsupported: the real Transformer Engine, or an earlier stand-in, is imported in this process.
    """
    imported = sys.modules.get("transformer_engine")
    if isinstance(imported, _View) or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        raise Unsupported(
            "fewbits.te already stands for transformer_engine here: call undo() on what the first "
            "as_transformer_engine() returned."
        )
    if imported is not None:
        raise Unsupported(
            "transformer_engine itself is imported in this process, and the two cannot be mixed: call "
            "as_transformer_engine() first, in a new process."
        )
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return StandIn(finder)
