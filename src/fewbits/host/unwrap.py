"""The model of transformers inside all that others have put around it: the one way to unwrap."""

from __future__ import annotations

from typing import Any

from torch import nn

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrap(model: Any) -> Any:
    """The model itself: inside torch.compile, DDP, nn.DataParallel and PEFT, in whatever order they stand.

    accelerate's ``prepare`` makes such wrappers, and changes forwards and classes in place besides, which
    needs no unwrapping; neither does FSDP2.

    Args:
        model: any module; one without wrappers is given back as it is.
    """
    while True:
        compiled = vars(model).get("_modules", {}).get("_orig_mod") if hasattr(model, "__dict__") else None
        if compiled is not None:
            model = compiled
        elif isinstance(model, _PARALLEL):
            model = model.module
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model
