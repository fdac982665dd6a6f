"""The stochastic configuration file: there and back, short forms, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from fewbits.errors import BadInput
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.recipes.stochastic_config import (
    AttentionSetting,
    LinearSetting,
    StochasticConfig,
    config_from_plain,
    config_to_plain,
    read_config,
    write_config,
)

CONFIG = StochasticConfig(
    options=dataclasses.replace(STOCHASTIC, stoc_len=32, scramble="counter"),
    linears=(
        ("model.layers.1.*", LinearSetting(runs="int8")),
        (
            "model.layers.0.mlp.down_proj",
            LinearSetting(
                lengths=((128, 64), (64, 32)),
                thresholds=(2.5,),
                classify="chunk",
                smooth_scales=(1.25, 0.1, 3.0),
                protected=(1, 2),
            ),
        ),
    ),
    attention=(("*", AttentionSetting(scores=64)),),
    model={"model_type": "llama"},
    calibration={"budget": 48, "method": "smoothquant"},
)


@pytest.mark.parametrize("name", ["sc.yaml", "sc.json"])
def test_there_and_back(tmp_path, name):
    write_config(CONFIG, tmp_path / name)
    assert read_config(tmp_path / name) == CONFIG


def test_globs_and_short_forms():
    config = config_from_plain(
        {"fewbits_stochastic": 1, "linears": {"*.q_proj": {"lengths": 48}, "*": {"lengths": [64, 32]}}}
    )
    assert config.options == STOCHASTIC
    assert config.linear("a.q_proj").lengths == ((48,),)
    assert config.linear("a.k_proj").lengths == ((64, 32),)
    assert config.attention_of("a.self_attn") == AttentionSetting()


BAD = {
    "no mapping": ([1], "no stochastic configuration"),
    "another version": ({"fewbits_stochastic": 2}, "version 2 and this fewbits reads 1"),
    "unknown field": ({"lineers": {}}, "unknown field lineers; known"),
    "unknown option": ({"options": {"stok_len": 1}}, "options: unknown field stok_len"),
    "wrong option": ({"options": {"stoc_len": 0}}, "options: stoc_len=0 is refused"),
    "unknown run": ({"linears": {"*": {"runs": "fp4"}}}, r"linears, \*: runs 'fp4' is unknown"),
    "half a length": ({"linears": {"*": {"lengths": [1.5]}}}, "lengths holds 1.5; give whole numbers"),
    "ragged": ({"linears": {"*": {"lengths": [[1, 2], [3]]}}}, "rows of different sizes"),
    "thresholds": ({"linears": {"*": {"lengths": [[1], [2]]}}}, "need 1 thresholds, not 0"),
    "a text": ({"linears": {"*": {"lengths": [[1], [2]], "thresholds": ["1e-5"]}}}, r"so write 1\.0e-05"),
    "in quotes": ({"linears": {"*": {"lengths": [[1], [2]], "thresholds": ["2"]}}}, "without quotes"),
    "a word for a number": (
        {"linears": {"*": {"lengths": [[1], [2]], "thresholds": ["two"]}}},
        "'two'; give numbers",
    ),
    "ascending": (
        {"linears": {"*": {"lengths": [[3], [2], [1]], "thresholds": [1, 2]}}},
        "are not descending",
    ),
    "int8 with lengths": ({"linears": {"*": {"runs": "int8", "lengths": 3}}}, "runs int8 has no streams"),
    "exact with more": ({"linears": {"*": {"runs": "exact", "protected": [1]}}}, "runs exact has no smooth"),
    "a word": ({"linears": {"*": {"smooth_scales": "all"}}}, "smooth_scales must be a list"),
    "attention": ({"attention": {"*": {"scores": True}}}, "scores holds True"),
    "an empty group": (
        {"linears": {"*": {"lengths": [[3], [2], [1]], "thresholds": [2.5, 2.5]}}},
        r"thresholds hold 2\.5 twice, so the group of rows between is empty",
    ),
    "a group beyond": (
        {"linears": {"*": {"lengths": [[3], [2]], "thresholds": [0]}}},
        "thresholds hold 0, beyond which no magnitude lies",
    ),
    "a group above all": (
        {"linears": {"*": {"lengths": [[3], [2]], "thresholds": [float("inf")]}}},
        "thresholds hold inf, beyond which",
    ),
    "a place above 1": (
        {"linears": {"*": {"lengths": [[3], [2]], "thresholds": [2.5], "classify": "call"}}},
        "thresholds hold 2.5, and a row's place among those of its call is from 0 to 1",
    ),
    "a place above 1 in attention": (
        {"attention": {"*": {"values": [4, 2], "values_thresholds": [1.5]}}},
        "values_thresholds hold 1.5, and a row's place",
    ),
    "bits of streams": ({"linears": {"*": {"bits": 4}}}, "bits=4 are those of whole numbers"),
    "too many bits": ({"linears": {"*": {"runs": "int8", "bits": 9}}}, "bits=9 is out of range"),
    "attention both": ({"attention": {"*": {"scores": 4, "scores_bits": 8}}}, "give one of them"),
    "attention groups": ({"attention": {"*": {"values": [4, 2]}}}, "need 1 values_thresholds, not 0"),
    "attention empty": (
        {"attention": {"*": {"values": [4, 2, 1], "values_thresholds": [0.5, 0.5]}}},
        "values_thresholds hold 0.5 twice",
    ),
    "no setting": ({"linears": {"*": 3}}, r"linears, \*: must be a mapping|linears, \* must be a mapping"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_in_one_sentence(case):
    plain, sentence = BAD[case]
    if isinstance(plain, dict):
        plain = {"fewbits_stochastic": 1, **plain}
    with pytest.raises(BadInput, match=sentence):
        config_from_plain(plain)


def test_files_of_scmp_llm_are_told_from_none():
    with pytest.raises(BadInput, match="it is scmp_llm's: convert the wrapper with fewbits sc bundle"):
        config_from_plain({"stoc_len_levels": [64], "type": "AdaptiveMPConfig"})
    with pytest.raises(BadInput, match="lacks the field fewbits_stochastic; write one with"):
        config_from_plain({"type": "another"})


def test_a_pattern_that_stands_twice_is_written_as_it_decides():
    first, second = LinearSetting(lengths=((16,),)), LinearSetting(lengths=((64,),))
    config = StochasticConfig(
        linears=(("a.q", first), ("b.*", second), ("a.q", second)),
        attention=(("a", AttentionSetting(scores=8)), ("a", AttentionSetting(scores=9))),
    )
    back = config_from_plain(config_to_plain(config))
    assert back.linear("a.q") == first and back.attention_of("a").scores == 8
    assert [name for name, _ in back.linears] == ["a.q", "b.*"]


@pytest.mark.parametrize("text", ["a: [", "{", "\x00"])
def test_a_file_that_is_neither(tmp_path, text):
    for name in ("sc.yaml", "sc.json"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=rf"{name}.*(cannot be read|no stochastic configuration)"):
            read_config(tmp_path / name)
