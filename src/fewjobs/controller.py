"""The controller of a build: answers launchers, watches memory, decides. One thread, one loop, one socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from fewjobs import schedule
from fewjobs.cache import file_clock
from fewjobs.client import Client
from fewjobs.intake import Intake
from fewjobs.measures import Measures
from fewjobs.options import Options
from fewjobs.predict import History
from fewjobs.sample import Sampler, children, parent, state
from fewjobs.stage import Stage, State
from fewjobs.trace import Trace
from fewjobs.verdict import Verdict
from fewjobs.watch import BudgetWatch, Others, sample_stage

TICK_S = 0.05
IDLE_TICK_S = 0.25
LOOK_S = 0.5  # between two looks at the budget, and at the processes that are no stage
SMALL_BYTES, SMALL_SHARE = 100e6, 0.05  # of the budget: who stays below does not need the pager
FASTEST = 3e9  # bytes a second that one process can touch
TELLS_AFTER_S = 0.08  # by then the launcher of a tool that still runs has told of it
FAR_SHARE = 0.3  # of the budget: below, the rest of the machine is looked at half as often
CLOSE_SHARE = 0.7  # of the budget: from there on twice as often
MAX_SHARE = 0.03  # of one core, for sampling
GATHER_S, MOST_GATHER_S = 0.015, 0.3  # the first large units wait for each other
LARGE_INPUT_BYTES = 10**6
CREDENTIALS = struct.Struct("3i")
SURE_CPU_S = 0.1  # stages that took so much tell how fast the machine is
FEW = 8  # so many results, and each says much about the stages that wait
HELD_QUIET_S = 2.0  # nobody else at work for so long: the failures that were held back are told


@dataclass
class Controller:
    """Runs until `finished` says so; see `serve`."""

    options: Options
    history: History
    intake: Intake
    trace: Trace
    budget: BudgetWatch
    verdicts: list[Verdict] = field(default_factory=list)
    on_tick: Callable[[Controller], None] | None = None

    def __post_init__(self) -> None:
        self.poller = select.epoll()
        self.callbacks: dict[int, Callable[[], None]] = {}
        self.clients: dict[int, Client] = {}
        self.waiting: dict[Stage, Client] = {}  # in the order in which they asked
        self._present: dict[Stage, Client] = {}
        self._uid = os.getuid()
        self.groups: dict[int, Client] = {}
        self.launchers: dict[int, Client] = {}
        self.drivers: deque[Client] = deque()  # nvcc itself, which needs a turn only among the units
        self._at_work: set[Client] = set()  # drivers that were told to run
        self.sampler = Sampler()
        self.others = Others(self.sampler)
        self.measures = Measures(self)
        self.budget_bytes = 0
        self.busy_s = self.now_s
        self.ticks = 0
        self.pace = 1.0
        self.late_s = 0.0  # how late samples came of late
        self._to_admit = self._has_begun = False
        self._ended_now: deque[tuple[Client, Stage, tuple[int, int], float]] = deque()
        self._learned = 0
        self.tick_cpu_s = 0.0
        self._next_tick = self._next_look = 0.0
        self.listener = self._listen()
        self.watch(self.intake.wakes, self.intake.answer_ready)

    @property
    def now_s(self) -> float:
        """Seconds since the build began."""
        return time.monotonic() - self.trace.epoch

    @property
    def stages(self) -> Iterator[Stage]:
        """All stages that have not ended."""
        return (c.stage for c in self.clients.values() if c.stage is not None)

    @property
    def present(self) -> list[Stage]:
        """Stages whose processes exist."""
        return list(self._present)

    @property
    def used_bytes(self) -> int:
        """Memory of the whole build."""
        return self.others.rss_bytes + sum(s.memory.rss_bytes for s in self._present)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        folder = os.open(self.options.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # a socket's path may have 107 bytes only; through the descriptor any folder will do
            listener.bind(f"/proc/self/fd/{folder}/sock")
        finally:
            os.close(folder)
        listener.listen(1024)
        listener.setblocking(False)
        self.watch(listener.fileno(), self._accept)
        return listener

    def serve(self, finished: Callable[[], bool]) -> None:
        """Answer and watch until ``finished``."""
        self._refresh_budget()
        while not finished():
            idle = not self.clients
            for file, _ in self.poller.poll(self._next_look_in(idle)):
                if (callback := self.callbacks.get(file)) is not None:
                    callback()
            if self._to_admit and not self._gathers():
                self.admit()
            if self._ended_now:
                self._keep(*self._ended_now.popleft())
            if self.now_s >= self._next_tick:
                self._tick(idle)
        while self._ended_now:
            self._keep(*self._ended_now.popleft())

    def _next_look_in(self, idle: bool) -> float:
        if self._ended_now:
            return 0.0
        pause = max(0.0, self._next_tick - self.now_s)
        if self._to_admit:  # at the beginning
            return min(pause, GATHER_S)
        return min(pause, IDLE_TICK_S) if idle else pause

    def _gathers(self) -> bool:
        """Whether the first large units wait a moment for each other, so that the biggest may begin."""
        if self._has_begun or self.now_s - self.trace.stages[0].times.queued_s > MOST_GATHER_S:
            return False
        last = self.trace.stages[-1]
        return last.input_bytes >= LARGE_INPUT_BYTES and self.now_s - last.times.queued_s < GATHER_S

    def close(self) -> None:
        """Stop listening, and let go of every launcher: they end their tools when they see that."""
        self.poller.close()
        self.listener.close()
        for client in self.clients.values():
            client.socket.close()
        self.intake.close()

    def watch(self, file: int, callback: Callable[[], None]) -> None:
        """Call back when a file can be read."""
        self.callbacks[file] = callback
        self.poller.register(file, select.EPOLLIN)

    def unwatch(self, file: int) -> None:
        """Forget a file."""
        del self.callbacks[file]
        self.poller.unregister(file)

    # -- messages

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, _ = CREDENTIALS.unpack(credentials)
        if uid != self._uid:
            connection.close()
            return
        client = Client(connection, pid)
        file = connection.fileno()
        self.clients[file] = self.launchers[pid] = client
        self.watch(file, partial(self._hear, client))
        self._hear(client)

    def _hear(self, client: Client) -> None:
        """Everything that a launcher has said by now: one that ends says several things at once."""
        while not client.closed and (text := client.receive()) is not None:
            if not text:
                self._gone(client)
            elif text[0] == "H":  # nothing follows before it has an answer
                head, *words = text.split("\0")
                above, _, tool = head[1:].partition(" ")
                self._asked(client, tool, int(above), words)
                return
            elif text[0] == "S":
                self._started(client, int(text[2:]))
            elif text[0] == "E":
                self._ended(client, [int(word) for word in text[2:].split()])

    def _started(self, client: Client, pid: int) -> None:
        self.groups.pop(client.pid_of_tool, None)
        client.pid_of_tool = pid
        self.groups[pid] = client
        if client.stage is not None:
            client.stage.pid = pid

    def _above(self, client: Client, parent_pid: int) -> Client | None:
        """The launcher in whose tool's group this one is; it may not have told us of its tool yet."""
        group = client.group
        if group in self.groups:
            return self.groups[group]
        return self.launchers.get(parent_pid if group == client.pid else parent(group))

    def _asked(self, client: Client, tool: str, parent_pid: int, words: Sequence[str]) -> None:
        """A launcher asks: it passes through, gets a kept result, or becomes a stage that waits its turn."""
        above = self._above(client, parent_pid)
        if above is not None and above.stage is not None:  # already part of a stage
            client.send("P")
            return
        client.is_unit = above is None
        request_above = above.request if above is not None else None
        client.request = self.intake.read(client.pid, tool, request_above, words)
        if client.request is None:
            client.send("P")
            return
        self.intake.look_up(client.request, lambda answer: self._looked_up(client, answer))

    def _looked_up(self, client: Client, answer: tuple[str, str] | None) -> None:
        request = client.request
        if client.closed or request is None:
            return
        if answer is not None:
            self.trace.from_cache(request, self.now_s)
            if not client.send("X", "0", *answer):
                client.send("X", "0", "", "")
            return
        if request.is_driver:
            self.drivers.append(client)
            self._let_drivers_start()
            return
        stage = client.stage = request.stage
        stage.times.queued_s = stage.times.since_s = self.now_s
        if self.history.may_know(stage.unit):
            self.intake.find_keys(request)
        self._predict(stage)
        self.trace.add(stage)
        self.waiting[stage] = client
        self._to_admit = True

    def _predict(self, stage: Stage) -> None:
        room = self.budget_bytes - schedule.margin(self.budget_bytes) - self.others.rss_bytes
        self.history.predict(stage, room_bytes=max(0, room), slots=self.options.slots)

    def admit(self) -> None:
        """Let those start that fit."""
        self._to_admit = False
        waiting = self.waiting
        if not waiting or sum([stage.is_at_work for stage in self._present]) >= self.options.slots:
            return
        self._has_begun = True
        if self._learned < self.history.learned <= FEW:
            self._predict_again(waiting)
        started = schedule.admit(
            list(waiting),
            list(self._present),
            budget_bytes=self.budget_bytes,
            other_bytes=self.others.rss_bytes,
            slots=self.options.slots,
            now_s=self.now_s,
            pace=self.pace,
        )
        room = self._room_for_units()
        for stage in started:
            client = waiting[stage]
            if client.is_unit and room <= 0:
                continue
            room -= client.is_unit
            del waiting[stage]
            self._present[stage] = client
            self._start(client, stage)

    def _predict_again(self, waiting: Iterable[Stage]) -> None:
        """What was learned since they asked may say more about those that still wait."""
        self._learned = self.history.learned
        for stage in waiting:
            if stage.predicted.source != "history" and not stage.counts.attempts:
                self._predict(stage)

    def _room_for_units(self) -> int:
        """How many more units may begin: each is a stage of its own or a driver with several."""
        if not self.options.units:
            return len(self.clients)
        busy = sum([c.is_unit and s.is_at_work for s, c in self._present.items()])
        return self.options.units - busy - sum([c.is_unit for c in self._at_work])

    def _let_drivers_start(self) -> None:
        while self.drivers and self._room_for_units() > 0:
            client = self.drivers.popleft()
            if not client.closed and client.request is not None:
                self._at_work.add(client)
                client.send("R", "0", "", "", "", *self.intake.replaced(client.request))

    def _start(self, client: Client, stage: Stage) -> None:
        now = self.now_s
        stage.times.waited_s += now - stage.times.since_s
        stage.state, stage.times.started_s, stage.times.since_s = State.RUNNING, now, now
        stage.counts.attempts += 1
        stage.reset()
        pager, options = self.options.pager, self.options
        cap = 2 * (options.stage_limit_bytes or stage.class_bytes) if options.caps else 0
        stage.paging.without_pager = pager is not None and self._is_small(stage)
        preload = ("", "")
        if pager is not None and not stage.paging.without_pager:
            preload = (str(pager), str(options.pages))
        client.began = file_clock()
        request = client.request
        replaced = self.intake.replaced(request) if request is not None else ("0",)
        waits = request is None or self.intake.is_waited_for(request)
        client.send("R" if waits else "RQ", str(cap), "600", *preload, *replaced)
        self.others.forget(client.pid)

    def _is_small(self, stage: Stage) -> bool:
        """Whether it would never use the pager, whose loading takes a tenth of what a tiny unit does."""
        bound = min(SMALL_BYTES, SMALL_SHARE * self.budget_bytes)
        predicted = stage.predicted
        return stage.counts.attempts == 1 and predicted.source != "prior" and predicted.bytes < bound

    def _ended(self, client: Client, facts: list[int]) -> None:
        code, max_rss_kib, user_us, system_us, out, err, signal_seen = facts
        self.groups.pop(client.pid_of_tool, None)
        stage, request = client.stage, client.request
        if stage is None:
            failed = ""
            if request is not None and code == 0:
                failed = self.intake.finished(request, client, (out, err), self.now_s - request.asked_s)
            self._at_work.discard(client)
            client.send("X", "1" if failed else "", "", failed)
            self._let_drivers_start()
            return
        stage.times.cpu_s += (user_us + system_us) / 1e6
        stage.memory.peak_bytes = max(stage.memory.peak_bytes, max_rss_kib * 1024)
        stage.memory.rss_bytes = stage.memory.anon_bytes = stage.pid = 0
        self.busy_s = self.now_s
        self._present.pop(stage, None)
        if self.measures.again(client, stage, code, (out, err), signal_seen=bool(signal_seen)):
            stage.state, stage.times.since_s = State.WAITING, self.now_s
            self.waiting[stage] = client
        elif stage.state is not State.HELD:
            self._done(client, stage, code, (out, err))
        self._to_admit = True

    def _done(self, client: Client, stage: Stage, code: int, printed: tuple[int, int]) -> None:
        stage.state, stage.code, stage.times.ended_s = State.DONE, code, self.now_s
        client.stage = None
        self.trace.ended(stage, self.now_s)
        if stage.times.cpu_s > SURE_CPU_S and stage.counts.attempts == 1:
            slower = (stage.ran_s - stage.times.paused_s) / stage.times.cpu_s
            self.pace += 0.2 * (min(3.0, max(1.0, slower)) - self.pace)
        if code == 0:  # the next one starts before that is looked at
            self._ended_now.append((client, stage, printed, stage.ran_s - stage.times.paused_s))
        else:
            client.send("X", "", "", "")

    def _keep(self, client: Client, stage: Stage, printed: tuple[int, int], seconds: float) -> None:
        """Learn from a stage that has succeeded, keep what it made, and let its launcher end."""
        if client.request is not None:
            self.intake.find_keys(client.request, by_content=seconds >= self.intake.worth_keeping_s)
        peak_bytes = max(stage.memory.peak_bytes, stage.memory.most_bytes)
        self.history.learn(stage, peak_bytes=peak_bytes, seconds=seconds)
        failed = ""
        if client.request is not None:
            failed = self.intake.finished(client.request, client, printed, seconds)
        if not client.closed:
            client.send("X", "1" if failed else "", "", failed)
        self._to_admit = self._to_admit or self.history.learned <= FEW

    def _gone(self, client: Client) -> None:
        """The launcher has ended, or was killed: then its tool goes with it."""
        client.closed = True
        file = client.socket.fileno()
        self.clients.pop(file, None)
        self.callbacks.pop(file, None)
        client.socket.close()  # which takes it out of the poller, too
        if self.launchers.get(client.pid) is client:
            del self.launchers[client.pid]
        self.groups.pop(client.pid_of_tool, None)
        self._at_work.discard(client)
        stage = client.stage
        if stage is not None and stage.state is not State.DONE:
            self.waiting.pop(stage, None)
            self._present.pop(stage, None)
            if stage.on_machine and stage.pid:
                kill_group(stage.pid, signal.SIGKILL)
            stage.state, stage.times.ended_s = State.DONE, self.now_s
            self.trace.ended(stage, self.now_s, "its launcher was killed")
            self._to_admit = True
        if self.drivers:
            self._let_drivers_start()

    # -- time

    def _tick(self, idle: bool) -> None:
        begun_s = self.now_s
        begun = time.thread_time()  # not the clock: on a busy machine we wait, too
        self.ticks += 1
        self.late_s = max(begun_s - self._next_tick if self.ticks > 1 else 0.0, 0.9 * self.late_s)
        self._find_tools()
        if begun_s >= self._next_look or idle:
            far = self.used_bytes < FAR_SHARE * self.budget_bytes
            self._next_look = begun_s + (2 * LOOK_S if far else LOOK_S)
            self.others.scan({c.pid for c in self.clients.values()}, self.groups)
            self._refresh_budget()
            self.history.write()
        present = self.present
        for stage in present:
            sample_stage(self.sampler, stage, self.now_s, look=self.ticks % 5 == 0)
        self.measures.take(present)
        self._admit_again()
        self._tell_held()
        self.trace.note(self.now_s, self.used_bytes, self.budget_bytes, len(present))
        if self.on_tick is not None:
            self.on_tick(self)
        cost = time.thread_time() - begun
        self.tick_cpu_s += cost
        self._next_tick = begun_s + max(self._pause(idle), self.tick_cpu_s / self.ticks / MAX_SHARE)

    def _admit_again(self) -> None:
        if self.history.learned > self._learned:
            self._predict_again(self.waiting)
        if self.waiting and not self._gathers():
            self.admit()

    def _find_tools(self) -> None:
        """The processes of tools that their launchers have not told of, as they have just begun."""
        for stage, client in list(self._present.items()):
            quick = self.now_s - stage.times.started_s < TELLS_AFTER_S and self._is_small(stage)
            if not stage.pid and not quick:
                for pid in children(client.pid):
                    if state(pid) not in ("", "Z"):  # one that has ended and is to run again
                        self._started(client, pid)

    def _pause(self, idle: bool) -> float:
        """The time between two samples: short where it matters."""
        if idle:
            return IDLE_TICK_S
        used = self.used_bytes
        if used > CLOSE_SHARE * self.budget_bytes:
            return TICK_S / 2
        if not all(self._is_small(stage) for stage in self._present):
            return TICK_S
        # Four samples at least while everything grows as fast as memory can be touched.
        fills_s = (self.budget_bytes - used) / (FASTEST * max(1, self.options.slots))
        return max(TICK_S, min(2 * TICK_S, fills_s / 4))

    def _refresh_budget(self) -> None:
        anon = self.others.rss_bytes + sum(s.memory.anon_bytes for s in self._present)
        budget = self.budget.now(anon)
        if abs(budget - self.budget_bytes) > 0.02 * max(1, self.budget_bytes):
            self.trace.budget(self.now_s, budget, self.budget.why)
        self.budget_bytes = budget

    def _tell_held(self) -> None:
        """Tell the build tool of failures that were held back, once nobody else is at work."""
        held = [c for c in self.clients.values() if c.stage is not None and c.stage.state is State.HELD]
        if not held or any(s.state is not State.HELD for s in self.stages):
            self.busy_s = self.now_s if not held or len(held) < len(list(self.stages)) else self.busy_s
            return
        if self.now_s - self.busy_s < HELD_QUIET_S:
            return
        for client in held:
            stage = client.stage
            assert stage is not None
            stage.state, stage.times.ended_s, stage.code = State.DONE, self.now_s, 1
            self.trace.ended(stage, self.now_s)
            client.stage = None
            client.send("X", "1", "", client.message)


def kill_group(pid: int, number: int) -> None:
    """Send a signal to a tool's process group, if it is still there."""
    try:
        os.killpg(pid, number)
    except OSError:
        return
