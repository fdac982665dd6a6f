"""What is wrong with this machine and installation, and what to do. Works with torch broken, and without it.

Each check is a function of a `Host` that gives one `Finding` or several; a new check is one more name
here. `gpu.py`, `packages.py` and `machine.py` are the checks. Imports `fewjobs` alone, and neither torch
nor transformers. Begin with `host.py`, which reads the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fewbits.doctor import gpu, machine, packages
from fewbits.doctor.host import Host
from fewbits.doctor.wheels import wheel
from fewjobs.finding import Finding

__all__ = ["CHECKS", "Finding", "Host", "diagnose"]

CHECKS = (
    gpu.driver,
    gpu.toolkit,
    gpu.known_bad_toolkit,
    packages.torch,
    packages.triton,
    gpu.capability,
    gpu.cudnn,
    gpu.nccl,
    gpu.host_compiler,
    machine.architecture,
    machine.memory,
    machine.temporary_folder,
    machine.shared_memory,
    machine.disk,
    machine.process_limits,
    packages.conflicts,
)


def diagnose(names: Iterable[str] = (), *, host: Host | None = None) -> Iterator[Finding]:
    """Run every check.

    Args:
        names: packages whose wheels are looked for.
        host: another machine than this one, in tests.
    """
    host = host or Host()
    for check in CHECKS:
        findings = check(host)
        yield from [findings] if isinstance(findings, Finding) else findings
    for name in names:
        yield wheel(host, name)
