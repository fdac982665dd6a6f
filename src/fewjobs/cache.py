"""Finished objects, kept by content: what was compiled is not compiled again after a kill or a reboot.

An entry is found by what goes into a compilation: the tool (path, size, time), the arguments, the folder, the
variables that compilers read, and the source's bytes. It then names every header that was read and the digest
of each; only if all of them are the same does its object count. Random names of temporary folders do not
count, so that pip's next unpacked copy of a package finds what the last one made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import IO

from fewjobs.command import RANDOM_FOLDER, TEMPORARY, Command, normal
from fewjobs.depfile import read_depfile, write_depfile
from fewjobs.tools import has_launchers
from fewjobs.whole_files import Contents, Publisher, read_results, remove_leftovers, rename_synced, seal, sync

_VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "OBJC_INCLUDE_PATH",
    "SOURCE_DATE_EPOCH",
    "LANG",
    "LC_ALL",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
)
# What makes a result depend on more than its inputs, or writes more files than the object.
_REFUSED = re.compile(
    r"-(save-temps|fprofile|ftest-coverage|-coverage|gsplit-dwarf|fdump|-keep|ftime-trace|fmodules|"
    r"fplugin|MJ|Wa,-a|Winvalid-pch|fdevice-time-trace|-time|pch|fpch)"
)
BLOCK_BYTES = 2**20
NAMES, MAX_NAMES = "names", 200_000  # file of the sources' names
NEW = "new"  # folder of what is not published yet, each with its process's number in front
_TEMPORARY_BYTES = re.compile(TEMPORARY.pattern.encode())
_CLOCK = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")
_COARSE = getattr(time, "CLOCK_REALTIME_COARSE", 5)  # Linux's number; Python has no name for it
_OUTPUTS = ("-o", "--gen_c_file_name", "--stub_file_name", "--gen_device_file_name", "--module_id_file_name")


@dataclass(frozen=True)
class Recipe:
    """How one compilation is looked up and stored.

    Attributes:
        key: of the entry.
        command: what is compiled.
        depfile: where the compiler lists what it read, or "" for a stage whose inputs are in its arguments.
        args: the arguments to run instead of the command's own, or () for the same.
        wanted_depfile: the depfile that the command itself asks for, when ``depfile`` is another.
        temporaries: nvcc's random names in the arguments, in order of appearance.
    """

    key: str
    command: Command
    depfile: str = ""
    args: tuple[str, ...] = ()
    wanted_depfile: str = ""
    temporaries: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass
class Cache:
    """A folder of objects; safe for several builds at once, and for a kill at any moment."""

    folder: Path
    _digests: dict[str, tuple[tuple[int, int, int], str]] = field(default_factory=dict)
    _clocks: set[str] = field(default_factory=set)  # files whose result depends on the time
    _names: set[str] | None = None
    _publisher: Publisher = field(default_factory=Publisher)
    _stored: int = 0

    def recipe(self, command: Command, environ: Mapping[str, str], scratch: str) -> Recipe | None:
        """How to keep this command's result, or None if it cannot be kept safely."""
        draft = self.draft(command, scratch)
        return None if draft is None else self.keyed(draft, environ)

    def draft(self, command: Command, scratch: str) -> Recipe | None:
        """The recipe without its key, needed only for what is worth keeping; None as in `recipe`."""
        if _refused(command.args) or not command.output or command.output == "-":
            return None
        if command.name in ("cicc", "ptxas"):
            return Recipe("", command)
        if not command.compiles or command.name not in ("c", "c++", "nvcc"):
            return None
        return _with_depfile(Recipe("", command, outputs=(command.output,)), scratch)

    def keyed(self, draft: Recipe, environ: Mapping[str, str]) -> Recipe | None:
        """The same with its key; made afterwards, `store` sees to it that the source is the same."""
        command = draft.command
        facts = [
            *(f"{name}={environ[name]}" for name in _VARIABLES if name in environ),
            _identity(command.tool),
            *_named_alike(command.name_of_tool, environ.get("PATH", "")),
            normal(command.cwd),
            command.name,
        ]
        if command.name in ("cicc", "ptxas"):
            return self._stage_recipe(command, facts)
        source = self.digest(command.place(command.source))
        if not source:
            return None
        facts += [normal(a) for a in _without_outputs(command.args)]
        key = hashlib.sha256(os.fsencode("\0".join([*facts, source]))).hexdigest()
        return replace(draft, key=key)

    def may_know(self, command: Command) -> bool:
        """Whether an object was ever kept for a source of that name: else nothing has to be looked up."""
        if command.name in ("cicc", "ptxas"):
            return True
        if self._names is None:
            self._names = self._read_names()
        return not self._names or os.path.basename(command.source) in self._names  # noqa: PTH119

    def _read_names(self) -> set[str]:
        """Names of sources whose objects were kept; empty: not known, any may have been."""
        try:
            with open(f"{self.folder}/{NAMES}", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
                names = set(file.read().split("\n"))
        except OSError:
            return set() if os.path.exists(f"{self.folder}/entries") else {""}  # noqa: PTH110
        return names if len(names) < MAX_NAMES else set()

    def _note_name(self, command: Command) -> None:
        name = os.path.basename(command.source)  # noqa: PTH119
        if self._names is None:
            self._names = self._read_names()
        if not self._names or name in self._names:
            return
        self._names.add(name)
        with open(f"{self.folder}/{NAMES}", "a", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
            file.write(f"{name}\n")

    def _stage_recipe(self, command: Command, facts: list[str]) -> Recipe | None:
        """One stage of nvcc: its input is one file, in which random names are replaced by their ordinal."""
        names = tuple(dict.fromkeys(TEMPORARY.findall("\0".join(command.args))))
        outputs = [command.args[i + 1] for i, a in enumerate(command.args[:-1]) if a in _OUTPUTS[:4]]
        whole = hashlib.sha256()
        try:
            with command.path(command.source).open("rb") as file:
                for block in _blocks(file):
                    plain = _plain(block, names)
                    if _TEMPORARY_BYTES.search(plain):
                        return None  # a name that the arguments do not tell
                    whole.update(plain)
        except OSError:
            return None
        facts += [os.fsdecode(_plain(os.fsencode(a), names)) for a in command.args]
        for i, word in enumerate(command.args[:-1]):
            if word == "--module_id_file_name":
                facts.append(_read(command.path(command.args[i + 1])))
        key = hashlib.sha256(os.fsencode("\0".join([*facts, whole.hexdigest()]))).hexdigest()
        return Recipe(key, command, temporaries=names, outputs=tuple(outputs))

    def has(self, recipe: Recipe) -> bool:
        """Whether there is an entry at all, which is cheap to ask."""
        return os.path.exists(f"{self.folder}/entries/{recipe.key[:2]}/{recipe.key[2:]}.json")  # noqa: PTH110

    def fetch(self, recipe: Recipe) -> tuple[str, str] | None:
        """Put the outputs in their places; what the compiler printed, or None if there is no such object."""
        for result in reversed(read_results(self._entry(recipe.key))):
            if all(self.digest(name) == digest for name, digest in self._places(result["inputs"], recipe)):
                if not self._restore_all(result, recipe):
                    return None
                with contextlib.suppress(OSError):  # another build has just removed it
                    os.utime(self.folder / "objects" / result["object"])
                return result["out"], result["err"]
        return None

    def _restore_all(self, entry: dict, recipe: Recipe) -> bool:
        """Put the outputs where they belong if they are what was kept; else remove the damaged object."""
        folder = self.folder / "objects" / entry["object"]
        places = [recipe.command.path(output) for output in recipe.outputs]
        beside = [place.with_name(f".{place.name}.{os.getpid()}") for place in places]
        whole = Contents(recipe.key)
        try:
            for number, file in enumerate(beside):
                self._restore(folder / str(number), file, recipe, whole)
            if whole.digest() != entry["object"].replace("/", ""):
                shutil.rmtree(folder, ignore_errors=True)  # it is compiled and kept again
                return False
            for file, place in zip(beside, places, strict=True):
                file.replace(place)
            self._write_depfile(entry, recipe)
        except OSError:
            return False
        finally:
            for file in beside:
                file.unlink(missing_ok=True)
        return True

    def store(self, recipe: Recipe, *, started: float, out: str = "", err: str = "") -> bool:
        """Keep the outputs of a compilation that has succeeded; ``started``: `file_clock` when it began.

        They are copied now and published beside the loop, once they have reached the disk; `flush` waits for
        that. So neither a kill nor a loss of power leaves an entry whose object is not whole.
        """
        inputs = self._inputs(recipe, started)
        if inputs is None:
            return False
        self._stored += 1
        draft = self.folder / NEW / f"{os.getpid()}-{self._stored}"
        shutil.rmtree(draft, ignore_errors=True)
        whole = Contents(recipe.key)
        try:
            draft.mkdir(parents=True)
            for number, output in enumerate(recipe.outputs):
                with recipe.command.path(output).open("rb") as file, (draft / str(number)).open("wb") as copy:
                    for block in _blocks(file):
                        plain = _plain(block, recipe.temporaries)
                        whole.update(plain)
                        copy.write(plain)
                whole.end_file()
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            return False
        result = {
            "inputs": inputs,
            "object": f"{whole.digest()[:2]}/{whole.digest()[2:]}",
            "out": out,
            "err": err,
        }
        self._publisher.submit(lambda: self._publish(draft, recipe, {**result, "cwd": recipe.command.cwd}))
        return True

    def flush(self) -> None:
        """Wait until everything that was stored can be found."""
        self._publisher.flush()

    def _publish(self, drafted: Path, recipe: Recipe, result: dict) -> None:
        """Give what was copied its name, and enter it; a full disk leaves nothing behind."""
        try:
            rename_synced(drafted, self.folder / "objects" / result["object"])
            self._note_name(recipe.command)
            self._add(recipe, result, drafted.with_suffix(".json"))
        finally:
            shutil.rmtree(drafted, ignore_errors=True)
            drafted.with_suffix(".json").unlink(missing_ok=True)

    def _inputs(self, recipe: Recipe, started: float) -> dict[str, str] | None:
        """Every file that was read, and its digest; None if the result may depend on more than these."""
        if not recipe.depfile:
            return {}
        inputs: dict[str, str] = {}
        for name in read_depfile(recipe.command.path(recipe.depfile)):
            path = recipe.command.place(name)
            try:
                if os.stat(path).st_mtime >= started:  # noqa: PTH116 - changed while it was read
                    return None
            except OSError:
                return None
            inputs[os.path.abspath(path)] = self.digest(path)  # noqa: PTH100 - links stay
            if path in self._clocks:
                return None
        return inputs or None

    def _add(self, recipe: Recipe, result: dict, drafted: Path) -> None:
        place = self._entry(recipe.key)
        results = [r for r in read_results(place) if r["inputs"] != result["inputs"]][-7:]
        place.parent.mkdir(parents=True, exist_ok=True)
        drafted.write_text(
            json.dumps({"results": [*results, {**result, "seal": seal(result)}]}), encoding="utf-8"
        )
        sync(drafted)
        drafted.replace(place)

    def _places(self, inputs: dict[str, str], recipe: Recipe) -> list[tuple[str, str]]:
        """Inputs where they are now: a random folder of then is looked for under its name of now."""
        here = [a for a in (*recipe.command.args, recipe.command.cwd) if "/" in a]
        return [(_moved(name, here), digest) for name, digest in inputs.items()]

    def _restore(self, source: Path, target: Path, recipe: Recipe, whole: Contents) -> None:
        with source.open("rb") as file, target.open("wb") as out:
            for block in _blocks(file):
                whole.update(block)
                for number, name in enumerate(recipe.temporaries):
                    block = block.replace(f"<temporary {number}>_".encode(), name.encode())
                out.write(block)
        whole.end_file()

    def _write_depfile(self, entry: dict, recipe: Recipe) -> None:
        place = recipe.wanted_depfile or recipe.depfile
        if not recipe.depfile or (recipe.args and not recipe.wanted_depfile):
            return  # the command asked for none
        names = [name for name, _ in self._places(entry["inputs"], recipe)]
        write_depfile(recipe.command, recipe.command.path(place), names)

    def digest(self, path: str) -> str:
        """The digest of a file's bytes, remembered while size and times stay; "" if it cannot be read."""
        try:
            facts = os.stat(path)  # noqa: PTH116 - for every header of every compilation
            stamp = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            earlier = self._digests.get(path)
            if earlier is not None and earlier[0] == stamp:
                return earlier[1]
            whole, clock = hashlib.blake2b(digest_size=20), False
            with open(path, "rb") as file:  # noqa: PTH123
                for block in _blocks(file):
                    whole.update(block)
                    clock = clock or _CLOCK.search(block) is not None
        except OSError:
            return ""
        self._digests[path] = (stamp, whole.hexdigest())
        if clock:
            self._clocks.add(path)
        return whole.hexdigest()

    def _entry(self, key: str) -> Path:
        return self.folder / "entries" / key[:2] / f"{key[2:]}.json"

    def trim(self, max_bytes: int) -> None:
        """Remove what killed builds have left, and the least recently used objects until the rest fits."""
        remove_leftovers(self.folder / NEW)
        sizes = []
        for folder in (self.folder / "objects").glob("*/*"):
            try:
                total = sum(file.stat().st_size for file in folder.iterdir())
                sizes.append((folder.stat().st_mtime, total, folder))
            except OSError:
                continue
        excess = sum(size for _, size, _ in sizes) - max_bytes
        for _, size, folder in sorted(sizes):
            if excess <= 0:
                return
            shutil.rmtree(folder, ignore_errors=True)
            excess -= size


_realpath = cache(os.path.realpath)


@lru_cache(4096)
def _refused_word(word: str) -> bool:
    return _REFUSED.match(word) is not None


def _refused(args: Sequence[str]) -> bool:
    return any(_refused_word(a) for a in args if a.startswith("-"))


_VARIABLE = re.compile(rb"(?:^|\0)(" + "|".join((*_VARIABLES, "PATH")).encode() + rb")=([^\0]*)")


def variables(environ: bytes) -> dict[str, str]:
    """The variables of a process's environment that change what compilers do."""
    return {os.fsdecode(m[1]): os.fsdecode(m[2]) for m in _VARIABLE.finditer(environ)}


@lru_cache(64)
def _named_alike(name: str, path: str) -> tuple[str, ...]:
    """What a PATH has in a tool's name: the tool may be a wrapper that runs the next one of its own name."""
    places = [f"{folder}/{name}" for folder in path.split(os.pathsep) if folder and not has_launchers(folder)]
    return tuple(_identity(place) for place in places if os.access(place, os.X_OK))


def _identity(tool: str) -> str:
    real = _realpath(tool)
    try:
        facts = os.stat(real)  # noqa: PTH116
    except OSError:
        return tool
    return f"{tool} {real} {facts.st_size} {facts.st_mtime_ns}"


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """A file in blocks that end with a line, so that no name is cut; a file may be larger than our memory."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        cut = block.rfind(b"\n") + 1
        if cut == 0:  # one long line: a name ends at one of these
            joined = rest + block
            cut = max(joined.rfind(mark) for mark in (b" ", b'"', b",", b"\0")) + 1 or len(joined)
            yield joined[:cut]
            rest = joined[cut:]
            continue
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def file_clock() -> float:
    """The clock that files get their times from: some milliseconds behind, never ahead of a later file."""
    return time.clock_gettime(_COARSE)


def _plain(data: bytes, names: Sequence[str]) -> bytes:
    for number, name in enumerate(names):
        data = data.replace(name.encode(), f"<temporary {number}>_".encode())
    return data


def _without_outputs(args: Sequence[str]) -> list[str]:
    """The arguments without the names of depfiles, which say nothing about the object; its own name may."""
    words, skip = [], False
    for word in args:
        if skip:
            skip = False
        elif word in ("-MF", "-MT", "-MQ", "--dependency-output"):
            skip = True
        elif not re.match(r"-(MD|MMD|MF|MT|MQ|MP)", word):
            words.append(word)
    return words


def _with_depfile(recipe: Recipe, scratch: str) -> Recipe | None:
    """See to it that the compiler lists everything it reads, system headers too."""
    command, args = recipe.command, list(recipe.command.args)
    joined = [a for a in args if a.startswith(("-MF", "-Wp,-M")) and len(a) > 3]
    depfile = ""
    for i, word in enumerate(args):
        if word in ("-MF", "--dependency-output") and i + 1 < len(args):
            depfile = args[i + 1]
    if joined:
        return None  # an unusual spelling: not kept
    if any(a in ("-MD", "--generate-dependencies-with-compile") for a in args):
        place = depfile or str(Path(command.output).with_suffix(".d"))
        return Recipe(recipe.key, command, place, outputs=recipe.outputs)
    if "-MMD" in args:
        if not depfile:
            return None
        new = [
            "-MD" if a == "-MMD" else scratch if i and args[i - 1] == "-MF" else a for i, a in enumerate(args)
        ]
        return Recipe(recipe.key, command, scratch, tuple(new), depfile, outputs=recipe.outputs)
    return Recipe(recipe.key, command, scratch, (*args, "-MD", "-MF", scratch), outputs=recipe.outputs)


def _moved(name: str, here: Sequence[str]) -> str:
    plain = normal(name)
    if plain == name:
        return name
    head = plain[: plain.rindex("<random>") + len("<random>")]
    for word in here:
        at = word.find("/")
        if normal(word)[at:].startswith(head[: head.index("<random>")]) and "<random>" in normal(word):
            # Same random folders in the same order: take the names of now.
            moved = _swap(plain, word[at:])
            if moved is not None and Path(moved).exists():
                return moved
    return name


def _swap(plain: str, word: str) -> str | None:
    folders = RANDOM_FOLDER.findall(word)
    count = plain.count("/<random>")
    if len(folders) < count:
        return None
    for folder in folders[:count]:
        plain = plain.replace("/<random>", folder, 1)
    return plain


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
