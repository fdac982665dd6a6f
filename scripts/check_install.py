"""Do the README's two commands resolve on machines that are not this one? Asks an index for metadata only.

Every folder of wheels and every other index that pip knows here is left out, because it would hide what a
plain index does. Three kinds of machine, for each of the README's commands:

* the plain index on Linux, x86-64 and aarch64, Python 3.11 to 3.14, with wheels alone;
* a build of torch for CPUs, which stands in a folder as a wheel without content (what matters are its name,
  its version and what it asks for);
* an environment that already has the oldest torch that fewbits takes, with all that this brings: both stay.

    python scripts/check_install.py

Ends with 1 where one does not resolve, and says what the resolver says. Without an index nothing is proved:
it says so and ends with 77, by which .ci/run counts the step as skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).resolve().parents[1]
NOT_PROVED = 77  # the exit status of a check that could not be made
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
# What torch's builds for CPUs ask for; those of the plain index ask for CUDA libraries and Triton as well.
CPU_BUILD_NEEDS = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx", "jinja2", "fsspec")


def pip_setting(name: str) -> str | None:
    """What pip is told here by its files or its environment; None where it is not."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(rf"^[^=\n]*\.{re.escape(name)}='(.*)'$", listed, re.MULTILINE)
    return found[-1] if found else None


class Resolver:
    """uv, with the one index that pip would ask and nothing else."""

    def __init__(self) -> None:
        self.uv = find_uv_bin()
        unwanted = ("UV_", "PIP_", "VIRTUAL_ENV", "CONDA_PREFIX")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        if certificates := pip_setting("cert"):
            self.env.setdefault("SSL_CERT_FILE", certificates)
        index = pip_setting("index-url")
        self.index = ["--default-index", index] if index else []

    def run(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [self.uv, *words, "--no-config", "--no-python-downloads", *self.index]
        return subprocess.run(
            command, input=text, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=300
        )

    def compile(self, words: list[str], *options: str) -> tuple[dict[str, str], str]:
        """Each package's version, or none and the resolver's words."""
        done = self.run(
            *("pip", "compile", *words, *options, "--only-binary", ":all:"),
            *("--no-header", "--no-annotate", "--quiet"),
        )
        found = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", done.stdout, re.MULTILINE))
        return (found, "") if done.returncode == 0 and found else ({}, done.stderr.strip() or "nothing found")


def readme_commands() -> list[str]:
    """The arguments of pip install in the README's two commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    found = re.findall(r"pip install (-c \S+ -e \S+)", blocks)
    if len(found) != 2:
        raise SystemExit(f"the README has {len(found)} commands with pip install -c FILE -e TARGET, not 2")
    return found


def for_compile(arguments: str, constraints: Path | None) -> list[str]:
    """``-c FILE -e .[EXTRA]`` in uv's words."""
    _, file, _, target = shlex.split(arguments)
    extra = target.partition("[")[2].rstrip("]")
    return ["pyproject.toml", "-c", str(constraints or file), *(["--extra", extra] if extra else [])]


def bound(package: str, sign: str, path: Path) -> str:
    """The version in ``path`` that stands after ``sign`` in the line of ``package``."""
    line = re.search(rf'^[ "]*{package}[<=>].*$', path.read_text(encoding="utf-8"), re.MULTILINE)
    found = line and re.search(rf"{sign}([\d.]+)", line[0])
    if not found:
        raise SystemExit(f"{path.name} has no line {package} with {sign}")
    return found[1]


def metadata(name: str, version: str, needs: Iterator[str] | tuple[str, ...] = ()) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]) + "\n"


def write_cpu_build(folder: Path, version: str) -> None:
    """A wheel of torch for CPUs, without content."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata("torch", version, CPU_BUILD_NEEDS))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _need(package: str, version: str) -> str:
    """What torch asks for: its own binaries by their version, packages in Python by their name alone.

    Of CUDA's packages in Python it gives cuda-bindings a range, and names no cuda-pathfinder.
    """
    return f"{package}=={version}" if package.startswith(("triton", "nvidia-", "cuda-toolkit")) else package


def write_environment(resolver: Resolver, folder: Path, installed: dict[str, str]) -> str:
    """A virtual environment in which ``installed`` looks installed; its Python."""
    done = resolver.run("venv", "--python", sys.executable, str(folder))
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version in installed.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = tuple(_need(n, v) for n, v in installed.items() if name == "torch" and n != "torch")
        (info / "METADATA").write_text(metadata(name, version, needs), encoding="utf-8")
        (info / "RECORD").touch()
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    return str(folder / "bin" / "python")


class Report:
    """One line a case, and whether all of them resolved."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, case: str, versions: dict[str, str], error: str) -> None:
        self.failed += bool(error)
        shown = ", ".join(f"{n} {versions[n]}" for n in ("torch", "triton", "numpy") if n in versions)
        print(f"{case:44} {'FAILED' if error else f'{len(versions)} packages: {shown}'}")
        if error:
            print(error)


def check_plain_index(resolver: Resolver, report: Report, commands: list[list[str]]) -> None:
    for python in PYTHONS:
        for machine in MACHINES:
            platform = ("--python-version", python, "--python-platform", f"{machine}-manylinux_2_28")
            for number, words in enumerate(commands, 1):
                case = f"plain index, {machine}, Python {python}, command {number}"
                report.say(case, *resolver.compile(words, *platform))


def check_cpu_build(resolver: Resolver, report: Report, commands: list[list[str]], version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_cpu_build(Path(folder), version)
        for number, words in enumerate(commands, 1):
            found, error = resolver.compile(
                words, "--find-links", folder, "--python-platform", "x86_64-manylinux_2_28"
            )
            if not error and found["torch"] != version:
                error = f"torch {found['torch']} was taken, not {version}"
            report.say(f"CPU build at hand, command {number}", found, error)


def check_installed(
    resolver: Resolver, report: Report, commands: list[str], constraints: Path | None, version: str
) -> None:
    """What the index gives for torch alone is there first, and is taken where it satisfies."""
    linux = ("--python-platform", "x86_64-manylinux_2_28")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "torch.in")
        wanted.write_text(f"torch=={version}\n", encoding="utf-8")
        there, error = resolver.compile([str(wanted)], *linux)
        if error:
            report.say(f"torch {version} alone", there, error)
            return
        python = write_environment(resolver, Path(folder, "environment"), there)
        for number, arguments in enumerate(commands, 1):
            words = shlex.split(arguments)
            words[1] = str(constraints or words[1])
            done = resolver.run("pip", "install", "--dry-run", "--python", python, *words, *linux)
            error = done.stderr if done.returncode else ""
            moved = re.findall(r"^ - (\S+?)==", done.stderr, re.MULTILINE)
            kept = {name: v for name, v in there.items() if name not in moved}
            if not error and not {"torch", "triton"} <= kept.keys():
                error = f"it would replace {', '.join(moved)}"
            report.say(f"torch {version} installed, kept, command {number}", kept, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constraints", type=Path, help="a file in place of the one that the README names")
    options = parser.parse_args()
    resolver, report = Resolver(), Report()
    if resolver.run("pip", "compile", "-", "--quiet", text="packaging\n").returncode != 0:
        print("not proved: no index reachable, and only it knows what resolves")
        return NOT_PROVED
    commands = readme_commands()
    compiled = [for_compile(arguments, options.constraints) for arguments in commands]
    check_plain_index(resolver, report, compiled)
    pins = options.constraints or ROOT / shlex.split(commands[0])[1]
    check_cpu_build(resolver, report, compiled, f"{bound('torch', '[=<]=', pins)}+cpu")
    oldest = bound("torch", ">=", ROOT / "pyproject.toml")
    check_installed(resolver, report, commands, options.constraints, f"{oldest}.0")
    print(f"{report.failed} cases do not resolve" if report.failed else "every case resolves")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
