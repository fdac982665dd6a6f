"""Processes that the launcher starts in tests: two, which import nothing heavy."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from fewbits.cli.launch_flags import add_launch_flags

HEAD = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
def fail(text):
    told = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(told))
    sys.exit(1)
"""


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_launch_flags(parser)
    return parser.parse_args(words)


def wait_for(fact: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)
