"""What ``fewbits build`` and ``fewjobs`` accept."""

from __future__ import annotations

from typing import Any


def add_build_flags(sub: Any) -> None:
    """The options of ``fewbits build``; the command itself stands behind ``--``."""
    sub.add_argument("--memory", metavar="SIZE", help="what the build may use, such as 12G (default: auto)")
    sub.add_argument("--keep", metavar="DIR", help="keep objects and temporary files here, on a disk")
    sub.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: one a processor)")
    sub.add_argument("--stage-limit", metavar="SIZE", help="a compiler that grows past it is a runaway")
    sub.add_argument("--profile", metavar="FILE", help="write everything that was measured, as JSON")
    sub.add_argument("--plan", metavar="FILE", help="predict time and peak from a profile; runs nothing")
    sub.add_argument("--report", metavar="FILE", help="where the HTML report goes")
    sub.add_argument("--log", metavar="FILE", help="where a line about each event goes")
    sub.add_argument("--no-paging", action="store_true", help="never move memory to the disk")
    sub.add_argument("--no-cache", action="store_true", help="keep no finished objects")
    sub.add_argument(
        "--exact-jobs", action="store_true", help="leave the command's -j, MAX_JOBS and the like as they are"
    )
    sub.add_argument("--quiet", action="store_true", help="neither table nor last lines")


def split_command(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the command behind ``--``."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
