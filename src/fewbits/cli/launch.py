"""``fewbits train --nproc-per-node``: torch's own launcher, with one bar, one log a rank and one sentence.

Rank 0 keeps the terminal, with its progress bar. The others write into files under the run folder, which are
removed when all went well and had nothing to say. When a rank fails, torch's launcher ends the others; then
the end of the failed rank's log is shown, and one sentence: that of the rank that is to blame.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fewbits.cli.rank_processes import RankProcesses
from fewbits.doctor.launchers import Launched, launched
from fewbits.errors import BadInput, PeerLost, StoppedBySignal, Unsupported
from fewbits.training.run_folder.killed import note_if_killed
from fewjobs.oom_kills import UNKNOWN, OomKills, oom_kills

LOGS = "logs"
_TAIL = 25  # lines shown of a failed rank's log
_STOPPED = "StoppedBySignal: "
_OUR_OWN = re.compile(
    r"^(BadInput|BadCheckpoint|SpecMismatch|Unsupported|TrainingStopped|PeerLost|StoppedBySignal): "
)


def wants_launch(args: Namespace) -> bool:
    """Whether this command line starts processes instead of training itself."""
    if args.launched:
        return False
    named = [
        name
        for name in ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id")
        if getattr(args, name) is not None
    ]
    if args.max_restarts is not None and (args.max_restarts < 0 or args.nproc_per_node is None):
        raise BadInput(
            f"--max-restarts is {args.max_restarts}: how often the processes that --nproc-per-node starts may"
            " be started again; give a number from 0, and --nproc-per-node N (or gpu)."
        )
    if named and args.nproc_per_node is None:
        raise BadInput(
            f"--{named[0].replace('_', '-')} says how machines meet, but not how many processes each starts;"
            " add --nproc-per-node N (or gpu)."
        )
    if named and args.nnodes is None:
        raise BadInput(
            f"--{named[0].replace('_', '-')} says how machines meet, but not how many there are, so each"
            " would begin a run of its own in one folder; add --nnodes M, the same on all."
        )
    if args.node_rank is not None and not 0 <= args.node_rank < args.nnodes:
        raise BadInput(
            f"--node-rank is {args.node_rank}, and of {args.nnodes} machines (--nnodes) the numbers are 0 to"
            f" {args.nnodes - 1}; give this machine one of these, each a different one."
        )
    return args.nproc_per_node is not None


def check_tasks(args: Namespace, told: Launched | None = None) -> None:
    """Refuse to be one of several tasks that do not know of each other.

    Args:
        args: the parsed flags.
        told: how this process was started; None: as its environment says.

    Raises:
        Unsupported: Slurm or MPI has started several tasks, each of which would train alone.
    """
    told = launched() if told is None else told
    if told.by is None or told.has_rank or args.nnodes is not None:
        return
    raise Unsupported(
        f"{told.by} has started this as task {told.task} of {told.tasks}, and each would begin a run of its"
        " own; for one run start one task a machine, with --nproc-per-node gpu, --nnodes M and"
        " --rdzv-endpoint (docs/guide/several-gpus.md); for a run a task, each with an output_dir of its own,"
        " add --nproc-per-node 1 --nnodes 1."
    )


def launch(args: Namespace, words: Sequence[str], *, device: str, output_dir: str | Path) -> int:
    """Start the processes and wait for them.

    Args:
        args: the parsed flags.
        words: what each process gets on its command line, behind ``fewbits``.
        device: of the run's configuration.
        output_dir: the run folder, for the logs.

    Returns:
        The exit code: 0; of the process that failed; 128 and the signal that killed it; 130 for Ctrl-C.
    """
    import torch

    count = processes(args.nproc_per_node, device)
    threads = args.threads or max(1, torch.get_num_threads() // count)
    command = [sys.executable, "-m", "fewbits.cli", *words, "--launched", "--threads", str(threads)]
    if args.max_restarts:
        command += ["--max-restarts", str(args.max_restarts)]
    ends: list[str] = []
    try:
        return run_processes(command, args, count=count, logs=Path(output_dir) / LOGS, note=ends.append)
    finally:
        note_if_killed(output_dir, next(iter(ends), None))  # the rank that writes may have had no time to


def processes(count: str, device: str) -> int:
    """How many to start here.

    Raises:
        BadInput: not a number.
        Unsupported: more than there are GPUs, on which the run would be.
    """
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if count == "gpu":
        if not gpus:
            raise Unsupported("--nproc-per-node is gpu, but torch sees no GPU here; give a number.")
        return gpus
    if not count.isdigit() or int(count) < 1:
        raise BadInput(f"--nproc-per-node is {count!r}; it must be a number of processes, or gpu.")
    if gpus and int(count) > gpus:
        raise Unsupported(
            f"--nproc-per-node is {count}, but torch sees {gpus} GPUs here, and each process needs one; start"
            f" at most {gpus}, or set device=cpu."
        )
    return int(count)


def run_processes(
    command: Sequence[str],
    args: Namespace,
    *,
    count: int,
    logs: Path,
    note: Callable[[str], None] = lambda sentence: None,
) -> int:
    """Any command in ``count`` processes, with torch's variables.

    Its failure is told in one sentence, which ``note`` gets too.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    own = logs / f"{socket.gethostname()}-{os.getpid()}"  # machines share the run folder
    own.mkdir(parents=True, exist_ok=True)
    for talker in ("", ".multiprocessing.errors"):  # the sentence is ours
        logging.getLogger(f"torch.distributed.elastic{talker}").setLevel(logging.CRITICAL)
    before = oom_kills()
    waits = ""
    if (args.nnodes or 1) > 1:
        waits = f"waiting at {args.rdzv_endpoint} for all {args.nnodes} machines (--nnodes) to start.\n"
    running = RankProcesses(
        lambda: run_by_torchrun(command, args, count=count, logs=own),
        restarts=bool(args.max_restarts),
        waits=waits,
    )
    try:
        running.run()
    except ChildFailedError as error:
        code, sentence = _end_of(error.failures, own, running, before)
        sys.stderr.write(sentence)
        note(sentence.removeprefix("error: ").strip())
        _remove_empty(own)
        return code
    except (
        json.JSONDecodeError
    ) as error:  # torch reads what a rank wrote: it was killed then, or the disk full
        raise PeerLost(
            f"a rank ended and could not write down why; see its log in {own}, and whether the disk has room;"
            " the checkpoints are whole: go on with --resume."
        ) from error
    except (RendezvousError, DistError) as error:
        if any(own.glob("*/attempt_*")):  # they had met: processes were started
            _remove_empty(own)
            raise PeerLost(
                f"the launcher at {args.rdzv_endpoint}, where the machines met, is gone"
                f" ({_first_line(error)}); the checkpoints are whole: go on with --resume."
            ) from error
        raise Unsupported(
            f"the machines did not meet at {args.rdzv_endpoint} ({_first_line(error)}); check that the first"
            f" machine's name and port can be reached from all, and that all {args.nnodes} were started."
        ) from error
    request = _asked_to_stop(own) if args.max_restarts else None
    _remove_empty(own)
    if request is not None:
        sys.stderr.write(f"{request}\n")
        return 128 + int(signal.Signals[request.split()[0]])
    if running.signal is None:
        return 0
    code, sentence = _ended_by(running.signal)
    sys.stderr.write(sentence)
    note(sentence.strip())
    return code


def _asked_to_stop(own: Path) -> str | None:
    """What the ranks of the last attempt have said if they stopped for a signal; see `as_rank`."""
    attempts = sorted(own.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    for path in attempts[-1].glob("*/error.json") if attempts else ():
        text = str(json.loads(path.read_text(encoding="utf-8"))["message"]["message"])
        if text.startswith(_STOPPED):
            return text.removeprefix(_STOPPED)
    return None


def run_by_torchrun(command: Sequence[str], args: Namespace, *, count: int, logs: Path) -> None:
    """The command on ``count`` processes here, by torch's own launcher; their output goes to ``logs``."""
    from torch.distributed import run as torchrun

    quiet = ",".join(f"{rank}:{0 if rank == 0 else 3}" for rank in range(count))
    flags = ["--nproc-per-node", str(count), "--nnodes", str(args.nnodes or 1)]
    flags += ["--max-restarts", str(args.max_restarts or 0)]
    flags += ["--log-dir", str(logs), "--redirects", quiet]
    if (args.nnodes or 1) == 1:
        flags += ["--standalone"]
    else:
        flags += meeting_flags(args)
    torchrun.run(torchrun.parse_args([*flags, "--no-python", *command]))


def meeting_flags(args: Namespace) -> list[str]:
    """Where several machines meet; with numbers of their own, in that order."""
    if args.rdzv_endpoint is None:
        raise BadInput(
            f"--nnodes is {args.nnodes}, but not where the machines meet; add --rdzv-endpoint HOST:PORT, the"
            " first machine's name and a free port, the same on all."
        )
    flags = ["--rdzv-endpoint", args.rdzv_endpoint, "--rdzv-id", args.rdzv_id or "fewbits"]
    if args.node_rank is None:
        return [*flags, "--rdzv-backend", "c10d"]
    return [*flags, "--rdzv-backend", "static", "--node-rank", str(args.node_rank)]


def _ended_by(by: signal.Signals) -> tuple[int, str]:
    """The exit code and a line, where a signal came and no rank has more to say."""
    return 128 + int(by), "interrupted.\n" if by == signal.SIGINT else f"ended by {by.name}.\n"


def _end_of(
    failures: Mapping[int, Any], logs: Path, running: RankProcesses, before: OomKills
) -> tuple[int, str]:
    """The exit code and the sentence of the rank that is to blame; its log's end is shown."""

    def order(number: int) -> tuple[int, float, int]:
        failure = failures[number]
        return _blame(failure, by_agent=failure.pid in running.ended_by_agent), failure.timestamp, number

    rank = min(failures, key=order)
    failure = failures[rank]
    if _message(failure).startswith(_STOPPED):  # it was asked to, and has written a checkpoint
        return int(failure.exitcode), f"{sentence_of(rank, failure)}\n"
    if running.signal is not None:
        return _ended_by(running.signal)
    if still := next((running.stopped[f.pid] for f in failures.values() if f.pid in running.stopped), None):
        return 1, f"error: {still}\n"
    log = newest_log(logs, failure.local_rank)
    ours = _OUR_OWN.match(_message(failure))
    if not ours and log is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = [line for line in lines if line.strip()][-_TAIL:]
        if shown:
            sys.stderr.write("\n".join([f"the end of rank {rank}'s log, {log}:", *shown, ""]))
    sentence = f"error: {sentence_of(rank, failure, oom_kills().since(before))}\n"
    if failure.exitcode >= 0:
        return int(failure.exitcode), sentence
    return 1 if _message(failure) else 128 - int(failure.exitcode), sentence


def _blame(failure: Any, *, by_agent: bool) -> int:
    """How little a rank is to blame; no time decides, because the launcher may see two deaths at once.

    Ranks that somebody has killed come first, then those that say why they ended; of these, what one says
    that the agent has ended meanwhile (because another rank had ended) may be the consequence of that. Then
    come ranks that only lost another one, and last those that were ended by the agent alone. NCCL's own watch
    aborts a rank whose neighbour is gone, so an abort is no better a reason than a sentence.
    """
    message = _message(failure)
    if message.startswith("PeerLost: "):
        return 3
    if by_agent:
        return 2 if message and not message.startswith(_STOPPED) else 4
    return 0 if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT else 1


def sentence_of(rank: int, failure: Any, kills: OomKills = UNKNOWN) -> str:
    """What became of a rank; ``kills``: what the kernel has killed for memory since the launch."""
    text = " ".join(_message(failure).split())
    if failure.exitcode < 0 and not text:
        name = signal.Signals(-failure.exitcode).name
        why = f", {kills.reason()}" if name == "SIGKILL" else ""
        return (
            f"rank {rank} (process {failure.pid}) was killed by {name}{why}; the checkpoints are whole: go"
            " on with --resume."
        )
    if match := _OUR_OWN.match(text):
        return text[match.end() :]
    if len(text) > 300:
        text = f"{text[:297]}..."
    code = f" with code {failure.exitcode}" if failure.exitcode >= 0 else ""  # killed after it said why
    said = f": {text}" if text else ", and its log tells why"
    return f"rank {rank} (process {failure.pid}) ended{code}{said}"


def _message(failure: Any) -> str:
    """The exception as the rank left it; empty where it could not."""
    message = failure.error_file_data.get("message")
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def newest_log(logs: Path, local_rank: int) -> Path | None:
    """The error stream of a process of the newest launch; rank 0 writes to the terminal instead."""
    files = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return files[-1] if files else None


def _remove_empty(own: Path) -> None:
    """Leave nothing of a launch in which nobody wrote anything; other machines' logs stay."""
    if any(path.stat().st_size for path in own.rglob("*.log")):
        return
    shutil.rmtree(own, ignore_errors=True)
    for folder in (own.parent, own.parent.parent):  # the run folder too, if the run was refused at the start
        try:
            folder.rmdir()
        except OSError:  # it holds something, or another machine was faster
            return


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def as_rank(args: Namespace, work: Any) -> Any:
    """Run the training of one process: its failure is left for the launcher, which tells it."""
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    if args.threads:
        torch.set_num_threads(args.threads)
    if not torch.distributed.is_torchelastic_launched():
        return work()
    if args.max_restarts:
        return record(lambda: _without_restart(work))()
    return record(work)()


def _without_restart(work: Any) -> Any:
    """A rank that has stopped for a signal ends well, or torch's agent would start it again."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        return work()
    except StoppedBySignal as error:
        get_error_handler().record_exception(error)
        return 0
