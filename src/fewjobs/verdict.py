"""Why a stage was stopped, in one sentence: what it is, how it grew, the known fault, the way out."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import NamedTuple

from fewjobs.pressure import Kind
from fewjobs.stage import LARGEST_SEEN, OTHER_LARGEST, Stage
from fewjobs.words import size


class KnownFault(NamedTuple):
    """A compiler that is known to grow without end, or nearly.

    Attributes:
        stage: which.
        releases: CUDA releases that it was seen with.
        machine: the architecture that it was seen on, or "".
        arch: the GPU architecture that it was compiling for, or "".
        what: what was seen.
        source: where that is written.
        way_out: what helped, or may.
    """

    stage: str
    releases: tuple[str, ...]
    machine: str
    arch: str
    what: str
    source: str
    way_out: str


KNOWN_FAULTS = (
    KnownFault(
        "cudafe++",
        ("12.8",),
        "aarch64",
        "",
        "eight cudafe++ of about 140 GB each, growing 14 GB a minute, building Transformer Engine 2.3",
        "TransformerEngine issue 1996",
        "install the wheel for aarch64, or build with another toolkit",
    ),
    KnownFault(
        "cudafe++",
        ("12.0", "12.1", "12.2", "12.3"),
        "",
        "",
        "cudafe++ killed for memory on C++20 sources, gone with 12.4",
        "cmssw issue 43117",
        "use CUDA 12.4 or newer, or -std=c++17",
    ),
    KnownFault(
        "cudafe++",
        ("12.0", "12.1", "12.2", "12.3", "12.4", "12.5", "12.6"),
        "",
        "",
        "cudafe++ taking all memory with -std=c++20 and CLI11's header",
        "CLI11 issue 1378",
        "use -std=c++17, or a newer toolkit",
    ),
    KnownFault(
        "cicc",
        ("12.8",),
        "",
        "120",
        "46 GB for one unit of MFEM's element assembly; sm_90 compiles without trouble",
        "MFEM issue 5363",
        "use another toolkit, or leave sm_120 out and ship PTX of an older architecture",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What was decided about one stage.

    Attributes:
        kind: "runaway", "too large" or "killed".
        stage: its label.
        grown_bytes: what it held when it was stopped.
        rate: bytes a second.
        toolkit: the CUDA release, or "".
        sentence: all of it, for people.
        source: of the known fault, or "".
    """

    kind: str
    stage: str
    grown_bytes: int
    rate: float
    toolkit: str
    sentence: str
    source: str = ""

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return asdict(self)


def known_fault(stage: str, toolkit: str, machine: str, arch: str = "") -> KnownFault | None:
    """The entry of the table that fits all of these."""
    for fault in KNOWN_FAULTS:
        fits = fault.stage == stage and toolkit in fault.releases
        if fits and fault.machine in ("", machine) and (not fault.arch or arch.startswith(fault.arch)):
            return fault
    return None


def _relatives(stage: str) -> str:
    """Faults of the same stage under other conditions."""
    sources = [fault.source for fault in KNOWN_FAULTS if fault.stage == stage]
    return f"; seen elsewhere: {', '.join(sources)}" if sources else ""


def judge(
    stage: Stage, kind: Kind | None, *, budget_bytes: int, toolkit: str, why: str, has_pager: bool
) -> Verdict:
    """The verdict on a stage that was stopped, or (kind None) killed again and again."""
    grown = max(stage.memory.most_bytes, stage.memory.high_bytes, stage.memory.peak_bytes)
    rate = stage.memory.growth or mean_rate(stage)
    largest = max(LARGEST_SEEN.get(stage.name, OTHER_LARGEST), stage.predicted.bytes)
    release = f"CUDA {toolkit}, " if toolkit and stage.name not in ("c", "c++", "link") else ""
    what = f"{stage.label} ({release}{platform.machine()})"
    if kind is Kind.RUNAWAY:
        fault = known_fault(stage.name, toolkit, platform.machine(), stage.arch)
        fault_words = _relatives(stage.name) if fault is None else f"; known: {fault.what} ({fault.source})"
        out = (
            fault.way_out if fault is not None else "try another version of the toolkit, or look for a wheel"
        )
        sentence = (
            f"{what} was stopped as a runaway: it grew by {size(rate)} a second to {size(grown)} without a "
            f"plateau, and the largest known of its kind is {size(largest)}{fault_words}. "
            f"Fewer jobs do not help; {out}."
        )
        return Verdict("runaway", stage.label, grown, rate, toolkit, sentence, fault.source if fault else "")
    if kind is None:
        sentence = (
            f"{what} was killed from outside {stage.counts.kills + 1} times, the last time alone, at "
            f"{size(grown)}; give the build less than the killer allows with --memory, or ask for more than "
            f"{size(grown)}."
        )
        return Verdict("killed", stage.label, grown, rate, toolkit, sentence)
    reason = "paging gives nothing back" if has_pager else "it cannot be paged to the disk here"
    sentence = (
        f"{what} needs more than the budget of {size(budget_bytes)} ({why}) even alone: it had {size(grown)} "
        f"and was growing by {size(max(0.0, rate))} a second, and {reason}; give it at least "
        f"{size(max(1.5 * grown, budget_bytes * 1.25))} with --memory, or use a larger machine or a wheel."
    )
    return Verdict("too large", stage.label, grown, rate, toolkit, sentence)


def mean_rate(stage: Stage) -> float:
    """Growth over the last few seconds."""
    curve = list(zip(stage.memory.curve[::2], stage.memory.curve[1::2], strict=True))
    recent = [point for point in curve if curve[-1][0] - point[0] <= 5.0]
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return max(0.0, stage.memory.rate)
    return max(stage.memory.rate, (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0]), 0.0)
