"""Mixtures of experts, calibrated: each expert by its own tokens, or where it has none by what others saw."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits import FastLanguageModel
from fewbits.cli import main
from fewbits.errors import Unsupported
from fewbits.formats import FORMATS
from fewbits.host.spec import spec_for
from fewbits.inference.rounding.activations import first_inputs, moments_of
from fewbits.inference.rounding.budget import Budget
from fewbits.inference.rounding.experts import filled, split_layer
from fewbits.inference.rounding.gptq import gptq
from fewbits.inference.rounding.pipeline import calibrate_checkpoint
from fewbits.models.packing.experts import expert_rules, own_names
from fewbits.nn.experts import QuantizedExperts
from fewbits.recipes import Recipe, Rule
from tests.inference.rounding.test_pipeline import rows
from tests.models.loading import same, tokenizer
from tests.models.mixtures import mixture, save_mixture

LAYER = "model.layers.0"


def opened(folder: Path, **words: Any) -> Any:
    return FastLanguageModel.from_pretrained(folder, dtype=torch.float32, **words)[0]


def state(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a packed folder's model."""
    return dict(opened(folder).state_dict())


def one_word(folder: Path) -> Path:
    """Rows of one token: every position computes the same, so that two experts of a layer are reached."""
    file = folder / "one.jsonl"
    file.write_text(json.dumps({"text": "a" * 400}) + "\n")
    return file


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "granitemoe"])
def test_it_computes_nearer_to_the_model_than_rounding_does(tmp_path: Path, kind: str) -> None:
    save_mixture(tmp_path / "base", kind)
    given = rows(tmp_path, 60)
    result = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int3_g32", given, windows=(8, 64))
    experts = [error for error in result.layers if ".experts." in error.name]
    assert len(experts) == (2 if kind == "qwen2_moe" else 4)
    assert all(result.output_errors[error.name] < error.relative_error**2 for error in experts)
    plain = opened(tmp_path / "base", load_in_4bit=False)
    nearest = opened(tmp_path / "base", recipe={"name": "mine", "linear": {"weight": "int3_g32"}})
    chosen = opened(tmp_path / "out")
    assert {type(m) for n, m in chosen.named_modules() if n.endswith(".experts")} == {QuantizedExperts}
    text = "rain fell on the wall and a bird sat on the mat all the day long. the cat flew over it"
    ids = torch.tensor([tokenizer()(text).input_ids])
    with torch.no_grad():
        wanted, rounded, found = (m(input_ids=ids).logits for m in (plain, nearest, chosen))
    assert (found - wanted).norm() < 0.9 * (rounded - wanted).norm()


def inputs_of(kind: str, windows: Tensor) -> tuple[Any, Any, list[Tensor], dict[str, Any]]:
    model = mixture(kind)
    hidden, words = first_inputs(model, [LAYER], windows, torch.device("cpu"))
    return model, model.get_submodule(LAYER), hidden, words[LAYER]


def split(model: Any, format: str = "int4_g32") -> Any:
    recipe = Recipe(name="mine", linear=Rule(weight=FORMATS[format]))
    return split_layer(model, LAYER, spec_for(model), expert_rules(model, spec_for(model), recipe))


@torch.no_grad()
def test_moments_are_those_of_the_tokens_that_are_sent_to_an_expert() -> None:
    """By hand: the router's choices and the host's own weights, also with other inputs beside them."""
    windows = torch.randint(3, 90, (3, 50), generator=torch.Generator().manual_seed(4))
    model, layer, hidden, words = inputs_of("qwen3_moe", windows)
    other = [x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) for x in hidden]
    seen: list[tuple[Tensor, ...]] = []
    hook = layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    for x in (*hidden, *other):
        layer(x, **words)
    hook.remove()
    host = layer.mlp.experts
    gate_up = host.gate_up_proj.detach().clone()
    experts = split(model)
    moments = moments_of(layer, experts.linears, hidden, words, other)
    for e in range(8):
        x, y = (torch.cat([part[n][0][(seen[n % 3][1] == e).any(-1)] for n in of]) for part, of in
                ((seen, (0, 1, 2)), (seen, (3, 4, 5))))  # fmt: skip
        gate, up = gate_up[e].chunk(2)
        zx, zy = (torch.nn.functional.silu(v @ gate.t()) * (v @ up.t()) for v in (x, y))
        for name, (a, b) in {"gate_proj": (x, y), "up_proj": (x, y), "down_proj": (zx, zy)}.items():
            full = f"mlp.experts.{e}.{name}"
            assert moments.rows[full] == len(a)
            torch.testing.assert_close(moments.second[full], a.t() @ a / 150, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moments.cross[full], b.t() @ a / 150, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moments.magnitude[full], a.abs().sum(0) / 150, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_codes_are_gptqs_of_each_experts_own_moments() -> None:
    """A calibrated layer holds what `gptq` gives for each expert alone, filled up where rows are few."""
    windows = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(1))
    model, layer, hidden, words = inputs_of("mixtral", windows)
    weights = {n: getattr(layer.mlp.experts, n).detach().clone() for n in ("gate_up_proj", "down_proj")}
    experts = split(model)
    moments = moments_of(layer, experts.linears, hidden, words)
    few = [n for n in experts.linears if moments.rows[n] < 64]
    assert few and len(few) < len(experts.linears)
    whole = filled(moments, experts)
    for name in experts.linears:
        mean = sum(moments.second[n] for n in experts.kinds[name.rpartition(".")[2]]) / 240  # two a token
        wanted = moments.second[name] + max(64 - moments.rows[name], 0) * mean
        torch.testing.assert_close(whole.second[name], wanted)
    from fewbits.inference.rounding.layer_rounding import Flow, round_layer
    from fewbits.inference.rounding.methods import read_method

    flow = Flow(hidden=hidden, plain=hidden, words=words)
    formats = dict.fromkeys(experts.linears, FORMATS["int4_g32"])
    packed = round_layer(layer, formats, flow, read_method("gptq"), (), experts).packed
    for name in experts.linears:
        _, _, e, leaf = name.split(".")
        plain = weights["down_proj"] if leaf == "down_proj" else weights["gate_up_proj"]
        own = plain[int(e)]
        own = own if leaf == "down_proj" else own.chunk(2)[leaf == "up_proj"]
        assert torch.equal(packed[name].codes, gptq(own, FORMATS["int4_g32"], whole.second[name]).codes)


@pytest.mark.parametrize("method", ["gptq", "smooth+gptaq+learned:2", "awq+nearest"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, kind: str, method: str) -> None:
    save_mixture(tmp_path / "base", kind)
    given = one_word(tmp_path)
    words: dict[str, Any] = {"method": method, "windows": (2, 64)}

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", "int4_g32", given, progress=stop, **words)
    again, whole = (
        calibrate_checkpoint(tmp_path / "base", tmp_path / name, "int4_g32", given, **words)
        for name in ("out", "whole")
    )
    assert again.resumed == 1 and again.output_errors == whole.output_errors
    assert again.unreached == whole.unreached and len(whole.unreached) == 2
    assert same(state(tmp_path / "out"), state(tmp_path / "whole"))


def test_experts_that_no_token_reaches_are_named_and_rounded_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_mixture(tmp_path / "base", "qwen3_moe")
    words = ["--calibrate", str(one_word(tmp_path)), "--samples", "2", "--length", "64", "--format"]
    assert main(["quantize", str(tmp_path / "base"), str(tmp_path / "out"), *words, "int4_g32"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"[56] of 8 experts of model.layers.0.mlp.experts were reached by no token of the text \(", shown
    )
    plain, chosen = opened(tmp_path / "base", load_in_4bit=False), opened(tmp_path / "out")
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(plain.model.layers[0].mlp.experts, name)
        decoded = chosen.model.layers[0].mlp.experts.dequantize(name)
        errors = (decoded - weight).flatten(1).norm(dim=1) / weight.flatten(1).norm(dim=1)
        assert float(errors.min()) > 0 and float(errors.max()) < 0.2


def test_both_layouts_of_a_checkpoint_are_calibrated_alike(tmp_path: Path) -> None:
    """One file for each expert's linears, as transformers 4 wrote, or 3-D parameters."""
    for kind in ("mixtral", "qwen3_moe"):
        save_mixture(tmp_path / kind, kind)
        model = mixture(kind)
        with own_names(model):
            model.save_pretrained(tmp_path / f"{kind}_3d")
        tokenizer().save_pretrained(tmp_path / f"{kind}_3d")
        names = [set(_keys(tmp_path / name)) for name in (kind, f"{kind}_3d")]
        assert f"{LAYER}.mlp.experts.gate_up_proj" in names[1] and not names[0] & names[1] >= names[1]
        given, states = rows(tmp_path), []
        for name in (kind, f"{kind}_3d"):
            calibrate_checkpoint(
                tmp_path / name, tmp_path / f"{name}_out", "int4_g32", given, windows=(4, 64)
            )
            states.append(state(tmp_path / f"{name}_out"))
        for name, tensor in states[
            0
        ].items():  # sums over memory that lies otherwise differ in their last bits
            other = states[1][name]
            same_codes = float((tensor == other).float().mean())
            assert (
                same_codes > 0.98 if tensor.dtype == torch.uint8 else torch.allclose(tensor, other, rtol=1e-3)
            )


def _keys(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "float8_e4m3_row", "gguf_q8_0", "int4_g32_zp"])
def test_every_kind_of_format_packs_experts(tmp_path: Path, format: str) -> None:
    save_mixture(tmp_path / "base", "mixtral")
    given = rows(tmp_path)
    result = calibrate_checkpoint(tmp_path / "base", tmp_path / "out", format, given, windows=(4, 64))
    plain, chosen = opened(tmp_path / "base", load_in_4bit=False), opened(tmp_path / "out")
    error = next(e for e in result.layers if e.name == f"{LAYER}.mlp.experts.down_proj")
    weight, packed = (m.model.layers[0].mlp.experts for m in (plain, chosen))
    decoded = packed.dequantize("down_proj").detach()
    found = float(((decoded - weight.down_proj).norm() / weight.down_proj.norm()).detach())
    assert found == pytest.approx(error.relative_error, rel=1e-4) and found < 0.2
    assert {format.name for format in packed.formats.values()} == {format}


def test_a_budget_counts_experts(tmp_path: Path) -> None:
    save_mixture(tmp_path / "base", "mixtral")
    budget = Budget(bits=6.5, formats=("int4_g32", "int8_g32"))
    result = calibrate_checkpoint(
        tmp_path / "base", tmp_path / "out", budget, rows(tmp_path), windows=(4, 64)
    )
    formats = {error.format for error in result.layers if ".experts." in error.name}
    assert formats == {"int4_g32", "int8_g32"} and len(result.layers) == 12
    values = sum(8 * e.bytes_after for e in result.layers) / sum(
        8 * e.bytes_before / 32 for e in result.layers
    )
    assert values <= 6.5 * (1 + 1e-9)
    assert opened(tmp_path / "out").model.layers[0].mlp.experts.num_stored == 4


def test_one_expert_parameter_alone_is_rounded(tmp_path: Path) -> None:
    """The other takes the scales that were folded, and stays plain; the model computes what it did."""
    save_mixture(tmp_path / "base", "mixtral")
    recipe = Recipe(name="mine", linear=Rule(weight=FORMATS["int8_g32"]), skip=("*.gate_up_proj",))
    words: dict[str, Any] = {"method": "awq+gptq", "windows": (4, 64)}
    calibrate_checkpoint(tmp_path / "base", tmp_path / "out", recipe, rows(tmp_path), **words)
    plain, chosen = opened(tmp_path / "base", load_in_4bit=False), opened(tmp_path / "out")
    experts = chosen.model.layers[0].mlp.experts
    assert set(experts.formats) == {"down_proj"}
    assert not torch.equal(experts.gate_up_proj, plain.model.layers[0].mlp.experts.gate_up_proj)
    ids = torch.tensor([tokenizer()("the cat sat on the mat and a bird flew over the wall").input_ids])
    with torch.no_grad():
        wanted, found = plain(input_ids=ids).logits, chosen(input_ids=ids).logits
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("format", ["float8_e4m3", "nvfp4_16x16", "float8_e4m3_128x128"])
def test_scales_that_several_experts_would_share_are_refused(tmp_path: Path, format: str) -> None:
    save_mixture(tmp_path / "base", "mixtral")
    with pytest.raises(Unsupported, match=r"no scales for each alone|do not fill"):
        calibrate_checkpoint(tmp_path / "base", tmp_path / "out", format, rows(tmp_path), windows=(4, 64))
    assert not (tmp_path / "out").exists()
