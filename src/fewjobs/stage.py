"""One step of a build that needs memory: a compiler process, and what it starts, for one unit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

# The largest process that was measured for each stage, in Transformer Engine's sources with CUDA 13.0, and
# what is supposed of one that was never seen. Bytes. A linker's and a plain compiler's are of large projects.
LARGEST_SEEN = {
    "cudafe++": 2_130_000_000,
    "cicc": 4_370_000_000,
    "ptxas": 6_160_000_000,
    "c++": 2_270_000_000,
    "c": 1_000_000_000,
    "link": 8_000_000_000,
    "nvcc": 6_160_000_000,
}
PRIOR = {
    "cudafe++": 450_000_000,
    "cicc": 500_000_000,
    "ptxas": 200_000_000,
    "c++": 300_000_000,
    "c": 100_000_000,
    "link": 200_000_000,
    "fatbinary": 30_000_000,
    "nvlink": 100_000_000,
    "nvcc": 600_000_000,
}
PLATEAU_S = 1.5  # no growth for so long is a plateau
START_BYTES = 30_000_000  # a compiler reaches that in its first moment, which says nothing about its growth
PARTS, SHORT_S = 8, 0.5
OTHER_PRIOR, OTHER_LARGEST = 200_000_000, 4_000_000_000


class State(Enum):
    """Where a stage is."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    PAGING = "paging"  # writing its memory to the disk, to be paused then
    HIBERNATED = "hibernated"
    HELD = "held"  # ended in failure; its build tool is told when the others are through
    DONE = "done"


ON_MACHINE = (State.RUNNING, State.PAUSED, State.PAGING, State.HIBERNATED)


@dataclass
class Predicted:
    """What one stage is supposed to need.

    Attributes:
        bytes: of memory, the most.
        seconds: on a processor of its own.
        cpu_s: of processors' time.
        parts: the most bytes in each eighth of its length, last time; empty if nobody knows.
        source: "history", "siblings" or "prior".
    """

    bytes: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    parts: tuple[int, ...] = ()
    source: str = "prior"


@dataclass
class Times:
    """When things happened to one stage, in seconds of the build, and how long they took.

    Attributes:
        queued_s: when it asked to start.
        started_s: when its last attempt began.
        ended_s: when it was through.
        since_s: since when it is in its state.
        waited_s: how long it has waited for its turn.
        paused_s: how long it has been stopped.
        cpu_s: the processors' time of all attempts.
        used_cpu_s: of this attempt so far, at the last sample.
    """

    queued_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    since_s: float = 0.0
    waited_s: float = 0.0
    paused_s: float = 0.0
    cpu_s: float = 0.0
    used_cpu_s: float = 0.0


@dataclass
class Memory:
    """What one stage's processes hold, how fast it grows, and what it was.

    Attributes:
        rss_bytes: resident memory of the group now.
        anon_bytes: of these, private memory without a file.
        size_bytes: the same as ``rss_bytes``, and what was paged out.
        peak_bytes: the most that was ever resident.
        most_bytes: the largest size of this attempt, paged out or not.
        high_bytes: the same since it last shrank.
        grew_s: when that was last passed.
        rising_s: since when it only grows.
        sampled_s: when the last sample was taken.
        rate: growth in bytes a second.
        growth: the same over some seconds, when it was stopped.
        file_bytes: of memory that is no private one, the most before anything was paged out.
        members: its processes.
        leaf: the process that holds most.
        curve: times and resident bytes, alternating.
    """

    rss_bytes: int = 0
    anon_bytes: int = 0
    size_bytes: int = 0
    peak_bytes: int = 0
    most_bytes: int = 0
    high_bytes: int = 0
    grew_s: float = 0.0
    rising_s: float = 0.0
    sampled_s: float = 0.0
    rate: float = 0.0
    growth: float = 0.0
    file_bytes: int = 0
    members: list[int] = field(default_factory=list)
    leaf: int = 0
    curve: array[float] = field(default_factory=lambda: array("d"))

    def reset(self, now_s: float) -> None:
        """Begin an attempt, of which nothing is known yet; peak and curve stay."""
        self.rss_bytes = self.anon_bytes = self.size_bytes = self.high_bytes = self.most_bytes = self.leaf = 0
        self.rate = self.sampled_s = 0.0
        self.grew_s = self.rising_s = now_s
        self.file_bytes = 0
        self.members = []

    def sized(self, now_s: float, size_bytes: int) -> None:
        """Take a new sample of the size: how fast it grows, and since when without a step back."""
        if now_s > self.sampled_s > 0:
            grown = max(size_bytes, START_BYTES) - max(self.size_bytes, START_BYTES)
            rate = grown / (now_s - self.sampled_s)
            self.rate = rate if self.rate == 0 else 0.5 * self.rate + 0.5 * rate
        self.size_bytes, self.sampled_s = size_bytes, now_s
        self.most_bytes = max(self.most_bytes, size_bytes)
        if size_bytes < 0.95 * self.high_bytes or now_s - self.grew_s > PLATEAU_S:
            self.rising_s = now_s
        if size_bytes > 1.002 * self.high_bytes or size_bytes < 0.95 * self.high_bytes:
            self.high_bytes, self.grew_s = size_bytes, now_s

    def note(self, now_s: float, rss_bytes: int) -> None:
        """Keep a point of the curve if it says something new."""
        if len(self.curve) >= 2:
            last_s, last = self.curve[-2], self.curve[-1]
            if now_s - last_s < 1.0 and abs(rss_bytes - last) <= 0.02 * max(last, rss_bytes):
                return
        self.curve.extend((now_s, float(rss_bytes)))


@dataclass
class Paging:
    """How one stage and the pager get on.

    Attributes:
        can_page: whether its largest process has a pager.
        without_pager: it was supposed to be too small to need one; another attempt has it.
        failed: whether it is not to be tried again.
        futile: pagings that gave nothing back.
        paged_bytes: anonymous memory when the pager was called.
        lowest_bytes: the least of it since.
    """

    can_page: bool = False
    without_pager: bool = False
    failed: bool = False
    futile: int = 0
    paged_bytes: int = 0
    lowest_bytes: int = 0

    def reset(self) -> None:
        """Begin an attempt."""
        self.can_page = self.failed = False
        self.paged_bytes = self.futile = 0


@dataclass
class Counts:
    """How often things were done to one stage; ``kills`` are by others than us."""

    attempts: int = 0
    pauses: int = 0
    hibernations: int = 0
    pageouts: int = 0
    requeues: int = 0
    kills: int = 0


@dataclass(eq=False)
class Stage:
    """What is known of one step.

    Attributes:
        unit: the source file, as the build names it.
        arch: the GPU architecture ("90", "100a"), or "" for the host.
        name: "c++", "c", "cudafe++", "cicc", "ptxas", "fatbinary", "nvlink", "link", or the tool's name.
        tool: the path of the tool.
        keys: under which its history is kept, the most exact first.
        input_bytes: size of what it reads, if that is one intermediate file.
        state: where it is.
        pid: the tool's process, which leads a group of its own.
        code: what it ended with.
        alone: whether nothing else may run beside it.
    """

    unit: str
    arch: str = ""
    name: str = "c++"
    tool: str = ""
    keys: tuple[str, ...] = ()
    input_bytes: int = 0
    state: State = State.WAITING
    pid: int = 0
    code: int | None = None
    alone: bool = False
    predicted: Predicted = field(default_factory=Predicted)
    times: Times = field(default_factory=Times)
    memory: Memory = field(default_factory=Memory)
    paging: Paging = field(default_factory=Paging)
    counts: Counts = field(default_factory=Counts)

    @property
    def ran_s(self) -> float:
        """How long its last attempt took, once it has ended."""
        return self.times.ended_s - self.times.started_s

    @property
    def label(self) -> str:
        """Unit, architecture and stage, for people."""
        return f"{self.unit}{f' [sm_{self.arch}]' if self.arch else ''} {self.name}"

    @property
    def expected_bytes(self) -> int:
        """What to count with until it ends."""
        return max(self.predicted.bytes, self.memory.size_bytes)

    @property
    def on_machine(self) -> bool:
        """Whether its processes exist."""
        return self.state in ON_MACHINE

    @property
    def is_at_work(self) -> bool:
        """Whether it takes a processor."""
        return self.state in (State.RUNNING, State.PAGING)

    @property
    def class_bytes(self) -> int:
        """Twice the largest that is known of its kind: beyond, growth without end is suspected."""
        return 2 * max(LARGEST_SEEN.get(self.name, OTHER_LARGEST), self.predicted.bytes)

    @property
    def was_paged(self) -> bool:
        """Whether some of its memory has been moved to the disk: then resident bytes say little."""
        return bool(self.counts.pageouts or self.counts.hibernations)

    @property
    def follows_course(self) -> bool:
        """Whether its memory may be expected to go on as that of last time."""
        return bool(self.predicted.parts) and self.counts.attempts <= 1 and not self.was_paged

    def reset(self) -> None:
        """Begin an attempt."""
        self.memory.reset(self.times.started_s)
        self.paging.reset()
        self.times.used_cpu_s = 0.0

    def done_share(self, now_s: float, ahead_s: float = 0.0) -> float:
        """How far it has come, as a share of its length: by the processor's time, as others slow it down."""
        predicted, times = self.predicted, self.times
        if predicted.cpu_s and times.used_cpu_s:
            speed = max(1.0, predicted.cpu_s / max(0.001, predicted.seconds))  # more threads than one
            used_cpu_s = times.used_cpu_s + speed * (now_s - self.memory.sampled_s + ahead_s)
            return used_cpu_s / predicted.cpu_s
        return (now_s - times.started_s + ahead_s) / max(0.05, predicted.seconds)

    def course(self) -> tuple[int, ...]:
        """The most in each eighth of its length; () if it was disturbed or too short to tell."""
        length, curve = self.ran_s, self.memory.curve
        if self.counts.attempts > 1 or self.counts.pauses or self.was_paged or length < SHORT_S:
            return ()
        highest = [0.0] * PARTS
        for at, held in zip(curve[::2], curve[1::2], strict=True):
            part = min(PARTS - 1, max(0, int((at - self.times.started_s) / length * PARTS)))
            highest[part] = max(highest[part], held)
        for i in range(1, PARTS):  # nothing new was noted: as before
            highest[i] = highest[i] or highest[i - 1]
        missed = max(1.0, self.memory.peak_bytes / max(1.0, *highest))  # between two samples
        return tuple(int(h * missed) for h in highest)
