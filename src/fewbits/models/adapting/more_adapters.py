"""A model that has adapters gets one more, or trains one on that it has."""

from __future__ import annotations

from typing import Any

from fewbits.errors import BadInput
from fewbits.host.record import add_notes

_NO_SETTINGS = (  # fields of a configuration that say where it comes from, or follow from the model
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type",
    "peft_version", "revision", "runtime_config", "task_type",
)  # fmt: skip


def add_to(model: Any, config: Any, adapter_name: str) -> Any:
    """The PeftModel with one more adapter, which is the active one if the others were deleted."""
    model.add_adapter(adapter_name, config)
    if not model.active_adapters:
        model.set_adapter(adapter_name)
    return model


def train_on(model: Any, config: Any, adapter_name: str) -> Any:
    """The model, whose adapter of that name is there already, made ready to train it.

    Raises:
        BadInput: it has other settings.
    """
    own = model.peft_config[adapter_name]
    for name, value in vars(config).items():
        new, old = _as_written(value), _as_written(getattr(own, name, None))
        if not name.startswith("_") and name not in _NO_SETTINGS and new != old:
            raise BadInput(
                f"this model has an adapter {adapter_name!r} with {name}={old!r}, and {new!r} is asked for;"
                " leave get_peft_model out to train it on, merge it first (merge_and_unload), or add another"
                " one with fewbits.get_peft_model(model, ..., adapter_name=...)."
            )
    model.set_adapter(adapter_name)
    model.enable_adapter_layers()  # they may have been switched off to see the base alone
    own.inference_mode = False
    add_notes(model, [f"the adapter {adapter_name!r} was there with these settings, and is trained on"])
    return model


def _as_written(value: Any) -> Any:
    """A setting as it is equal to the one that was written into a file and read again."""
    return sorted(value) if isinstance(value, (set, list, tuple)) else value
