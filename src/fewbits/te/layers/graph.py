"""`make_graphed_callables`: CUDA graphs of modules, by torch's own capture."""

from __future__ import annotations

from typing import Any

import torch

from fewbits.errors import Unsupported
from fewbits.te.layers.module import refuse


def make_graphed_callables(
    modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False, **words: Any
) -> Any:
    """Modules whose forward and backward passes are recorded once and replayed.

    Args:
        modules: a module or function, or a tuple of them.
        sample_args: its arguments, or a tuple of such tuples.
        num_warmup_iters: runs before the recording.
        allow_unused_input: as in `torch.cuda.make_graphed_callables`, which does the work.
        words: ``pool``; and Transformer Engine's other arguments, of which ``enabled`` (``fp8_enabled``) and
            ``sample_kwargs`` are refused.

    Raises:
        Unsupported: there is no GPU, or what is recorded would be quantised.
    """
    if not torch.cuda.is_available():
        raise Unsupported(
            "CUDA graphs need a CUDA device, and this process has none: call the modules themselves."
        )
    enabled = words.get("enabled") or words.get("fp8_enabled")
    refuse(
        bool(any(enabled) if isinstance(enabled, (tuple, list)) else enabled),
        "a CUDA graph of quantised products",
        "record the modules with enabled=False",
    )
    refuse(bool(words.get("sample_kwargs")), "sample_kwargs", "pass all arguments by position")
    return torch.cuda.make_graphed_callables(
        modules, sample_args, num_warmup_iters, allow_unused_input, words.get("pool")
    )
