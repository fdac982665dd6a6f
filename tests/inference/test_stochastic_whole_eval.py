"""A whole evaluation: layer by layer, by several processes, with a receipt and the time of its parts."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.evaluate import TextWindows, evaluating, plan_windows, window_nlls
from fewbits.inference.kept_layers import KeptLayers
from fewbits.inference.part_times import part_times
from fewbits.inference.stochastic.evaluation import EvalSetting, Ledger, Share, evaluate_setting
from fewbits.inference.stochastic.receipt import products_counted
from fewbits.models.loading.in_memory import apply_stochastic, restore
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from tests.models.tiny import tiny, tokens

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=16, stoc_len=32)
MIXED = StochasticConfig(
    options=OPTIONS,
    linears=(
        ("*.1.mlp.down_proj", LinearSetting(runs="int8")),
        ("*.up_proj", LinearSetting(lengths=((64,), (16,)), thresholds=(2.6,), protected=(3, 40))),
        ("*.0.*.o_proj", LinearSetting(runs="exact")),
    ),
    attention=(("*.1.*", AttentionSetting(scores=64)), ("*", AttentionSetting(scores=32, values=64))),
)


def windows(count: int = 7, size: int = 10) -> TextWindows:
    ids = torch.randint(3, 96, (count * size - 4,), generator=torch.Generator().manual_seed(0))
    return TextWindows(ids, list(plan_windows(len(ids), size, size)), 1, len(ids), size + 1, size)


def only_layer(number: int) -> StochasticConfig:
    """The mixed table in one layer; every other layer exact."""
    others = tuple((f"*.layers.{i}.*", LinearSetting(runs="exact")) for i in range(3) if i != number)
    exact = tuple((f"*.layers.{i}.*", AttentionSetting()) for i in range(3) if i != number)
    return dataclasses.replace(MIXED, linears=(*others, *MIXED.linears), attention=(*exact, *MIXED.attention))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_bits_are_those_of_one_layer_after_the_other(family):
    model, text = tiny(family, num_hidden_layers=3), windows(3)
    kept: dict[int, object] = {}
    for number in range(3):  # prepared, run and taken out alone, on what the layer before it gave
        apply_stochastic(model, only_layer(number), keep_original=True, fuse_norms=False)
        layers = KeptLayers(model)
        layers.outputs.update(kept)
        with layers.skipping(number), evaluating(model):
            hook = model.model.layers[number].register_forward_hook(
                lambda _, __, out, number=number: kept.__setitem__(number, out)
            )
            nlls = window_nlls(model, text, text.windows)
            hook.remove()
        restore(model)
    whole = evaluate_setting(model, text, EvalSetting("mixed", MIXED), Ledger(None), facts={}, batch_size=3)
    assert whole["nll"] == math.fsum(nlls) / text.num_tokens


def test_several_processes_have_the_bits_of_one(tmp_path):
    text, setting = windows(), EvalSetting("mixed", MIXED)
    words = {"facts": {"model": "tiny"}, "batch_size": 2}
    alone = evaluate_setting(tiny("llama"), text, setting, Ledger(None), **words)
    file = tmp_path / "eval.jsonl"
    rows = [
        evaluate_setting(tiny("llama"), text, setting, Ledger(file, Share(number, 3)), **words)
        for number in (3, 1, 2)
    ]
    assert [row["nll"] for row in rows] == [None, None, alone["nll"]]
    assert [row["tokens"] for row in rows] == [20, 46, 66]
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"eval.jsonl.{i}-of-3" for i in (1, 2, 3)]
    broken = tiny("llama")
    broken.forward = None  # nothing is computed again
    again = evaluate_setting(broken, text, setting, Ledger(file), **words)
    assert again == alone


def test_a_line_in_the_making_of_another_process_stays(tmp_path):
    file = tmp_path / "eval.jsonl"
    other = tmp_path / "eval.jsonl.2-of-2"
    other.write_text('{"id": "a", "batch": 1, "nlls": [1.5], "tokens": 3}\n{"id": "a", "ba')
    ledger = Ledger(file, Share(1, 2))
    assert ledger.state("a").batches == {1: [1.5]} and other.read_text().endswith('"ba')
    other.write_text(
        '{"id": "a", "batch": 1, "nlls": [1.5], "tokens": 3}\n{"id": "a", "batch": 3, '
        '"nlls": [2.5], "tokens": 3}\n'
    )
    ledger.refresh()
    assert ledger.state("a").batches == {1: [1.5], 3: [2.5]}


def test_results_of_an_older_ledger_count(tmp_path):
    file, text = tmp_path / "eval.jsonl", windows(2)
    words = {"facts": {}, "batch_size": 2}
    row = evaluate_setting(tiny("llama"), text, EvalSetting("as it is"), Ledger(file), **words)
    last = json.loads(file.read_text().splitlines()[-1])
    old = {"id": last["id"], "windows": 2, "nll_sum": 1.0, "tokens": 16}
    file.write_text(json.dumps(old) + "\n" + json.dumps({**old, "result": last["result"]}) + "\n")
    broken = tiny("llama")
    broken.forward = None
    assert evaluate_setting(broken, text, EvalSetting("as it is"), Ledger(file), **words) == row


def test_shares_that_cannot_be():
    for number, of in ((0, 2), (3, 2)):
        with pytest.raises(BadInput, match="is refused; give 1 of 4"):
            Share(number, of)
    with pytest.raises(BadInput, match="several processes need a file to meet in"):
        Ledger(None, Share(1, 2))


def test_a_receipt_of_what_ran():
    model = tiny("llama")
    apply_stochastic(model, MIXED)
    with products_counted(model) as counted, torch.no_grad():
        model(tokens(1, 6))
        model(tokens(2, 8))
    assert (
        counted.sentence() == "13 linears and 2 attentions ran in streams or INT8 codes, in each of 2 passes"
    )
    restore(model)
    with products_counted(model) as counted, torch.no_grad():
        model(tokens(1, 6))
    assert counted.linears == {} and counted.attentions == {}


def test_a_product_that_is_computed_elsewhere_is_found_out():
    model, text = tiny("llama"), windows(2)
    mlp = model.model.layers[1].mlp

    def fused(x: torch.Tensor) -> torch.Tensor:  # reads the weights, past the layers
        gate, up, down = (layer.weight for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    mlp.forward = fused
    with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.gate_proj ran 0 times in 1 passes of its layer"):
        evaluate_setting(model, text, EvalSetting("sc", MIXED), Ledger(None), facts={}, batch_size=2)
    assert isinstance(mlp.gate_proj, torch.nn.Linear)  # the original form again


def test_the_parts_of_a_pass_add_up_to_it():
    model = tiny("llama")
    apply_stochastic(model, MIXED)
    ids = tokens(2, 12)
    with torch.no_grad():
        model(ids)
        parts = part_times(model, lambda: model(ids))
    assert set(parts) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
        "attention",
        "rest",
    }
    assert all(seconds > 0 for seconds in parts.values())
    assert list(parts.values()) == sorted(parts.values(), reverse=True)


def test_groups_of_rows_that_no_row_is_in_are_named(tmp_path):
    linear = LinearSetting(lengths=((64,), (16,)), thresholds=(1e6,))
    place = LinearSetting(lengths=((64,), (32,), (16,)), thresholds=(0.7, 0.3), classify="call")
    attention = AttentionSetting(scores=(32, 16), scores_thresholds=(0.5,), values=32)
    config = dataclasses.replace(
        MIXED,
        linears=(("*.0.*.down_proj", linear), ("*.up_proj", place)),
        attention=(("*", attention),),
    )
    model, text, ledger = tiny("llama"), windows(3), Ledger(str(tmp_path / "e.jsonl"))
    row = evaluate_setting(model, text, EvalSetting("it", config), ledger, facts={}, batch_size=2)
    assert row["empty_groups"] == ["group 1 of model.layers.0.mlp.down_proj"]
    again = evaluate_setting(
        model, text, EvalSetting("it", config), Ledger(str(tmp_path / "e.jsonl")), facts={}, batch_size=2
    )
    assert again == row
    plain = evaluate_setting(model, text, EvalSetting("plain", MIXED), Ledger(None), facts={})
    assert "empty_groups" not in plain or all("up_proj" in name for name in plain["empty_groups"])
