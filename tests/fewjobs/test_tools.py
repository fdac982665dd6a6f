"""Launchers, the environment, and the shadow of a CUDA toolkit, staged by scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fewjobs.native import Native, build_native
from fewjobs.tools import child_environment, make_tools
from tests.fewjobs.conftest import QUIET, Workshop

# A toolkit of scripts: nvcc calls its stages for each architecture as the real one does, by its own folder.
NVCC = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
case "$*" in *--version*) echo "Cuda compilation tools, release 12.8, V12.8.1"; exit 0;;
*--dryrun*) echo "#$ _HERE_=$here" >&2; exit 0;; esac
top=$(sed -n 's/^CICC_PATH *= *//p' "$here/nvcc.profile" | sed "s|\\$(TOP)|$here/..|")
PATH="$top:$here:$PATH"
for last; do :; done
tmp=$(mktemp -d)
base="$tmp/tmpxft_00000001_00000000-7_k"
cp "$last" "$base.cpp1.ii"
cudafe++ --gen_c_file_name "$base.cudafe1.cpp" "$base.cpp1.ii" || exit 1
for arch in 90 100a; do
    cicc -arch compute_$arch "$base.cpp1.ii" -o "$base.ptx" || exit 1
    ptxas -arch=sm_$arch "$base.ptx" -o "$base.$arch.cubin" || exit 1
done
fatbinary "$base.90.cubin" "$base.100a.cubin" > k.o
rm -r "$tmp"
"""
STAGE = """#!/bin/sh
while [ $# -gt 1 ]; do case "$1" in -o|--gen_c_file_name) out="$2";; esac; in="$1"; shift; done
[ -f "$1" ] && in="$1"
for word in "$in" "$out"; do :; done
{ echo "$(basename "$0")"; } > "$out"
"""
FATBINARY = '#!/bin/sh\ncat "$@"\n'


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    home = tmp_path / "real cuda"
    for name, text in {
        "bin/nvcc": NVCC,
        "bin/cudafe++": STAGE,
        "bin/ptxas": STAGE,
        "bin/fatbinary": FATBINARY,
        "nvvm/bin/cicc": STAGE,
        "bin/nvcc.profile": "TOP              = $(_HERE_)/..\nCICC_PATH        = $(TOP)/nvvm/bin\n",
        "include/cuda.h": "#define CUDA_VERSION 12080\n",
    }.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return home


def test_every_stage_of_every_architecture_is_caught(workshop: Workshop, toolkit: Path) -> None:
    (workshop.folder / "k.cu").write_text("kernel\n")
    plain = workshop.plain(str(toolkit / "bin/nvcc"), "-c", "k.cu")
    assert plain.returncode == 0, plain.stderr
    expected = (workshop.folder / "k.o").read_bytes()
    (workshop.folder / "k.o").unlink()
    env = {"CUDA_HOME": str(toolkit)}
    done = workshop.build("sh", "-c", '"$CUDA_HOME/bin/nvcc" -c k.cu', env=env)
    assert done.code == 0, done.err
    assert (workshop.folder / "k.o").read_bytes() == expected
    found = [(s["unit"], s["stage"], s["arch"]) for s in done.profile["stages"]]
    assert found == [
        ("k.cu", "cudafe++", ""),
        ("k.cu", "cicc", "90"),
        ("k.cu", "ptxas", "90"),
        ("k.cu", "cicc", "100a"),
        ("k.cu", "ptxas", "100a"),
        ("k.cu", "fatbinary", ""),
    ]
    assert done.profile["machine"]["toolkit"] == "12.8"


def test_a_false_front_end_that_grows_is_named(workshop: Workshop, toolkit: Path) -> None:
    grows = "#!/usr/bin/env python3\nimport time\nheld = []\nwhile True:\n"
    grows += "    held.append(bytearray(4_000_000))\n    time.sleep(0.02)\n"
    (toolkit / "bin/cudafe++").write_text(grows)
    (workshop.folder / "k.cu").write_text("kernel\n")
    env = {"CUDA_HOME": str(toolkit)}
    done = workshop.build("sh", "-c", '"$CUDA_HOME/bin/nvcc" -c k.cu', env=env, stage_limit_bytes=120_000_000)
    assert done.code == 1
    assert "k.cu cudafe++ (CUDA 12.8" in done.err
    assert "was stopped as a runaway" in done.err
    assert "TransformerEngine issue 1996" in done.err
    stage = done.profile["stages"][0]
    left_class = next(at for at, held in stage["curve"] if held > 120_000_000)
    if QUIET:
        assert stage["curve"][-1][0] - left_class < 5.0
    # It grows by some 150 MB a second, and more slowly where the machine is busy.
    assert done.profile["verdicts"][0]["grown_bytes"] < 120_000_000 + 5 * 150_000_000


def test_the_environment_of_the_child(tmp_path: Path, native: Native) -> None:
    before = {"PATH": "/usr/bin:/bin", "CC": "gcc -m64", "CMAKE_C_COMPILER_LAUNCHER": "ccache"}
    tools = make_tools(tmp_path, native, before)
    made = child_environment(tools, before, run_folder=tmp_path / "runs/1", jobs=4, keep=tmp_path / "keep")
    assert made["PATH"].split(os.pathsep)[0] == str(tools.folder / "bin")
    assert made["CC"] == f"{tools.folder}/bin/gcc -m64"
    assert made["CMAKE_C_COMPILER_LAUNCHER"] == f"{tools.launcher};ccache"
    assert made["CMAKE_CUDA_COMPILER_LAUNCHER"] == str(tools.launcher)
    assert (made["MAX_JOBS"], made["TMPDIR"]) == ("4", str(tmp_path / "keep/tmp"))
    assert "CXX" not in made
    assert set(before) == {"PATH", "CC", "CMAKE_C_COMPILER_LAUNCHER"}


def test_a_cache_in_a_compilers_name_is_passed_over(tmp_path: Path, native: Native) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    (masks / "ccache").write_text("#!/bin/sh\nexit 9\n")
    (masks / "ccache").chmod(0o755)
    (masks / "g++").symlink_to(masks / "ccache")
    tools = make_tools(tmp_path / "root", native, {"PATH": f"{masks}:/usr/bin:/bin"})
    assert (tools.folder / "bin/.real/g++").readlink() == Path("/usr/bin/g++")


def test_without_a_shadow_nvcc_takes_one_architecture_at_a_time(
    tmp_path: Path, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewjobs.tools.cuda_home", lambda *_: (None, ""))
    before = {"PATH": "/usr/bin:/bin", "NVCC_APPEND_FLAGS": "-lineinfo"}
    tools = make_tools(tmp_path, native, before)
    made = child_environment(tools, before, run_folder=tmp_path, jobs=4)
    assert made["NVCC_APPEND_FLAGS"] == "-lineinfo --threads 1"


def test_a_missing_or_broken_compiler_leaves_the_native_parts_out(tmp_path: Path) -> None:
    none = build_native(tmp_path / "a", {"PATH": str(tmp_path)})
    assert (none.launcher, none.pager) == (None, None)
    assert "no C compiler" in none.reason
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    fake.chmod(0o755)
    broken = build_native(tmp_path / "b", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (broken.launcher, broken.pager) == (None, None)
    assert "broken" in broken.reason
