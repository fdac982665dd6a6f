"""Processes that the command line starts: how many, their logs, and the one sentence when one fails."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fewbits.cli import rank_processes
from fewbits.cli.launch import check_tasks, meeting_flags, processes, run_processes, wants_launch
from fewbits.cli.launch_flags import without_launch_flags
from fewbits.doctor.launchers import launched as launched_as
from fewbits.errors import BadInput, PeerLost, Unsupported
from tests.cli.launched import HEAD, flags


def test_the_last_attempt_is_to_blame_and_a_stop_is_no_reason_for_another(launched):
    again = 'attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])\n'
    code, told = launched(
        again
        + """
if rank == 1 - attempt:  # in the first attempt rank 1, in the second rank 0
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(5)
fail("PeerLost: another rank is gone.")
""",
        "--max-restarts",
        "1",
    )
    assert code == 128 + 9 and re.match(r"error: rank 0 \(process \d+\) was killed by SIGKILL", told), told
    code, told = launched(
        again
        + """
if attempt:
    fail("BadInput: started again.")
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps({"message": {"message":
    "StoppedBySignal: SIGUSR1 came to rank 0 of 2: the checkpoint of step 3 of 9 is written."}}))
""",
        "--max-restarts",
        "1",
    )
    assert (code, told) == (
        128 + signal.SIGUSR1,
        "SIGUSR1 came to rank 0 of 2: the checkpoint of step 3 of 9 is written.\n",
    )


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    """`timeout 1h fewbits train` sends SIGTERM to the launcher and to its group: no checkpoint was made."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(rank_processes, "_children", lambda earlier: [SimpleNamespace(pid=7)])
    monkeypatch.setattr(rank_processes, "_send", lambda pid, number: sent.append((pid, int(number))))
    processes = rank_processes.RankProcesses(lambda: None)
    for _ in range(2):
        processes._heard(signal.SIGTERM, None)
    assert sent == [(7, signal.SIGTERM)]
    monkeypatch.setattr(rank_processes, "_SAME_S", 0.0)  # later it means: at once
    processes._heard(signal.SIGTERM, None)
    assert sent[1:] == [(7, signal.SIGKILL)]
    pressed = rank_processes.RankProcesses(lambda: None)
    for _ in range(2):
        pressed._heard(signal.SIGINT, None)
    assert sent[2:] == [(7, signal.SIGINT), (7, signal.SIGKILL)]


def test_a_rank_that_is_started_after_the_signal_is_asked_too(launched):
    code, told = launched(
        """
        if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
        "--max-restarts",
        "1",
    )
    assert (code, told) == (128 + signal.SIGTERM, "ended by SIGTERM.\n")


def test_a_stopped_rank_is_named_at_once_and_ended_in_good_time(launched, monkeypatch):
    monkeypatch.setattr("fewbits.cli.rank_processes.STOPPED_S", 3.0)
    began = time.monotonic()
    code, told = launched(
        """
        time.sleep(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        """
    )
    first, last = told.splitlines()
    assert code == 1 and time.monotonic() - began < 20
    assert re.match(
        r"rank 1 \(process (\d+)\) was stopped by SIGSTOP, .*; kill -CONT \1 lets it go on", first
    )
    assert re.match(r"error: rank 1 \(process \d+\) was stopped by SIGSTOP and stood still for [345] s", last)
    assert "memory" not in told


def test_a_stopped_rank_may_go_on(launched, capsys):
    code, told = launched(
        """
        if rank == 1:
            if os.fork() == 0:
                time.sleep(3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        """
    )
    assert code == 0 and "rank 1" in told and len(told.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_is_handed_on_and_waited_for(number, tmp_path):
    """As from a scheduler: the ranks take their time, and the launcher ends with what they say."""
    code = HEAD + textwrap.dedent(
        """
        from pathlib import Path
        def heard(number, frame):
            time.sleep(1)
            fail_with(f"StoppedBySignal: {signal.Signals(number).name} came: the checkpoint of step 3 of 9"
                      " is written; go on with --resume.", 128 + number)
        def fail_with(text, code):
            told = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
            open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(told))
            os._exit(code)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, heard)
        Path(sys.argv[1], str(rank)).touch()
        time.sleep(60)
        """
    )
    starts = (
        "import argparse, sys\n"
        "from pathlib import Path\n"
        "from fewbits.cli.launch import run_processes\n"
        "args = argparse.Namespace(nnodes=None, max_restarts=None)\n"
        "command = [sys.executable, '-c', sys.argv[1], sys.argv[2]]\n"
        "sys.exit(run_processes(command, args, count=2, logs=Path(sys.argv[2]) / 'logs'))\n"
    )
    words = [sys.executable, "-c", starts, code, str(tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / str(rank)).exists() for rank in (0, 1)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert told == f"{number.name} came: the checkpoint of step 3 of 9 is written; go on with --resume.\n"


def test_a_refusal_is_told_once_and_leaves_no_folder(launched, tmp_path):
    code, told = launched('fail("BadInput: there is no data file rows.jsonl; check the path.")')
    assert (code, told) == (1, "error: there is no data file rows.jsonl; check the path.\n")
    assert not (tmp_path / "run").exists()


def test_the_log_of_the_failed_rank_comes_first(launched, tmp_path):
    code, told = launched(
        """
        if rank == 1:
            print("layer 7 went up in smoke", file=sys.stderr, flush=True)
            fail("RuntimeError: no smoke detector")
        time.sleep(60)
        """
    )
    lines = told.splitlines()
    assert code == 1 and len(lines) == 3
    assert lines[0].startswith("the end of rank 1's log, ") and lines[1] == "layer 7 went up in smoke"
    assert re.fullmatch(
        r"error: rank 1 \(process \d+\) ended with code 1: RuntimeError: no smoke detector", lines[2]
    )
    assert list((tmp_path / "run/logs").rglob("stderr.log"))


def test_nothing_remains_of_processes_that_end_well(launched, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    assert launched("sys.exit(0)") == (0, "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_the_words_of_each_process():
    words = ["train", "c.yaml", "lr=1", "--nproc-per-node", "2", "--nnodes=2", "--resume", "--max-steps", "3"]
    assert without_launch_flags(words) == ["train", "c.yaml", "lr=1", "--resume", "--max-steps", "3"]


def test_how_many():
    assert processes("3", "cpu") == 3
    with pytest.raises(Unsupported, match="torch sees no GPU"):
        processes("gpu", "cpu")
    with pytest.raises(BadInput, match="must be a number of processes, or gpu"):
        processes("many", "cpu")


def test_what_is_started():
    assert not wants_launch(flags())
    assert wants_launch(flags("--nproc-per-node", "2"))
    assert not wants_launch(flags("--nproc-per-node", "2", "--launched"))
    with pytest.raises(BadInput, match="not how many processes each starts"):
        wants_launch(flags("--nnodes", "2"))
    for flag, value in (("--node-rank", "1"), ("--rdzv-endpoint", "node0:29500"), ("--rdzv-id", "a")):
        with pytest.raises(BadInput, match=f"{flag} says how machines meet, but not how many there are, .*"):
            wants_launch(flags("--nproc-per-node", "2", flag, value))
    with pytest.raises(BadInput, match=r"--node-rank is 2, and of 2 machines .* the numbers are 0 to 1"):
        wants_launch(flags("--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "2"))


def test_tasks_that_do_not_know_of_each_other_are_refused():
    """As `srun --ntasks=4 fewbits train`, one task a GPU: four runs on one folder."""
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
    for words in ((), ("--nproc-per-node", "2")):
        with pytest.raises(
            Unsupported, match=r"srun has started this as task 2 of 4, .* add --nproc-per-node 1"
        ):
            check_tasks(flags(*words), launched_as(slurm))
    with pytest.raises(Unsupported, match="mpirun has started this as task 0 of 2"):
        check_tasks(flags(), launched_as({"OMPI_COMM_WORLD_SIZE": "2"}))
    check_tasks(flags("--nproc-per-node", "1", "--nnodes", "1"), launched_as(slurm))
    check_tasks(flags("--nproc-per-node", "4", "--nnodes", "4"), launched_as(slurm))
    check_tasks(flags(), launched_as({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}))  # a batch script itself
    check_tasks(flags(), launched_as({**slurm, "RANK": "2", "LOCAL_RANK": "2"}))
    assert launched_as({"TORCHELASTIC_RESTART_COUNT": "3"}).restarts == 3


def test_the_name_of_a_job():
    """The same when it is requeued or its ranks start again, and no other's."""
    slurm = {"SLURM_JOB_ID": "77"}
    nobody = "2d3aa4ba-1f4b-4a71-9d0c-3a5e6a2f8c11"  # made anew for every launch on one machine
    for named, name in (
        ({"TORCHELASTIC_RUN_ID": "a"}, "run a"),
        ({"TORCHELASTIC_RUN_ID": "a", **slurm}, "run a"),
        ({"TORCHELASTIC_RUN_ID": "fewbits"}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": nobody}, None),
        ({"TORCHELASTIC_RUN_ID": nobody, **slurm, "SLURM_STEP_ID": "0"}, "slurm 77.0"),
        (slurm, "slurm 77.batch"),
        ({**slurm, "SLURM_STEP_NUM_TASKS": "2"}, None),  # two tasks with one folder are two runs
        ({}, None),
    ):
        assert launched_as(named).launch == name, named


def test_what_may_start_again():
    assert wants_launch(flags("--nproc-per-node", "2", "--max-restarts", "3"))
    assert without_launch_flags(["train", "--max-restarts", "3", "--resume"]) == ["train", "--resume"]
    for words in (("--max-restarts", "1"), ("--nproc-per-node", "2", "--max-restarts", "-1")):
        with pytest.raises(BadInput, match=r"--max-restarts is -?1: .* give a number from 0"):
            wants_launch(flags(*words))


def test_machines_need_a_meeting_place(tmp_path):
    with pytest.raises(BadInput, match="add --rdzv-endpoint HOST:PORT"):
        run_processes(["true"], flags("--nnodes", "2"), count=1, logs=tmp_path / "logs")


class Terminal:
    """A process that sees a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(terminal)

    def all_it_says(self) -> str:
        said = b""
        with suppress(OSError):  # the end of a terminal that nobody holds any more
            while some := os.read(self.screen, 65536):
                said += some
        self.process.wait(280)
        os.close(self.screen)
        return said.decode()


@pytest.mark.slow
def test_two_launchers_number_the_processes_of_one_run(tmp_path):
    """As on two machines; the second launcher is an interpreter of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{free.getsockname()[1]}"
    says = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    command = [sys.executable, "-c", says, f"{tmp_path}/"]
    other = (
        "import sys; from pathlib import Path; from tests.cli.launched import flags\n"
        "from fewbits.cli.launch import run_processes\n"
        "machine = flags('--nnodes', '2', '--rdzv-endpoint', sys.argv[1], '--node-rank', '1')\n"
        "sys.exit(run_processes(sys.argv[3:], machine, count=1, logs=Path(sys.argv[2])))\n"
    )
    words = [sys.executable, "-c", other, there, str(tmp_path / "other"), *command]
    second = subprocess.Popen(words, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    first = flags("--nnodes", "2", "--rdzv-endpoint", there, "--node-rank", "0")
    try:
        assert run_processes(command, first, count=1, logs=tmp_path / "logs") == 0
        assert second.wait(60) == 0, second.communicate()[1]
    finally:
        second.kill()
        second.communicate()
    assert {rank: (tmp_path / rank).read_text() for rank in ("0", "1")} == {"0": "2", "1": "2"}


@pytest.mark.nightly  # what it joins runs with every commit: the launchers above, and runs of two processes
def test_two_machines_train_one_run(tmp_path, run_folders):
    """Two launchers on this machine, one process each, as on two machines; the YAML says nothing of it."""
    config, port = run_folders
    command = [
        sys.executable, "-m", "fewbits.cli", "train", str(config), "--nproc-per-node", "1", "--nnodes", "2",
        "--rdzv-endpoint", f"127.0.0.1:{port}",
    ]  # fmt: skip
    machines = [Terminal([*command, "--node-rank", str(n)]) for n in (0, 1)]
    told = [machine.all_it_says() for machine in machines]
    assert [machine.process.returncode for machine in machines] == [0, 0], told
    assert re.search(r"2/2 .*loss", told[0]) and not told[1], told  # one progress bar
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["status"] == "finished" and run["ranks"] == 2 and run["parallel"].startswith("ddp: 2 ranks")


@pytest.mark.parametrize(
    "words, why",
    [
        (("--node-rank", "0"), r"Timed out .* 1/2 clients joined\."),
        (("--node-rank", "1"), "The client socket has timed out .*"),
        ((), "RendezvousTimeoutError"),
    ],
)
def test_a_machine_that_is_alone_says_so(words, why, monkeypatch, tmp_path, capsys, request):
    """First for whom it waits, then, after torch's ten minutes (here one second), that they did not come."""
    short = ["--rdzv-conf", "timeout=1,join_timeout=1,read_timeout=1"]
    monkeypatch.setattr("fewbits.cli.launch.meeting_flags", lambda args: [*meeting_flags(args), *short])
    monkeypatch.setattr(rank_processes, "_LOOK_S", 0.1)
    monkeypatch.setattr(rank_processes, "_ALONE_S", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{free.getsockname()[1]}"
    args = flags("--nnodes", "2", "--rdzv-endpoint", there, *words)
    another = subprocess.Popen(["sleep", "60"])  # no rank: it was there before
    request.addfinalizer(another.kill)
    with pytest.raises(Unsupported, match=rf"not meet at {there} \({why}\); .* that all 2 were started\."):
        run_processes(["true"], args, count=1, logs=tmp_path / "logs")
    assert f"waiting at {there} for all 2 machines (--nnodes) to start." in capsys.readouterr().err


def test_a_meeting_that_fails_and_one_that_is_lost(monkeypatch, tmp_path):
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    def lose(command, args, *, count, logs):
        for name in folders:
            (logs / name).mkdir(parents=True)
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr("fewbits.cli.launch.run_by_torchrun", lose)
    there = flags("--nnodes", "2", "--rdzv-endpoint", "node0:29500")
    folders = []
    with pytest.raises(Unsupported, match=r"did not meet at node0:29500 \(The connection"):
        run_processes(["true"], there, count=1, logs=tmp_path / "early")
    folders = ["fewbits_x/attempt_0/0"]
    with pytest.raises(PeerLost, match=r"the launcher at node0:29500, where the machines met, is gone"):
        run_processes(["true"], there, count=1, logs=tmp_path / "late")


@pytest.mark.nightly
def test_a_machine_whose_launcher_is_killed_ends_the_run(tmp_path, run_folders):
    """Two launchers that meet as they come; of one only the launcher is killed, and its process goes too."""
    config, port = run_folders
    command = [
        sys.executable, "-m", "fewbits.cli", "train", str(config), "max_steps=100000", "save_steps=5",
        "--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}",
    ]  # fmt: skip
    first, second = (subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2))
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("run/checkpoints/checkpoint-*")):
            assert time.monotonic() < deadline and first.poll() is second.poll() is None
            time.sleep(0.2)
        holds_store = port in {c.laddr.port for c in psutil.Process(first.pid).net_connections("tcp")}
        killed, left = (second, first) if holds_store else (first, second)
        (orphan,) = psutil.Process(killed.pid).children()
        killed.kill()
        told = left.communicate(timeout=60)[1]  # what is promised: a minute
        orphan.wait(timeout=60)
    finally:
        first.kill()
        second.kill()
    assert left.returncode == 1
    # Whichever comes first: what the rank without a launcher says, or that it is gone.
    gone = rf"the launcher of rank \d of 2 \(on .+\) \(process {killed.pid}\) is gone"
    lost = r"rank \d of 2 \(on .+\) lost the connection to another rank \(.+\), which was probably killed"
    then = r"the checkpoints are whole: (look at the other ranks' logs, then )?go on with resume"
    assert re.search(rf"error: ({gone}|{lost}); {then}", told), told


@pytest.mark.nightly  # eight processes that import everything
@pytest.mark.parametrize("launcher", ["torchrun", "ours"])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(launcher, tmp_path, run_folders):
    """The store of the first attempt, with its dead addresses, is there for the second one too."""
    from safetensors.torch import load_file

    config, _ = run_folders
    words = ["train", str(config), "max_steps=40", "save_steps=5"]
    ours = [sys.executable, "-m", "fewbits.cli"]
    whole = [*ours, *words, f"output_dir={tmp_path / 'whole'}", "--nproc-per-node", "2"]
    assert subprocess.run(whole, timeout=240, check=False).returncode == 0
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *torchrun, "--max-restarts", "1", *ours[1:], *words]
    else:
        command = [*ours, *words, "--nproc-per-node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run/checkpoints/checkpoint-10").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        assert process.wait(150) == 0
    finally:
        process.kill()
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["status"] == "finished" and run["steps"] == 40
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    want, found = (
        load_file(next((tmp_path / name / "final").glob("*model.safetensors"))) for name in ("whole", "run")
    )
    assert want.keys() == found.keys()
    assert all((tensor == found[name]).all() for name, tensor in want.items())


def rank_of(launcher: int, rank: int) -> int:
    """The number of a rank's process."""
    for child in psutil.Process(launcher).children():
        if child.environ().get("RANK") == str(rank):
            return child.pid
    raise AssertionError(f"no rank {rank}")


@pytest.fixture
def run_folders(tmp_path):
    """A tiny run's configuration, and a free port."""
    import yaml
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.training.conftest import byte_tokenizer

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=64, **shape))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i} plus 1 is ", "completion": str(i + 1)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": str(tmp_path / "model"),
        "train_data": str(tmp_path / "rows.jsonl"),
        "batch_size": 2,
        "gradient_accumulation": 2,
        "max_steps": 2,
        "device": "cpu",
        "load_in_4bit": False,
        "report": False,
        "samples": 0,
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return path, free.getsockname()[1]
