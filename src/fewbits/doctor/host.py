"""The machine that is looked at: its files, commands and packages. Tests put a staged one in its place."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

# A broken torch may raise anything, print, hang or crash: it is tried in a process of its own.
TORCH_PROBE = """
import json
facts = {}
try:
    import torch
except ModuleNotFoundError as error:
    facts = {"absent": True} if error.name == "torch" else {"error": repr(error)}
except BaseException as error:
    facts = {"error": repr(error)}
else:
    def ask(name, question):
        try:
            facts[name] = question()
        except BaseException as error:
            facts.setdefault("failed", {})[name] = repr(error)
    ask("version", lambda: str(torch.__version__))
    ask("cuda", lambda: torch.version.cuda)
    ask("architectures", lambda: torch._C._cuda_getArchFlags().split() if torch.version.cuda else [])
    ask("sees_gpu", lambda: torch.cuda.is_available())
    ask("cudnn", lambda: torch.backends.cudnn.version())
    ask("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None)
print("\\nfewbits-doctor " + json.dumps(facts))
"""


class Output(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str = ""
    timed_out: bool = False


class Gpu(NamedTuple):
    """One GPU, as the driver names it."""

    name: str
    driver: str
    capability: tuple[int, int]


@dataclass
class Host:
    """Where the checks look.

    Attributes:
        root: where ``proc``, ``sys``, ``usr`` are.
        environ: environment variables.
        python: the interpreter whose packages are looked at.
        packages: the folders they are in.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: str = sys.executable
    packages: Sequence[str] = field(default_factory=lambda: [p for p in sys.path if p])

    def run(self, *argv: str, timeout_s: float = 20.0) -> Output | None:
        """Run a command; None if there is no such command."""
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return Output(124, "", "", timed_out=True)
        except OSError:
            return None
        return Output(done.returncode, done.stdout, done.stderr)

    def which(self, name: str) -> str | None:
        """Where a command is."""
        return shutil.which(name, path=self.environ.get("PATH", ""))

    def read(self, path: str | Path) -> str:
        """A file's text below the root, or nothing."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def at(self, path: str | Path) -> Path:
        """The same path below the root."""
        return self.root / str(path).lstrip("/")

    def space(self, path: str | Path) -> tuple[int, int] | None:
        """Total and free bytes of the file system that holds a path."""
        try:
            usage = shutil.disk_usage(self.at(path))
        except OSError:
            return None
        return usage.total, usage.free

    @property
    def machine(self) -> str:
        """The processor's architecture."""
        return platform.machine()

    @cached_property
    def torch(self) -> dict[str, Any]:
        """What torch says of itself: "absent", or "error", or its version and what it was built for."""
        done = self.run(self.python, "-c", TORCH_PROBE, timeout_s=90)
        if done is None:
            return {"error": f"{self.python} cannot be started"}
        for line in reversed(done.out.splitlines()):
            if line.startswith("fewbits-doctor "):
                facts: dict[str, Any] = json.loads(line.removeprefix("fewbits-doctor "))
                return facts
        how = "does not end" if done.timed_out else f"ends the process with code {done.code}"
        return {"error": f"import torch {how}"}

    @cached_property
    def smi(self) -> Output | None:
        """nvidia-smi's list of GPUs."""
        return self.run("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The GPUs that the driver shows."""
        lines = self.smi.out.splitlines() if self.smi is not None and self.smi.code == 0 else []
        matches = (re.fullmatch(r"(.+), *([\d.]+), *(\d+)\.(\d+)", line.strip()) for line in lines)
        return [Gpu(m[1], m[2], (int(m[3]), int(m[4]))) for m in matches if m is not None]

    @cached_property
    def nvcc(self) -> str | None:
        """The CUDA compiler: of CUDA_HOME, on the PATH, or where the toolkit installs itself."""
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            path = Path(self.environ.get(variable) or "/nonexistent") / "bin/nvcc"
            if self.at(path).is_file():
                return str(self.at(path))
        usual = self.at("/usr/local/cuda/bin/nvcc")
        return self.which("nvcc") or (str(usual) if usual.is_file() else None)

    @cached_property
    def toolkit(self) -> tuple[int, int] | None:
        """The CUDA compiler's release."""
        done = self.run(self.nvcc, "--version") if self.nvcc else None
        match = re.search(r"release (\d+)\.(\d+)", done.out) if done is not None else None
        return None if match is None else (int(match[1]), int(match[2]))

    def header(self, name: str) -> str:
        """The text of a header of CUDA or one of its libraries, or nothing."""
        return next((text for folder in self._include_folders() if (text := self.read(folder / name))), "")

    def _include_folders(self) -> list[Path]:
        variables = ("CUDNN_PATH", "CUDNN_HOME", "NCCL_HOME", "CUDA_HOME", "CUDA_PATH")
        homes = [Path(self.environ[v]) for v in variables if self.environ.get(v)]
        if self.nvcc:
            homes.append(Path(self.nvcc).resolve().parents[1])
        if self.toolkit is not None:
            homes.append(Path("/usr/local/cuda-{}.{}".format(*self.toolkit)))
        folders = [home / "include" for home in (*homes, Path("/usr/local/cuda"), Path("/usr"))]
        folders.append(Path(f"/usr/include/{self.machine}-linux-gnu"))
        for packages in self.packages:
            folders += [Path(packages) / f"nvidia/{library}/include" for library in ("cudnn", "nccl")]
        return folders

    @cached_property
    def distributions(self) -> list[tuple[str, str, list[str], Path]]:
        """Name, version, requirements and folder of every installed package; a shadowed one included."""
        distributions = {}
        for item in metadata.distributions(path=list(self.packages)):
            name = re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower()
            folder = Path(str(item.locate_file("")))
            if name:
                distributions[name, item.version, folder.resolve()] = (
                    name,
                    item.version,
                    item.requires or [],
                    folder,
                )
        return list(distributions.values())

    def version_of(self, name: str) -> str | None:
        """The version of an installed package."""
        return next((version for n, version, _, _ in self.distributions if n == name), None)
