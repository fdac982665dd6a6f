"""YAML of settings: small, plain, and never larger than it looks.

An anchor that is used again and again stands for as much text as one likes (a file of a kilobyte for billions
of values), so the values are counted, with all repetitions, before one of them is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fewbits.errors import BadInput
from fewbits.text_files import read_text

MAX_CHARACTERS, MAX_VALUES = 1_000_000, 50_000
_MERGE = "tag:yaml.org,2002:merge"  # << takes over a mapping, and several may stand in one
_FILES = (".yaml", ".yml", ".json")


def parse_yaml(text: str, name: str) -> Any:
    """The value that a text of YAML stands for: of JSON's kinds, and dates.

    Args:
        text: the YAML.
        name: what it is, for the sentence.

    Raises:
        BadInput: it is not valid, or stands for more than settings can be.
    """
    if len(text) > MAX_CHARACTERS:
        raise BadInput(
            f"{name} has {len(text):,} characters, and settings have at most {MAX_CHARACTERS:,}; is it a data"
            " file?"
        )
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _check_size(node, name)
        _check_names(node, name)
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, TypeError, KeyError, OverflowError) as error:
        raise BadInput(f"{name}{_line(error)} is not valid YAML; write one `name: value` a line.") from error
    except RecursionError as error:
        raise BadInput(f"{name} is nested too deeply; write one `name: value` a line.") from error
    except ValueError as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{name} has a value that is none ({error}); write it in quotes.") from error
    finally:
        loader.dispose()


def mapping_in(text: str, name: str) -> dict[str, Any] | None:
    """What a text says that may be a name, a mapping, or a file with one; None: it is a name.

    Args:
        text: such as ``qlora_nf4``, ``{name: qlora_nf4, lora: {r: 64}}`` or ``recipes/mine.yaml``.
        name: what it is, for the sentence.

    Raises:
        BadInput: the file is not there, or no mapping stands in it.
    """
    path, where = Path(text), name
    if not text.lstrip().startswith("{"):
        if path.suffix.lower() not in _FILES:
            return None
        where = f"{name} {text}"
        try:
            text = read_text(path)
        except OSError as error:
            raise BadInput(
                f"{where} cannot be read ({error.strerror}); give the path of a YAML file."
            ) from error
    value = parse_yaml(text, where)
    if not isinstance(value, dict):
        raise BadInput(f"{where} holds {type(value).__name__}; write a mapping, as in `name: qlora_nf4`.")
    return value


def _line(error: BaseException) -> str:
    line = getattr(getattr(error, "problem_mark", None), "line", None)
    return "" if line is None else f", line {line + 1}"


def _check_names(node: Any, name: str) -> None:
    """Refuse a name that stands twice in one mapping, of which YAML would take the last without a word."""
    above, visits = [node], set()
    while above:
        node = above.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in visits:
            continue
        visits.add(id(node))
        lines: dict[tuple[str, str], int] = {}
        for item in node.value:
            if not isinstance(item, tuple):
                above.append(item)
                continue
            key, value = item
            above.append(value)
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    raise BadInput(
                        f"{name} has {key.value!r} twice, in lines {lines[key.tag, key.value]} and {line};"
                        " keep one of them."
                    )
                lines[key.tag, key.value] = line


def _check_size(node: Any, name: str) -> None:
    """Refuse an anchor within itself, and anchors that multiply."""
    sizes: dict[int, int] = {}
    above: set[int] = set()

    def size_of(node: Any) -> int:
        key = id(node)
        if key in above:
            raise BadInput(f"{name} has an anchor that contains itself; write the settings out.")
        if key not in sizes:
            above.add(key)
            children = getattr(node, "value", ())
            pairs = children if isinstance(children, list) else ()
            inner = [child for pair in pairs for child in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[key] = 1 + sum(map(size_of, inner))
            above.discard(key)
        return sizes[key]

    if node is not None and (count := size_of(node)) > MAX_VALUES:
        shown = f"{count:,}" if count < 10**12 else "more than 10**12"
        raise BadInput(
            f"{name} stands for {shown} values, repeated anchors counted, and settings have at most"
            f" {MAX_VALUES:,}; write the settings out."
        )
