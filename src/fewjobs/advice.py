"""What the measured build says about its own cause of trouble, and what to do. One function for each rule."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fewjobs.words import size

Profile = dict[str, Any]
HEAVY_BYTES = 1_500_000_000
GIANT_SHARE = 0.5


class Advice(NamedTuple):
    """One finding.

    Attributes:
        rule: its name.
        what: the fact.
        fix: what to do.
    """

    rule: str
    what: str
    fix: str


def runaway(p: Profile) -> Iterator[Advice]:
    """A compiler that grew without end."""
    for verdict in p["verdicts"]:
        if verdict["kind"] == "runaway":
            fix = (
                "Fewer jobs do not help: another toolkit version, another release of the library, or a wheel."
            )
            yield Advice("runaway", verdict["sentence"], fix)


def temporary_in_memory(p: Profile) -> Iterator[Advice]:
    """TMPDIR on tmpfs."""
    kind = p["facts"].get("temporary_file_system", "")
    if kind in ("tmpfs", "ramfs"):
        yield Advice(
            "TMPDIR in memory",
            f"{p['facts']['temporary']} is on {kind}: what compilers write there (240 MB for one unit were "
            "measured) takes the memory they need themselves.",
            "export TMPDIR=/var/tmp, or the option --keep DIR with DIR on a disk.",
        )


def container_limit(p: Profile) -> Iterator[Advice]:
    """The limit is not the machine's own."""
    binding = str(p["facts"].get("binding", ""))
    if binding.startswith(("cgroup", "Slurm")):
        yield Advice(
            "container limit",
            f"The limit is {binding}, {size(p['budget_bytes'])}; tools that divide the machine's free memory "
            "by a constant (flash-attn, for one) do not see it.",
            "Start the container or job with more memory, or keep building through fewbits build.",
        )


def architectures(p: Profile) -> Iterator[Advice]:
    """GPU architectures, what each costs, and which are not here."""
    cost = architecture_seconds(p)
    if len(cost) < 2:
        return
    total = sum(cost.values())
    shares = ", ".join(f"sm_{arch} {100 * s / max(total, 1e-9):.0f} %" for arch, s in sorted(cost.items()))
    owned = p["facts"].get("gpus") or []
    foreign = [
        arch for arch in cost if owned and arch.rstrip("af") not in {o.replace(".", "") for o in owned}
    ]
    what = f"Code for {len(cost)} architectures is made: {shares} of {total:.0f} s of device compilation."
    if foreign:
        what += f" No GPU here needs {', '.join(f'sm_{a}' for a in sorted(foreign))}."
    yield Advice(
        "too many architectures",
        what,
        "Build for your own alone: TORCH_CUDA_ARCH_LIST, CMAKE_CUDA_ARCHITECTURES or NVTE_CUDA_ARCHS.",
    )


def architecture_seconds(p: Profile) -> dict[str, float]:
    """Processor seconds for each GPU architecture."""
    cost: dict[str, float] = defaultdict(float)
    for stage in p["stages"]:
        if stage["arch"] and "," not in stage["arch"]:
            cost[stage["arch"]] += stage["cpu_s"]
    return dict(cost)


def threads(p: Profile) -> Iterator[Advice]:
    """nvcc --threads multiplies the peak."""
    count = int(p["facts"].get("nvcc_threads", 1))
    if count > 1:
        yield Advice(
            "--threads",
            f"The project asks for nvcc --threads {count}: the architectures of a unit compile at once, and "
            "the peak is multiplied (3.2 GB became 9.6 with three).",
            "NVCC_THREADS=1, NVTE_BUILD_THREADS_PER_JOB=1, or NVCC_APPEND_FLAGS='--threads 1'.",
        )


def giant_unit(p: Profile) -> Iterator[Advice]:
    """One stage that is most of the budget, or most of the time."""
    done = [s for s in p["stages"] if s["peak_bytes"] > 0]
    if not done:
        return
    largest = max(done, key=lambda s: s["peak_bytes"])
    others = sorted(s["peak_bytes"] for s in done)[:-1]
    if largest["peak_bytes"] > GIANT_SHARE * p["budget_bytes"] and (
        not others or largest["peak_bytes"] > 1.5 * others[-1]
    ):
        yield Advice(
            "one giant unit",
            f"{largest['unit']} ({largest['stage']}) alone needs {size(largest['peak_bytes'])} of "
            f"{size(p['budget_bytes'])}.",
            "MAX_JOBS cannot help here: the unit has to be split, or the machine has to have that much.",
        )


def header_only(p: Profile) -> Iterator[Advice]:
    """A .cu file that is host code: its device compiler is large, and finds nothing to do."""
    units: dict[str, dict[str, Profile]] = defaultdict(dict)
    for stage in p["stages"]:
        units[stage["unit"]][stage["stage"]] = stage
    for unit, stages in units.items():
        cicc, ptxas = stages.get("cicc"), stages.get("ptxas")
        if cicc is None or cicc["peak_bytes"] < HEAVY_BYTES:
            continue
        if ptxas is None or (ptxas["cpu_s"] < 1.0 and ptxas["peak_bytes"] < 60_000_000):
            yield Advice(
                "header-only .cu",
                f"{unit} has next to no kernels, yet cicc needs {size(cicc['peak_bytes'])} for its headers.",
                "As .cpp it takes a third (measured: 1.4 GB for 4.3); hide large headers from .cu files.",
            )


def paged(p: Profile) -> Iterator[Advice]:
    """Stages that were larger than the budget."""
    for stage in p["stages"]:
        if stage["pageouts"] and stage["peak_bytes"] > p["budget_bytes"]:
            yield Advice(
                "larger than the budget",
                f"{stage['unit']} ({stage['stage']}) needs {size(stage['peak_bytes'])}; it used the disk.",
                f"With {size(1.2 * stage['peak_bytes'])} it would run at full speed.",
            )


def wheel(p: Profile) -> Iterator[Advice]:
    """pip builds a named package: a wheel may exist."""
    words = [str(w) for w in p["command"]]
    if not any("pip" in w or w == "uv" for w in words[:3]) or not {"install", "wheel"} & set(words):
        return
    names = list(_packages(words))
    if names:
        yield Advice(
            "a wheel may exist",
            f"{', '.join(names[:3])} is built from source.",
            f"fewbits doctor {' '.join(names[:3])} says whether there is a wheel for this machine.",
        )


_PACKAGE = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w.,\s-]*\])?\s*(?:[=<>!~]=?=?[^/]*)?")
_ARCHIVES = (".whl", ".gz", ".zip", ".bz2", ".xz")
# Flags of pip and uv that stand alone; every other one takes the next word, or its value behind "=".
_ALONE = set(
    """
    --all-extras --break-system-packages --check-build-dependencies --compile --debug --dry-run --exact
    --force-reinstall --ignore-installed --ignore-requires-python --isolated --native-tls --no-build-isolation
    --no-cache --no-cache-dir --no-clean --no-color --no-compile --no-deps --no-index --no-input --no-progress
    --no-sources --no-use-pep517 --no-verify --no-warn-conflicts --no-warn-script-location --offline --pre
    --prefer-binary --quiet --refresh --reinstall --require-hashes --require-virtualenv --strict --system
    --upgrade --use-pep517 --user --verbose --disable-pip-version-check
    """.split()  # noqa: SIM905 - forty lines otherwise
)


def _packages(words: Sequence[str]) -> Iterator[str]:
    """The packages that a command names: neither values of flags, nor folders, files or addresses."""
    verb = next(i for i, w in enumerate(words) if w in ("install", "wheel"))
    is_value = False
    for word in words[verb + 1 :]:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            alone = (
                word in _ALONE or "=" in word or (not word.startswith("--") and set(word[1:]) <= set("qvUIh"))
            )
            joined = not word.startswith("--") and len(word) > 2  # -wwheels
            is_value = not alone and not joined
        elif (match := _PACKAGE.fullmatch(word)) is not None and not match[1].endswith(_ARCHIVES):
            yield match[1]


RULES: tuple[Callable[[Profile], Iterator[Advice]], ...] = (
    *(runaway, temporary_in_memory, container_limit, giant_unit, threads),
    *(architectures, header_only, paged, wheel),
)


def advise(profile: Profile) -> list[Advice]:
    """What every rule says, the most important first."""
    return [advice for rule in RULES for advice in rule(profile)]
