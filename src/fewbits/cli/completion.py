"""Completion scripts for bash, zsh and fish, made from the parser: what it accepts is what they offer."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fewbits.cli.parser import Parser

# What completes an argument, by its metavar; any other metavar stands for a value that only the user knows.
COMPLETES = dict.fromkeys(("PATH", "FILE", "CONFIG"), "files") | dict.fromkeys(
    ("DIR", "SRC", "DST", "ADAPTER", "RUN"), "folders"
)


@dataclass(frozen=True)
class Argument:
    """One option or positional argument.

    Attributes:
        flags: its spellings; empty for a positional one.
        help: one line.
        completes: "files", "folders", "words", "value" (unknown to us), or "" for a flag without a value.
        words: for "words": the values.
    """

    flags: tuple[str, ...]
    help: str
    completes: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    name: str
    help: str
    arguments: tuple[Argument, ...] = field(default=())

    @property
    def flags(self) -> list[str]:
        """All spellings of all options."""
        return [f for a in self.arguments for f in a.flags]

    @property
    def positional(self) -> Argument | None:
        """The first argument that is not an option: what completes a bare word."""
        return next((a for a in self.arguments if not a.flags), None)


def script(shell: str, parser: Parser, recipes: Iterable[str]) -> str:
    """The completion script for "bash", "zsh" or "fish"."""
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return "\n".join(write(list(describe(parser, tuple(recipes))))) + "\n"


def describe(parser: Parser, recipes: tuple[str, ...]) -> Iterator[Command]:
    """What the parser accepts; the first command has no name and bears the options of ``fewbits`` itself."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    yield Command("", "", tuple(_argument(a, recipes) for a in parser._actions if a is not commands))
    helps = {a.dest: a.help or "" for a in commands._choices_actions}
    for name, sub in commands.choices.items():
        shown = (a for a in _with_nested(sub) if a.help != argparse.SUPPRESS)
        yield Command(name, helps[name], tuple(_argument(a, recipes) for a in shown))


def _with_nested(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """A subcommand's arguments; where it has subcommands of its own, their options too, each once."""
    yield from parser._actions
    own_flags = {flag for a in parser._actions for flag in a.option_strings}
    nested = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for sub in (sub for a in nested for sub in a.choices.values()):
        for action in sub._actions:
            if action.option_strings and not own_flags & set(action.option_strings):
                own_flags |= set(action.option_strings)
                yield action


def _argument(action: argparse.Action, recipes: tuple[str, ...]) -> Argument:
    flags, text = tuple(action.option_strings), (action.help or "").split(" (default")[0]
    if flags and action.nargs == 0:
        return Argument(flags, text, "")
    if action.choices is not None:
        return Argument(flags, text, "words", tuple(map(str, action.choices)))
    metavar = str(action.metavar)
    if metavar == "RECIPE":
        return Argument(flags, text, "words", recipes)
    return Argument(flags, text, COMPLETES.get(metavar, "value"))


def _bash(commands: list[Command]) -> Iterator[str]:
    top, *subs = commands
    names = " ".join(c.name for c in subs)
    yield from (
        "# bash completion of fewbits; save it as ~/.local/share/bash-completion/completions/fewbits",
        "_fewbits() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        "    local command= word kind= words=",
        '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        f"        case $word in {names.replace(' ', '|')}) command=$word; break ;; esac",
        "    done",
        '    case "$command $previous" in',
    )
    for command in subs:
        for a in command.arguments:
            if a.flags and a.completes:
                patterns = "|".join(f'"{command.name} {f}"' for f in a.flags)
                yield f"        {patterns}) kind={a.completes} words={shlex.quote(' '.join(a.words))} ;;"
    yield "    esac"
    yield "    if [[ -z $kind && $current == -* ]]; then kind=words; case $command in"
    yield f"        '') words={shlex.quote(' '.join(top.flags))} ;;"
    for command in subs:
        yield f"        {command.name}) words={shlex.quote(' '.join(command.flags))} ;;"
    yield "    esac; fi"
    yield "    if [[ -z $kind ]]; then case $command in"
    yield f"        '') kind=words words={shlex.quote(names)} ;;"
    for command in subs:
        if (bare := command.positional) is not None:
            words = shlex.quote(" ".join(bare.words))
            yield f"        {command.name}) kind={bare.completes} words={words} ;;"
    yield from (
        "    esac; fi",
        "    local IFS=$'\\n'",
        "    case $kind in",
        '        files) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current")) ;;',
        '        folders) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$current")) ;;',
        '        words) COMPREPLY=($(IFS=" "; compgen -W "$words" -- "$current")) ;;',
        "        *) COMPREPLY=() ;;",
        "    esac",
        "}",
        "complete -F _fewbits fewbits",
    )


def _zsh(commands: list[Command]) -> Iterator[str]:
    top, *subs = commands
    yield from (
        "#compdef fewbits",
        "# zsh completion of fewbits; save it as _fewbits in a folder of $fpath",
        "_fewbits() {",
        "    local state line",
        "    local -a commands",
        "    commands=(",
        *(f"        {_zsh_quote(f'{c.name}:{c.help}')}" for c in subs),
        "    )",
        f"    _arguments -C {' '.join(_zsh_specs(top))} '1:command:->command' '*::argument:->argument'",
        "    case $state in",
        "        command) _describe -t commands 'fewbits command' commands ;;",
        "        argument) case $line[1] in",
    )
    for command in subs:
        specs = list(_zsh_specs(command))
        if (bare := command.positional) is not None:
            specs.append(_zsh_quote(f"*:argument:{_zsh_action(bare)}"))
        yield f"            {command.name}) _arguments {' '.join(specs)} ;;"
    yield from (
        "        esac ;;",
        "    esac",
        "}",
        'if [[ $funcstack[1] == _fewbits ]]; then _fewbits "$@"; else compdef _fewbits fewbits; fi',
    )


def _zsh_specs(command: Command) -> Iterator[str]:
    for a in command.arguments:
        for flag in a.flags:
            value = f":value:{_zsh_action(a)}" if a.completes else ""
            text = a.help.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
            yield _zsh_quote(f"{flag}[{text}]{value}")


def _zsh_action(argument: Argument) -> str:
    words = " ".join(argument.words)
    return {"files": "_files", "folders": "_files -/", "words": f"({words})"}.get(argument.completes, " ")


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(commands: list[Command]) -> Iterator[str]:
    top, *subs = commands
    yield "# fish completion of fewbits; save it as ~/.config/fish/completions/fewbits.fish"
    yield "complete -c fewbits -f"
    for a in top.arguments:
        yield f"complete -c fewbits -n __fish_use_subcommand {_fish_options(a)}"
    for command in subs:
        yield (
            f"complete -c fewbits -n __fish_use_subcommand -a {command.name} -d {_fish_quote(command.help)}"
        )
        here = f"complete -c fewbits -n '__fish_seen_subcommand_from {command.name}'"
        for a in command.arguments:
            if a.flags:
                yield f"{here} {_fish_options(a)}"
        if (bare := command.positional) is not None and bare.completes != "value":
            yield f"{here} {_fish_values(bare)}"


def _fish_options(argument: Argument) -> str:
    flags = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in argument.flags)
    value = f" -r {_fish_values(argument)}" if argument.completes else ""
    return f"{flags} -d {_fish_quote(argument.help)}{value}"


def _fish_values(argument: Argument) -> str:
    if argument.completes == "words":
        return f"-f -a {_fish_quote(' '.join(argument.words))}"
    return {"files": "-F", "folders": "-f -a '(__fish_complete_directories)'"}.get(argument.completes, "-f")


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
