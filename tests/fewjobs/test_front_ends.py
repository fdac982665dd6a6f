"""What people build with: pip and uv with build isolation, torch's extensions, every ninja that is here."""

from __future__ import annotations

import ensurepip
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.fewjobs.conftest import Workshop, full, write_ninja, write_unit

# -- pip wheel, in a temporary environment and a temporary folder

PYPROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "backend"
backend-path = ["."]
"""
# setuptools' own backend wants the package "wheel" besides, which no Python brings: this one packs it itself.
BACKEND = """
import os, pathlib, sys, zipfile
import setuptools
from setuptools import Distribution, Extension

def build_wheel(folder, settings=None, metadata=None):
    heavy = Extension("heavy", ["m.c", "a.cpp", "b.cpp"], extra_compile_args=["-O0", "{debug}"])
    command = Distribution(dict(name="heavy", version="1", ext_modules=[heavy])).get_command_obj("build_ext")
    command.ensure_finalized()
    command.run()
    name = "heavy-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.write(command.get_outputs()[0], "heavy.so")
        wheel.writestr("where.txt", os.getcwd() + "\\n" + setuptools.__file__)
        wheel.writestr("heavy-1.dist-info/RECORD", "")
        wheel.writestr("heavy-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: heavy\\nVersion: 1\\n")
        tag = "Wheel-Version: 1.0\\nRoot-Is-Purelib: false\\nTag: py3-none-any\\n"
        wheel.writestr("heavy-1.dist-info/WHEEL", tag)
    return name
"""
MODULE = """#include <Python.h>
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "heavy", 0, -1, 0};
PyMODINIT_FUNC PyInit_heavy(void) { return PyModule_Create(&def); }
"""


def setuptools_wheels(folder: Path) -> Path:
    """A folder with a wheel of setuptools: Python's own, or made of the one that is installed."""
    for place in (Path(ensurepip.__file__).parent / "_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")):
        if place and list(Path(place).glob("setuptools-*.whl")):
            return Path(place)
    try:
        found = metadata.distribution("setuptools")
    except metadata.PackageNotFoundError:
        pytest.skip("needs a wheel of setuptools, which Python brings up to 3.11")
    folder.mkdir()
    with zipfile.ZipFile(folder / f"setuptools-{found.version}-py3-none-any.whl", "w") as wheel:
        for file in found.files or ():
            place = Path(str(found.locate_file(file)))
            if not str(file).startswith("..") and file.suffix != ".pyc" and place.is_file():
                wheel.write(place, str(file))
    return folder


def heavy_sdist(workshop: Workshop, debug: str) -> Path:
    """An archive, as a package index has them: pip unpacks it into a temporary folder."""
    for name in "ab":
        write_unit(workshop.folder / f"{name}.cpp", 150, f"t{name}")
    files = {
        "pyproject.toml": PYPROJECT,
        "backend.py": BACKEND.replace("{debug}", debug),
        "m.c": MODULE,
        "PKG-INFO": "Metadata-Version: 2.1\nName: heavy\nVersion: 1\n",
    }
    made = workshop.folder / "heavy-1.tar.gz"
    with tarfile.open(made, "w:gz") as archive:
        for name in "ab":
            archive.add(workshop.folder / f"{name}.cpp", f"heavy-1/{name}.cpp")
        for name, text in files.items():
            facts = tarfile.TarInfo(f"heavy-1/{name}")
            facts.size = len(text)
            archive.addfile(facts, io.BytesIO(text.encode()))
    return made


def open_wheel(workshop: Workshop) -> tuple[bytes, str, str]:
    """The library in the wheel, the folder where it was built, and the setuptools that built it."""
    place = workshop.folder / "wheels"
    with zipfile.ZipFile(place / "heavy-1-py3-none-any.whl") as wheel:
        cwd, by = wheel.read("where.txt").decode().split("\n")
        library = wheel.read("heavy.so")
    shutil.rmtree(place)
    return library, cwd, by


def without_debug(workshop: Workshop, library: bytes) -> bytes:
    """A library without what names its build folder, and without the linker's digest of the whole."""
    place = workshop.home / "library.so"
    place.write_bytes(library)
    subprocess.run(["objcopy", "--strip-debug", "-R", ".note.gnu.build-id", str(place)], check=True)
    return place.read_bytes()


@pytest.mark.nightly  # pip makes three environments; uv's below are in the slow tests
@pytest.mark.parametrize("debug", ["-g0", pytest.param("-g", marks=full)])
def test_pip_wheel_with_build_isolation(workshop: Workshop, tmp_path: Path, debug: str) -> None:
    if importlib.util.find_spec("pip") is None or shutil.which("objcopy") is None:
        pytest.skip("needs pip and objcopy")
    links = setuptools_wheels(tmp_path / "links")
    workshop.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_NO_CACHE_DIR": "1"}
    workshop.env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(tmp_path)}
    archive = heavy_sdist(workshop, debug).name
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", "wheels", archive)
    done = workshop.plain(*pip)
    assert done.returncode == 0, done.stderr
    plain, _, _ = open_wheel(workshop)
    ours = workshop.build(*pip, worth_keeping_s=0)
    assert ours.code == 0, ours.err
    made, cwd, by = open_wheel(workshop)
    assert "pip-build-env-" in by
    assert cwd.startswith(f"{tmp_path}/pip-")
    stages = {(Path(s["unit"]).name, s["stage"]) for s in ours.profile["stages"]}
    assert {("a.cpp", "c++"), ("b.cpp", "c++"), ("m.c", "c")} <= stages
    again = workshop.build(*pip)
    assert again.code == 0, again.err
    assert again.profile["counts"]["kept result"] == 3
    assert not {"a.cpp", "b.cpp"} & {Path(s["unit"]).name for s in again.profile["stages"]}
    kept, cwd_again, _ = open_wheel(workshop)
    assert cwd_again != cwd
    if debug == "-g0":
        assert made == plain
        assert kept == plain
    else:  # the debug information names the compiler's folder, which pip makes anew each time
        assert cwd.encode() in made
        assert cwd.encode() not in plain
        assert cwd.encode() in kept
        assert without_debug(workshop, made) == without_debug(workshop, plain)
        assert without_debug(workshop, kept) == without_debug(workshop, plain)
    assert not list(tmp_path.glob("pip-*"))


@pytest.mark.slow  # uv makes three environments
def test_uv_build(workshop: Workshop, tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("needs uv")
    links = setuptools_wheels(tmp_path / "links")
    workshop.env |= {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_NO_CONFIG": "1", "TMPDIR": str(tmp_path)}
    archive = heavy_sdist(workshop, "-g0").name
    places = ("-f", str(links), "--python", sys.executable, "-o", "wheels")
    build = (uv, "build", "--wheel", "--offline", "--no-index", "-q", *places, archive)
    done = workshop.plain(*build)
    assert done.returncode == 0, done.stderr
    plain, _, _ = open_wheel(workshop)
    ours = workshop.build(*build, worth_keeping_s=0)
    assert ours.code == 0, ours.err
    made, _, _ = open_wheel(workshop)
    stages = {(Path(s["unit"]).name, s["stage"]) for s in ours.profile["stages"]}
    assert {("a.cpp", "c++"), ("b.cpp", "c++"), ("m.c", "c")} <= stages
    again = workshop.build(*build)
    assert again.code == 0, again.err
    assert again.profile["counts"]["kept result"] == 3
    kept, _, _ = open_wheel(workshop)
    assert made == plain
    assert kept == plain


# -- torch


@pytest.mark.slow  # torch compiles and links twice
def test_a_torch_extension_is_the_same_to_the_byte(workshop: Workshop, ninja: str) -> None:
    pytest.importorskip("torch")
    write_unit(workshop.folder / "a.cpp", 110, "ta")
    write_unit(workshop.folder / "b.cpp", 90, "tb")
    folder = workshop.home / "ext"
    code = "from torch.utils.cpp_extension import load; "
    code += "load('heavy', ['a.cpp', 'b.cpp'], extra_cflags=['-O0', '-g'], is_python_module=False, "
    code += f"build_directory={str(folder)!r})"
    workshop.env["PATH"] = f"{Path(ninja).parent}:/usr/bin:/bin"
    made = []
    for ours in (False, True):
        folder.mkdir()
        if ours:
            done = workshop.build(sys.executable, "-c", code, memory_bytes=1_500_000_000)
            assert done.code == 0, done.err
            assert {"a.cpp", "b.cpp"} <= {Path(s["unit"]).name for s in done.profile["stages"]}
        else:
            plain = workshop.plain(sys.executable, "-c", code)
            assert plain.returncode == 0, plain.stderr
        made.append({p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".o", ".so")})
        shutil.rmtree(folder)
    assert set(made[0]) == {"a.o", "b.o", "heavy.so"}
    assert made[0] == made[1]


# -- every ninja on the PATH, beside this Python, and of the package "ninja"; one of each version


def all_ninjas() -> dict[str, str]:
    folders = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]
    if (package := importlib.util.find_spec("ninja")) is not None and package.origin:
        folders.append(str(Path(package.origin).parent / "data/bin"))
    found: dict[str, str] = {}
    for folder in folders:
        place = shutil.which("ninja", path=folder) if folder else None
        if place is not None:
            done = subprocess.run([place, "--version"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found.setdefault(done.stdout.strip(), place)
    return found


NINJAS = all_ninjas()


@pytest.mark.parametrize("way", ["alone", "-j4", "under make -j2"])
@pytest.mark.parametrize("version", sorted(NINJAS))
def test_ninja_with_and_without_jobs(workshop: Workshop, version: str, way: str) -> None:
    ninja = NINJAS[version]
    units = [workshop.unit(f"u{i}.cpp", 50 + 5 * i) for i in range(4)]
    write_ninja(workshop, units)
    command: tuple[str, ...] = (ninja, "-j4") if way == "-j4" else (ninja,)
    if way.startswith("under"):  # 1.13 then takes its turns from make's jobserver
        (workshop.folder / "Makefile").write_text(f"all:\n\t+{ninja}\n")
        command = ("make", "-s", "-j2")
    names = [f"u{i}.o" for i in range(4)]
    assert workshop.plain(*command).returncode == 0
    plain = {name: (workshop.folder / name).read_bytes() for name in names}
    for file in [*workshop.folder.glob("*.o"), *workshop.folder.glob(".ninja*")]:
        file.unlink()
    done = workshop.build(*command, memory_bytes=160_000_000, jobs=4)
    assert done.code == 0, done.err
    assert sorted(s["unit"] for s in done.profile["stages"]) == [f"u{i}.cpp" for i in range(4)]
    assert done.profile["peak_bytes"] <= 0.9 * sum(s["peak_bytes"] for s in done.profile["stages"])
    assert {name: (workshop.folder / name).read_bytes() for name in names} == plain
    still = workshop.build(*command)
    assert (still.code, still.profile["stages"]) == (0, [])
    assert "no work to do" in still.out
    (workshop.folder / "u2.cpp").write_text("int f() { return x; }\n")
    ours, theirs = workshop.build(*command), workshop.plain(*command)
    # ninja 1.13 repeats make's flags, and fewbits shows make more jobs than two (see window.py).
    told = [re.sub(r"( -j)\d+( --jobserver)", r"\1N\2", out) for out in (ours.out, theirs.stdout)]
    assert (ours.code, told[0], ours.err) == (theirs.returncode, told[1], theirs.stderr)
    assert ours.code != 0
    assert "'x' was not declared" in ours.out
