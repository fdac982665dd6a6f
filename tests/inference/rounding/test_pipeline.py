"""From a folder and a file of rows to a packed folder: better than rounding alone, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.cli import main
from fewbits.errors import BadInput, Unsupported
from fewbits.inference.rounding import pipeline
from fewbits.inference.rounding.pipeline import calibrate_checkpoint
from fewbits.nn.linear import QuantizedLinear
from tests.models.loading import packed_state, same, save_tiny


def rows(folder: Path, count: int = 40) -> Path:
    file = folder / "rows.jsonl"
    said = ["the cat sat on the mat", "a bird flew over the wall", "rain fell all the day long"]
    lines = [{"text": f"{said[n % 3]} {n}. {said[n % 2]}"} for n in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_packed_folder_that_computes_nearer_to_the_model(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)
    words = {"windows": (8, 64)}
    result = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int3_g32", given, **words)
    assert result.tokens == 512 and len(result.layers) == len(result.output_errors) == 14
    plain, tokenizer = FastLanguageModel.from_pretrained(
        tmp_path / "base", load_in_4bit=False, dtype=torch.float32
    )
    recipe = {"name": "mine", "linear": {"weight": "int3_g32"}}
    nearest, _ = FastLanguageModel.from_pretrained(tmp_path / "base", recipe=recipe, dtype=torch.float32)
    chosen, _ = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert sum(isinstance(m, QuantizedLinear) for m in chosen.modules()) == 14
    ids = torch.tensor([tokenizer("the bird sat on the wall all the day").input_ids])
    with torch.no_grad():
        wanted, rounded, found = (m(input_ids=ids).logits for m in (plain, nearest, chosen))
    assert (found - wanted).norm() < 0.75 * (rounded - wanted).norm()
    assert not (tmp_path / "out.calibration").exists()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)
    words = {"method": method, "windows": (4, 64)}

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", given, progress=stop, **words)
    assert not (tmp_path / "out").exists()
    again = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", given, **words)
    whole = calibrate_checkpoint(tmp_path / "base", tmp_path / "whole", "int4_g32", given, **words)
    assert again.resumed == 1 and whole.resumed == 0
    assert again.output_errors == whole.output_errors
    models = [FastLanguageModel.from_pretrained(tmp_path / name)[0] for name in ("out", "whole")]
    assert same(packed_state(models[0]), packed_state(models[1]))
    norms = [m.model.layers[0].input_layernorm.weight for m in models]
    assert torch.equal(norms[0], norms[1])


def test_another_call_does_not_take_what_is_there(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", given, progress=stop,
                             windows=(4, 64))  # fmt: skip
    other = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int8", given, windows=(4, 64))
    assert other.resumed == 0


def test_bad_input_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)

    def call(file: Path = given, format: str = "int4_g32", **words: object) -> None:
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", format, file, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "gptq", None)
    with pytest.raises(BadInput, match="no method 'best'"):
        call(method="best")
    with pytest.raises(BadInput, match="no calibration file"):
        call(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match=r"has 50 tokens, and calibration needs 128 at least"):
        call(rows(tmp_path, 1))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": 3}\n')
    with pytest.raises(BadInput, match=r"line 2 of .* has neither"):
        call(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text("not json\n")
    with pytest.raises(BadInput, match=r"line 1 of .* is no JSON"):
        call(tmp_path / "bad.jsonl")
    with pytest.raises(Unsupported, match="rows of 64 do not fill"):
        call(format="int4_g128")
    with pytest.raises(BadInput, match="hold no text"):
        call(windows=(0, 64))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.calibration").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "base")
    words = ["quantize", str(tmp_path / "base"), str(tmp_path / "out"), "--calibrate", str(rows(tmp_path))]
    assert main([*words, "--recipe", "int8"]) == 1
    assert "give --format" in capsys.readouterr().err
    assert main([*words[:3], "--format", "int8", "--method", "awq"]) == 1
    assert "give --calibrate" in capsys.readouterr().err
    assert main([*words, "--format", "mxfp4", "--samples", "4", "--length", "64", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["method"] == "gptq" and len(shown["output_errors"]) == 14
