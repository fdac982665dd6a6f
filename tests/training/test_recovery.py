"""Distillation after rounding: it lowers the divergence, keeps codes and size, is resumed, and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fewbits import FastLanguageModel
from fewbits.cli import main
from fewbits.errors import BadInput, Unsupported
from fewbits.inference.export import quantize_checkpoint
from fewbits.models.writing.calibration_rows import read_windows
from fewbits.nn.linear import QuantizedLinear
from fewbits.training.calibration import recovery
from fewbits.training.calibration.recovery import Recovery, recover_checkpoint
from fewbits.training.calibration.recovery_adapter import FOLDER, first_branch
from fewbits.training.calibration.recovery_text import written_windows
from tests.inference.rounding.test_pipeline import rows
from tests.models.loading import packed_state, same, save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recovery")
    save_tiny(folder / "base")
    for name in ("int3_g32", "mxfp4"):
        quantize_checkpoint(folder / "base", folder / name, {"name": name, "linear": {"weight": name}})
    rows(folder)
    return folder


@pytest.fixture(autouse=True)
def a_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this clock, so that the number of steps is the same on every machine."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(recovery.time, "perf_counter", lambda: next(ticks))


def recover(
    folders: Path, target: Path, name: str = "int3_g32", minutes: float = 0.1, **words: Any
) -> recovery.RecoveryResult:
    how = Recovery(minutes, words.pop("rank", 0), words.pop("written", 0))
    rows = folders / "rows.jsonl"
    return recover_checkpoint(folders / "base", folders / name, target, rows, how, length=32, **words)


def test_scales_and_norms_learn_and_codes_stay(folders: Path, tmp_path: Path) -> None:
    result = recover(folders, tmp_path / "out")
    assert result.steps == 6 and result.after < result.before
    before, after = (
        FastLanguageModel.from_pretrained(f)[0] for f in (folders / "int3_g32", tmp_path / "out")
    )
    pairs = zip(before.named_modules(), after.named_modules(), strict=True)
    packed = [(a, b) for (_, a), (_, b) in pairs if isinstance(a, QuantizedLinear)]
    assert len(packed) == 14
    assert all(torch.equal(a.packed.codes, b.packed.codes) for a, b in packed)
    assert not any(torch.equal(a.packed.parts["scales"], b.packed.parts["scales"]) for a, b in packed)
    assert not torch.equal(before.model.norm.weight, after.model.norm.weight)
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in (before, after)]
    assert sizes[0] == sizes[1]
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


@pytest.mark.slow
def test_an_interrupted_recovery_goes_on(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and whole runs are the same steps."""
    monkeypatch.setattr(recovery, "_KEEP_S", 0.0)
    done = 0

    def stop(seconds: int, of: int) -> None:
        nonlocal done
        done += 1
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(folders, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.recovery").is_dir()
    again, whole = (recover(folders, tmp_path / name) for name in ("out", "whole"))
    assert again.steps == whole.steps == 6 and again.after == whole.after
    models = [FastLanguageModel.from_pretrained(tmp_path / name)[0] for name in ("out", "whole")]
    assert same(packed_state(models[0]), packed_state(models[1]))
    assert {p.name for p in tmp_path.iterdir()} == {"out", "whole"}


@pytest.mark.slow
def test_harm_is_not_taken(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_RATE", 10.0)
    result = recover(folders, tmp_path / "out")
    assert result.after == result.before and "none is taken" in result.sentence
    models = [FastLanguageModel.from_pretrained(f)[0] for f in (folders / "int3_g32", tmp_path / "out")]
    assert same(packed_state(models[0]), packed_state(models[1]))


def test_a_format_with_other_scales_trains_its_norms(folders: Path, tmp_path: Path) -> None:
    result = recover(folders, tmp_path / "out", "mxfp4")
    assert result.trained == 5 * 64 and result.after <= result.before


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_stopped(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(folders / "base"), str(tmp_path / "out"), "--format", "int3_g32"]
    words += ["--calibrate", str(folders / "rows.jsonl"), "--samples", "4", "--length", "32"]
    with monkeypatch.context() as changed:
        changed.setattr(recovery, "write_packed", None)
        assert main([*words, "--recover", "0.1"]) != 0
    folder_names = {p.name.partition("-")[0] for p in tmp_path.iterdir()}
    assert folder_names == {"out.rounded", "out.recovery"}
    capsys.readouterr()
    assert main([*words, "--recover", "0.1", "--json"]) == 0
    told = capsys.readouterr()
    numbers = json.loads(told.out)["recovery"]
    assert "was rounded by an earlier call" in told.err and numbers["after"] < numbers["before"]
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert main([*words[:-6], "--recover", "1"]) == 1
    assert "--recover says how to calibrate" in capsys.readouterr().err


@pytest.mark.slow
def test_a_replaced_source_is_rounded_anew(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What waits beside the destination is known by the source's files, not by its path alone."""
    source = tmp_path / "base"
    shutil.copytree(folders / "base", source)
    words = ["quantize", str(source), str(tmp_path / "out"), "--format", "int4_g32", "--recover", "0.05"]
    words += ["--calibrate", str(folders / "rows.jsonl"), "--samples", "4", "--length", "32", "--json"]
    with monkeypatch.context() as changed:
        changed.setattr(recovery, "write_packed", None)
        assert main(words) != 0
    model = FastLanguageModel.from_pretrained(source, load_in_4bit=False)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(source)
    capsys.readouterr()
    assert main(words) == 0
    told = capsys.readouterr()
    assert "was rounded by an earlier call" not in told.err and "output_errors" in json.loads(told.out)
    packed = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)[0]
    weight = model.model.layers[0].mlp.up_proj.weight.float()
    decoded = packed.model.layers[0].mlp.up_proj.packed.dequantize(torch.float32)
    assert (decoded - weight).norm() < 0.2 * weight.norm()


def test_what_cannot_be_recovered_is_refused(folders: Path, tmp_path: Path) -> None:
    for minutes in (0.0, float("nan")):
        with pytest.raises(BadInput, match="minutes recover nothing"):
            Recovery(minutes)
    for words, said in (({"rank": -1}, "no rank of -1"), ({"written": -5}, "no text has -5 tokens")):
        with pytest.raises(BadInput, match=said):
            Recovery(1.0, **words)
    with pytest.raises(Unsupported, match="base is not packed; quantise it first"):
        recover(folders, tmp_path / "out", "base")
    few = rows(tmp_path, 1)
    with pytest.raises(BadInput, match="has 50 tokens, and calibration needs 64"):
        recover_checkpoint(
            folders / "base", folders / "mxfp4", tmp_path / "out", few, Recovery(1.0), length=32
        )
    assert not (tmp_path / "out").exists()


def test_a_step_that_is_not_finite_is_left_out(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = recovery._Learner.loss, 0

    def sometimes_nan(learner: recovery._Learner, windows: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        loss = real(learner, windows)
        return loss * torch.nan if torch.is_grad_enabled() and calls == 3 else loss

    monkeypatch.setattr(recovery._Learner, "loss", sometimes_nan)
    result = recover(folders, tmp_path / "out")
    assert result.steps == 6 and result.after < result.before


def test_linears_that_round_their_input_keep_their_scales(folders: Path, tmp_path: Path) -> None:
    """What is measured is the model that is written."""
    linear = {"weight": "int4_g32", "activation": "int8"}
    quantize_checkpoint(folders / "base", tmp_path / "rounded", {"name": "both", "linear": linear})
    words = {"length": 32}
    recover_checkpoint(
        folders / "base",
        tmp_path / "rounded",
        tmp_path / "out",
        folders / "rows.jsonl",
        Recovery(0.1),
        **words,
    )
    before, after = (FastLanguageModel.from_pretrained(tmp_path / f)[0] for f in ("rounded", "out"))
    assert same(packed_state(before), packed_state(after))


def test_an_adapter_is_trained_beside_and_opened_by_its_folder(folders: Path, tmp_path: Path) -> None:
    """What was measured is what the adapter's folder gives; the model itself is whole without it."""
    result = recover(folders, tmp_path / "out", rank=2, written=100)
    numbers = [(module.in_features + module.out_features) * 2 for module in packed_linears(tmp_path / "out")]
    assert len(numbers) == 14 and result.adapter_numbers == sum(numbers)
    assert result.after < result.before and result.adapter == tmp_path / "out" / "recovery_adapter"
    assert result.written == 128 and "open that folder" in result.sentence
    plain, tokenizer = FastLanguageModel.from_pretrained(folders / "base", load_in_4bit=False)
    both, _ = FastLanguageModel.from_pretrained(result.adapter)
    bare, _ = FastLanguageModel.from_pretrained(tmp_path / "out")
    windows = read_windows(folders / "rows.jsonl", tokenizer, length=32, count=8192, least=64)
    held_out = windows[: min(8, max(len(windows) // 10, 1))]
    found = [float(divergence(plain, model, held_out)) for model in (both, bare)]
    assert found[0] == pytest.approx(result.after, rel=1e-4) and found[1] > found[0]
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    (tmp_path / "out").rename(tmp_path / "moved")
    moved, _ = FastLanguageModel.from_pretrained(tmp_path / "moved" / FOLDER)
    assert float(divergence(plain, moved, held_out)) == found[0]


def packed_linears(folder: Path) -> list[QuantizedLinear]:
    model, _ = FastLanguageModel.from_pretrained(folder)
    return [m for m in model.modules() if isinstance(m, QuantizedLinear)]


@torch.no_grad()
def divergence(plain: Any, model: Any, windows: torch.Tensor) -> torch.Tensor:
    said, heard = (m.eval()(input_ids=windows).logits.float().log_softmax(-1) for m in (plain, model))
    return (said.exp() * (said - heard)).sum(-1).mean()


def test_a_format_without_free_scales_gets_an_adapter(folders: Path, tmp_path: Path) -> None:
    result = recover(folders, tmp_path / "out", "mxfp4", rank=4)
    assert result.after < result.before and result.adapter is not None


@pytest.mark.slow
def test_an_interrupted_adapter_goes_on_with_the_same_text(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_KEEP_S", 0.0)
    calls = 0

    def stop(seconds: int, of: int) -> None:
        nonlocal calls
        calls += of == 6  # seconds, not tokens
        if calls == 4:
            raise KeyboardInterrupt

    words = {"rank": 2, "written": 100}
    with pytest.raises(KeyboardInterrupt):
        recover(folders, tmp_path / "out", progress=stop, **words)
    with monkeypatch.context() as changed:
        changed.setattr(recovery, "written_windows", None)  # what was written is kept
        again = recover(folders, tmp_path / "out", **words)
    whole = recover(folders, tmp_path / "whole", **words)
    assert again.steps == whole.steps == 6 and again.after == whole.after
    weights = [load_file(tmp_path / name / FOLDER / "adapter_model.safetensors") for name in ("out", "whole")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_older_adapter_goes_with_the_model_that_it_was_of(folders: Path, tmp_path: Path) -> None:
    recover(folders, tmp_path / "out", rank=2)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    result = recover(folders, tmp_path / "out", overwrite=True)
    assert result.adapter is None and not (tmp_path / "out" / FOLDER).exists()
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_the_first_branch_is_the_best_of_its_rank() -> None:
    """Of a matrix of that rank all, of another as much as the decomposition says, inputs weighted."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(24, 3, generator=generator) @ torch.randn(3, 40, generator=generator)
    inputs = torch.randn(100, 40, generator=generator) @ torch.randn(40, 40, generator=generator)
    moment = inputs.t() @ inputs / 100
    a, b = first_branch(low, moment, 3)
    assert a.shape == (3, 40) and b.shape == (24, 3) and (b @ a - low).norm() < 1e-3 * low.norm()
    lost = torch.randn(24, 40, generator=generator)
    a, b = first_branch(lost, moment, 8)
    lower = torch.linalg.cholesky(moment + 0.01 * moment.diagonal().mean() * torch.eye(40))
    best, found = (
        torch.linalg.svdvals(lost @ lower)[8:].square().sum().sqrt(),
        ((b @ a - lost) @ lower).norm(),
    )
    assert best <= found * (1 + 1e-4) and found < 1.05 * best
    assert (inputs @ (b @ a - lost).t()).norm() < 0.8 * (inputs @ lost.t()).norm()
    a, b = first_branch(lost, torch.zeros(40, 40), 4)
    assert a.isfinite().all() and b.isfinite().all() and first_branch(lost[:5], None, 64)[0].shape == (5, 40)


def test_written_text_begins_as_the_rows_and_is_the_models(folders: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(folders / "base", load_in_4bit=False)
    windows = read_windows(folders / "rows.jsonl", tokenizer, length=32, count=16, least=64)
    text = written_windows(model.eval(), windows, 33)
    assert text.shape == (2, 32) and torch.equal(text[:, :4], windows[:2, :4])
    assert torch.equal(text, written_windows(model, windows, 33))
    many = written_windows(model, windows[:1, :], 3200)
    with torch.no_grad():
        shares = model(input_ids=windows[:1, :4]).logits[0, -1].float().softmax(-1)
    counts = torch.bincount(many[:, 4], minlength=len(shares)) / len(many)
    assert (counts - shares).abs().max() < 5 * (0.25 / len(many)) ** 0.5  # five times the largest deviation
