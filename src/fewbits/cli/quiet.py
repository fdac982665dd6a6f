"""Silence for our own process: other libraries' progress bars, warnings and log lines."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*, enabled: bool = True) -> Iterator[None]:
    """Inside the block only errors are heard; afterwards all is as it was."""
    if not enabled:
        yield
        return
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as hf_logging

        bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.disable(level)
            if bars:
                hf_logging.enable_progress_bar()
