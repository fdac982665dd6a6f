"""Folders appear whole or not at all; what was there is never lost, mixed or overwritten unasked."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fewbits import FastLanguageModel
from fewbits.errors import BadInput
from fewbits.inference.export import quantize_checkpoint
from fewbits.models.folders import whole_folder as module
from fewbits.models.folders.checkpoint import inspect_folder
from fewbits.models.folders.whole_folder import ADAPTER, check_destination, remove_leftovers, whole_folder
from tests.forks import fork
from tests.models.loading import perturb, save_tiny

# Python announces these before it does them.
EVENTS = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.chmod",
    "open",
    "shutil.rmtree",
    "ctypes.dlsym",
}


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.partial"))


def child(work: Callable[[], object], *, kill_at: int = 0, after: float | None = None) -> int:
    """Run ``work`` in a forked process: killed before its n-th change of files, or after some seconds."""
    pid = fork()
    if pid == 0:
        count = 0

        def count_changes(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            # What is only read changes nothing: a library that is imported late is hundreds of files.
            reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)  # type: ignore[operator]
            if event not in EVENTS or reads:
                return
            count += 1
            if count == kill_at:
                count += 1  # os.kill is announced too
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            signal.alarm(120)
            if kill_at:
                sys.addaudithook(count_changes)
            work()
        except BaseException as error:  # noqa: BLE001 - told to the test by the status
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    deadline = None if after is None else time.perf_counter() + after
    while deadline is not None and time.perf_counter() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    if deadline is not None:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write(target: Path, text: str, *files: str, **options: object) -> None:
    with whole_folder(target, **options) as folder:
        for name in files:
            (folder / name).write_text(text)


def test_a_folder_appears_whole(tmp_path):
    with whole_folder(tmp_path / "a" / "b") as folder:
        (folder / "config.json").write_text("{}")
        assert not (tmp_path / "a" / "b").exists()
    assert names(tmp_path / "a") == {"b"} and names(tmp_path / "a" / "b") == {"config.json"}


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "a") as folder:
        (folder / "config.json").write_text("{}")
        raise RuntimeError
    assert names(tmp_path) == set()


def test_an_existing_folder_keeps_its_other_files_and_loses_stale_weights(tmp_path):
    target = tmp_path / "a"
    target.mkdir()
    for name in ("model.safetensors", "notes.txt", "config.json"):
        (target / name).write_text("old")
    with whole_folder(target, overwrite=None) as folder:
        for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"):
            (folder / name).write_text("new")
    assert names(target) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "config.json",
        "notes.txt",
    }
    assert (target / "config.json").read_text() == "new" and (target / "notes.txt").read_text() == "old"
    assert names(tmp_path) == {"a"}


def test_only_files_named_as_written_before_go(tmp_path):
    target = tmp_path / "a"
    (target / "deep" / "empty").mkdir(parents=True)
    (target / "gone").mkdir()
    for name in ("config.json", "tokenizer.json", "deep/w", "deep/mine", "gone/w", "model_ema.safetensors"):
        (target / name).write_text("old")
    (target / "deep").chmod(0o700)
    (target / "link").symlink_to("deep")
    written = frozenset({"config.json", "tokenizer.json", "deep/w", "gone/w", "../b"})
    with whole_folder(target, overwrite=True, written=written) as folder:
        (folder / "config.json").write_text("new")
        (folder / "deep").mkdir()
        (folder / "deep" / "w").write_text("new")
    assert names(target) == {"config.json", "deep", "link", "model_ema.safetensors"}
    assert names(target / "deep") == {"w", "mine", "empty"} and (target / "link").is_symlink()
    assert (target / "config.json").read_text() == (target / "deep" / "w").read_text() == "new"
    assert (target / "deep" / "mine").read_text() == (target / "model_ema.safetensors").read_text() == "old"
    with (
        pytest.raises(BadInput, match="deep/mine is not of the earlier call"),
        whole_folder(target, overwrite=True, written=written) as folder,
    ):
        (folder / "deep").mkdir()
        (folder / "deep" / "mine").write_text("new")
    assert (target / "deep" / "mine").read_text() == "old" and names(tmp_path) == {"a"}


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "model", Path("/proc/fewbits/model")):
        with pytest.raises(BadInput, match=r"^[^\n]+$"), whole_folder(target):
            pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_sentence(tmp_path, code):
    with pytest.raises(BadInput, match="disk is full") as caught, whole_folder(tmp_path / "a") as folder:
        (folder / "part").write_text("half")
        raise OSError(code, "No space left on device")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == set()


def test_a_taken_folder_is_refused_unless_asked_for(tmp_path):
    with pytest.raises(BadInput, match="give its name in place of -"):
        check_destination("-")
    write(tmp_path / "a", "old", "config.json", "model.safetensors", "tokenizer.json")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"exists and is not empty; [^\n]*--overwrite"):
        write(tmp_path / "a", "new", "config.json")
    assert (tmp_path / "a" / "config.json").read_text() == "old"
    write(tmp_path / "a", "new", "config.json", "model-00001-of-00001.safetensors", overwrite=True)
    # all of the old model is gone, and nothing else
    assert names(tmp_path / "a") == {"config.json", "model-00001-of-00001.safetensors", "notes.txt"}
    assert (tmp_path / "a" / "config.json").read_text() == "new"
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize("stood_in", [False, True])
def test_of_two_that_write_one_folder_the_first_to_end_has_it(tmp_path, monkeypatch, stood_in):
    """Nothing was there when both began, and neither was told to replace anything."""
    target = tmp_path / "out"
    if stood_in:
        target.mkdir()
        monkeypatch.chdir(target)
    meanwhile = "was written by another process in the meantime"
    with pytest.raises(BadInput, match=meanwhile), whole_folder(target) as late:
        (late / "config.json").write_text("late")
        if stood_in:  # whoever else uses fewbits is refused at once: there is a hidden folder in it
            with pytest.raises(BadInput, match="is not empty"):
                check_destination(target)
            (target / "config.json").write_text("early")
        else:
            with whole_folder(target) as early:
                (early / "config.json").write_text("early")
    assert (target / "config.json").read_text() == "early"
    assert names(tmp_path) == {"out"} and names(target) == {"config.json"}


def test_only_a_folder_of_the_same_kind_is_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("")
    write(tmp_path / "adapter", "", "adapter_config.json")
    write(tmp_path / "both", "", "adapter_config.json", "config.json")
    for taken in ("home", "adapter", "both"):
        with pytest.raises(BadInput, match="no folder of a model alone"):
            check_destination(tmp_path / taken, overwrite=True)
    check_destination(tmp_path / "adapter", overwrite=True, marker=ADAPTER)


@pytest.mark.parametrize("overwrite", [None, False, True])
def test_what_is_read_is_never_overwritten(tmp_path, monkeypatch, overwrite):
    base = tmp_path / "models" / "base"
    write(base, "", "config.json")
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "alias").symlink_to(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    spellings = (base, f"{base}/", "models/base", "models/../models/base/", "link", "alias/base", "models")
    for target in spellings:
        for source in (base, "link", "alias/base/"):
            with pytest.raises(BadInput, match=r"never overwritten|not empty|no folder of a model"):
                check_destination(target, overwrite=overwrite, protected=[source])
    for target in spellings[:-1]:
        with pytest.raises(BadInput, match="never overwritten"):
            check_destination(target, overwrite=True, protected=[base])
    check_destination(base / "merged", overwrite=overwrite, protected=[base])  # beside the files is no harm


def test_a_link_means_the_folder_it_points_to(tmp_path):
    write(tmp_path / "disk" / "model", "old", "config.json")
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "model")
    write(tmp_path / "model", "new", "config.json", overwrite=True)
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "disk" / "model" / "config.json").read_text() == "new"


def test_copies_by_hard_links_keep_their_content(tmp_path):
    """``cp -al base copy``: the files of both are the same ones on the disk."""
    write(tmp_path / "base", "old", "config.json", "model.safetensors")
    (tmp_path / "base" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "base", tmp_path / "copy", copy_function=os.link)
    write(tmp_path / "copy", "new", "config.json", "model.safetensors", overwrite=True)
    assert {(tmp_path / "base" / n).read_text() for n in ("config.json", "model.safetensors")} == {"old"}
    assert (tmp_path / "copy" / "notes.txt").read_text() == "mine"


def test_the_folder_that_one_stands_in(tmp_path, monkeypatch):
    """It cannot change places, as a mount point cannot: empty it is filled, otherwise refused."""
    monkeypatch.chdir(tmp_path)
    write(Path(), "new", "config.json", "model.safetensors")
    assert names(tmp_path) == {"config.json", "model.safetensors"}
    with pytest.raises(BadInput, match="cannot be replaced as a whole"):
        write(Path(), "newer", "config.json", overwrite=None)
    assert (tmp_path / "config.json").read_text() == "new"


@pytest.mark.parametrize(
    "exchange", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)]
)
def test_killed_before_any_change_of_a_file(tmp_path, monkeypatch, exchange):
    """At each of them: what is there is the old or the new whole, and the next run leaves nothing else."""
    if not exchange:
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    target, files = tmp_path / "a", ("config.json", "model.safetensors", "tokenizer.json")
    seen = set()
    for moment in range(1, 200):
        shutil.rmtree(target, ignore_errors=True)
        write(target, "old", *files)
        (target / "notes.txt").write_text("mine")
        status = child(lambda: write(target, "new", *files, overwrite=True), kill_at=moment)
        if exchange:
            assert target.is_dir(), moment
        remove_leftovers(tmp_path)
        for partial in partials(tmp_path):  # killed before it could say whose it is
            assert names(partial) <= {"owner.json"}
            os.utime(partial, (0, 0))
        remove_leftovers(tmp_path)
        assert names(tmp_path) == {"a"} and names(target) == {*files, "notes.txt"}, moment
        texts = {(target / name).read_text() for name in files}
        assert len(texts) == 1, f"mixed at {moment}"
        seen |= texts
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0 and moment > 15 and seen == {"old", "new"}


def test_only_what_dead_processes_left_is_removed(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": module._start_of(os.getpid())}
    owners = {
        "00000001": ({**mine, "pid": int(dead.stdout)}, False),
        "00000002": (mine, True),
        "00000003": ({**mine, "host": "elsewhere", "pid": int(dead.stdout)}, True),
        "00000004": ({**mine, "started": "1"}, not Path("/proc/self/stat").is_file()),
    }
    for number, (owner, _) in owners.items():
        folder = tmp_path / f".model.{number}.partial"
        (folder / "new").mkdir(parents=True)
        (folder / "owner.json").write_text(json.dumps(owner))
    (tmp_path / ".model.00000005.partial").mkdir()  # just made
    (tmp_path / ".mine.partial").mkdir()  # not of ours
    write(tmp_path / "other", "", "config.json")
    stay = {f".model.{number}.partial" for number, (_, stays) in owners.items() if stays}
    assert names(tmp_path) == {"other", ".mine.partial", ".model.00000005.partial", *stay}


def _whole(folder: Path) -> tuple[float, ...]:
    """A value of each weight; refuses a folder that is not whole."""
    checkpoint = inspect_folder(folder)
    tensors = {k: t for file in checkpoint.files for k, t in load_file(file).items()}
    assert tensors.keys() == checkpoint.tensors.keys()
    return tuple(float(tensors[name].float().sum()) for name in sorted(tensors))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("what", "kills"),
    [
        pytest.param("merge", 2, marks=pytest.mark.slow),
        pytest.param("merge", 25, marks=pytest.mark.nightly),
        pytest.param("quantize", 25, marks=pytest.mark.nightly),
    ],
)
def test_killed_at_random_moments(tmp_path, what, kills, record_property):
    """Merging in shards over an older merge, and quantising over an older one."""
    save_tiny(tmp_path / "base", shard="60KB")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4)

    def work(seed: int) -> None:
        if what == "merge":
            perturb(model, seed=seed)
            model.save_pretrained_merged(tmp_path / "out", tokenizer, overwrite=True)
        else:
            recipe = ("qlora_nf4", "int8")[seed % 2]
            quantize_checkpoint(tmp_path / "base", tmp_path / "out", recipe, overwrite=True)

    wholes = []
    for seed in (1, 2):
        started = time.perf_counter()
        assert child(lambda seed=seed: work(seed)) == 0
        seconds = time.perf_counter() - started
        wholes.append(_whole(tmp_path / "out"))
    assert wholes[0] != wholes[1]
    base, choose, killed, found = _whole(tmp_path / "base"), random.Random(7), 0, []
    while killed < kills:
        # half of the moments at the end, where folders change places
        after = seconds * (choose.random() if killed % 2 else choose.uniform(0.8, 1.1))
        started = time.perf_counter()
        if child(lambda: work(1 + len(found) % 2), after=after) == -signal.SIGKILL:
            killed += 1
        else:  # it came to its end before: the machine has become faster
            seconds = time.perf_counter() - started
        found.append(wholes.index(_whole(tmp_path / "out")))  # ValueError: neither old nor new
        assert _whole(tmp_path / "base") == base
    assert child(lambda: work(1)) == 0 and _whole(tmp_path / "out") == wholes[0]
    for left in tmp_path.glob(".*.partial"):  # killed before it said whose it is: it has a minute's grace
        assert {path.name for path in left.iterdir()} <= {"owner.json"}
        os.utime(left, (0, 0))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"base", "out"}
    record_property("kills", killed)
    record_property("left the first", len(found) - sum(found))
    record_property("left the second", sum(found))


def test_what_is_written_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    """Writers of weights begin with files that only their owner may read; what was there keeps its mode."""
    save_tiny(tmp_path / "plain")
    before = os.umask(0o022)
    try:
        quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", "qlora_nf4")
        (tmp_path / "packed/mine.txt").touch(0o600)
        quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", "qlora_nf4", overwrite=True)
    finally:
        os.umask(before)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in (tmp_path / "packed").iterdir()}
    assert modes.pop("mine.txt") == "0o600"
    assert "model.safetensors" in modes and set(modes.values()) == {"0o644"}, modes
