"""The house in numbers: python scripts/house_metrics.py [--commits N] [--copies]; run it in a checkout.

Largest file with and without CUDA, modules in an import cycle, pairs of functions with the same logic, pairs
of places that share six lines (``--copies`` lists them, the longest first), shapes in docstrings, arguments
typed `Any`, host functions of more than 8 arguments, `fmt: skip`, comment lines by package, and commits that
stay in one room. Nothing is imported of fewbits; sources are read.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, count
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
COMPILED = {".cu", ".c", ".h"}
EMPTY_WORDS = {"made", "found", "known", "turned"}  # they say what happened and not what is held
SHAPE = re.compile(
    r"\([A-Za-z0-9_.*/ +-]+,[^)]*\)|scalar|[Aa]ny shape|same shape|same size|shape of|that shape|'s shape"
)
IMPORT = re.compile(r"^ *(?:from [\w.]+ )?import (?:\([^)]*\)|[^\n]*)", re.MULTILINE)
COPIED_LINES = 6  # of the same text one after the other, blank ones and comments of Python aside
LOGIC_NODES = 30  # of a function's body, from which on the same shape counts as a copy
MOST_ARGUMENTS = 8
FOREIGN_SIGNATURES = {
    "fewbits/kernels/stochastic/matmul.py:sc_matmul",
    "fewbits/training/optimizer.py:__init__",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules


def largest_cycle(graph: dict[str, set[str]]) -> int:
    """Modules of the largest strongly connected part (1: no cycle)."""

    def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
        seen, todo = {start}, [start]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    back: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            back[other].add(name)
    return max(len(reached(name, graph) & reached(name, back)) for name in graph)


def is_kernel(function: Function) -> bool:
    return any(ast.unparse(d).split("(")[0] in ("jit", "triton.jit") for d in function.decorator_list)


def logic_of(function: Function) -> str | None:
    """The body's kinds of statements and operations, without names and constants; None if it is short."""
    kinds = [type(node).__name__ for part in function.body for node in ast.walk(part)]
    kinds = [kind for kind in kinds if kind not in ("Load", "Store", "Name", "Constant")]
    return " ".join(kinds) if len(kinds) >= LOGIC_NODES else None


class Copy(NamedTuple):
    """Two places that share lines: how many, and where each begins."""

    lines: int
    first: tuple[Path, int]
    second: tuple[Path, int]


def copies_of(files: Sequence[Path], *, imports: bool = True) -> list[Copy]:
    """Places of files that share `COPIED_LINES` lines or more, each pair once, the longest first.

    Without ``imports`` the import statements of Python files do not count.
    """
    texts = {path: text_lines(path, imports) for path in files}
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, lines in texts.items():
        for i in range(len(lines) - COPIED_LINES + 1):
            places[tuple(text for _, text in lines[i : i + COPIED_LINES])].append((path, i))
    same = {pair for those in places.values() for pair in combinations(those, 2)}
    copies = []
    for (one, i), (other, j) in same:
        inside = one == other and abs(i - j) < COPIED_LINES
        if inside or ((one, i - 1), (other, j - 1)) in same:
            continue  # the same place, or the middle of a longer copy
        length = next(n for n in count(1) if ((one, i + n), (other, j + n)) not in same) + COPIED_LINES - 1
        copies.append(Copy(length, (one, texts[one][i][0]), (other, texts[other][j][0])))
    return sorted(copies, key=lambda copy: (-copy.lines, copy.first, copy.second))


def text_lines(path: Path, imports: bool) -> list[tuple[int, str]]:
    """The lines of a file that say something, with their numbers."""
    text, is_python = path.read_text(encoding="utf-8"), path.suffix == ".py"
    if is_python and not imports:  # as many empty lines stay in their place
        text = IMPORT.sub(lambda match: "\n" * match[0].count("\n"), text)
    numbered = enumerate((line.strip() for line in text.splitlines()), 1)
    return [(i, line) for i, line in numbered if line and not (is_python and line.startswith("#"))]


def arguments_of(function: Function) -> list[ast.arg]:
    a = function.args
    return [x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls", "ctx")]


def long_signatures(trees: Mapping[Path, ast.Module]) -> dict[str, list[str]]:
    """Host functions of more than `MOST_ARGUMENTS` arguments, by why they have so many.

    "torch ops": what torch.library is given takes tensors and numbers one by one. "another library's": the
    signature is that of Transformer Engine, scmp_kernels, or torch's AdamW. "own": the rest.
    """
    found: dict[str, list[str]] = {"own": [], "torch ops": [], "another library's": []}
    for path, tree in trees.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        fakes = {ast.unparse(c.args[0]) for c in calls if c.args and is_registration(ast.unparse(c.func))}
        for function in (n for n in ast.walk(tree) if isinstance(n, Function)):
            if is_kernel(function) or len(arguments_of(function)) <= MOST_ARGUMENTS:
                continue
            is_op = function.name in fakes or any(
                is_registration(ast.unparse(d).split("(")[0]) for d in function.decorator_list
            )
            name = f"{path.relative_to(SOURCE)}:{function.name}"
            foreign = "te" in path.relative_to(SOURCE).parts or name in FOREIGN_SIGNATURES
            found["another library's" if foreign else "torch ops" if is_op else "own"].append(name)
    return found


def is_registration(name: str) -> bool:
    """Whether a call or decorator hands a function to torch.library."""
    return name.split(".")[-1] in ("custom_op", "register_kernel", "register_fake")


def public_functions(tree: ast.Module) -> list[Function]:
    """The functions of a file, and the methods of its classes, whose names are public."""
    found: list[Function] = []
    places: list[ast.AST] = [tree]
    while places:
        for node in ast.iter_child_nodes(places.pop()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.append(node)
            elif isinstance(node, Function) and not node.name.startswith("_"):
                found.append(node)
    return found


def has_tensors(function: Function) -> bool:
    """It takes a tensor, or gives one."""
    annotations = [ast.unparse(x.annotation) for x in arguments_of(function) if x.annotation]
    annotations += [ast.unparse(function.returns)] if function.returns else []
    return any(re.search(r"\bTensor\b", text) and "Callable" not in text for text in annotations)


def without_shapes(trees: dict[Path, ast.Module]) -> tuple[list[tuple[Path, Function]], int]:
    """Public functions with tensors that say no shape, and how many there are with tensors.

    A shape stands in the docstring, or in that of a function or class which the docstring names, or in the
    name of an argument (``x_MK``).
    """
    texts: dict[str, str] = defaultdict(str)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                texts[node.name] += " " + (ast.get_docstring(node) or "")
    silent, number = [], 0
    for path, tree in trees.items():
        for function in public_functions(tree):
            if is_kernel(function) or not has_tensors(function):
                continue
            number += 1
            text = ast.get_docstring(function) or ""
            named = [name.split(".")[-1] for name in re.findall(r"(?<!`)`([\w.]+)`(?!`)", text)]
            suffixes = any(re.search(r"_[A-Z]{2,4}$", x.arg) for x in arguments_of(function))
            if not suffixes and not any(
                SHAPE.search(said) for said in (text, *map(texts.__getitem__, named))
            ):
                silent.append((path, function))
    return silent, number


def class_checks(trees: dict[Path, ast.Module], formats: set[str]) -> int:
    """How often a file asks of which class a format is: isinstance, or type() compared."""
    found = 0
    for tree in trees.values():
        for node in ast.walk(tree):
            asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
            asks |= isinstance(node, ast.Compare) and "type(" in ast.unparse(node)
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if asks else set()
            found += bool(names & formats)
    return found


def formats_of(trees: dict[Path, ast.Module]) -> set[str]:
    """The classes that derive from `Format`, itself not among them."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {"Format"}
    for _ in classes:
        found |= {c.name for c in classes if {ast.unparse(b).split(".")[-1] for b in c.bases} & found}
    return found - {"Format"}


def confined_commits(number: int) -> str:
    """The last commits that touch one room of src only: a folder, in kernels and training an inner one."""
    command = ["git", "log", f"-{number}", "--no-merges", "--format=%x00", "--name-only", "--", "src"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rooms = []
    for commit in told.split("\0")[1:]:
        paths = [Path(line).parts[1:] for line in commit.split("\n") if line.startswith("src/")]
        deep = ("kernels", "training")
        rooms.append({p[1:3] if len(p) > 3 and p[1] in deep else p[1:2] for p in paths})
    kept = sum(len(one) == 1 for one in rooms)
    return f"{kept} of {len(rooms)} ({100 * kept // max(len(rooms), 1)} %)"


def most_fields(trees: Mapping[Path, ast.Module]) -> str:
    """The class with the most annotated fields, settings of a user's aside."""
    counts = {
        f"{node.name} ({path.relative_to(SOURCE)})": sum(
            isinstance(part, ast.AnnAssign) for part in node.body
        )
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.endswith("Config")
    }
    name = max(counts, key=lambda key: counts[key])
    return f"{counts[name]}, {name}"


def private_imports(trees: Mapping[Path, ast.Module]) -> int:
    """Imports of a name that another file keeps for itself; tests/test_architecture.py looks at more."""
    imports = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in imports if (n.module or "").split(".")[0] in ("fewbits", "fewjobs")]
    names = [alias.name for node in ours for alias in node.names]
    return sum(name.startswith("_") and not name.startswith("__") for name in names)


def empty_words(trees: Mapping[Path, ast.Module]) -> int:
    """Locals called made, found, known or turned, each place where one gets a value."""
    names = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return sum(node.id in EMPTY_WORDS and isinstance(node.ctx, ast.Store) for node in names)


def print_comments() -> None:
    shares: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in sorted(SOURCE.rglob("*.py")):
        package = "/".join(path.relative_to(SOURCE).parts[:2]).removesuffix(".py")
        lines = [line.strip() for line in lines_of(path)]
        shares[package][0] += sum(line.startswith("#") for line in lines)
        shares[package][1] += sum(bool(line) for line in lines)
    for package, (comments, lines) in shares.items():
        print(f"  comment lines, {package:<24} {100 * comments / max(lines, 1):5.1f} % of {lines}")


def print_copies(files: Sequence[Path]) -> None:
    for copy in copies_of(files):
        first, second = (f"{path.relative_to(SOURCE)}:{line}" for path, line in (copy.first, copy.second))
        print(f"{copy.lines:>4} lines  {first}  {second}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commits", type=int, default=50, help="how many commits to look at")
    parser.add_argument("--copies", action="store_true", help="list the places that share lines, and no more")
    options = parser.parse_args()
    number = options.commits
    files = sorted(SOURCE.rglob("*.py"))
    compiled = sorted(path for path in SOURCE.rglob("*") if path.suffix in COMPILED)
    if options.copies:
        print_copies([*files, *compiled])
        return
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    modules = {module_of(path) for path in files}
    graph = {
        module_of(p): imports_of(tree, modules) for p, tree in trees.items() if module_of(p) != "fewbits"
    }
    graph = {name: others & graph.keys() for name, others in graph.items()}
    functions = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, Function)]
    host = [function for function in functions if not is_kernel(function)]
    copies = Counter(logic for function in host if (logic := logic_of(function)))
    silent, with_tensors = without_shapes(trees)
    arguments = [x for function in host for x in arguments_of(function)]
    untold = sum(x.annotation is not None and ast.unparse(x.annotation) == "Any" for x in arguments)
    formats, tests = formats_of(trees), sorted((ROOT / "tests").rglob("*.py"))
    test_trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in tests}
    rows = {
        "Python files, lines": f"{len(files)}, {sum(len(lines_of(path)) for path in files)}",
        "largest Python file": max(len(lines_of(path)) for path in files),
        "largest file with CUDA and C": max(len(lines_of(path)) for path in (*files, *compiled)),
        "modules in the largest import cycle": largest_cycle(graph),
        "pairs of functions with the same logic": sum(n * (n - 1) // 2 for n in copies.values()),
        "pairs of places that share six lines": (
            f"{len(copies_of([*files, *compiled]))}, without imports "
            f"{len(copies_of([*files, *compiled], imports=False))}"
        ),
        "public tensor functions that say shapes": (
            f"{100 - 100 * len(silent) // with_tensors} % of {with_tensors}"
        ),
        "arguments typed Any": f"{100 * untold / max(len(arguments), 1):.1f} % of {len(arguments)}",
        "public tensor functions that say none": len(silent),
        "host functions of more than 8 arguments": ", ".join(
            f"{len(names)} {kind}" for kind, names in long_signatures(trees).items()
        ),
        "fmt: skip and fmt: off in src and tests": sum(
            len(re.findall(r"# fmt: (?:skip|off)", path.read_text(encoding="utf-8")))
            for path in (*files, *tests)
        ),
        "fields of the class that has most": most_fields(trees),
        "imports of private names, src and tests": f"{private_imports(trees)}, {private_imports(test_trees)}",
        "locals called made, found, known, turned": empty_words(trees),
        "empty __init__.py": sum(not lines_of(path) for path in files),
        "checks of a format's class, src and tests": (
            f"{class_checks(trees, formats)}, {class_checks(test_trees, formats)}"
        ),
        f"last {number} commits in one room": confined_commits(number),
    }
    for name, value in rows.items():
        print(f"{name:<44} {value}")
    print_comments()


if __name__ == "__main__":
    main()
