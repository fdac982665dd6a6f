"""Finished objects: what counts as the same compilation, and what is never kept."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from fewjobs.cache import Cache
from fewjobs.command import read_command


def compile_once(cache: Cache, folder: Path, *args: str, environ: dict[str, str] | None = None) -> str:
    """Compile as the controller does: "kept", "stored", "compiled" (neither) or "refused"."""
    command = read_command("/usr/bin/g++", args, str(folder))
    recipe = cache.recipe(command, environ or {}, str(folder / "scratch.d"))
    if recipe is None or not recipe.key:
        return "refused"
    if cache.has(recipe) and cache.fetch(recipe) is not None:
        return "kept"
    started = time.time()
    subprocess.run(["/usr/bin/g++", *(recipe.args or args)], cwd=folder, check=True)
    stored = cache.store(recipe, started=started, err="")
    cache.flush()
    return "stored" if stored else "compiled"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "h.h").write_text("#define N 1\n")
    (work / "a.cpp").write_text('#include "h.h"\n#include <cstddef>\nint f(){return N;}\n')
    for file in work.iterdir():
        os.utime(file, (1, 1))
    return work


ARGS = ("-O1", "-c", "a.cpp", "-o", "a.o")


def test_the_same_is_kept(tmp_path: Path, folder: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert compile_once(cache, folder, *ARGS) == "stored"
    first = (folder / "a.o").read_bytes()
    (folder / "a.o").unlink()
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "kept"
    assert (folder / "a.o").read_bytes() == first


@pytest.mark.parametrize("change", ["source", "header", "flags", "variable", "output"])
def test_whatever_goes_in_counts(tmp_path: Path, folder: Path, change: str) -> None:
    cache, args, environ = Cache(tmp_path / "cache"), ARGS, {}
    compile_once(cache, folder, *args)
    if change == "source":
        (folder / "a.cpp").write_text("int f(){return 2;}\n")
    elif change == "header":
        (folder / "h.h").write_text("#define N 2\n")
    elif change == "flags":
        args = ("-O2", *ARGS[1:])
    elif change == "variable":
        environ = {"CPATH": str(folder)}
    else:
        args = (*ARGS[:-1], "b.o")
    assert compile_once(cache, folder, *args, environ=environ) != "kept"


def test_going_back_finds_the_older_one(tmp_path: Path, folder: Path) -> None:
    cache = Cache(tmp_path / "cache")
    compile_once(cache, folder, *ARGS)
    (folder / "h.h").write_text("#define N 2\n")
    os.utime(folder / "h.h", (2, 2))
    assert compile_once(cache, folder, *ARGS) == "stored"
    (folder / "h.h").write_text("#define N 1\n")
    os.utime(folder / "h.h", (3, 3))
    assert compile_once(cache, folder, *ARGS) == "kept"


def test_a_result_that_tells_the_time_is_not_kept(tmp_path: Path, folder: Path) -> None:
    (folder / "a.cpp").write_text("const char *f(){return __TIME__;}\n")
    os.utime(folder / "a.cpp", (1, 1))
    cache = Cache(tmp_path / "cache")
    assert compile_once(cache, folder, *ARGS) == "compiled"


def test_a_file_that_changes_meanwhile_is_not_trusted(tmp_path: Path, folder: Path) -> None:
    os.utime(folder / "h.h", (time.time() + 60, time.time() + 60))
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "compiled"


@pytest.mark.parametrize(
    "flag", ["--coverage", "-save-temps", "-gsplit-dwarf", "-fprofile-use=x", "-E", "-M"]
)
def test_what_writes_more_than_an_object_is_refused(tmp_path: Path, folder: Path, flag: str) -> None:
    args = (flag, *(a for a in ARGS if a != "-c" or flag not in ("-E", "-M")))
    assert compile_once(Cache(tmp_path / "cache"), folder, *args) == "refused"


def test_the_depfile_comes_back_as_it_was_asked_for(tmp_path: Path, folder: Path) -> None:
    cache, args = Cache(tmp_path / "cache"), (*ARGS, "-MD", "-MT", "x.o", "-MF", "x.d")
    compile_once(cache, folder, *args)
    (folder / "x.d").unlink()
    assert compile_once(cache, folder, *args) == "kept"
    text = (folder / "x.d").read_text()
    assert text.startswith("x.o:")
    assert "h.h" in text
    assert "cstddef" in text


def test_another_random_folder_is_the_same_place(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for name, expected in (("pip-req-build-aaaaaaaa", "stored"), ("pip-req-build-bbbbbbbb", "kept")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "inc").mkdir()
        (folder / "inc/h.h").write_text("int g();\n")
        (folder / "a.cpp").write_text("#include <h.h>\nint f(){return g();}\n")
        for file in (folder / "inc/h.h", folder / "a.cpp"):
            os.utime(file, (1, 1))
        assert compile_once(cache, folder, "-I", str(folder / "inc"), *ARGS) == expected
    (tmp_path / "pip-req-build-bbbbbbbb/inc/h.h").write_text("long g();\n")
    assert (
        compile_once(
            cache, tmp_path / "pip-req-build-bbbbbbbb", "-I", f"{tmp_path}/pip-req-build-bbbbbbbb/inc", *ARGS
        )
        != "kept"
    )


def test_a_stage_of_nvcc_under_other_temporary_names(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")

    def stage(process: str, text: str) -> str:
        base = f"tmpxft_{process}_00000000-7_"
        (tmp_path / f"{base}k.ii").write_text(text)
        args = [
            "-arch",
            "compute_90",
            "--stub_file_name",
            f"{base}k.stub.c",
            f"{base}k.ii",
            "-o",
            f"{base}k.ptx",
        ]
        recipe = cache.recipe(read_command("/cuda/cicc", args, str(tmp_path)), {}, "")
        assert recipe is not None
        if cache.has(recipe) and cache.fetch(recipe) is not None:
            return (tmp_path / f"{base}k.stub.c").read_text()
        (tmp_path / f"{base}k.ptx").write_text("ptx\n")
        (tmp_path / f"{base}k.stub.c").write_text(f'#include "{base}k.fatbin.c"\n')
        assert cache.store(recipe, started=time.time())
        cache.flush()
        return "stored"

    assert stage("00000001", "source\n") == "stored"
    assert stage("00000002", "source\n") == '#include "tmpxft_00000002_00000000-7_k.fatbin.c"\n'
    assert stage("00000003", "another\n") == "stored"


def test_the_least_used_go_first(tmp_path: Path, folder: Path) -> None:
    cache = Cache(tmp_path / "cache")
    compile_once(cache, folder, *ARGS)
    compile_once(cache, folder, "-O2", *ARGS[1:])
    objects = sorted((tmp_path / "cache/objects").glob("*/*"))
    os.utime(objects[0], (1, 1))
    kept = sum(f.stat().st_size for f in objects[1].iterdir())
    cache.trim(kept)
    assert list((tmp_path / "cache/objects").glob("*/*")) == [objects[1]]


def test_a_damaged_entry_is_as_none(tmp_path: Path, folder: Path) -> None:
    cache = Cache(tmp_path / "cache")
    compile_once(cache, folder, *ARGS)
    for entry in (tmp_path / "cache/entries").rglob("*.json"):
        entry.write_text('{"results": [{"inp')
    assert compile_once(cache, folder, *ARGS) == "stored"
