"""Do the oldest and the newest versions that the metadata allows work? Run nightly, and before a tag.

Each case is a new environment: a Python, the lowest or the highest version of each package that models and
adapters live in (torch, transformers, PEFT, TRL, accelerate, datasets, safetensors), the newest of the rest,
and no constraints file. In it run the tests that use those packages most.

    python scripts/version_matrix.py                         # both, each with the oldest and newest Python
    python scripts/version_matrix.py --resolve-only          # what they would be, without installing
    python scripts/version_matrix.py oldest --python 3.11 --torch 2.13.0+cpu --find-links FOLDER

The ordinary Linux build of torch brings several GB; ``--torch`` and ``--find-links`` name another that stands
in a folder. Ends with 1 where a case does not resolve or a test fails: then mend it, or bound the version in
pyproject.toml with a comment that names what fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from check_install import PYTHONS, ROOT, Resolver

NAMED = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors")
TOOLS = ("pytest", "pytest-timeout", "bitsandbytes")
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
TESTS = (
    "tests/test_import.py",
    "tests/models/test_convert.py",
    "tests/models/test_adapters.py",
    "tests/models/test_fast.py",
    "tests/models/test_trl.py",
    "tests/inference/test_generate.py",
)


def requirements() -> list[str]:
    """What the metadata asks for to train, without fewbits itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["train"]]


def is_named(requirement: str) -> bool:
    return re.split(r"[<>=!~\[ ]", requirement)[0] in NAMED


class Case:
    """One Python with one end of the allowed versions."""

    def __init__(self, end: str, python: str, options: argparse.Namespace) -> None:
        self.end, self.python, self.torch = end, python, options.torch
        self.resolver = Resolver()
        self.links = ["--find-links", str(options.find_links)] if options.find_links else []

    def resolve(self, folder: Path) -> tuple[dict[str, str], str]:
        """Every named package's version; or none, and why."""
        wanted = [r for r in requirements() if is_named(r)]
        if self.torch:
            wanted = [r for r in wanted if not r.startswith("torch")] + [f"torch=={self.torch}"]
        file = folder / "named.in"
        file.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        ends = ("--python-version", self.python, "--resolution", RESOLUTIONS[self.end])
        versions, error = self.resolver.compile([str(file)], *ends, *self.links)
        return {name: v for name, v in versions.items() if name in NAMED}, error

    def install(self, folder: Path, versions: dict[str, str]) -> tuple[Path, str]:
        """The Python of a new environment with these versions; and what went wrong."""
        home = folder / "environment"
        made = self.resolver.run("venv", "--python", self.python, str(home))
        if made.returncode != 0:
            return home, made.stderr
        python = home / "bin" / "python"
        words = [f"{name}=={version}" for name, version in versions.items()]
        words += [*requirements(), *TOOLS, *self.links, "--editable", str(ROOT)]
        env = {**self.resolver.env, "UV_NO_CONFIG": "1"}
        command = [self.resolver.uv, "pip", "install", "-q", "--python", str(python), *self.resolver.index]
        done = subprocess.run([*command, *words], env=env, cwd=ROOT, capture_output=True, text=True)
        return python, done.stderr if done.returncode else ""

    def run(self, resolve_only: bool) -> bool:
        """Say in a line how it went, and below it what failed; whether all went well."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            versions, error = self.resolve(Path(name))
            shown = ", ".join(f"{n} {versions[n]}" for n in NAMED if n in versions)
            if not error and not resolve_only:
                python, error = self.install(Path(name), versions)
                error = error or self.test(python, Path(name))
        word = "FAILED" if error else "resolves" if resolve_only else "ok"
        print(f"{self.end}, Python {self.python}: {shown}")
        print(f"  {word} after {time.monotonic() - began:.0f} s\n{error}".rstrip(), flush=True)
        return not error

    def test(self, python: Path, folder: Path) -> str:
        """The tests' end where one fails."""
        command = [str(python), "-m", "pytest", "--tb=short", "-o", f"cache_dir={folder / 'cache'}", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=self.resolver.env, capture_output=True, text=True)
        print(f"  {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else 'pytest said nothing'}")
        return "" if done.returncode == 0 else done.stdout[-6000:] + done.stderr[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("end", nargs="*", choices=[*RESOLUTIONS, []], help="default: both")
    parser.add_argument("--python", action="append", help="a version, as 3.11; may be given more than once")
    parser.add_argument("--torch", help="this version of torch, whichever the case")
    parser.add_argument("--find-links", type=Path, help="a folder of wheels besides the index")
    parser.add_argument("--resolve-only", action="store_true", help="say the versions and install nothing")
    options = parser.parse_args()
    cases = [
        Case(end, python, options)
        for end in options.end or RESOLUTIONS
        for python in options.python or (PYTHONS[0], PYTHONS[-1])
    ]
    went_well = [case.run(options.resolve_only) for case in cases]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
