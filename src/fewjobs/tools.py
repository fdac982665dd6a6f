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

from fewjobs.native import FALLBACK, Native
from fewjobs.whole_files import is_whole, write_whole

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
    path = [p for p in environ.get("PATH", os.defpath).split(os.pathsep) if p and not has_launchers(p)]
    compilers = dict(_compilers(path))
    chosen = dict(_chosen(path, environ))
    for real in chosen.values():
        compilers.setdefault(real.name, real)
    home, release = cuda_home(environ, path)
    launcher = _launcher(native)
    names = [f"{name}={real}" for name, real in sorted((compilers | chosen).items())]
    names += [str(home), release]
    # By content: what is healed keeps its folder, whose paths build systems have written down.
    names.append(hashlib.sha256(launcher).hexdigest())
    digest = hashlib.sha256(os.fsencode("\n".join(names))).hexdigest()[:12]
    folder = root / "tools" / digest
    _put(folder / "bin" / LAUNCHER, launcher, None)
    for name, real in compilers.items():
        _put(folder / "bin" / name, launcher, real)
    for variable, real in chosen.items():
        if compilers[real.name] != real:  # the PATH has another of that name
            _put(folder / variable / real.name, launcher, real)
    cuda = None
    if home is not None and (home / "bin/nvcc").is_file():
        cuda = folder / "cuda"
        _shadow(cuda, home, launcher)
        _put(folder / "bin/nvcc", launcher, cuda / "driver/bin/nvcc")
    return Tools(folder, cuda, release)


def has_launchers(folder: str) -> bool:
    """Whether a folder is one of ours, as launchers themselves tell (`c/search_path.h`, `launch.py`)."""
    return "/tools/" in folder and os.path.isdir(f"{folder}/.real")  # noqa: PTH112 - of every folder of the PATH


def _launcher(native: Native) -> bytes:
    """What every launcher holds: the compiled program, or a script that starts the one in Python."""
    if native.launcher is not None:
        return native.launcher.read_bytes()
    script = f'exec {shlex.quote(sys.executable)} -IS {shlex.quote(str(FALLBACK))} "$0" "$@"\n'
    return os.fsencode(f"#!/bin/sh\n{script}")


def _chosen(path: list[str], environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """CC and CXX where they are set, each with the program that it means."""
    for variable in ("CC", "CXX"):
        words = _words(environ.get(variable, ""))
        program = shutil.which(words[0], path=os.pathsep.join(path)) if words else None
        if program is not None and not has_launchers(str(Path(program).parent)):
            yield variable, Path(program)


def _compilers(path: list[str]) -> Iterator[tuple[str, Path]]:
    """Names of compilers, each with the program that the PATH gives for it now."""
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


def _put(place: Path, launcher: bytes, real: Path | None) -> None:
    """A launcher at a place; a copy, as build tools follow links and would see another name.

    One that stands there is read: an empty file is a shell script that succeeds, and nothing would be built.
    """
    if real is not None:
        _link(place.parent / ".real" / place.name, real)
    if not is_whole(place, launcher) or not os.access(place, os.X_OK):
        write_whole(place, launcher, executable=True)


def _link(link: Path, real: Path) -> None:
    """A link to a place, at every moment: another build may be following it."""
    if link.is_symlink() and str(link.readlink()) == str(real):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    draft = link.with_name(f".{link.name}-{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(real)
    draft.replace(link)


def cuda_home(environ: Mapping[str, str], path: list[str]) -> tuple[Path | None, str]:
    """The real CUDA toolkit that a build would use, and its release."""
    places = [Path(environ[name], "bin/nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=os.pathsep.join(path))
    places += [Path(on_path)] if on_path else []
    places += [Path("/usr/local/cuda/bin/nvcc")]
    for nvcc in places:
        if not nvcc.is_file() or has_launchers(str(nvcc.parent)):
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


def _shadow(cuda: Path, home: Path, launcher: bytes) -> None:
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
    _put(cuda / "bin/nvcc", launcher, driver / "bin/nvcc")
    for name in _DEVICE_TOOLS:
        if (home / "bin" / name).exists():
            _put(cuda / "bin" / name, launcher, home / "bin" / name)
            _put(driver / "bin" / name, launcher, home / "bin" / name)
    if (home / "nvvm/bin/cicc").exists():
        _put(cuda / "nvvm/bin/cicc", launcher, home / "nvvm/bin/cicc")
    profile = home / "bin/nvcc.profile"
    if profile.is_file():
        text = profile.read_text(encoding="utf-8", errors="surrogateescape")
        text = re.sub(r"(?m)^TOP(\s*)=.*$", lambda m: f"TOP{m[1]}= {home}/bin/..", text)
        text = re.sub(r"(?m)^CICC_PATH(\s*)=.*$", lambda m: f"CICC_PATH{m[1]}= {cuda}/nvvm/bin", text)
        changed = text.encode(errors="surrogateescape")
        if not is_whole(driver / "bin/nvcc.profile", changed):  # another build may be reading it
            write_whole(driver / "bin/nvcc.profile", changed)


def _mirror(real: Path, shadow: Path, except_for: tuple[str, ...]) -> None:
    if not real.is_dir():
        return
    shadow.mkdir(parents=True, exist_ok=True)
    for entry in real.iterdir():
        link = shadow / entry.name
        if entry.name not in except_for:
            _link(link, entry)


def child_environment(
    tools: Tools, environ: Mapping[str, str], *, run_folder: Path, jobs: int, keep: Path | None = None
) -> dict[str, str]:
    """The environment in which the build's commands come through our launchers."""
    bin_folder, launcher = tools.folder / "bin", str(tools.launcher)
    child = dict(environ)
    child["FEWBITS_BUILD"] = str(run_folder)
    child["PATH"] = os.pathsep.join([str(bin_folder), environ.get("PATH", os.defpath)])
    for variable in ("CC", "CXX"):
        words = _words(environ.get(variable, ""))
        if words:
            name = Path(words[0]).name
            shims = [shim for shim in (tools.folder / variable / name, bin_folder / name) if shim.exists()]
            child[variable] = shlex.join([str(shims[0]) if shims else words[0], *words[1:]])
    for language in ("C", "CXX", "CUDA"):
        name = f"CMAKE_{language}_COMPILER_LAUNCHER"
        before = environ.get(name, "")
        child[name] = f"{launcher};{before}" if before and launcher not in before else launcher
    child.setdefault("MAX_JOBS", str(jobs))
    child.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs))
    if tools.cuda is not None:
        nvcc = str(tools.cuda / "bin/nvcc")
        child.update(CUDA_HOME=str(tools.cuda), CUDA_PATH=str(tools.cuda), CUDACXX=nvcc)
        if "PYTORCH_NVCC" not in environ:
            child["PYTORCH_NVCC"] = nvcc
    else:
        # Inside an nvcc whose stages we cannot see, one architecture at a time.
        child["NVCC_APPEND_FLAGS"] = " ".join(filter(None, (environ.get("NVCC_APPEND_FLAGS"), "--threads 1")))
    if keep is not None:
        child["TMPDIR"] = str(keep / "tmp")
        child.setdefault("TORCH_EXTENSIONS_DIR", str(keep / "torch_extensions"))
        if (Path.cwd() / "transformer_engine").is_dir():
            here = hashlib.sha256(os.fsencode(Path.cwd())).hexdigest()[:8]
            child.setdefault("NVTE_CMAKE_BUILD_DIR", str(keep / f"transformer-engine-{here}"))
    return child
