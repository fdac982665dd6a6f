"""Reading command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fewjobs.command import normal, read_command, threads_of, unit_name
from fewjobs.depfile import read_depfile

TMP = "/tmp/tmpxft_00004714_00000000-7_a"


@pytest.mark.parametrize(
    ("line", "name", "source", "output"),
    [
        ("/usr/bin/g++ -O3 -c a.cpp -o a.o", "c++", "a.cpp", "a.o"),
        ("/usr/bin/gcc -c b.c -ob.o", "c", "b.c", "b.o"),
        ("/usr/bin/gcc -c b.cpp -o b.o", "c++", "b.cpp", "b.o"),
        ("/usr/bin/x86_64-linux-gnu-g++-12 -I inc.cpp -c a.cc", "c++", "a.cc", ""),
        ("/usr/bin/cc -x c++ -c weird.c -o w.o", "c++", "weird.c", "w.o"),
        ("/usr/bin/g++ a.o b.o -o app", "link", "", "app"),
        ("/usr/bin/ccache g++ -c a.cpp -o a.o", "c++", "a.cpp", "a.o"),
        ("/opt/cuda/bin/nvcc -gencode arch=compute_90,code=sm_90 -c k.cu -o k.o", "nvcc", "k.cu", "k.o"),
        (f"/x/ptxas -arch=sm_100a -m64 {TMP}.ptx -o {TMP}.cubin", "ptxas", f"{TMP}.ptx", f"{TMP}.cubin"),
        ("/x/rustc --crate-name x src/x.rs", "rustc", "", ""),
    ],
)
def test_stage_source_and_output(line: str, name: str, source: str, output: str) -> None:
    tool, *args = line.split()
    command = read_command(tool, args, "/w")
    assert (command.name, command.source, command.output) == (name, source, output)


def test_cicc_names_its_architecture() -> None:
    args = f"-arch compute_100a -m64 --gen_c_file_name {TMP}.cudafe1.c {TMP}.cpp1.ii -o {TMP}.ptx".split()
    command = read_command("/cuda/nvvm/bin/cicc", args, "/w")
    assert (command.name, command.arch, command.source) == ("cicc", "100a", f"{TMP}.cpp1.ii")


def test_response_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "all.rsp").write_text('-c "with space.cpp" @inner.rsp')
    (tmp_path / "inner.rsp").write_text("-o out.o")
    command = read_command("/usr/bin/g++", ["@all.rsp"], str(tmp_path))
    assert (command.source, command.output, command.plain) == ("with space.cpp", "out.o", False)
    assert read_command("/usr/bin/g++", ["-c", "x.cpp", "@missing"], str(tmp_path)).source == "x.cpp"


def test_names_that_change_from_run_to_run_do_not_count() -> None:
    assert normal("/tmp/pip-install-0ab_9xyz/flash-attn_0123456789abcdef0123456789abcdef/a.cu") == (
        normal("/tmp/pip-install-9zz_1abc/flash-attn_ffffffffffffffffffffffffffffffff/a.cu")
    )
    assert normal("/tmp/pip-req-build-abcdefgh/a.cu") == normal("/tmp/pip-req-build-zyxwvuts/a.cu")
    assert normal(f"{TMP}.ptx") == normal("/tmp/tmpxft_00009999_00000000-7_a.ptx")
    assert normal("/home/me/project/a.cu") == "/home/me/project/a.cu"


def test_unit_names_are_short() -> None:
    command = read_command("/usr/bin/g++", ["-c", "../../src/csrc/flash/a.cpp", "-o", "a.o"], "/w/build/x")
    assert unit_name(command) == "src/csrc/flash/a.cpp" or unit_name(command).endswith("csrc/flash/a.cpp")


def test_threads() -> None:
    assert [threads_of(a.split()) for a in ("-c x.cu --threads 4", "--threads=8", "-t 2", "-O3")] == [
        4,
        8,
        2,
        1,
    ]


def test_depfile_with_spaces_and_several_targets(tmp_path: Path) -> None:
    (tmp_path / "x.d").write_text(
        "out\\ put.o: a.cpp \\\n  dir\\ one/b.h /usr/include/c.h \\\n d$$.h\n\na.h:\n"
    )
    assert read_depfile(tmp_path / "x.d") == ["a.cpp", "dir one/b.h", "/usr/include/c.h", "d$.h"]
