"""`fewbits build` killed at moments that cover a whole build: what does the next build find?

    python -m benchmarks.robustness.kill_build [--moments N] [--seed N]

from the top of the repository; needs Linux, g++ and ninja. First a whole build of some C++ units is timed.
Then, for each moment, all units get new contents, so that nothing of them is kept yet, and the build gets
SIGKILL after a share of that time: the shares are spread evenly over it. In every third trial the compilers
are killed before it, in every other one an object that was kept is emptied, cut, or gets a flipped bit. The
next build must then end well, with objects equal, byte for byte, to those of plain g++, must not compile
what the killed one had kept (and was not tampered with), and leave no process. Prints one line for each
kill, and the counts as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fewjobs.conftest import Workshop, write_ninja

from fewjobs.native import build_native
from fewjobs.sample import descendants

UNITS, VALUES = 12, 60_000
COMPILERS = ("cc1plus", "as", "g++")


class Site:
    """A folder with units, a cache of its own, and the last trial's contents."""

    def __init__(self, place: Path) -> None:
        (place / "work").mkdir()
        native = build_native(place / "native", {"PATH": "/usr/bin:/bin"})
        if native.launcher is None:
            raise RuntimeError(native.reason)
        self.workshop, self.marker = Workshop(place / "work", native, place / "home"), str(place)
        ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin")
        if ninja is None:
            raise RuntimeError("needs ninja")
        self.words = (ninja, "-j2")
        self.options = {"worth_keeping_s": 0, "memory_bytes": 2_000_000_000}
        self.units = [self.workshop.folder / f"u{i}.cpp" for i in range(UNITS)]

    def renew(self, trial: int) -> None:
        """Other contents for every unit, and no objects."""
        for i, unit in enumerate(self.units):
            values = ",".join(str((k * 7919 + i + 31 * trial) % 65536) for k in range(VALUES))
            unit.write_text(f"extern const unsigned t{i}[]; const unsigned t{i}[]={{{values}}};\n")
        for file in [*self.workshop.folder.glob("*.o"), *self.workshop.folder.glob(".ninja*")]:
            file.unlink()
        write_ninja(self.workshop, self.units)

    def kept(self) -> set[str]:
        """The objects that a build would find: an entry names one for each contents of its inputs."""
        entries = (self.workshop.root / "cache/entries").glob("*/*.json")
        return {result["object"] for entry in entries for result in json.loads(entry.read_text())["results"]}

    def wait_for_the_end(self) -> bool:
        """Whether every process of a killed build has ended within a minute."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if not any(self._is_ours(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
                return True
            time.sleep(0.02)
        return False

    def _is_ours(self, entry: Path) -> bool:
        with contextlib.suppress(OSError):
            return f"MARK={self.marker}".encode() in (entry / "environ").read_bytes()
        return False

    def build(self) -> tuple[float, Any]:
        """A build that nobody kills: seconds, and how it went."""
        began = time.monotonic()
        done = self.workshop.build(*self.words, **self.options)
        return time.monotonic() - began, done

    def wrong_objects(self) -> list[str]:
        """Units whose object is not, byte for byte, the one that plain g++ makes."""
        found = []
        for unit in self.units:
            self.workshop.plain("g++", "-O0", "-c", unit.name, "-o", "plain.o")
            plain = self.workshop.folder / "plain.o"
            made = self.workshop.folder / f"{unit.stem}.o"
            if not made.is_file() or made.read_bytes() != plain.read_bytes():
                found.append(unit.name)
            plain.unlink(missing_ok=True)
        return found


def tamper(site: Site, fresh: set[str], choose: random.Random) -> str:
    """Damage one object that was kept; how."""
    place = site.workshop.root / "cache/objects" / choose.choice(sorted(fresh))
    file = choose.choice([p for p in sorted(place.rglob("*")) if p.is_file() and p.stat().st_size])
    data, how = bytearray(file.read_bytes()), choose.choice(("emptied", "cut", "flipped"))
    if how == "flipped":
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    file.chmod(0o644)
    file.write_bytes({"emptied": b"", "cut": bytes(data[: len(data) // 2])}.get(how, bytes(data)))
    return how


def kill_once(site: Site, seconds: float, trial: int, choose: random.Random) -> dict[str, Any]:
    """One killed build and the next one: what was kept, and what is wrong."""
    site.renew(trial)
    before = site.kept()
    process = site.workshop.start(*site.words, env={"MARK": site.marker}, **site.options)
    time.sleep(seconds)
    hit = process.poll() is None
    if trial % 3 == 2:  # compilers as well, by somebody else
        for pid in descendants(process.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() in COMPILERS:
                    os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()
    ended = site.wait_for_the_end()
    fresh, objects = site.kept() - before, len(list(site.workshop.folder.glob("*.o")))
    tampered = tamper(site, fresh, choose) if fresh and trial % 2 else ""
    for file in [*site.workshop.folder.glob("*.o"), *site.workshop.folder.glob(".ninja*")]:
        if trial % 4 < 2:  # as if the build folder was a temporary one
            file.unlink()
    _, done = site.build()
    compiled = len(done.profile["stages"]) if done.profile else -1
    again = site.build()[1].code
    # Without its folder the build compiles exactly what was not kept, and what was tampered with.
    wanted = UNITS - len(fresh) + bool(tampered) if trial % 4 < 2 else None
    return {
        "at_s": round(seconds, 2),
        "hit": hit,
        "kept": len(fresh),
        "objects": objects,
        "tampered": tampered,
        "compiled": compiled,
        "code": done.code or again,
        "wrong": site.wrong_objects(),
        "compiled_again": wanted is not None and compiled != wanted,
        "lives_on": not ended,
    }


def measure(moments: int, seed: int) -> dict[str, Any]:
    """All kills; the counts."""
    began, choose, counts, faults = time.monotonic(), random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        site = Site(Path(name))
        site.renew(-1)
        whole_s, done = site.build()
        if done.code or site.wrong_objects():
            raise RuntimeError(done.err)
        for trial in range(moments):
            share = (trial + choose.random()) / moments
            line = kill_once(site, share * whole_s, trial, choose)
            sys.stderr.write(f"kill {trial}: {json.dumps(line)}\n")
            counts["hit a living build"] += line["hit"]
            counts["with some units kept and some not"] += 0 < line["kept"] < UNITS
            counts["objects tampered with"] += bool(line["tampered"])
            counts["units kept by killed builds"] += line["kept"]
            counts["wrong objects"] += len(line["wrong"])
            if line["code"] or line["wrong"] or line["compiled_again"] or line["lives_on"]:
                faults.append(line)
        left = sorted(p.name for p in (site.workshop.root / "cache/new").glob("*"))
    return {"moments": moments, "units": UNITS, "whole_s": round(whole_s, 2), **counts,
            "left_half_made": left, "objects compared": moments * UNITS, "faults": faults,
            "seconds": round(time.monotonic() - began)}  # fmt: skip


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    result = measure(args.moments, args.seed)
    sys.stdout.write(json.dumps(result) + "\n")
    return bool(result["faults"])


if __name__ == "__main__":
    sys.exit(main())
