"""The packages that a wheel asks for, and theirs in turn, out of those that are installed here.

An environment with these alone shows what pip would give to somebody who installs the wheel: an import of a
package that nothing declares fails there, as it would there and does not beside everything else that a
developer has.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(wheel: Path) -> list[str]:
    """The lines Requires-Dist of ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def declared_packages(wanted: Iterable[str]) -> list[Distribution]:
    """What ``wanted`` names and all that these ask for in turn, as installed here.

    Ends the program where one is absent or has a version that is not asked for.
    """
    found: dict[str, Distribution] = {}
    asked: set[tuple[str, str]] = set()  # a package and one of its extras, "" for none
    open_lines = [(line, "") for line in wanted]
    while open_lines:
        line, extra = open_lines.pop()
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(need.name)
        try:
            package = found[name] = found.get(name) or distribution(need.name)
        except PackageNotFoundError:
            raise SystemExit(f"{line!r} is asked for, and {need.name} is not installed here") from None
        if not need.specifier.contains(package.version, prereleases=True):
            raise SystemExit(f"{line!r} is asked for, and {need.name} {package.version} is installed here")
        for each in ("", *need.extras):
            if (name, each) not in asked:
                asked.add((name, each))
                open_lines += [(inner, each) for inner in package.requires or []]
    return list(found.values())


def link_packages(packages: Iterable[Distribution], site: Path) -> None:
    """Links every file of ``packages`` into the folder ``site``; programs beside site-packages are left out.

    Files and no folders: packages share some (``google``, ``nvidia``), and what others have there stays away.
    """
    for package in packages:
        if package.files is None:
            raise SystemExit(f"{package.name} has no list of its files, so that it cannot be linked")
        for file in package.files:
            if ".." in file.parts or file.is_absolute() or file.suffix == ".pth":
                continue
            link = site / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(link):  # a file that two packages list
                link.symlink_to(file.locate())
