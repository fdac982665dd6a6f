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

from fewjobs.whole_files import is_noted, publish_noted

SOURCES = Path(__file__).with_name("c")
# Without a C library, static or not: what would start one would cost more than the launcher does.
LAUNCHER_FLAGS = (
    *("-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
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
    sources = b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()) if file.suffix in (".c", ".h"))
    digest = hashlib.sha256(sources + identity.encode()).hexdigest()[:16]
    folder = root / digest
    folder.mkdir(parents=True, exist_ok=True)
    launcher, why = _compile(
        compiler, SOURCES / "launcher.c", folder / "fewbits-launch", LAUNCHER_FLAGS, environ
    )
    pager_flags = ("-shared", "-fPIC", "-pthread")
    pager, why_not = _compile(compiler, SOURCES / "pager.c", folder / "pager.so", pager_flags, environ)
    return Native(launcher, pager, why or why_not)


def _compiler(environ: Mapping[str, str]) -> str | None:
    for name in (environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"):
        compiler = shutil.which(name, path=environ.get("PATH")) if name else None
        if compiler is not None and Path(compiler).name not in ("ccache", "sccache"):
            return compiler
    return None


def _compile(
    compiler: str, source: Path, target: Path, flags: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[Path | None, str]:
    """The file that an earlier run has made, if it is whole and does what it should; else compile it."""
    name = Path(compiler).name
    if is_noted(target) and not _fault(target):
        return target, ""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as folder:
            draft = Path(folder, target.name)
            command = [compiler, "-O2", *flags, "-o", str(draft), str(source)]
            done = _run(command, dict(environ))
            if done.returncode:
                said = done.stderr.strip().splitlines()[-1:]
                return None, f"{name} cannot compile {source.name}: {' '.join(said)[:200]}"
            draft.chmod(0o755)
            fault = _fault(draft)
            if fault:  # CC is for another machine, or the disk was full
                return None, f"what {name} makes of {source.name} does not work here: {fault[:200]}"
            publish_noted(draft, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{name} cannot compile {source.name}: {error}"
    return target, ""


def _fault(binary: Path) -> str:
    """Why the compiled launcher or pager does not work, or "": each is tried as it is used."""
    try:
        if binary.suffix == ".so":
            done = _run(["/bin/sh", "-c", "exec true"], {"LD_PRELOAD": str(binary), "PATH": "/usr/bin:/bin"})
            return done.stderr.strip()
        done = _run([str(binary)], {})
        return (
            "" if "this is the launcher of compilers" in done.stderr else f"it ended with {done.returncode}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def _run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environ, timeout=60, check=False
    )
