"""What a build keeps is whole when it is used: damaged objects, launchers and tables are made again."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fewjobs import whole_files
from fewjobs.cache import Cache
from fewjobs.errors import Unsupported
from fewjobs.native import Native, build_native
from fewjobs.runner import usable_root
from fewjobs.tools import has_launchers, make_tools
from tests.fewjobs.conftest import Workshop
from tests.fewjobs.test_cache import ARGS, compile_once, folder
from tests.fewjobs.test_cli import fewbits
from tests.fewjobs.test_runner import script

__all__ = ["folder"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda file: file.write_bytes(b""),
    "one bit": flip,
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_compiled_and_kept_again(tmp_path: Path, folder: Path, damage: str) -> None:
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "stored"
    right = (folder / "a.o").read_bytes()
    (objects,) = (tmp_path / "cache/objects").glob("*/*/0")
    DAMAGES[damage](objects)
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "stored"
    assert (folder / "a.o").read_bytes() == right
    (folder / "a.o").unlink()
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "kept"
    assert (folder / "a.o").read_bytes() == right
    assert sorted(p.name for p in folder.iterdir()) == ["a.cpp", "a.o", "h.h", "scratch.d"]
    assert list((tmp_path / "cache/new").iterdir()) == []


def test_an_entry_that_was_altered_does_not_count(tmp_path: Path, folder: Path) -> None:
    compile_once(Cache(tmp_path / "cache"), folder, *ARGS)
    (entry,) = (tmp_path / "cache/entries").rglob("*.json")
    text = entry.read_text()
    for altered in (
        text.replace('"err": ""', '"err": "warning: nothing of the kind"'),
        *('{"results": 5}', '{"results": [5, {}, {"seal": 1}]}', "[]", "5", "[" * 100_000, ""),
    ):
        assert altered != text
        entry.write_text(altered)
        assert whole_files.read_results(entry) == []
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "stored"
    assert len(whole_files.read_results(entry)) == 1


def test_bytes_that_move_from_one_output_to_the_next_are_noticed() -> None:
    digests = set()
    for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b"")):
        contents = whole_files.Contents("key")
        for part in parts:
            contents.update(part)
            contents.end_file()
        digests.add(contents.digest())
    assert len(digests) == 4


def test_what_is_kept_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda f: (events.append(("sync", str(Path(f"/proc/self/fd/{f}").readlink()))), fsync(f))
    )
    monkeypatch.setattr(Path, "rename", lambda p, to: (events.append(("name", str(p))), rename(p, to))[1])
    monkeypatch.setattr(Path, "replace", lambda p, to: (events.append(("name", str(p))), replace(p, to))[1])
    compile_once(Cache(tmp_path / "cache"), folder, *ARGS)
    new = f"{tmp_path}/cache/new/{os.getpid()}-1"
    assert [e for e in events if e[1].startswith(new)] == [
        *(("sync", f"{new}/0"), ("sync", new), ("name", new)),
        *(("sync", f"{new}.json"), ("name", f"{new}.json")),
    ]


def test_what_killed_builds_have_left_is_removed(tmp_path: Path) -> None:
    new = tmp_path / "new"
    for name in ("4194305-1", f"{os.getpid()}-2"):  # no process has the first number
        (new / name).mkdir(parents=True)
        (new / f"{name}.json").write_text("{}")
    Cache(tmp_path).trim(10**9)
    assert sorted(p.name for p in new.iterdir()) == [f"{os.getpid()}-2", f"{os.getpid()}-2.json"]


@pytest.mark.parametrize(
    "compiled, damage, front_end",
    [
        (True, "emptied", "make"),
        (True, "one bit", "make"),
        (True, "not executable", "make"),
        (False, "emptied", "make"),
        (False, "emptied", "ninja"),
        pytest.param(True, "emptied", "ninja", marks=pytest.mark.slow),
        pytest.param(True, "gone", "ninja", marks=pytest.mark.slow),
        # as CMake writes them
        pytest.param(True, "emptied", "ninja, the launcher in its rules", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_launcher_is_made_again(
    workshop: Workshop, native: Native, compiled: bool, damage: str, front_end: str
) -> None:
    program, _, by_launcher = front_end.partition(", ")
    places = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    if (command := shutil.which(program, path=places)) is None:
        pytest.skip(f"needs {program}")
    assert native.launcher is not None
    (workshop.root / "native").unlink()  # not the one of the other tests
    shutil.copytree(native.launcher.parent.parent, workshop.root / "native")
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    (workshop.folder / "Makefile").write_text("a.o: a.cpp\n\tg++ -c $< -o $@\n")
    compiler = f"{workshop.root}/tools/*/bin/fewbits-launch g++" if by_launcher else "g++"
    rule = f"rule cxx\n  command = {compiler} -c $in -o $out\nbuild a.o: cxx a.cpp\n"
    (workshop.folder / "build.ninja").write_text(rule)
    assert workshop.build(command, compile_native=compiled).code == 0
    launchers = [*workshop.root.glob("tools/*/bin/*"), *workshop.root.glob("native/*/fewbits-launch")]
    launchers = [file for file in launchers if file.is_file()]
    assert {"g++", "fewbits-launch"} <= {file.name for file in launchers}
    before = {file: file.read_bytes() for file in launchers}
    for file in launchers:
        if damage == "not executable":
            file.chmod(0o644)
        else:
            DAMAGES[damage](file)
    (workshop.folder / "a.o").unlink()
    done = workshop.build(command, compile_native=compiled)
    assert done.code == 0, done.err
    assert (workshop.folder / "a.o").stat().st_size > 500
    healed = [file for file in launchers if compiled or "native" not in str(file)]
    assert [file for file in healed if not file.exists() or file.read_bytes() != before[file]] == []


def test_a_compiler_for_another_machine_gives_no_launcher(tmp_path: Path) -> None:
    cross = script(
        tmp_path / "cc",
        '#!/bin/sh\nfor last; do [ "$previous" = -o ] && : > "$last"; previous=$last; done\n',
    )
    found = build_native(tmp_path / "native", {"CC": str(cross), "PATH": "/usr/bin:/bin"})
    assert found.launcher is None
    assert "does not work here" in found.reason


NEXT = """#!/bin/sh
# As ccache in a compiler's name: the next program of its own name on the PATH, which is not itself.
IFS=:
for folder in $PATH; do
    [ "$folder" = "{own}" ] && continue
    [ -x "$folder/g++" ] && {{ echo wrapped >> {own}/calls; exec "$folder/g++" "$@"; }}
done
exit 9
"""


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("way", ["PATH", "CXX", "launcher"])
@pytest.mark.parametrize("line", ["-c a.cpp -o a.o", "--version"])
def test_a_wrapper_that_runs_the_next_compiler_of_its_name(
    workshop: Workshop, compiled: bool, way: str, line: str
) -> None:
    own = workshop.home / "wrappers"
    wrapper = script(own / "g++", NEXT.format(own=own))
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    assert workshop.plain(str(wrapper), "-c", "a.cpp", "-o", "plain.o").returncode == 0
    path = "/usr/bin:/bin" if way == "CXX" else f"{own}:/usr/bin:/bin"
    env = {"PATH": path, **({"CXX": str(wrapper)} if way == "CXX" else {})}
    launcher = f"{workshop.root}/tools/*/bin/fewbits-launch {wrapper}"
    tool = {"PATH": "g++", "CXX": "$CXX", "launcher": launcher}[way]
    process = workshop.start("sh", "-c", f"ulimit -t 20; {tool} {line}", env=env, compile_native=compiled)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert (own / "calls").read_text() == "wrapped\nwrapped\n"  # by the plain run, and once by ours
    if line != "--version":
        assert (workshop.folder / "a.o").read_bytes() == (workshop.folder / "plain.o").read_bytes()


def test_the_next_compiler_of_its_name_counts_for_what_is_kept(tmp_path: Path, folder: Path) -> None:
    for name in ("first", "second"):
        script(tmp_path / name / "g++", "#!/bin/sh\n")
    cache = Cache(tmp_path / "cache")
    path = f"{tmp_path}/first:{tmp_path}/second"
    assert compile_once(cache, folder, *ARGS, environ={"PATH": path}) == "stored"
    assert compile_once(cache, folder, *ARGS, environ={"PATH": f"{tmp_path}/elsewhere:{path}"}) == "kept"
    (tmp_path / "third").mkdir()
    script(tmp_path / "third/g++", "#!/bin/sh\nexit 1\n")
    assert compile_once(cache, folder, *ARGS, environ={"PATH": f"{tmp_path}/third:{path}"}) == "stored"


def test_a_folder_of_the_user_may_be_called_tools(tmp_path: Path, native: Native) -> None:
    own = script(tmp_path / "opt/tools/gcc/g++", "#!/bin/sh\n").parent
    tools = make_tools(tmp_path / "root", native, {"PATH": f"{own}:/usr/bin:/bin"})
    assert (tools.folder / "bin/.real/g++").readlink() == own / "g++"
    assert has_launchers(str(tools.folder / "bin")) and not has_launchers(str(own))
    again = make_tools(tmp_path / "root", native, {"PATH": f"{tools.folder}/bin:{own}:/usr/bin:/bin"})
    assert again == tools


@pytest.mark.parametrize("where", ["a file in its place", "a file system that takes none"])
def test_a_home_that_cannot_be_written(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    home = tmp_path / "closed" if where == "a file in its place" else Path("/proc/self/task")
    if where == "a file in its place":
        home.mkdir()
        (home / ".cache").write_text("")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (workshop.folder / "a.cpp").write_text("int f(){return 1;}\n")
    env = {"HOME": str(home), "XDG_CACHE_HOME": "", "TMPDIR": str(temporary)}
    workshop.env.update(env)
    done = fewbits(workshop, "--", "g++", "-c", "a.cpp", "-o", "a.o")
    assert done.returncode == 0, done.stderr
    assert (workshop.folder / "a.o").exists()
    root = temporary / f"fewbits-build-{os.getuid()}"
    assert f"{home}/.cache/fewbits/build cannot be used; what is to be kept is in {root}" in done.stderr
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    # Nowhere: one sentence. And nobody else's folder, to which a link may lead.
    shutil.rmtree(root)
    (temporary / "somebody's").mkdir()
    root.symlink_to(temporary / "somebody's")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(Unsupported, match="set XDG_CACHE_HOME"):
        usable_root(env)


def test_a_limit_on_files_ends_a_build_with_one_sentence_and_keeps_nothing_half(workshop: Workshop) -> None:
    workshop.unit("a.cpp", 60)
    (workshop.folder / "b.cpp").write_text("int f(){return 1;}\n")
    workshop.plain("g++", "-O0", "-c", "b.cpp", "-o", "plain.o")
    line = "g++ -O0 -c b.cpp -o b.o; ulimit -f 64; g++ -O0 -c a.cpp -o a.o"
    done = workshop.build("sh", "-c", line, worth_keeping_s=0)
    assert done.code != 0  # the compiler's own: it cannot write its object
    assert workshop.plain("sh", "-c", line).returncode == done.code
    again = workshop.build("g++", "-O0", "-c", "b.cpp", "-o", "b.o")
    assert again.profile["counts"]["kept result"] == 1
    assert (workshop.folder / "b.o").read_bytes() == (workshop.folder / "plain.o").read_bytes()
    assert list((workshop.root / "cache/new").iterdir()) == []


def test_a_full_disk_under_the_cache_keeps_nothing_half(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.cpp").write_text("const int table[60000] = {1};\nconst int *f(){return table;}\n")
    os.utime(folder / "a.cpp", (1, 1))
    cache = Cache(tmp_path / "cache")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = cache.store

    def full(*args: object, **facts: object) -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            return store(*args, **facts)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(cache, "store", full)
    assert compile_once(cache, folder, *ARGS) == "compiled"
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []
    assert compile_once(Cache(tmp_path / "cache"), folder, *ARGS) == "stored"
