"""Bundles of scmp_llm: what a row's length is by their rules, and the way there and back."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.nn.row_plan import RowPlan
from fewbits.recipes.scmp_bundles import read_bundle, write_bundle
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig

OPS = ("q_proj", "down_proj", "qk", "av")


def put(folder, table, wrapper=None, hybrid=None) -> dict:
    wrapper = {"type": "AdaptiveMPConfig", "threshold_table_path": "table.json"} | (wrapper or {})
    wrapper.setdefault("stoc_len_levels", table["stoc_len_levels"])
    for name, plain in (("table", table), ("wrapper", wrapper), ("hybrid", hybrid)):
        if plain is not None:
            (folder / f"{name}.json").write_text(json.dumps(plain))
    return {"wrapper": folder / "wrapper.json"} | (
        {} if hybrid is None else {"hybrid": folder / "hybrid.json"}
    )


def their_lengths(metric, table, wrapper, op: str, block: int, blocks: int) -> list[int]:
    """Their rules, step by step: bucket, ladder, band, gate."""
    count = table["layer_buckets"]
    bucket = 0
    if count > 1 and blocks > 1:
        bucket = min(count - 1, int(block / (blocks - 1) * count))
    payload = table["buckets"].get(f"{op}:t0:l{bucket}", table["operator_defaults"].get(op))
    ladder = payload.get("stoc_len_levels", table["stoc_len_levels"])
    place = (metric - metric.min()) / (metric.max() - metric.min())
    found = []
    for value in place:
        length = ladder[-1]
        for number, threshold in enumerate(payload["thresholds"]):
            if value >= torch.tensor(threshold):
                length = ladder[number]
                break
        k, mean = wrapper.get("escape_gate_k"), payload.get("metric_mean")
        if k is not None and mean is not None:
            bound = mean + k * payload["metric_std"]
            if bound < 1 and value > torch.tensor(bound):
                length = wrapper["escape_stoc_len"]
        found.append(length)
    return found


def random_table(draw: random.Random) -> dict:
    def payload() -> dict:
        rungs = draw.choice([2, 3, 4])
        ladder = sorted(draw.sample(range(0, 129), rungs), reverse=True)
        thresholds = sorted(
            (round(draw.choice([0, 1, draw.random()]), 2) for _ in range(rungs - 1)), reverse=True
        )
        found = {"thresholds": thresholds, "stoc_len_levels": ladder}
        if draw.random() < 0.7:
            found |= {"metric_mean": draw.random() / 2, "metric_std": draw.random() / 3}
        return found

    count = draw.choice([1, 2, 3, 4])
    buckets = {f"{op}:t0:l{i}": payload() for op in OPS for i in range(count) if draw.random() < 0.6}
    return {
        "stoc_len_levels": [96, 64, 16],
        "layer_buckets": count,
        "buckets": buckets,
        "operator_defaults": {op: payload() for op in OPS},
    }


def test_every_row_has_the_length_that_their_rules_give(tmp_path):
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        table, blocks = random_table(draw), draw.choice([1, 3, 5])
        gate = {"escape_gate_k": draw.choice([0.5, 2.0]), "escape_stoc_len": draw.choice([128, 64])}
        wrapper = gate if draw.random() < 0.6 else {}
        config = read_bundle(**put(tmp_path, table, wrapper), num_layers=blocks)
        x = torch.rand(50, 3, generator=generator) * torch.rand(50, 1, generator=generator)
        x[0] = x[1]
        metric = x.abs().amax(-1)
        for block in range(blocks):
            for op in OPS:
                if op in ("qk", "av"):
                    setting = config.attention_of(f"model.layers.{block}.self_attn")
                    kind = "scores" if op == "qk" else "values"
                    plan = RowPlan(setting.lengths(kind), getattr(setting, f"{kind}_thresholds"))
                else:
                    linear = config.linear(f"model.layers.{block}.x.{op}")
                    plan = RowPlan(tuple(row[0] for row in linear.lengths), linear.thresholds)
                    assert linear.classify == ("call" if linear.thresholds else "row")
                groups = plan.groups(x)
                mine = [plan.lengths[g] for g in ([0] * 50 if groups is None else groups)]
                assert mine == their_lengths(metric, table, wrapper, op, block, blocks)


TABLE = {
    "stoc_len_levels": [96, 32],
    "layer_buckets": 1,
    "operator_defaults": {op: {"thresholds": [0.5]} for op in OPS},
    "buckets": {},
}


def test_a_schedule_gives_blocks_to_whole_numbers(tmp_path):
    schedule = {"q_proj": ["sc", "int7", "fp"], "qk": [1, 2, 0], "o_proj": ["int4"] * 3}
    hybrid = {"format": "scmp_llm_hybrid_v1", "int_bits": 6, "schedule": schedule}
    config = read_bundle(**put(tmp_path, TABLE, hybrid=hybrid))
    assert config.model == {"num_hidden_layers": 3} and config.options.streams.levels == 128
    runs = [config.linear(f"model.layers.{i}.self_attn.q_proj") for i in range(3)]
    assert runs[0].lengths == ((96,), (32,)) and runs[2] == LinearSetting(runs="exact")
    assert runs[1] == LinearSetting(runs="int8", bits=7)
    assert config.linear("model.layers.2.self_attn.o_proj").bits == 4
    settings = [config.attention_of(f"model.layers.{i}.self_attn") for i in range(3)]
    assert settings[0].scores == settings[1].values == (96, 32)
    assert (settings[1].scores_bits, settings[2].is_exact("scores")) == (6, True)


def test_there_and_back(tmp_path):
    config = StochasticConfig(
        options=STOCHASTIC.with_length(48),
        linears=(
            (
                "m.layers.0.a.q_proj",
                LinearSetting(lengths=((96,), (32,)), thresholds=(0.375,), classify="call"),
            ),
            ("m.layers.1.a.q_proj", LinearSetting(runs="int8", bits=7)),
            ("m.layers.1.b.down_proj", LinearSetting(runs="exact")),
        ),
        attention=(
            (
                "m.layers.0.*",
                AttentionSetting(scores=(64, 8), scores_thresholds=(0.25,), values=40, chunk_d=0),
            ),
            ("m.layers.1.*", AttentionSetting(scores_bits=8, chunk_d=0)),
        ),
    )
    linears = [f"m.layers.{i}.{op}" for i in range(2) for op in ("a.q_proj", "b.down_proj")]
    attentions = ["m.layers.0.attn", "m.layers.1.attn"]
    files = write_bundle(config, tmp_path / "bundle", linears, attentions)
    assert [f.name for f in files] == ["wrapper.json", "table.json", "hybrid.json"]
    back = read_bundle(files[0], hybrid=files[2])
    for name in linears:
        wanted = config.linear(name)
        if wanted.runs == "stochastic" and wanted.lengths is None:
            wanted = LinearSetting(lengths=((48,),))
        assert back.linear(name) == wanted
    for name in attentions:
        assert back.attention_of(name) == config.attention_of(name)


def test_all_experts_of_a_block_are_one_entry_of_their_table(tmp_path):
    linears = [f"m.layers.{i}.mlp.experts.{e}.down_proj" for i in range(2) for e in range(3)]
    attentions = ["m.layers.0.attn", "m.layers.1.attn"]
    alike = (("*.layers.0.*", LinearSetting(lengths=((32,),))), ("*", LinearSetting(runs="int8", bits=7)))
    files = write_bundle(StochasticConfig(linears=alike), tmp_path / "b", linears, attentions)
    back = read_bundle(files[0], hybrid=files[2])
    assert [back.linear(name) for name in linears] == [alike[0][1]] * 3 + [alike[1][1]] * 3
    apart = (("*.experts.2.down_proj", LinearSetting(lengths=((64,),))), *alike)
    with pytest.raises(Unsupported, match=r"experts\.0\.down_proj and .*experts\.2\.down_proj run otherwise"):
        write_bundle(StochasticConfig(linears=apart), tmp_path / "c", linears, attentions)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"lengths": ((64, 32),)}, "lengths by chunk"),
        ({"lengths": ((64,), (32,)), "thresholds": (2.5,)}, "thresholds that are magnitudes"),
        ({"lengths": ((32,), (64,)), "thresholds": (0.5,), "classify": "call"}, "theirs descend"),
        ({"protected": (3,)}, "for which their table has no place"),
        ({"smooth_scales": (1.0, 2.0)}, "for which their table has no place"),
    ],
)
def test_what_their_format_cannot_say(setting, sentence, tmp_path):
    config = StochasticConfig(linears=(("*", LinearSetting(**setting)),))
    with pytest.raises(Unsupported, match=sentence):
        write_bundle(config, tmp_path, ["m.layers.0.q_proj"], ["m.layers.0.attn"])


def test_an_arithmetic_that_is_not_theirs_has_no_place_there(tmp_path):
    config = StochasticConfig(options=replace(STOCHASTIC, gate="and", flip_rate=0.1))
    with pytest.raises(
        Unsupported, match="options have gate, flip_rate, an arithmetic for which their files"
    ):
        write_bundle(config, tmp_path, ["m.layers.0.q_proj"], [])


def metric(op: str, **spec) -> dict:
    return {"table": TABLE | {"dispatch_metrics": {op: spec}}}


def test_attention_in_chunks_has_no_place_there(tmp_path):
    config = StochasticConfig(attention=(("*", AttentionSetting(scores=64)),))
    with pytest.raises(Unsupported, match="counts its streams in chunks of 128, and theirs are not cut"):
        write_bundle(config, tmp_path, [], ["m.layers.0.attn"])


def test_bundles_that_are_none(tmp_path):
    hybrid = {"format": "scmp_llm_hybrid_v1", "schedule": {"qk": ["sc", "sc"]}}
    for change, error, sentence in (
        ({"wrapper": {"type": "MPConfig"}}, Unsupported, "shares of rows have no thresholds"),
        ({"wrapper": {"stoc_len_levels": [64, 32]}}, BadInput, "has other stoc_len_levels than"),
        ({"wrapper": {"threshold_table_path": "no.json"}}, BadInput, "there is no file"),
        ({"table": TABLE | {"stoc_len_levels": [32, 64]}}, BadInput, "not two or more descending"),
        ({"table": TABLE | {"operator_defaults": {"qk": [0.5, 0.2]}}}, BadInput, "2 levels need 1"),
        ({"table": TABLE | {"operator_defaults": {"qk": [1.5]}}}, BadInput, "thresholds from 0 to 1"),
        (metric("qk", metric="l2"), Unsupported, "by another metric"),
        (metric("av", metric="amax", sign=-1), Unsupported, "lengths of av by"),
        ({"table": TABLE | {"protected_channels": {"indices": {"q:b0": [1]}}}}, Unsupported, "protected"),
        ({"hybrid": hybrid | {"format": "x"}}, BadInput, "has format 'x'"),
        ({"hybrid": hybrid | {"schedule": {"qk": ["sc", "int9"]}}}, BadInput, "entry 'int9' is unknown"),
        ({"hybrid": hybrid | {"int_sym": False}}, Unsupported, "other than symmetric ones"),
        ({"hybrid": hybrid | {"schedule": {"up_proj": ["sc", "sc"]}}}, BadInput, "nothing for up_proj in"),
        ({"layers": 3}, BadInput, "has 2 blocks for qk and the model 3"),
        ({"hybrid": None}, BadInput, "give num_layers"),
    ):
        words = {"table": TABLE, "wrapper": None, "hybrid": hybrid} | change
        layers = words.pop("layers", None)
        with pytest.raises(error, match=sentence):
            read_bundle(**put(tmp_path, **words), num_layers=layers)
    with pytest.raises(BadInput, match="is a table of thresholds; give the wrapper"):
        read_bundle(tmp_path / "table.json", num_layers=2)
    (tmp_path / "wrapper.json").write_text("[1]")
    with pytest.raises(BadInput, match="holds no mapping"):
        read_bundle(tmp_path / "wrapper.json")
