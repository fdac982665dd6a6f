"""What config.json says of a model that is about to be loaded, and what is looked over before it is.

Building a model of 32 layers takes Python 20 to 100 ms. Where `fewbits.models.loading.streamed_loading`
stands in for its class, it is built once, and looked over before a weight is read; in all other cases one is
built on the meta device for that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fewbits.models.folders.checkpoint import Checkpoint
from fewbits.models.folders.config_check import check_shapes
from fewbits.models.loading.longer_positions import check_stretched, stretch
from fewbits.models.loading.options import Loading
from fewbits.models.loading.placing import device_map_of

if TYPE_CHECKING:
    from torch import nn


class Described(NamedTuple):
    """What config.json says.

    Attributes:
        config: as transformers' object.
        kind: the model's class; None: another library packed the weights, or the class is not known.
        look: looks a model of that class over, of which no weight was read yet, and raises what is wrong.
    """

    config: Any
    kind: Any = None
    look: Callable[[nn.Module], None] | None = None


def options_of(checkpoint: Checkpoint | None, loading: Loading) -> dict[str, Any]:
    """Options of transformers' ``from_pretrained`` that say where the files are."""
    return {
        **loading.hf,
        "trust_remote_code": loading.trust_remote_code,
        "local_files_only": loading.local_files_only or checkpoint is not None,
    }


def describe(where: str, checkpoint: Checkpoint | None, loading: Loading) -> Described:
    """Read config.json; the weights' shapes are looked over as far as nothing need be read for that.

    Raises:
        BadCheckpoint, BadInput: the two belong to different models, or the class does not stretch positions.
    """
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    from fewbits.models.loading.hf_quantizer import register
    from fewbits.models.loading.streamed_loading import streams
    from fewbits.models.packing.model_shapes import auto_class_of, class_of

    register()
    options = options_of(checkpoint, loading)
    rest = ("attn_implementation", "max_memory", "variant")
    config = AutoConfig.from_pretrained(where, **{k: v for k, v in options.items() if k not in rest})
    loading.notes += filter(None, [stretch(config, loading.length, where)])
    if quant_method_of(config) not in (None, "fewbits"):
        return Described(config)
    look = partial(_look_over, config, checkpoint, where)
    kind = class_of(config)
    if not streams(kind, device_map_of(loading.device_map)):
        with torch.device("meta"):
            model = auto_class_of(config).from_config(config, trust_remote_code=loading.trust_remote_code)
        look(model)
        kind = type(model)
    return Described(config, kind, look)


def _look_over(config: Any, checkpoint: Checkpoint | None, where: str, model: nn.Module) -> None:
    check_stretched(config, model, where)
    if checkpoint is not None:
        check_shapes(checkpoint, model)


def quant_method_of(config: Any) -> Any:
    """The quantisation that a configuration of transformers names; None: it names none."""
    written = getattr(config, "quantization_config", None)
    return (
        written.get("quant_method") if isinstance(written, dict) else getattr(written, "quant_method", None)
    )


__all__ = ["Described", "describe", "options_of", "quant_method_of"]
