"""Do the oldest and the newest versions that the metadata allows work? Run nightly, and before a tag.

Each case is a new environment: a Python, the lowest or the highest version of each package that has a lower
bound in pyproject.toml (torch, transformers, PEFT, TRL, what exports and peers need, pytest), the newest of
the rest, and no constraints file. In it run the tests that use those packages most. On the oldest Python
every lower bound has to be met to the digit: it is a claim that this version was tried.

    python scripts/version_matrix.py                         # both, each with the oldest and newest Python
    python scripts/version_matrix.py --resolve-only          # what they would be, without installing
    python scripts/version_matrix.py oldest --python 3.11 --torch 2.13.0+cpu --find-links FOLDER

No Python is downloaded: where this machine lacks the oldest or the newest, a line says so and the nearest
that it has takes the place. The ordinary Linux build of torch brings several GB; ``--torch`` and
``--find-links`` name another that stands in a folder. Kernels are compiled with the Triton that torch brings;
some also run under its interpreter, where that can interpret a plain kernel with the numpy beside it.

Ends with 1 where a case does not resolve or a test fails: then mend it, or bound the version in
pyproject.toml with a comment that names what fails. ``--keep FOLDER`` leaves the environments there.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from check_install import PYTHONS, ROOT, Resolver
from packaging.version import Version

EXTRAS = ("train", "bench", "export")
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
TESTS = (
    "tests/test_import.py",
    "tests/models/test_convert.py",
    "tests/models/test_adapters.py",
    "tests/models/test_fast.py",
    "tests/models/test_packed_folder.py",
    "tests/models/test_trl.py",
    "tests/inference/test_generate.py",
    "tests/formats",
    "tests/export",
)
COMPILED = ("-m", "not nightly", "tests/kernels/test_cubins.py")  # every kernel's every case
PROBE = "tests/kernels/interpreter_probe.py"
INTERPRETED = ("tests/kernels/test_rmsnorm.py", "tests/kernels/test_quantize.py")


def requirements() -> list[str]:
    """What the metadata asks for, with the extras for users, and pytest with its plugins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(r for extra in EXTRAS for r in extras[extra])]
    return [*asked, *(r for r in extras["test"] if r.startswith("pytest"))]


def bounded() -> dict[str, str]:
    """Those that have a lower bound, by name: what the oldest case takes at that bound."""
    return {re.split(r"[<>=!~\[ ]", r)[0]: r for r in requirements() if ">=" in r}


def interpreter(resolver: Resolver, version: str) -> Path | None:
    """A Python of that version on this machine: one that uv finds, or else one of pyenv's."""
    found = resolver.run("python", "find", version)
    if found.returncode == 0:
        return Path(found.stdout.strip())
    with contextlib.suppress(OSError):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        return max(Path(root, "versions").glob(f"{version}.*/bin/python"), default=None) if root else None
    return None


def both_ends(resolver: Resolver) -> list[str]:
    """The oldest and the newest Python that fewbits is tried on, or the nearest that are here."""
    here = [version for version in PYTHONS if interpreter(resolver, version)]
    if not here:
        raise SystemExit(f"none of Python {', '.join(PYTHONS)} is on this machine: install one")
    chosen = []
    for wanted, nearest in ((PYTHONS[0], here[0]), (PYTHONS[-1], here[-1])):
        if wanted != nearest:
            print(f"Python {wanted} is not on this machine and none is downloaded: {nearest} takes its place")
        if nearest not in chosen:
            chosen.append(nearest)
    return chosen


def lowest(requirement: str) -> str:
    return re.split(r"[>=]=([\d.]+)", requirement)[1]


def above_bounds(wanted: dict[str, str], versions: dict[str, str]) -> list[str]:
    """The packages that have another version than the lowest that is asked for."""
    return [name for name, found in versions.items() if Version(found) != Version(lowest(wanted[name]))]


class Case:
    """One Python with one end of the allowed versions."""

    def __init__(self, end: str, python: str, options: argparse.Namespace) -> None:
        self.end, self.python, self.torch, self.keep = end, python, options.torch, options.keep
        self.resolver = Resolver()
        self.resolver.env.pop("PYTHONPATH", None)  # another checkout's fewbits may stand there
        self.links = ["--find-links", str(options.find_links)] if options.find_links else []

    def compile(self, folder: Path, wanted: dict[str, str]) -> tuple[dict[str, str], str]:
        file = folder / "bounded.in"
        file.write_text("\n".join(wanted.values()) + "\n", encoding="utf-8")
        ends = ("--python-version", self.python, "--resolution", RESOLUTIONS[self.end])
        versions, error = self.resolver.compile([str(file)], *ends, *self.links)
        return {name: versions[name] for name in wanted if name in versions}, error

    def resolve(self, folder: Path) -> tuple[dict[str, str], str]:
        """The version of every package that has a bound; or none, and why."""
        wanted = bounded()
        if self.torch:
            wanted["torch"] = f"torch=={self.torch}"
        versions, error = self.compile(folder, wanted)
        if error or self.end == "newest":
            return versions, error
        # Where packages conflict, the resolver may raise one to another version than the conflict asks for.
        for name in above_bounds(wanted, versions):
            pinned = {**wanted, name: f"{name}=={lowest(wanted[name])}"}
            found, _ = self.compile(folder, pinned)
            wanted, versions = (pinned, found) if found else (wanted, versions)
        above = [f"{name} {versions[name]}" for name in above_bounds(bounded(), versions) if name != "torch"]
        if above and self.python == PYTHONS[0]:
            return versions, f"no environment has the lower bounds of pyproject.toml but {', '.join(above)}"
        return versions, ""

    def install(self, folder: Path, versions: dict[str, str]) -> tuple[Path, str]:
        """The Python of a new environment with these versions; and what went wrong."""
        home, base = folder / "environment", interpreter(self.resolver, self.python)
        if base is None:
            return home, f"Python {self.python} is not on this machine: install it or name another, --python"
        made = self.resolver.run("venv", "--clear", "--python", str(base), str(home))
        if made.returncode != 0:
            return home, made.stderr
        python = home / "bin" / "python"
        words = [f"{name}=={version}" for name, version in versions.items()]
        words += [*requirements(), *self.links, "--editable", str(ROOT)]
        env = {**self.resolver.env, "UV_NO_CONFIG": "1"}
        command = [self.resolver.uv, "pip", "install", "-q", "--python", str(python), *self.resolver.index]
        done = subprocess.run([*command, *words], env=env, cwd=ROOT, capture_output=True, text=True)
        return python, done.stderr if done.returncode else ""

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Where the environment stands: a folder that goes away again, or one below the folder to keep."""
        if self.keep:
            place = self.keep.resolve() / f"{self.end}-{self.python}"
            place.mkdir(parents=True, exist_ok=True)
            yield place
        else:
            with tempfile.TemporaryDirectory() as name:
                yield Path(name)

    def run(self, resolve_only: bool) -> bool:
        """Say in lines how it went, and below them what failed; whether all went well."""
        began = time.monotonic()
        with self.folder() as folder:
            versions, error = self.resolve(folder)
            shown = ", ".join(f"{name} {version}" for name, version in versions.items())
            print(f"{self.end}, Python {self.python}: {shown}", flush=True)
            if not error and not resolve_only:
                python, error = self.install(folder, versions)
                print(f"  installed after {time.monotonic() - began:.0f} s", flush=True)
                if not error:
                    error = self.test(python, folder, *TESTS) + self.test(python, folder, *COMPILED)
                    error += self.interpret(python, folder)
        word = "FAILED" if error else "resolves" if resolve_only else "ok"
        print(f"  {word} after {time.monotonic() - began:.0f} s\n{error}".rstrip(), flush=True)
        return not error

    def test(self, python: Path, folder: Path, *words: str, **variables: str) -> str:
        """The end of what pytest wrote of ``words``, where a test fails."""
        command = [str(python), "-m", "pytest", "-o", f"cache_dir={folder / 'cache'}"]
        command += [
            "--tb=short",
            "--show-capture=no",
            "--disable-warnings",
        ]  # so that the end says what failed
        command += words
        env = {**self.resolver.env, **variables}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        print(f"  {(done.stdout.strip() or 'pytest said nothing').splitlines()[-1]}", flush=True)
        return "" if done.returncode == 0 else done.stdout[-6000:] + done.stderr[-2000:]

    def interpret(self, python: Path, folder: Path) -> str:
        """The same of kernels under Triton's interpreter, where it can interpret a plain kernel."""
        env = {**self.resolver.env, "TRITON_INTERPRET": "1"}
        probe = subprocess.run([str(python), PROBE], cwd=ROOT, env=env, capture_output=True, text=True)
        if probe.returncode != 0:
            why = (probe.stderr.strip() or "it said nothing").splitlines()[-1]
            print(f"  nothing was interpreted: a plain kernel is not, with this Triton and numpy ({why})")
            return ""
        return self.test(python, folder, "-m", "interpret", *INTERPRETED, TRITON_INTERPRET="1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("end", nargs="*", choices=[*RESOLUTIONS, []], help="default: both")
    parser.add_argument("--python", action="append", help="a version, as 3.11; may be given more than once")
    parser.add_argument("--torch", help="this version of torch, whichever the case")
    parser.add_argument("--find-links", type=Path, help="a folder of wheels besides the index")
    parser.add_argument("--keep", type=Path, help="a folder in which the environments are left")
    parser.add_argument("--resolve-only", action="store_true", help="say the versions and install nothing")
    options = parser.parse_args()
    pythons = options.python or ((PYTHONS[0], PYTHONS[-1]) if options.resolve_only else both_ends(Resolver()))
    cases = [Case(end, python, options) for end in options.end or RESOLUTIONS for python in pythons]
    went_well = [case.run(options.resolve_only) for case in cases]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
