"""The rules of the house: who imports whom, sizes, what no file does, the parts of a kernel file."""

from __future__ import annotations

import ast
import importlib.machinery
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fewbits"
RUNNER = ROOT / "src" / "fewjobs"  # the build runner: a package of its own, which is also installed alone
PACKAGES = (SOURCE, RUNNER)
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
TESTS = ROOT / "tests"
COMPILED = {".cu", ".c", ".h"}  # compiled sources count in the rule of lines too
CODE = sorted([*FILES, *(path for path in (ROOT / "src").rglob("*") if path.suffix in COMPILED)])
KERNELS = SOURCE / "kernels"
MAX_LINES = 500
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 80, 150

_MODELS = {"host", "decoder", "formats", "families", "recipes", "kernels", "nn", "export", "models"}
MAY_IMPORT = {
    "errors": set(),
    "device": set(),
    "words": {"fewjobs"},
    "text_files": set(),
    "yaml_text": {"text_files"},
    "formats": set(),
    "families": {"formats"},
    "kernels": {"formats"},
    "recipes": {"formats", "families"},
    "nn": {"formats", "kernels"},
    "export": {"formats", "families"},
    "host": {"formats", "families", "recipes", "nn"},
    "decoder": {"formats", "families", "recipes", "kernels", "nn", "host"},
    "models": {"formats", "families", "recipes", "kernels", "nn", "export", "host", "decoder"},
    "inference": _MODELS,
    "training": {*_MODELS, "inference"},
    "bench": {*_MODELS, "training"},
    "demo": {*_MODELS, "inference", "training"},
    "front": {"models"},
    "chat_templates": {"models", "front"},
    "trl": {"front"},
    "trainer": {"front"},
    "te": {"formats", "kernels"},  # the words of Transformer Engine
    "fewjobs": set(),
    "build": {"fewjobs"},  # its former name
    "__main__": {"cli"},
    "doctor": {"fewjobs"},
    "cli": {*_MODELS, "inference", "training", "bench", "demo", "doctor", "fewjobs"},
}
# What the machine is told by environment variables (a toolkit's place, Slurm's memory) is read here alone.
MAY_READ_ENVIRONMENT = {"fewjobs", "doctor"}
EVERYONE_MAY_IMPORT = {"errors", "device", "words", "text_files", "yaml_text", "__version__"}
# The rooms inside a room, and what each may import of the others: arrows point down here too.
_SETTINGS = {"config", "config_help", "config_values"}
_BEFORE_A_RUN = _SETTINGS | {"data", "ranks", "checkpoints", "run_folder", "plan", "calibration", "optimizer"}
_BEFORE_TE_LAYERS = {"recipe", "support", "arithmetic", "ranks", "tensors"}
ROOMS_INSIDE = {
    "kernels": {
        "launch": set(),
        "codec": {"launch"},
        "product": {"launch", "codec"},
        "loss": {"launch", "codec", "product"},
        "decoder": {"launch", "codec"},
        "generation": {"launch", "decoder"},
        "stochastic": {"launch", "codec"},
        "optimizer": {"launch"},
    },
    "models": {
        "folders": set(),
        "chat": set(),
        "packing": {"folders"},
        "stochastic": {"packing"},
        "undo": {"packing", "stochastic"},
        "loading": {"folders", "packing", "stochastic", "undo"},
        "merging": {"folders", "packing", "loading"},
        "adapting": {"folders", "packing", "loading", "merging"},
        "plan": {"packing", "adapting"},
        "generation": {"folders", "packing", "adapting"},
        "writing": {"folders", "packing", "merging", "adapting"},
        "vision": {"adapting"},
        "fused": set(),
        "fast": {"folders", "chat", "packing", "loading", "adapting", "plan", "generation", "writing"},
    },
    "te": {
        "recipe": set(),
        "support": {"recipe"},
        "refused": set(),
        "arithmetic": set(),
        "ranks": set(),
        "context": set(),
        "tensors": {"recipe", "support", "arithmetic", "ranks"},
        "active": _BEFORE_TE_LAYERS,
        "recipe_state": {*_BEFORE_TE_LAYERS, "active"},
        "quantizer_factories": {"tensors"},
        "products": {"arithmetic", "tensors"},
        "layers": {*_BEFORE_TE_LAYERS, "active", "products"},
        "attention": {"support", "ranks", "context", "tensors", "active", "layers"},
        "experts": {"support", "tensors", "active", "layers"},
        "multi_tensor": set(),
        "optimizers": {"tensors", "layers", "multi_tensor"},
        "transformer_layer": {"ranks", "layers", "attention"},
        "ops": {"support", "ranks", "tensors", "layers"},
        "drop_in": set(),
        "former": set(),
    },
    "training": {
        "config_help": set(),
        "config_values": set(),
        "other_words": set(),
        "config": {"config_help", "config_values", "other_words"},
        "optimizer": set(),
        "data": _SETTINGS,
        "ranks": set(),
        "checkpoints": {"ranks", "optimizer"},
        "run_folder": _SETTINGS | {"ranks", "checkpoints"},
        "report": {"run_folder"},
        "plan": {"data", "ranks"},
        "step": {"data", "ranks", "plan", "checkpoints"},
        "calibration": set(),
        "setup": _BEFORE_A_RUN,
        "preferences": _BEFORE_A_RUN | {"setup"},
        "late_results": _BEFORE_A_RUN | {"report", "setup"},
        "run": _BEFORE_A_RUN | {"step", "report", "setup", "preferences", "late_results"},
        "ahead": _BEFORE_A_RUN | {"report", "setup", "preferences", "run"},
    },
}
# Ops that have a longer name than their file: the room says the rest.
OP_OF = {
    "stochastic/codes": "stochastic_codes",
    "stochastic/emulated": "stochastic_emulated",
    "stochastic/matmul": "matmul_stochastic",
    "stochastic/quantize": "quantize_stochastic",
    "stochastic/rows": "stochastic_rows",
}
# Private names of other libraries' objects that files of ours happen to define for themselves, too.
THEIR_PRIVATE_NAMES = {
    *("_replace", "_parameters", "_version", "_C", "_scaled_mm", "_to_copy"),  # tuples, torch
    *(
        "_sample",
        "_load_from_checkpoint",
        "_from_config",
        "_active_adapter",
        "_quantize",
    ),  # transformers, PEFT, bitsandbytes
}
# Ops whose public function has another name.
PUBLIC_NAME = {
    "matmul_packed": "packed_linear",
    "matmul_operands": "operand_linear",
    "matmul_stochastic": "sc_matmul",
    "matmul_float8": "float8_linear",
    "quantize_float8": "quantize_rows",
    "float8_operands": "one_multiplier",
    "low_rank_add": "low_rank_add_",
    "gradient_codec": "quantize_gradient",
}


def op_of(path: Path) -> str:
    """The op of a kernel file: the name of its tests and benchmark cases."""
    return OP_OF.get(path.relative_to(KERNELS).with_suffix("").as_posix(), path.stem)


def shown(path: Path) -> str:
    """A file by its short name."""
    base = SOURCE.parent if path.is_relative_to(SOURCE.parent) else ROOT
    return str(path.relative_to(base)).removeprefix("fewbits/")


def of_every_file(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of a rule that holds for each of ``paths``: it tells all that breaks the rule at once."""
    assert paths

    def made(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{shown(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return made


def room(path: Path) -> str:
    """The folder or file under src/fewbits that ``path`` belongs to, or the other package of src."""
    package, *inside = path.relative_to(ROOT / "src").parts
    return inside[0].removesuffix(".py") if package == SOURCE.name else package


def room_of(module: str) -> str:
    """The same of a module by its name."""
    package, *inside = module.split(".")
    return inside[0] if package == SOURCE.name else package


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def module_file(name: str) -> Path:
    return SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at its top or inside a function."""
    ours = {package.name for package in PACKAGES}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in ours:
            if node.module == "fewbits":
                yield from (f"fewbits.{alias.name}" for alias in node.names)
            else:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [name for name in names if module_file(name).is_file()]
                yield from modules  # from fewbits.kernels.launch import nvrtc
                if len(modules) < len(names):
                    yield str(node.module)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name != "fewbits"]
            yield from (name for name in names if name.split(".")[0] in ours)
        elif isinstance(node, ast.Attribute) and is_name(node.value, "fewbits"):
            yield f"fewbits.{node.attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names(path: Path) -> frozenset[str]:
    """What a file defines for itself: functions, methods, classes, their fields, and what ``self`` holds."""
    names = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_name(node.value, "self")
        ):
            names.add(node.attr)
    for scope in [tree(path), *(node for node in nodes(path) if isinstance(node, ast.ClassDef))]:
        for statement in scope.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return frozenset(name for name in names if is_private(name))


@cache
def all_private_names() -> frozenset[str]:
    return frozenset().union(*map(private_names, FILES))


def called_name(node: ast.Call) -> str:
    return ast.unparse(node.func)


def is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).split("(")[0] in ("jit", "triton.jit") for d in node.decorator_list)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@of_every_file([f for f in FILES if f.parent != SOURCE or f.stem in MAY_IMPORT])
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    everyones = EVERYONE_MAY_IMPORT if path.is_relative_to(SOURCE) else set()
    allowed = MAY_IMPORT[here] | everyones | {here}
    for module in imported_modules(path):
        assert room_of(module) in allowed, f"{here} may import {sorted(allowed)}, not {module}"


@of_every_file([f for f in FILES if room(f) in ROOMS_INSIDE])
def test_imports_between_rooms_inside_point_down(path: Path) -> None:
    outer, inner = path.relative_to(SOURCE).parts[:2]
    if inner == "__init__.py":
        return
    here = inner.removesuffix(".py")
    allowed = ROOMS_INSIDE[outer][here] | {here}
    for module in imported_modules(path):
        if module.startswith(f"fewbits.{outer}."):
            assert module.split(".")[2] in allowed, f"{here} may import {sorted(allowed)}, not {module}"


def test_no_import_cycle() -> None:
    """Also between files of one room, and counting the imports inside functions."""
    graph: dict[str, set[str]] = {}
    names = {
        ".".join(f.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): f
        for f in FILES
    }
    for name, path in names.items():
        if name != "fewbits":  # its imports are for type checkers; names are resolved on first use
            graph[name] = {m for m in imported_modules(path) if m in names and m != name}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@of_every_file(CODE)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: perhaps two rooms"


@of_every_file(FILES)
def test_functions_are_short(path: Path) -> None:
    for node in functions(path):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        limit = MAX_KERNEL_LINES if is_triton_kernel(node) else MAX_FUNCTION_LINES
        assert length <= limit, f"{node.name} has {length} lines"


@of_every_file(FILES)
def test_nothing_hidden(path: Path) -> None:
    """No compiled source, no swallowed errors, no globals, no configuration by environment."""
    for node in nodes(path):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            assert called_name(node) not in ("exec", "eval", "compile", "inspect.getsource", "os.getenv"), (
                where
            )
        elif isinstance(node, ast.Attribute):
            environment = node.attr == "environ" and is_name(node.value, "os")
            assert not environment or room(path) in MAY_READ_ENVIRONMENT, where
        elif isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{where}: a bare except"
            assert "Exception" not in ast.unparse(node.type).replace("BaseException", "Exception").split(), (
                where
            )
        else:
            assert not isinstance(node, ast.Global), f"{where}: global {getattr(node, 'names', '')}"


MADE_OF_FLOATS = {
    f"torch.{name}" for name in ("empty", "zeros", "ones", "eye", "linspace", "logspace", "rand", "randn")
}


@of_every_file([path for path in FILES if path.is_relative_to(SOURCE)])
def test_floats_name_their_dtype(path: Path) -> None:
    """A user may have another default dtype, and transformers sets one while it builds a model."""
    for node in nodes(path):
        if not isinstance(node, ast.Call) or any(k.arg in ("dtype", "out", None) for k in node.keywords):
            continue
        of_floats = called_name(node) in MADE_OF_FLOATS
        if called_name(node) in ("torch.tensor", "torch.full", "torch.arange"):
            inside = [part for argument in node.args for part in ast.walk(argument)]
            of_floats = any(
                (isinstance(part, ast.Constant) and isinstance(part.value, float))
                or (isinstance(part, ast.Call) and called_name(part) == "float")
                or (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div))
                for part in inside
            )
        assert not of_floats, f"line {node.lineno}: {called_name(node)} without dtype="


def backward_functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Functions of a file that autograd calls with what a forward pass saved."""
    registered = {
        ast.unparse(node.args[0])
        for node in nodes(path)
        if isinstance(node, ast.Call) and called_name(node).endswith(".register_autograd")
    }
    for node in functions(path):
        if isinstance(node, ast.FunctionDef) and (node.name == "backward" or node.name in registered):
            yield node


# Such a name says that something was done, not what is there: found, but what?
NOT_WHAT_IT_HOLDS = {"asked", "found", "given", "kept", "known", "made", "seen", "taken", "turned", "wanted"}


def bound_names(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and names of a file's locals, arguments and functions; fields stand with their class."""
    bodies = [statement for n in nodes(path) if isinstance(n, ast.ClassDef) for statement in n.body]
    fields = {id(statement.target) for statement in bodies if isinstance(statement, ast.AnnAssign)}
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name


@of_every_file(FILES)
def test_names_say_what_they_hold(path: Path) -> None:
    faults = [f"line {line}: {name}" for line, name in bound_names(path) if name in NOT_WHAT_IT_HOLDS]
    assert not faults, f"{faults}: name what it holds, such as tensors, row, is_packed, sizes"


@of_every_file(FILES)
def test_private_names_stay_in_their_file(path: Path) -> None:
    """What another file needs has a public name."""
    ours = {package.name for package in PACKAGES}
    others = all_private_names() - private_names(path) - THEIR_PRIVATE_NAMES
    for node in nodes(path):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ours:
            names = [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and node.attr in others:
            names = [node.attr]
        assert not names, f"line {getattr(node, 'lineno', 0)}: {names[0]} is another file's own"


# Transformer Engine's names, which fewbits.te has to have.
CALLED_BY_TRANSFORMER_ENGINE = {"Format", "Linear", "RMSNorm", "Recipe"}
CALLED_BY_TRANSFORMER_ENGINE |= {
    "GroupedLinear",
    "L2Normalization",
    "LayerNorm",
}  # modules, and operations of them
# Other names that two classes still have. Each that gets a name of its own leaves this list; `Plan` was nine.
OF_TWO_CLASSES = """
Arguments Branch Budget Built Call Choice Codes Decoding Gpu Lane Launch Layout Normed Operand
Operands Part Pieces Place Product Progress Projection Question Reading Row Rows RunData Shape Sizes
Slots Source Step Tables Target Task Text Trial Work Workspace
"""


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in [path for path in FILES if RUNNER not in path.parents]:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(shown(path))
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    allowed = {*CALLED_BY_TRANSFORMER_ENGINE, *OF_TWO_CLASSES.split()}
    new = {name: paths for name, paths in twice.items() if name not in allowed}
    assert not new, f"a name says what its class holds, so that no other has it: {new}"
    assert twice.keys() == allowed, f"take from the list {sorted(allowed - twice.keys())}"


@of_every_file(FILES)
def test_saved_tensors_are_read_once(path: Path) -> None:
    """Gradient checkpointing computes them again for one reading, and refuses a second."""
    everywhere = sum(1 for n in nodes(path) if isinstance(n, ast.Attribute) and n.attr == "saved_tensors")
    saves = sum(1 for n in nodes(path) if isinstance(n, ast.Attribute) and n.attr == "save_for_backward")
    inside = 0
    for function in backward_functions(path):
        reads = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "saved_tensors"]
        assert len(reads) <= 1, f"line {function.lineno}: {len(reads)} readings of saved_tensors"
        # A statement of the function itself: neither in a branch, which may not run, nor in a loop.
        plain = [s.value for s in function.body if isinstance(s, ast.Assign)]
        assert all(n in plain for n in reads), (
            f"line {function.lineno}: read ctx.saved_tensors into names once, at the top of backward"
        )
        inside += len(reads)
    assert inside == everywhere, "saved_tensors is read outside of a backward pass's own function"
    assert inside == saves, f"{saves} functions save tensors and {inside} read them"


@of_every_file(FILES)
def test_what_needs_a_gradient_has_a_name(path: Path) -> None:
    """A number would go on saying the same place when forward gets another argument."""
    for node in nodes(path):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            by_number = node.value.attr == "needs_input_grad" and not isinstance(node.slice, ast.Slice)
            assert not by_number, f"line {node.lineno}: needs_dx, needs_dw, *_ = ctx.needs_input_grad"


@of_every_file([f for f in FILES if room(f) in ("kernels", "nn", "decoder")])
def test_rows_are_counted_and_not_left_to_reshape(path: Path) -> None:
    """``x.reshape(-1, x.shape[-1])`` fails where the last axis is 0 long: `rows_of` does not."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and called_name(node).endswith(".reshape") and len(node.args) == 2:
            first, last = (ast.unparse(argument) for argument in node.args)
            open_ended = first == "-1" and last.endswith(("shape[-1]", "_features"))
            assert not open_ended, f"line {node.lineno}: write rows_of(x)"


@of_every_file(FILES)
def test_sizes_are_said_in_powers_of_1024(path: Path) -> None:
    """By fewbits.words.size: not in MB here and in MiB there."""
    unit = re.compile(r" ?([kKMGT]B|epochs)\b(?!/s)")
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            for value, text in pairwise(node.values):
                said = text.value if isinstance(text, ast.Constant) else ""
                wrong = isinstance(value, ast.FormattedValue) and unit.match(said)
                assert not wrong, f"line {node.lineno}: write size(n) or counted(n, 'epoch')"


def is_model_type(node: ast.AST) -> bool:
    """Whether this is the name of a model's family: ``model_type``, ``config.model_type``, its item."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "model_type"
        case ast.Subscript(slice=ast.Constant(value="model_type")):
            return True
        case ast.Call(
            args=[_, ast.Constant(value="model_type"), *_] | [ast.Constant(value="model_type"), *_]
        ):
            return True  # getattr(config, "model_type", ""), config.get("model_type")
        case ast.Call(func=ast.Name(id="str"), args=[ast.AST() as inner]):
            return is_model_type(inner)
    return False


def asks_for_a_family(tree: ast.AST) -> Iterator[ast.AST]:
    """Where code decides by a model_type or by a class's name, under whatever name it holds it."""
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_model_type(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_family(node: ast.AST) -> bool:
        said = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name | ast.Call) else ""
        return is_model_type(node) or said in names or bool(OF_A_FAMILY.fullmatch(said))

    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                asked = [left, *others]
                if any(ast.unparse(side) in ("CONFIG_MAPPING", "decoder_types()") for side in asked):
                    continue  # whether transformers knows it at all
            case ast.Subscript(slice=key):
                asked = [key]
            case ast.Match(subject=subject):
                asked = [subject]
            case ast.Call(func=ast.Attribute(value=text, attr="startswith" | "endswith")):
                asked = [text]
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[key, *_]):
                asked = [] if ast.unparse(table) == "SPECS" else [key]
            case _:
                continue
        if any(map(is_family, asked)):
            yield node


OF_A_FAMILY = re.compile(r"model_type_of\(.*\)|type\((model|base|inner|decoder|config)\)\.__name__")


@of_every_file([f for f in FILES if room(f) != "families"])
def test_a_family_is_known_by_its_spec_alone(path: Path) -> None:
    """No other room compares a model_type, nor looks something up by it: the spec has what one must know."""
    for function in functions(path):
        for node in asks_for_a_family(function):
            raise AssertionError(f"line {getattr(node, 'lineno', 0)}: ask its ModelSpec")


def test_a_family_is_found_in_disguise() -> None:
    for line in (
        "config.model_type == 'g'",
        "TABLE[config.model_type]",
        "TABLE.get(config.model_type)",
        "config.model_type.startswith('gemma')",
        "model_type_of(model) == 'g'",
        "kind = config.model_type; kind == 'g'",
        "type(model).__name__ == 'Gemma'",
        "getattr(config, 'model_type', '') == 'g'",
    ):
        assert [*asks_for_a_family(ast.parse(line))], line
    assert not [*asks_for_a_family(ast.parse("kind = config.model_type; print(f'{kind} is not known')"))]


@cache
def subclasses_of(base: str) -> dict[str, Path]:
    """The classes of src that derive from ``base``, by name, with their files."""
    classes = {n.name: (n, path) for path in FILES for n in nodes(path) if isinstance(n, ast.ClassDef)}
    found: dict[str, Path] = {}
    while True:
        names = {base, *found}
        new = {
            name: path
            for name, (node, path) in classes.items()
            if name not in names and any(ast.unparse(b).split(".")[-1] in names for b in node.bases)
        }
        if not new:
            return found
        found |= new


def class_checks(path: Path, classes: set[str]) -> Iterator[str]:
    """Where a file asks of which of ``classes`` a value is: by isinstance, issubclass, type() or match."""
    for node in nodes(path):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and called_name(node).split(".")[-1] in ("isinstance", "issubclass"):
            asked = list(node.args[1:])
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        if {part.id for one in asked for part in ast.walk(one) if isinstance(part, ast.Name)} & classes:
            yield f"{path.name}, line {getattr(node, 'lineno', 0)}"


@of_every_file(FILES)
def test_a_format_is_known_by_its_contract_alone(path: Path) -> None:
    """No ladder of types: a format's own file says what kernels, layers and exports need to know of it."""
    others = {name for name, file in subclasses_of("Format").items() if file != path}
    asked = list(class_checks(path, others))
    assert not asked, f"{asked}: ask format.contract, and let each format state it in its own file"


def test_tests_of_all_formats_ask_no_class() -> None:
    formats = set(subclasses_of("Format"))
    assert not list(class_checks(TESTS / "formats" / "test_contract.py", formats))
    asked = [one for path in sorted(TESTS.rglob("*.py")) for one in class_checks(path, formats)]
    assert len(asked) <= 6, f"{asked}: those are tests of one class; a test of all formats asks the contract"


@of_every_file(FILES)
def test_what_is_put_into_a_model_stands_in_its_record(path: Path) -> None:
    """No hidden attribute of ours on a model, and one way to what is inside its wrappers."""
    for node in nodes(path):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.match("_fewbits_[a-z]", node.value), f"{where}: put a part into fewbits.host.record"
        elif isinstance(node, ast.Attribute) and path.stem != "unwrap":
            assert node.attr != "get_base_model", f"{where}: call fewbits.host.unwrap.unwrap"


METRICS = runpy.run_path(str(ROOT / "scripts" / "house_metrics.py"))
# Why a function may have more than 8 arguments, and how many have at the most.
MOST_LONG_SIGNATURES = {"own": 3, "torch ops": 0, "another library's": 22}
# Pairs of places in src that share six lines (scripts/house_metrics.py --copies lists them with imports), and
# `fmt: skip` in src and tests. Both numbers were smaller when they were last counted.
MOST_COPIES, MOST_FMT_SKIPS = 80, 208


def test_public_functions_say_shapes() -> None:
    silent, _ = METRICS["without_shapes"]({path: tree(path) for path in FILES})
    named = [f"{shown(path)}:{function.name}" for path, function in silent]
    assert not named, f"say the shapes of tensors, as (M, K), or name the function that says them: {named}"


def test_long_signatures_do_not_become_more() -> None:
    """More than 8 arguments: pass the record that they belong to."""
    long = METRICS["long_signatures"]({path: tree(path) for path in FILES})
    for kind, names in long.items():
        assert len(names) <= MOST_LONG_SIGNATURES[kind], f"{kind}: {len(names)} functions: {names}"


def test_copied_places_do_not_become_more() -> None:
    """What two places say alike is one mechanism: a function, a base class, a record of arguments."""
    copies = METRICS["copies_of"](CODE, imports=False)
    longest = [f"{shown(c.first[0])}:{c.first[1]} and {shown(c.second[0])}:{c.second[1]}" for c in copies[:5]]
    assert len(copies) <= MOST_COPIES, f"{len(copies)} pairs, the longest of which are {longest}"


def test_lines_are_the_formatters() -> None:
    """``fmt: skip`` is for tables whose columns stand in line, and for lists of kernels' pointers."""
    comments = [
        path
        for path in (*FILES, *sorted(TESTS.rglob("*.py")))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.rstrip().endswith("# fmt: skip")
    ]
    assert len(comments) <= MOST_FMT_SKIPS, f"{len(comments)}: {Counter(map(shown, comments)).most_common(3)}"


def test_a_tensor_of_our_own_has_a_record_of_why() -> None:
    """Subclasses of Tensor surprise every library that meets them: docs/adr says why each must be."""
    records = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "adr").glob("*.md"))
    classes = [node for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)]
    of_tensor = [c.name for c in classes if {"Tensor", "torch.Tensor"} & set(map(ast.unparse, c.bases))]
    missing = [name for name in of_tensor if f"`{name}`" not in records]
    assert of_tensor and not missing, f"docs/adr has no record that names {missing}"


@of_every_file([f for f in FILES if f.name == "__init__.py"])
def test_every_room_has_a_sign(path: Path) -> None:
    """Three to ten lines: what lives here, what may be imported, where to begin."""
    sign = ast.get_docstring(tree(path)) or ""
    assert 3 <= len(sign.splitlines()) <= 10, f"its sign has {len(sign.splitlines())} lines, not three to ten"
    assert re.search(r"\bimports\b", sign, re.IGNORECASE), "its sign does not say what may be imported here"
    begin = re.search(r"\bBegin\swith\s`([\w/]+\.py)`", sign)
    assert begin, "its sign does not say where to begin reading, as: Begin with `file.py`"
    assert (path.parent / begin[1]).exists(), f"its sign sends readers to {begin[1]}, which is not there"


@of_every_file(FILES)
def test_public_names_have_docstrings(path: Path) -> None:
    private_file = path.stem.startswith("_") and path.stem not in ("__init__", "__main__")
    for node in [] if private_file else tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
    assert path.stem.startswith("__") or ast.get_docstring(tree(path)), "the file has no docstring"


def has_reference(path: Path) -> bool:
    return any(node.name.endswith("_ref") for node in functions(path))


KERNEL_FILES = [f for f in FILES if f.is_relative_to(KERNELS) and f.name != "__init__.py"]
OP_FILES = [f for f in KERNEL_FILES if has_reference(f)]


@of_every_file(OP_FILES)
def test_kernel_file_has_its_parts(path: Path) -> None:
    names = [node.name for node in functions(path)]
    public = PUBLIC_NAME.get(op_of(path), op_of(path))
    assert public in names, f"no public function {public}"
    assert any(name.startswith(public) and name.endswith("_ref") for name in names), (
        f"no reference {public}_ref"
    )
    assert (ROOT / "tests" / "kernels" / f"test_{op_of(path)}.py").is_file(), "no test"


# The CPU runs other code of ours than these files' references, for the reason said; tests compare the two. A
# new kernel's reference is what the CPU runs: this list only becomes shorter. Autograd of the definition of a
# packed product keeps the decoded weight until the backward pass: of 2048 x 2048 in NF4, float32 activations,
# 16 MiB in place of the 2.25 that are packed (23 November 2026; forward and backward of 64 rows take 111 ms,
# and 158 as they are).
CPU_RUNS_OTHER_CODE = {
    "decoder/gated_lora_forward.py": "the activation's reference into buffers that are there, and a product",
    "loss/linear_cross_entropy_float8.py": "the rows' reference, chunk by chunk",
    "product/lora_linear.py": "the weight's reference, decoded in each pass and not kept; products by hand",
    "product/matmul_operands.py": "each product rounds its operands along its own axis; autograd would not",
    "product/matmul_packed.py": "the weight's reference, decoded in each pass and not kept; product by hand",
    "stochastic/codes.py": "counts in C++, of which the reference is the loop",
    "stochastic/emulated.py": "the same in pieces that fit memory",
    "stochastic/rows.py": "the two ops, one after the other",
}


def references_run(path: Path) -> set[str]:
    """The references that functions of a file name which are no references themselves."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for function in functions(path)
        if not function.name.endswith("_ref")
        for node in ast.walk(function)
        if isinstance(node, (ast.Name, ast.Attribute))
    }


def text_of_tests(path: Path) -> str:
    """The text of the tests of a kernel file's op."""
    files = sorted((TESTS / "kernels").glob(f"test_{op_of(path)}*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_the_cpu_runs_the_references() -> None:
    run = {name for path in KERNEL_FILES for name in references_run(path)}
    run |= {name for path in FILES if room(path) in ("nn", "decoder") for name in references_run(path)}
    for path in OP_FILES:
        refs = {node.name for node in functions(path) if node.name.endswith("_ref")}
        name = path.relative_to(KERNELS).as_posix()
        assert bool(refs & run) != (name in CPU_RUNS_OTHER_CODE), f"{name}: {refs} - does the CPU run one?"
        assert refs & run or any(r in text_of_tests(path) for r in refs), (
            f"{name}: no test compares with {refs}"
        )


DIFFERENTIATES = re.compile(r"gradcheck|\.backward\(|autograd\.grad\(|\.grad\b")


@of_every_file(OP_FILES)
def test_what_has_a_gradient_has_a_test_of_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    test = text_of_tests(path)
    backward = [node.name for node in functions(path) if re.search(r"backward\w*_ref$", node.name)]
    missing = [name for name in backward if name.removesuffix("_ref") not in test]
    assert not missing, f"tests/kernels/test_{op_of(path)}.py compares nothing with {missing}"
    if "autograd.Function" in text or "register_autograd" in text:
        assert DIFFERENTIATES.search(test), f"tests/kernels/test_{op_of(path)}.py takes no gradient"


def test_kernels_without_a_reference_serve_a_file_that_has_one() -> None:
    imported = {module for path in KERNEL_FILES for module in imported_modules(path)}
    names = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in KERNEL_FILES}
    alone = [name for path, name in names.items() if path not in OP_FILES and name not in imported]
    assert not alone, f"no definition in plain torch (a function x_ref) says what these compute: {alone}"


def test_every_kernel_file_has_a_bench_case() -> None:
    from fewbits.bench.cases import cases

    not_kernels = {"attention"}  # computed by the fastest of several libraries
    several_gpus = {"rank_sum"}  # timed by benchmarks/several_gpus/decode_shared.py
    ops, timed = {op_of(path) for path in OP_FILES}, {case.op for case in cases()} - not_kernels
    ops -= several_gpus
    missing = "; ".join(
        f"{op} has no case: add one to a MAKERS in src/fewbits/bench" for op in sorted(ops - timed)
    )
    assert ops <= timed, missing
    assert timed <= ops, f"cases of no kernel file: {sorted(timed - ops)}"


def test_every_triton_kernel_has_a_compile_case() -> None:
    import importlib

    called = {
        n.func.id
        for path in KERNEL_FILES
        for n in ast.walk(tree(path))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    for path in KERNEL_FILES:
        kernels = {node.name for node in functions(path) if is_triton_kernel(node)}
        if not kernels:
            continue
        module = importlib.import_module(".".join(path.relative_to(SOURCE.parent).with_suffix("").parts))
        listed = {case.kernel.__name__ for case in getattr(module, "COMPILE_CASES", ())}
        launched = kernels - called  # a kernel that another kernel calls is compiled with it
        assert launched <= listed, f"{path.name}: COMPILE_CASES lacks {sorted(launched - listed)}"


@of_every_file(sorted(p for p in TESTS.iterdir() if p.is_dir() or p.suffix == ".py"))
def test_nothing_of_tests_hides_a_package(path: Path) -> None:
    """Hugging Face's ``kernels`` and PyPA's ``build`` are packages of others: ours stand below ``tests``."""
    found = importlib.machinery.PathFinder.find_spec(path.stem)
    places = [] if found is None else [found.origin or "", *(found.submodule_search_locations or ())]
    hidden = [place for place in places if Path(place).is_relative_to(TESTS)]
    assert not hidden, f"import {path.stem} finds {hidden}"


def test_files_that_conftest_sorts_by_speed_are_there_and_in_one_set_each() -> None:
    sets = {
        name: re.findall(r'"([\w/]+\.py)"', body)
        for name, body in re.findall(
            r"^(MANY_\w+|LIKE_\w+|LONG_\w+) = [{(]\n(.*?)^[})]",
            (TESTS / "conftest.py").read_text(),
            re.M | re.S,
        )
    }
    assert len(sets) == 5 and all(sets.values())
    missing = [file for files in sets.values() for file in files if not (TESTS / file).is_file()]
    assert not missing
    of_variants = sorted(
        file for name, files in sets.items() if not name.startswith("LONG") for file in files
    )
    assert not [file for file, next_file in pairwise(of_variants) if file == next_file]


def test_the_checkout_adds_one_name_to_what_can_be_imported() -> None:
    """pytest puts the checkout on the path: a module or package in it would hide another's of its name."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == {"tests"} and not list(ROOT.glob("*.py"))


@of_every_file(sorted(TESTS.rglob("*.py")))
def test_helpers_are_imported_from_tests(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            ours = [n for n in names if TESTS.joinpath(*n.split(".")).with_suffix(".py").is_file()]
            assert not ours, f"line {node.lineno}: write from tests.{node.module} import ..."
