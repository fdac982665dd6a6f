"""The two checks of ``fewbits doctor`` that are about memory; ``fewjobs --doctor`` says them alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fewjobs.budget import read_budget
from fewjobs.errors import Unsupported
from fewjobs.file_systems import IN_MEMORY, file_system
from fewjobs.finding import Finding
from fewjobs.words import size

# The largest single compiler process that we measured in Transformer Engine's sources: ptxas, sm_100a.
LARGEST_UNIT_BYTES = 6_200_000_000


def memory(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Finding:
    """The memory that may be used, and who limits it."""
    try:
        budget = read_budget(root=root, environ=environ)
    except Unsupported as error:
        return Finding("memory", "warning", "unknown", str(error))
    tightest = budget.binding
    each = " for each process" if tightest.per_process else ""
    what = f"{size(budget.available_bytes)} may be used{each}; the limit is the {tightest.name}'s"
    what += f", {size(tightest.limit_bytes)} ({tightest.where})"
    if budget.available_bytes < LARGEST_UNIT_BYTES:
        return Finding(
            "memory",
            "warning",
            what,
            "One compiler process of a CUDA library can need more: 6.2 GB, measured in Transformer Engine.",
            "Look for a wheel (fewbits doctor PACKAGE), or build for your own GPU's architecture only, with "
            "one job and NVCC_APPEND_FLAGS='--threads 1'; or ask whoever set the limit for more.",
        )
    if tightest.name == "machine":
        return Finding("memory", "ok", what)
    return Finding(
        "memory",
        "note",
        what,
        "Tools that read the machine's free memory do not see this limit and are killed.",
    )


def temporary_folder(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Finding:
    """Whether temporary files live in memory."""
    folder = (os.environ if environ is None else environ).get("TMPDIR") or "/tmp"
    if not (root / folder.lstrip("/")).is_dir():
        why = "Compilers and pip then fail, or write elsewhere than you think."
        return Finding("TMPDIR", "warning", f"{folder} is no folder", why, f"Make it: mkdir -p {folder}")
    kind = file_system(folder, root)
    if kind not in IN_MEMORY:
        return Finding("TMPDIR", "ok", f"{folder} is on {kind or 'an unknown file system'}")
    return Finding(
        "TMPDIR",
        "warning",
        f"{folder} is on {kind}, which is memory",
        "What compilers write there counts against the memory: 240 MB for one unit were measured.",
        "Put TMPDIR on a disk before building: export TMPDIR=/var/tmp",
    )
