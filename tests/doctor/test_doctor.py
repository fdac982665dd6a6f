"""The doctor on staged machines: a folder's files, commands with given output, a torch that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewbits.doctor import Finding, Host, diagnose, gpu, machine, packages
from fewbits.doctor.host import Output
from fewbits.doctor.wheels import wheel

GIB = 2**30
TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "sees_gpu": True, "nccl": "2.28.9"} | {
    "architectures": ["sm_80", "sm_90", "sm_100", "compute_120"]
}
H200 = "NVIDIA H200, 580.95.05, 9.0\n"
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n"
LIMITS = "Max open files    {files}    4096    files\nMax processes    4000    4000    processes\n"


class Staged(Host):
    """A host of a folder; ``commands`` maps the words that a command line contains to its output."""

    def __init__(self, root: Path, **environ: str) -> None:
        super().__init__(
            root=root, environ={"PATH": "", **environ}, python="py", packages=[str(root / "site")]
        )
        self.commands: dict[str, Output] = {}
        self.cpu, self.sizes = "x86_64", {}
        for folder in ("tmp", "site", "dev/shm"):
            (root / folder).mkdir(parents=True)
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/limits", LIMITS.format(files=1024))
        self.write("proc/self/mountinfo", "27 1 254:0 / / rw - ext4 /dev/vda rw\n")
        self.__dict__["torch"] = dict(TORCH)

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def run(self, *argv: str, timeout_s: float = 20.0) -> Output | None:
        line = " ".join(argv)
        return next((output for words, output in self.commands.items() if words in line), None)

    def says(self, words: str, out: str = "", code: int = 0, err: str = "") -> None:
        self.commands[words] = Output(code, out, err)

    def install(self, name: str, version: str, *requires: str) -> None:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in requires]
        self.write(f"site/{name.replace('-', '_')}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")

    def with_nvcc(self, release: str, newest_gcc: int = 15) -> None:
        self.write("usr/local/cuda/bin/nvcc")
        self.write("usr/local/cuda/include/crt/host_config.h", f"#if __GNUC__ > {newest_gcc}\n#error\n")
        self.says("nvcc --version", f"Cuda compilation tools, release {release}, V{release}.1\n")
        self.says("nvcc --list-gpu-code", "sm_75\nsm_80\nsm_90\nsm_100\n")

    @property
    def machine(self) -> str:
        return self.cpu

    def space(self, path: str | Path) -> tuple[int, int] | None:
        return self.sizes.get(str(path), (100 * GIB, 90 * GIB))


@pytest.fixture
def host(tmp_path: Path) -> Staged:
    return Staged(tmp_path)


def test_a_sound_machine(host: Staged) -> None:
    host.says("nvidia-smi", H200)
    host.with_nvcc("13.0")
    host.says("-dumpfullversion", "13.3.0\n")
    host.says("g++ --version", "g++ (Debian) 13.3.0\n")
    host.write(
        "usr/include/cudnn_version.h",
        "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 8\n#define CUDNN_PATCHLEVEL 0\n",
    )
    host.install("torch", "2.13.0", "triton==3.6.0")
    host.install("triton", "3.6.0")
    found = {item.name: item for item in diagnose(host=host)}
    assert {item.name for item in found.values() if item.status != "ok"} == set()
    assert found["GPU driver"].what == "580.95.05, NVIDIA H200"
    assert found["cuDNN headers"].what == "9.8.0"
    assert found["host compiler"].what == "gcc 13.3.0; nvcc accepts up to 15"
    assert found["compute capability"].what == "9.0; known to torch, nvcc"


def test_a_bare_machine_has_notes_and_no_crash(host: Staged) -> None:
    for item in diagnose(host=host):
        assert item.what
        assert item.status in ("ok", "note") or (item.why and item.fix), item


def test_driver(host: Staged) -> None:
    assert gpu.driver(host).status == "note"


def test_a_driver_that_does_not_answer(host: Staged) -> None:
    host.says("nvidia-smi", code=9)
    assert gpu.driver(host).status == "problem"
    assert "code 9" in gpu.driver(host).what


def test_a_loaded_driver_without_its_command(host: Staged) -> None:
    host.write("proc/driver/nvidia/version", "NVRM version: 580\n")
    assert "missing" in gpu.driver(host).what


@pytest.mark.parametrize(("release", "status"), [("13.0", "ok"), ("13.1", "note"), ("12.8", "warning")])
def test_toolkit_against_torch(host: Staged, release: str, status: str) -> None:
    host.with_nvcc(release)
    assert gpu.toolkit(host).status == status


def test_the_toolkit_of_the_gb200_case(host: Staged) -> None:
    host.with_nvcc("12.8")
    assert gpu.known_bad_toolkit(host).status == "ok"
    host.cpu = "aarch64"
    found = gpu.known_bad_toolkit(host)
    assert found.status == "warning"
    assert "cudafe++" in found.what
    assert "1996" in found.why


@pytest.mark.parametrize(
    ("capability", "lacking"),
    [("9.0", set()), ("8.6", set()), ("12.1", {"nvcc"}), ("7.0", {"torch", "nvcc"}), ("10.3", set())],
)
def test_compute_capability(host: Staged, capability: str, lacking: set[str]) -> None:
    host.says("nvidia-smi", f"A GPU, 580.1, {capability}\n")
    host.with_nvcc("13.0")
    found = gpu.capability(host)
    assert {item.why.split()[0] for item in found if item.status != "ok"} == lacking


def test_triton_asks_its_own_assembler(host: Staged) -> None:
    host.says("nvidia-smi", "A GPU, 580.1, 12.0\n")
    host.write("site/triton/backends/nvidia/bin/ptxas")
    host.says("ptxas --help", "--gpu-name Allowed values: 'sm_80','sm_90a','sm_90'")
    assert [item.why.split()[0] for item in gpu.capability(host)] == ["Triton"]


def test_an_arch_of_its_own_runs_nowhere_else(host: Staged) -> None:
    assert gpu._runs((9, 0), ["sm_90a"])
    assert not gpu._runs((10, 3), ["sm_100a"])
    assert gpu._runs((10, 3), ["sm_100f"])
    assert gpu._runs((12, 1), ["compute_90"])


def test_a_compiler_newer_than_nvcc_accepts(host: Staged) -> None:
    host.with_nvcc("12.4", newest_gcc=13)
    host.says("-dumpfullversion", "14.2.0\n")
    host.says("--version", "g++ 14.2.0\n")
    found = gpu.host_compiler(host)
    assert found.status == "warning"
    assert "g++-13" in found.fix


def test_the_compiler_behind_ccache(tmp_path: Path) -> None:
    host = Staged(tmp_path, CXX="ccache g++-12 -m64")
    host.says("g++-12 -dumpfullversion", "12.2.0\n")
    host.says("g++-12 --version", "g++-12 12.2.0\n")
    assert gpu.host_compiler(host).what == "gcc 12.2.0"


def test_no_compiler(host: Staged) -> None:
    assert gpu.host_compiler(host).status == "warning"


def test_architecture(host: Staged) -> None:
    host.cpu = "riscv64"
    assert machine.architecture(host).status == "problem"


def test_memory_says_who_limits_it(host: Staged) -> None:
    assert machine.memory(host).status == "ok"
    host.write("proc/self/cgroup", "0::/job\n")
    host.write("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    host.write("sys/fs/cgroup/job/memory.max", str(16 * GIB))
    found = machine.memory(host)
    assert found.status == "note"
    assert "16 GiB" in found.what
    assert "/sys/fs/cgroup/job/memory.max" in found.what
    host.write("sys/fs/cgroup/job/memory.max", str(4 * GIB))
    assert machine.memory(host).status == "warning"


def test_a_temporary_folder_in_memory(tmp_path: Path) -> None:
    host = Staged(tmp_path, TMPDIR="/tmp/mine")
    assert "no folder" in machine.temporary_folder(host).what
    (tmp_path / "tmp/mine").mkdir()
    assert machine.temporary_folder(host).what == "/tmp/mine is on ext4"
    mounts = "27 1 254:0 / / rw - ext4 /dev/vda rw\n30 27 0:9 / /tmp rw shared:5 - tmpfs tmpfs rw\n"
    host.write("proc/self/mountinfo", mounts + "31 27 0:9 / /tmp/min rw - ext4 x rw\n")
    found = machine.temporary_folder(host)
    assert (found.status, found.what) == ("warning", "/tmp/mine is on tmpfs, which is memory")


def test_small_places(host: Staged) -> None:
    host.sizes = {"/dev/shm": (64 * 2**20, 64 * 2**20), "/tmp": (50 * GIB, 5 * GIB)}
    assert machine.shared_memory(host).what == "64 MiB only"
    assert machine.disk(host).status == "warning"
    host.sizes["/tmp"] = (50 * GIB, 2**20)
    assert machine.disk(host).status == "problem"


def test_ulimits(host: Staged) -> None:
    assert machine.process_limits(host).status == "ok"
    host.write("proc/self/limits", LIMITS.format(files=256))
    assert "256 files" in machine.process_limits(host).what
    host.write(
        "proc/self/limits", LIMITS.format(files=4096) + f"Max address space    {GIB}    unlimited    bytes\n"
    )
    assert "addresses" in machine.process_limits(host).what


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        ({"absent": True}, "problem", "not installed"),
        ({"error": "ImportError('libcudart.so.13: cannot open')"}, "problem", "cannot be imported"),
        (TORCH | {"cuda": None}, "problem", "though there is a GPU"),
        (TORCH | {"sees_gpu": False}, "problem", "sees no GPU"),
        (TORCH, "ok", "2.13.0+cu130"),
    ],
)
def test_torch(host: Staged, facts: dict, status: str, word: str) -> None:
    host.says("nvidia-smi", H200)
    host.__dict__["torch"] = facts
    found = packages.torch(host)
    assert found.status == status
    assert word in found.what


def test_no_triton(host: Staged) -> None:
    assert packages.triton(host).status == "note"


def test_no_triton_beside_a_gpu(host: Staged) -> None:
    host.says("nvidia-smi", H200)
    assert packages.triton(host).status == "problem"


def test_the_wrong_triton(host: Staged) -> None:
    host.install("torch", "2.13.0", 'triton==3.6.0; platform_system == "Linux"')
    host.install("triton", "3.2.0")
    assert packages.triton(host).fix == "pip install triton==3.6.0"


def test_conflicting_packages(host: Staged) -> None:
    host.install("torch", "2.13.0+cu130")
    host.install("torch", "2.11.0")
    host.install("triton", "3.6.0")
    host.install("pytorch-triton", "3.6.0")
    host.install("torchvision", "0.20.0", "torch==2.5.0")
    host.install("bitsandbytes", "0.50.2")
    host.write("site/bitsandbytes/libbitsandbytes_cuda128.so")
    whats = " | ".join(item.what for item in packages.conflicts(host))
    for words in (
        "torch is installed 2 times",
        "triton and pytorch-triton are both installed",
        "torchvision 0.20.0 needs torch 2.5.0",
        "no libbitsandbytes_cuda130; it has libbitsandbytes_cuda128",
    ):
        assert words in whats


def test_packages_that_go_together(host: Staged) -> None:
    host.install("torch", "2.13.0+cu130")
    host.install("torchvision", "0.28.0", "torch==2.13.0")
    host.install("bitsandbytes", "0.50.2")
    host.write("site/bitsandbytes/libbitsandbytes_cuda130.so")
    assert [item.status for item in packages.conflicts(host)] == ["ok"]


REPORT = {
    "install": [
        {
            "download_info": {"url": "file:///wheels/six-1.17.0-py2.py3-none-any.whl#sha256=0"},
            "metadata": {"name": "six", "version": "1.17.0"},
        }
    ]
}


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        (Output(0, json.dumps(REPORT)), "ok", "six 1.17.0: six-1.17.0-py2.py3-none-any.whl"),
        (Output(1, "", "ERROR: No matching distribution found for six"), "warning", "there is none"),
        (
            Output(1, "", "WARNING: Retrying (Retry(total=0))\nERROR: No matching distribution found"),
            "note",
            "reaches no package index",
        ),
        (Output(124, "", "", timed_out=True), "note", "reaches no package index"),
        (Output(1, "", "/usr/bin/python: No module named pip"), "note", "pip is not here"),
        (None, "note", "pip is not here"),
        (Output(1, "", "ERROR: Invalid requirement: '!'"), "warning", "not a package's name"),
    ],
)
def test_wheels(host: Staged, output: Output | None, status: str, words: str) -> None:
    if output is not None:
        host.commands["-m pip"] = output
    found = wheel(host, "six")
    assert found.status == status
    assert words in found.what


BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "transformers", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def doctor(*argv: str, **environ: str) -> tuple[int, dict[str, Finding]]:
    """``fewbits doctor --json`` in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "fewbits.cli", "doctor", "--json", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )
    assert done.stderr == ""
    found = [Finding(**item) for item in json.loads(done.stdout)["findings"]]
    return done.returncode, {item.name: item for item in found}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart"),
        ("import os; os.kill(os.getpid(), 11)", "code -11"),
        ("print('hello'); raise SystemExit(3)", "SystemExit(3)"),
        ("import missing_part", "missing_part"),
    ],
)
def test_with_torch_broken(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(source)
    code, found = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert found["torch"].status == "problem"
    assert words in found["torch"].why
    assert len(found) >= 14


def test_without_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK_TORCH)
    code, found = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert found["torch"].what == "not installed"


def test_a_torch_that_hangs(host: Staged) -> None:
    del host.__dict__["torch"]
    host.commands["-c"] = Output(124, "", "", timed_out=True)
    assert "does not end" in packages.torch(host).why


def test_exit_code_and_table(run, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("disk", "problem", "full [really]", "No room.", "Remove something.")
    for found, code in (([bad], 1), ([Finding("disk", "ok", "roomy")], 0)):
        monkeypatch.setattr("fewbits.doctor.diagnose", lambda names, found=found: iter(found))
        shown = run("doctor")
        assert shown.code == code
    monkeypatch.setattr("fewbits.doctor.diagnose", lambda names: iter([bad]))
    out = run("doctor").out
    assert out.index("full [really]") < out.index("No room.") < out.index("-> Remove something.")
    assert "1 problem, 0 warnings, 0 notes, 0 ok" in out
