"""How many commands a build tool shows at once.

Who waits for memory costs next to nothing, and the more there are to choose from, the better they fit. So
the number that a known build tool is given is raised, while as many as before are at work at once. A number
of one stays, as it may be there because the build needs its order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NINJAS, MAKES = ("ninja", "ninja-build", "samu"), ("make", "gmake")
VARIABLES = ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL")
TIMES, MORE = 4, 16
_JOINED = re.compile(r"(-j|--jobs=|--parallel=)(\d+)")
_APART = ("-j", "--jobs", "--parallel")


class Window(NamedTuple):
    """A command that shows more at once.

    Attributes:
        command: with the number raised.
        variables: that are to be set besides.
        units: how many units may be at work at once: what was asked for; None: nothing was.
        note: what was done, or "".
    """

    command: list[str]
    variables: dict[str, str]
    units: int | None = None
    note: str = ""


def wider(jobs: int) -> int:
    """The number to show, for one to run."""
    return min(TIMES * jobs, jobs + MORE)


def widen(command: Sequence[str], environ: Mapping[str, str], slots: int) -> Window:
    """Raise the number of jobs of a command, and of what it may start.

    Args:
        command: as the user has written it.
        environ: the user's variables.
        slots: how many stages run at once at most.
    """
    variables = {name: str(wider(slots)) for name in VARIABLES if not environ.get(name)}
    name = os.path.basename(command[0])  # noqa: PTH119
    is_cmake = name == "cmake" and "--build" in command[1:3]
    if name in (*NINJAS, *MAKES) or is_cmake:
        widened = _with_jobs(command)
        if widened is not None:
            return widened._replace(variables=variables)
        if name in NINJAS and "jobserver" not in environ.get("MAKEFLAGS", ""):
            return Window([command[0], f"-j{wider(slots)}", *command[1:]], variables)
        if not is_cmake:
            return Window(list(command), variables)
    said = []
    for variable in VARIABLES:
        value = environ.get(variable, "")
        if value.isdigit() and int(value) > 1:
            variables[variable] = str(wider(int(value)))
            said.append((int(value), variable))
    if not said:
        return Window(list(command), variables)
    units = min(count for count, _ in said)
    shown = ", ".join(f"{variable}={variables[variable]}" for _, variable in said)
    return Window(list(command), variables, units, _note(f"the build sees {shown}", units))


def _with_jobs(command: Sequence[str]) -> Window | None:
    """The command with its own number raised; None if it has none. The last one counts."""
    words, units, note = list(command), None, ""
    for i, word in enumerate(command):
        match = _JOINED.fullmatch(word)
        apart = word in _APART and i + 1 < len(command) and command[i + 1].isdigit()
        if i == 0 or (match is None and not apart):
            continue
        units = int(match[2] if match is not None else command[i + 1])
        if units < 2:
            continue
        if match is not None:
            words[i] = f"{match[1]}{wider(units)}"
        else:
            words[i + 1] = str(wider(units))
        note = _note(f"{command[0]} shows {wider(units)} commands at once", units)
    return None if units is None else Window(words, {}, units, note)


def _note(what: str, units: int) -> str:
    return f"{what}, of which {units} work, as was asked for; the others wait (--exact-jobs: not)"
