"""Is what an index would hand out whole? Builds both distributions and runs the demo from the wheel alone.

The source distribution is built from the files that git knows (what lies beside them in a checkout would hide
a file that is missing), the wheel from the source distribution. The wheel has to hold every file of src/, to
the byte, and nothing else. It is installed into a new environment that has what its metadata asks for and
nothing besides (linked_packages.py links that from where this runs), and `fewbits demo` and a `fewbits build`
run there from a folder of their own: an import that is not declared fails. The build runner, `fewjobs`, is
then installed alone into another one, without torch.

    python scripts/check_wheel.py [--keep FOLDER] [--few-steps]

With --few-steps the demo has every part, and too few steps to learn: whether it learns is then not asked.

Needs setuptools from pip's index or folders, as `pip install -e .` does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from linked_packages import declared_packages, link_packages, requirements

ROOT = Path(__file__).resolve().parents[1]
BUILD_SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
NEEDED_BESIDE = ("pyproject.toml", "README.md", "LICENSE", "PKG-INFO")  # in the source distribution
WHERE = "import fewbits, fewbits.cli, fewjobs; print(fewbits.__file__, fewjobs.__file__, sep='\\n')"
RUNNER = "src/fewjobs"
NOT_IN_WHEEL = {f"{RUNNER}/pyproject.toml"}  # for those who install the runner alone
HAS_TORCH = "import importlib.util as i; print([n for n in ('torch', 'fewbits') if i.find_spec(n)])"
FEW_STEPS = """
import sys
from dataclasses import replace
from fewbits.demo import run
run.QUICK = replace(run.QUICK, steps=4, num_test=7, target=0.0)
sys.exit(run.run_demo(quick=True))
"""
A_BUILD = ("--", "sh", "-c", "echo built")


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """What it wrote; ends this program where it fails. No fewbits comes in by the environment."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(command, cwd=cwd, env={**env, **variables}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def tracked(folder: str = "") -> list[Path]:
    """The files that git knows, below ``folder``, relative to the checkout."""
    said = run(["git", "ls-files", "-z", "--", *([folder] if folder else [])], ROOT)
    return [Path(name) for name in said.split("\0") if name and (ROOT / name).is_file()]


def build(work: Path) -> tuple[Path, Path]:
    """The source distribution and the wheel that is built from it."""
    tree, tools, made = work / "tree", work / "tools", work / "dist"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    made.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "-q", "--no-deps", "--target", str(tools), "setuptools>=77"], work)
    said = run([sys.executable, "-c", BUILD_SDIST, str(made)], tree, PYTHONPATH=str(tools))
    source = made / said.strip().splitlines()[-1]
    run([*pip, "wheel", "-q", "--no-deps", "-w", str(made), str(source)], work)
    (wheel,) = made.glob("*.whl")
    return source, wheel


def compare(source: Path, wheel: Path) -> list[str]:
    """What is missing, too much or other than in the checkout, one sentence each."""
    files = [path for path in tracked("src") if path.as_posix() not in NOT_IN_WHEEL]
    wanted = {path.relative_to("src").as_posix(): (ROOT / path).read_bytes() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    about = {name for name in held if ".dist-info/" in name}
    found = [f"the wheel lacks {name}" for name in sorted(wanted.keys() - held.keys())]
    found += [f"the wheel holds {name} besides" for name in sorted(held.keys() - wanted.keys() - about)]
    same = wanted.keys() & held.keys()
    found += [
        f"{name} in the wheel is other than here" for name in sorted(same) if wanted[name] != held[name]
    ]
    if not any(name.endswith("/LICENSE") for name in about):
        found.append("the wheel lacks LICENSE")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {f"src/{name}" for name in wanted} | set(NEEDED_BESIDE)
    return found + [f"the source distribution lacks {name}" for name in sorted(needed - names)]


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with this wheel and what it asks for, linked from where this program runs."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    link_packages(declared_packages(requirements(wheel)), site)
    return python


def check_runner(work: Path) -> str:
    """What is wrong with the build runner where nothing else is installed, or ""."""
    tree, folder = work / "runner", work / "alone"
    for name in tracked(RUNNER):
        (tree / name.relative_to(RUNNER)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name.relative_to(RUNNER))
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "-q", str(tree)], work)
    if (others := run([str(python), "-c", HAS_TORCH], work).strip()) != "[]":
        return f"{others} came with fewjobs, which has to do without"
    variables = {"HOME": str(work), "XDG_CACHE_HOME": str(work / "cache")}
    said = run([str(python.with_name("fewjobs")), *A_BUILD], work, **variables)
    run([str(python.with_name("fewjobs")), "--doctor"], work, **variables)
    return "" if said == "built\n" else f"fewjobs ran a build that printed {said!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="copy both distributions into this folder")
    parser.add_argument("--few-steps", action="store_true", help="a demo that is too short to learn")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        source, wheel = build(work)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for made in (source, wheel):
                shutil.copy(made, options.keep)
        print(f"{source.name}, {wheel.name}: built after {time.monotonic() - began:.0f} s")
        if wrong := compare(source, wheel):
            print("\n".join(wrong))
            return 1
        print(f"every one of the {len(tracked('src')) - len(NOT_IN_WHEEL)} files of src/ is in both")
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        python = install(wheel, work / "environment")
        for place in run([str(python), "-c", WHERE], elsewhere).split():
            if work / "environment" not in Path(place).parents:
                print(f"{place} was imported, which is not from the wheel")
                return 1
        run(
            [str(python.with_name("fewbits")), "build", *A_BUILD],
            elsewhere,
            XDG_CACHE_HOME=str(work / "cache"),
        )
        if wrong := check_runner(work):
            print(wrong)
            return 1
        print("fewbits build ran from the wheel, and fewjobs alone, without torch")
        whole = [str(python.with_name("fewbits")), "demo", "--quick"]
        said = run([str(python), "-c", FEW_STEPS] if options.few_steps else whole, elsewhere)
        print(*[line.strip("│ ") for line in said.splitlines() if "exact answers  " in line])
    print(f"the demo ran from the wheel alone; {time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
