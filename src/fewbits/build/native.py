"""The launcher and the pager, compiled on first use with the compiler that every source build needs."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
# Without a C library, static or not: what would start one would cost more than the launcher does.
LAUNCHER_FLAGS = (
    *("-DLAUNCHER", "-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
    *("-fno-asynchronous-unwind-tables", "-Wl,--build-id=none", "-Wl,-z,noseparate-code"),
)
FALLBACK = Path(__file__).with_name("launch.py")


@dataclass(frozen=True)
class Native:
    """What could be compiled.

    Attributes:
        launcher: the program that stands in compilers' places, or None: then Python does it, more slowly.
        pager: the library that moves a compiler's memory to the disk, or None.
        reason: why something is missing.
    """

    launcher: Path | None
    pager: Path | None
    reason: str = ""


def build_native(root: Path, environ: Mapping[str, str]) -> Native:
    """Compile both into ``root``, or find them there.

    Args:
        root: folder for compiled files; one below it is named by source, compiler and machine.
        environ: where CC and PATH are.
    """
    compiler = _compiler(environ)
    if compiler is None:
        return Native(None, None, "there is no C compiler (cc, gcc, clang)")
    facts = Path(compiler).stat()
    identity = f"{compiler} {facts.st_size} {facts.st_mtime_ns} {platform.machine()} {platform.libc_ver()}"
    digest = hashlib.sha256(SOURCE.read_bytes() + identity.encode()).hexdigest()[:16]
    folder = root / digest
    folder.mkdir(parents=True, exist_ok=True)
    launcher, why = _compile(compiler, folder / "fewbits-launch", LAUNCHER_FLAGS, environ)
    pager, why_not = _compile(compiler, folder / "pager.so", ("-shared", "-fPIC", "-pthread"), environ)
    return Native(launcher, pager, why or why_not)


def _compiler(environ: Mapping[str, str]) -> str | None:
    for name in (environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"):
        found = shutil.which(name, path=environ.get("PATH")) if name else None
        if found is not None and Path(found).name not in ("ccache", "sccache"):
            return found
    return None


def _compile(
    compiler: str, target: Path, flags: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[Path | None, str]:
    if target.exists():
        return target, ""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f"{target.name}-", delete=False) as file:
        made = Path(file.name)
    command = [compiler, "-O2", *flags, "-o", str(made), str(SOURCE)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=dict(environ),
            timeout=60,
            check=False,
        )
        failed = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        if done.returncode == 0:
            made.chmod(0o755)
            made.replace(target)
            return target, ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = [str(error)]
    made.unlink(missing_ok=True)
    return None, f"{Path(compiler).name} cannot compile {SOURCE.name}: {' '.join(failed)[:200]}"
