"""Bytes on the wire, by the counter of a loopback device that nobody else uses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("network_worker.py")


def namespace() -> list[str]:
    """A command's beginning that gives it a network namespace of its own; empty where that cannot be."""
    for flags in ("-n", "-rn"):
        start = ["unshare", flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if shutil.which("unshare") and not subprocess.run([*start, "true"], capture_output=True).returncode:
            return start
    return []


@pytest.mark.nightly
def test_bytes_on_the_wire() -> None:
    start = namespace()
    if not start:
        pytest.skip("needs a network namespace: unshare -n, and ip")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run([*start, sys.executable, str(WORKER)], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for format, most in (("int8", 0.53), ("int4", 0.29)):
        for counter in ("device", "counted"):
            assert 0.2 < found[format][counter] / found["bfloat16"][counter] < most
        # TCP's headers and acknowledgements, and the barrier, are all that the calls do not count
        assert 1 <= found[format]["device"] / found[format]["counted"] < 1.02
