"""From a folder and a file of rows to a packed folder: better than rounding alone, resumed, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.cli import main
from fewbits.errors import BadInput, Unsupported
from fewbits.inference.rounding import pipeline
from fewbits.inference.rounding.budget import Budget
from fewbits.inference.rounding.pipeline import CalibrationResult, calibrate_checkpoint
from fewbits.nn.linear import QuantizedLinear
from fewbits.recipes import get_recipe
from tests.models.loading import packed_state, same, save_tiny
from tests.models.mixtures import save_mixture
from tests.models.unwritten import save_unwritten


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


@pytest.mark.parametrize("method", ["gptq", "awq", "rotate+smooth+gptaq+learned:3"])
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
        calibrate_checkpoint(
            tmp_path / "base", tmp_path / "out", "int4_g32", given, progress=stop, windows=(4, 64)
        )
    other = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int8", given, windows=(4, 64))
    assert other.resumed == 0


def test_a_second_run_on_one_destination_is_refused(tmp_path: Path) -> None:
    """It removed the first one's work, or both wrote one file; the first goes on undisturbed."""
    save_tiny(tmp_path / "base")
    given, refused = rows(tmp_path), []

    def call(name: str, format: str, progress: Callable[[int, int], None] | None = None) -> CalibrationResult:
        words = {"windows": (4, 64), "progress": progress}
        return calibrate_checkpoint(tmp_path / "base", tmp_path / name, format, given, **words)

    def second(done: int, total: int) -> None:
        for format in ("int4_g32", "int8"):
            with pytest.raises(BadInput, match=r"out is being written by process \d+ on .*; wait until"):
                call("out", format)
            refused.append(format)

    found, want = call("out", "int4_g32", second), call("whole", "int4_g32")
    assert len(refused) == 4 and found.output_errors == want.output_errors
    models = [FastLanguageModel.from_pretrained(tmp_path / name)[0] for name in ("out", "whole")]
    assert same(packed_state(models[0]), packed_state(models[1]))
    assert {p.name for p in tmp_path.iterdir()} == {"base", "rows.jsonl", "out", "whole"}


def test_bad_input_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)

    def call(file: Path = given, format: str = "int4_g32", **words: object) -> None:
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", format, file, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "round_layer", None)
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
    assert main(words) == 1
    assert "--format NAME, a --recipe with formats" in capsys.readouterr().err
    assert main([*words, "--recipe", "int8", "--bits", "4"]) == 1
    assert "--bits chooses each linear's format, and so does --recipe" in capsys.readouterr().err
    assert main([*words[:3], "--format", "int8", "--method", "awq"]) == 1
    assert "give --calibrate" in capsys.readouterr().err
    assert main([*words, "--format", "mxfp4", "--samples", "4", "--length", "64", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["method"] == "gptq" and len(shown["output_errors"]) == 14


@pytest.mark.slow
def test_a_budget_buys_bits_where_they_save_most(tmp_path: Path) -> None:
    """Each linear's format comes from its own measured loss, and is what the folder says it is."""
    save_tiny(tmp_path / "base", hidden_size=64, intermediate_size=128)
    given = rows(tmp_path)
    formats = ("int2_g32_zp", "int4_g32_zp", "int8_g32")
    words = {"windows": (8, 64), "method": "nearest"}
    result = calibrate_checkpoint(
        tmp_path / "base", tmp_path / "out", Budget(bits=6.0, formats=formats), given, **words
    )
    counts = [layer.shape[0] * layer.shape[1] for layer in result.layers]
    bits = sum(8 * layer.bytes_after for layer in result.layers) / sum(counts)
    assert 5.0 < bits <= 6.0 and len({layer.format for layer in result.layers}) > 1
    assert len(result.drift) == 2 and result.drift[0] > 0
    losses = [step.loss for step in result.steps]
    assert losses == sorted(losses, reverse=True) and result.predicted_loss is not None
    loaded = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)[0]
    found = {n: m.format.name for n, m in loaded.named_modules() if isinstance(m, QuantizedLinear)}
    assert found == {layer.name: layer.format for layer in result.layers}
    with pytest.raises(BadInput, match=r"3 bits are fewer than the 3\.\d+ of the cheapest"):
        calibrate_checkpoint(
            tmp_path / "base", tmp_path / "o", Budget(bits=3.0, formats=formats), given, **words
        )


def test_measured_losses_are_kept(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)
    wanted = Budget(bits=5.5, formats=("int4_g32", "int8_g32"))
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(
            tmp_path / "base", tmp_path / "out", wanted, given, progress=stop, windows=(4, 64)
        )
    losses = json.loads((tmp_path / "out.calibration" / "losses.json").read_text())
    assert len(losses) == 5
    again = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", wanted, given, windows=(4, 64))
    whole = calibrate_checkpoint(tmp_path / "base", tmp_path / "whole", wanted, given, windows=(4, 64))
    assert again.output_errors == whole.output_errors and again.predicted_loss == whole.predicted_loss


def test_an_allocation_is_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against trying every choice of three formats for four linears, at the budgets on the line."""
    from itertools import product

    from fewbits.formats import get_format
    from fewbits.inference.rounding.budget import allocate

    names = ("int2_g32", "int4_g32", "int8_g32")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(4, 3, generator=generator).sort(-1, descending=True).values.tolist()
    losses = {f"l{i}": dict(zip(names, row, strict=True)) for i, row in enumerate(drawn)}
    shapes = {name: (32, 32 * (1 + i)) for i, name in enumerate(losses)}
    _, steps = allocate(losses, shapes, Budget(bits=9.1, formats=names))
    for step in steps:
        chosen, _ = allocate(losses, shapes, Budget(bits=step.bits, formats=names))
        loss = sum(losses[name][format.name] for name, format in chosen.items())
        best = min(
            sum(losses[n][f] for n, f in zip(losses, pick, strict=True))
            for pick in product(names, repeat=4)
            if sum(8 * get_format(f).nbytes(shapes[n]) for n, f in zip(losses, pick, strict=True))
            <= step.bits * sum(a * b for a, b in shapes.values()) * (1 + 1e-9)
        )
        assert loss == pytest.approx(best, rel=1e-9)


@pytest.mark.slow
def test_the_report_is_drawn_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "base")
    given = rows(tmp_path)
    start = ["quantize", str(tmp_path / "base"), str(tmp_path / "out"), "--calibrate", str(given)]
    size = ["--samples", "4", "--length", "64", "--json"]
    shown = main([*start, "--bits", "5.5", "--format", "int4_g32,int8_g32", "--report",
                  str(tmp_path / "loss.svg"), *size])  # fmt: skip
    assert shown == 0
    drawn = (tmp_path / "loss.svg").read_text()
    assert len(drawn) > 10_000
    told = json.loads(capsys.readouterr().out)
    assert len(told["drift"]) == 2 and told["predicted_loss"] > 0
    assert main([*start, "--format", "int4_g32", "--report", str(tmp_path / "loss.doc"), *size]) == 1
    assert main([*start, "--format", "int4_g32,int8_g32", *size]) == 1
    assert (
        main(["quantize", str(tmp_path / "base"), str(tmp_path / "o"), "--format", "int8", "--bits", "4"])
        == 1
    )
    said = capsys.readouterr().err
    assert "--bits N" in said and "--calibrate ROWS" in said


def test_gpt2s_weights_are_rounded_the_right_way_round(tmp_path: Path) -> None:
    """They are stored (K, N): rounding took rows for columns, or died of the shapes."""
    save_unwritten(tmp_path / "base", "gpt2")
    given = rows(tmp_path)
    budget = Budget(bits=8.6, formats=("int4_g32", "int8_g32"))
    for number, format in enumerate(("int8_g32", budget)):
        out = tmp_path / str(number)
        result = calibrate_checkpoint(tmp_path / "base", out, format, given, windows=(4, 64))
        plain, chosen = (
            FastLanguageModel.from_pretrained(f, dtype=torch.float32, load_in_4bit=False)[0]
            for f in (tmp_path / "base", out)
        )
        ids = torch.arange(3, 40)[None]
        with torch.no_grad():
            wanted, found = plain(ids).logits, chosen(ids).logits
        assert len(result.layers) == 8 and (found - wanted).norm() < 0.03 * wanted.norm()


def test_experts_that_stay_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_mixture(tmp_path / "base", "gpt_oss")
    words = ["--calibrate", str(rows(tmp_path)), "--format", "int4_g32", "--samples", "2", "--length", "64"]
    assert main(["quantize", str(tmp_path / "base"), str(tmp_path / "out"), *words]) == 0
    assert "98,304 values of experts stay as they are: their weights are stored" in capsys.readouterr().out


def test_a_folder_of_the_users_is_not_taken_away(tmp_path: Path) -> None:
    """The work is kept in NAME.calibration, where somebody may keep the rows."""
    save_tiny(tmp_path / "base")
    mine = tmp_path / "out.calibration"
    mine.mkdir()
    given = rows(mine)
    with pytest.raises(BadInput, match=r"where the work is kept, holds rows.jsonl, which is none of it"):
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", given, windows=(2, 64))
    assert given.is_file() and not (tmp_path / "out").exists()
    kept = tmp_path / "rows.jsonl"
    given.rename(kept)
    (mine / "state.json").write_text('{"of": ')  # of a run that was killed while it wrote it
    calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", kept, windows=(2, 64))
    assert not mine.exists()


def test_a_recipe_gives_each_linear_its_format(tmp_path: Path) -> None:
    """Stopped and taken up again it is the same; what it leaves alone stays; else it is refused."""
    save_tiny(tmp_path / "base")
    recipe = get_recipe(
        {
            "name": "mixed",
            "linear": {"weight": "int4_g32"},
            "overrides": {"*.mlp.down_proj": {"weight": "float8_e4m3_row"}, "*.v_proj": {"weight": "mxfp4"}},
            "skip": ["*.layers.1.self_attn.o_proj"],
        }
    )

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    call = [tmp_path / "base", tmp_path / "out", recipe, rows(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(*call, windows=(4, 64), progress=stop)  # type: ignore[arg-type]
    result = calibrate_checkpoint(*call, windows=(4, 64))  # type: ignore[arg-type]
    assert result.resumed == 1 and result.recipe == "mixed, gptq"
    loaded = FastLanguageModel.from_pretrained(tmp_path / "out", dtype=torch.float32)[0]
    found = {n: m.format.name for n, m in loaded.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(found) == 13 and "model.layers.1.self_attn.o_proj" not in found
    for name, format in found.items():
        leaf = name.rpartition(".")[2]
        assert format == {"down_proj": "float8_e4m3_row", "v_proj": "mxfp4"}.get(leaf, "int4_g32")
    assert {layer.name: layer.format for layer in result.layers} == found
    for change, message in (
        ({"head": {"weight": "int8"}}, "packs the output head, which calibration leaves"),
        ({"linear": {}, "overrides": {}}, "packs no weight of this model"),
        ({"linear": {"weight": "int8_tensor"}}, "int8_tensor is not rounded by calibration"),
    ):
        plain = {"name": "mixed", "linear": {"weight": "int4_g32"}, **change}
        call[1:3] = tmp_path / "other", get_recipe(plain)
        with pytest.raises((BadInput, Unsupported), match=message):
            calibrate_checkpoint(*call, windows=(4, 64))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_gguf_mix_is_calibrated_and_leaves_as_it_is(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each linear in the type that llama.cpp's mix gives it, nearer than the same mix without text."""
    pytest.importorskip("gguf")
    source = shared / "data" / "models" / "stories3m"
    text = (shared / "data" / "text" / "tinystories_val.txt").read_text(encoding="utf-8")[:40_000]
    given = tmp_path / "rows.jsonl"
    given.write_text("".join(json.dumps({"text": t}) + "\n" for t in text.split("<|endoftext|>")))
    words = ["quantize", str(source), "--format", "gguf:q3_k_m"]
    size = ["--calibrate", str(given), "--samples", "24", "--length", "128"]
    assert main([*words, str(tmp_path / "nearest")]) == 0
    assert main([*words, str(tmp_path / "out"), *size]) == 0
    models = [
        FastLanguageModel.from_pretrained(f, dtype=torch.float32, load_in_4bit=False)
        for f in (source, tmp_path / "nearest", tmp_path / "out")
    ]
    names = [{n: m.format.name for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
             for model, _ in models]  # fmt: skip
    assert names[1] == names[2] and {"gguf_q4_0", "gguf_q4_k"} < set(names[1].values())
    ids = torch.tensor(models[0][1]("Once upon a time there was a little girl who had a red ball.").input_ids)
    with torch.no_grad():
        plain, nearest, chosen = (m(input_ids=ids[None]).logits.log_softmax(-1) for m, _ in models)
    divergences = [float((plain.exp() * (plain - q)).sum(-1).mean()) for q in (nearest, chosen)]
    assert divergences[1] < 0.7 * divergences[0]
    model, tokenizer = models[2]
    receipt = model.save_pretrained_gguf(tmp_path / "gguf", tokenizer, "q3_k_m")
    back, _ = FastLanguageModel.from_pretrained(receipt.path, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            assert torch.equal(back.get_submodule(name).packed.codes, module.packed.codes), name
    capsys.readouterr()
    assert main([*words[:2], str(tmp_path / "o"), "--format", "gguf:q9"]) == 1
    assert "there is no GGUF method 'q9'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gptq", "awq", "compressed_tensors:w4a16", "torchao:int4_g32"])
def test_calibrated_codes_leave_as_they_are(tmp_path: Path, target: str) -> None:
    """Symmetric ones too, whose scales may be negative: an export moves scales by a rounding, and no code."""
    save_tiny(tmp_path / "base", hidden_size=64, intermediate_size=128)
    calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", rows(tmp_path), windows=(4, 64))
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "other"), "--to", target]) == 0
    before, after = (
        FastLanguageModel.from_pretrained(tmp_path / f, dtype=torch.float32)[0] for f in ("out", "other")
    )
    count = 0
    for name, module in before.named_modules():
        if isinstance(module, QuantizedLinear):
            wanted = module.packed.dequantize(torch.float32)
            found = after.get_submodule(name).packed.dequantize(torch.float32)
            assert bool((module.packed.scales < 0).any())
            torch.testing.assert_close(found, wanted, rtol=2.0**-8, atol=1e-6)
            count += 1
    assert count == 14
