"""How a build's commands are caught: folders of launchers in the compilers' names, and the environment.

Everything is set for the child alone. The folders stay where they are, as build systems write the paths of
compilers down; outside of a `fewbits build` the launchers in them simply become the real tools.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fewbits.build.native import FALLBACK, Native

LAUNCHER = "fewbits-launch"
_COMPILER = re.compile(r"([a-z0-9_]+-)*(gcc|g\+\+|cc|c\+\+|clang|clang\+\+)(-\d+(\.\d+)*)?$")
_MASQUERADES = ("ccache", "sccache", "distcc", "icecc")
_DEVICE_TOOLS = ("cudafe++", "ptxas", "fatbinary", "nvlink")


@dataclass(frozen=True)
class Tools:
    """The launchers of one set of compilers.

    Attributes:
        folder: with ``bin`` and perhaps ``cuda`` below it.
        cuda: the shadow of the CUDA toolkit, or None.
        toolkit: the release of that toolkit, such as "13.0", or "".
    """

    folder: Path
    cuda: Path | None
    toolkit: str = ""

    @property
    def launcher(self) -> Path:
        """The launcher that takes a command as its arguments."""
        return self.folder / "bin" / LAUNCHER


def make_tools(root: Path, native: Native, environ: Mapping[str, str]) -> Tools:
    """Make the launchers for the compilers that this environment would use."""
    path = [p for p in environ.get("PATH", os.defpath).split(os.pathsep) if p and "/tools/" not in p]
    compilers = dict(_compilers(path, environ))
    home, release = cuda_home(environ, path)
    names = [*(f"{name}={real}" for name, real in sorted(compilers.items())), str(home), release, str(native)]
    names.append(_stamp(native.launcher or FALLBACK))
    digest = hashlib.sha256(os.fsencode("\n".join(names))).hexdigest()[:12]
    folder = root / "tools" / digest
    _put(folder / "bin" / LAUNCHER, native, None)
    for name, real in compilers.items():
        _put(folder / "bin" / name, native, real)
    cuda = None
    if home is not None and (home / "bin/nvcc").is_file():
        cuda = folder / "cuda"
        _shadow(cuda, home, native)
        _put(folder / "bin/nvcc", native, cuda / "driver/bin/nvcc")
    return Tools(folder, cuda, release)


def _stamp(path: Path) -> str:
    facts = path.stat()
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def _compilers(path: list[str], environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Names of compilers, each with the program that the PATH gives for it now."""
    for variable in ("CC", "CXX"):
        words = _words(environ.get(variable, ""))
        if words and (found := shutil.which(words[0], path=os.pathsep.join(path))) is not None:
            yield Path(found).name, Path(found)
    for folder in reversed(path):  # the first on the PATH comes last, and stays
        try:
            names = [name for name in os.listdir(folder) if _COMPILER.fullmatch(name)]  # noqa: PTH208 - thousands
        except OSError:
            continue
        for name in names:
            file = Path(folder, name)
            if not os.access(file, os.X_OK) or not file.is_file():
                continue
            # ccache in a compiler's name would look for the compiler on the PATH, and find us again.
            if file.resolve().name not in _MASQUERADES:
                yield name, file


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _put(place: Path, native: Native, real: Path | None) -> None:
    """A launcher at a place; a copy, as build tools follow links and would see another name."""
    if real is not None:
        link = place.parent / ".real" / place.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or str(link.readlink()) != str(real):
            link.unlink(missing_ok=True)
            link.symlink_to(real)
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    made = place.with_name(f".{place.name}-{os.getpid()}")
    if native.launcher is not None:
        shutil.copy(native.launcher, made)
    else:
        script = f'exec {shlex.quote(sys.executable)} -IS {shlex.quote(str(FALLBACK))} "$0" "$@"\n'
        made.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    made.chmod(0o755)
    made.replace(place)


def cuda_home(environ: Mapping[str, str], path: list[str]) -> tuple[Path | None, str]:
    """The real CUDA toolkit that a build would use, and its release."""
    places = [Path(environ[name], "bin/nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    found = shutil.which("nvcc", path=os.pathsep.join(path))
    places += [Path(found)] if found else []
    places += [Path("/usr/local/cuda/bin/nvcc")]
    for nvcc in places:
        if not nvcc.is_file() or "/tools/" in str(nvcc):
            continue
        release = re.search(r"release ([\d.]+)", _said(nvcc, "--version"))
        # It may be a script somewhere else: nvcc itself knows where it is.
        here = re.search(
            r"^#\$ _HERE_=(.+)$", _said(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"), re.MULTILINE
        )
        home = Path(here[1].strip()).parent if here is not None else nvcc.resolve().parent.parent
        return home, release[1] if release else ""
    return None, ""


def _said(tool: Path, *args: str) -> str:
    try:
        done = subprocess.run(
            [str(tool), *args], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _shadow(cuda: Path, home: Path, native: Native) -> None:
    """A toolkit that is the real one but for launchers in the place of each stage.

    nvcc finds its stages where its profile says: the copy of the profile names our folders for programs, and
    the real ones for headers and libraries, so that what it compiles is the same to the byte.
    """
    driver = cuda / "driver"
    _mirror(home, cuda, except_for=("bin", "nvvm"))
    _mirror(home / "bin", cuda / "bin", except_for=("nvcc", *_DEVICE_TOOLS))
    _mirror(home / "bin", driver / "bin", except_for=("nvcc.profile", *_DEVICE_TOOLS))
    _mirror(home / "nvvm", cuda / "nvvm", except_for=("bin",))
    _mirror(home / "nvvm/bin", cuda / "nvvm/bin", except_for=("cicc",))
    _put(cuda / "bin/nvcc", native, driver / "bin/nvcc")
    for name in _DEVICE_TOOLS:
        if (home / "bin" / name).exists():
            _put(cuda / "bin" / name, native, home / "bin" / name)
            _put(driver / "bin" / name, native, home / "bin" / name)
    if (home / "nvvm/bin/cicc").exists():
        _put(cuda / "nvvm/bin/cicc", native, home / "nvvm/bin/cicc")
    profile = home / "bin/nvcc.profile"
    if profile.is_file():
        text = profile.read_text(encoding="utf-8", errors="replace")
        text = re.sub(r"(?m)^TOP(\s*)=.*$", lambda m: f"TOP{m[1]}= {home}/bin/..", text)
        text = re.sub(r"(?m)^CICC_PATH(\s*)=.*$", lambda m: f"CICC_PATH{m[1]}= {cuda}/nvvm/bin", text)
        (driver / "bin").mkdir(parents=True, exist_ok=True)
        (driver / "bin/nvcc.profile").write_text(text, encoding="utf-8")


def _mirror(real: Path, shadow: Path, except_for: tuple[str, ...]) -> None:
    if not real.is_dir():
        return
    shadow.mkdir(parents=True, exist_ok=True)
    for entry in real.iterdir():
        link = shadow / entry.name
        if entry.name in except_for or link.is_symlink() or link.exists():
            continue
        link.symlink_to(entry)


def child_environment(
    tools: Tools, environ: Mapping[str, str], *, run_folder: Path, jobs: int, keep: Path | None = None
) -> dict[str, str]:
    """The environment in which the build's commands come through our launchers."""
    bin_folder, launcher = tools.folder / "bin", str(tools.launcher)
    made = dict(environ)
    made["FEWBITS_BUILD"] = str(run_folder)
    made["PATH"] = os.pathsep.join([str(bin_folder), environ.get("PATH", os.defpath)])
    for variable in ("CC", "CXX"):
        words = _words(environ.get(variable, ""))
        if words:
            shim = bin_folder / Path(words[0]).name
            made[variable] = shlex.join([str(shim) if shim.exists() else words[0], *words[1:]])
    for language in ("C", "CXX", "CUDA"):
        name = f"CMAKE_{language}_COMPILER_LAUNCHER"
        before = environ.get(name, "")
        made[name] = f"{launcher};{before}" if before and launcher not in before else launcher
    made.setdefault("MAX_JOBS", str(jobs))
    made.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs))
    if tools.cuda is not None:
        nvcc = str(tools.cuda / "bin/nvcc")
        made.update(CUDA_HOME=str(tools.cuda), CUDA_PATH=str(tools.cuda), CUDACXX=nvcc)
        if "PYTORCH_NVCC" not in environ:
            made["PYTORCH_NVCC"] = nvcc
    else:
        # Inside an nvcc whose stages we cannot see, one architecture at a time.
        made["NVCC_APPEND_FLAGS"] = " ".join(filter(None, (environ.get("NVCC_APPEND_FLAGS"), "--threads 1")))
    if keep is not None:
        made["TMPDIR"] = str(keep / "tmp")
        made.setdefault("TORCH_EXTENSIONS_DIR", str(keep / "torch_extensions"))
        if (Path.cwd() / "transformer_engine").is_dir():
            here = hashlib.sha256(os.fsencode(Path.cwd())).hexdigest()[:8]
            made.setdefault("NVTE_CMAKE_BUILD_DIR", str(keep / f"transformer-engine-{here}"))
    return made
