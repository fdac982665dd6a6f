"""What kind of file system holds a path: some are memory by another name."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def file_system(path: Path | str, root: Path = Path("/")) -> str:
    """The kind of the file system with the longest mount point above ``path``, of which the last counts.

    Args:
        path: an absolute path.
        root: where ``proc`` is; links are followed only on this machine itself.

    Returns:
        Its name, such as "ext4"; "" if that cannot be read.
    """
    best, kind = "", ""
    real = os.path.realpath(path) if root == Path("/") else str(path)
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        mount = fields[4].rstrip("/") if len(fields) > 4 else "?"
        if f"{real}/".startswith(f"{mount}/") and len(mount) >= len(best):
            best, kind = mount, (after.split() or [""])[0]
    return kind
