"""Checkpoints of ranks: written by two, read by two, by four and by one, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits.errors import BadCheckpoint, SpecMismatch
from fewbits.kernels.optimizer.adamw import dequantize_moment
from fewbits.models.adapting.adapters import load_adapter
from fewbits.training.checkpoints.sharded import is_sharded_checkpoint, load_sharded, save_sharded
from tests.models.tiny import tiny
from tests.training.fsdp_workers import build, full, train
from tests.training.processes import run_ranks
from tests.training.sharded_workers import KINDS, optimizer_of, resume, write


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_ranks(write, 2, str(folder))


def test_two_ranks_go_on_with_the_same_bits(written) -> None:
    folder, before = written
    for mine, resumed in zip(before, run_ranks(resume, 2, str(folder)), strict=True):
        for kind in KINDS:
            assert equal(resumed[kind]["loaded"], mine[kind]["saved"])
            assert resumed[kind]["losses"] == mine[kind]["losses"]
            assert equal(resumed[kind]["weights"], mine[kind]["weights"])
            assert resumed[kind]["extra"] == {"step": 2}


def test_four_ranks_go_on(written) -> None:
    """The weights to the bit; the sums of four ranks in another order."""
    folder, before = written
    resumed = run_ranks(resume, 4, str(folder))
    for kind in KINDS:
        assert equal(resumed[0][kind]["loaded"], before[0][kind]["saved"])
        mean = [sum(step) / 4 for step in zip(*(r[kind]["losses"] for r in resumed), strict=True)]
        expected = [sum(step) / 2 for step in zip(*(r[kind]["losses"] for r in before), strict=True)]
        assert mean == pytest.approx(expected, rel=1e-6 if kind == "full" else 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on(written, kind) -> None:
    """Without a process group; `AdamW8bit` rounds its moments once more, in other blocks."""
    folder, before = written
    model = build(kind)
    optimizer = optimizer_of(kind, model)
    load_sharded(folder / kind / "checkpoint-2", model, optimizer)
    assert equal(full(model), before[0][kind]["saved"])
    losses, _ = train(model, 2, optimizer=optimizer)
    expected = [sum(step) / 2 for step in zip(*(r[kind]["losses"] for r in before), strict=True)]
    assert losses == pytest.approx(expected, rel=1e-6 if kind == "full" else 2e-3)


def test_moments_of_other_slices_are_rounded_once(written) -> None:
    """Against one process that never stopped: half an 8-bit step, 0.007 of a block's largest, five times."""
    folder, _ = written
    model, twin = build("nf4_dq"), build("nf4_dq")
    optimizer, other = optimizer_of("nf4_dq", model), optimizer_of("nf4_dq", twin)
    load_sharded(folder / "nf4_dq" / "checkpoint-2", model, optimizer)
    train(twin, 2, optimizer=other)
    compared = 0
    for a, b in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        mine, theirs = optimizer.state[a], other.state[b]
        assert mine["step"] == theirs["step"] == 2 and mine["m"].dtype == theirs["m"].dtype
        if "m_scales" in mine:
            m, expected = (dequantize_moment(s["m"], s["m_scales"], signed=True) for s in (mine, theirs))
            assert (m - expected).abs().max() <= 0.035 * expected.abs().max()
            compared += 1
    assert compared


def test_a_checkpoint_of_one_process_loads_in_one_process(tmp_path) -> None:
    model = build("nf4_dq")
    optimizer = optimizer_of("nf4_dq", model)
    train(model, 1, optimizer=optimizer)
    save_sharded(tmp_path, model, optimizer)
    assert is_sharded_checkpoint(tmp_path)
    twin = build("nf4_dq")
    other = optimizer_of("nf4_dq", twin)
    load_sharded(tmp_path, twin, other)
    assert train(model, 2, optimizer=optimizer)[0] == train(twin, 2, optimizer=other)[0]


def test_the_export_is_a_model_of_transformers(written) -> None:
    folder, before = written
    exported = folder / "full" / "hf"
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert equal(dict(loaded.named_parameters()), before[0]["full"]["saved"])


def test_the_export_of_adapters_is_an_adapter_of_peft(written) -> None:
    folder, before = written
    model = load_adapter(tiny("llama"), folder / "nf4_dq" / "hf", is_trainable=True)
    assert equal(full(model), before[0]["nf4_dq"]["saved"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_cannot_write_leaves_nothing(written, kind) -> None:
    folder, before = written
    told = ("full); the ch", "disk is full", "disk took no more bytes")  # torch's writer gives no number
    assert all(any(words in ranks[kind]["error"] for words in told) for ranks in before)
    assert sorted(path.name for path in (folder / kind).iterdir()) == ["checkpoint-2", "hf"]


def test_refusals(written, tmp_path) -> None:
    folder, _ = written
    with pytest.raises(SpecMismatch, match="another model"):
        load_sharded(folder / "full" / "checkpoint-2", build("nf4"))
    with pytest.raises(BadCheckpoint, match="no sharded checkpoint"):
        load_sharded(tmp_path, build("full"))
    model = build("nf4")
    save_sharded(tmp_path, model)
    with pytest.raises(SpecMismatch, match="no optimizer's state"):
        load_sharded(tmp_path, model, optimizer_of("nf4_dq", model))
    (tmp_path / "sharded" / ".metadata").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="damaged"):
        load_sharded(tmp_path, model)
