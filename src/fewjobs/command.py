"""Reading a compiler's command line: which stage, unit and architecture, what goes in and what comes out."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CACHES = ("ccache", "sccache", "fewbits-launch")
_CXX = re.compile(r"(^|[-_])(g\+\+|c\+\+|clang\+\+|icpx)(-[\d.]+)?$")
_C = re.compile(r"(^|[-_])(gcc|cc|clang|icx)(-[\d.]+)?$")
_SOURCES = {
    **dict.fromkeys((".c", ".i", ".m"), "c"),
    **dict.fromkeys((".cc", ".cpp", ".cxx", ".c++", ".ii", ".C", ".cp", ".mm", ".cu"), "c++"),
    **dict.fromkeys((".s", ".S", ".asm"), "as"),
}
_COMPILES = frozenset(("-c", "-S", "-dc", "-dw", "--compile", "-ptx", "-cubin"))
_DEVICE_STAGES = ("cicc", "ptxas", "cudafe++", "fatbinary", "nvlink")
# Options whose value is the next word; a value is never taken for a source file.
_VALUED = {
    *(
        "-o",
        "-MF",
        "-MT",
        "-MQ",
        "-I",
        "-isystem",
        "-iquote",
        "-idirafter",
        "-include",
        "-imacros",
        "-D",
        "-U",
    ),
    *("-x", "-L", "-l", "-arch", "-Xlinker", "-Xcompiler", "-Xptxas", "-Xclang", "-T", "-u", "-B", "-ccbin"),
    *("-gencode", "--generate-code", "--compiler-options", "--options-file", "-optf", "-isysroot", "--param"),
    *("-target", "-Xpreprocessor", "-Xassembler", "-aux-info", "-threads", "--threads", "-t", "-std", "-m"),
    *(
        "--compiler-bindir",
        "--output-file",
        "--dependency-output",
        "-code",
        "--gpu-code",
        "--gpu-architecture",
    ),
}
TEMPORARY = re.compile(r"tmpxft_[0-9a-f]{8}_[0-9a-f]{8}-\d+_")
# Folders with random names that pip, uv and Python make for a build: another run has other ones.
RANDOM_FOLDER = re.compile(
    r"/(?:pip-[a-z-]+-[a-z0-9_]{8}(?:/[^/\s\"']+_[0-9a-f]{32})?|tmp[a-z0-9_]{8}|\.tmp[A-Za-z0-9]{6})(?=/|$)"
)


@dataclass(frozen=True)
class Command:
    """A command line as far as we need it.

    Attributes:
        tool: path of the tool.
        args: what follows it, with response files read.
        cwd: where it runs.
        name: the stage's name; "nvcc" is nvcc's driver, which starts the other stages.
        source: the source file, or "".
        output: the file it makes, or "".
        arch: GPU architecture, or "".
        plain: the arguments are the launcher's own: neither a response file nor a caching tool is between.
    """

    tool: str
    args: tuple[str, ...]
    cwd: str
    name: str
    source: str = ""
    output: str = ""
    arch: str = ""
    plain: bool = True

    @property
    def name_of_tool(self) -> str:
        """The tool's own name, such as "g++"."""
        return self.tool.rpartition("/")[2]

    @property
    def compiles(self) -> bool:
        """Whether it turns one source into one object."""
        return bool(self.source) and not _COMPILES.isdisjoint(self.args)

    def place(self, name: str) -> str:
        """A path that the command names, as text."""
        return os.path.join(self.cwd, name)  # noqa: PTH118 - keeps ".." as it is

    def path(self, name: str) -> Path:
        """A path that the command names."""
        return Path(self.place(name))


def read_command(tool: str, args: Sequence[str], cwd: str) -> Command:
    """Find out what a command does; ``args`` do not include the tool."""
    words = args
    args = expand(args, cwd)
    name = os.path.basename(tool)  # noqa: PTH119 - called for each of thousands of commands
    while name in _CACHES and args:
        tool, args = args[0], args[1:]
        name = os.path.basename(tool)  # noqa: PTH119
    plain = list(words) == list(args)
    if name in _DEVICE_STAGES:
        return _device_stage(tool, args, cwd, name)
    source = _source_of(args)
    output = _value_of(args, "-o", "--output-file")
    if name == "nvcc":
        archs = sorted(set(re.findall(r"(?:sm|compute)_(\d+[af]?)", " ".join(args))))
        return Command(tool, tuple(args), cwd, name, source, output, ",".join(archs), plain)
    kind = "c++" if _CXX.search(name) else "c" if _C.search(name) else name
    if kind in ("c", "c++"):
        kind = "link" if {"-c", "-S"}.isdisjoint(args) else _language(args, source, kind)
    return Command(tool, tuple(args), cwd, kind, source if kind != "link" else "", output, plain=plain)


def _language(args: Sequence[str], source: str, default: str) -> str:
    language = _value_of(args, "-x")
    if language:
        return "c++" if "++" in language or language == "cu" else "c"
    return _SOURCES.get(os.path.splitext(source)[1], default)  # noqa: PTH122


def _device_stage(tool: str, args: Sequence[str], cwd: str, name: str) -> Command:
    arch = ""
    for i, word in enumerate(args):
        match = re.fullmatch(r"--?(?:arch|gpu-name)(?:=(.*))?", word)
        if match is not None:
            value = match[1] or (args[i + 1] if i + 1 < len(args) else "")
            arch = value.rpartition("_")[2]
            break
    inputs = [
        a for a in args if not a.startswith("-") and a.endswith((".ii", ".ptx", ".gpu", ".cubin", ".o"))
    ]
    output = _value_of(args, "-o", "--output-file") or _value_of(args, "--gen_c_file_name")
    sources = [a for a in inputs if a != output]
    return Command(tool, tuple(args), cwd, name, sources[-1] if sources else "", output, arch)


def expand(args: Sequence[str], cwd: str, depth: int = 0) -> list[str]:
    """Replace response files by what they hold."""
    words: list[str] = []
    for i, word in enumerate(args):
        named = word[1:] if word.startswith("@") and len(word) > 1 else ""
        if i and args[i - 1] in ("--options-file", "-optf"):
            named = word
        if not named or depth > 8:
            words.append(word)
            continue
        try:
            text = Path(os.path.join(cwd, named)).read_text(errors="replace")  # noqa: PTH118
            words += expand(shlex.split(text), cwd, depth + 1)
        except (OSError, ValueError):
            words.append(word)
    return words


def _source_of(args: Sequence[str]) -> str:
    skip = False
    for word in args:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in _VALUED
        elif os.path.splitext(word)[1] in _SOURCES:  # noqa: PTH122
            return word
    return ""


def _value_of(args: Sequence[str], *names: str) -> str:
    for i, word in enumerate(args):
        if not word.startswith(names):
            continue
        for name in names:
            if word == name and i + 1 < len(args):
                return args[i + 1]
            if word.startswith(f"{name}=") or (name == "-o" and word.startswith("-o") and len(word) > 2):
                return word[len(name) :].lstrip("=")
    return ""


def threads_of(args: Sequence[str]) -> int:
    """How many architectures an nvcc command compiles at once."""
    value = _value_of(args, "--threads", "-t", "-threads")
    return int(value) if value.isdigit() else 1


def normal(text: str) -> str:
    """A text without the random names of temporary files and folders, which differ from run to run."""
    return RANDOM_FOLDER.sub("/<random>", TEMPORARY.sub("<temporary>_", text))


def unit_name(command: Command) -> str:
    """How people call what the command makes."""
    if command.source:
        name = command.source
        if TEMPORARY.search(name):
            name = re.sub(
                r"(\.(?:compute_\d+[af]?|cpp\d))?(\.cudafe\d)?\.[a-z0-9]+$",
                ".cu",
                TEMPORARY.sub("", Path(name).name),
            )
        elif not name.startswith(("/", ".")) and "/." not in name and "//" not in name:
            return normal(name)
    else:
        name = command.output or "a.out"
    path = os.path.normpath(command.path(name))
    try:
        relative = os.path.relpath(path, command.cwd)
    except ValueError:
        relative = path
    short = relative if not relative.startswith("../../") else "/".join(Path(path).parts[-3:])
    while short.startswith("../"):
        short = short[3:]
    return normal(short)
