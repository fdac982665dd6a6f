"""Screens, swap tables and boards: figures of whole evaluations, kept and decided on."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from fewbits.errors import BadInput, SpecMismatch, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.evaluate import TextWindows, evaluating, plan_windows, window_nlls
from fewbits.inference.stochastic.evaluation import EvalSetting, under_setting
from fewbits.inference.stochastic.screen import Candidate, Screening, screen
from fewbits.inference.stochastic.swap import (
    Operator,
    operators,
    read_swaps,
    swap_table,
    swapped,
    write_swaps,
)
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from tests.models.tiny import tiny

OPTIONS = dataclasses.replace(STOCHASTIC, chunk_d=16, stoc_len=32)
BASE = StochasticConfig(options=OPTIONS, attention=(("*", AttentionSetting(scores=32, values=64)),))
WHOLE = Screening(stop=False, batch_size=2)


def windows(count: int = 5, size: int = 12, seed: int = 0) -> TextWindows:
    ids = torch.randint(3, 96, (count * size - 4,), generator=torch.Generator().manual_seed(seed))
    return TextWindows(ids, list(plan_windows(len(ids), size, size)), 1, len(ids), size + 1, size)


def linear(name: str, **fields) -> Candidate:
    config = dataclasses.replace(BASE, linears=((name, LinearSetting(**fields)), *BASE.linears))
    return Candidate(name, config)


def attention(name: str, *pairs: tuple[str, AttentionSetting]) -> Candidate:
    return Candidate(name, dataclasses.replace(BASE, attention=pairs))


CANDIDATES = [
    linear("model.layers.1.mlp.down_proj", lengths=((16,),)),
    linear("*.1.mlp.up_proj", lengths=((64,), (8,)), thresholds=(2.6,)),
    linear("*.1.self_attn.*", runs="int8"),
    linear("*.1.mlp.gate_proj", runs="exact"),
    linear("*.1.self_attn.o_proj", smooth_scales=tuple(1 + i / 64 for i in range(64))),
    linear("*.0.mlp.up_proj", protected=(3, 9)),
    attention(
        "one layer's scores", ("*.1.self_attn", AttentionSetting(scores=8, values=64)), *BASE.attention
    ),
    attention("exact attention"),
    Candidate("all at 16", dataclasses.replace(BASE, options=dataclasses.replace(OPTIONS, stoc_len=16))),
]


def alone(model, text, config, batch_size=2) -> list[float]:
    found = []
    with under_setting(model, EvalSetting("", config)), evaluating(model):
        for at in range(0, len(text.windows), batch_size):
            found += window_nlls(model, text, text.windows[at : at + batch_size])
    return found


@pytest.mark.parametrize(
    "family",
    [pytest.param("llama", marks=pytest.mark.slow), pytest.param("gemma2", marks=pytest.mark.nightly)],
)
def test_differences_are_those_of_whole_evaluations_to_the_bit(family):
    model, text = tiny(family), windows()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = screen(model, text, BASE, CANDIDATES, WHOLE)
    base = alone(model, text, BASE)
    assert {row.candidate.name: row.first_layer for row in found.rows}["*.1.mlp.gate_proj"] == 1
    for row in found.rows:
        mine = alone(model, text, row.candidate.config)
        assert row.differences == tuple(a - b for a, b in zip(mine, base, strict=True)), row.candidate.name
    means = [row.against_base.mean for row in found.rows]
    assert means == sorted(means) and not any(row.given_up for row in found.rows)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], t) for n, t in before.items())


@pytest.mark.slow
def test_keeping_the_first_layers_changes_no_bit_and_cycles_are_counted():
    text = windows(3)
    kept = screen(tiny("llama"), text, BASE, CANDIDATES, WHOLE)
    anew = screen(tiny("llama"), text, BASE, CANDIDATES, dataclasses.replace(WHOLE, reuse=False))
    assert [(r.candidate.name, r.differences, r.steps, r.macs) for r in kept.rows] == [
        (r.candidate.name, r.differences, r.steps, r.macs) for r in anew.rows
    ]
    by = {row.candidate.name: row for row in kept.rows}
    assert by["all at 16"].cycles < kept.base_steps / kept.base_macs
    down = by["model.layers.1.mlp.down_proj"]
    assert kept.base_steps - down.steps == 2 * 13 * 128 * 64 * 16  # rows, weight, cycles
    assert by["*.1.mlp.gate_proj"].macs == kept.base_macs - 2 * 13 * 128 * 64


def test_a_screen_goes_on_where_it_stopped(tmp_path):
    model, text, file = tiny("llama"), windows(), str(tmp_path / "board.jsonl")
    whole = screen(model, text, BASE, CANDIDATES[:3], WHOLE)

    def kill(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        screen(model, text, BASE, CANDIDATES[:3], WHOLE, board=file, progress=kill)
    lines = (tmp_path / "board.jsonl").read_text()
    (tmp_path / "board.jsonl").write_text(lines + '{"candidate": "cut sh')
    rest = screen(model, text, BASE, CANDIDATES[:3], WHOLE, board=file)
    assert [(r.differences, r.steps) for r in rest.rows] == [(r.differences, r.steps) for r in whole.rows]
    model.forward = None  # nothing is left to compute but the check of the kept layers
    again = screen(model, text, BASE, CANDIDATES[:3], dataclasses.replace(WHOLE, reuse=False), board=file)
    assert [r.differences for r in again.rows] == [r.differences for r in whole.rows]


def test_a_board_of_something_else(tmp_path):
    file = tmp_path / "board.jsonl"
    screen(tiny("llama"), windows(2), BASE, CANDIDATES[:1], WHOLE, board=str(file))
    for change, sentence in (
        ({"text": windows(2, seed=1)}, "begun with another text"),
        ({"text": windows(3)}, "begun with another text"),
        ({"base": CANDIDATES[2].config}, "begun with another base"),
        ({"model": tiny("llama", dtype=torch.bfloat16)}, "begun with another dtype"),
        ({"settings": dataclasses.replace(WHOLE, batch_size=1)}, "begun with another batch_size"),
    ):
        words = {"model": tiny("llama"), "text": windows(2), "base": BASE, "settings": WHOLE, **change}
        with pytest.raises(BadInput, match=sentence):
            screen(
                words["model"],
                words["text"],
                words["base"],
                CANDIDATES[:1],
                words["settings"],
                board=str(file),
            )
    file.write_text('{"a": 1}\n')
    with pytest.raises(BadInput, match="is no file of a screen"):
        screen(tiny("llama"), windows(2), BASE, CANDIDATES[:1], WHOLE, board=str(file))


def test_candidates_that_differ_in_nothing():
    model, text = tiny("llama"), windows(2)
    same = linear("*.mlp.up_proj", lengths=((32,), (32,)), thresholds=(1.0,))
    named = linear("*.mlp.up_proj", lengths=((32,),))
    for candidates, sentence in (
        ([named], r"up_proj differs in nothing from the base; leave it out"),
        ([CANDIDATES[0], CANDIDATES[0]], "two candidates called .* differ in nothing"),
        ([], "no candidates to compare"),
    ):
        with pytest.raises(BadInput, match=sentence):
            screen(model, text, BASE, candidates, WHOLE)
    assert screen(model, text, BASE, [same], WHOLE).rows[0].differences == (0.0, 0.0)
    with pytest.raises(SpecMismatch, match="matches nothing in this model"):
        screen(model, text, BASE, [linear("*.fc1", runs="int8")], WHOLE)
    for fields in ({"batch_size": 0}, {"least": 1}, {"confidence": 1.0}):
        with pytest.raises(BadInput, match="refused"):
            Screening(**fields)


def test_exact_candidates_have_no_streams():
    exact = StochasticConfig(options=OPTIONS, linears=(("*", LinearSetting(runs="exact")),))
    text = windows(2)
    found = screen(tiny("llama"), text, BASE, [Candidate("exact", exact)], WHOLE)
    assert found.rows[0].steps == 0 and found.rows[0].cycles == 0
    plain = tiny("llama")
    with evaluating(plain):
        nlls = window_nlls(plain, text, text.windows)
    base = alone(tiny("llama"), text, BASE)
    assert found.rows[0].differences == tuple(a - b for a, b in zip(nlls, base, strict=True))
    back = screen(tiny("llama"), text, exact, [Candidate("streams", BASE)], WHOLE)
    assert back.base_macs == 0 and back.rows[0].differences == tuple(-d for d in found.rows[0].differences)


def test_layers_that_share_more_than_their_input_are_found_out():
    model = tiny("llama")
    passed = []
    model.model.layers[0].register_forward_hook(lambda *_: passed.append(1))
    model.model.layers[1].register_forward_hook(lambda _, __, out: out + len([passed.pop() for _ in passed]))
    with pytest.raises(Unsupported, match="depend on more than the layer before them"):
        screen(model, windows(2), BASE, CANDIDATES[:1], WHOLE)


@pytest.mark.slow
def test_the_best_is_kept_and_the_worse_are_given_up(monkeypatch):
    """On drawn losses: with many looks at many candidates, the best is lost no more often than was said."""
    from fewbits.inference.stochastic import screen as stochastic_screen

    draw, lost, spared = random.Random(0), 0, 0
    monkeypatch.setattr(stochastic_screen._Screen, "_run", _drawn(draw))
    model, text = tiny("llama"), windows(24)
    candidates = [linear("*.1.mlp.down_proj", lengths=((length,),)) for length in (8, 12, 16, 24)]
    candidates = [dataclasses.replace(c, name=str(i)) for i, c in enumerate(candidates)]
    for _ in range(20):
        settings = Screening(confidence=0.8, least=3, reuse=False)
        rows = {row.candidate.name: row for row in screen(model, text, BASE, candidates, settings).rows}
        lost += rows["0"].given_up
        spared += sum(24 - row.against_base.windows for row in rows.values())
    assert lost <= 4 and spared > 20 * 24 / 4


def _drawn(draw: random.Random):
    def run(self, identity, at, batch, start):
        number = self.ids.index(identity) if identity in self.ids else 0
        self.board.steps[identity] = (1, 1)
        for i in range(len(batch)):
            self.board.note_nll(identity, at + i, draw.gauss(2.0 * number, 2.0), self.tokens[at + i])

    return run


@pytest.mark.slow
def test_a_swap_table_has_every_operator_at_every_length(tmp_path):
    model, text = tiny("qwen3"), windows(3)
    masked = dataclasses.replace(BASE, linears=(("*.o_proj", LinearSetting(runs="int8")),))
    chosen = operators(model, masked, tied=True)
    assert [o.op for o in chosen] == [
        "q_proj+k_proj+v_proj",
        "o_proj",
        "gate_proj+up_proj",
        "down_proj",
        "scores",
        "values",
    ]
    table = swap_table(model, text, masked, (32, 16, "int8"), chosen, settings=WHOLE)
    assert {(s.operator.op, s.to) for s in table.swaps} == {
        ("q_proj+k_proj+v_proj", 16), ("q_proj+k_proj+v_proj", "int8"), ("o_proj", 16), ("o_proj", 32),
        ("gate_proj+up_proj", 16), ("gate_proj+up_proj", "int8"), ("down_proj", 16), ("down_proj", "int8"),
        ("scores", 16), ("scores", "int8"), ("values", 16), ("values", 32), ("values", "int8"),
    }  # fmt: skip
    assert sum(table.macs.values()) == pytest.approx(1)
    assert table.cycles["o_proj"] == 0 and table.cycles["values"] == 64
    for swap in table.swaps:
        before = table.cycles[swap.operator.name]
        after = 0 if swap.to == "int8" else swap.to
        assert swap.freed == pytest.approx(table.macs[swap.operator.name] * (before - after))
        config = swapped(table.base, swap.operator, swap.to)
        mine, base = alone(model, text, config), alone(model, text, masked)
        assert swap.differences == tuple(a - b for a, b in zip(mine, base, strict=True))
    write_swaps(table, tmp_path / "swaps.json")
    assert read_swaps(tmp_path / "swaps.json") == table


def test_a_swap_of_what_the_base_names_is_not_the_base():
    """The base has this very name, so the swap stands before it and decides."""
    model, text = tiny("llama"), windows(2)
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    named = dataclasses.replace(BASE, linears=tuple((n, LinearSetting(lengths=((24,),))) for n in names))
    chosen = [o for o in operators(model, named) if o.op == "down_proj"]
    table = swap_table(model, text, named, ("x0.5", 64), chosen, settings=WHOLE)
    half, long = table.swaps
    assert half.freed == pytest.approx(12 * table.macs["down_proj"]) and any(half.differences)
    assert long.freed == pytest.approx(-40 * table.macs["down_proj"]) and any(long.differences)


def test_buckets_of_layers():
    model = tiny("llama", num_hidden_layers=3)
    two = operators(model, StochasticConfig(), buckets=2)
    assert len(two) == 14 and two[0].name == "q_proj, layer 0" and two[7].name == "q_proj, layers 1 to 2"
    assert len(operators(model, BASE, buckets=3)) == 27
    with pytest.raises(BadInput, match="4 buckets of 3 layers; choose from 1 to 3"):
        operators(model, BASE, buckets=4)
    scores = operators(model, BASE)[-2]
    for word in ("int9", "fp8", "x0", "xx"):
        with pytest.raises(BadInput, match=f"a swap to '{word}' is unknown"):
            swapped(BASE, scores, word)


def test_a_table_is_scaled_as_it_is():
    table = LinearSetting(lengths=((64, 16), (32, 0)), thresholds=(1.5,), smooth_scales=(1.0, 2.0))
    base = dataclasses.replace(
        BASE,
        linears=(("l.up_proj", table), ("l.down_proj", LinearSetting(runs="int8"))),
        attention=(("l.attn", AttentionSetting(scores=(64, 16), scores_thresholds=(0.5,))),),
    )
    linears = Operator("gate_up", "gate_up", ("l.up_proj", "l.down_proj", "l.k_proj"))
    scaled = swapped(base, linears, "x1.5")
    assert scaled.linear("l.up_proj") == dataclasses.replace(table, lengths=((96, 24), (48, 0)))
    assert scaled.linear("l.down_proj").runs == "int8"
    assert scaled.linear("l.k_proj").lengths == ((48,),)
    assert swapped(base, linears, "x9").linear("l.up_proj").lengths == ((128, 128), (128, 0))
    scores = swapped(base, Operator("scores", "scores", ("l.attn",)), "x0.25").attention_of("l.attn")
    assert scores == AttentionSetting(scores=(16, 4), scores_thresholds=(0.5,))


def test_swap_tables_that_are_none(tmp_path):
    file = tmp_path / "swaps.json"
    for text, sentence in (
        ("{", "is not JSON"),
        ("{}", "no swap table of version 1"),
        (json.dumps({"fewbits_swaps": 1, "base": {"fewbits_stochastic": 1}}), "damaged swap table"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=sentence):
            read_swaps(file)
    with pytest.raises(BadInput, match="there is no file"):
        read_swaps(tmp_path / "absent")
