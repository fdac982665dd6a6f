"""Units that take a given memory, and builds in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fewjobs.native import Native, build_native

ROOT = Path(__file__).resolve().parents[2]
# Times and moments mean something only where nobody else computes; the rest is asserted everywhere.
QUIET = bool(os.environ.get("FEWBITS_QUIET_MACHINE"))
FULL = bool(os.environ.get("FEWBITS_FULL_SCENARIOS"))
full = pytest.mark.skipif(not FULL, reason="minutes; set FEWBITS_FULL_SCENARIOS=1")
DRIVER = """
import json, sys
sys.path.insert(0, {source!r})
from pathlib import Path
from fewjobs.runner import Settings, run_build
options = json.loads(sys.argv[1])
profile = options.pop("profile")
for name in ("keep", "log"):
    if name in options:
        options[name] = Path(options[name])
result = run_build(sys.argv[2:], Settings(**options))
if result.profile:
    Path(profile).write_text(json.dumps(result.profile))
sys.exit(result.code)
"""


def write_unit(path: Path, megabytes: float, name: str = "t") -> Path:
    """A C++ source whose compiler needs about so much memory, and a second for each 150 MB."""
    rows = max(1, int((megabytes - 25) * 970))
    text = ",".join(f"{{{i}u,{i * 7919 % 65536}u,{i * i % 97}u}}" for i in range(rows))
    path.write_text(
        f"struct S{{unsigned a,b,c;}}; extern const S {name}[]; const S {name}[]={{{text}}};\n",
        encoding="utf-8",
    )
    return path


@dataclass
class Done:
    """How a build went."""

    code: int
    out: str
    err: str
    profile: dict[str, Any]


class Workshop:
    """A folder to build in, with a cache of its own."""

    def __init__(self, folder: Path, native: Native, home: Path) -> None:
        self.folder, self.native, self.home = folder, native, home
        self.env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_CACHE_HOME": str(home), "LANG": "C"}
        root = home / "fewbits/build"
        root.mkdir(parents=True, exist_ok=True)
        if native.launcher is not None:
            (root / "native").symlink_to(native.launcher.parent.parent)

    @property
    def root(self) -> Path:
        return self.home / "fewbits/build"

    def command(self, *words: str, **options: Any) -> list[str]:
        options.setdefault("memory_bytes", 400_000_000)
        options["profile"] = str(self.home / "profile.json")
        driver = DRIVER.format(source=str(ROOT / "src"))
        return [sys.executable, "-S", "-c", driver, json.dumps(options), *words]

    def start(self, *words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words, **options),
            cwd=self.folder,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def build(self, *words: str, env: dict[str, str] | None = None, **options: Any) -> Done:
        profile = self.home / "profile.json"
        profile.unlink(missing_ok=True)
        process = self.start(*words, env=env, **options)
        out, err = process.communicate(timeout=280)
        found = json.loads(profile.read_text()) if profile.exists() else {}
        return Done(process.returncode, out, err, found)

    def last_profile(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "profile.json").read_text())
        return found

    def plain(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )

    def unit(self, name: str, megabytes: float) -> Path:
        return write_unit(self.folder / name, megabytes, f"t{abs(hash(name)) % 10**6}")


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """The launcher and the pager, compiled once for all tests."""
    if sys.platform != "linux" or shutil.which("g++", path="/usr/bin:/bin") is None:
        pytest.skip("needs Linux and g++")
    made = build_native(tmp_path_factory.mktemp("native") / "native", {"PATH": "/usr/bin:/bin"})
    if made.launcher is None:
        pytest.skip(made.reason)
    return made


@pytest.fixture
def workshop(tmp_path: Path, native: Native) -> Workshop:
    folder = tmp_path / "work"
    folder.mkdir()
    return Workshop(folder, native, tmp_path / "home")


@pytest.fixture
def ninja() -> str:
    found = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin")
    if found is None:
        pytest.skip("needs ninja")
    return found


NinjaFile = Callable[[Workshop, list[Path]], None]


def write_ninja(workshop: Workshop, units: list[Path], flags: str = "-O0") -> None:
    lines = [
        f"rule cc\n  command = g++ {flags} -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc\n"
    ]
    lines += [f"build {unit.stem}.o: cc {unit.name}\n" for unit in units]
    (workshop.folder / "build.ninja").write_text("".join(lines))
