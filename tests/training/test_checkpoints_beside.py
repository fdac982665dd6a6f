"""Checkpoints of adapters are written beside the training: the same files, whole or not at all."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

from fewbits.errors import TrainingStopped
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.recipes import LoRA
from fewbits.training.checkpoints import beside, folders, model_state
from fewbits.training.checkpoints.manifest import fault_of
from fewbits.training.step.saving import SavingBeside
from tests.training.test_packing import make_examples
from tests.training.test_trainer import make_trainer, tiny

LENGTHS = [5, 9, 3, 12, 7, 4, 10, 6, 8, 11, 5, 7, 3, 9, 4, 6, 8, 10, 12, 5, 5, 6, 7, 8]


def trainer_in(folder: Path, **options: Any) -> Any:
    model = get_peft_model(tiny(), LoRA(r=2), seed=1)
    options = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 2} | options
    return make_trainer(folder, make_examples(LENGTHS), model, **options)


def files_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds, by file; names of the manifest's files for itself."""
    found: dict[str, Any] = {}
    for path in sorted(checkpoint.iterdir()):
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.name in ("optimizer.pt", "scheduler.pt"):
            found[path.name] = torch.load(path, weights_only=True)
        elif path.name not in ("README.md", "fewbits.json", "manifest.json"):
            found[path.name] = None if path.suffix in (".pth", ".bin") else path.name
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_the_files_are_those_of_a_run_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while a checkpoint is written, and does not change what is in it."""
    began, goes_on = threading.Event(), threading.Event()
    write = model_state.save_weights

    def slowly(model: Any, folder: Path, copies: Any) -> None:
        began.set()
        assert goes_on.wait(20)
        write(model, folder, copies)

    monkeypatch.setattr(model_state, "save_weights", slowly)
    ours = trainer_in(tmp_path / "a", max_steps=3, save_steps=2)
    one_step = ours.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = one_step(*args, **kwargs)
        if ours.state.global_step == 2 and len(ours._seen) == 0:  # the pass before the third update
            assert began.wait(20) and not (tmp_path / "a" / "checkpoint-2").exists()
            goes_on_soon.start()
        return loss

    goes_on_soon = threading.Timer(0.2, goes_on.set)  # by then the third update has been made
    monkeypatch.setattr(ours, "training_step", training_step)
    ours.train()
    monkeypatch.setattr(model_state, "save_weights", write)
    monkeypatch.setattr(SavingBeside, "takes", lambda *arguments: False)
    trainer_in(tmp_path / "b", max_steps=3, save_steps=2).train()
    for name in ("checkpoint-2", "checkpoint-3"):
        assert fault_of(tmp_path / "a" / name) is None
        mine, waited = files_of(tmp_path / "a" / name), files_of(tmp_path / "b" / name)
        assert mine.keys() == waited.keys() and {"optimizer.pt", folders.TRAINABLE_FILE} <= mine.keys()
        assert same(mine, waited)
    states = [
        json.loads((tmp_path / run / "checkpoint-2" / "trainer_state.json").read_text()) for run in "ab"
    ]
    assert [state["global_step"] for state in states] == [2, 2]


def test_a_full_disk_ends_the_run_with_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_state, "save_weights", full)
    with pytest.raises(TrainingStopped, match=r"checkpoint-1 could not be written because the disk is full"):
        trainer_in(tmp_path / "b").train()
    assert not list((tmp_path / "b").glob("*checkpoint*"))


def test_only_what_fits_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that all train, adapters of another kind and a host without room are written as ever."""

    def takes(trainer: Any) -> bool:
        trainer.create_optimizer_and_scheduler(4)
        return trainer._saving.takes(trainer.model, folders.trainable(trainer.model), trainer.optimizer)

    assert not takes(make_trainer(tmp_path, make_examples(LENGTHS)))
    ours = trainer_in(tmp_path)
    assert takes(ours)
    monkeypatch.setattr(beside, "_SHARE", 1 << 40)
    assert not takes(ours)


def test_memory_is_locked_once_after_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all checkpoints are copied there; it stands for a GPU's host here."""
    ours = trainer_in(tmp_path, max_steps=3)
    reserved: list[tuple[int, int]] = []
    reserve = beside.HostMemory.reserve

    def remember(self: Any, nbytes: int) -> None:
        reserved.append((ours.state.global_step, nbytes))
        reserve(self, nbytes)

    monkeypatch.setattr(beside.HostMemory, "reserve", remember)
    monkeypatch.setattr(
        ours, "reserve_memory", lambda: ours._saving.reserve(ours._plain_model(), ours.optimizer)
    )
    copies: list[int] = []
    write = model_state.save_weights

    def count(model: Any, folder: Path, weights: dict[str, Any]) -> None:
        copies.append(min(tensor.data_ptr() for tensor in weights.values()))
        write(model, folder, weights)

    monkeypatch.setattr(model_state, "save_weights", count)
    ours.train()
    assert len(reserved) == 1 and reserved[0][1] > 0
    assert len(copies) == 3 and len(set(copies)) == 1


def test_copies_are_of_their_own() -> None:
    tree = {"a": [torch.ones(2), (torch.zeros(1), 3)], "b": "text"}
    copy = beside.host_copy(tree)
    tree["a"][0].fill_(7)
    assert copy["a"][0].tolist() == [1, 1] and copy["a"][1][1] == 3 and copy["b"] == "text"


def test_copies_share_one_memory_and_no_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one of them has its bytes alone, and the next checkpoint's are made in the same place."""
    tree = [torch.arange(5.0), {"step": torch.tensor(3), "none": torch.zeros(0)}, torch.ones(3, 2).T.half()]
    memory = beside.HostMemory()
    memory.reserve(beside.nbytes_beside(tree))
    assert memory.nbytes == 3 * 64
    copies = beside.host_copy(tree, memory)
    assert same(copies, tree) and copies[2].is_contiguous()
    assert [copies[i].untyped_storage().nbytes() for i in (0, 2)] == [20, 12]
    torch.save(copies, tmp_path / "copies.pt")
    assert same(torch.load(tmp_path / "copies.pt", weights_only=True), tree)
    places = [copies[0].data_ptr(), copies[2].data_ptr()]
    memory.begin()
    again = beside.host_copy([tree[0] + 1, tree[2]], memory)
    assert again[0].data_ptr() == places[0] and again[0].tolist() == [1, 2, 3, 4, 5]
    beyond = beside.host_copy(torch.ones(100), memory)
    assert beyond.data_ptr() not in range(places[0], places[0] + memory.nbytes)
    monkeypatch.setattr(beside, "_SHARE", 1 << 40)
    assert beside.fits_beside(tree, memory=memory) and not beside.fits_beside(tree)
    assert not beside.fits_beside(tree, torch.ones(100), memory=memory)


def test_where_no_memory_is_locked_copies_are_made_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    memory = beside.HostMemory()
    with monkeypatch.context() as without:
        without.setattr(torch, "empty", refuse)
        memory.reserve(64)
    assert memory.nbytes == 0 and beside.host_copy(torch.ones(2), memory).tolist() == [1, 1]


def test_tensors_that_hold_tensors_stay_what_they_are() -> None:
    """As torchao's moments of 4 bits, which cannot be cloned, and whose copy by numbers is a plain tensor."""
    whole = TwoTensor(torch.ones(3), torch.zeros(3))
    copy = beside.host_copy({"exp_avg": whole})["exp_avg"]
    whole.a.fill_(5)
    assert type(copy) is TwoTensor and copy.a.tolist() == [1, 1, 1] and copy.b.tolist() == [0, 0, 0]
    optim = pytest.importorskip("torchao.optim.subclass_4bit")
    moments = optim.OptimState4bit.zeros((64, 64))
    moments.copy_(torch.linspace(-1, 1, 4096).view(64, 64))
    copy = beside.host_copy([moments])[0]
    assert type(copy) is type(moments) and torch.equal(copy.codes, moments.codes)
    assert copy.codes.data_ptr() != moments.codes.data_ptr()
    assert torch.equal(copy.dequantize(), moments.dequantize())
